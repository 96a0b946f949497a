"""Watches the replicas of models, and kills replicas that neither answer nor end.

Serve itself gives up a replica after three health checks without an answer, but then waits for its requests. A call
through a Serve handle queues behind the replica's other requests. So the watch calls the replica's actor directly, as
Serve's controller does. `Sightings` decides which replicas to kill; `Watch` calls and kills them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from rayspec.serve.status import EngineHealth

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
_STATUS_TIMEOUT_S = 2.0
_FRESH_S = 0.5
_SILENT_S = 3.0  # a step of the engine can block a replica's interpreter for a while
_NAMESPACE = "serve"

Health = Literal["unknown", "starting"] | EngineHealth


@dataclass(slots=True)
class _Sighting:
    """A replica. status: newest ModelStatus, None before the first. was_there: it was there at the first look."""

    silent_s: float = 0.0
    status: dict[str, Any] | None = None
    was_there: bool = False

    @property
    def health(self) -> Health:
        if self.status is None:
            return "unknown" if self.was_there and self.silent_s <= _SILENT_S else "starting"
        known: EngineHealth = self.status["health"]
        return "no answer" if self.silent_s > _SILENT_S else known


@dataclass(slots=True)
class Sightings:
    """The known state of a model's replicas, by name.

    timeout_s: a replica that has answered before and is then silent for longer is lost. A replica whose engine does not
    answer is lost too. Silence counts only while the watch runs, so that a machine's sleep does not count.
    """

    timeout_s: float
    replicas: dict[str, _Sighting] = field(default_factory=dict)
    looked: bool = False

    def present(self, names: Collection[str]) -> None:
        """Set the replicas that exist now."""
        self.replicas = {name: self.replicas.get(name, _Sighting(was_there=not self.looked)) for name in names}
        self.looked = True

    def answered(self, name: str, status: dict[str, Any]) -> None:
        if name in self.replicas:
            self.replicas[name] = _Sighting(status=status)

    def gone(self, name: str) -> None:
        """Forget a replica's status: its process has ended, or it is not ready yet."""
        if name in self.replicas:
            self.replicas[name] = _Sighting()

    def passed(self, seconds: float) -> None:
        """Add to the silence of all replicas. A later call of `answered` resets the silence of its replica."""
        for sighting in self.replicas.values():
            sighting.silent_s += min(seconds, 2 * PERIOD_S)

    @property
    def lost(self) -> list[str]:
        """Names of the replicas to kill."""
        return [
            name
            for name, one in self.replicas.items()
            if one.status is not None and (one.silent_s > self.timeout_s or one.status["health"] == "no answer")
        ]

    @property
    def healths(self) -> list[Health]:
        return [one.health for one in self.replicas.values()]

    @property
    def can_serve(self) -> bool:
        """Whether a request would reach an engine. True while nothing is known, so that a new ingress does not refuse
        requests that another would serve. While shards are replaced, requests wait and continue afterwards."""
        return not self.looked or any(health in {"unknown", "ready", "recovering"} for health in self.healths)

    @property
    def problem(self) -> str | None:
        """Names of the problems; None without any. A starting replica is no problem while another is ready."""
        ill = sorted({health for health in self.healths if health not in {"unknown", "starting", "ready"}})
        if ill or "ready" not in self.healths:
            return ", ".join(ill) or "starting"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A model's deployment. app: name of its application."""

    model: str
    app: str
    deployment: str

    @property
    def prefix(self) -> str:
        """Prefix of the actor names of the replicas."""
        return f"SERVE_REPLICA::{self.app}#{self.deployment}#"


class Watch:
    """Watches the replicas of all models. replica_timeout_s: `timeout_s` of Sightings."""

    def __init__(
        self, models: Iterable[Watched], *, replica_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = tuple(models)
        self._clock = clock
        self.sightings: Mapping[str, Sightings] = {one.model: Sightings(replica_timeout_s) for one in self._models}
        self._actors: Mapping[str, Any] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._ill_since_s: dict[str, float | None] = {}  # None: healthy. Without models that were never healthy

    @property
    def all_well(self) -> bool:
        """Whether no model has a known problem."""
        return all(sightings.problem is None for sightings in self.sightings.values())

    async def problems(self) -> list[str]:
        """Return one line per model with a problem. Returns soon, even if replicas are silent."""
        await self.look()
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=_FRESH_S)
        found = [(model, sightings.problem) for model, sightings in self.sightings.items()]
        return [f"{model}: {problem}" for model, problem in found if problem is not None]

    async def statuses(self) -> list[dict[str, Any]]:
        """Return the current ModelStatus of each replica that answers within two seconds."""
        await self._find()
        asked = [asyncio.wait_for(_status_of(actor), _STATUS_TIMEOUT_S) for _, actor in sorted(self._actors.items())]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, dict) and answer]

    async def keep(self) -> None:
        """Look at the replicas again and again until cancelled."""
        while True:
            start_s = self._clock()
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                logger.warning("the replicas cannot be watched now: %s", _first_line(error))
            await asyncio.sleep(PERIOD_S)
            for sightings in self.sightings.values():
                sightings.passed(self._clock() - start_s)

    async def look(self) -> None:
        """Ask each replica without a pending question for its status, and kill lost replicas."""
        await self._find()
        for watched in self._models:
            names = [name for name in self._actors if name.startswith(watched.prefix)]
            sightings = self.sightings[watched.model]
            sightings.present(names)
            for name in names:
                if name not in self._asked:
                    self._asked[name] = asyncio.create_task(self._ask(name, self._actors[name], sightings))
            for name in sightings.lost:
                self._replace(watched, name)
        self._tell()

    async def _find(self) -> None:
        prefixes = tuple(one.prefix for one in self._models)
        self._actors = await asyncio.to_thread(_replica_actors, prefixes, self._actors)

    async def _ask(self, name: str, actor: Any, sightings: Sightings) -> None:
        try:
            status = await _status_of(actor)
        except RayError:
            status = {}
        finally:
            self._asked.pop(name, None)
        if status:
            sightings.answered(name, status)
        else:
            sightings.gone(name)

    def _replace(self, watched: Watched, name: str) -> None:
        sightings = self.sightings[watched.model]
        silent_s = sightings.replicas[name].silent_s
        what = f"its process is silent for {silent_s:.0f} s" if silent_s > _SILENT_S else "its engine is stuck"
        logger.warning("model %r: a replica is killed, because %s; another starts", watched.model, what)
        sightings.gone(name)
        ray.kill(self._actors[name], no_restart=True)

    def _tell(self) -> None:
        """Log one line for each model that has a new problem after it was healthy, or that has recovered."""
        for model, sightings in self.sightings.items():
            if sightings.problem is None:
                if (since_s := self._ill_since_s.get(model)) is not None:
                    logger.warning("model %r: ready after %.1f s", model, self._clock() - since_s)
                self._ill_since_s[model] = None
            elif self._ill_since_s.get(model, self._clock()) is None:
                self._ill_since_s[model] = self._clock()
                logger.warning("model %r: %s", model, sightings.problem)


async def _status_of(actor: Any) -> dict[str, Any]:
    """Return the status of a replica; empty before the replica is ready. Raises RayError."""
    status: dict[str, Any] = await actor.record_routing_stats.remote()
    return status


def _replica_actors(prefixes: tuple[str, ...], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return actors by name, for names with these prefixes. known: actors that were found before."""
    names = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == _NAMESPACE]
    found = [(name, known.get(name) or _actor(name)) for name in sorted(names) if name.startswith(prefixes)]
    return {name: actor for name, actor in found if actor is not None}


def _actor(name: str) -> Any:
    """Return the actor with this name; None where it has ended meanwhile."""
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
