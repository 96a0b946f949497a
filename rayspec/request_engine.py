"""The engine of a pool whose items are requests: `LLM(..., parallel={"replicas": N})`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine, EngineInfo
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.progress import Progress
from rayspec.decode.stages import StageLostError
from rayspec.local_engine import load_engine
from rayspec.pipeline.loading import load_pipeline
from rayspec.pool.calls import Callback
from rayspec.types import EngineLoad, EngineStats, Request, RequestOutput


@dataclass(frozen=True, slots=True)
class RequestEngineFactory:
    """Loads the engine of a replica. engine: the options of all replicas."""

    engine: EngineConfig

    def load(self, config: EngineConfig) -> RequestEngine:
        """Load the engine of a replica. Raises ConfigError, CheckpointError, and with shards PlacementError."""
        return RequestEngine(load_engine(config) if config.parallel is None else load_pipeline(config))

    def beginning(self, item: Request) -> str | Sequence[int] | None:
        return item.prompt_token_ids if item.prompt_token_ids is not None else item.prompt


class RequestEngine:
    """An engine and the loop that runs it, in the actor of a replica."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def dtype(self) -> str:
        return self._engine.config.dtype

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    @property
    def progress(self) -> Progress:
        return self._engine.progress

    @property
    def death(self) -> EngineDeadError | None:
        return self._loop.death

    async def handle(self, item: Request, callback: Callback) -> RequestOutput:
        """Run a request. Raises EngineDeadError, also if shards are lost for good: then another replica is needed."""
        output = await asyncio.wrap_future(self._loop.submit(item, callback if item.stream else None))
        if isinstance(output.error, StageLostError):
            raise EngineDeadError(str(output.error))
        return output

    async def ping(self) -> None:
        await asyncio.wrap_future(self._loop.ping())

    def stop(self) -> None:
        self._loop.stop()
        self._engine.shutdown()
