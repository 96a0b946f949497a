"""Serve's default choice of a replica for a request, with longer deadlines.

Serve copies this module by value to the processes that use the router, so it holds no state.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from rayspec.serve import reached


class PatientRouter(PowerOfTwoChoicesRequestRouter):
    """Serve sends no requests for a while to a replica that reports its queue length too late. A step of the engine can
    block the interpreter for longer than Serve's default of 0.1 s. Then the engine idles while requests wait.
    """

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **_: Any) -> None:
        reached.add(self)
