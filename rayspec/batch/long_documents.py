"""Documents longer than the context: refused, truncated, or read in parts whose answers are merged.

*map-reduce* answers every chunk of the document separately, then merges neighbouring answers, level by level, until one
answer is left. *refine* reads the chunks in order and passes the answer so far to the next chunk. Every call is a
separate prompt in the engine's queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from rayspec.batch.rows import Row, Usage
from rayspec.config import Options, SamplingParams
from rayspec.types import ConfigError, RayspecError, RequestError, RequestOutput

Mode = Literal["fail", "truncate", "map-reduce", "refine"]

_BETWEEN = "\n\n"
_TEXT, _SUMMARY = "{text}", "{summary}"
_PLACES = re.compile(r"\{(text|summary|number|count)\}")
_ANY_NUMBER = 999  # stands for the numbers of parts where the length of a prompt is estimated
_SENTENCE_ENDS = ".!?\N{HORIZONTAL ELLIPSIS}"
# Sentence ends of scripts that put no space between sentences.
_WIDE_SENTENCE_ENDS = "\N{IDEOGRAPHIC FULL STOP}\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}"

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
    """A part of a document does not fit a prompt, or merging the answers needs more levels than allowed."""

    kind = "does_not_shrink"


class LongDocumentOptions(Options):
    """How documents are treated that do not fit the context together with their output.

    level_output_tokens: output tokens of an answer about a chunk, about a group of chunks, and so on; the last number
    also holds for all higher levels. The answer about the whole document has `max_tokens` of the sampling parameters.
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

    @property
    def in_parts(self) -> bool:
        """Whether documents that do not fit are read in parts."""
        return self.mode in {"map-reduce", "refine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTemplates:
    """The prompt templates of parts. "{text}" is the chunk, or the answers to be merged. "{number}" is the part's
    number, "{count}" the number of parts. In `refine`, "{summary}" is the answer so far. Raises ConfigError."""

    part: str
    merge: str
    refine: str

    def __post_init__(self) -> None:
        needed = (("part", self.part, _TEXT), ("merge", self.merge, _TEXT), ("refine", self.refine, _TEXT))
        for name, template, place in (*needed, ("refine", self.refine, _SUMMARY)):
            if place not in template:
                raise ConfigError(f"the template {name!r} is {template!r}: it must hold {place}")


def part_templates(template: str, *, instruct: bool) -> PartTemplates:
    """Return templates that ask the same about a document's parts as `template` asks about a whole document.

    instruct: tell the model that it reads parts. False for the bundled models, which were trained on bare documents.
    """
    if not instruct:
        return PartTemplates(part=template, merge=template, refine=template.replace(_TEXT, f"{_SUMMARY}\n{_TEXT}"))
    return PartTemplates(
        part=template.replace(_TEXT, _PART),
        merge=template.replace(_TEXT, _MERGE),
        refine=template.replace(_TEXT, _REFINE),
    )


def filled(template: str, *, text: str, number: int, count: int, summary: str = "") -> str:
    """Return the template with its places filled in one pass: a place in an inserted text stays as it is."""
    values = {"text": text, "summary": summary, "number": str(number), "count": str(count)}
    return _PLACES.sub(lambda place: values[place[1]], template)


def cut(num_tokens: int, chunk: int, overlap: int, strength: Callable[[int], int] = lambda position: 0) -> list[range]:
    """Cut tokens into the fewest spans of at most `chunk` tokens and nearly equal length. Each span starts `overlap`
    tokens before the end of the previous span.

    strength: how good it is to end a span before the token at this position. The end of a span may differ from the end
    that makes spans equal by (chunk - overlap) / 4 tokens: of these positions the strongest wins, then the nearest.
    Requires 0 <= 2 * overlap <= chunk >= 1.
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
    """Split sizes into the fewest runs of neighbours that add up to at most `room` each; minimise the largest sum.

    A size larger than `room` is a run of its own.
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
    """Return the number of levels until one answer is left, including the level of the chunks. capacity: how many
    answers of a level fit one prompt of the next level, 2 or more."""
    level = 1
    while num_chunks > 1:
        num_chunks = -(-num_chunks // capacity(level))
        level += 1
    return level


def part_seed(seed: int, level: int, index: int) -> int:
    """Return the seed of one part: a signed number of 64 bits that depends only on the arguments."""
    digest = hashlib.blake2b(f"{seed}/{level}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


class TokenizedText:
    """A text and the positions of its tokens. `tokenizer` must be a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self._text = text
        import numpy as np  # noqa: PLC0415 - commands that do not split documents need no numpy

        self._offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._offsets)

    def text(self, span: range) -> str:
        """Return the text of these tokens. A character is included whole if a token of the span is a part of it."""
        return self._text[self._offsets[span.start, 0] : self._offsets[span.stop - 1, 1]]

    def strength(self, position: int) -> int:
        """Rate a cut before this token: 4 between paragraphs, 3 between lines, 2 between sentences, 1 between words,
        0 in a word, -1 in a character."""
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
    """An answer about the tokens [start, end) of the document, and the answers that it was made from.

    level: 1 for an answer about a chunk. In refine, all earlier answers are children of the last answer, and the range
    of each is the chunk that its prompt contained.
    """

    level: int
    start: int
    end: int
    num_prompt_tokens: int
    num_output_tokens: int
    text: str
    children: tuple[Node, ...] = ()


class Completes(Protocol):
    """The interface of AsyncEngine that this module uses."""

    @property
    def max_model_len(self) -> int: ...

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A prompt to be answered. name: identifies it in messages. final: its answer is about the whole document."""

    level: int
    index: int
    span: range
    prompt: str
    name: str
    final: bool
    children: tuple[Node, ...] = ()


class _PartFailedError(Exception):
    """Ends the work on a document; never leaves this module."""

    def __init__(self, part: _Part, error: RayspecError) -> None:
        super().__init__(part.name)
        self.part = part.name
        self.error = error


@dataclass(slots=True, kw_only=True)
class _Progress:
    """The finished answers of a document. by_start: the nodes without a parent so far, by their first token."""

    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    by_start: dict[int, Node] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes without a parent, in the order of the document."""
        return tuple(self.by_start[start] for start in sorted(self.by_start))

    def add(self, node: Node) -> None:
        for child in node.children:
            del self.by_start[child.start]
        self.by_start[node.start] = node

    def finished(self, row: Row) -> Row:
        (root,) = self.nodes
        return replace(self._counted(row), text=root.text, finish_reason=self.finish_reason)

    def failed(self, row: Row, error: RayspecError, part: str = "") -> Row:
        return self._counted(row).failed(error, part=part)

    def _counted(self, row: Row) -> Row:
        tree = [asdict(node) for node in self.nodes]
        return replace(row.counted(self.usage), tree=json.dumps(tree) if tree else None)


class LongDocuments:
    """Completes documents in parts through one engine.

    tokens: returns the prompt tokens for the text of a part. params: for the answer about a whole document. A seed in
    them gives every part a seed; then the tree depends only on the document, the options and the model.
    Raises ConfigError for options that cannot work with this context.
    """

    def __init__(
        self,
        *,
        engine: Completes,
        tokenizer: Any,
        tokens: Callable[[str], list[int]],
        params: SamplingParams,
        templates: PartTemplates,
        options: LongDocumentOptions,
    ) -> None:
        self._engine = engine
        self._tokenizer, self._tokens = tokenizer, tokens
        self._params, self._templates, self._options = params, templates, options
        if params.max_tokens is None:
            raise ConfigError("option 'max_tokens' is null, which leaves no room for parts of documents: give a number")
        self._max_tokens = params.max_tokens
        self._budgets = options.level_output_tokens or (self._max_tokens,)
        self._max_prompt_tokens = engine.max_model_len - max(*self._budgets, self._max_tokens)
        self._between_tokens = self._num_tokens(_BETWEEN)
        self._chunk_tokens = self._checked_chunk_tokens()

    async def complete(self, row: Row) -> Row:
        """Complete the row of a document. An error of the document is stored in the row. The row also has the tree: one
        root, or, if a part failed, the finished nodes in the order of the document. Raises EngineDeadError. Cancelling
        the call aborts all requests of the document."""
        text = TokenizedText(self._tokenizer, row.document or "")
        progress = _Progress()
        try:
            await (self._refine if self._refines else self._map_reduce)(text, progress)
        except _PartFailedError as failure:
            return progress.failed(row, failure.error, failure.part)
        except RequestError as error:
            return progress.failed(row, error)
        return progress.finished(row)

    @property
    def _refines(self) -> bool:
        return self._options.mode == "refine"

    async def _map_reduce(self, text: TokenizedText, progress: _Progress) -> None:
        chunks, level = self._chunks(text), 1
        self._require_few_levels(len(chunks))
        await self._answer_all((self._chunk_part(text, chunks, index) for index in range(len(chunks))), progress)
        while len(nodes := progress.nodes) > 1:
            groups = self._groups(nodes)
            if len(groups) == len(nodes) or level == self._options.max_levels:
                raise DoesNotShrinkError(
                    f"{len(nodes)} answers of level {level} are left, and few or no neighbours fit one prompt: lower "
                    "level_output_tokens, or raise max_model_len or max_levels"
                )
            level += 1
            await self._answer_all(self._merge_parts(level, groups, nodes), progress)

    async def _refine(self, text: TokenizedText, progress: _Progress) -> None:
        chunks = self._chunks(text)
        for index in range(len(chunks)):
            done = progress.nodes
            part = self._chunk_part(text, chunks, index, summary=done[-1].text if done else "")
            if part.final and done:
                part = replace(part, level=2, span=range(len(text)), children=done)
            await self._answer(part, progress)

    async def _answer_all(self, parts: Iterator[_Part], progress: _Progress) -> None:
        """Answer the parts. Each part is made when a worker is free, so that few prompts exist at a time."""

        async def work() -> None:
            for part in parts:
                await self._answer(part, progress)

        workers = [asyncio.ensure_future(work()) for _ in range(self._options.max_parts_in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, part: _Part, progress: _Progress) -> None:
        tokens = self._tokens(part.prompt)
        if len(tokens) > self._max_prompt_tokens:
            raise _PartFailedError(part, self._does_not_fit(len(tokens)))
        output = await self._engine.run(tokens, self._params_of(part))
        progress.usage.add(output)
        if output.error is not None:
            raise _PartFailedError(part, output.error)
        completion = output.outputs[0]
        progress.finish_reason = completion.finish_reason
        progress.add(
            Node(
                level=part.level,
                start=part.span.start,
                end=part.span.stop,
                num_prompt_tokens=len(tokens),
                num_output_tokens=len(completion.token_ids),
                text=completion.text,
                children=part.children,
            )
        )

    def _params_of(self, part: _Part) -> SamplingParams:
        whole = self._params
        budget = self._max_tokens if part.final else self._budget(part.level)
        seed = None if whole.seed is None else part_seed(whole.seed, part.level, part.index)
        min_tokens = None if whole.min_tokens is None else min(whole.min_tokens, budget)
        return whole.replace(max_tokens=budget, min_tokens=min_tokens, seed=seed)

    def _budget(self, level: int) -> int:
        """Return the number of output tokens for an answer of this level that is not the final answer."""
        return self._budgets[min(level, len(self._budgets)) - 1]

    def _chunks(self, text: TokenizedText) -> list[range]:
        """Cut the text into chunks whose prompts fit. A chunk may have more tokens by itself than in the text, and a
        template may contain it twice. So the prompts are counted; if one does not fit, all chunks become smaller."""
        chunk, overlap = self._chunk_tokens, self._options.overlap_tokens
        limit = self._max_prompt_tokens - self._summary_room
        while chunk >= max(1, 2 * overlap):
            chunks = cut(len(text), chunk, overlap, text.strength)
            longest = max(len(self._tokens(self._chunk_prompt(text, chunks, index))) for index in range(len(chunks)))
            if longest <= limit:
                return chunks
            chunk = chunk * limit // longest
        raise self._does_not_fit(longest)

    def _chunk_part(self, text: TokenizedText, chunks: Sequence[range], index: int, summary: str = "") -> _Part:
        span, count = chunks[index], len(chunks)
        return _Part(
            level=1,
            index=index,
            span=span,
            prompt=self._chunk_prompt(text, chunks, index, summary),
            name=f"part {index + 1} of {count} (tokens {span.start} to {span.stop})",
            final=index == count - 1 if self._refines else count == 1,
        )

    def _chunk_prompt(self, text: TokenizedText, chunks: Sequence[range], index: int, summary: str = "") -> str:
        template = self._templates.refine if self._refines and index > 0 else self._templates.part
        return filled(template, text=text.text(chunks[index]), number=index + 1, count=len(chunks), summary=summary)

    def _groups(self, nodes: Sequence[Node]) -> list[range]:
        """Return groups of neighbours that fit one prompt. As with chunks, the prompts are counted."""
        sizes = [self._num_tokens(node.text) + self._between_tokens for node in nodes]
        room = self._merge_room
        while True:
            groups = group(sizes, room)
            longest = max((len(self._tokens(part.prompt)) for part in self._merge_parts(2, groups, nodes)), default=0)
            if longest <= self._max_prompt_tokens:
                return groups
            room = room * self._max_prompt_tokens // longest

    def _merge_parts(self, level: int, groups: Sequence[range], nodes: Sequence[Node]) -> Iterator[_Part]:
        """Yield a prompt for each group of several nodes. A single node needs no merging."""
        for index, members in enumerate(groups):
            children = tuple(nodes[members.start : members.stop])
            if len(children) > 1:
                start, end = children[0].start, children[-1].end
                text = _BETWEEN.join(child.text.strip() for child in children)
                yield _Part(
                    level=level,
                    index=index,
                    span=range(start, end),
                    prompt=filled(self._templates.merge, text=text, number=index + 1, count=len(groups)),
                    name=f"merge {index + 1} of {len(groups)} on level {level} (tokens {start} to {end})",
                    final=len(groups) == 1,
                    children=children,
                )

    @property
    def _chunk_room(self) -> int:
        """Largest number of tokens of a chunk that fits a prompt together with its template and the answer so far."""
        templates = (self._templates.part, self._templates.refine) if self._refines else (self._templates.part,)
        return self._max_prompt_tokens - self._summary_room - max(map(self._overhead, templates))

    @property
    def _summary_room(self) -> int:
        """Tokens reserved for the answer so far, which may have more tokens when its text is tokenized again."""
        return self._budget(1) * 9 // 8 if self._refines else 0

    @property
    def _merge_room(self) -> int:
        return self._max_prompt_tokens - self._overhead(self._templates.merge)

    def _capacity(self, level: int) -> int:
        """Return how many answers of this level always fit one prompt."""
        return self._merge_room // (self._budget(level) + self._between_tokens)

    def _overhead(self, template: str) -> int:
        return len(self._tokens(filled(template, text="", number=_ANY_NUMBER, count=_ANY_NUMBER)))

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _does_not_fit(self, num_tokens: int) -> DoesNotShrinkError:
        return DoesNotShrinkError(
            f"its prompt has {num_tokens} tokens, and {self._max_prompt_tokens} fit beside the output: lower "
            "chunk_tokens, overlap_tokens or level_output_tokens, or raise max_model_len"
        )

    def _require_few_levels(self, num_chunks: int) -> None:
        needed, allowed = num_levels(num_chunks, self._capacity), self._options.max_levels
        if needed > allowed:
            raise DoesNotShrinkError(
                f"{num_chunks} chunks may need {needed} levels, max_levels is {allowed}: raise it or chunk_tokens, or "
                "lower level_output_tokens"
            )

    def _checked_chunk_tokens(self) -> int:
        options, room, limit = self._options, self._chunk_room, self._max_prompt_tokens
        if not self._tokenizer.is_fast:
            raise ConfigError(f"option 'mode' is {options.mode!r}: it needs a fast tokenizer, which knows where in the "
                              "text its tokens are; use 'truncate'")  # fmt: skip
        chunk = room if options.chunk_tokens is None else options.chunk_tokens
        if not 1 <= chunk <= room:
            raise ConfigError(
                f"option 'chunk_tokens' is {options.chunk_tokens}: {max(0, room)} tokens of a chunk fit beside the "
                "instruction and the output; lower it, level_output_tokens or max_tokens, or raise max_model_len"
            )
        if 2 * options.overlap_tokens > chunk:
            raise ConfigError(
                f"option 'overlap_tokens' is {options.overlap_tokens}: it must be at most half of a chunk, {chunk // 2}"
            )
        if options.mode == "map-reduce" and min(map(self._capacity, range(1, len(self._budgets) + 1))) < 2:
            raise ConfigError(
                f"option 'level_output_tokens' is {self._budgets}: two such answers must fit one prompt of {limit} "
                "tokens; lower it or max_tokens, or raise max_model_len"
            )
        return chunk
