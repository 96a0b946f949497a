import inspect
import itertools
import logging
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.generate_state import GenerateState, cache_bytes, check_cuts, find_cuts, in_lockstep
from rayspec.decode.lockstep import recurrent_modules, shorten_chunks
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.whole_model import WholeModelStages
from rayspec.decode.work import RoundResult
from rayspec.local_engine import load_engine
from rayspec.strategies.fixed import FixedPlan, lookup_plan
from rayspec.types import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    Request,
    RequestError,
    UnsupportedModelError,
    no_draft,
)
from tests import every_type
from tests.engines import complete, tokens_of
from tests.exhaustive import few_of
from tests.families import WHOLE_FAMILIES, build, cases, checkpoint, greedy, ragged_prompts

LENGTHS = (1, 40, 7, 150)


COPYING = ("lookup", "recycling")


def _config(family: str, strategy: str = "auto", **options: object) -> EngineConfig:
    return _config_of(checkpoint(family), strategy, **options)


def _config_of(path: str, strategy: str = "auto", **options: object) -> EngineConfig:
    values: dict[str, object] = {"dtype": "float32", "device": "cpu", "max_model_len": 300, "max_num_seqs": 3}
    return EngineConfig(model=path, speculation=SpeculationOptions(strategy=strategy, gate=False), **(values | options))


def _repetitive(num_prompts: int = 3) -> list[list[int]]:
    return [prompt * 6 for prompt in ragged_prompts([7, 5, 11, 3][:num_prompts], seed=3)]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage() for record in found if record.name.startswith("rayspec")]


@pytest.mark.parametrize("family", few_of(WHOLE_FAMILIES, ("cohere2",)))
def test_a_family_that_does_not_split_copies_and_says_so(family: str, caplog: pytest.LogCaptureFixture) -> None:
    known = cases(checkpoint(family), LENGTHS, 20)
    prompts, expected = _repetitive(), greedy(checkpoint(family), _repetitive(), 24)
    engine = load_engine(_config(family, kv_cache_tokens=200, max_num_batched_tokens=32), with_tokenizer=False)
    assert isinstance(engine.stages, WholeModelStages)
    [message] = _warnings(caplog)
    assert message.startswith(f"drafts of this model are only copied or recycled tokens: {family}: ")
    for plan in (None, lookup_plan(1, 5)):  # by what it expects to pay, and whatever it expects
        if plan is not None:
            engine.replace_strategy(FixedPlan(plan))
            engine.stages.span.fewest_in_lockstep = 2
        outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
        assert tokens_of(outputs) == known.expected
        outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=24))
        assert tokens_of(outputs) == expected
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert not engine.stages.span.states


@pytest.mark.parametrize(
    ("strategy", "verification"),
    few_of(list(product(COPYING, ["coupled", "rejection"])), [("recycling", "coupled")]),
)
def test_copies_do_not_change_the_text(strategy: str, verification: str) -> None:
    """Sampled, too, where the text is a function of the seed."""
    options = SpeculationOptions(strategy=strategy, gate=False, verification=verification)
    engine = load_engine(_config("gpt_neox").replace(speculation=options), with_tokenizer=False)
    plain = load_engine(_config("gpt_neox", "ar"), with_tokenizer=False)
    greedy_params = SamplingParams(temperature=0, max_tokens=40)
    sampled = SamplingParams(temperature=0.4, top_p=0.9, seed=3, max_tokens=40, logprobs=2, repetition_penalty=1.1)
    for params in (greedy_params, sampled) if verification == "coupled" else (greedy_params,):
        drafted, expected = (complete(each, _repetitive(), params) for each in (engine, plain))
        assert tokens_of(drafted) == tokens_of(expected)
        for one, other in zip(drafted, expected, strict=True):
            assert [sorted(row) for row in one.outputs[0].logprobs or ()] == [
                sorted(row) for row in other.outputs[0].logprobs or ()
            ]
    assert engine.stats.num_accepted_tokens > 0
    assert plain.stats.num_draft_tokens == 0
    mixed = [greedy_params, greedy_params.replace(use_drafts=False), greedy_params]
    drafted, expected = complete(engine, _repetitive(), mixed), complete(plain, _repetitive(), greedy_params)
    assert tokens_of(drafted) == tokens_of(expected)
    assert [one.metrics.num_draft_tokens > 0 for one in drafted] == [True, False, True]


@pytest.mark.parametrize("by", few_of(["length", "token"], ["token"]))
def test_an_end_inside_a_draft_is_the_end(by: str) -> None:
    [prompt] = _repetitive(1)
    [text] = greedy(checkpoint("opt"), [prompt], 40)
    last = max(text.index(token) for token in set(text))  # where the text has its last new token
    ends = {"max_tokens": last + 1} if by == "length" else {"max_tokens": 40, "stop_token_ids": [text[last]]}
    engine = load_engine(_config("opt", "recycling"), with_tokenizer=False)
    for _ in range(3):  # from the second time on, all that comes is known
        request = Request(
            request_id="one", params=SamplingParams(**({"temperature": 0} | ends)), prompt_token_ids=prompt, stream=True
        )
        engine.add(request)
        new: list[int] = []
        while engine.has_unfinished:
            for output in engine.step():
                new += output.outputs[0].token_ids if output.outputs else ()
        assert tuple(new) == text[: last + 1]
    assert engine.stats.num_accepted_tokens > 0


def test_a_strategy_that_needs_sublayers_decodes_plainly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    known = cases(checkpoint("gpt2"), LENGTHS, 20)
    engine = load_engine(_config("gpt2", "swift"), with_tokenizer=False)
    assert "speculation is off for this model, which decodes plainly: gpt2: no list of" in caplog.text
    assert tokens_of(complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))) == known.expected
    assert engine.stats.num_draft_tokens == 0


def test_a_family_whose_rows_cannot_be_taken_back_decodes_plainly(caplog: pytest.LogCaptureFixture) -> None:
    prompts = _repetitive()
    engine = load_engine(_config("bert"), with_tokenizer=False)
    [message] = _warnings(caplog)
    assert message.startswith("speculation is off for this model, which decodes plainly: bert: ")
    assert "; rows of one pass differ from rows of several" in message
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(outputs) == greedy(checkpoint("bert"), prompts, 20)
    assert engine.stats.num_draft_tokens == 0


def _one_row_too_many(layer: DynamicLayer, tokens_to_remove: int) -> None:
    if tokens_to_remove:
        layer.keys, layer.values = (
            each[..., : each.shape[-2] + tokens_to_remove + 1, :] for each in (layer.keys, layer.values)
        )


def _without_what_was_pushed_out(layer: DynamicSlidingWindowLayer) -> None:
    """The cache then cannot be cut back beyond its window."""


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "why"),
    [
        (DynamicLayer, "crop", _one_row_too_many, "differ|cannot be taken back"),
        (DynamicSlidingWindowLayer, "activate_past_recording", _without_what_was_pushed_out, "cannot be taken back"),
    ],
)
@pytest.mark.parametrize("window", [12, 1000])  # the prompt of the check is longer, or is not
def test_a_wrong_cut_is_found_and_copies_are_made_instead(
    owner: type, method: str, wrong: object, why: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("cohere2", sliding_window=window)
    lockstep = in_lockstep(model)
    assert find_cuts(model, lockstep) == "crop"
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(UnsupportedModelError, match=why):
        check_cuts(model, "crop")
    assert find_cuts(model, lockstep) == "copy"


@pytest.mark.parametrize("family", few_of(["qwen3_next", "jamba"], ["qwen3_next"]))
def test_recurrent_state_is_taken_back(family: str, tmp_path: Path) -> None:
    """`test_whole_stages.py` has more families."""
    every_type.build(family).save_pretrained(tmp_path)
    prompts = [*_repetitive(), *ragged_prompts((1, 30, 40), vocab_size=200)]
    expected = greedy(str(tmp_path), prompts, 24)
    config = _config_of(str(tmp_path), kv_cache_tokens=128, max_num_batched_tokens=40)
    engine = load_engine(config, with_tokenizer=False)
    engine.replace_strategy(FixedPlan(lookup_plan(1, 5)))
    for engine.stages.span.fewest_in_lockstep in (None, 2):  # the second time, there are texts to copy from
        assert tokens_of(complete(engine, prompts, SamplingParams(temperature=0, max_tokens=24))) == expected
    assert engine.stats.num_preemptions > 0
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    _require_charges(engine, prompts[0])


@pytest.mark.parametrize(
    "family", few_of(["qwen3_next", "qwen3_5_moe", "granitemoehybrid", "mamba2"], ["qwen3_next", "mamba2"])
)
def test_a_verify_of_few_rows_is_one_chunk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument or the attribute of the module says how long a chunk is."""
    model = every_type.build(family)
    where, name = sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule"
    name = name if hasattr(where, name) else "mamba2_chunk_scan"
    chunk, sizes = getattr(where, name), []

    def noted(*given: Any, **named: Any) -> Any:
        sizes.append(inspect.signature(chunk).bind(*given, **named).arguments.get("chunk_size", 64))
        return chunk(*given, **named)

    monkeypatch.setattr(where, name, noted)
    model(torch.arange(9)[None])
    usual = set(sizes)
    assert min(usual) >= 16
    lockstep = in_lockstep(model)
    assert find_cuts(model, lockstep) == "copy"
    states = [GenerateState(model, list(range(9)), cuts="copy") for _ in range(2)]
    with torch.inference_mode():
        for state in states:
            sizes.clear()
            state.run(state.prompt)
            assert set(sizes) == usual
        sizes.clear()
        lockstep.run([partial(states[0].try_rows, [1, 2]), partial(states[1].try_rows, [1, 2, 3, 4])])
        assert sorted(sizes) == [2] * (len(sizes) // 2) + [4] * (len(sizes) // 2)


def test_modules_without_chunks_are_as_before() -> None:
    model = every_type.build("jamba")
    modules = recurrent_modules(model, lambda: model(torch.arange(4)[None]))
    before = [each.forward for each in modules]
    with pytest.raises(UnsupportedModelError, match="differ"), shorten_chunks(modules):
        check_cuts(model, "copy")
    assert modules
    assert [each.forward for each in modules] == before


class _Alternating(FixedPlan):
    """Every second round verifies copies. It keeps the results and seconds of rounds."""

    def __init__(self) -> None:
        super().__init__(lookup_plan(1, 5))
        self.rounds: list[tuple[RoundResult, float]] = []

    def choose(self, state: BatchState) -> RoundPlan:
        return RoundPlan(plan=no_draft(1, "plain")) if len(self.rounds) % 2 else super().choose(state)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self.rounds.append((result, seconds))


def _require_charges(engine: Engine, prompt: list[int]) -> None:
    """Require that what rejected rows cost a round without drafts is charged to the next verify."""
    strategy = _Alternating()
    engine.replace_strategy(strategy)
    engine.forget_texts()
    engine.stages.span.rejected_s = 1.0  # more than any round takes
    complete(engine, [prompt], SamplingParams(temperature=0, max_tokens=40))
    num_charged, owed_s, was_rejected = 0, 0.0, False
    for result, seconds in strategy.rounds:
        [draft], [num_accepted] = result.drafts, result.num_accepted
        if draft.token_ids:
            assert result.owed_s == -owed_s
            num_charged += owed_s > 0
        else:
            assert (result.owed_s > 0) == (was_rejected and engine.stages.span.cuts != "crop")
            assert seconds > 0
        owed_s += result.owed_s
        was_rejected = num_accepted < len(draft.token_ids)
    assert (num_charged > 0) == (engine.stages.span.cuts != "crop")


@pytest.mark.parametrize(
    ("strategy", "fewest_in_lockstep", "failing"),  # in the passes of a round, of which the last sequence is given up
    few_of(
        [(*each, failing) for each in (("ar", None), ("ar", 2), ("recycling", 2)) for failing in (20, 21, 22)],
        [("ar", None, 21), ("recycling", 2, 20)],
    ),
)
def test_a_lack_of_memory_in_a_pass_spoils_no_other_sequence(
    strategy: str, fewest_in_lockstep: int | None, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cases(checkpoint("gpt2"), (30, 30, 30), 20)
    engine = load_engine(_config("gpt2", strategy), with_tokenizer=False)
    engine.stages.span.fewest_in_lockstep = fewest_in_lockstep
    forward, count = engine.stages.span.model.transformer.h[2].forward, itertools.count(1)

    def fails_once(*given: Any, **named: Any) -> Any:
        if next(count) == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*given, **named)

    monkeypatch.setattr(engine.stages.span.model.transformer.h[2], "forward", fails_once)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
    assert [isinstance(output.error, OutOfMemoryError) for output in outputs] == [False, False, True]
    assert tokens_of(outputs[:2]) == known.expected[:2]


def test_many_rows_do_not_run_in_lockstep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take a thread; where there were too few, those that had one waited for the others for ever."""
    known = cases(checkpoint("gpt2"), (30, 30, 30), 20)
    engine = load_engine(_config("gpt2", "recycling"), with_tokenizer=False)
    engine.stages.span.fewest_in_lockstep = 2
    run, groups = engine.stages.span.lockstep.run, list[int]()
    monkeypatch.setattr("rayspec.decode.whole_model._MOST_ROWS_IN_LOCKSTEP", 2)
    monkeypatch.setattr(engine.stages.span.lockstep, "run", lambda calls: groups.append(len(calls)) or run(calls))
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(outputs) == known.expected
    assert {1, 2} <= {*groups} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("family", "strategy"),  # tokens of a prompt to bert see later ones: no chunks
    few_of(
        list(product(["gpt2", "cohere2", "bert"], ["ar", *COPYING])),
        [("gpt2", "recycling"), ("bert", "ar")],
    ),
)
def test_preempted_sequences_start_again(family: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = cases(checkpoint(family), (30, 30, 30), 20)
    config = _config(family, strategy, kv_cache_tokens=112, max_num_batched_tokens=40)
    engine = load_engine(config, with_tokenizer=False)
    assert isinstance(engine.stages, WholeModelStages)
    states, advance, held = engine.stages.span.states, engine.advance, []

    def advance_and_count() -> Any:
        held.append(len(states) - engine.load.num_running)
        return advance()

    monkeypatch.setattr(engine, "advance", advance_and_count)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))
    assert tokens_of(outputs) == known.expected
    assert engine.stats.num_preemptions > 0
    assert max(held) <= 0, "a sequence that waits keeps no cache"


def test_free_memory_bounds_the_tokens_of_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = build("gpt2"), cases(checkpoint("gpt2"), (30, 30, 30), 20)
    of_token, of_sequence = cache_bytes(model)
    assert (of_token, of_sequence) == (2 * 4 * model.config.num_hidden_layers * model.config.hidden_size, 0)
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 112 * of_token)
    engine = load_engine(_config("gpt2", "ar", kv_cache_share=0.25), with_tokenizer=False)
    assert tokens_of(complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=20))) == known.expected
    assert engine.stats.num_preemptions > 0
    monkeypatch.setattr("rayspec.decode.loading.free_bytes", lambda device: 4 * 10 * of_token)
    with pytest.raises(CheckpointError, match=r"too little: raise kv_cache_share .* lower max_num_seqs"):
        load_engine(_config("gpt2", "ar", kv_cache_share=0.25), with_tokenizer=False)
    of_token, of_sequence = cache_bytes(every_type.build("mamba2"))
    assert of_token == 0
    assert of_sequence > 0


def test_sampling_with_a_seed_does_not_depend_on_the_batch() -> None:
    prompts = cases(checkpoint("gpt2"), LENGTHS, 20).prompts
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2, repetition_penalty=1.2)
    engine = load_engine(_config("gpt2"), with_tokenizer=False)
    together = complete(engine, prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = complete(engine, [prompt], params)[0].outputs[0]
        assert alone.token_ids == output.outputs[0].token_ids
        assert alone.logprobs is not None
        assert len(alone.logprobs) == 12


def test_weights_that_compute_nan_are_refused_at_load(tmp_path: Path) -> None:
    model = build("gpt2")
    model.get_input_embeddings().weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="computes NaN or infinity"):
        load_engine(EngineConfig(model=str(tmp_path), device="cpu"), with_tokenizer=False)


@pytest.mark.parametrize("case", ["xlnet", "bert"])
def test_log_probabilities_of_a_prompt_are_refused_where_a_pass_does_not_give_them(case: str, tmp_path: Path) -> None:
    """XLNet gives the last row only, and rows of an encoder know the tokens that follow."""
    every_type.build(case).save_pretrained(tmp_path)
    engine = load_engine(_config_of(str(tmp_path), kv_cache_tokens=600), with_tokenizer=False)
    plain = SamplingParams(temperature=0, max_tokens=4)
    prompts = [[7, 9, 12, 33], [7, 9]]
    expected = tokens_of(complete(engine, prompts, plain))
    with pytest.raises(RequestError, match="prompt_logprobs"):
        complete(engine, prompts, [plain.replace(prompt_logprobs=1), plain])
    assert tokens_of(complete(engine, prompts, plain)) == expected


@pytest.mark.parametrize("option", ["deterministic", "own_bits"])
def test_what_needs_sublayers_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}.*gpt2"):
        load_engine(_config("gpt2", **{option: True}), with_tokenizer=False)


def test_a_vocabulary_of_one_token_is_no_reason_to_refuse_a_model(tmp_path: Path) -> None:
    build("gpt_neox", vocab_size=1).save_pretrained(tmp_path)
    engine = load_engine(_config_of(str(tmp_path), "lookup"), with_tokenizer=False)
    assert tokens_of(complete(engine, [[0], [0] * 40])) == [(0,) * 16] * 2
