"""One bad request is one bad request: it gets a typed error that says what to do, and the others complete."""

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rayspec.choices import SKIP
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.model.architecture import decompose
from rayspec.strategies.knapspec import Auto
from rayspec.types import (
    EmptyPromptError,
    InvalidTokenError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    Plan,
    PromptTooLongError,
    Request,
    RequestError,
)
from tests.engines import GREEDY, RandomPlans, complete, engine_with, finish, requests_for, require_idle, tokens_of
from tests.families import VOCAB_SIZE, build, cases, checkpoint, parts_of
from tests.strategy_cases import latency

LENGTHS = (20, 5, 60, 33)
PARTS = parts_of(checkpoint("qwen2"))
KNOWN = cases(checkpoint("qwen2"), LENGTHS, 16)
_HARMLESS = {token for tokens in (*KNOWN.prompts, *KNOWN.expected) for token in tokens}
POISON = next(token for token in range(50, VOCAB_SIZE) if token not in _HARMLESS)


def _engine(**options: Any) -> Engine:
    return engine_with(PARTS, RandomPlans(0, len(PARTS.sublayers)), **options)


BAD: list[Any] = [
    pytest.param([], GREEDY, EmptyPromptError, "zero tokens", id="empty"),
    pytest.param([5] * 300, GREEDY, PromptTooLongError, "300 tokens, max_model_len is 300", id="too long"),
    pytest.param([5, VOCAB_SIZE], GREEDY, InvalidTokenError, f"token {VOCAB_SIZE}", id="foreign token"),
    pytest.param([5, -1], GREEDY, InvalidTokenError, "token -1", id="negative token"),
    pytest.param([5, 1.7], GREEDY, InvalidTokenError, "token 1.7 is not an integer", id="no integer"),
    pytest.param(
        [5], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), InvalidTokenError, f"logit_bias.*{VOCAB_SIZE}", id="bias"
    ),
    pytest.param(
        [5] * 200, SamplingParams(max_tokens=90), OutOfMemoryError, "kv_cache_tokens", id="larger than the cache"
    ),
]


@pytest.mark.parametrize(("prompt", "params", "error", "message"), BAD)
def test_a_bad_request_is_refused_and_the_others_complete(
    prompt: list[int], params: SamplingParams, error: type[RequestError], message: str
) -> None:
    engine = _engine(max_model_len=300, kv_cache_tokens=256)
    for request in requests_for(KNOWN.prompts):
        engine.add(request)
    engine.step()
    for n in (1, 3):
        with pytest.raises(error, match=message):
            engine.add(Request(request_id="bad", params=params.replace(n=n), prompt_token_ids=prompt))
    outputs = finish(engine)
    assert tokens_of(outputs[str(index)] for index in range(len(LENGTHS))) == KNOWN.expected


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = _engine()
    request = requests_for(KNOWN.prompts[:1])[0]
    engine.add(request)
    with pytest.raises(RequestError, match="'0' is in use"):
        engine.add(request)
    assert tokens_of(finish(engine).values()) == KNOWN.expected[:1]
    engine.add(request)
    assert tokens_of(finish(engine).values()) == KNOWN.expected[:1]


def test_a_text_without_a_tokenizer_is_refused() -> None:
    engine = _engine()
    for prompt in ("text", None):
        with pytest.raises(RequestError, match="prompt_token_ids"):
            engine.add(Request(request_id="a", params=GREEDY, prompt=prompt))
    require_idle(engine)


@pytest.fixture(scope="module")
def poisoned() -> Any:
    """The same model, but a prompt or a draft with the poisonous token gives NaN wherever it is seen."""
    model = build("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return decompose(model)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_nan_logits_cost_that_sequence_only(poisoned: Any, verification: str) -> None:
    prompts = KNOWN.prompts
    sick = [[*prompts[0][:10], POISON], [POISON], [*prompts[2][:40], POISON, *prompts[2][41:]]]
    engine = engine_with(
        poisoned, RandomPlans(0, 8), max_num_seqs=4, max_num_batched_tokens=32, verification=verification
    )
    outputs = complete(engine, [sick[0], prompts[0], sick[1], prompts[1], prompts[2], sick[2], prompts[3]])
    for index in (0, 2, 5):
        assert isinstance(outputs[index].error, NonFiniteLogitsError)
        assert "NaN" in str(outputs[index].error)
        assert outputs[index].outputs[0].token_ids == ()
    assert tokens_of(outputs[index] for index in (1, 3, 4, 6)) == KNOWN.expected


def test_a_draft_that_goes_wrong_does_not_cost_the_sequence(poisoned: Any) -> None:
    """The draft skips everything and drafts the poisonous token; the target would never say it."""
    parts = poisoned
    skip_all = Plan(choices=(SKIP,) * len(parts.sublayers), num_draft_tokens=4, source="all skipped")
    healthy = complete(engine_with(parts), KNOWN.prompts)
    engine = engine_with(parts, skip_all)
    stages: Any = engine.stages
    draft_logits, poison = stages.head.draft_logits, torch.tensor([POISON])
    stages.head.draft_logits = Mock(side_effect=lambda hidden: draft_logits(hidden).index_fill(-1, poison, 1e3))
    outputs = complete(engine, KNOWN.prompts)
    assert stages.head.draft_logits.called
    assert tokens_of(outputs) == tokens_of(healthy) == KNOWN.expected


def test_tokens_before_a_step_that_goes_wrong_are_kept_and_none_after_it() -> None:
    """Also where a round has several steps. The model cannot go on after a token that it chooses."""
    model, prompt, expected = build("qwen2"), KNOWN.prompts[0], KNOWN.expected[0]
    last = next(at for at in range(2, 16) if expected[at] not in (*prompt, *expected[:at]))
    with torch.no_grad():
        model.get_input_embeddings().weight[expected[last]] = torch.nan
    for num_steps in (1, 4):
        engine = engine_with(decompose(model), speculation={"strategy": "ar"})
        engine.stages.num_steps = num_steps
        (output,) = complete(engine, [prompt])
        assert isinstance(output.error, NonFiniteLogitsError)
        assert output.outputs[0].token_ids == tuple(expected[: last + 1])


def test_an_engine_whose_first_round_goes_wrong_goes_on() -> None:
    """The round has no tokens, and so says nothing of the speed of plain decoding."""
    model, prompts, expected = build("qwen2"), KNOWN.prompts, KNOWN.expected
    texts = [{*prompt, *tokens} for prompt, tokens in zip(prompts, expected, strict=True)]
    sick, well = next(
        (one, other)
        for one, other in itertools.permutations(range(len(texts)), 2)
        if expected[one][0] not in {*prompts[one]} | texts[other]
    )
    parts, speculation = decompose(model), SpeculationOptions(strategy="knapspec")
    with torch.no_grad():  # later than the checks at load
        model.get_input_embeddings().weight[expected[sick][0]] = torch.nan
    strategy = Auto(speculation, latency(len(parts.sublayers)), looks_up=False)
    engine = engine_with(parts, strategy, speculation=speculation)
    assert isinstance(complete(engine, [prompts[sick]])[0].error, NonFiniteLogitsError)
    assert tokens_of(complete(engine, [prompts[well]])) == [expected[well]]
