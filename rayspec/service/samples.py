"""The bundled documents as an input file, so that a job reads them as it reads any other."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.demo import SampleDocument, python_documents, sample_documents

_REPORT_SENTENCES = (12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 112, 128, 144)
_NUM_PYTHON_DOCUMENTS = 24
_PYTHON_STEP = 6  # every sixth of the longest: from far too long for the context to comfortable


def bundled_documents() -> list[SampleDocument]:
    """Reports of 12 to 144 sentences, whose right summaries are known, and real texts, the longest of which does not
    fit the bundled model's context."""
    reports = [
        sample_documents(1, num_sentences=num_sentences, seed=index)[0]
        for index, num_sentences in enumerate(_REPORT_SENTENCES)
    ]
    return [*reports, *python_documents(_NUM_PYTHON_DOCUMENTS)[::_PYTHON_STEP]]


def write_samples(folder: Path) -> str:
    """Writes documents.parquet with columns id, text and summary (null where there is none); returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "documents.parquet"
    documents = bundled_documents()
    table = pa.table(
        {
            "id": [document.id for document in documents],
            "text": [document.text for document in documents],
            "summary": pa.array([document.summary for document in documents], pa.string()),
        }
    )
    pq.write_table(table, path)
    return str(path)


def read_references(path: str) -> dict[str, str]:
    """The right summaries of a file that write_samples wrote, by id."""
    rows = pq.read_table(path, columns=["id", "summary"]).to_pylist()
    return {row["id"]: row["summary"] for row in rows if row["summary"] is not None}
