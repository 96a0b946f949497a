from __future__ import annotations

from benchmarks.papers.published import published

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
