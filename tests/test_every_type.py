"""Every model type that transformers maps to a causal LM generates transformers' own tokens, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.every_type import CASES, documented, outcome
from tests.exhaustive import few_of

# Kinds: split, attention of many kinds, recurrent state, no cache, positions of its own, composite.
FEW = (
    "bamba", "bert", "cpmant", "deepseek_v3", "diffllama", "falcon#alibi", "gemma3", "got_ocr2", "gpt2", "llama4",
    "mamba2", "minimax", "ministral3#beta", "moshi", "openai-gpt", "qwen3_5", "recurrent_gemma", "rwkv", "xlnet",
    "zamba",
)  # fmt: skip


@pytest.mark.parametrize("case", few_of(CASES, FEW))
def test_a_type_generates_what_transformers_does_or_is_refused_by_name(case: str, tmp_path: Path) -> None:
    assert outcome(case, tmp_path).way == documented()[case]


def test_the_page_has_every_type() -> None:
    assert set(documented()) == set(CASES)
