"""What a processor is given by the tests: its functions, and a task that kills engines.

A module of its own, which every process of Ray Data imports: these have no need of torch and transformers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayspec.batch.processor import ERROR_COLUMN, PreparedRowTask
from rayspec.config import Settings

if TYPE_CHECKING:
    from rayspec.batch.rows import Handler
    from rayspec.llm import AsyncEngine

PARAMS = {"temperature": 0.0, "max_tokens": 6}


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    if row["text"] == "fails":
        raise KeyError("a bug of the user's")
    if row["text"] == "bare":
        return {}
    if row["text"] == "wrong":
        return {"prompt": "word", "sampling_params": {"temprature": 1}}
    message = {"role": "user", "content": row["text"], "name": row.get("kills")}
    return {"messages": [message], "sampling_params": PARAMS}


def postprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "summary": row["generated_text"],
        "num_tokens": row["num_generated_tokens"],
        "prompt_tokens": row["num_input_tokens"],
        "latency_s": row["metrics"]["latency_s"],
        ERROR_COLUMN: row[ERROR_COLUMN],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlyTask:
    """A PreparedRowTask whose engine is killed by rows whose message has a name: "always", or that of a file that the
    first kill makes."""

    task: PreparedRowTask

    @property
    def settings(self) -> Settings:
        return self.task.settings

    def handler(self, engine: AsyncEngine) -> Handler:
        complete = self.task.handler(engine)

        async def kill_or_complete(row: Mapping[str, Any]) -> dict[str, Any]:
            kills = next((message["name"] for message in row.get("messages", ())), None)
            if kills == "always":
                os.kill(os.getpid(), signal.SIGKILL)
            if kills and not Path(kills).exists():
                Path(kills).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            done: dict[str, Any] = await complete(row)
            return done

        return kill_or_complete
