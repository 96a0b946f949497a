"""Outputs with a form: they have it, and they are those of plain decoding, whatever is drafted."""

import copy
import dataclasses
import gc
import json
import math
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from rayspec import LLM, SamplingParams, StructuredOutputsParams, demo
from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.round_planner import _FORCING
from rayspec.decode.rounds import before_late, verify_coupled
from rayspec.decode.sampling import Rows
from rayspec.decode.work import DecodingParams
from rayspec.errors import ConfigError, GrammarError
from rayspec.forms.checker import FormChecker
from rayspec.forms.grammar import Constraint, Grammars
from rayspec.model.sublayers import Decomposition
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from rayspec.structured import CHANNELS
from rayspec.types import Request, RequestOutput
from tests.decode.samplers import sampler_of
from tests.decode.test_losslessness import LookingUp
from tests.demo_model import EOS, demo_prompts, demo_tokenizer, shallow_demo
from tests.engines import RandomPlans, complete, engine_with
from tests.exhaustive import few_of
from tests.families import parts_of
from tests.schemas import NESTED, OTHER_FORMATS, PERSON, PUBLISHED, random_schema
from tests.strategy_cases import saved_plan
from tests.tool_templates import tokenizer_with
from tests.waiting import wait_until

DOUBLING = {str(at): {"allOf": 2 * [{"$ref": f"#/$defs/{at + 1}"}]} for at in range(24)} | {"24": {"pattern": "^a+$"}}
SCHEMAS = [PERSON, NESTED, *(random_schema(random.Random(seed)) for seed in range(6))]
CASES = [*PUBLISHED, *(random_schema(random.Random(seed)) for seed in range(100, 400))]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "kv_cache_tokens": 8192}
PLANS = "plans.json"
STRATEGIES: dict[str, dict[str, Any]] = {
    "lookup": {},
    "auto": {},
    "recycling": {},
    "knapspec": {},
    "static": {"skip": [3, 4], "max_draft_tokens": 6},
    # a gate would switch the others off here
    "swift": {"gate": False},
    "lookahead": {"gate": False},
    "layerskip": {"gate": False, "exit_layer": 2},
    "clasp": {"gate": False, "search_interval": 16, "draft_threshold": 0.0},
    "del": {"gate": False, "num_search_tokens": 4},
    "asd": {"gate": False, "search_interval": 8, "num_search_tokens": 4, "draft_threshold": 0.0},
    "self-sd": {"gate": False, "warm_start": PLANS, "draft_threshold": 0.3},
    "knn-ssd": {"gate": False, "warm_start": PLANS, "draft_threshold": 0.3},
}
# The drafts of the others are chains, copies or trees, as those of `auto` and of the random plans below.
FEW = [(name, 0.8) for name in ("auto", "lookahead")]
WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "trees": {"num_beside": 40, "max_num_seqs": 8},
    "continued": {"max_num_seqs": 3},
    "preempted": {"kv_cache_tokens": 320, "max_num_seqs": 6, "max_num_batched_tokens": 16},
    "deterministic": {"deterministic": True, "max_num_batched_tokens": 64},
    "static shapes": {"is_static": True, "max_num_seqs": 4},
}


@pytest.fixture(scope="module", autouse=True)
def _saved_plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In the folder of the tests: a plan for all texts, by any first state."""
    folder, num_sublayers = tmp_path_factory.mktemp("plans"), len(_parts().sublayers)
    anchor = (1.0, *(_parts().config.hidden_size - 1) * (0.0,))
    plan = saved_plan("any", (3, 4), num_sublayers=num_sublayers, anchors=(anchor,), radius=2.0)
    model = ModelIdentity.of(EngineConfig(model=shallow_demo()), num_sublayers)
    SavedPlans(model=model, plans=(plan,)).save(folder / PLANS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def _parts() -> Decomposition:
    return parts_of(shallow_demo())


def _params(schema: dict[str, Any], *, temperature: float, **form: Any) -> SamplingParams:
    structured = StructuredOutputsParams(json=schema, **form)
    return SamplingParams(temperature=temperature, seed=7, max_tokens=120, structured_outputs=structured)


def _asked(temperature: float) -> list[SamplingParams]:
    """One for each schema; the space in JSON is a matter of the model, of a pattern, or known."""
    forms: list[dict[str, Any]] = [{"whitespace_pattern": " ?"}, {"disable_any_whitespace": True}, {}]
    return [_params(one, temperature=temperature, **forms[at % 3]) for at, one in enumerate(SCHEMAS)]


def _generated(
    *temperatures: float, model: str | None = None, max_num_seqs: int = 8, **speculation: Any
) -> tuple[list[list[RequestOutput]], Any]:
    prompts = [{"prompt_token_ids": one} for one in demo_prompts(len(SCHEMAS), 2)]
    with LLM(model or shallow_demo(), speculation=speculation, max_num_seqs=max_num_seqs, **OPTIONS) as llm:
        return [llm.generate(prompts, _asked(one), use_tqdm=False) for one in temperatures], llm.stats


def _texts(outputs: Sequence[RequestOutput]) -> list[tuple[str, str | None]]:
    assert not [one.error for one in outputs if one.error]
    return [(one.outputs[0].text, one.outputs[0].finish_reason) for one in outputs]


@cache
def _plainly(model: str) -> dict[float, list[tuple[str, str | None]]]:
    outputs, _ = _generated(0.0, 0.8, model=model, max_num_seqs=1, strategy="ar")
    return dict(zip((0.0, 0.8), map(_texts, outputs), strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[float, list[tuple[str, str | None]]]:
    return _plainly(shallow_demo())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_finished_output_is_valid(plain: dict[float, list[tuple[str, str | None]]], temperature: float) -> None:
    finished = [
        (text, schema) for (text, reason), schema in zip(plain[temperature], SCHEMAS, strict=True) if reason == "stop"
    ]
    assert len(finished) >= 5
    for text, schema in finished:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(("strategy", "temperature"), few_of(list(product(STRATEGIES, (0.0, 0.8))), FEW))
def test_the_text_is_that_of_plain_decoding(strategy: str, temperature: float) -> None:
    model = demo.model_path() if strategy == "del" else shallow_demo()  # whose early exits do not pay
    (outputs,), stats = _generated(temperature, model=model, strategy=strategy, **STRATEGIES[strategy])
    assert _texts(outputs) == _plainly(model)[temperature]
    assert stats.num_draft_tokens > 0
    assert strategy not in _FORCING or stats.accepted_by_source["form"] > 20


def _under(strategy: Any, **options: Any) -> tuple[list[tuple[str, str | None]], Engine]:
    prompts, asked = demo_prompts(4, 2), _asked(0.8)[:4]
    engine = engine_with(_parts(), strategy, eos=(EOS,), tokenizer=demo_tokenizer(), **options)
    for at, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        engine.add(Request(request_id=str(at), params=params, prompt_token_ids=prompt))
    done = _run(engine, until=lambda _: not engine.has_unfinished)
    return _texts([done[str(at)] for at in range(len(prompts))]), engine


@cache
def _under_no_plan() -> list[tuple[str, str | None]]:
    return _under(None)[0]


@pytest.mark.parametrize("way", few_of(WAYS, ("trees", "continued", "preempted")))
def test_the_text_is_that_of_plain_decoding_under_another_plan_every_round(way: str) -> None:
    kind = LookingUp if way == "continued" else RandomPlans
    texts, engine = _under(kind(3, len(_parts().sublayers)), **WAYS[way])
    assert way != "preempted" or engine.stats.num_preemptions > 0
    assert texts == _under_no_plan()


@cache
def _of_cases(strategy: str, batch: int, step: int, stages: int) -> list[tuple[str, str | None]]:
    """The outputs, or errors, of every `step`-th case at temperature 0.8."""
    params = [
        _params(one, temperature=0.8, disable_any_whitespace=True).replace(max_tokens=40) for one in CASES[::step]
    ]
    prompts = [{"prompt_token_ids": one} for one in demo_prompts(len(params), 2)]
    options: dict[str, Any] = {"speculation": {"strategy": strategy, **STRATEGIES.get(strategy, {})}}
    if stages > 1:
        options["parallel"] = {"stages": stages, "cpus_per_shard": 0.25}
    with LLM(shallow_demo(), max_num_seqs=batch, **options, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (str(one.error), None) if one.error else (one.outputs[0].text, one.outputs[0].finish_reason) for one in outputs
    ]


@pytest.mark.parametrize(
    ("strategy", "batch", "step", "stages"),
    few_of(
        [("auto", 8, 1, 1), ("auto", 1, 30, 2), ("knapspec", 8, 30, 2), *product(STRATEGIES, (8,), (30,), (1,))],
        [("auto", 8, 30, 1)],
    ),
)
def test_published_and_random_schemas(
    strategy: str, batch: int, step: int, stages: int, request: pytest.FixtureRequest
) -> None:
    if stages > 1:
        request.getfixturevalue("ray_cluster")
    outputs = _of_cases(strategy, batch, step, stages)
    assert outputs == _of_cases("ar", 1, step, 1)
    finished = [(text, at) for at, (text, reason) in enumerate(outputs) if reason == "stop"]
    assert len(finished) >= len(outputs) // 3
    for text, at in finished:
        jsonschema.validate(json.loads(text), CASES[::step][at], cls=jsonschema.Draft202012Validator)


def test_sampled_drafts_keep_the_form() -> None:
    (outputs,), stats = _generated(1.0, strategy="static", skip=[3, 4], verification="rejection")
    for (text, reason), schema in zip(_texts(outputs), SCHEMAS, strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert stats.num_accepted_tokens > 60


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(shallow_demo(), **OPTIONS) as one:
        yield one


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[A-Z]{3}-\d{4}"}, r"[A-Z]{3}-\d{4}"),
        ({"choice": ["positive", "negative", 'a "quoted" ünit']}, r'positive|negative|a "quoted" ünit'),
        ({"grammar": 'root ::= "yes" | "no" " " [0-9] [0-9]'}, r"yes|no \d\d"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'}, r"<[a-z]{2,5}>"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        ({"json": OTHER_FORMATS}, r'(?s)\{\s*"format"\s*:\s*".*"\s*,\s*"b"\s*:\s*("x"|-?\d+)\s*\}'),
    ],
)
def test_forms(llm: LLM, form: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=200, structured_outputs=form)
    (output,) = llm.generate("The answer:", params, use_tqdm=False)
    finished = [one.text for one in output.outputs if one.finish_reason == "stop"]
    assert finished
    assert all(re.fullmatch(pattern, text) for text in finished)


FORM_OF_A = '{"a": 1}'
FORMS_OF_A: list[dict[str, Any]] = [
    {"json": {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False, "type": "object"}},
    {"regex": r'\{"a": \d\}'},
    {"choice": ['{"a": 1}', "no"]},
    {"grammar": 'root ::= "{\\"a\\": " [0-9] "}"'},
    {"grammar": 'start: "{\\"a\\": " N "}"\nN: /[0-9]/'},
]


@pytest.mark.parametrize("form", FORMS_OF_A, ids=lambda form: next(iter(form)))
def test_reasoning_comes_before_a_form(form: dict[str, Any]) -> None:
    grammars = _grammars()
    for prompt, text, ends in (
        ("<think>\n", f"Hm, {{ <b> </think>\n\n{FORM_OF_A}", True),
        ("<think>\n", FORM_OF_A, False),
        ("x", f"<think>Hm.</think>\n{FORM_OF_A}", True),
        ("x", FORM_OF_A, True),
        ("x", "Hm.", None),
        ("<think>\n\n</think>\n\n", FORM_OF_A, True),
        ("<think>\n\n</think>\n\n", "<think>", None),
    ):
        constraint = grammars.constraint(StructuredOutputsParams(**form).after(prompt), 0)
        constraint.extend_to(demo_tokenizer()(text, add_special_tokens=False)["input_ids"])
        assert constraint.wait(60)
        assert bool(constraint.error) == (ends is None), text
        if ends is not None:
            assert (_bits(constraint, ()) == {EOS}) == ends, text


def _is_taken(form: StructuredOutputsParams, text: str, marks: Sequence[str] = ()) -> bool:
    """Whether the text has the form, to its end. marks: special tokens."""
    tokenizer = copy.deepcopy(demo_tokenizer())
    tokenizer.add_tokens(list(marks), special_tokens=True)
    grammars = Grammars(lambda: tokenizer, vocab_size=len(tokenizer), eos_token_ids=[EOS], patience_s=60)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    state = grammars.compiled(form).result().initial.deep_copy()
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


@pytest.mark.parametrize("form", FORMS_OF_A, ids=lambda form: next(iter(form)))
def test_a_form_is_the_answer_of_gpt_oss(form: dict[str, Any]) -> None:
    """In its last channel, after its reasoning."""
    asked = StructuredOutputsParams(**form, reasoning="channels")
    answer, thought = f"<|channel|>final<|message|>{FORM_OF_A}", "<|channel|>analysis<|message|>Hm, {<|end|>"
    thought += "<|start|>assistant"
    for text, is_taken in (
        (answer, True),
        (thought + answer, True),
        (thought + thought.replace("analysis", "commentary") + answer, True),
        (FORM_OF_A, False),
        (thought, False),
        (thought + FORM_OF_A, False),
        (answer.replace("1", "x"), False),
    ):
        assert _is_taken(asked, text, CHANNELS) == is_taken, text


@pytest.mark.parametrize("name", ["<mark>", "<|mark|>"])
def test_a_grammar_names_tokens_of_the_model(name: str) -> None:
    form = StructuredOutputsParams(grammar=f'start: "<a>" {name} /<b>"/ {name}? // "<c> {name}\n # <d>')
    for text, is_taken in ((f'<a>{name}<b>"', True), (f'<a>{name}<b>"{name}', True), ('<a><b>"', False)):
        assert _is_taken(form, text, [name]) == is_taken, text
    with pytest.raises(GrammarError, match=r"^structured_outputs.grammar: .*<no\|token>"):
        _is_taken(StructuredOutputsParams(grammar='start: "a" <no|token>'), "a")


def test_a_model_thinks_in_tokens_of_its_own_and_then_has_its_form(tmp_path: Path) -> None:
    """As models do that have learned to. This one ends a thought by chance."""
    folder = tokenizer_with("", tmp_path, special="</think>")
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (mark,) = (one for one in content["added_tokens"] if one["content"] == "</think>")
    mark["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    params = [
        _params(schema, temperature=0.8, disable_any_whitespace=True).replace(
            logit_bias={mark["id"]: 9}, max_tokens=160
        )
        for schema in SCHEMAS[2:8]
    ]
    prompts, found = [f"The report {number}<think>\n" for number in range(len(params))], []
    for strategy in ("ar", "auto"):
        speculation = {"strategy": strategy, **STRATEGIES.get(strategy, {})}
        with LLM(shallow_demo(), tokenizer=folder, reasoning_parser="qwen3", speculation=speculation, **OPTIONS) as llm:
            found.append(_texts(llm.generate(prompts, params, use_tqdm=False)))
            num_forced = llm.stats.accepted_by_source.get("form", 0)
            wrong: Any = [{"prompt_token_ids": [-1]}, {"prompt_token_ids": [2**40]}, prompts[0]]
            errors = [output.error for output in llm.generate(wrong, params[:3], use_tqdm=False)]
            assert [error is None for error in errors] == [False, False, True]
        assert strategy == "ar" or num_forced > 0
    assert found[0] == found[1]
    whole = [text.split("</think>") for text, reason in found[0] if reason == "stop"]
    assert len(whole) > 1
    assert any(thought.strip() for thought, _ in whole), whole
    for (text, reason), schema in zip(found[0], SCHEMAS[2:8], strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text.split("</think>")[1]), schema, cls=jsonschema.Draft202012Validator)


def test_the_output_ends_with_its_form(llm: LLM) -> None:
    """Nothing can follow, so neither `ignore_eos` nor `min_tokens` goes on."""
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=50, min_tokens=20, ignore_eos=True, structured_outputs=form)
    (output,) = llm.generate("Is it?", params, use_tqdm=False)
    assert (output.outputs[0].text in ("yes", "no"), output.outputs[0].finish_reason) == (True, "stop")


@pytest.mark.parametrize("drafts", [False, True])
def test_the_output_ends_with_its_form_for_a_model_without_an_eos_token(drafts: bool) -> None:
    plans = RandomPlans(3, len(_parts().sublayers)) if drafts else None
    engine = engine_with(_parts(), plans, tokenizer=demo_tokenizer())
    params = [
        SamplingParams(temperature=0, max_tokens=30, structured_outputs=form)
        for form in ({"choice": ["yes", "no"]}, {"regex": "(ab|abab){3}c"})
    ]
    found = complete(engine, demo_prompts(2, 2), params)
    assert [(one.error, one.outputs[0].finish_reason) for one in found] == [(None, "stop")] * 2
    assert found[0].outputs[0].text in ("yes", "no")
    assert [one.outputs[0].token_ids[-1] for one in found] == [EOS] * 2


def test_parameters_that_leave_no_token_of_the_form_fail_the_request(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, allowed_token_ids=[5], structured_outputs={"regex": "[a-z]+"})
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert isinstance(output.error, GrammarError)
    assert str(output.error).startswith("structured_outputs: token ")
    assert "allowed_token_ids" in str(output.error)
    assert str(output.error).endswith("or the form is too hard to follow: simplify it")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
            ": no text has this form: a part of it matches nothing",
        ),
        ({"properties": {"a": {"format": "iri"}, "b": {"format": "x"}}}, ".properties.a: Unknown format: iri"),
        ({"properties": {"a": {"items": {"format": "x", "not": {}}}}}, ".properties.a.items: Unimplemented keys"),
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            ".properties.a: oneOf is supported",
        ),
    ],
)
def test_a_schema_that_llguidance_does_not_know_says_where(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(f"structured_outputs.json{message}")):
        _grammars().compiled(StructuredOutputsParams(json=schema)).result()


def test_a_regex_that_nothing_matches_is_told_as_such() -> None:
    with pytest.raises(
        GrammarError, match=r"^structured_outputs.regex: no text has this form: a part .* nothing else$"
    ):
        _grammars().compiled(StructuredOutputsParams(regex=r"a[^\s\S]b")).result()


def test_max_tokens_may_end_a_form_early(llm: LLM) -> None:
    (output,) = llm.generate("A person:", _params(PERSON, temperature=0).replace(max_tokens=5), use_tqdm=False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 5)


def test_a_form_that_cannot_be_compiled_fails_its_request_alone(llm: LLM) -> None:
    wrong = {"type": "object", "properties": {"list": {"items": {"properties": {"x": {"type": "strin"}}}}}}
    forms = [{"json": wrong}, {"regex": "(a"}, {"grammar": "start: nothing"}, {"choice": ["a"]}]
    params = [SamplingParams(max_tokens=9, temperature=0, structured_outputs=form) for form in forms]
    outputs = llm.generate(["x"] * 4, params, use_tqdm=False)
    messages = [str(one.error) for one in outputs]
    assert all(isinstance(one.error, GrammarError) for one in outputs[:3])
    assert messages[0] == "structured_outputs.json.properties.list.items.properties.x: Invalid type: strin"
    assert "unclosed group" in messages[1]
    assert "nothing" in messages[2]
    assert outputs[3].outputs[0].text == "a"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "give one of json, regex"),
        ({"json": {}, "regex": "a"}, "json and regex are set"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": '{"pattern": "\\ud800"}'}, r"json has half a character ('\ud800')"),
        ({"choice": ["a", "\ud800"]}, "choice has half a character"),
        ({"regex": "\ud800"}, "regex has half a character"),
        ({"json": "[1]"}, "give a JSON schema, which is an object"),
        ({"choice": "a"}, "give a list of texts"),
        ({"choice": []}, "give a list of texts"),
        ({"regex": 3}, "regex is 3"),
        ({"regx": "a"}, "unknown field 'regx'"),
        ({"structural_tag": "x"}, "'structural_tag' is not supported"),
        ({"regex": "a" * 300_000}, "shorten it"),
    ],
)
def test_a_form_is_checked_where_it_is_made(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(structured_outputs=form)


def _grammars() -> Grammars:
    return Grammars(demo_tokenizer, vocab_size=len(demo_tokenizer()), eos_token_ids=[EOS], patience_s=60)


def _bits(constraint: Constraint, before: Sequence[int]) -> set[int]:
    masks = constraint.masks([before])
    assert masks is not None
    return {32 * word + bit for word, value in enumerate(masks[0].tolist()) for bit in range(32) if value >> bit & 1}


def test_a_state_made_of_the_committed_tokens_is_the_state_that_grew_with_them() -> None:
    """As after a replay: at every token, also after trees of drafts, of which most break the form."""
    grammars, rng = _grammars(), random.Random(1)
    form = StructuredOutputsParams(json=PERSON)
    text = '{"name": "Ann Lee", "age": 31, "tags": ["red", "blue"]}'
    token_ids = [*demo_tokenizer()(text, add_special_tokens=False)["input_ids"], EOS]
    grown = grammars.constraint(form, 3)
    for length in range(len(token_ids) + 1):
        committed = [7, 8, 9, *token_ids[:length]]
        grown.extend_to(committed)
        grown.masks(
            [(), *(tuple(rng.choices(token_ids, k=3)) for _ in range(5)), tuple(token_ids[length : length + 4])]
        )
        grown.allowed(token_ids[length:][:6], [0, 1, 1, 3, 0, 5][: len(token_ids[length:])])
        fresh = grammars.constraint(form, 3)
        fresh.extend_to(committed)
        assert _bits(grown, ()) == _bits(fresh, ())
        assert grown.forced(8) == fresh.forced(8)
        if length < len(token_ids):
            assert token_ids[length] in _bits(grown, ())
            assert grown.allowed(token_ids[length:-1]) == list(range(len(token_ids) - 1 - length))
    assert grown.error == ""


def test_a_token_that_breaks_the_form_is_an_error_of_the_state_and_raises_nothing() -> None:
    constraint = _grammars().constraint(StructuredOutputsParams(choice=["yes"]), 0)
    constraint.extend_to(demo_tokenizer()("no", add_special_tokens=False)["input_ids"])
    assert constraint.wait(60)
    assert "breaks the form" in constraint.error


def test_a_form_that_nobody_waits_for_is_not_compiled() -> None:
    grammars, form = _grammars(), StructuredOutputsParams(regex="a")
    with pytest.raises(CancelledError):
        grammars.compiled(form, lambda: False).result()
    assert grammars.compiled(form).result().mask.any()


def _await(event: threading.Event) -> None:
    event.wait()


def test_a_form_is_compiled_again_after_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, form = _grammars(), StructuredOutputsParams(regex="a")
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/true")
        failed = grammars.compiled(form)
        with pytest.raises(GrammarError, match="ended: try again"):
            failed.result()
    assert grammars.compiled(form).result().mask.any()


def test_a_form_that_is_wanted_again_while_it_is_given_up_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._NUM_THREADS", 1)
    grammars, form, event = _grammars(), StructuredOutputsParams(regex="a"), threading.Event()
    grammars._threads.submit("", partial(_await, event))
    given_up, again = grammars.compiled(form, lambda: False), list[Any]()
    given_up.add_done_callback(lambda _: again.append(grammars.compiled(form)))
    event.set()
    wait_until(lambda: bool(again))
    assert isinstance(given_up.exception(), CancelledError)
    assert again[0].result(60).mask.any()


def test_clients_have_their_forms_compiled_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._NUM_THREADS", 1)
    grammars, event, order = _grammars(), threading.Event(), list[str]()
    grammars._threads.submit("", partial(_await, event))
    futures = []
    for client, form in ("a1", "a2", "a3", "a4", "b4", "b5"):
        futures.append(grammars.compiled(StructuredOutputsParams(regex=form), client=client))
        futures[-1].add_done_callback(lambda _, name=client + form: order.append(name))
    event.set()
    wait_until(lambda: len(order) == len(futures), 60)
    assert order == ["a1", "a4", "b4", "a2", "b5", "a3"], "the fourth comes in the turn of the client that has one"


def test_a_form_that_takes_long_does_not_hold_up_others() -> None:
    grammars, event = _grammars(), threading.Event()
    grammars._patient.submit("", partial(_await, event))
    hard = grammars.compiled(StructuredOutputsParams(json={"$ref": "#/$defs/0", "$defs": DOUBLING}))
    assert [grammars.compiled(StructuredOutputsParams(regex=one)).result().mask.any() for one in "abcd"] == 4 * [True]
    assert not hard.done()
    event.set()
    with pytest.raises(GrammarError, match="simplify it"):
        hard.result()


def test_forms_of_half_a_second_come_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._NUM_THREADS", 1)
    grammars, event = _grammars(), threading.Event()
    grammars._patient.submit("", partial(_await, event))
    texts = {f"p{at}": {"type": "string", "minLength": at, "maxLength": 10 * at + 10} for at in range(2500)}
    form = StructuredOutputsParams(json={"type": "object", "properties": texts})
    large = [grammars.compiled(form, client=client) for client in "ab"]
    assert grammars.compiled(StructuredOutputsParams(regex="a")).result().mask.any()
    assert not any(one.done() for one in large)
    event.set()
    assert all(one.result().mask.any() for one in large)


def test_the_process_that_compiles_forms_shares_the_time_of_the_server_but_not_its_signals() -> None:
    checker = FormChecker()
    checker.grammar({**dataclasses.asdict(StructuredOutputsParams(regex="a")), "marks": {}})
    process = checker._own.process
    assert (os.getsid(process.pid), os.getpgid(process.pid)) == (os.getsid(0), process.pid)


def test_the_tokens_of_a_form_are_those_of_the_model_and_not_of_the_check() -> None:
    """Qwen3 and gpt-oss have theirs beyond 150,000. The check has 262 tokens."""
    thinks = StructuredOutputsParams(json={"type": "object"}).after("<think>")
    calls = StructuredOutputsParams(grammar="start: <[200005]> TEXT <[^1,200002-200012]>\nTEXT: /<[0-9]>/")
    marks, checker = {"<think>": 151_667, "</think>": 151_668}, FormChecker()
    found = [checker.grammar({**dataclasses.asdict(form), "marks": marks})[0] for form in (thinks, calls)]
    assert "<[151668]>" in found[0]
    assert "<[200005]> TEXT <[^1,200002-200012]>" in found[1]


def test_large_compiled_forms_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._MAX_KEPT_BYTES", 1 << 20)
    grammars = _grammars()
    gone = [
        weakref.ref(grammars.compiled(StructuredOutputsParams(choice=[f"{at}{number}" for number in range(10_000)])))
        for at in range(3)
    ]
    grammars.compiled(StructuredOutputsParams(regex="a")).result()
    wait_until(lambda: sum(one() is not None for one in gone) <= 1)


def test_a_short_form_may_not_take_much_memory_and_a_long_one_may(llm: LLM) -> None:
    """24 requests with such repetitions took 2.4 GB."""
    form = StructuredOutputsParams(regex="c{240000}")
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=8, structured_outputs=form), use_tqdm=False)
    assert re.search("too many expressions constructed: make its repetitions shorter|too hard", str(output.error))
    number = random.Random(0)
    names = ["".join(number.choices("abcdefgh", k=20)) for _ in range(9000)]
    assert _grammars().compiled(StructuredOutputsParams(json={"enum": names})).result().mask.any()


def test_forms_whose_masks_grow_their_lexers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._BYTES_OF_MASK_S", 2**50)
    grammars = _grammars()
    for number in range(4):
        grammars.compiled(StructuredOutputsParams(regex=f"a{{{number + 3}}}")).result()
    assert len(grammars._kept) == 1


def test_few_compiled_forms_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._MAX_KEPT", most := 5)
    grammars = _grammars()
    first = grammars.compiled(StructuredOutputsParams(regex="first"))
    for number in range(most):
        grammars.compiled(StructuredOutputsParams(regex=f"a{number}")).result()
    assert grammars.compiled(StructuredOutputsParams(regex="first")) is first, "somebody has it still"
    gone = weakref.ref(first)
    del first
    for number in range(most):
        grammars.compiled(StructuredOutputsParams(regex=f"a{number}")).result()
    wait_until(lambda: gone() is None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_ends_and_leaves_the_compiling_to_the_first() -> None:
    checker, form = FormChecker(), dataclasses.asdict(StructuredOutputsParams(regex="a+")) | {"marks": {}}
    grammar, _ = checker.grammar(form)
    process = checker._own.process
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends it if it waits for the end of the other process
        del checker
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert checker.grammar(form)[0] == grammar
    assert checker._own.process is process
    del checker
    assert process.returncode is not None


def test_many_choices_and_properties() -> None:
    many = [f"choice {number}" for number in range(5000)]
    grammars, tokenizer = _grammars(), demo_tokenizer()
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    for form, text in (
        ({"choice": many}, "choice 4321"),
        ({"json": {"enum": many}}, '"choice 4321"'),
        ({"json": {"type": "object", "properties": properties}}, '{"p3": "a", "p999": "b"}'),
    ):
        constraint = grammars.constraint(StructuredOutputsParams(**form), 0)
        constraint.extend_to(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert constraint.wait(60)
        assert constraint.error == ""


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "root ::= " + 10_000 * "(" + '"a"' + 10_000 * ")"},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"regex": "(" * 100_000},
        {"grammar": "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(8000)) + 'r8000: "a"'},
        {"json": {"$ref": "#/$defs/0", "$defs": DOUBLING}},
    ],
)
def test_whatever_cannot_be_compiled_is_a_short_error(form: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as failed:
        _grammars().compiled(StructuredOutputsParams(**form)).result()
    assert len(str(failed.value)) < 1000


def _run(engine: Engine, *, until: Callable[[dict[str, RequestOutput]], bool]) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while not until(done):
        done |= {one.request_id: one for one in engine.step()}
    return done


def test_a_late_mask_holds_up_its_own_sequence_only() -> None:
    """Also in a prompt's last chunk. The text is the same."""
    engine = engine_with(_parts(), None, eos=(EOS,), tokenizer=demo_tokenizer())
    prompts, asked = demo_prompts(3, 2), _asked(0.8)[:2]
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts, event = [], threading.Event()
    for are_late in (False, True):
        for at, (prompt, params) in enumerate(zip(prompts, [*asked, free], strict=True)):
            engine.add(Request(request_id=str(at), params=params, prompt_token_ids=prompt))
        early: dict[str, RequestOutput] = {}
        if are_late:
            for lane in (engine.model.grammars.fast, engine.model.grammars.slow):
                for _ in range(lane._max_workers):
                    lane.submit(event.wait)
            early = _run(engine, until=lambda done: "2" in done)
            assert list(early) == ["2"]
            event.set()
        done = early | _run(engine, until=lambda _: not engine.has_unfinished)
        texts.append(_texts([done[str(at)] for at in range(3)]))
    assert texts[0] == texts[1]


def test_a_collection_of_garbage_is_not_time_of_the_form() -> None:
    """In a large program, one takes longer than a form may."""
    grammars, where = _grammars(), set[str]()

    def collect(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name not in ("_compile", "_work"):
            frame = frame.f_back
        if phase == "start" and frame.f_code.co_name in ("_compile", "_work") and frame.f_code.co_name not in where:
            where.add(frame.f_code.co_name)
            until_s = time.thread_time() + 0.6
            while time.thread_time() < until_s:
                pass

    grammars.compiled(StructuredOutputsParams(regex="a")).result()  # loads the tokenizer
    threshold = gc.get_threshold()
    gc.callbacks.append(collect)
    gc.set_threshold(1, 10**6, 10**6)
    try:
        constraint = grammars.constraint(StructuredOutputsParams(json=PERSON), 0)
        constraint.extend_to(demo_tokenizer()('{"name": "', add_special_tokens=False)["input_ids"])
        assert constraint.wait(60)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collect)
    assert where == {"_compile", "_work"}
    assert constraint.error == ""
    assert not constraint.is_slow


def test_drafts_whose_masks_are_late_are_dropped(plain: dict[float, list[tuple[str, str | None]]]) -> None:
    with LLM(shallow_demo(), speculation={"strategy": "static", "skip": [3, 4]}, **OPTIONS) as llm:
        assert llm.engine is not None
        llm.engine.model.grammars.patience_s = 0.0
        prompts = [{"prompt_token_ids": one} for one in demo_prompts(len(SCHEMAS), 2)]
        outputs = llm.generate(prompts[:3], _asked(0.8)[:3], use_tqdm=False)
        stats = llm.stats
        lane, unlike = llm.engine.model.grammars.fast, StructuredOutputsParams(regex="([xyz]{2} ){3}")
        lane.submit = lambda work, submit=lane.submit: submit(lambda: (time.sleep(0.03), work()))  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=16, structured_outputs=unlike)
        (other,) = llm.generate(prompts[:1], params, use_tqdm=False)
    assert stats.num_draft_tokens > 0
    assert _texts(outputs) == plain[0.8][:3]
    assert re.fullmatch("([xyz]{2} ){3}", other.outputs[0].text), "model and draft agree on another text"


def test_whatever_was_chosen_without_a_mask_is_dropped_and_what_follows_too() -> None:
    """Also where the draft agrees, because it had no mask either."""
    grammars, form = _grammars(), StructuredOutputsParams(regex="[a-z]{8}")
    a, wrong = demo_tokenizer()("a", add_special_tokens=False)["input_ids"][-1], EOS
    logits = torch.zeros(4, len(demo_tokenizer()))
    logits[torch.arange(4), torch.tensor([a, wrong, a, a])] = 9.0
    for is_late in (False, True):
        params = DecodingParams(temperature=0.0, structured_outputs=form)
        sampler = sampler_of(params, logits.shape[1])
        sampler.constraint = constraint = grammars.constraint(form, 0)
        assert constraint.wait(60)
        grammars.patience_s = 0.0 if is_late else 60.0
        event = threading.Event()
        for lane in (grammars.fast, grammars.slow) if is_late else ():
            for _ in range(lane._max_workers):
                lane.submit(event.wait)
        row = Rows(sampler, 0, [a, wrong, a])
        (verdict,) = verify_coupled(logits, [row])
        assert verdict.token_ids == ([a, wrong, a, a] if is_late else [a, verdict.token_ids[1]])
        verdict = before_late(row, verdict)
        event.set()
        assert wrong not in verdict.token_ids
        assert (len(verdict.token_ids), verdict.num_accepted) == ((1, 1) if is_late else (2, 1))


@pytest.mark.parametrize(
    ("hard", "reason"),
    [
        ({"grammar": "start: " + " | ".join(f'"a{number}"' for number in range(20_000))}, "max is"),
        ({"regex": "((ab){400}c){400}"}, "too many expressions"),
    ],
)
def test_a_form_that_becomes_too_hard_fails_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, hard: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._TOO_SLOW_S", (math.inf, 0.01))  # on a slow machine, too
    forms: list[dict[str, Any]] = [hard, {"choice": ["ab"]}]
    params = [SamplingParams(temperature=0, max_tokens=160, structured_outputs=one) for one in forms]
    failed, other = llm.generate(["x"] * 2, params, use_tqdm=False)
    assert isinstance(failed.error, GrammarError)
    assert str(failed.error).startswith("structured_outputs: ")
    assert reason in str(failed.error)
    assert other.outputs[0].text == "ab"


def test_a_form_that_fails_its_request_leaves_no_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collection of garbage, which may come late: the collector does not see the memory of llguidance."""
    monkeypatch.setattr("rayspec.forms.grammar._TOO_SLOW_S", (10.0, -20.0))  # after the first token
    form = StructuredOutputsParams(regex="a{3,5}b")
    gc.collect()
    gc.disable()
    try:
        (output,) = llm.generate(["x"], SamplingParams(max_tokens=8, structured_outputs=form), use_tqdm=False)
        assert "takes too long" in str(output.error)
        wait_until(lambda: not any(isinstance(one, Constraint) for one in gc.get_objects()))
    finally:
        gc.enable()


def test_a_form_that_is_too_slow_at_once_is_refused_before_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.forms.grammar._TOO_SLOW_S", (0.0, 0.0))
    grammars, form = _grammars(), StructuredOutputsParams(regex="a{3,5}b")
    first = grammars.compiled(form)
    assert str(first.exception()).startswith("structured_outputs.regex: following it takes too long")
    assert grammars.compiled(form) is first, "the engine asks again for a request that waited"
    assert not grammars._kept, "another time it may be quick enough"


def test_a_form_that_cannot_be_compiled_and_a_state_that_ends_leave_no_memory() -> None:
    grammars, hard = _grammars(), " ".join(f"r{at}?" for at in range(3000))
    rules = "\n".join(f'r{at}: "a" | "b"' for at in range(3000))
    failed = grammars.compiled(StructuredOutputsParams(grammar=f"start: {hard}\n{rules}")).exception()
    assert isinstance(failed, GrammarError)
    assert (failed.__traceback__, failed.__cause__) == (None, None)
    form = StructuredOutputsParams(regex="ab")
    constraint = grammars.constraint(form, 0)
    assert constraint.wait(60)
    begun, kept = weakref.ref(constraint), grammars.compiled(form)
    del constraint
    wait_until(lambda: begun() is None)
    assert kept.done()


def test_requests_with_a_broken_form_leave_nothing_in_its_error(llm: LLM) -> None:
    """It is kept with the form, and had the frames of each request, which hold prompts."""
    form, depths = StructuredOutputsParams(regex="(((a"), list[int]()
    for _ in range(3):
        (output,) = llm.generate(["x"], SamplingParams(max_tokens=2, structured_outputs=form), use_tqdm=False)
        assert isinstance(output.error, GrammarError)
        failed = llm.engine.model.grammars.compiled(form).exception()
        depths.append(sum(1 for _ in traceback.walk_tb(failed.__traceback__ if failed is not None else None)))
    assert len(set(depths)) == 1


def test_a_form_that_one_text_makes_too_hard_is_there_for_others() -> None:
    """The states of a form share a lexer, which is full then: for one that began before, and one that begins later."""
    grammars, form, number = _grammars(), StructuredOutputsParams(regex="(.{1,50}){1,50}"), random.Random(0)
    a = demo_tokenizer()("a", add_special_tokens=False)["input_ids"][-1]
    before, hard = (grammars.constraint(form, 0) for _ in range(2))
    texts = {before: [a] * 3, hard: list[int]()}
    before.extend_to(texts[before])
    while not hard.error and len(texts[hard]) < 200:
        allowed = [a]
        if (masks := hard.masks([()])) is not None:
            allowed = [token for token in range(len(demo_tokenizer())) if int(masks[0, token >> 5]) >> (token & 31) & 1]
        texts[hard].append(number.choice(allowed))
        hard.extend_to(texts[hard])
        assert hard.wait(60)
    assert re.match("structured_outputs: .*(too many expressions|too hard)", hard.error)
    for other in (before, grammars.constraint(form, 0)):
        own = texts.get(other, [])
        for _ in range(20):
            own.append(a)
            other.extend_to(own)
            assert other.wait(60)
            assert not other.error


def test_many_choices_are_hashed_once() -> None:
    """Each sequence of a request looks for its form several times."""
    texts = ["".join(pair) for pair in product("abcdefghij", repeat=4)]
    form = StructuredOutputsParams(choice=texts)
    start_s = time.perf_counter()
    form.__hash__()
    once_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in range(100):
        form.__hash__()
    assert time.perf_counter() - start_s < 5 * once_s
    copied = pickle.loads(pickle.dumps(form))
    assert (copied, hash(copied)) == (form, hash(form))
    assert "_hash" not in vars(pickle.loads(pickle.dumps(form)).choice), "another process has other hashes"
