"""A replica of a model, which owns an engine. A plain class; `app.py` makes it a deployment."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rayspec.command.terminal import load_llm
from rayspec.decode.drafting.lookup import OwnedText
from rayspec.decode.engine import Engine
from rayspec.llm import AsyncEngine
from rayspec.machine import keep_loaded, switch_threads_often
from rayspec.model.weights import load_config, num_layers
from rayspec.openai.answer import LOGPROBS_AT_ONCE, respond, stream
from rayspec.openai.batch import BatchLine, BatchResult, answer
from rayspec.openai.places import Places
from rayspec.openai.protocol import INTERNAL, ApiError, StrictBody, size_of
from rayspec.openai.requests import MAX_N, Request
from rayspec.openai.responses import ModelCard, Response, json_body
from rayspec.openai.tokenizing import DetokenizeRequest, TokenizeRequest, in_thread_if_large
from rayspec.pool.stopped import Place
from rayspec.ray_session import forget_reserved_threads
from rayspec.serve.metrics import EngineMetrics, ray_recorder
from rayspec.serve.options import LLMConfig
from rayspec.serve.watch import EngineHealth, ModelStatus, RecentRates, ReplicaReport, replicas_of
from rayspec.types import RayspecError, RequestError

_SAMPLES_PER_UPDATE = 4  # of the metrics
_PASS_ON_S, _MOST_PASSED = 2.0, 64  # how often texts go to the other replicas, and how many together
_PASSED_S = 10.0  # a replica that has not taken them by then is not waited for

_logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=StrictBody)


class ModelServer:
    """Loads the model on creation, in a running event loop. Errors of requests are returned. engine_timeout_s: the
    `least_s` of `Progress.problem`. Raises ConfigError, CheckpointError, and with shards PlacementError."""

    def __init__(self, config: LLMConfig, *, engine_timeout_s: float) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._served = (config.model_id,)
        self._engine_timeout_s = engine_timeout_s
        self._stream_interval_s = config.experimental_configs.stream_batching_interval_ms / 1000
        forget_reserved_threads()
        try:
            llm = load_llm(config.engine)
        except RayspecError as error:  # the endpoint may be running: then Serve tries again, and only its log says why
            _logger.warning("model %r cannot be loaded: %s", config.model_id, error)
            raise
        keep_loaded()
        switch_threads_often()
        self._metrics: EngineMetrics | None = None
        self._engine = AsyncEngine(llm)
        if config.log_engine_metrics:
            self._metrics = EngineMetrics(ray_recorder(model=self._served[0], replica=_own_id()))
            self._engine = AsyncEngine(llm, self._metrics.request)
        self._num_sublayers = 2 * num_layers(load_config(self._engine.llm.config))
        self._background = Places(config.engine.num_seqs, least=MAX_N)  # sequences, those that wait included
        self._logprobs, self._background_logprobs = Places(LOGPROBS_AT_ONCE), Places(LOGPROBS_AT_ONCE)
        self._place = Place.here()
        self._failure: RayspecError | None = None
        self._problem: str | None = None
        self._rates = RecentRates()
        self._created = int(time.time())
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(work) for work in (self._sample(), self._ping())]
        if config.num_replicas > 1 and self._engine.client.engine is not None:
            self._tasks.append(loop.create_task(self._pass_on(self._engine.client.engine)))

    async def respond(
        self, kind: type[Request], body: bytes, name: str, owner: str = "", client: str = ""
    ) -> bytes | ApiError:
        """Return the whole answer. body: a valid `kind`; parsed here again, because a parsed body of a megabyte takes
        the event loop many times as long to receive. name: end of the answer's id. owner, client: see
        `rayspec.types.Request`."""
        engine = self._engine.owned_by(owner, client)

        async def work() -> Response:
            request, created = await _parsed(kind, body, client), int(time.time())
            limit = self._logprobs
            return await respond(request, engine, self._served, name=name, created=created, logprobs=limit)

        return await _encoded(work(), name)

    async def answer(self, line: BatchLine, batch: str = "") -> BatchResult:
        """Return the result of a line of a batch; interactive requests go first, and batches take turns. Raises
        EngineDeadError and StageLostError if the line has no answer yet."""
        limits: Any = {"background": self._background, "logprobs": self._background_logprobs}
        return await answer(line, self._engine.owned_by("", batch), self._served, **limits)

    async def tokenize(
        self, kind: type[TokenizeRequest | DetokenizeRequest], body: bytes, name: str, client: str = ""
    ) -> bytes | ApiError:
        async def work() -> Any:
            request = await _parsed(kind, body, client)
            answer = partial(request.answer, self._engine, self._served)
            return await in_thread_if_large(answer, request.num_bytes, client)

        return await _encoded(work(), name)

    async def card(self) -> ModelCard:
        return ModelCard(id=self._served[0], created=self._created, max_model_len=self._engine.max_model_len)

    async def stream(
        self, kind: type[Request], body: bytes, name: str, owner: str = "", client: str = ""
    ) -> AsyncGenerator[bytes | ApiError, None]:
        """Yield the answer as server-sent events. An error before the first event is yielded as it is, and ends the
        stream; a later error is an event too. Closing the generator ends the request."""
        events = stream(
            await _parsed(kind, body, client),
            self._engine.owned_by(owner, client),
            self._served,
            name=name,
            created=int(time.time()),
            failure=partial(_failure, name=name),
            interval_s=self._stream_interval_s,
            logprobs=self._logprobs,
        )
        async with aclosing(events):
            yield await _encoded(anext(events), name)
            async for event in events:
                yield event

    async def remember(self, sender: str, vocab_size: int, texts: Sequence[OwnedText]) -> None:
        """Let later texts of the same owners copy these, which another replica has finished. During an update, that may
        have another model."""
        engine = self._engine.client.engine
        if sender != _own_id() and engine is not None and vocab_size == engine.model.vocab_size:
            engine.remember(texts)

    async def check_health(self) -> None:
        """Check the engine for Serve, which ends the replica after several errors in a row. Raises StageLostError and
        EngineDeadError; nothing while lost shards are being replaced, after which the requests continue."""
        if self._failure is not None:
            raise self._failure

    async def record_routing_stats(self) -> ReplicaReport:
        """Return the report at once. Serve runs only methods of this name and `check_health` without a wait behind
        other requests, see `watch.py`."""
        health: EngineHealth = "stuck" if self._problem is not None else "ready"
        health = "engine dead" if self._failure is not None else health
        health = "recovering" if self._engine.client.is_recovering else health
        status = ModelStatus.of(self._served[0], self._engine.client, self._rates, self._num_sublayers, health)
        return ReplicaReport(status=status, place=self._place, problem=self._problem)

    def __del__(self) -> None:
        """Stop the engine. Serve calls this when the requests under way have ended, or their time is up."""
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_engine"):
            self._engine.llm.shutdown()

    async def _ping(self) -> None:
        """Let the engine answer again and again: so an idle pipeline notices a lost stage before the next request."""
        while True:
            try:
                await asyncio.wrap_future(self._engine.client.ping())
            except RayspecError as error:
                self._failure = error
            else:
                self._failure = None
            await asyncio.sleep(0.5)

    async def _pass_on(self, engine: Engine) -> None:
        """Send finished texts to the other replicas again and again."""
        context = serve.get_replica_context()
        peers = serve.get_deployment_handle(context.deployment, context.app_name)
        peers.options()  # from now on Serve tells the handle about replicas
        while True:
            await asyncio.sleep(_PASS_ON_S)
            texts = engine.finished_texts(_MOST_PASSED)
            if texts and len(replicas_of(context.app_name, context.deployment)) > 1:
                sent = peers.broadcast("remember", _own_id(), engine.model.vocab_size, texts)
                with suppress(RayServeException, RayError, TimeoutError):  # nothing is lost but copies
                    await sent.results_async(timeout_s=_PASSED_S, return_exceptions=True)

    async def _sample(self) -> None:
        client = self._engine.client
        for number in itertools.count():
            self._rates.add(client.stats, time.monotonic())
            self._problem = client.progress.problem(self._engine_timeout_s)
            if self._metrics is not None and number % _SAMPLES_PER_UPDATE == 0:
                self._metrics.update(client.stats, client.load, client.stage_use())
            await asyncio.sleep(0.5)


def _own_id() -> str:
    return str(ray.get_runtime_context().get_actor_id())


async def _parsed(kind: type[Body], body: bytes, client: str) -> Body:
    return await in_thread_if_large(lambda: kind.read(body), size_of(body), client)


async def _encoded(work: Awaitable[Any], name: str) -> bytes | ApiError:
    try:
        body = await work
        return body if isinstance(body, bytes) else json_body(body)
    except Exception as error:  # noqa: BLE001 - reported to the client, and logged
        return _failure(error, name)


def _failure(error: Exception, name: str) -> ApiError:
    """Return the error for the client. Log an error that is not the client's fault."""
    if isinstance(error, RequestError):
        return ApiError.of(error)
    _logger.error("request %s failed", name, exc_info=error)
    return ApiError.of(error) if isinstance(error, RayspecError) else INTERNAL
