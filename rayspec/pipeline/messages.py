"""Messages between engine, shards and coordinator, encoded as msgpack.

Every envelope names the sender's epoch. A new epoch begins when a shard is replaced or a message is lost; messages of
older epochs are dropped on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from rayspec.choices import FULL, Choice
from rayspec.decode.drafting.lookup import LookupIndex
from rayspec.decode.search import Answer, Question
from rayspec.decode.work import DecodingParams, KeepDrafting, Move, Pass, Result, SamplerSpec, TappedToken, Work
from rayspec.errors import TransportError
from rayspec.forms.grammar import Constraint
from rayspec.model.rows import RowSpan
from rayspec.planning.acceptance import DraftUntilFound, DraftWhileWorth
from rayspec.planning.latency import Measurement
from rayspec.planning.learning import DraftWhileSure


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. On the wire, the class name identifies the type of a message."""


class Connect(Message, frozen=True, kw_only=True):
    """Engine to all processes: begin this message's epoch with these peers (name -> address), forget all work, answer
    Connected. In the present epoch it only replaces the peers. link: address where the stages meet to send tensors by
    torch.distributed; "" if tensors travel in frames."""

    peers: dict[str, str]
    link: str = ""


class Connected(Message, frozen=True, kw_only=True):
    """Answer to Connect. link_error: why the process could not join the link; "" if it could, or if there is none."""

    link_error: str = ""


class Begin(Message, frozen=True, kw_only=True):
    """Engine to the first stage, and with the first pass on to the stage with the head: start some work. opened:
    sequences that this work is the first to name. closed: sequences that have ended since the Begin before."""

    work: Work
    opened: Sequence[SamplerSpec] = ()
    closed: Sequence[str] = ()


class Forward(Message, frozen=True, kw_only=True):
    """Stage to stage: run a pass. The tensor is the hidden states of the pass so far; without a tensor, the pass starts
    at the embedding. begin: sent with the first pass of some work, for the stage with the head."""

    work: Pass
    begin: Begin | None = None


class Done(Message, frozen=True, kw_only=True):
    """Last stage to the engine: the result of some work."""

    work_id: int
    result: Result


class Failed(Message, frozen=True, kw_only=True):
    """A stage to the next, and the last to the engine: some work ran out of memory and is dropped; the stages go on.
    begin: names the sequences that stages must open and close nevertheless."""

    work_id: int
    reason: str
    begin: Begin | None = None


class Broken(Message, frozen=True, kw_only=True):
    """Any process to the engine: this process has failed and ends. After a transport error, a shard does not end
    (`ended` is False) but waits for a new epoch."""

    reason: str
    ended: bool = True


class Moves(Message, frozen=True, kw_only=True):
    """Engine to a shard: copy keys and values in the KV cache, then answer Moved."""

    moves: Sequence[Move]


class Moved(Message, frozen=True, kw_only=True):
    """Answer to Moves."""


class Measure(Message, frozen=True, kw_only=True):
    """Engine to a shard: time your sublayers. Answered by Measured."""


class Measured(Message, frozen=True, kw_only=True):
    """names: latency curve of each sublayer. transfer_s: seconds to fetch the weights of each; 0 unless offloaded.
    rejected_s: see `LatencyModel`, of this stage."""

    names: Sequence[str]
    measurements: Sequence[Measurement]
    transfer_s: Sequence[float]
    rejected_s: float = 0.0


class Lap(Message, frozen=True, kw_only=True):
    """Engine to a shard: send this message and its tensor on along the route, which ends at the engine. stamps: when
    each shard on the way had it, in seconds of the shard's own monotonic clock."""

    route: Sequence[str]
    stamps: Sequence[float] = ()


class Search(Message, frozen=True, kw_only=True):
    """Engine to the coordinator: answer a question about tapped tokens. The shards keep a tap of each, which is its
    hidden states at all sublayer boundaries. rows: the row of each token."""

    search_id: int
    tokens: Sequence[TappedToken]
    rows: Sequence[RowSpan]
    question: Question


class Searched(Message, frozen=True, kw_only=True):
    """Coordinator to the engine: the answer to Search; None if the search failed for this reason."""

    search_id: int
    answer: Answer | None
    reason: str = ""


class Seek(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: prepare the taps of these tokens for a search, then answer Sought. On the first stage,
    batch 0 is then the states before sublayer 0. Without tokens: end the search, without an answer."""

    search_id: int
    tokens: Sequence[TappedToken]
    rows: Sequence[RowSpan]


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Call a method of the search on the batches `sources` of states; its result becomes the batch `into`, or the
    numbers that Sought returns (of `agreement`, its arrays one after another). drop: forget a batch. ship: send a batch
    to another shard and forget it; it comes last, and the other shard answers Sought when the batch has arrived."""

    method: Literal["run", "vary", "gather", "similarity", "agreement", "cosines", "feature", "drop", "ship"]
    sources: Sequence[int] = ()
    into: int = 0
    sublayer: int = 0
    choices: Sequence[Choice] = ()
    index: Sequence[int] = ()
    peer: str = ""


class Expand(Message, frozen=True, kw_only=True):
    """Coordinator to a shard: do these operations. Answered by Sought, unless the last one ships a batch."""

    search_id: int
    operations: Sequence[Operation]


class Shipped(Message, frozen=True, kw_only=True):
    """Shard to shard: a batch of states, which is the message's tensor."""

    search_id: int
    batch: int


class Sought(Message, frozen=True, kw_only=True):
    """Shard to the coordinator: answer to Seek, Expand or Shipped. values: of the last operation that returns some."""

    search_id: int
    values: Sequence[float] = ()
    error: str = ""


class Follow(Message, frozen=True, kw_only=True):
    """Leader of a tensor-parallel group to its other ranks: do what the leader is about to do. This is a pass, an
    expansion of states by `sublayer` and `choice`, moves, measurements, or to forget all work under way. If `shape` is
    not empty, the leader then broadcasts hidden states of that shape."""

    shape: Sequence[int] = ()

    work: Pass | None = None
    sublayer: int | None = None
    choice: Choice = FULL
    rows: Sequence[RowSpan] = ()
    moves: Sequence[Move] = ()
    measure: bool = False
    forget: bool = False


AnyMessage: TypeAlias = (
    Connect | Connected | Begin | Forward | Done | Failed | Broken | Moves | Moved | Measure | Measured
    | Lap | Search | Searched | Seek | Expand | Shipped | Sought | Follow
)  # fmt: skip


def _to_wire(value: Any) -> Any:
    """Encode a value of a type that msgspec does not know."""
    if isinstance(value, DecodingParams):
        # The head reads no texts that end the output or are banned, and such a text may have no UTF-8 form.
        return value.model_dump(exclude_defaults=True, exclude={"stop", "bad_words"})
    if isinstance(value, Constraint):  # the other process makes its own, from the parameters and the tokens
        return None
    if isinstance(value, LookupIndex):  # the other process makes its own, from the sequence's tokens
        return value.ngram, value.shortest
    raise TypeError(
        f"{value!r} cannot be sent to another process; a rule of drafting must be DraftWhileWorth, DraftUntilFound or "
        "DraftWhileSure"
    )


def _from_wire(kind: Any, value: Any) -> Any:
    if kind is DecodingParams:
        return DecodingParams(**value)
    if kind is LookupIndex:
        return LookupIndex(*value)
    assert kind == KeepDrafting, kind
    return msgspec.convert(value, DraftWhileWorth | DraftUntilFound | DraftWhileSure)


class TensorForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a message. stream, number: the message is number `number` of one connection; a gap shows that
    messages were lost. rank: the sender's rank on the link that carries the tensors; None if the tensors are in the
    frames that follow."""

    sender: str
    stream: int
    number: int
    rank: int | None
    tensors: tuple[TensorForm, ...]
    message: AnyMessage
    epoch: int = 0


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope, dec_hook=_from_wire)
encode = _encoder.encode


def decode(frame: bytes | memoryview) -> Envelope:
    """Raises TransportError for a malformed envelope."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransportError(f"a message is malformed: {error}") from error
