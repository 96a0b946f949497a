from rayspec import demo
from rayspec.choices import FULL
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.drafting.lookahead import Guess, Lookahead
from rayspec.strategies.by_name import make_strategy
from rayspec.strategies.fixed import lookahead_plan
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.strategy_cases import latency_model, state


class Small(Lookahead):
    num_levels, num_columns, max_guesses = 3, 2, 2


class Narrow(Lookahead):
    num_levels, num_columns = 4, 1


PLAN = lookahead_plan(8)
LENGTHS = (1, 37, 3, 61, 12)


def test_the_window_is_a_tree_of_levels() -> None:
    """Two columns of two levels: (0, 0) follows the newest token, (0, 1) follows (0, 0), (1, w) follows (0, w)."""
    lookahead = Small([5])
    assert lookahead.guess(5, max_tokens=9, max_depth=9) == Guess([5] * 4, [0, 1, 1, 2], 4)
    assert lookahead.guess(5, max_tokens=3, max_depth=9) == Guess()
    assert lookahead.guess(5, max_tokens=9, max_depth=2) == Guess()


def test_ngrams_are_made_column_by_column_and_come_back_as_branches() -> None:
    lookahead = Small([5])
    for probed in ([0, 0, 10, 20], [0, 0, 11, 21], [0, 0, 12, 22]):
        lookahead.observe([])  # a round without the window
        lookahead.observe(probed)
    # The random tokens have left the window: level 0 is (10, 20), level 1 (11, 21), and 12, 22 came after it.
    assert lookahead.guess(20, max_tokens=9, max_depth=9) == Guess([21, 22, 11, 21, 12, 22], [0, 1, 0, 3, 3, 4], 4)
    assert lookahead.guess(20, max_tokens=5, max_depth=9).token_ids[:1] == [21], "the window comes first"
    assert lookahead.guess(20, max_tokens=9, max_depth=1) == Guess([21], [0], 0)
    assert lookahead.guess(5, max_tokens=9, max_depth=9).num_probes == 4
    lookahead.observe([0, 0, 22, 99])
    assert lookahead.guess(11, max_tokens=9, max_depth=9).token_ids[:2] == [12, 22]


def test_guesses_share_what_they_begin_with() -> None:
    lookahead = Narrow([1])
    for ngram in ((1, 2, 3, 4), (1, 2, 5, 6)):
        lookahead.keep(ngram)
    guess = lookahead.guess(1, max_tokens=60, max_depth=60)
    assert guess.token_ids[: -guess.num_probes] == [2, 5, 6, 3, 4]
    assert guess.parents[: -guess.num_probes] == [0, 1, 2, 1, 4]


def test_text_that_repeats_itself_takes_fewer_rounds() -> None:
    """And what is guessed right to its end is committed to its end, and the token after it."""
    parts, prompts = demo_parts(), demo_prompts(2, 8)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    plain = complete(engine_with(parts, eos=(EOS,)), prompts, params)
    engine = engine_with(parts, lookahead_plan(32), eos=(EOS,), num_beside=64)
    outputs = complete(engine, prompts, params)
    assert tokens_of(outputs) == tokens_of(plain)
    for output in outputs:
        assert len(output.outputs[0].token_ids) / output.metrics.num_rounds > 1.2
    assert engine.stats.accepted_lengths[4] > 0, "guesses of four tokens, each with the token that comes after"


def test_the_strategy_makes_room_for_its_tree() -> None:
    config = EngineConfig(model=demo.model_path(), speculation=SpeculationOptions(strategy="lookahead", gate=False))
    assert config.speculation.num_branch_tokens == 62
    plan = make_strategy(config, 8, latency_model(4)).choose(state()).plan
    assert plan == PLAN
    assert plan.drafts
    assert set(plan.choices) == {FULL}
