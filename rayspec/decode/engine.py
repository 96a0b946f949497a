"""The engine: continuous batching of requests through rounds of draft, verify, accept, commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.cohorts import Cohorts
from rayspec.decode.progress import Progress
from rayspec.decode.requests import Requests, Vocabulary
from rayspec.decode.round_planner import RoundPlanner
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.selection.base import Selector
from rayspec.decode.stages import StageLostError, Stages, StagesReplacedError
from rayspec.decode.unread import UnreadOutput
from rayspec.generation import GenerationDefaults
from rayspec.planning.latency import LatencyModel
from rayspec.types import EngineLoad, EngineStats, Request, RequestOutput


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds requests and calls `step` until all are finished."""

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

    @property
    def defaults(self) -> GenerationDefaults:
        """The checkpoint's defaults of sampling parameters."""
        return self.vocabulary.defaults

    def replace_selector(self, selector: Selector) -> Selector:
        """Set the selector that chooses plans from now on, and return the previous selector. Only allowed while no
        request is unfinished."""
        assert not self.has_unfinished, "plans are chosen for what is under way"
        previous, self._planner.selector = self._planner.selector, selector
        return previous

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or work of an aborted request is still under way."""
        return bool(self._requests) or not self._cohorts.is_idle

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> EngineLoad:
        """Current load of the engine. Any thread may read it."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used_tokens=scheduler.num_used_slots,
            kv_total_tokens=scheduler.num_slots,
        )

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""
        return self.stages.progress

    @property
    def num_wanted(self) -> int:
        """Number of requests that keeps the engine busy."""
        return 2 * self.config.max_num_seqs

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if its id is in use, if the prompt is invalid, empty or too long, has
        tokens outside the vocabulary, or cannot fit into the KV cache."""
        live = self._requests.admit(request)
        for sequence in live.sequences:
            self._cohorts.add(sequence)
        self._requests.add(live)
        self.stats.num_prompt_tokens += len(live.prompt_token_ids)

    def abort(self, request_id: str) -> UnreadOutput | None:
        """End a request now and free its resources. Return its output so far, or None for an unknown id."""
        if request_id not in self._requests:
            return None
        live = self._requests[request_id]
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self._cohorts.retire(sequence)
        return self._requests.finish(live)

    def abort_all(self) -> list[RequestOutput]:
        """Abort all requests and return their outputs so far."""
        return [output.read() for name in self._requests.ids if (output := self.abort(name)) is not None]

    def step(self) -> list[RequestOutput]:
        """Call `advance` and decode the texts of its outputs."""
        return [output.read() for output in self.advance()]

    def advance(self) -> list[UnreadOutput]:
        """Start every cohort that has no work under way, wait until some work is done, and commit it. Return the
        outputs of finished requests and the new output of streaming requests. If the model is lost for good, every
        request finishes with StageLostError."""
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
        """Return a future that is done when the stages have answered. While work is under way it is done at once,
        because the work itself detects a lost stage. It fails with StageLostError if a stage is lost for good."""
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
        """Abort all requests and shut the stages down."""
        try:
            self.abort_all()
        finally:
            self.stages.shutdown()
