"""The kernels run in Triton's interpreter here. Triton asks for this variable when kernels are imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
