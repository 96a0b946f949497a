"""The `Stages` of a model that is divided into shards: the engine's end of the pipeline, and its recovery."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from rayspec.choices import Choice
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import StageLostError, Stages, StagesReplacedError, StageUse
from rayspec.decode.work import Move, Prefill, Result, SamplerSpec, TappedToken, Work
from rayspec.errors import TransportError
from rayspec.model.rows import RowSpan
from rayspec.pipeline import messages as wire
from rayspec.pipeline.collective import Rendezvous, node_address
from rayspec.pipeline.coordinator import FORGET
from rayspec.pipeline.placement import Process, ShardEndedError
from rayspec.pipeline.recovery import Pulse, Restarts, Status
from rayspec.pipeline.replica import Replica
from rayspec.pipeline.server import COORDINATOR, ENGINE, stage_name
from rayspec.pipeline.transport import Received, Transport
from rayspec.planning.latency import LatencyModel
from rayspec.types import OutOfMemoryError, RayspecError

logger = logging.getLogger(__name__)

_RESTART_WINDOW_S = 600.0
_POLL_S = 0.1
_CHECK_EVERY_S = 0.25
_LEAST_QUIET_S = 60.0
_NUM_HOPS = 20
_UNUSED = Status("", 0.0, 0)


class RayStages(Stages):
    """A replica's shards as the engine's stages. Only one thread at a time may use them. Shards that die or freeze are
    replaced while the engine waits; the engine then gets StagesReplacedError. A coordinator that dies or freezes is
    replaced while work goes on; until then there are no new plans. Any thread may read `is_recovering`."""

    searches_apart = True

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        options = replica.blueprint.options
        self.num_cohorts = options.num_cohorts
        self.keeps_state = not replica.blueprint.splits
        self.takes_trees = replica.blueprint.splits and not replica.blueprint.config.deterministic
        self.replica = replica
        self._transport = Transport(ENGINE, replica.secret, host=node_address())
        self._work: dict[int, Future[Result]] = {}
        self._searches: dict[int, Future[Answer]] = {}
        self._search_ids = itertools.count(1)
        self._opened: dict[str, SamplerSpec] = {}
        self._closed: list[str] = []
        self._pulse = Pulse(options.heartbeat_timeout_s, time.monotonic)
        self._quiet_s = max(_LEAST_QUIET_S, options.heartbeat_timeout_s)
        self._restarts = Restarts(options.max_restarts, window_s=_RESTART_WINDOW_S)
        self._coordinator_restarts = Restarts(options.max_restarts, window_s=_RESTART_WINDOW_S)
        self._checked_at = 0.0
        self._lost: StageLostError | None = None
        self.link_s: tuple[float, ...] = ()
        self.recovery_s: list[float] = []
        self._introduced: Process | None = None  # the coordinator that all processes know
        self._used: dict[str, Status] = {}
        self._use_asked_at = time.monotonic()
        self._rendezvous: Rendezvous | None = None
        wants_link = options.data_plane == "collective" or (options.data_plane == "auto" and replica.blueprint.num_gpus)
        self._links = options.stages > 1 and bool(wants_link)
        if self._links and replica.stages_share_gpus:
            self._give_up_link("some of them are on the same GPU, which NCCL does not allow")
        if silent := self._connect():
            raise ShardEndedError("; ".join(silent.values()))

    @property
    def num_sublayers(self) -> int:
        return self.replica.spans[-1][1]

    @property
    def _stage_names(self) -> list[str]:
        return [stage_name(stage) for stage in range(self.replica.num_stages)]

    @property
    def ways(self) -> list[Sequence[Choice]]:
        """Choices by which drafts may run each sublayer."""
        return [ways for name in self._stage_names for ways in self.replica.loaded[name].ways]

    def open(self, spec: SamplerSpec) -> None:
        self._require_alive()
        self._opened[spec.sequence_id] = spec

    def close(self, sequence_id: str) -> None:
        if self._opened.pop(sequence_id, None) is None:
            self._closed.append(sequence_id)

    def start(self, work: Work) -> Future[Result]:
        self._require_alive()
        named = [chunk.sequence_id for chunk in work.chunks]
        if not isinstance(work, Prefill):
            named += [entry.sequence_id for entry in work.entries]
        opened = [spec for name in named if (spec := self._opened.pop(name, None)) is not None]
        closed, self._closed = self._closed, []
        future: Future[Result] = Future()
        self._work[work.id] = future
        self._transport.send(stage_name(0), wire.Begin(work=work, opened=opened, closed=closed))
        return future

    def wait(self) -> None:
        self._require_alive()
        timeout_s = _POLL_S if self._work else 0.0
        while (received := self._receive(timeout_s)) is not None:
            self._handle(received)
            timeout_s = 0.0
        self._check()

    def wake(self) -> None:
        self._transport.wake()

    def check(self) -> None:
        self.move(())

    def move(self, moves: Sequence[Move]) -> None:
        """Let every stage move keys and values in its KV cache, and wait until all have done it."""
        self._ask(wire.Moves(moves=moves), wire.Moved)

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        future: Future[Answer] = Future()
        if self._introduced is None:
            future.set_exception(RayspecError("the coordinator is being replaced"))
            return future
        search_id = next(self._search_ids)
        self._searches[search_id] = future
        search = wire.Search(search_id=search_id, tokens=tokens, rows=rows, question=question)
        self._transport.send(COORDINATOR, search)
        return future

    def measure(self) -> LatencyModel:
        """Return the latency model of the whole replica, from measurements of its shards and links. No work may be
        under way. A shard that is lost meanwhile is replaced, and all measure again."""
        while True:
            with suppress(StagesReplacedError):
                return self._measure_once()

    def _measure_once(self) -> LatencyModel:
        """Let machines measure at the same time, and the stages of a machine one after the other."""
        waiting: dict[str, list[str]] = defaultdict(list)
        for name in self._stage_names:
            waiting[self.replica.shards[name].address.rpartition(":")[0]].append(name)
        measured: dict[str, wire.Measured] = {}
        for names in itertools.zip_longest(*waiting.values()):
            measured |= self._ask(wire.Measure(), wire.Measured, list(filter(None, names)))
        hops_s = self.hops_s(torch.zeros(self.replica.blueprint.hidden_size).nbytes)
        self.link_s = tuple(float(np.median(link)) for link in hops_s) or (0.0,)
        by_stage = [measured[name] for name in self._stage_names]
        numbers = [stage for stage, found in enumerate(by_stage) for _ in found.names]
        model = LatencyModel.fit(
            [one for found in by_stage for one in found.measurements],
            [name for found in by_stage for name in found.names],
            devices=[stage_name(stage) for stage in numbers],
            stages=numbers,
            link_s=self.link_s,
            transfer_s=[seconds for found in by_stage for seconds in found.transfer_s],
        )
        rejected_s = sum(found.rejected_s for found in by_stage)
        model = replace(model, overhead_s=model.overhead_s * len(by_stage), rejected_s=rejected_s)
        return replace(model, wake_s=0.0) if self.num_cohorts >= len(by_stage) else model

    def hops_s(self, num_bytes: int) -> list[list[float]]:
        """Return seconds of 20 single hops with `num_bytes`, from each stage to the next and from the last to the
        first; empty for one stage. No work may be under way. A hop is half of a round trip by the clock of one stage,
        because clocks of two machines may differ."""
        names, links = self._stage_names, list[list[float]]()
        state = torch.zeros(num_bytes, dtype=torch.uint8)
        for here, there in zip(names, [*names[1:], names[0]], strict=True) if len(names) > 1 else ():
            route = [*[there, here] * _NUM_HOPS, ENGINE]
            self._transport.send(here, wire.Lap(route=route), [state])
            stamps = self._expect(wire.Lap, [here])[here].stamps[::2]
            links.append([(after - before) / 2 for before, after in itertools.pairwise(stamps)])
        return links

    def usage(self) -> list[StageUse]:
        """Return `recent_use` up to this moment: the stages are asked."""
        for name in self._stage_names:
            self._pulse.statuses[name] = self.replica.shards[name].ask("status").result(self._quiet_s)
        return self.recent_use()

    def recent_use(self) -> list[StageUse]:
        """Return how busy each stage was since the last call, in the order of the stages, as far as is known: this asks
        nobody, and any thread may call it."""
        now, statuses = time.monotonic(), dict(self._pulse.statuses)
        elapsed_s, self._use_asked_at = now - self._use_asked_at, now
        before, self._used = self._used, statuses
        uses = []
        for name in self._stage_names:
            last, first = statuses.get(name, _UNUSED), before.get(name, _UNUSED)
            if last.worked_s < first.worked_s:  # a shard that replaces another begins to count at 0
                first = _UNUSED
            busy_s, num_passes = min(elapsed_s, last.worked_s - first.worked_s), last.num_passes - first.num_passes
            uses.append(StageUse(name=name, busy_s=busy_s, elapsed_s=elapsed_s, num_passes=num_passes))
        return uses

    def shutdown(self) -> None:
        """End the replica's processes. May be called again."""
        if self._lost is None:
            self._lost = StageLostError("the engine was shut down")
        self.replica.close()
        self._transport.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    # --- messages ---

    def _receive(self, timeout_s: float) -> Received | None:
        """Return the next message of this epoch; None if none comes in time. Raises as `_recover` if one was lost."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                received = self._transport.receive(max(0.0, deadline - time.monotonic()))
            except TransportError as error:
                self._recover((), str(error))
            if received is None or received.epoch == self._transport.epoch:
                return received

    def _handle(self, received: Received) -> None:
        sender, message = received.sender, received.message
        match message:
            case wire.Done():
                self._work.pop(message.work_id).set_result(message.result)
            case wire.Failed():
                self._work.pop(message.work_id).set_exception(OutOfMemoryError(message.reason))
            case wire.Searched(search_id=search_id, answer=answer, reason=reason):
                future = self._searches.pop(search_id, None)
                if future is None or not future.set_running_or_notify_cancel():
                    return
                if answer is None:
                    future.set_exception(RayspecError(reason))
                else:
                    future.set_result(answer)
            case wire.Broken() if message.ended:
                self._handle_end(sender, f"{sender} has failed: {message.reason}")
            case wire.Broken():
                self._recover((), f"{sender} has lost touch: {message.reason}")

    def _ask(self, message: wire.Message, answer: type[wire.Message], names: Sequence[str] = ()) -> dict[str, Any]:
        """Send a message to these stages, or to all, and return the answers by name, see `_expect`."""
        self._require_alive()
        for name in names or self._stage_names:
            self._transport.send(name, message)
        return self._expect(answer, names or self._stage_names)

    def _expect(self, kind: type[wire.Message], senders: Collection[str]) -> dict[str, Any]:
        """Return a message of a kind from each of these stages, by name. Other messages are handled meanwhile. Waits as
        long as a shard works. Raises as `_recover` if a shard ends or is stuck, or if an answer is lost."""
        found: dict[str, Any] = {}
        started = time.monotonic()
        while len(found) < len(senders):
            received = self._receive(_POLL_S)
            if received is not None and isinstance(received.message, kind):
                found[received.sender] = received.message
            elif received is not None:
                self._handle(received)
            self._check(listening=True)
            if self._is_quiet_since(started):
                self._recover((), f"no {kind.__name__} came, and no shard has worked for {self._quiet_s:.0f} s")
        return found

    def _is_quiet_since(self, moment: float) -> bool:
        """Return whether no shard has worked for so long since then that no answer is going to come."""
        return time.monotonic() - max(moment, self._pulse.worked_at_s) > self._quiet_s

    # --- recovery ---

    def _require_alive(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _check(self, *, listening: bool = False) -> None:
        """Check all processes, at most every `_CHECK_EVERY_S`. Silence counts only while work is under way or the
        caller is listening for answers. Raises StagesReplacedError, StageLostError."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_EVERY_S:
            return
        self._checked_at = now
        coordinator = self.replica.processes.get(COORDINATOR)
        if coordinator is not None and coordinator is not self._introduced:
            self._introduce("")
        ends = dict(self.replica.ends())
        if listening or self._work:
            ends = self._pulse.deaths(self.replica.processes) | ends
        if COORDINATOR in ends:
            self._handle_end(COORDINATOR, ends.pop(COORDINATOR))
        if ends:
            self._recover(ends, "; ".join(ends.values()))

    def _handle_end(self, name: str, reason: str) -> None:
        if name != COORDINATOR:
            self._recover({name}, reason)
        logger.warning("%s; it is replaced, and plans stay as they are until then", reason)
        self._fail_searches(reason)
        for shard in self.replica.shards:
            self._transport.send(shard, FORGET)
        if self._coordinator_restarts.next_delay_s() is None:
            logger.warning("it has been replaced too often: plans stay as they are for good")
            self.replica.end_coordinator()
        else:
            self.replica.start_coordinator()
        self._introduced = None

    def _introduce(self, link: str) -> None:
        """Let all processes know each other's address."""
        processes = self.replica.processes  # a coordinator may begin to listen at any moment
        peers = {name: process.address for name, process in processes.items()}
        peers[ENGINE] = self._transport.address
        self._transport.connect(peers)
        for name in processes:
            self._transport.send(name, wire.Connect(peers=peers, link=link))
        self._introduced = processes.get(COORDINATOR)

    def _recover(self, names: Collection[str], reason: str) -> NoReturn:
        """Replace shards and begin a new epoch. Always raises: StagesReplacedError, or StageLostError if that fails."""
        started = time.monotonic()
        logger.warning("%s; the replica is brought back", reason)
        self.is_recovering = True
        try:
            self._work.clear()
            self._opened.clear()
            self._closed.clear()
            self._fail_searches(reason)
            while self._lost is None and (delay_s := self._restarts.next_delay_s()) is not None:
                time.sleep(delay_s)
                gone = {*names, *self.replica.ends()} - {COORDINATOR}
                try:
                    self.replica.replace(gone)
                    silent = self._connect()
                except RayspecError as error:
                    logger.warning("it could not be brought back: %s", error)
                    reason, names = f"{reason}; then: {error}", ()
                    continue
                if not silent:
                    self.recovery_s.append(time.monotonic() - started)
                    raise StagesReplacedError(reason)
                reason, names = f"{reason}; then: {'; '.join(silent.values())}", silent
            most = self.replica.blueprint.options.max_restarts
            self._lost = self._lost or StageLostError(f"{reason} (max_restarts is {most})")
            self.replica.close()
            raise self._lost
        finally:
            self.is_recovering = False

    def _connect(self) -> dict[str, str]:
        """Begin a new epoch in which all processes know each other's address. Return the shards that do not answer, and
        why. If the stages have links, begin another epoch when all have ended their work, because they join within
        seconds. If a link cannot be joined, begin one more without a link, and stay without."""
        silent, _ = self._begin_epoch("")
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = None
        if silent or not self._links:
            return silent
        self._rendezvous = Rendezvous(node_address())
        silent, link_error = self._begin_epoch(self._rendezvous.address)
        if link_error and not silent:
            self._give_up_link(link_error)
            return self._connect()
        return silent

    def _begin_epoch(self, link: str) -> tuple[dict[str, str], str]:
        """Return the shards that are dead, or do not answer while none works, with the reasons, and why a link cannot
        be joined. The coordinator is not waited for: it is checked later, while work goes on."""
        self._transport.epoch += 1
        self._introduce(link)
        names, link_error, started = set(self.replica.shards), "", time.monotonic()
        while names and not self._is_quiet_since(started):
            received = self._transport.receive(_POLL_S)
            message = received.message if received is not None else None
            if received is not None and isinstance(message, wire.Connected) and received.epoch == self._transport.epoch:
                names.discard(received.sender)
                link_error = link_error or message.link_error
            ends = {**self._pulse.deaths(self.replica.processes), **self.replica.ends()}
            if dead := {name: why for name, why in ends.items() if name in names}:
                return dead, link_error
        return {name: f"{name} did not answer" for name in sorted(names)}, link_error

    def _give_up_link(self, reason: str) -> None:
        logger.warning("stages exchange tensors through the host, because no link connects them: %s", reason)
        self._links = False

    def _fail_searches(self, reason: str) -> None:
        for future in self._searches.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(RayspecError(reason))
        self._searches.clear()
