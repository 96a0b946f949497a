"""Watches the replicas of models, and kills replicas that neither answer nor end.

Serve itself gives up a replica after three health checks without an answer, but then waits for its requests. A call
through a Serve handle queues behind the replica's other requests. So the watch calls the replica's actor directly, as
Serve's controller does. `Sightings` decides which replicas to kill; `Watch` calls and kills them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.serve.request_router import RequestRouter

from rayspec.pool.stopped import Place, ProcessStoppedError, answer_of
from rayspec.serve.status import EngineHealth

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
_STATUS_TIMEOUT_S = 2.0
_FRESH_S = 0.5
_SILENT_S = 6.0  # with 15 busy processes on two cores, an answer took up to 4.3 s
_NAMESPACE = "serve"

# Serve makes the routers itself, by the name of their class, and gives no access to them. So they register here.
_routers: weakref.WeakSet[RequestRouter] = weakref.WeakSet()
_routers_lock = threading.Lock()

Health = Literal["unknown", "starting", "no answer"] | EngineHealth


@dataclass(slots=True)
class _Sighting:
    """A replica to which requests go. report: its newest ReplicaReport, None before the first. has_ended: its actor has
    ended. is_stopped: its node says that its process is stopped."""

    silent_s: float = 0.0
    report: dict[str, Any] | None = None
    has_ended: bool = False
    is_stopped: bool = False

    @property
    def health(self) -> Health:
        if self.has_ended:
            return "starting"
        if self.silent_s > _SILENT_S:
            return "no answer"
        if self.report is None:
            return "unknown"
        known: EngineHealth = self.report["status"]["health"]
        return known

    @property
    def place(self) -> Place | None:
        return None if self.report is None else Place(**self.report["place"])

    def fault(self, timeout_s: float) -> str | None:
        """Return why the replica must be killed; None if it need not."""
        if self.is_stopped:
            return "its process is stopped (SIGSTOP)"
        if self.silent_s > timeout_s:
            return f"its process has not answered for {self.silent_s:.0f} s (replica_timeout_s)"
        problem = self.report["problem"] if self.report is not None else None
        return f"its engine {problem} (engine_timeout_s)" if problem is not None else None


@dataclass(slots=True)
class Sightings:
    """The known state of a model's replicas, by name.

    timeout_s: a replica that is silent for longer is lost. A replica that is stopped, or whose engine is stuck, is lost
    at once. Silence counts only while the watch runs, so that a machine's sleep does not count.
    """

    timeout_s: float
    replicas: dict[str, _Sighting] = field(default_factory=dict)
    looked: bool = False

    def present(self, names: Collection[str]) -> None:
        """Set the replicas to which requests go now."""
        self.replicas = {name: self.replicas.get(name, _Sighting()) for name in names}
        self.looked = True

    def answered(self, name: str, report: dict[str, Any]) -> None:
        if name in self.replicas:
            self.replicas[name] = _Sighting(report=report)

    def gone(self, name: str) -> None:
        """Record that a replica's process has ended."""
        if name in self.replicas:
            self.replicas[name] = _Sighting(has_ended=True)

    def stopped(self, name: str) -> None:
        """Record that a replica's process is stopped."""
        if name in self.replicas:
            self.replicas[name].is_stopped = True

    def passed(self, seconds: float) -> None:
        """Add to the silence of all replicas. A later call of `answered` resets the silence of its replica."""
        for sighting in self.replicas.values():
            sighting.silent_s += min(seconds, 2 * PERIOD_S)

    @property
    def lost(self) -> dict[str, str]:
        """The replicas to kill, each with the reason."""
        faults = {name: one.fault(self.timeout_s) for name, one in self.replicas.items()}
        return {name: fault for name, fault in faults.items() if fault is not None}

    @property
    def healths(self) -> list[Health]:
        return [one.health for one in self.replicas.values()]

    @property
    def can_serve(self) -> bool:
        """Whether a request would reach an engine. True while nothing is known, so that a new ingress does not refuse
        requests that another would serve. While shards are replaced, requests wait and continue afterwards. So do
        requests to a replica that is only silent: on a busy machine it answers late."""
        waits: set[Health] = {"unknown", "ready", "recovering", "no answer"}
        return not self.looked or not waits.isdisjoint(self.healths)

    @property
    def problem(self) -> str | None:
        """Names of the problems; None without any. A starting replica is no problem while another is ready."""
        ill = sorted({health for health in self.healths if health not in {"unknown", "starting", "ready"}})
        if ill or "ready" not in self.healths:
            return ", ".join(ill) or "starting"
        return None


class Watch:
    """Watches the replicas of all models. models: Serve's handles, by model. replica_timeout_s: `timeout_s` of
    Sightings."""

    def __init__(
        self, models: Mapping[str, Any], *, replica_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = dict(models)
        self._clock = clock
        self.sightings: Mapping[str, Sightings] = {model: Sightings(replica_timeout_s) for model in self._models}
        self._actors: dict[str, dict[str, Any]] = {model: {} for model in self._models}
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
        actors = [actor for model in self._models for _, actor in sorted(self._actors[model].items())]
        asked = [asyncio.wait_for(_report_of(actor), _STATUS_TIMEOUT_S) for actor in actors]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer["status"] for answer in answers if isinstance(answer, dict)]

    async def keep(self) -> None:
        """Look at the replicas again and again until cancelled."""
        while True:
            start_s = self._clock()
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                logger.warning("the replicas cannot be watched now: %s", str(error).partition("\n")[0])
            await asyncio.sleep(PERIOD_S)
            for sightings in self.sightings.values():
                sightings.passed(self._clock() - start_s)

    async def look(self) -> None:
        """Ask each replica without a pending question for its report, and kill lost replicas."""
        await self._find()
        for model, actors in self._actors.items():
            sightings = self.sightings[model]
            if actors or self._models[model].running_replicas_populated():
                sightings.present(actors)
            for name, actor in actors.items():
                if name not in self._asked:
                    place = sightings.replicas[name].place
                    self._asked[name] = asyncio.create_task(self._ask(name, actor, place, sightings))
            for name, reason in sightings.lost.items():
                logger.warning("model %r: a replica is killed, because %s; another starts", model, reason)
                sightings.gone(name)
                ray.kill(actors[name], no_restart=True)
        self._tell()

    async def _find(self) -> None:
        """Find the actors of the replicas to which requests go now."""
        for model, handle in self._models.items():
            if not handle.is_initialized:
                handle.options()  # from now on Serve tells the handle about replicas
            names = sorted(replicas_of(handle.app_name, handle.deployment_name))
            known = self._actors[model]
            found = {name: known.get(name) or await asyncio.to_thread(_actor, name) for name in names}
            self._actors[model] = {name: actor for name, actor in found.items() if actor is not None}

    async def _ask(self, name: str, actor: Any, place: Place | None, sightings: Sightings) -> None:
        try:
            sightings.answered(name, await answer_of(place, _report_of(actor)))
        except RayError:
            sightings.gone(name)
        except ProcessStoppedError:
            sightings.stopped(name)
        finally:
            self._asked.pop(name, None)

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


async def _report_of(actor: Any) -> dict[str, Any]:
    """Return the ReplicaReport of a replica. Raises RayError."""
    report: dict[str, Any] = await actor.record_routing_stats.remote()
    return report


def _actor(name: str) -> Any:
    """Return the actor with this name; None where it has ended meanwhile."""
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return None


def add_router(router: RequestRouter) -> None:
    """Register a router of this process, see `replicas_of`. Any thread may call it."""
    with _routers_lock:
        _routers.add(router)


def replicas_of(app: str, deployment: str) -> set[str]:
    """Return the actor names of a deployment's replicas to which this process sends requests now."""
    with _routers_lock:
        known = [replica for router in _routers for replica in list(router.curr_replicas)]
    return {
        replica.to_full_id_str()
        for replica in known
        if (replica.deployment_id.app_name, replica.deployment_id.name) == (app, deployment)
    }
