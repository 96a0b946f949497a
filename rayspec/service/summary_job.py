"""Summarizing a dataset on Ray: one engine's actor, Ray Data around it, a folder with the summaries and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ray.data
from ray.exceptions import RayError

from rayspec.pipeline.session import ray_session
from rayspec.service.data import complete_dataset, quieten, read_dataset, result_rows
from rayspec.service.document_task import DocumentTask
from rayspec.service.documents import Columns
from rayspec.service.engine_actor import call, death_of, start_engine
from rayspec.service.progress import showing_progress
from rayspec.service.prompts import summary_prompt
from rayspec.service.report import RunReport
from rayspec.service.results import check_output, open_writer, save_config
from rayspec.service.settings import Settings
from rayspec.service.terminal import error_console, exit_on_sigterm

SUMMARIES = "summaries.parquet"


class SummaryJob:
    """Everything is checked before anything is started. Raises ConfigError."""

    def __init__(
        self, settings: Settings, folder: Path, *, overwrite: bool, prompt: str | None = None, truncate: bool = False
    ) -> None:
        check_output(folder / SUMMARIES, overwrite=overwrite)
        template = prompt or summary_prompt(settings.engine.model)
        self._task = DocumentTask(settings=settings, template=template, truncate=truncate)
        self._folder = folder

    def run(
        self,
        inputs: Sequence[str],
        *,
        text_column: str = "text",
        id_column: str | None = None,
        limit: int | None = None,
        references: Mapping[str, str] | None = None,
    ) -> RunReport:
        """Returns when every row is written. A run that ends early leaves the rows it had, and no report.

        Raises EngineDeadError, CheckpointError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        columns = Columns(text=text_column, id=id_column)
        with ray_session():
            exit_on_sigterm()
            quieten()
            engine = start_engine(self._task)
            config = call(engine.load.remote())
            save_config(self._folder / "config.yaml", config)
            report = RunReport(references=references or {})
            results = complete_dataset(read_dataset(inputs, columns, limit=limit), engine)
            try:
                self._write_rows(results, report)
            except RayError:
                death = death_of(engine)
                if death is None:
                    raise
                raise death from None
            report.write(self._folder, stats=call(engine.stats.remote()), config=config, title="Summaries")
            call(engine.stop.remote())
        return report

    def _write_rows(self, results: ray.data.Dataset, report: RunReport) -> None:
        with (
            open_writer(self._folder / SUMMARIES, text_column="summary") as writer,
            showing_progress(report.tally, error_console()) as show,
        ):
            for row in result_rows(results):
                writer.write(row)
                report.add(row)
                show()
