"""Asking the replicas of a model how they are, past the requests that they have to do.

A call through a Serve handle, `broadcast` included, waits for one of a replica's `max_ongoing_requests` places, so a
busy replica would look dead. Serve's controller asks the replica's actor itself; so does this. It finds the actors by
their names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import list_named_actors

from rayspec.types import RayspecError

_NAMESPACE = "serve"

Health = Literal["ready", "starting", "recovering", "engine dead", "no answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A model's replicas. deployment: its name in the application `app`. timeout_s: for an answer."""

    app: str
    deployment: str
    timeout_s: float

    async def health(self) -> list[Health]:
        """Of each replica there is."""
        return list(await asyncio.gather(*[self._health(actor) for actor in await self._actors()]))

    async def statuses(self) -> list[dict[str, Any]]:
        """Of each replica that answers, a ModelStatus as plain values."""
        asked = [self._ask(actor.record_routing_stats) for actor in await self._actors()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, dict) and answer]

    async def _health(self, actor: Any) -> Health:
        try:
            await self._ask(actor.check_health)
            status = await self._ask(actor.record_routing_stats)
        except asyncio.TimeoutError:
            return "no answer"
        except RayActorError:
            return "starting"  # it has ended, and Serve starts another
        except RayTaskError as error:
            if isinstance(error.cause, asyncio.TimeoutError):
                return "no answer"
            return "engine dead" if isinstance(error.cause, RayspecError) else "starting"
        return "recovering" if status["recovering"] else "ready"

    async def _ask(self, method: Any) -> Any:
        async def answer() -> Any:
            return await method.remote()

        return await asyncio.wait_for(answer(), self.timeout_s)

    async def _actors(self) -> list[Any]:
        return await asyncio.to_thread(self._find)

    def _find(self) -> list[Any]:
        prefix = f"SERVE_REPLICA::{self.app}#{self.deployment}#"
        names = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == _NAMESPACE]
        return [actor for name in sorted(names) if name.startswith(prefix) for actor in _actor(name)]


def _actor(name: str) -> list[Any]:
    """None where it has ended meanwhile."""
    try:
        return [ray.get_actor(name, namespace=_NAMESPACE)]
    except ValueError:
        return []
