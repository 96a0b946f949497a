"""The engine of a pool whose items are requests: `LLM(..., parallel={"replicas": N})`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.stages import StageLostError
from rayspec.local_engine import load_engine
from rayspec.pipeline.loading import load_pipeline
from rayspec.pool.worker import Callback
from rayspec.types import Request, RequestOutput


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
        self.client, self.info = EngineLoop(engine), engine.info

    async def handle(self, item: Request, callback: Callback) -> RequestOutput:
        """Run a request. Raises EngineDeadError, also if shards are lost for good: then another replica is needed."""
        output = await asyncio.wrap_future(self.client.submit(item, callback if item.stream else None))
        if isinstance(output.error, StageLostError):
            raise EngineDeadError(str(output.error))
        return output

    def stop(self) -> None:
        self.client.shutdown()
