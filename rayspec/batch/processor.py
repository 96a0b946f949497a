"""Batch generation as an operator on a Ray Dataset, in the conventions of `ray.data.llm`."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data
from pydantic import Field, model_validator
from ray.exceptions import RayActorError, RayError
from typing_extensions import Self

from rayspec.batch.ray_backend import patient
from rayspec.batch.rows import Handler, RowEngineFactory, RowTask, is_null
from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams, Settings
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.openai.tokenizing import in_thread_if_large
from rayspec.pipeline.placement import errors_of_actor, sized
from rayspec.pool.supervisor import start_supervisor
from rayspec.pool.worker import answer, num_engines, saying_if_late
from rayspec.prompts import parsed_messages, text_tokens, without_nulls
from rayspec.types import ConfigError, RayspecError, RequestError, RequestOutput

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine

ERROR_COLUMN = "__inference_error__"
_PROMPTS = ("tokenized_prompt", "messages", "prompt")  # the first that a row has is used
_ASKED = (*_PROMPTS, "sampling_params")  # what the engine needs of a row
_MAX_ROWS_OF_A_BATCH = 16  # Ray Data gives a client no more rows of one block at a time
_MIN_BATCHES = 8
_COUNTS = dict.fromkeys(("num_draft_tokens", "num_accepted_tokens"), pa.int64())
_NUMBERS = dict.fromkeys(("acceptance_rate", "time_to_first_token_s", "latency_s"), pa.float64())
_TOKENS = pa.list_(pa.int64())
_TYPES = {
    **dict.fromkeys(("request_id", "generated_text", "finish_reason", "params", ERROR_COLUMN), pa.string()),
    **dict.fromkeys(("num_input_tokens", "num_generated_tokens"), pa.int64()),
    **dict.fromkeys(("prompt_token_ids", "generated_tokens"), _TOKENS),
    "metrics": pa.struct(_COUNTS | _NUMBERS),
}
_ADDED = {*_TYPES, "generated_texts"}
_ENGINE_LOST = frozenset({"engine_dead", "stage_lost"})  # kinds of errors that no row causes

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]


class ProcessorConfig(Options):
    """A model and how a dataset is streamed through it.

    engine_kwargs: options of `EngineConfig`, `parallel` and `speculation` among them. concurrency: number of
    engines, or (least, most). Work begins when one engine is up; the others start as the cluster has room for them.
    batch_size: rows that leave the client together; the engine forms batches of its own.
    should_continue_on_error: a row at fault gets its error in `__inference_error__`; if False, it fails the dataset.
    max_engine_restarts: restarts of an engine that died, without a completed row in between, before the dataset fails.
    """

    model_source: str = Field(description="a folder, a hub id such as Qwen/Qwen3-8B, a GGUF file, or 'demo'")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    batch_size: int = Field(8, ge=1)
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int | None = Field(None, ge=1, description="None: as many as keep all replicas busy")
    should_continue_on_error: bool = True
    max_engine_restarts: int = Field(3, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (other := self.engine_kwargs.get("model")) is not None:
            raise ValueError(f"option 'engine_kwargs.model' is {other!r}: name it as model_source")
        least, most = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency, self.concurrency)
        if not 1 <= least <= most:
            raise ValueError(f"option 'concurrency' is {self.concurrency}: give 1 or more engines, or (least, most)")
        return self

    @property
    def engine(self) -> EngineConfig:
        """The engine's options, with the most engines as replicas. Raises ConfigError."""
        config = EngineConfig(**({"model": self.model_source} | self.engine_kwargs))
        most = self.concurrency[1] if isinstance(self.concurrency, tuple) else self.concurrency
        if most == 1:
            return config
        parallel = config.parallel or ParallelOptions()
        return config.replace(parallel=parallel.replace(replicas=most))

    @property
    def num_concurrent_batches(self) -> int:
        """Number of batches under way at the same time. Raises ConfigError."""
        if self.max_concurrent_batches is not None:
            return self.max_concurrent_batches
        config = sized(self.engine) if ray.is_initialized() else self.engine
        num_wanted = 2 * config.num_seqs * num_engines(config)  # as `EngineLoop.num_wanted`
        # A new batch comes when the last row of a batch is done; on average, half of its rows are done before.
        num_rows = (min(self.batch_size, _MAX_ROWS_OF_A_BATCH) + 1) / 2
        return max(_MIN_BATCHES, math.ceil(num_wanted / num_rows))


def build_processor(
    config: ProcessorConfig, preprocess: RowFunction | None = None, postprocess: RowFunction | None = None
) -> Processor:
    """Return an operator that completes the rows of a dataset.

    preprocess: its result is merged into the row, which then has `messages` (also as JSON text), `prompt` or
    `tokenized_prompt`, and may have `sampling_params` (a dict with the names of SamplingParams). postprocess: makes the
    output row from a row that succeeded, which then also has `generated_text`, `generated_tokens`, `num_input_tokens`,
    `num_generated_tokens`, `finish_reason`, `params`, `request_id`, `metrics` and `__inference_error__` ("" or
    "Kind: message"); without it all columns stay. Failed rows bypass postprocess. A dataset with such columns of its
    own, not of an earlier processor, is refused. Raises ConfigError.
    """
    return Processor(config, preprocess, postprocess)


class Processor:
    """An operator to be called on datasets. The dataset that it returns is lazy, and has no limit for the time without
    progress (`execution_no_progress_timeout_s` of Ray Data's context).

    The engine starts with the first call, outside Ray Data's own placement, and serves all datasets. An engine that
    dies is started again. The engine ends with `shutdown`, with the driver, or when neither the processor nor a dataset
    of the processor is left.
    """

    def __init__(
        self, config: ProcessorConfig, preprocess: RowFunction | None, postprocess: RowFunction | None
    ) -> None:
        self._config = config
        self._task: RowTask = PreparedRowTask(settings=Settings(engine=config.engine, sampling=SamplingParams()))
        self._functions = preprocess, postprocess
        self._supervisor: Any = None
        self._starts = _StartLock()

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the completed rows. Raises ConfigError for a dataset with a column of the same name as one that the
        processor adds; CheckpointError, PlacementError, EngineDeadError if no engine starts."""
        schema = dataset.schema(fetch_if_missing=False)
        _check_names(schema.names if schema is not None else ())
        with self._starts.lock:
            if self._supervisor is None:
                self._supervisor = self._started()
        client: Any = RowClient
        num_blocks = self._config.num_concurrent_batches
        return (
            patient(dataset)
            .repartition(target_num_rows_per_block=self._config.batch_size)
            .map(
                client,
                fn_constructor_args=[self._supervisor, *self._functions, self._config.should_continue_on_error],
                compute=ray.data.ActorPoolStrategy(
                    size=1, max_tasks_in_flight_per_actor=num_blocks, max_concurrent_calls_per_actor=num_blocks
                ),
                num_cpus=0.0,  # the client only waits; a machine with one CPU needs all of it for Ray Data's tasks
            )
        )

    def _started(self) -> Any:
        """Return the supervisor of a new engine, which is ready. Raises as a call does."""
        supervisor = start_supervisor(RowEngineFactory(self._task), max_restarts=self._config.max_engine_restarts)
        try:
            with errors_of_actor():
                ray.get(supervisor.begin.remote())
        except BaseException:
            ray.kill(supervisor)
            raise
        return supervisor

    def shutdown(self) -> None:
        """End the engine. Rows that are not done fail. Repeated calls do nothing. Never raises."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or not ray.is_initialized():
            return
        with suppress(RayError):
            ray.get(supervisor.stop.remote(), timeout=15.0)
        with suppress(RayError):
            ray.kill(supervisor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class _StartLock:
    """A lock, of which a copy in another process is a new one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class RowClient:
    """Carries rows to the engine's supervisor and back, inside Ray Data. should_continue: a row on which the user's
    functions or the engine fail gets an error column."""

    def __init__(
        self, supervisor: Any, preprocess: RowFunction | None, postprocess: RowFunction | None, should_continue: bool
    ) -> None:
        self._supervisor = supervisor
        self._preprocess, self._postprocess, self._should_continue = preprocess, postprocess, should_continue
        ray.wait([supervisor.begin.remote()])  # if the engine cannot be started, each row reports why
        late = "no row has come to the engine: tasks before it take long, or wait for a free CPU"
        self._late = ExitStack()  # closed by the first row
        self._late.enter_context(saying_if_late(late))

    async def __call__(self, row: Row) -> Row:
        self._late.close()
        _check_names(row)  # of a dataset whose columns were not known before
        try:
            ready = row | (self._preprocess(dict(row)) if self._preprocess else {})
            # Other columns stay here: images and embeddings may be large.
            asked = {name: plain_values(ready[name]) for name in _ASKED if name in ready}
            try:
                done: Row = await answer(self._supervisor.handle.remote(asked))
            except RayActorError:
                raise EngineDeadError("the processor was shut down before the dataset was done") from None
            if self._postprocess and not done[ERROR_COLUMN]:
                return self._postprocess(ready | done)
        except EngineDeadError:
            raise
        except Exception as error:
            if not self._should_continue:
                raise
            ready, done = row, {ERROR_COLUMN: _text_of(error)}
        if done[ERROR_COLUMN] and not self._should_continue:
            raise RequestError(done[ERROR_COLUMN])
        return ready | (done if self._postprocess else _typed(done))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRowTask:
    """The task of completing rows that `preprocess` has prepared."""

    settings: Settings

    def handler(self, engine: AsyncEngine) -> Handler:
        async def complete(row: Mapping[str, Any]) -> Row:
            try:
                params = _sampling_params(self.settings.sampling, row.get("sampling_params"))
                size = sum(len(str(row.get(name))) for name in ("messages", "prompt"))
                tokens = await in_thread_if_large(partial(_prompt_tokens, engine, row), size)
                output = await engine.run(tokens, params)
            except (RequestError, ConfigError) as error:
                return {
                    "generated_text": "",
                    "num_input_tokens": 0,
                    "num_generated_tokens": 0,
                    ERROR_COLUMN: _text_of(error),
                }
            if output.error is not None and output.error.kind in _ENGINE_LOST:
                raise EngineDeadError(str(output.error))
            return _columns(output, params)

        return complete


def _check_names(columns: Collection[str]) -> None:
    """Raise ConfigError if columns of the user would be replaced. Those of an earlier processor may be."""
    taken = sorted(_ADDED.intersection(columns))
    if taken and ERROR_COLUMN not in columns:
        new = ", ".join(f"{name!r}: 'my_{name}'" for name in taken)
        raise ConfigError(
            f"the dataset has columns of names that the processor adds: give it dataset.rename_columns({{{new}}})"
        )


def _sampling_params(defaults: SamplingParams, asked: Any) -> SamplingParams:
    """Return the parameters of a row. Arrow fills fields that a row does not have with null. Raises ConfigError."""
    asked = None if is_null(asked) else asked
    if not isinstance(asked, Mapping | None):
        raise ConfigError(
            f"column 'sampling_params' is {reprlib.repr(asked)}: give a dict with names of SamplingParams"
        )
    return defaults.replace(**{str(name): value for name, value in without_nulls(asked or {}).items()})


def _prompt_tokens(engine: AsyncEngine, row: Mapping[str, Any]) -> Sequence[int]:
    """Return the prompt tokens of a row, which are not checked if the row has tokens. Raises RequestError."""
    given = {name: row[name] for name in _PROMPTS if not is_null(row.get(name))}
    if "tokenized_prompt" in given:
        tokens = given["tokenized_prompt"]
        if not isinstance(tokens, list):
            raise RequestError(f"column 'tokenized_prompt' is {reprlib.repr(tokens)}: give a list of token ids")
        return tokens
    if "messages" in given:
        return engine.llm.chat_tokens(parsed_messages(given["messages"]))
    if "prompt" in given:
        return text_tokens(given["prompt"], engine.tokenizer)
    raise RequestError("the row has none of 'messages', 'prompt', 'tokenized_prompt': let preprocess add one")


def _columns(output: RequestOutput, params: SamplingParams) -> Row:
    """Return the columns of the first completion; with n > 1, `generated_texts` has the texts of all."""
    texts = [one.text for one in output.outputs]
    first = output.outputs[0] if output.outputs else None
    metrics = output.metrics
    first_token_s, finished_s = (
        seconds - metrics.arrival_s if seconds is not None else None
        for seconds in (metrics.first_token_s, metrics.finished_s)
    )
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_input_tokens": len(output.prompt_token_ids),
        "generated_tokens": list(first.token_ids) if first else [],
        "generated_text": texts[0] if texts else "",
        "num_generated_tokens": sum(len(one.token_ids) for one in output.outputs),
        "finish_reason": first.finish_reason if first else None,
        "params": params.model_dump_json(exclude_defaults=True),
        "metrics": {
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
            "acceptance_rate": metrics.acceptance_rate,
            "time_to_first_token_s": first_token_s,
            "latency_s": finished_s,
        },
        ERROR_COLUMN: _text_of(output.error),
    } | ({"generated_texts": texts} if params.n > 1 else {})


def _typed(done: Row) -> Row:
    """Return the columns with types: files of Ray Data's blocks cannot be read together if a column is all null."""
    return done | {name: pa.scalar(done.get(name), kind) for name, kind in _TYPES.items()}


def _text_of(error: Exception | None) -> str:
    if error is None:
        return ""
    kind = error.kind if isinstance(error, RayspecError) else type(error).__name__
    return f"{kind}: {error}"


def plain_values(value: Any) -> Any:
    """Convert arrays, tensors and their numbers in a nested value to Python's lists and numbers."""
    if hasattr(value, "tolist"):
        plain = value.tolist()
        return plain_values(plain) if isinstance(plain, list) else plain
    if isinstance(value, dict):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value
