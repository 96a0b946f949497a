"""The bundled documents as the input of a job."""

from __future__ import annotations

from collections.abc import Iterable

from rayspec.batch.documents import input_row
from rayspec.batch.rows import Row
from rayspec.demo import SampleDocument, python_documents, sample_documents

_REPORT_SENTENCES = (12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 112, 128, 144)
_NUM_PYTHON_DOCUMENTS = 24
_PYTHON_STEP = 6  # every sixth of the longest: from far too long for the context to short enough


def bundled_documents() -> list[SampleDocument]:
    """Return reports of 12 to 144 sentences, whose right summaries are known, and real texts. The longest text does not
    fit the bundled model's context."""
    reports = [
        sample_documents(1, num_sentences=num_sentences, seed=index)[0]
        for index, num_sentences in enumerate(_REPORT_SENTENCES)
    ]
    return [*reports, *python_documents(_NUM_PYTHON_DOCUMENTS)[::_PYTHON_STEP]]


def as_rows(samples: Iterable[SampleDocument]) -> list[Row]:
    """Return the samples as rows of a job."""
    return [input_row(sample.id, source=sample.id, text=sample.text) for sample in samples]


def references(samples: Iterable[SampleDocument]) -> dict[str, str]:
    """Return the right summaries, by id, of the samples that have one."""
    return {sample.id: sample.summary for sample in samples if sample.summary is not None}
