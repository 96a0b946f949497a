"""Strategies under measurement, with a tiny model."""

from typing import Any

import pytest

from rayspec.bench.contenders import Ours, Writing
from rayspec.bench.result import Sample
from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.local_engine import engine_like, load_engine
from tests.engines import RowClock, engine_with
from tests.families import checkpoint, parts_of, ragged_prompts, small_config

PROMPTS = ragged_prompts([5, 40, 60])


def config(strategy: str = "knapspec", family: str = "llama", **speculation: Any) -> EngineConfig:
    room: dict[str, Any] = {"max_model_len": 128, "kv_cache_tokens": None, "max_num_seqs": 2, "num_threads": 1}
    options = {"strategy": strategy, "gate": False, **speculation}
    return small_config(checkpoint(family), speculation=options, **room)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return load_engine(config("ar"), with_tokenizer=False)


def finish(writing: Writing) -> Sample:
    """Run all remaining increments."""
    found: list[Sample] = []

    def to_the_end() -> Writing:
        found.append((yield from writing))
        return found[0]

    for _ in to_the_end():
        pass
    return found[0]


def like(engine: Engine, strategy: str) -> Engine:
    other = engine_like(engine, config(strategy))
    assert other is not None
    return other


def test_weights_without_the_copies_that_are_wanted_are_not_shared(plain: Engine) -> None:
    for elsewhere in ({"offload": {"to": "disk"}}, {"parallel": {"stages": 2}}):
        assert engine_like(plain, config("ar").replace(**elsewhere)) is None
    assert engine_like(plain, config("knapspec")) is None
    assert engine_like(plain, config("static", static_choice="int4")) is None
    assert engine_like(plain, config("knapspec", choices=("skip", "pages"))) is not None
    assert engine_like(plain, config("knapspec", extra_weight_bytes=0)) is not None, "it would have no copies either"
    with_int4 = load_engine(config("static", static_choice="int4"), with_tokenizer=False)
    assert engine_like(with_int4, config("knapspec", choices=("skip", "int8"))) is None
    before = finish(Ours(plain).write(PROMPTS, 20)).token_ids
    for one in (config("ar"), config("knapspec"), config("static", static_choice="int4+pages")):
        shared = engine_like(with_int4, one)
        assert shared is not None
        assert engine_like(shared, config("knapspec")) is not None, "whoever made the copies"
        assert finish(Ours(shared).write(PROMPTS, 20)).token_ids == before


def test_the_rate_of_decoding_is_that_of_the_rounds() -> None:
    """Long and short prompts at once, so that steps run chunks of prompts and rounds: a row takes a second."""
    clock = RowClock()
    parts, prompts = parts_of(checkpoint("llama")), ragged_prompts([5, 60, 12, 40, 33, 20, 7, 50])
    engine = engine_with(parts, wrap=clock.count, clock=clock, max_num_seqs=8, max_num_batched_tokens=16)
    run = finish(Ours(engine).write(prompts, 10))
    num_decoded = sum(len(tokens) - 1 for tokens in run.token_ids)
    assert run.prefill_s == sum(map(len, prompts))
    assert run.seconds == run.prefill_s + num_decoded


def test_others_may_run_between_two_pieces(plain: Engine) -> None:
    contenders = [Ours(plain), Ours(like(plain, "layerskip"))]
    alone = [[finish(contender.write([prompt], 12)).token_ids[0] for prompt in PROMPTS] for contender in contenders]
    writings = [contender.write(PROMPTS, 12) for contender in contenders]
    for _ in range(5):
        for writing in writings:
            next(writing)
    for writing, before in zip(writings, alone, strict=True):
        run = finish(writing)
        assert run.token_ids == before
        assert 0 < run.prefill_s < run.seconds


def test_plans_count_from_when_it_was_warm(plain: Engine) -> None:
    """The plan of the warm-up goes on being used; what it did there is not told."""
    contender = Ours(like(plain, "asd"))
    contender.forget()
    contender.warm_up(PROMPTS, 12)
    assert contender.used.plans == []
    finish(contender.write(PROMPTS, 20))
    once = sum(record.num_tokens for record in contender.used.plans)
    assert 0 < once <= 3 * 19
    finish(contender.write(PROMPTS, 20))
    assert once < sum(record.num_tokens for record in contender.used.plans) <= 2 * 3 * 19
    assert all(record.sequence_s > 0 for record in contender.used.plans)


def test_a_run_copies_nothing_from_an_earlier_run_of_the_same_prompts() -> None:
    contender = Ours(load_engine(config("auto"), with_tokenizer=False))
    for _ in range(2):
        finish(contender.write(PROMPTS[:1], 20))
    assert "corpus" not in contender.engine.stats.accepted_by_source
