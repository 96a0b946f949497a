"""A rule of drafting arrives as it was sent; what is no message is refused. Tests of the pipeline send the rest."""

import msgspec
import pytest

from rayspec.choices import FULL, SKIP
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.decode.work import DecodingParams, Round, RoundEntry, SamplerSpec, Work
from rayspec.errors import TransportError
from rayspec.model.rows import one_run
from rayspec.pipeline.messages import Begin, Broken, Envelope, Message, decode, encode
from rayspec.planning.acceptance import DraftUntilFound, DraftWhileWorth
from rayspec.planning.learning import CalibrationCurve, DraftWhileSure
from rayspec.types import Plan

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


def enveloped(message: Message) -> bytes:
    return encode(Envelope("a", 1, 0, None, (), message))


def begin(work: Work) -> Begin:
    return Begin(work=work)


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


def test_an_index_arrives_without_its_text() -> None:
    spec = SamplerSpec(sequence_id="1", params=DecodingParams(), seed=1, prompt_token_ids=[1], lookup=LookupIndex(4, 2))
    arrived = decode(enveloped(Begin(work=ROUND, opened=[spec]))).message
    assert isinstance(arrived, Begin)
    assert (lookup := arrived.opened[0].lookup) is not None
    assert (lookup.ngram, lookup.shortest, lookup.num_tokens) == (4, 2, 0)


def test_parameters_arrive_without_the_texts_that_only_the_engine_reads() -> None:
    params = DecodingParams(temperature=0.5, stop=("\ud800",), bad_words=("\ud800",))
    spec = SamplerSpec(sequence_id="1", params=params, seed=1, prompt_token_ids=[1])
    arrived = decode(enveloped(Begin(work=ROUND, opened=[spec]))).message
    assert isinstance(arrived, Begin)
    assert arrived.opened[0].params == DecodingParams(temperature=0.5)


def test_a_rule_of_drafting_that_cannot_be_sent_is_refused() -> None:
    work = Round(id=1, entries=[ENTRY], plan=ROUND.plan, keep_drafting=lambda confidences: [True])
    with pytest.raises(TypeError, match="DraftWhileWorth"):
        encode(begin(work))


def raw(message: object) -> bytes:
    return msgspec.msgpack.encode(["a", 1, 0, None, [], message])


MALFORMED = {
    "nothing": b"",
    "no message": raw([1, 2]),
    "unknown": raw({"type": "Shutdown"}),
    "one field more": raw({"type": "Measure", "now": True}),
    "a plan that cannot be": enveloped(begin(ROUND)).replace(
        msgspec.msgpack.encode("num_draft_tokens") + b"\x04", msgspec.msgpack.encode("num_draft_tokens") + b"\xff"
    ),
    "cut": enveloped(begin(ROUND))[:-1],
    "not UTF-8": enveloped(Broken(reason="x")).replace(b"\xa1x", b"\xa1\xff"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_refused(name: str) -> None:
    with pytest.raises(TransportError, match="malformed"):
        decode(MALFORMED[name])
