"""One engine behind a Ray actor: many clients hand in documents, one loop runs them together."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

import rayspec
from rayspec.config import EngineConfig
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.service.documents import Document, DuplicateCheck
from rayspec.service.loading import load_llm
from rayspec.service.prompts import PromptBuilder, fitting_prompt_tokens
from rayspec.service.results import ResultRow
from rayspec.service.settings import Settings
from rayspec.types import EngineStats, RayspecError, RequestError

_MAX_CONCURRENT_DOCUMENTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is done with every document. `truncate` cuts a document to the context instead of refusing it."""

    settings: Settings
    template: str
    truncate: bool = False


class EngineWorker:
    """Owns a model and the loop that runs it. A plain class: `start_engine` makes it an actor."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._duplicates = DuplicateCheck()
        self._numbers = itertools.count()

    async def load(self) -> dict[str, Any]:
        """Called once, before anything else. Returns all options in force, as a config file has them.

        Raises ConfigError and CheckpointError.
        """
        config = self._task.settings.engine
        if config.parallel is None:
            # Ray sets OMP_NUM_THREADS to the actor's num_cpus, a reservation and not what the engine should use.
            config = config.replace(num_threads=config.num_threads or os.cpu_count() or 1)
        self._llm = load_llm(config)
        self._prompts = make_prompts(self._llm, self._task)
        self._loop = EngineLoop(self._llm.engine)
        return self._task.settings.resolved(self._llm.config)

    async def complete(self, document: Document) -> ResultRow:
        """The document's row; whatever is wrong with the document is in the row. Raises EngineDeadError."""
        document = self._duplicates(document)
        try:
            request = self._prompts.request(str(next(self._numbers)), document)
        except RequestError as error:
            return ResultRow.of_error(document.id, error)
        output = await asyncio.wrap_future(self._loop.submit(request))
        return ResultRow.of_output(document.id, output)

    async def stats(self) -> EngineStats:
        return copy.deepcopy(self._llm.stats)

    async def death(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs."""
        return self._loop.death

    async def process_id(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        self._loop.stop()
        self._llm.shutdown()


def make_prompts(llm: rayspec.LLM, task: Task) -> PromptBuilder:
    params = task.settings.sampling
    room = fitting_prompt_tokens(llm.engine.max_model_len, params) if task.truncate else None
    return PromptBuilder(llm=llm, params=params, template=task.template, max_prompt_tokens=room)


def start_engine(task: Task, *, num_cpus: float = 1.0) -> Any:
    """An actor handle of an EngineWorker. Not restarted when it dies: its callers see the error."""
    options = {
        "num_cpus": num_cpus,
        "num_gpus": 1 if wants_gpu(task.settings.engine) else 0,
        "max_concurrency": _MAX_CONCURRENT_DOCUMENTS,
        "max_restarts": 0,
    }
    return ray.remote(EngineWorker).options(**options).remote(task)


def call(reference: Any) -> Any:
    """`ray.get`, with our own errors as they were raised, without the actor's traceback."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


def death_of(engine: Any) -> EngineDeadError | None:
    """Why an actor's engine has ended; None while it runs."""
    try:
        death: EngineDeadError | None = ray.get(engine.death.remote())
    except RayActorError as error:
        reason = str(error).splitlines()[0]
        return EngineDeadError(f"the engine's process has ended: {reason} Was it killed, or out of memory?")
    return death


def wants_gpu(config: EngineConfig) -> bool:
    """In the engine's own process: shards have GPUs of their own."""
    num_gpus: float = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if config.parallel is not None:
        return False
    return config.device.startswith("cuda") or (config.device == "auto" and num_gpus >= 1)
