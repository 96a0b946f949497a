from __future__ import annotations

import io
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from rayspec.batch.results import DamagedRowsError, read_rows, write_rows
from rayspec.batch.rows import Row
from rayspec.types import (
    CompletionOutput,
    EmptyPromptError,
    NonFiniteLogitsError,
    RequestMetrics,
    RequestOutput,
)

ROWS = [
    Row(id="a", text="Ein Satz — 世界\nzwei", num_prompt_tokens=9, num_output_tokens=3, finish_reason="stop"),
    Row(id="b").failed(EmptyPromptError("nothing there")),
    Row(id="c", text="", num_draft_tokens=8, num_accepted_tokens=6, acceptance_rate=0.75, latency_s=1.5),
    Row(id="d", text="of parts", tree='{"text": "of parts", "parts": []}', source="a.jsonl:4"),
]


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_rows_are_read_as_they_were_written(file_format: str) -> None:
    file = io.BytesIO()
    rows = [replace(row, id=f"{row.id}{number}") for number in range(300) for row in ROWS]
    write_rows(file, rows, text_column="summary", file_format=file_format)
    file.seek(0)
    if file_format == "parquet":
        content = pq.ParquetFile(file)
        assert [content.metadata.row_group(group).num_rows for group in range(content.num_row_groups)] == [1024, 176]
        assert content.schema_arrow.names[:4] == ["id", "summary", "num_prompt_tokens", "num_output_tokens"]
        file.seek(0)
    assert list(read_rows(file, text_column="summary", file_format=file_format)) == rows
    file.seek(0)
    short = [replace(row, text=None, tree=None) for row in rows]
    assert list(read_rows(file, text_column="summary", file_format=file_format, with_text=False)) == short


def test_columns_that_a_file_has_not_are_at_their_defaults() -> None:
    file = io.BytesIO(b'{"id": "a", "summary": "short"}\n')
    assert list(read_rows(file, text_column="summary", file_format="jsonl")) == [Row(id="a", text="short")]


@pytest.mark.parametrize(
    ("file_format", "content"),
    [
        ("jsonl", b'{"id": "a", "summary": "x"}\n{"id": "b", "summ'),
        ("jsonl", b'{"id": "a", "summary": "x"}\n{"id": "b", "summary": "x"}'),
        ("jsonl", b'{"id": "a", "text": "x"}\n'),
        ("jsonl", b'{"id": "a", "summary": "x", "shoe_size": 44}\n'),
        ("jsonl", b'["a", "x"]\n'),
        ("jsonl", b"\xff\n"),
        ("parquet", b"no parquet at all"),
        ("parquet", b""),
    ],
)
def test_a_damaged_file_is_an_error(file_format: str, content: bytes) -> None:
    with pytest.raises(DamagedRowsError):
        list(read_rows(io.BytesIO(content), text_column="summary", file_format=file_format))


@pytest.mark.parametrize("text", ["The agency paid the fee in May.", "fee " * 300])
def test_a_flipped_bit_in_parquet_rows_changes_no_row_in_silence(text: str) -> None:
    rows, file = [Row(id=f"row {number}", text=f"{number} {text}") for number in range(3)], io.BytesIO()
    write_rows(file, rows, text_column="summary", file_format="parquet")
    content = file.getvalue()
    length_of_footer = int.from_bytes(content[-8:-4], "little")
    num_damaged = 0
    for place in range(4, len(content) - 8 - length_of_footer):
        damaged = bytearray(content)
        damaged[place] ^= 1
        try:
            found = list(read_rows(io.BytesIO(damaged), text_column="summary", file_format="parquet"))
        except (DamagedRowsError, OSError):
            num_damaged += 1
        else:
            assert found == rows, place
    assert num_damaged > 0


def test_an_output_becomes_a_row() -> None:
    output = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        outputs=[CompletionOutput(index=0, text="done", token_ids=(4, 5), finish_reason="length")],
        finished=True,
        metrics=RequestMetrics(
            num_draft_tokens=4, num_accepted_tokens=1, arrival_s=10.0, first_token_s=11.0, finished_s=13.0
        ),
    )
    assert Row(id="doc").completed(output) == Row(
        id="doc",
        text="done",
        num_prompt_tokens=3,
        num_output_tokens=2,
        finish_reason="length",
        num_draft_tokens=4,
        num_accepted_tokens=1,
        acceptance_rate=0.25,
        latency_s=3.0,
        decode_s=2.0,
    )


def test_a_failed_output_keeps_what_it_had() -> None:
    output = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=[CompletionOutput(index=0, text="half", token_ids=(4,), finish_reason="error")],
        finished=True,
        error=NonFiniteLogitsError("NaN"),
    )
    row = Row(id="doc").completed(output)
    assert (row.text, row.finish_reason, row.error_kind) == ("half", "error", "non_finite_logits")
