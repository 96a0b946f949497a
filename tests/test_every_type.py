"""Every model type that transformers maps to a causal LM generates transformers' own tokens, or is refused by name."""

from pathlib import Path

import pytest
import transformers
from transformers import AutoModelForImageTextToText

from rayspec.local_engine import load_engine
from rayspec.model.weights import WITH_TEXT_PART, load_model
from rayspec.ops.supported import read_table
from tests.every_type import CASES, PAGE, build, engine_config, generated, outcome, page, require
from tests.exhaustive import few_of

# Kinds: recurrent state, no cache, positions of its own; those that split have tests of their own.
FEW = ("bamba", "bert", "falcon#alibi", "gpt2", "moshi", "openai-gpt", "rwkv")


@pytest.mark.parametrize("case", few_of(CASES, FEW))
def test_a_type_generates_what_transformers_does_or_is_refused_by_name(case: str, tmp_path: Path) -> None:
    assert outcome(case, tmp_path).way == {row.type: row.way for row in read_table()}[case]


@pytest.mark.parametrize("case", few_of(WITH_TEXT_PART, ("mistral3",)))
def test_a_model_with_vision_makes_of_a_text_what_its_language_model_does(case: str, tmp_path: Path) -> None:
    build(case, auto_class=AutoModelForImageTextToText).save_pretrained(tmp_path)
    engine = load_engine(engine_config(str(tmp_path), "static"), with_tokenizer=False)
    require(engine, generated(str(tmp_path), AutoModelForImageTextToText), case)
    assert engine.stats.num_draft_tokens > 0
    first, last = (load_model(engine.config, layers=layers) for layers in (range(2), range(2, 4)))
    assert sum(each.num_parameters() for each in (first, last)) == load_model(engine.config).num_parameters()


@pytest.mark.parametrize("case", few_of(("llama4", "mllama"), ("llama4",)))
def test_other_parts_of_a_checkpoint_are_left_out(case: str, tmp_path: Path) -> None:
    build(case, auto_class=AutoModelForImageTextToText).save_pretrained(tmp_path)
    engine = load_engine(engine_config(str(tmp_path), "auto"), with_tokenizer=False)
    require(engine, generated(str(tmp_path)), case)
    load_model(engine.config, layers=range(2))


def test_the_page_shows_the_table_which_has_every_type() -> None:
    if f"transformers=={transformers.__version__} ;" in (PAGE.parent.parent / "constraints.txt").read_text("utf-8"):
        assert sorted(row.type for row in read_table()) == sorted(CASES)  # other versions have other types
        assert PAGE.read_text(encoding="utf-8") == page(read_table())
