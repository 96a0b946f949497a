"""A job's task that notes its rows and does harm at a chosen one.

A module of its own, which every process of the job imports: most of these have no need of torch and transformers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayspec.batch.document_task import DocumentTask
from rayspec.batch.rows import Row
from rayspec.command.settings import make_settings
from rayspec.config import SamplingParams, Settings

if TYPE_CHECKING:
    from rayspec.batch.rows import Handler
    from rayspec.llm import AsyncEngine

FAST = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 4}

Deed = Callable[["AsyncEngine"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedTask:
    """A DocumentTask that notes rows in the folder `notes`, and does the deed when so many have ended: once, or with
    every engine. Engines die of the `deadly` rows, whenever they come, and take `load_s` seconds longer to load."""

    task: DocumentTask
    notes: Path
    deed: Deed | None = None
    after: int = 0
    once: bool = True
    deadly: frozenset[str] = frozenset()
    load_s: float = 0.0

    @property
    def settings(self) -> Settings:
        return self.task.settings

    @property
    def identity(self) -> dict[str, Any]:
        return self.task.identity

    def handler(self, engine: AsyncEngine) -> Handler:
        time.sleep(self.load_s)
        handle = self.task.handler(engine)
        self.note("nodes", ray.get_runtime_context().get_node_id())
        num_ended = 0

        async def complete(document: Row) -> Row:
            nonlocal num_ended
            self.note("begun", document.id)
            if document.id in self.deadly:
                await asyncio.sleep(0.2)  # so that others are under way as well
                os._exit(1)
            row: Row = await handle(document)
            self.note("ended", document.id)
            num_ended += 1
            if self.deed is not None and num_ended == self.after and not (self.once and self.read("done")):
                self.note("done", document.id)
                self.deed(engine)
            return row

        return complete

    def note(self, what: str, row_id: str) -> None:
        with (self.notes / what).open("a", encoding="utf-8") as file:
            file.write(f"{row_id}\n")

    def read(self, what: str) -> list[str]:
        """The ids of rows, in their order."""
        path = self.notes / what
        return path.read_text(encoding="utf-8").split() if path.exists() else []


def kill_engine(_engine: AsyncEngine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(process: int, _engine: AsyncEngine) -> None:
    os.kill(process, signal.SIGTERM)


def noted(folder: Path, deed: Deed | None = None, *, model: str = "demo", **fields: Any) -> NotedTask:
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    settings = make_settings(flags=FAST | {"strategy": "ar", "model": model}, sampling=sampling)
    return NotedTask(task=DocumentTask(settings=settings, template="{text}"), notes=notes, deed=deed, **fields)
