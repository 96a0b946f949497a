"""The status of each replica, which /status lists, and the watch, which kills replicas that neither answer nor end.
Serve would wait for their requests. It also kills replicas whose engine has ended, sooner than Serve would."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import RequestRouter

import rayspec
from rayspec.choices import Choice
from rayspec.pool.stopped import Place, ProcessStoppedError, answer_of
from rayspec.types import EngineStats, PlanRecord

if TYPE_CHECKING:
    from rayspec.llm import Client

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
_STATUS_TIMEOUT_S = 2.0
_FRESH_S = 0.5
_WINDOW_S = 10.0
_MOST_STARTING_S = 600.0  # for so long, requests wait for a model of which no replica runs
_SILENT_S = 6.0  # with 15 busy processes on two cores, an answer took up to 4.3 s

# Serve makes the routers itself, by the name of their class, and gives no access to them. So they register here.
_routers: weakref.WeakSet[RequestRouter] = weakref.WeakSet()
_routers_lock = threading.Lock()

EngineHealth = Literal["ready", "recovering", "engine dead", "stuck"]
"""recovering: lost shards are being replaced, and requests wait. stuck: see `decode/stages.py`."""


class RecentRates:
    """Computes rates over the last ten seconds, from samples of an engine's counters."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, EngineStats]] = deque()

    def add(self, stats: EngineStats, time_s: float) -> None:
        """Add a sample. time_s: of a monotonic clock."""
        self._counts.append((time_s, copy.copy(stats)))
        while time_s - self._counts[0][0] > _WINDOW_S:
            self._counts.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Rate of generated tokens over all sequences. Idle time at the beginning of the window does not count."""
        busy = [one for _, one in self._counts if one.num_generated_tokens > self._counts[0][1].num_generated_tokens]
        if not busy:
            return 0.0
        (begin_s, begin), (end_s, end) = self._counts[len(self._counts) - len(busy) - 1], self._counts[-1]
        return (end.num_generated_tokens - begin.num_generated_tokens) / (end_s - begin_s)

    @property
    def grown(self) -> EngineStats:
        if not self._counts:
            return EngineStats()
        first, last = self._counts[0][1], self._counts[-1][1]
        names = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
        return EngineStats(**{name: getattr(last, name) - getattr(first, name) for name in names})


class PlanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A PlanRecord as JSON. choices: how the draft runs each sublayer. Rates are tokens per second of a sequence."""

    choices: list[Choice]
    num_draft_tokens: int
    source: str
    reason: str
    estimated_acceptance: float
    predicted_tpt: float
    plain_tpt: float

    @classmethod
    def of(cls, record: PlanRecord) -> PlanStatus:
        found: dict[str, Any] = {name: getattr(record, name) for name in cls.__struct_fields__ if hasattr(record, name)}
        plan = record.plan
        found |= {"num_draft_tokens": plan.num_draft_tokens, "source": plan.source}
        return cls(choices=list(plan.choices), **found)


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at this moment. num_running, num_waiting: sequences. num_generated_tokens: total since the start.
    tokens_per_s, acceptance_rate, mean_accepted_length: over the last seconds. speed_up: over plain decoding, see
    EngineStats. plan: the current plan, None before the first."""

    model: str
    num_sublayers: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    num_generated_tokens: int
    tokens_per_s: float
    acceptance_rate: float | None
    mean_accepted_length: float | None
    speed_up: float | None
    gate_reason: str
    plan: PlanStatus | None
    health: EngineHealth
    version: str

    @classmethod
    def of(
        cls, model: str, client: Client, rates: RecentRates, num_sublayers: int, health: EngineHealth
    ) -> ModelStatus:
        stats, grown = client.stats, rates.grown
        return cls(
            model=model,
            num_sublayers=num_sublayers,
            **asdict(client.load),
            num_generated_tokens=stats.num_generated_tokens,
            tokens_per_s=rates.tokens_per_s,
            acceptance_rate=grown.acceptance_rate,
            mean_accepted_length=grown.mean_accepted_length,
            speed_up=stats.speed_up,
            gate_reason=stats.gate_reason,
            plan=PlanStatus.of(stats.plans[-1]) if stats.plans else None,
            health=health,
            version=rayspec.__version__,
        )


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's answer to the watch. place: where its process runs. problem: why its engine is stuck, None if not."""

    status: ModelStatus
    place: Place
    problem: str | None


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /status."""

    models: list[ModelStatus]


Health = Literal["unknown", "starting", "no answer"] | EngineHealth
_SERVING: frozenset[Health] = frozenset({"unknown", "ready", "recovering", "no answer"})


@dataclass(slots=True)
class WatchedReplica:
    """A replica to which requests go. report: the newest, None before the first. has_ended: its actor has ended.
    is_stopped: its node says that its process is stopped. asked: the question for the next report."""

    actor: Any
    silent_s: float = 0.0
    report: ReplicaReport | None = None
    has_ended: bool = False
    is_stopped: bool = False
    asked: asyncio.Task[None] | None = None

    @property
    def health(self) -> Health:
        if self.has_ended:
            return "starting"
        if self.silent_s > _SILENT_S:
            return "no answer"
        return "unknown" if self.report is None else self.report.status.health

    def fault(self, timeout_s: float) -> str | None:
        """Return why the replica must be killed; None if it need not."""
        if self.is_stopped:
            return "its process is stopped (SIGSTOP)"
        if self.health == "engine dead":  # it answers sooner than the others, so Serve sends it most requests
            return "its engine has ended"
        if self.silent_s > timeout_s:
            return f"its process has not answered for {self.silent_s:.0f} s (replica_timeout_s)"
        problem = self.report.problem if self.report is not None else None
        return f"its engine {problem} (engine_timeout_s)" if problem is not None else None

    def answered(self, report: ReplicaReport | None) -> None:
        """report: None: the actor has ended."""
        self.report, self.silent_s, self.has_ended, self.is_stopped = report, 0.0, report is None, False

    async def ask(self) -> None:
        place = None if self.report is None else self.report.place
        try:
            self.answered(await answer_of(place, self.actor.record_routing_stats.remote()))
        except RayError:
            self.answered(None)
        except ProcessStoppedError:
            self.is_stopped = True
        finally:
            self.asked = None


class Watch:
    """Watches the replicas of all models (Serve's handles). A replica that is silent for `replica_timeout_s` is killed;
    one that is stopped, or whose engine is stuck or has ended, at once. A machine's sleep is no silence. may_be_absent:
    models that scale to zero. looked: called whenever the replicas are known anew."""

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        replica_timeout_s: float,
        may_be_absent: Collection[str] = (),
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._models, self._timeout_s, self._looked = dict(models), replica_timeout_s, looked
        self._may_be_absent = set(may_be_absent)
        self.replicas: dict[str, dict[str, WatchedReplica]] = {}  # by model, without models that are not known
        self._ill_since_s: dict[str, float | None] = {}  # None: healthy. Without models that were never healthy
        self._starting_until_s = dict.fromkeys(self._models, time.monotonic() + _MOST_STARTING_S)
        self._serve_status: asyncio.Future[Any] | None = None  # one question at a time: a thread waits for the answer

    def can_serve(self, model: str) -> bool:
        """Return whether a request would reach an engine, now or after a wait. True while Serve starts replicas of a
        model that has none, as after a crash or a change of options, unless they fail to start or take more than ten
        minutes."""
        healths = {one.health for one in self.replicas.get(model, {}).values()}
        may_start = model in self._may_be_absent or time.monotonic() < self._starting_until_s.get(model, 0.0)
        return may_start or not _SERVING.isdisjoint(healths)

    def must_wait(self, model: str) -> bool:
        """Return whether no replica takes requests now, as far as is known. A call would fail or, unless it makes Serve
        start a replica, wait without limit."""
        names, known = self._names(model), self.replicas.get(model, {})
        if not names:
            return model not in self._may_be_absent
        return all(name in known and known[name].health not in _SERVING for name in names)

    def is_absent(self, model: str) -> bool:
        """Return whether Serve has no replica of the model at this moment."""
        return not self._names(model)

    def _names(self, model: str) -> set[str]:
        handle = self._models[model]
        return replicas_of(handle.app_name, handle.deployment_name)

    def num_running(self, model: str) -> int:
        """Return the number of replicas to which requests go now."""
        return sum(not one.has_ended for one in self.replicas.get(model, {}).values())

    def problem(self, model: str) -> str | None:
        """Return a model's problems; None without any. A starting replica is no problem while another is ready."""
        healths = {one.health for one in self.replicas.get(model, {}).values()}
        if not healths and model in self._may_be_absent:
            return None
        ill = sorted(healths - {"unknown", "starting", "ready"})
        return ", ".join(ill) or (None if "ready" in healths else "starting")

    @property
    def known_problems(self) -> list[str]:
        found = [(model, self.problem(model)) for model in self._models]
        return [f"{model}: {problem}" for model, problem in found if problem is not None]

    async def problems(self) -> list[str]:
        """Return the present problems soon, even if replicas are silent."""
        await self._answering(_FRESH_S)
        return self.known_problems + await self._failing_starts()

    async def _failing_starts(self) -> list[str]:
        """Return the problems of models that may be absent, and whose replicas fail to start, as Serve knows."""
        known = await self._in_serve([model for model in self._may_be_absent if self.is_absent(model)])
        failing = [model for model, one in known.items() if one.status_trigger == "REPLICA_STARTUP_FAILED"]
        return [f"{model}: its replicas fail to start" for model in failing]

    async def ask_serve(self) -> None:
        """Find out whether Serve starts the models that have no replica now, or has failed to."""
        absent = [one for one in self._models if one not in self._may_be_absent and not self.num_running(one)]
        for model, one in (await self._in_serve(absent)).items():
            if one.status == "HEALTHY" and not any(one.replica_states.values()):
                self._may_be_absent.add(model)  # by a Serve config file
            elif one.status == "DEPLOY_FAILED" or one.status_trigger == "REPLICA_STARTUP_FAILED":
                self._starting_until_s.pop(model, None)
            else:
                self._starting_until_s.setdefault(model, time.monotonic() + _MOST_STARTING_S)

    async def _in_serve(self, models: Collection[str]) -> dict[str, Any]:
        """Return what Serve knows of the deployments of these models. Empty if it does not answer soon, or without
        Ray, which the question would start."""
        if not models or not ray.is_initialized():
            return {}
        if self._serve_status is None or self._serve_status.done():
            self._serve_status = asyncio.ensure_future(asyncio.to_thread(serve.status))
        asked = self._serve_status
        await asyncio.wait({asked}, timeout=_STATUS_TIMEOUT_S)
        try:
            known = asked.result().applications
        except (RayError, RayServeException, asyncio.InvalidStateError):  # the controller is being replaced
            return {}
        of_all = {(app, name): one for app, status in known.items() for name, one in status.deployments.items()}
        at = {model: (self._models[model].app_name, self._models[model].deployment_name) for model in models}
        return {model: of_all[place] for model, place in at.items() if place in of_all}

    async def statuses(self) -> list[ModelStatus]:
        """Return the current status of each replica that answers within two seconds."""
        answered = await self._answering(_STATUS_TIMEOUT_S)
        return [one.report.status for one in answered if one.report is not None]

    async def keep(self) -> None:
        while True:
            start_s = time.monotonic()
            try:
                await self.look()
                await self.ask_serve()
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                logger.warning("the replicas cannot be watched now: %s", str(error).partition("\n")[0])
            await asyncio.sleep(PERIOD_S)
            self.count_silence(time.monotonic() - start_s)

    def count_silence(self, seconds: float) -> None:
        """Add to the silence of all replicas. The next answer of a replica ends its silence."""
        for replica in (one for replicas in self.replicas.values() for one in replicas.values()):
            replica.silent_s += min(seconds, 2 * PERIOD_S)

    async def look(self) -> None:
        """Ask each replica without a pending question for its report, and kill lost replicas."""
        for model, handle in self._models.items():
            if not handle.is_initialized:
                handle.options()  # from now on Serve tells the handle about replicas
            names, known = self._names(model), self.replicas.get(model, {})
            new = dict[str, WatchedReplica]()
            for name in names - known.keys():
                with suppress(ValueError):  # the actor has ended meanwhile
                    new[name] = WatchedReplica(await asyncio.to_thread(ray.get_actor, name, namespace="serve"))
            found = {name: one for name, one in sorted((known | new).items()) if name in names}
            if found or handle.running_replicas_populated():
                self.replicas[model] = found
                if self.num_running(model):
                    self._starting_until_s[model] = time.monotonic() + _MOST_STARTING_S
            for replica in found.values():
                if replica.asked is None:
                    replica.asked = asyncio.create_task(replica.ask())
                if (fault := replica.fault(self._timeout_s)) is not None:
                    logger.warning("model %r: a replica is killed, because %s; another starts", model, fault)
                    replica.answered(None)
                    ray.kill(replica.actor, no_restart=True)
            self._log_problem(model)
        self._looked()

    def _log_problem(self, model: str) -> None:
        """Log one line for a model that has a new problem after it was healthy, or that has recovered."""
        problem, now_s = self.problem(model), time.monotonic()
        since_s = self._ill_since_s.get(model, now_s)
        if problem is None:
            if since_s is not None and model in self._ill_since_s:
                logger.warning("model %r: ready after %.1f s", model, now_s - since_s)
            self._ill_since_s[model] = None
        elif since_s is None:
            self._ill_since_s[model] = now_s
            logger.warning("model %r: %s", model, problem)

    async def _answering(self, timeout_s: float) -> list[WatchedReplica]:
        """Look, wait for the answers for some time, and return the replicas that have answered."""
        await self.look()
        replicas = [one for model in self._models for one in self.replicas.get(model, {}).values()]
        asked = [(one, one.asked) for one in replicas if one.asked is not None]
        if asked:
            await asyncio.wait([task for _, task in asked], timeout=timeout_s)
        return [one for one, task in asked if task.done()]


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
