"""Lists the files of the package that a row passes, from a job's start to the commit of its first decode round.

    python tools/row_route.py [--on-ray]

A job of one row runs in this process, over a model that is loaded before. A file counts once, where one of its
functions is first called, on any thread. Reading ends when the pool gets the row, sending when the engine gets the
request, prefill when a round is planned. --on-ray adds what the driver of the same job on Ray passes until the row is
back.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

import rayspec
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.input_files import find_files
from rayspec.batch.job import Job, LocalBackend, Source
from rayspec.batch.rows import Columns
from rayspec.command.terminal import load_llm
from rayspec.config import EngineConfig, SamplingParams, Settings

_PACKAGE = f"{Path(rayspec.__file__).parent}/"
_LOCAL = ("LocalPool.submit", "Engine.add", "RoundPlanner.plan", "SequenceState.commit")
_ON_RAY = ("EnginePool.submit", "RunFolder.add")


def route(backend: LocalBackend, marks: Sequence[str], folder: Path) -> dict[str, str]:
    """Run the job, and return the phase of each file. marks: the methods whose calls, in this order, end phases."""
    files: dict[str, str] = {}
    phases = ["reading", *("sending", "prefill", "decoding")[: len(marks) - 1]]

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not phases or event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name == "<module>":
            return
        files.setdefault(code.co_filename.removeprefix(_PACKAGE), phases[0])
        if f"{type(frame.f_locals.get('self')).__name__}.{code.co_name}" == marks[-len(phases)]:
            del phases[0]

    (folder / "in.jsonl").write_text('{"id": "a", "text": "The fee was paid in May."}\n', encoding="utf-8")
    engine = EngineConfig(model=rayspec.demo.model_path(), dtype="float32", max_model_len=256, kv_cache_tokens=512)
    settings = Settings(engine=engine, sampling=SamplingParams(temperature=0, max_tokens=8))
    task, output = DocumentTask(settings=settings, template="{text}"), str(folder / "out")
    job = Job(backend=backend, task=task, output=output, name="texts", text_column="text")
    source = Source(files=find_files([str(folder / "in.jsonl")]).files, columns=Columns(text="text"))
    with load_llm(engine) as llm, patch("rayspec.batch.rows.load_llm", lambda config: llm):
        threading.setprofile(note)
        sys.setprofile(note)
        job.run(source)
        sys.setprofile(None)
        threading.setprofile(None)
    return files


def main() -> None:
    with TemporaryDirectory() as folder:
        files = route(LocalBackend(), _LOCAL, Path(folder))
    if "--on-ray" in sys.argv:
        from rayspec.batch.ray_backend import RayBackend  # noqa: PLC0415 - brings Ray

        with TemporaryDirectory() as folder:
            files = route(RayBackend(), _ON_RAY, Path(folder)) | files
    for phase in ("reading", "sending", "prefill", "decoding"):
        names = sorted(name for name, its in files.items() if its == phase)
        print(f"{phase}: {len(names)} files", *names, sep="\n  ")
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
