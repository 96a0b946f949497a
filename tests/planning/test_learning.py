import random
from pathlib import Path

import pytest

from rayspec.planning import learning
from rayspec.planning.learning import AnswerLength, Discounted, PrefillPace, StopRecord, StopRule
from rayspec.strategies import gate


def test_a_discounted_mean_halves_by_weight_or_by_age() -> None:
    mean = Discounted(2.0, prior=7.0, strength=1.0)
    assert (mean.value, mean.is_known) == (7.0, False)
    mean.observe(8.0, 4.0)
    mean.observe(3.0, 2.0)
    assert (mean.total, mean.weight) == (7.0, 4.0)
    mean.observe(1.0, 1.0, age=4.0)
    assert (mean.total, mean.weight) == (2.75, 2.0)
    assert mean.value == pytest.approx((2.75 + 7.0) / 3)
    assert mean.with_prior(0.0, 0.0) == pytest.approx(2.75 / 2)


def test_the_rule_is_learned_from_drafts() -> None:
    record, true_rule, rng = StopRecord(), StopRule(detects=0.9, misfires=0.15), random.Random(1)
    assert record.rule == StopRule(detects=0.6, misfires=0.05)
    for _ in range(2000):
        num_accepted, ended = 0, False
        for _step in range(16):
            accepted = rng.random() < 0.8
            num_accepted += accepted
            ended = rng.random() < (true_rule.misfires if accepted else true_rule.detects)
            if not accepted or ended:
                break
        record.observe(num_accepted=num_accepted, num_tested=num_accepted + (not accepted), ended=ended)
    assert record.rule.detects == pytest.approx(true_rule.detects, abs=0.08)
    assert record.rule.misfires == pytest.approx(true_rule.misfires, abs=0.05)


def test_empty_drafts_as_forms_leave_them_say_nothing_of_the_rule() -> None:
    record = StopRecord()
    for _ in range(100):
        record.observe(num_accepted=0, num_tested=0, ended=True)
    assert record.rule == StopRecord().rule, "drafts of 1e14 tokens were expected, and the engine counted to them"


def test_short_answers_are_expected_after_short_answers() -> None:
    length = AnswerLength()
    length.observe(num_tokens=0, num_ends=0)
    assert length.expected(256) == 256.0, "without an end, the limit"
    for _ in range(20):
        length.observe(num_tokens=50, num_ends=1)
    assert length.expected(10_000) == pytest.approx(50)
    assert length.expected(50) == pytest.approx(50 * (1 - 0.98**50))
    assert length.expected(1) == pytest.approx(1)


def test_answers_under_way_count_so_those_that_end_first_do_not_bias() -> None:
    """Eight answers at a time, of 20 or 400 tokens. After some steps mostly short ones have ended."""
    length, rng = AnswerLength(), random.Random(0)
    left = [rng.choice([20, 400]) for _ in range(8)]
    for _ in range(200):
        left = [each - 1 for each in left]
        num_ends = left.count(0)
        length.observe(num_tokens=8, num_ends=num_ends)
        left = [each or rng.choice([20, 400]) for each in left]
    assert length.expected(100_000) > 100


def _pace(round_s: float, row_s: float, *, mixed: bool) -> PrefillPace:
    pace = PrefillPace()
    for _ in range(8):
        pace.observe(round_s, num_chunk_rows=0, has_round=True)
        pace.observe(100 * row_s + round_s * mixed, num_chunk_rows=100, has_round=mixed)
    return pace


@pytest.mark.parametrize("mixed", [False, True])
def test_a_chunk_takes_as_long_as_a_round(mixed: bool) -> None:
    assert _pace(0.5, 0.001, mixed=mixed).num_rows(1024) == pytest.approx(500, abs=1)


def test_it_is_never_tiny_nor_more_than_allowed() -> None:
    assert _pace(0.01, 0.001, mixed=False).num_rows(1024) == 32
    assert _pace(0.01, 0.001, mixed=False).num_rows(8) == 8
    assert _pace(5.0, 0.001, mixed=False).num_rows(1024) == 1024
    assert PrefillPace().num_rows(1024) == 32, "nothing is known yet"
    assert _pace(0.5, 0.0, mixed=True).num_rows(1024) == 32, "a chunk that cost nothing"


TABLE = Path(__file__).parent.parent.parent / "docs" / "internals.md"


def test_constants_are_few_and_all_are_in_the_table() -> None:
    numbers = {**vars(learning), **vars(gate)}
    public = {name: value for name, value in numbers.items() if name.isupper() and name[0] != "_"}
    known = {name: value for name, value in public.items() if isinstance(value, (int, float))}
    assert len(known) <= 25
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert {name: float(listed[name]) for name in known} == known
