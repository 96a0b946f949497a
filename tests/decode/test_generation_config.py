"""Greedy decoding equals `generate(do_sample=False)`, whatever generation_config.json of the checkpoint asks for."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.generation_config import REFUSED, TAKEN, eos_token_ids, generation_defaults
from rayspec.decode.work import DecodingParams, GenerationDefaults
from rayspec.types import CheckpointError
from tests.engines import RandomPlans, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import checkpoint, greedy, parts_of, reference

NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
# The first repeats itself, as does the text after it; the second has one token only.
PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [3], [*range(20, 60)]]
EOS = 2

Text = Sequence[int]
# Each of these changes what the checkpoint writes after some prompt; `plain` is its text without them.
FIELDS: dict[str, Callable[[list[Text]], dict[str, Any]]] = {
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": lambda plain: {"no_repeat_ngram_size": 2},
    "suppress_tokens": lambda plain: {"suppress_tokens": [-1, *plain[0][:3], *plain[2][::5]]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": [plain[0][0], plain[1][0]]},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[0][1]], [*plain[0][3:5]], [*plain[2][2:5]], [EOS]]},
    "bad word across the prompt's end": lambda plain: {"bad_words_ids": [[7, 5, 9, plain[0][0]]]},
    "sequence_bias": lambda plain: {
        "sequence_bias": [[[plain[0][1]], -4.0], [[*plain[2][2:5]], -9.5], [[*plain[1][:2]], -9.0], [[17], 1.5]]
    },
    "a bias given twice": lambda plain: {"sequence_bias": [[[17], 90.0], [[plain[0][1]], -4.0], [[17], 1.5]]},
    "bias before the penalty": lambda plain: {"sequence_bias": [[[plain[0][1]], 3.0]], "repetition_penalty": 1.5},
    "min_new_tokens": lambda plain: {"min_new_tokens": 9, "eos_token_id": [plain[0][4], plain[1][2], plain[2][0]]},
    "min_length": lambda plain: {"min_length": 14, "eos_token_id": [plain[0][2], plain[1][2]]},
    "forced_eos_token_id": lambda plain: {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "several forced": lambda plain: {"forced_eos_token_id": [4, EOS]},
    "forced_bos_token_id": lambda plain: {"forced_bos_token_id": 33, "begin_suppress_tokens": [plain[0][0]]},
    "all": lambda plain: {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [*plain[0][:1]],
        "begin_suppress_tokens": [*plain[1][:1]],
        "bad_words_ids": [[*plain[2][1:3]]],
        "min_new_tokens": 5,
        "eos_token_id": [plain[1][1], 30, 40],
    },
}


def with_generation_config(folder: Path, content: dict[str, Any]) -> Path:
    for file in Path(checkpoint("llama")).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0} | content))
    return folder


@cache
def plain_texts() -> list[Text]:
    return [*greedy(checkpoint("llama"), PROMPTS, NUM_TOKENS)]


def generated(folder: Path) -> list[tuple[int, ...]]:
    """What transformers' generate writes, with nothing else said."""
    model, texts = copy.copy(reference(checkpoint("llama"))), []
    model.generation_config = GenerationConfig.from_pretrained(folder)
    for prompt in PROMPTS:
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        tokens = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS)
        texts.append(tuple(tokens[0, len(prompt) :].tolist()))
    return texts


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", **options)


def told(folder: Path) -> dict[str, Any]:
    """What an engine knows of the folder's generation_config.json."""
    config = config_of(folder)
    return {"eos": eos_token_ids(config), "defaults": generation_defaults(config)}


FEW = (
    "bad word across the prompt's end",
    "sequence_bias",
    "min_length",
    "several forced",
    "forced_bos_token_id",
    "all",
)


@pytest.mark.parametrize("name", few_of(FIELDS, FEW))
def test_greedy_equals_generate_with_the_checkpoint_as_it_is(name: str, tmp_path: Path) -> None:
    folder = with_generation_config(tmp_path, FIELDS[name](plain_texts()))
    expected = generated(folder)
    assert expected != plain_texts()
    parts = parts_of(checkpoint("llama"))
    assert tokens_of(complete(engine_with(parts, **told(folder)), PROMPTS, GREEDY)) == expected
    engine = engine_with(parts, RandomPlans(1, len(parts.sublayers)), is_static=True, **told(folder))
    assert tokens_of(complete(engine, PROMPTS, GREEDY)) == expected
    assert engine.stats.num_accepted_tokens > 0


def test_none_leaves_the_defaults_of_the_checkpoint_out(tmp_path: Path) -> None:
    folder = with_generation_config(tmp_path, {"repetition_penalty": 1.3, "num_beams": 4, "eos_token_id": 7})
    config = config_of(folder, generation_config="none")
    assert generation_defaults(config) == GenerationDefaults()
    assert eos_token_ids(config) == (7,)  # not a default of sampling


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 77, "stop_strings": "end"}
    defaults = generation_defaults(config_of(with_generation_config(tmp_path, content)))
    assert defaults.max_new_tokens == 77

    def completed(**asked: Any) -> DecodingParams:
        return defaults.completed(SamplingParams(**asked), num_prompt_tokens=10, max_model_len=100)

    unset = completed()
    assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p) == (0.6, 0.9, 20, 0.1)
    assert (unset.max_tokens, unset.stop, unset.greedy) == (16, ("end",), False)
    asked = completed(temperature=0, top_k=-1, stop=[], max_tokens=None)
    assert (asked.greedy, asked.top_p, asked.top_k, asked.stop, asked.max_tokens) == (True, 0.9, -1, (), 90)
    assert defaults.completed(asked, num_prompt_tokens=10, max_model_len=100) == asked


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str, tmp_path: Path) -> None:
    values = {"watermarking_config": {"greenlist_ratio": 0.5}, "exponential_decay_length_penalty": [5, 1.2]}
    value = values.get(name, True if name == "token_healing" else [[1]] if "words" in name else 3)
    folder = with_generation_config(tmp_path, {name: value} | ({"do_sample": True} if name == "top_h" else {}))
    with pytest.raises(CheckpointError, match=rf"{name} to .*generation_config 'none'"):
        generation_defaults(config_of(folder))
    for without_effect in (None, *REFUSED[name]):
        (folder / "generation_config.json").write_text(json.dumps({name: without_effect}))
        assert generation_defaults(config_of(folder)) == GenerationDefaults()


@pytest.mark.parametrize(
    "content", [{"repetition_penalty": "a"}, {"top_p": 7}, {"bad_words_ids": [[]]}, {"max_new_tokens": 1.5}]
)
def test_a_value_that_cannot_be_used_is_named(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{next(iter(content))}.*generation_config 'none'"):
        generation_defaults(config_of(with_generation_config(tmp_path, content)))


def test_every_field_of_transformers_is_taken_refused_or_without_effect() -> None:
    """A field that a newer transformers obeys must be decided upon."""
    taken = {*TAKEN, "forced_eos_token_id", "min_length", "min_new_tokens", "max_new_tokens", "stop_strings"}
    taken.add("eos_token_id")
    of_beams = {"early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory"}
    of_speed = {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "use_mtp"),
        *("compile_config", "disable_compile", "continuous_batching_config", "speculation_type", "is_assistant"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight"),
    }
    of_output = {
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    }
    # Temperature decides, the request states a length, logits that are not finite fail, and a sum has no effect.
    other = {"do_sample", "max_length", "remove_invalid_values", "renormalize_logits", "transformers_version"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - taken - set(REFUSED) == (of_beams | of_speed | of_output | other) & fields
