"""The engine: continuous batching of requests through rounds of draft, verify, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.cohorts import Cohorts
from rayspec.decode.requests import Requests, Vocabulary
from rayspec.decode.round_planner import RoundPlanner
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.selection.base import Selector
from rayspec.decode.stages import StageLostError, Stages, StagesReplacedError
from rayspec.decode.unread import UnreadOutput
from rayspec.planning.latency import LatencyModel
from rayspec.types import EngineLoad, EngineStats, Request, RequestOutput


class Engine:
    """Not thread-safe: one thread adds requests and calls `step` until nothing is unfinished."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        stages: Stages,
        scheduler: Scheduler,
        selector: Selector,
        vocabulary: Vocabulary,
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        latency: LatencyModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self.latency = latency
        self.max_model_len = max_model_len
        self.stages = stages
        self.vocabulary = vocabulary
        self._clock = clock
        self._scheduler = scheduler
        self._requests = Requests(
            vocabulary=vocabulary,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            fits=scheduler.fits,
            clock=clock,
        )
        self._planner = RoundPlanner(
            selector,
            options=config.speculation,
            num_tap_tokens=config.num_tap_tokens,
            stages=stages,
            scheduler=scheduler,
            stats=self.stats,
            clock=clock,
        )
        self._cohorts = Cohorts(
            stages=stages,
            scheduler=scheduler,
            planner=self._planner,
            stats=self.stats,
            clock=clock,
            may_mix=not config.deterministic,
        )

    def replace_selector(self, selector: Selector) -> Selector:
        """Who chooses plans from now on; returns who did. Only while nothing is unfinished."""
        assert not self.has_unfinished, "plans are chosen for what is under way"
        previous, self._planner.selector = self._planner.selector, selector
        return previous

    @property
    def has_unfinished(self) -> bool:
        """Requests to finish, or work of aborted ones to come back."""
        return bool(self._requests) or not self._cohorts.is_idle

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> EngineLoad:
        """May be asked from any thread."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.num_used_slots,
            kv_total_tokens=scheduler.num_slots,
        )

    @property
    def num_wanted(self) -> int:
        """Requests that keep it busy."""
        return 2 * self.config.max_num_seqs

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError: the prompt is not one, empty, too long, or has foreign tokens."""
        live = self._requests.admit(request)
        for sequence in live.sequences:
            self._cohorts.add(sequence)
        self._requests.add(live)
        self.stats.num_prompt_tokens += len(live.prompt_token_ids)

    def abort(self, request_id: str) -> UnreadOutput | None:
        """End a request now and free what it holds; returns what it had become, or None when it is not here."""
        if request_id not in self._requests:
            return None
        live = self._requests[request_id]
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self._cohorts.retire(sequence)
        return self._requests.finish(live)

    def abort_all(self) -> list[RequestOutput]:
        """`abort` for every request."""
        return [output.read() for name in self._requests.ids if (output := self.abort(name)) is not None]

    def step(self) -> list[RequestOutput]:
        """`advance`, and make the texts."""
        return [output.read() for output in self.advance()]

    def advance(self) -> list[UnreadOutput]:
        """Start every cohort that is at rest, wait until something is done, commit it; returns the requests that
        finished, and of those that stream what is new. When the model is lost for good, every request finishes with
        StageLostError."""
        started = self._clock()
        try:
            self._cohorts.start()
            self.stages.wait()
            self._cohorts.commit_done()
        except StagesReplacedError:
            self._cohorts.replay()
        except StageLostError as error:
            self._cohorts.fail_all(error)
        self.stats.total_s += self._clock() - started
        return self._requests.outputs()

    def ping(self) -> Future[None]:
        """Done when the stages have answered; while they work, the work is the answer. Fails with StageLostError when
        they are lost for good."""
        answered: Future[None] = Future()
        try:
            if self._cohorts.is_idle:
                self.stages.check()
        except StagesReplacedError:
            self._cohorts.replay()
        except StageLostError as error:
            answered.set_exception(error)
            return answered
        answered.set_result(None)
        return answered

    def shutdown(self) -> None:
        """Abort everything and let the stages go."""
        try:
            self.abort_all()
        finally:
            self.stages.shutdown()
