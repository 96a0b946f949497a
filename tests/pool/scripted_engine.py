"""Engines that do what an item says.

A module of its own, which their processes import: they have no need of torch and transformers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rayspec.config import EngineConfig
from rayspec.pool.worker import Callback
from rayspec.types import ConfigError


class UnloadableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Brittle:
    """Cannot be restored in the processes `where`: "here" is the one that made it, "there" any other."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.where, os.getpid())


def _restored(where: str, pid: int) -> Brittle:
    if (pid == os.getpid()) == (where == "here"):
        raise ImportError(f"no module {where}")
    return Brittle(where)


@dataclass(frozen=True, slots=True)
class Scripted:
    """Loads an engine that does what an item says."""

    engine: EngineConfig

    def load(self, config: EngineConfig) -> ScriptedEngine:
        return ScriptedEngine()

    def beginning(self, item: Any) -> None: ...


class ScriptedEngine:
    client: Any = SimpleNamespace(
        info=SimpleNamespace(config=SimpleNamespace(dtype="float32")), progress=SimpleNamespace(problem=lambda: None)
    )
    info: Any = None

    def __init__(self) -> None:
        self._cancelled: list[str] = []

    async def handle(self, item: Any, callback: Callback) -> Any:
        match str(item).split():
            case ["return", "lock"]:
                return threading.Lock()
            case ["return", "brittle"]:
                return Brittle("there")
            case ["tell", "lock"]:
                callback(threading.Lock())
                await asyncio.sleep(1000)
            case ["fail", "ours"]:
                raise ConfigError("option 'a' is 1")
            case ["fail", "foreign"]:
                raise UnloadableError(1, 2)
            case ["tell", count]:
                for part in range(int(count)):
                    await asyncio.to_thread(callback, part)
            case ["sleep"]:
                try:
                    await asyncio.sleep(1000)
                finally:
                    self._cancelled.append(item)
            case ["cancelled"]:
                return self._cancelled
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return f"done {item}"

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Unlike(Scripted):
    """Loads as machines of several kinds do: what `auto` takes differs from one engine to the next."""

    notes: Path = Path()

    def load(self, config: EngineConfig) -> ScriptedEngine:
        if config.dtype == "auto":
            with (self.notes / "loads").open("a+", encoding="utf-8") as loads:
                loads.write(".")
                loads.flush()
                config = config.replace(dtype="bfloat16" if loads.tell() == 1 else "float32")
        engine = ScriptedEngine()
        engine.client, engine.info = SimpleNamespace(info=SimpleNamespace(config=config)), config
        return engine
