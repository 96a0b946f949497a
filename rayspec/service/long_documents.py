"""Documents longer than the context: refused, truncated, or read in parts whose answers become one.

*map-reduce* answers every chunk of the document by itself, then merges neighbouring answers, level by level, until one
is left. *refine* reads the chunks in order and carries its answer along. Every call is a prompt of its own in the
engine's queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, field_validator

from rayspec.config import Options, SamplingParams
from rayspec.service.documents import Document
from rayspec.service.prompts import PromptBuilder, fitting_prompt_tokens
from rayspec.service.results import ResultRow
from rayspec.types import ConfigError, RayspecError, RequestError, RequestMetrics, RequestOutput

Mode = Literal["fail", "truncate", "map-reduce", "refine"]

_BETWEEN = "\n\n"
_TEXT, _SUMMARY = "{text}", "{summary}"
_PLACES = re.compile(r"\{(text|summary|number|count)\}")
_ANY_NUMBER = 999  # stands for the numbers of parts where the length of a prompt is estimated
_SENTENCE_ENDS = ".!?\u2026"
_WIDE_SENTENCE_ENDS = "\u3002\uff01\uff1f"  # of scripts that put no space between sentences

_PART = "(This is part {number} of {count} of a longer document.)\n\n{text}"
_MERGE = (
    "(A longer document was read in parts. What follows was written about its parts, in their order. "
    "Write the same about the whole document, without mentioning parts.)\n\n{text}"
)
_REFINE = (
    "(A longer document is being read in {count} parts. This was written about the parts before part {number}:)\n\n"
    "{summary}\n\n(Here is part {number}. Write the same about everything so far, without mentioning parts.)\n\n{text}"
)


class DoesNotShrinkError(RequestError):
    """The answers about the parts of a document do not become fewer, or not within the levels that are allowed."""

    kind = "does_not_shrink"


class LongDocumentOptions(Options):
    """What is done with documents that do not fit the context together with their output.

    level_output_tokens: of the answers about chunks, about groups of these, and so on; the last one holds for all
    levels above too. The answer about the whole document has what the sampling parameters allow.
    """

    mode: Mode = "fail"
    chunk_tokens: int | None = Field(None, ge=1, description="tokens of a chunk at most; None: what fits")
    overlap_tokens: int = Field(0, ge=0, description="tokens that a chunk shares with the one before")
    level_output_tokens: tuple[int, ...] = Field((), description="output tokens by level; none: as the final answer")
    max_levels: int = Field(6, ge=2, description="map-reduce: levels of answers, that about chunks included")
    max_parts_in_flight: int = Field(8, ge=1, description="map-reduce: prompts of one document in the engine at once")

    @field_validator("level_output_tokens")
    @classmethod
    def _positive(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if min(budgets, default=1) < 1:
            raise ValueError("each level needs 1 token or more")
        return budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTemplates:
    """What parts are wrapped in. "{text}" is the chunk, or the answers to be merged; "{number}" and "{count}" say which
    part this is of how many; in `refine`, "{summary}" is the answer so far. Raises ConfigError."""

    part: str
    merge: str
    refine: str

    def __post_init__(self) -> None:
        needed = (("part", self.part, _TEXT), ("merge", self.merge, _TEXT), ("refine", self.refine, _TEXT))
        for name, template, place in (*needed, ("refine", self.refine, _SUMMARY)):
            if place not in template:
                raise ConfigError(f"the template {name!r} is {template!r}: it must hold {place}")


def part_templates(template: str, *, instruct: bool) -> PartTemplates:
    """What asks of a document's parts the same that `template` asks of a whole one.

    instruct: say that they are parts. The bundled model needs it not to: it was trained on bare reports.
    """
    if not instruct:
        return PartTemplates(part=template, merge=template, refine=template.replace(_TEXT, f"{_SUMMARY}\n{_TEXT}"))
    return PartTemplates(
        part=template.replace(_TEXT, _PART),
        merge=template.replace(_TEXT, _MERGE),
        refine=template.replace(_TEXT, _REFINE),
    )


def filled(template: str, *, text: str, number: int, count: int, summary: str = "") -> str:
    """The template with its places filled, once: what stands in a text is never taken for a place."""
    values = {"text": text, "summary": summary, "number": str(number), "count": str(count)}
    return _PLACES.sub(lambda place: values[place[1]], template)


def cut(
    num_tokens: int, chunk: int, overlap: int, strength: Callable[[int], int] = lambda position: 0
) -> list[range]:
    """The fewest spans of at most `chunk` tokens that hold them all, each starting `overlap` tokens before the end of
    the one before, and of nearly equal length.

    strength: how good it is to end a span before the token at this position. Within a quarter of a span around the
    place that makes spans equal, the strongest place wins, then the nearest. Requires 0 <= 2 * overlap <= chunk >= 1.
    """
    spans, start, step = [], 0, chunk - overlap
    while num_tokens - start > chunk:
        num_left = -(-(num_tokens - start - overlap) // step)  # spans, this one included
        equal = start + overlap + (num_tokens - start - overlap) // num_left
        slack = step // 4
        first = max(equal - slack, num_tokens - (num_left - 1) * step)
        last = min(equal + slack, start + chunk)
        end = max(range(first, last + 1), key=lambda place: (strength(place), -abs(place - equal)))
        spans.append(range(start, end))
        start = end - overlap
    return [*spans, range(start, num_tokens)]


def group(sizes: Sequence[int], room: int) -> list[range]:
    """The fewest runs of neighbours whose sizes add up to at most `room`; of these the ones whose largest is smallest.

    What is larger than `room` is alone.
    """
    fewest = len(_filled_up(sizes, room))
    smallest = bisect_left(range(room), True, key=lambda less: len(_filled_up(sizes, less)) <= fewest)
    return _filled_up(sizes, smallest)


def _filled_up(sizes: Sequence[int], room: int) -> list[range]:
    groups, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > room:
            groups.append(range(start, index))
            start, total = index, 0
        total += size
    return [*groups, range(start, len(sizes))] if sizes else []


def num_levels(num_chunks: int, capacity: Callable[[int], int]) -> int:
    """Levels until one answer is left, the chunks' own included. capacity: how many answers of a level one prompt of
    the next holds, 2 or more."""
    level = 1
    while num_chunks > 1:
        num_chunks = -(-num_chunks // capacity(level))
        level += 1
    return level


def part_seed(seed: int, level: int, index: int) -> int:
    """The seed of one part: 64 bits, signed, that depend on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{level}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class TokenizedText:
    """A text and where its tokens lie in it. `tokenizer` must be a fast one of transformers."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self._text = text
        self._offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._offsets)

    def text(self, span: range) -> str:
        """What these tokens stand for, with the whole of a character of which they are a piece."""
        return self._text[self._offsets[span.start, 0] : self._offsets[span.stop - 1, 1]]

    def strength(self, position: int) -> int:
        """Of the cut before a token: 4 between paragraphs, 3 lines, 2 sentences, 1 words, 0 in a word, -1 in a
        character."""
        place = int(self._offsets[position, 0])
        if place < self._offsets[position - 1, 1]:
            return -1
        before, after = self._text[max(0, place - 3) : place], self._text[place : place + 2]
        gap = before[len(before.rstrip()) :] + after[: len(after) - len(after.lstrip())]
        last = before.rstrip()[-1:]
        if "\n" in gap:
            return 4 if gap.count("\n") > 1 else 3
        if last and last in (_SENTENCE_ENDS if gap else _WIDE_SENTENCE_ENDS):
            return 2
        return 1 if gap else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An answer about the tokens [start, end) of the document, and the answers it was made of.

    level: 1 about a chunk. In refine, the answers on the way are the children of the last, and their ranges are the
    chunks that they were made with.
    """

    level: int
    start: int
    end: int
    num_prompt_tokens: int
    num_output_tokens: int
    text: str
    children: tuple[Node, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As plain values, children included."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Usage:
    """Of all calls for a document. `decode_s` adds up calls that ran at the same time; the times are None where no
    call came so far."""

    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    decode_s: float | None = None
    arrival_s: float | None = None
    finished_s: float | None = None

    def add(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self.num_calls += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self.num_draft_tokens += metrics.num_draft_tokens
        self.num_accepted_tokens += metrics.num_accepted_tokens
        if metrics.finished_s is not None:
            self._add_times(metrics, metrics.finished_s)

    def _add_times(self, metrics: RequestMetrics, finished_s: float) -> None:
        if metrics.first_token_s is not None:
            self.decode_s = (self.decode_s or 0.0) + finished_s - metrics.first_token_s
        self.arrival_s = metrics.arrival_s if self.arrival_s is None else min(self.arrival_s, metrics.arrival_s)
        self.finished_s = finished_s if self.finished_s is None else max(self.finished_s, finished_s)

    @property
    def latency_s(self) -> float | None:
        """From the first call's arrival to the last one's end."""
        if self.arrival_s is None or self.finished_s is None:
            return None
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a document.

    roots: the tree of a document read in parts: one node, or, where a part failed, what was finished, in the order of
    the document. Empty for a document that was run whole. failed_part: which one has the error.
    """

    usage: Usage
    text: str | None = None
    finish_reason: str | None = None
    error: RayspecError | None = None
    failed_part: str = ""
    roots: tuple[Node, ...] = ()

    def row(self, row_id: str) -> ResultRow:
        """Counts are of all calls."""
        usage, error = self.usage, self.error
        drafts = usage.num_draft_tokens
        return ResultRow(
            id=row_id,
            text=self.text,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_output_tokens=usage.num_output_tokens,
            finish_reason="error" if error is not None else self.finish_reason,
            error_kind=error.kind if error is not None else None,
            error=f"{self.failed_part}: {error}" if error is not None and self.failed_part else error and str(error),
            num_draft_tokens=drafts,
            num_accepted_tokens=usage.num_accepted_tokens,
            acceptance_rate=usage.num_accepted_tokens / drafts if drafts else None,
            latency_s=usage.latency_s,
            decode_s=usage.decode_s,
        )


class Completes(Protocol):
    """What is asked of an AsyncEngine."""

    @property
    def max_model_len(self) -> int: ...

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A call to be made. `name` says which one to people."""

    level: int
    index: int
    start: int
    end: int
    prompt: str
    name: str
    final: bool = False
    children: tuple[Node, ...] = ()


class _PartFailedError(Exception):
    """Ends the work on a document. Never leaves this module."""

    def __init__(self, part: _Part, error: RayspecError) -> None:
        super().__init__(part.name)
        self.part = part.name
        self.error = error


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What is finished of a document: the nodes without a parent so far, by where they start."""

    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    by_start: dict[int, Node] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In the order of the document."""
        return tuple(self.by_start[start] for start in sorted(self.by_start))

    def add(self, node: Node) -> None:
        for child in node.children:
            del self.by_start[child.start]
        self.by_start[node.start] = node


class LongDocuments:
    """Answers documents of any length through one engine.

    prompts: makes the prompts of documents that fit, which run as they would without this class; its `params` are those
    of the answer about the whole document. With a seed, all parts have seeds made from it, so that the tree depends on
    the document, the options and the model only. A conversation is never cut.
    Raises ConfigError for options that cannot work with this context.
    """

    _OWN_LIMITS: ClassVar[frozenset[str]] = frozenset({"fail", "truncate"})

    def __init__(
        self, *, engine: Completes, prompts: PromptBuilder, templates: PartTemplates, options: LongDocumentOptions
    ) -> None:
        self._engine = engine
        self._options = options
        self._templates = templates
        self._fitting = fitting_prompt_tokens(engine.max_model_len, prompts.params)
        self._whole = replace(prompts, max_prompt_tokens=self._fitting) if options.mode == "truncate" else prompts
        self._bare = replace(prompts, template=_TEXT, max_prompt_tokens=None)
        budgets = options.level_output_tokens or (prompts.params.max_tokens,)
        self._budgets = budgets
        self._limit = engine.max_model_len - max(*budgets, prompts.params.max_tokens)
        if options.mode not in self._OWN_LIMITS:
            self._chunk = self._checked_chunk()

    async def summarize(self, document: Document) -> Outcome:
        """What is wrong with the document is in the outcome. Raises EngineDeadError. Cancelling the wait aborts
        everything that the document has in the engine."""
        try:
            tokens = self._whole.tokens(document)
        except RequestError as error:
            return Outcome(usage=Usage(), error=error)
        if self._options.mode in self._OWN_LIMITS or len(tokens) <= self._fitting or document.text is None:
            return _whole_outcome(await self._engine.run(tokens, self._whole.params))
        progress = _Progress()
        read = self._refine if self._options.mode == "refine" else self._map_reduce
        try:
            await read(TokenizedText(self._whole.llm.tokenizer, document.text), progress)
        except _PartFailedError as failure:
            error, failed_part = failure.error, failure.part
        except DoesNotShrinkError as failure:
            error, failed_part = failure, ""
        else:
            (root,) = progress.nodes
            return Outcome(
                usage=progress.usage, text=root.text, finish_reason=progress.finish_reason, roots=progress.nodes
            )
        return Outcome(usage=progress.usage, error=error, failed_part=failed_part, roots=progress.nodes)
