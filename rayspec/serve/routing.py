"""How Serve finds a replica for a request: as it does by itself, with more patience."""

from __future__ import annotations

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter


class PatientRouter(PowerOfTwoChoicesRequestRouter):
    """A replica that does not tell in time how much it has to do is left without requests for a while. A step of the
    engine can hold its interpreter for longer than Serve's 0.1 s, and then the engine runs dry while requests wait.
    """

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 10.0
