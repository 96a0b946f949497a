from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.published import PATH, Published, published
from benchmarks.roofline import ACCELERATORS, SHAPES

ARXIV = {"KnapSpec": "2602.20217", "CLaSp": "2505.24196", "SWIFT": "2410.06916", "KNN-SSD": "2505.16162"}
KNAPSPEC = {  # table 2, as it was read
    "Qwen3-32B": {"AIME24": 1.43, "AIME25": 1.42, "MMLU-Pro": 1.20},
    "Qwen3-14B": {"AIME24": 1.30, "AIME25": 1.27, "MMLU-Pro": 1.16},
    "Qwen3-8B": {"AIME24": 1.28, "AIME25": 1.26, "MMLU-Pro": 1.33},
    "Qwen3-4B": {"AIME24": 1.36, "AIME25": 1.35, "MMLU-Pro": 1.29},
    "Llama-3.1-70B": {"GovReport": 1.47, "PG19": 1.21, "BookSum": 1.14},
    "Llama-3.1-8B": {"GovReport": 1.28, "PG19": 1.26, "BookSum": 1.18},
    "Llama-3.2-3B": {"GovReport": 1.24, "PG19": 1.16, "BookSum": 1.18},
    "Llama-3.2-1B": {"GovReport": 1.11, "PG19": 1.06, "BookSum": 1.13},
}


def test_knapspec_s_table_is_complete() -> None:
    rows = [row for row in published() if row.method == "knapspec"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.model, {})[row.task] = row.speedup
    assert found == KNAPSPEC
    assert len(rows) == 24
    accepted = {(row.model, row.task): row.acceptance for row in rows if row.acceptance is not None}
    assert accepted == {
        ("Qwen3-32B", "AIME24"): 0.935,
        ("Llama-3.1-70B", "GovReport"): 0.944,
        ("Llama-3.1-8B", "GovReport"): 0.97,
    }
    assert all(row.skip_ratio is None for row in rows)  # it was not published


def test_rivals_are_rows_of_the_table_that_they_stand_in() -> None:
    rivals = {
        row.method: row.speedup
        for row in published()
        if row.paper == "KnapSpec" and row.model == "Llama-3.1-70B" and row.method != "knapspec"
    }
    assert rivals == {"swift": 1.33, "clasp": 1.22, "del": 0.87}


def test_every_row_names_its_source_and_what_the_predictions_need_to_find() -> None:
    for row in published():
        assert row.paper
        assert row.where
        assert row.arxiv == ARXIV.get(row.paper, "")  # no id that was not read
        assert row.paper in row.source
        assert not row.shape or row.shape in SHAPES
        assert not row.hardware or row.hardware in ACCELERATORS
    assert len(set(published())) == len(published())


def test_what_is_computed_is_marked() -> None:
    assert all("tpt_gain" in row.computed for row in published() if row.tpt_gain is not None)
    clasp = next(row for row in published() if row.speedup == 1.64)
    assert clasp.skip_ratio == 44 / 80
    assert "skip_ratio" in clasp.computed


def test_other_papers_figures() -> None:
    own = [row for row in published() if row.paper in ("SWIFT", "CLaSp", "KNN-SSD")]
    figures = [(row.method, row.model, row.speedup) for row in own if row.model]
    assert figures == [
        ("clasp", "LLaMA3 8B to 70B", 1.3),
        ("clasp", "LLaMA3 8B to 70B", 1.7),
        ("clasp", "LLaMA3-70B", 1.64),
        ("clasp", "LLaMA3-70B", 1.67),
        ("clasp", "LLaMA3-405B int8", 1.81),
        ("swift", "13B", 1.41),
        ("swift", "70B", 1.48),
        ("knn_ssd", "Llama-2-13B or Qwen2.5-14B", 1.35),
        ("knn_ssd", "Llama-2-13B or Qwen2.5-14B", 1.62),
        ("self_sd", "Llama-2-13B or Qwen2.5-14B", 1.11),
        ("self_sd", "Llama-2-13B or Qwen2.5-14B", 1.26),
    ]
    assert [row.expected_speedup for row in own if row.expected_speedup is not None] == [1.53, 1.59]
    assert {(row.model, row.decode_step_ms) for row in published() if row.decode_step_ms is not None} == {
        ("Llama-3.1-70B", 148),
        ("Llama-3.1-8B", 63.7),
        ("LLaMA3-70B", 100),
    }


def test_groups_stand_together() -> None:
    groups = [row.group for row in published()]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = PATH.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "published.csv"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (",1.43,", ",fast,", "line 2: .*fast"),
        (",1.43,,0.935,", ",1.43,,93.5,", "line 2: .*between 0 and 1"),
        (",1.43,", ",-1.43,", "line 2: .*above 0"),
        ("A800,from,", "A800,since,", "end is 'since'"),
        ("KnapSpec,knapspec,KnapSpec,", "KnapSpec,knapspec,KnapSpec,,,", "line 2: "),
        (",1.58,,tpt_gain,", ",,,tpt_gain,", "computed names .*tpt_gain"),
        (",0.935,,,18,", ",0.935,,,18.5,", "line 2: .*18.5"),
        ("skip_ratio,max_draft_tokens", "max_draft_tokens,skip_ratio", "the columns must be"),
        ("\nKnapSpec,knapspec,KnapSpec,2602.20217,table 2,", "\nKnapSpec\nKnapSpec,knapspec,", "line 2: "),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_line(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        published(edited(tmp_path, old, new))


def test_a_range_is_two_rows() -> None:
    ends = [row.end for row in published() if row.method == "knn_ssd"]
    assert ends == ["from", "to"]


def test_fields_that_the_source_does_not_give_are_none() -> None:
    row = Published(
        group="g", method="m", paper="p", arxiv="", where="text", model="", shape="", bytes_per_weight=2, task="",
        hardware="", end="", speedup=1.5,
    )  # fmt: skip
    assert (row.acceptance, row.skip_ratio, row.tokens_per_verify, row.computed) == (None, None, None, ())
    assert row.source == "p, text"
