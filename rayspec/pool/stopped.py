"""Proof that a process is stopped, as by SIGSTOP: a machine that is only busy gives no such proof."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import Self

from rayspec.types import RayspecError

_DOUBT_AFTER_S = 6.0

T = TypeVar("T")


class ProcessStoppedError(RayspecError):
    """A process is stopped and gives no answer."""

    kind = "process_stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs. node_id: Ray's."""

    node_id: str
    process_id: int

    @classmethod
    def here(cls) -> Self:
        return cls(node_id=str(ray.get_runtime_context().get_node_id()), process_id=os.getpid())


async def answer_of(place: Place | None, question: Awaitable[T]) -> T:
    """Return the answer of a process. While it is silent, ask its node now and then whether it is stopped. place: None:
    not known; then wait as long as it takes. Raises ProcessStoppedError and the errors of the question."""
    answer = asyncio.ensure_future(question)
    try:
        while not (await asyncio.wait({answer}, timeout=_DOUBT_AFTER_S))[0]:
            if place is not None and await is_stopped(place):
                raise ProcessStoppedError("its process is stopped (SIGSTOP)")
        return await answer
    finally:
        answer.cancel()


async def is_stopped(place: Place) -> bool:
    """Return whether the node says so. False if the node does not answer within 10 s."""
    if place.node_id == Place.here().node_id:
        return is_stopped_here(place.process_id)
    on_node = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    try:
        look = ray.remote(is_stopped_here).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
        return bool(await asyncio.wait_for(look.remote(place.process_id), 10.0))
    except (RayError, asyncio.TimeoutError):
        return False


def is_stopped_here(process_id: int) -> bool:
    """Return whether every thread of a process of this machine is stopped or has ended. A debugger stops no process in
    this sense."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{process_id}/task").iterdir()]
    except OSError:  # a thread has just ended
        return False
    states = {stat.rpartition(")")[2].split()[0] for stat in stats}
    return "T" in states and states <= {"T", "X", "Z"}
