"""What engine, shards and coordinator say to one another: headers of transport messages, msgpack of these types.

Every message carries the epoch it belongs to. A new epoch begins when a process was replaced; what is left of an older
one is dropped on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from rayspec.choices import FULL, Choice
from rayspec.config import SamplingParams
from rayspec.decode.drafting.skip_draft import RoundEntry
from rayspec.decode.head import SamplerSpec
from rayspec.decode.passes import Pass
from rayspec.decode.plan_search import TappedToken
from rayspec.decode.questions import (
    Answer,
    Cosine,
    Cosines,
    Feature,
    Features,
    Found,
    Knapsack,
    LayerKnapsack,
    Question,
    Trial,
)
from rayspec.decode.rounds import Prefill, PrefillResult, Round, RoundResult, Work
from rayspec.decode.scheduler import Chunk, Move
from rayspec.errors import TransportError
from rayspec.model.rows import RowSpan, Runs
from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.latency import Measurement
from rayspec.planning.lookup import DraftUntilFound
from rayspec.planning.stopping import DraftWhileSure
from rayspec.types import Plan

T = TypeVar("T")


class Named(Generic[T]):
    """A value of one of several types, which travels with the name of its type."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: what tells them apart on the wire is their class's name."""

    epoch: int


class Connect(Message, frozen=True, kw_only=True):
    """Engine to everyone: a new epoch with these peers. Forget everything and answer Connected. link: where stages
    meet that send tensors to one another by torch.distributed; "" where they use frames."""

    peers: dict[str, str]
    link: str = ""


class Peers(Message, frozen=True, kw_only=True):
    """Engine to a shard: the same epoch goes on, with these peers."""

    peers: dict[str, str]


class Connected(Message, frozen=True, kw_only=True):
    pass


class WireRound(msgspec.Struct, frozen=True, kw_only=True):
    entries: Sequence[RoundEntry]
    plan: Plan
    keep_drafting: Named[Any] | None
    num_taps: int


class Begin(Message, frozen=True, kw_only=True):
    """Engine to the first stage: some work (`chunks` of a prefill, a round, or both), with the sequences that it names
    first and those that are over since."""

    work_id: int
    chunks: Sequence[Chunk] = ()
    round: WireRound | None = None
    opened: Sequence[SamplerSpec] = ()
    closed: Sequence[str] = ()

    @classmethod
    def of(cls, epoch: int, work: Work, opened: Sequence[SamplerSpec], closed: Sequence[str]) -> Begin:
        """Raises TypeError for a rule of drafting that cannot travel."""
        if isinstance(work, Prefill):
            return cls(epoch=epoch, work_id=work.id, chunks=work.chunks, opened=opened, closed=closed)
        rule = work.keep_drafting
        if rule is not None and not isinstance(rule, _RULES):
            raise TypeError(
                f"{rule!r} cannot be sent to the stage that drafts: use DraftWhileWorth, DraftUntilFound or "
                "DraftWhileSure"
            )
        sent = WireRound(
            entries=work.entries,
            plan=work.plan,
            keep_drafting=None if rule is None else Named(rule),
            num_taps=work.num_taps,
        )
        return cls(epoch=epoch, work_id=work.id, chunks=work.chunks, round=sent, opened=opened, closed=closed)

    @property
    def work(self) -> Work:
        if self.round is None:
            return Prefill(id=self.work_id, chunks=self.chunks)
        return Round(
            id=self.work_id,
            entries=self.round.entries,
            plan=self.round.plan,
            keep_drafting=None if self.round.keep_drafting is None else self.round.keep_drafting.value,
            num_taps=self.round.num_taps,
            chunks=self.chunks,
        )


class Forward(Message, frozen=True, kw_only=True):
    """Stage to stage: a pass, with the states it has so far as the tensor (none: it enters at the embedding). The
    first pass of some work brings its Begin along, for the stage with the head."""

    work: Pass
    begin: Begin | None = None


class Done(Message, frozen=True, kw_only=True):
    """The last stage to the engine."""

    work_id: int
    prefill: PrefillResult | None = None
    round: RoundResult | None = None


class Failed(Message, frozen=True, kw_only=True):
    """A stage to the one with the head, and that to the engine: there was no memory for some work, and it goes on
    without it. The sequences that the work was to open and close are the head's business nevertheless: `begin`."""

    work_id: int
    reason: str
    begin: Begin | None = None


class Broken(Message, frozen=True, kw_only=True):
    """Anyone to the engine: I have failed and end. A shard that lost touch with others does not end (`ended` False):
    it waits for a new epoch."""

    reason: str
    ended: bool = True


class Ping(Message, frozen=True, kw_only=True):
    """Engine to everyone, now and then while something is under way: heartbeats are read."""


class Beat(Message, frozen=True, kw_only=True):
    """Shards and coordinator to the engine, while they hear from it or are busy: alive, and busy with one thing for so
    long. worked_s: with everything, since they began."""

    busy_s: float
    worked_s: float


class Moves(Message, frozen=True, kw_only=True):
    moves: Sequence[Move]


class Moved(Message, frozen=True, kw_only=True):
    pass


class Usage(Message, frozen=True, kw_only=True):
    """Engine to a shard: how busy have you been since you were asked last?"""


class Used(Message, frozen=True, kw_only=True):
    busy_s: float
    elapsed_s: float
    num_passes: int


class Measure(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: time your sublayers."""


class Measured(Message, frozen=True, kw_only=True):
    """names: of the curve of each sublayer. transfer_s: to bring the weights of each."""

    names: Sequence[str]
    measurements: Sequence[Measurement]
    transfer_s: Sequence[float]


class Lap(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: pass this on along the route, tensor and all; the last one answers with it. stamps: when
    each has had it, in seconds of its own monotonic clock."""

    route: Sequence[str]
    stamps: Sequence[float] = ()


class Profile(Message, frozen=True, kw_only=True):
    """Engine to the coordinator: measure the cluster."""


class Profiled(Message, frozen=True, kw_only=True):
    """By stage what Measured says; link_s: seconds of a hop from each stage to the next, and last to first."""

    stages: Sequence[Measured]
    link_s: Sequence[float]


class TimeHops(Message, frozen=True, kw_only=True):
    """Engine to the coordinator: time single hops of `num_bytes` between stages."""

    num_bytes: int
    num_samples: int


class TimedHops(Message, frozen=True, kw_only=True):
    """Seconds of `num_samples` hops from each stage to the next, and last to first; none where there is one stage."""

    hops_s: Sequence[Sequence[float]]


class Search(Message, frozen=True, kw_only=True):
    """Engine to the coordinator: ask tapped tokens."""

    search_id: int
    tokens: Sequence[TappedToken]
    places: Sequence[Runs]
    question: Named[Question]


class Searched(Message, frozen=True, kw_only=True):
    """version: number of the coordinator's answers so far, this one included."""

    search_id: int
    version: int
    answer: Named[Answer] | None
    reason: str = ""


class Seek(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: have the tapped states of these tokens ready; batch 0 of the first stage is the states
    before sublayer 0. Answered by Sought. No tokens: the search is over."""

    search_id: int
    tokens: Sequence[TappedToken]
    places: Sequence[Runs]


class RunSublayer(msgspec.Struct, frozen=True, tag="run"):
    sublayer: int
    choice: Choice
    source: int
    into: int


class VarySublayer(msgspec.Struct, frozen=True, tag="vary"):
    sublayer: int
    choice: Choice
    source: int
    into: int


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    sources: Sequence[int]
    index: Sequence[int]
    into: int


class Similarity(msgspec.Struct, frozen=True, tag="similarity"):
    sublayer: int
    source: int


class Agreement(msgspec.Struct, frozen=True, tag="agreement"):
    """Gives `questions.Agreement`, its arrays one after the other."""

    source: int


class TargetCosines(msgspec.Struct, frozen=True, tag="cosines"):
    pass


class TargetFeature(msgspec.Struct, frozen=True, tag="feature"):
    pass


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody needs the batch any more; a stage that does not have it does not mind."""

    source: int


class Ship(msgspec.Struct, frozen=True, tag="ship"):
    """Send a batch to another shard, which answers Sought when it has it."""

    source: int
    peer: str


Operation: TypeAlias = (
    RunSublayer | VarySublayer | Gather | Similarity | Agreement | TargetCosines | TargetFeature | Ship | Drop
)


class Expand(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: do these. Answered by Sought, unless it ends with Ship."""

    search_id: int
    operations: Sequence[Operation]


class Shipped(Message, frozen=True, kw_only=True):
    """Shard to shard: a batch of states, as the tensor."""

    search_id: int
    batch: int


class Sought(Message, frozen=True, kw_only=True):
    """A shard to the coordinator. values: of the last operation, where it gives some."""

    search_id: int
    values: Sequence[float] = ()
    error: str = ""


class Follow(Message, frozen=True, kw_only=True):
    """The leader of a tensor-parallel group to its other ranks: what it is about to do, so that all do: a pass, an
    expansion of states by `sublayer` and `choice`, moves, measurements, or to forget what was under way. Then it
    broadcasts states of that shape, if any."""

    shape: Sequence[int] = ()

    work: Pass | None = None
    sublayer: int | None = None
    choice: Choice = FULL
    rows: Sequence[RowSpan] = ()
    moves: Sequence[Move] = ()
    measure: bool = False
    forget: bool = False


class Stop(Message, frozen=True, kw_only=True):
    pass


AnyMessage: TypeAlias = (
    Connect | Peers | Connected | Begin | Forward | Done | Failed | Broken | Ping | Beat | Moves | Moved | Usage | Used
    | Measure | Measured | Lap | Profile | Profiled | TimeHops | TimedHops | Search | Searched | Seek | Expand | Shipped
    | Sought | Follow | Stop
)  # fmt: skip


_RULES = (DraftWhileWorth, DraftUntilFound, DraftWhileSure)
_QUESTIONS = (Knapsack, LayerKnapsack, Trial, Cosine, Feature)
_ANSWERS = (Found, Cosines, Features)
_NAMED: dict[str, Any] = {kind.__name__: kind for kind in (*_RULES, *_QUESTIONS, *_ANSWERS)}


def _to_wire(value: Any) -> Any:
    """Of types that msgspec does not know."""
    if isinstance(value, SamplingParams):
        return value.model_dump(exclude_defaults=True)
    assert isinstance(value, Named)
    return type(value.value).__name__, value.value


def _from_wire(kind: type, value: Any) -> Any:
    if kind is SamplingParams:
        return SamplingParams(**value)
    name, fields = value
    if name not in _NAMED:
        raise ValueError(f"there is no {name!r}")
    return Named(msgspec.convert(fields, _NAMED[name]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_from_wire)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(header: bytes) -> AnyMessage:
    """Raises TransportError for what is no message."""
    try:
        return _decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransportError(f"a message has a malformed header: {error}") from error
