from __future__ import annotations

from pathlib import Path

from benchmarks.device.predictions import predictions_page
from benchmarks.roofline import SHAPES

ROOT = Path(__file__).parent.parent.parent.parent
LLAMA = SHAPES["Llama-3.1-8B"]


def test_the_page_of_predictions_is_what_the_module_prints() -> None:
    page = (ROOT / "docs" / "gpu_predictions.md").read_text(encoding="utf-8")
    assert page == predictions_page(), "print it again: python -m benchmarks.device.predictions"
    assert "No GPU has run this" in page
