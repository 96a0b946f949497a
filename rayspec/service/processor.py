"""Batch generation as an operator on a Ray Dataset, in the conventions of `ray.data.llm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray.data
from jinja2 import TemplateError
from pydantic import Field
from ray.exceptions import RayActorError
from typing_extensions import Self

from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.service.async_engine import AsyncEngine
from rayspec.service.engine_actor import Handler, call, start_engine
from rayspec.service.plain_values import plain_values
from rayspec.service.settings import Settings
from rayspec.types import RayspecError, RequestError, RequestMetrics, RequestOutput

ERROR_COLUMN = "__inference_error__"
_CLIENT_CPUS = 0.0  # it only waits; and on one CPU there must be a whole one for Ray Data's own tasks

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]


class ProcessorConfig(Options):
    """A model and how a dataset is streamed through it.

    engine_kwargs: options of `EngineConfig`, `parallel` and `speculation` among them. concurrency: replicas of the
    engine. batch_size: rows that a client carries at a time; the engine batches as it sees fit, whatever this is.
    should_continue_on_error: a row at fault gets its error in `__inference_error__`; if False, it fails the job.
    """

    model_source: str
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    batch_size: int = Field(8, ge=1)
    concurrency: int = Field(1, ge=1)
    max_concurrent_batches: int = Field(8, ge=1, description="batches under way for the engine")
    should_continue_on_error: bool = True

    @property
    def engine(self) -> EngineConfig:
        """Raises ConfigError."""
        config = EngineConfig(**({"model": self.model_source} | self.engine_kwargs))
        if self.concurrency == 1:
            return config
        parallel = config.parallel or ParallelOptions()
        return config.replace(parallel=parallel.replace(replicas=self.concurrency))


def build_processor(
    config: ProcessorConfig, preprocess: RowFunction | None = None, postprocess: RowFunction | None = None
) -> Processor:
    """An operator that completes the rows of a dataset.

    preprocess: what it returns is merged over the row; the row then has `messages`, `prompt` or `tokenized_prompt`, and
    may have `sampling_params` (a dict with the names of SamplingParams). postprocess: makes the output row of a row
    that succeeded, which by then also has `generated_text`, `generated_tokens`, `num_input_tokens`,
    `num_generated_tokens`, `finish_reason`, `params`, `request_id`, `metrics` and `__inference_error__` ("" or
    "Kind: message"); without it all columns stay. Rows at fault bypass it. Raises ConfigError.
    """
    return Processor(config, preprocess, postprocess)


class Processor:
    """Callable on datasets; what it returns is lazy. The engine starts with the first call, outside Ray Data's own
    placement, serves all datasets, and ends with `shutdown` or the driver."""

    def __init__(
        self, config: ProcessorConfig, preprocess: RowFunction | None, postprocess: RowFunction | None
    ) -> None:
        self._config = config
        self._recipe = RowTask(settings=Settings(engine=config.engine, sampling=SamplingParams()))
        self._functions = RowFunctions(preprocess, postprocess, config.should_continue_on_error)
        self._engine: Any = None

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Raises CheckpointError and PlacementError when the engine cannot be started."""
        if self._engine is None:
            engine = start_engine(self._recipe)
            call(engine.load.remote())
            self._engine = engine
        in_flight = self._config.max_concurrent_batches
        pool = ray.data.ActorPoolStrategy(
            size=1, max_tasks_in_flight_per_actor=in_flight, max_concurrent_calls_per_actor=in_flight
        )
        blocks = dataset.repartition(target_num_rows_per_block=self._config.batch_size)
        client: Any = RowClient  # Ray's annotations do not know of async classes
        return blocks.map(
            client, fn_constructor_args=[self._engine, self._functions], compute=pool, num_cpus=_CLIENT_CPUS
        )

    def shutdown(self) -> None:
        """End the engine. More than once is fine."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            call(engine.stop.remote())
            ray.kill(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


@dataclass(frozen=True, slots=True)
class RowFunctions:
    """The user's functions, and what becomes of a row on which they or the engine fail."""

    preprocess: RowFunction | None
    postprocess: RowFunction | None
    should_continue: bool


class RowClient:
    """Carries rows to the engine's actor and back, inside Ray Data."""

    def __init__(self, engine: Any, functions: RowFunctions) -> None:
        self._engine = engine
        self._functions = functions

    async def __call__(self, row: Row) -> Row:
        try:
            return await self._complete(row)
        except (EngineDeadError, RayActorError):
            raise
        except Exception as error:
            if not self._functions.should_continue:
                raise
            return row | {ERROR_COLUMN: f"{type(error).__name__}: {error}"}

    async def _complete(self, row: Row) -> Row:
        functions = self._functions
        ready = row | (functions.preprocess(dict(row)) if functions.preprocess else {})
        done: Row = ready | await self._engine.handle.remote(plain_values(ready))
        if not done[ERROR_COLUMN]:
            return functions.postprocess(done) if functions.postprocess else done
        if not functions.should_continue:
            raise RequestError(done[ERROR_COLUMN])
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask:
    """What the engine does with a prepared row."""

    settings: Settings

    def handler(self, engine: AsyncEngine) -> Handler:
        async def complete(row: Mapping[str, Any]) -> Row:
            try:
                params = self.settings.sampling.replace(**(row.get("sampling_params") or {}))
                output = await engine.run(_prompt_tokens(engine, row), params)
            except (RequestError, TemplateError, ValueError, TypeError) as error:
                return _columns_of_error(error)
            return _columns(output, params)

        return complete


def _prompt_tokens(engine: AsyncEngine, row: Mapping[str, Any]) -> list[int]:
    """Raises RequestError for a row without a prompt."""
    if row.get("tokenized_prompt") is not None:
        return [int(token) for token in row["tokenized_prompt"]]
    prompt = row.get("messages") if row.get("messages") is not None else row.get("prompt")
    if prompt is None:
        raise RequestError("the row has none of 'messages', 'prompt', 'tokenized_prompt': let preprocess add one")
    return engine.tokens(prompt)


def _columns(output: RequestOutput, params: SamplingParams) -> Row:
    """Of the first completion; with n > 1 the others are in `generated_texts`."""
    texts = [one.text for one in output.outputs]
    first = output.outputs[0] if output.outputs else None
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_input_tokens": len(output.prompt_token_ids),
        "generated_tokens": list(first.token_ids) if first else [],
        "generated_text": texts[0] if texts else "",
        "num_generated_tokens": sum(len(one.token_ids) for one in output.outputs),
        "finish_reason": first.finish_reason if first else None,
        "params": params.model_dump_json(exclude_defaults=True),
        "metrics": _metrics(output.metrics),
        ERROR_COLUMN: _text_of(output.error),
    } | ({"generated_texts": texts} if params.n > 1 else {})


def _metrics(metrics: RequestMetrics) -> dict[str, float | int | None]:
    first, finished = metrics.first_token_s, metrics.finished_s
    return {
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "acceptance_rate": metrics.acceptance_rate,
        "time_to_first_token_s": first - metrics.arrival_s if first is not None else None,
        "latency_s": finished - metrics.arrival_s if finished is not None else None,
    }


def _columns_of_error(error: Exception) -> Row:
    return {"generated_text": "", "num_input_tokens": 0, "num_generated_tokens": 0, ERROR_COLUMN: _text_of(error)}


def _text_of(error: Exception | None) -> str:
    if error is None:
        return ""
    kind = error.kind if isinstance(error, RayspecError) else type(error).__name__
    return f"{kind}: {error}"
