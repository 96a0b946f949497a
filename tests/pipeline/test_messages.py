"""What is sent is what arrives, to the last field; what is no message is refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import strategies as some

from rayspec.choices import FULL, SKIP
from rayspec.decode.work import (
    Committed,
    Draft,
    Merge,
    Move,
    Pass,
    Prefill,
    PrefillResult,
    Round,
    RoundEntry,
    RoundResult,
    TappedToken,
    Work,
)
from rayspec.errors import TransportError
from rayspec.model.rows import RowSpan, one_run
from rayspec.pipeline.messages import (
    Begin,
    Broken,
    Connect,
    Done,
    Envelope,
    Expand,
    Failed,
    Follow,
    Forward,
    Message,
    Moves,
    RunSublayer,
    Ship,
    Sought,
    decode,
    encode,
)
from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.learning import CalibrationCurve, DraftWhileSure
from rayspec.planning.lookup import DraftUntilFound
from rayspec.types import Logprob, Plan

INT64 = some.integers(-(2**63), 2**63 - 1)
RULE = DraftWhileWorth(
    curve=CalibrationCurve(confidence=(0.0, 1.0), excess=(0.1, -0.1)), usual=0.8, rate=100.0, step_s=1e-3, row_s=1e-5
)
ENTRY = RoundEntry(
    sequence_id="1/a/0",
    runs=one_run(64, 1000),
    length=9,
    last_token=7,
    max_draft_tokens=4,
    end_tokens=[2, 5],
    looked_up=[3, 4, 1],
    parents=[0, 0, 1],
    num_probes=1,
    max_tree_tokens=40,
)
PLAN = Plan(choices=(FULL, SKIP), num_draft_tokens=4, source="x", tree_widths=(1, 3, 5, 10), lookahead=True)
ROUND = Round(id=3, entries=[ENTRY], plan=PLAN, keep_drafting=RULE, num_taps=2)
PASS = Pass(
    round_id=3,
    token_ids=[1, 2],
    rows=[RowSpan(one_run(64, 1000), 8, 3, (-1, 0, 0))],
    choices=(FULL, SKIP),
    save_at=1,
    merge=Merge(at=1, order=[1, 0], rows=[RowSpan(one_run(64, 1000), 8, 2)]),
    taps=[(0, TappedToken("1/a/0", 8))],
    fixed_shape=False,
)
# Others are sent by tests of the pipeline, which encode and decode every message.
MESSAGES: list[Message] = [
    Connect(epoch=2, peers={"engine": "tcp://127.0.0.1:1"}, link="127.0.0.1:2"),
    Forward(epoch=1, work=PASS),
    Failed(epoch=1, work_id=3, reason="full", begin=Begin(epoch=1, work=Prefill(id=3, chunks=()), closed=["2/b/0"])),
    Broken(epoch=1, reason="x", ended=False),
    Done(
        epoch=1,
        work_id=3,
        result=PrefillResult([None, Committed([4], [{4: Logprob(logprob=-math.inf, rank=1)}], False)]),
    ),
    Done(
        epoch=1,
        work_id=3,
        result=RoundResult(
            [Committed([5, 6], [], True)],
            [Draft([4, 6, 7], [0.5], [0, 0, 1], [13, 14])],
            [1],
            1,
            0.1,
            0.2,
            paths=[[2]],
            probed=[[7, 8]],
        ),
    ),
    Moves(epoch=1, moves=[Move(0, 64, 7), Move(0, 16, 7, in_windowed_store=True)]),
    Expand(epoch=1, search_id=1, operations=[RunSublayer(0, "int4+pages", 1, 2, varied=True), Ship(3, "stage-1")]),
    Sought(epoch=1, search_id=1, values=[0.5, math.nan]),
    Follow(epoch=1, shape=(1, 2, 64), work=PASS),
]


def enveloped(message: Message) -> bytes:
    return encode(Envelope("a", 1, 0, None, (), message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    arrived = decode(enveloped(message)).message
    assert type(arrived) is type(message)
    # NaN is not itself, so by their bytes.
    assert encode(arrived) == encode(message)


def begin(work: Work) -> Begin:
    return Begin(epoch=1, work=work)


@pytest.mark.parametrize(
    "rule",
    [
        RULE,
        DraftWhileSure(threshold=0.5),
        DraftUntilFound(worth=RULE, by_class=(0.5, 0.9), min_survival=0.1, drafting_gain=1.5),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_round_arrives_with_its_rule_of_drafting(rule: DraftWhileWorth | DraftWhileSure | DraftUntilFound) -> None:
    sent = msgspec.structs.replace(ROUND, keep_drafting=rule)
    arrived = decode(enveloped(begin(sent))).message
    assert isinstance(arrived, Begin)
    # Sequences come as lists, so by their bytes.
    assert encode(begin(arrived.work)) == encode(begin(sent))
    assert isinstance(arrived.work, Round)
    assert arrived.work.keep_drafting == rule
    confidences = [[0.9, 0.2], [0.99]]
    assert arrived.work.keep_drafting(confidences) == rule(confidences)


def test_a_rule_of_drafting_that_cannot_be_sent_is_refused() -> None:
    work = Round(id=1, entries=[ENTRY], plan=ROUND.plan, keep_drafting=lambda confidences: [True])
    with pytest.raises(TypeError, match="DraftWhileWorth"):
        encode(begin(work))


def raw(message: object) -> bytes:
    return msgspec.msgpack.encode(["a", 1, 0, None, [], message])


MALFORMED = {
    "nothing": b"",
    "no message": raw([1, 2]),
    "unknown": raw({"type": "Shutdown", "epoch": 1}),
    "one field more": raw({"type": "Measure", "epoch": 1, "now": True}),
    "a plan that cannot be": enveloped(begin(ROUND)).replace(
        msgspec.msgpack.encode("num_draft_tokens") + b"\x04", msgspec.msgpack.encode("num_draft_tokens") + b"\xff"
    ),
    "cut": enveloped(MESSAGES[1])[:-1],
    "not UTF-8": enveloped(Broken(epoch=1, reason="x")).replace(b"\xa1x", b"\xa1\xff"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_refused(name: str) -> None:
    with pytest.raises(TransportError, match="malformed"):
        decode(MALFORMED[name])
