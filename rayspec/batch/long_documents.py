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
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from rayspec.batch.rows import RequestTotals, Row
from rayspec.config import Options, SamplingParams
from rayspec.types import ConfigError, RayspecError, RequestError

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine

Mode = Literal["fail", "truncate", "map-reduce", "refine"]

_BETWEEN = "\n\n"
_TEXT, _SUMMARY = "{text}", "{summary}"
_PLACES = re.compile(r"\{(text|summary|number|count)\}")
_MAX_LEVELS = 6  # of answers in map-reduce, that about chunks included
_MAX_PARTS_IN_FLIGHT = 8  # map-reduce: prompts of one document in the engine at once
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
    """A part of a document does not fit a prompt, or merging the answers needs too many levels."""

    kind = "does_not_shrink"


class LongDocumentOptions(Options):
    """How documents are treated that do not fit the context together with their output.

    level_tokens: output tokens of an answer about a chunk, about a group of chunks, and so on; the last number also
    holds for all higher levels. The answer about the whole document has `max_tokens` of the sampling parameters.
    """

    long: Mode = Field("fail", description="what becomes of documents beyond the context")
    chunk_tokens: int | None = Field(None, ge=1, description="tokens of a part of a long document; None: what fits")
    overlap_tokens: int = Field(0, ge=0, description="tokens that a part shares with the one before")
    level_tokens: tuple[int, ...] = Field(
        (), description="output tokens about parts, about groups of these, ...; repeatable"
    )

    @field_validator("level_tokens")
    @classmethod
    def _positive(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if min(budgets, default=1) < 1:
            raise ValueError("each level needs 1 token or more")
        return budgets

    @property
    def in_parts(self) -> bool:
        """Whether documents that do not fit are read in parts."""
        return self.long in {"map-reduce", "refine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTemplates:
    """The prompt templates of parts. "{text}" is the chunk, or the answers to be merged. "{number}" is the part's
    number, "{count}" the number of parts. In `refine`, "{summary}" is the answer so far."""

    part: str
    merge: str
    refine: str


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
class PartAnswer:
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
    children: tuple[PartAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A prompt to be answered. name: identifies it in messages. final: its answer is about the whole document."""

    level: int
    index: int
    span: range
    prompt: str
    name: str
    final: bool
    children: tuple[PartAnswer, ...] = ()


class _PartFailedError(Exception):
    """Ends the work on a document; never leaves this module."""

    def __init__(self, part: _Part, error: RayspecError) -> None:
        super().__init__(part.name)
        self.part = part.name
        self.error = error


@dataclass(slots=True, kw_only=True)
class _Answers:
    """The finished answers of a document. by_start: the answers without a parent so far, by their first token."""

    totals: RequestTotals = field(default_factory=RequestTotals)
    finish_reason: str | None = None
    by_start: dict[int, PartAnswer] = field(default_factory=dict)

    @property
    def roots(self) -> tuple[PartAnswer, ...]:
        """The answers without a parent, in the order of the document."""
        return tuple(self.by_start[start] for start in sorted(self.by_start))

    def counted(self, row: Row) -> Row:
        tree = [asdict(answer) for answer in self.roots]
        return replace(row.counted(self.totals), tree=json.dumps(tree) if tree else None)


class LongDocuments:
    """Completes documents in parts through one engine.

    tokens: returns the prompt tokens for the text of a part. params: for the answer about a whole document. A seed in
    them gives every part a seed; then the tree depends only on the document, the options and the model.
    Raises ConfigError for options that cannot work with this context.
    """

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        tokens: Callable[[str], list[int]],
        params: SamplingParams,
        templates: PartTemplates,
        options: LongDocumentOptions,
    ) -> None:
        if params.max_tokens is None:
            raise ConfigError("option 'max_tokens' is null, which leaves no room for parts of documents: give a number")
        self._engine, self._tokenizer, self._tokens = engine, engine.tokenizer, tokens
        self._params, self._templates, self._options = params, templates, options
        self._max_tokens = params.max_tokens
        self._budgets = options.level_tokens or (self._max_tokens,)
        self._max_prompt_tokens = engine.max_model_len - max(*self._budgets, self._max_tokens)
        self._between_tokens = self._num_tokens(_BETWEEN)
        self._refines = options.long == "refine"
        # The answer so far may have more tokens when its text is tokenized again.
        self._summary_room = self._budgets[0] * 9 // 8 if self._refines else 0
        part, merge, refine = (
            len(tokens(filled(template, text="", number=_ANY_NUMBER, count=_ANY_NUMBER)))
            for template in (templates.part, templates.merge, templates.refine)
        )
        self._merge_room = self._max_prompt_tokens - merge
        chunk_room = self._max_prompt_tokens - self._summary_room - (max(part, refine) if self._refines else part)
        self._chunk_tokens = chunk_room if options.chunk_tokens is None else options.chunk_tokens
        self._check_options(chunk_room)

    async def complete(self, row: Row) -> Row:
        """Complete the row of a document. An error of the document is stored in the row. The row also has the tree: one
        root, or, if a part failed, the finished answers in the order of the document. Raises EngineDeadError.
        Cancelling the call aborts all requests of the document."""
        text = TokenizedText(self._tokenizer, row.document or "")
        answers = _Answers()
        try:
            await (self._refine if self._refines else self._map_reduce)(text, answers)
        except _PartFailedError as failure:
            return answers.counted(row).failed(failure.error, part=failure.part)
        except RequestError as error:
            return answers.counted(row).failed(error)
        (root,) = answers.roots
        return replace(answers.counted(row), text=root.text, finish_reason=answers.finish_reason)

    async def _map_reduce(self, text: TokenizedText, answers: _Answers) -> None:
        chunks, level = self._chunks(text), 1
        await self._answer_all((self._chunk_part(text, chunks, index) for index in range(len(chunks))), answers)
        while len(roots := answers.roots) > 1:
            groups = self._groups(roots)
            if len(groups) == len(roots) or level == _MAX_LEVELS:
                raise DoesNotShrinkError(
                    f"{len(roots)} answers of level {level} are left, and few or no neighbours fit one prompt: lower "
                    "level_tokens, or raise max_model_len or chunk_tokens"
                )
            level += 1
            await self._answer_all(self._merge_parts(level, groups, roots), answers)

    async def _refine(self, text: TokenizedText, answers: _Answers) -> None:
        chunks = self._chunks(text)
        for index in range(len(chunks)):
            done = answers.roots
            part = self._chunk_part(text, chunks, index, summary=done[-1].text if done else "")
            if part.final and done:
                part = replace(part, level=2, span=range(len(text)), children=done)
            await self._answer(part, answers)

    async def _answer_all(self, parts: Iterator[_Part], answers: _Answers) -> None:
        """Answer the parts. Each part is made when a worker is free, so that few prompts exist at a time."""

        async def work() -> None:
            for part in parts:
                await self._answer(part, answers)

        workers = [asyncio.ensure_future(work()) for _ in range(_MAX_PARTS_IN_FLIGHT)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, part: _Part, answers: _Answers) -> None:
        tokens, whole = self._tokens(part.prompt), self._params
        if len(tokens) > self._max_prompt_tokens:
            raise _PartFailedError(part, self._does_not_fit(len(tokens)))
        budget = self._max_tokens if part.final else self._budgets[min(part.level, len(self._budgets)) - 1]
        seed = None if whole.seed is None else part_seed(whole.seed, part.level, part.index)
        min_tokens = None if whole.min_tokens is None else min(whole.min_tokens, budget)
        params = whole.replace(max_tokens=budget, min_tokens=min_tokens, seed=seed)
        output = await self._engine.run(tokens, params)
        answers.totals.add(output)
        if output.error is not None:
            raise _PartFailedError(part, output.error)
        completion = output.outputs[0]
        answers.finish_reason = completion.finish_reason
        for child in part.children:
            del answers.by_start[child.start]
        answers.by_start[part.span.start] = PartAnswer(
            level=part.level,
            start=part.span.start,
            end=part.span.stop,
            num_prompt_tokens=len(tokens),
            num_output_tokens=len(completion.token_ids),
            text=completion.text,
            children=part.children,
        )

    def _chunks(self, text: TokenizedText) -> list[range]:
        """Cut the text into chunks whose prompts fit. A chunk may have more tokens by itself than in the text, and a
        template may contain it twice. So the prompts are counted; if one does not fit, all chunks become smaller."""
        chunk, overlap = self._chunk_tokens, self._options.overlap_tokens
        limit = self._max_prompt_tokens - self._summary_room
        while chunk >= max(1, 2 * overlap):
            chunks = cut(len(text), chunk, overlap, text.strength)
            longest = max(
                len(self._tokens(self._chunk_part(text, chunks, index).prompt)) for index in range(len(chunks))
            )
            if longest <= limit:
                return chunks
            chunk = chunk * limit // longest
        raise self._does_not_fit(longest)

    def _chunk_part(self, text: TokenizedText, chunks: Sequence[range], index: int, summary: str = "") -> _Part:
        span, number, count = chunks[index], index + 1, len(chunks)
        template = self._templates.refine if self._refines and index > 0 else self._templates.part
        return _Part(
            level=1,
            index=index,
            span=span,
            prompt=filled(template, text=text.text(span), number=number, count=count, summary=summary),
            name=f"part {number} of {count} (tokens {span.start} to {span.stop})",
            final=number == count if self._refines else count == 1,
        )

    def _groups(self, answers: Sequence[PartAnswer]) -> list[range]:
        """Return groups of neighbours that fit one prompt. As with chunks, the prompts are counted."""
        sizes = [self._num_tokens(answer.text) + self._between_tokens for answer in answers]
        room = self._merge_room
        while True:
            groups = group(sizes, room)
            longest = max((len(self._tokens(part.prompt)) for part in self._merge_parts(2, groups, answers)), default=0)
            if longest <= self._max_prompt_tokens:
                return groups
            room = room * self._max_prompt_tokens // longest

    def _merge_parts(self, level: int, groups: Sequence[range], answers: Sequence[PartAnswer]) -> Iterator[_Part]:
        """Yield a prompt for each group of several answers. A single answer needs no merging."""
        for index, members in enumerate(groups):
            children = tuple(answers[members.start : members.stop])
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

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _does_not_fit(self, num_tokens: int) -> DoesNotShrinkError:
        return DoesNotShrinkError(
            f"its prompt has {num_tokens} tokens, and {self._max_prompt_tokens} fit beside the output: lower "
            "chunk_tokens, overlap_tokens or level_tokens, or raise max_model_len"
        )

    def _check_options(self, chunk_room: int) -> None:
        options, chunk = self._options, self._chunk_tokens
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"option 'long' is {options.long!r}: it needs a fast tokenizer, which knows where in the text its "
                "tokens are; use 'truncate'"
            )
        if not 1 <= chunk <= chunk_room:
            raise ConfigError(
                f"option 'chunk_tokens' is {options.chunk_tokens}: {max(0, chunk_room)} tokens of a chunk fit beside "
                "the instruction and the output; lower it, level_tokens or max_tokens, or raise max_model_len"
            )
        if 2 * options.overlap_tokens > chunk:
            raise ConfigError(
                f"option 'overlap_tokens' is {options.overlap_tokens}: it must be at most half of a chunk, {chunk // 2}"
            )
        if not self._refines and 2 * (max(self._budgets) + self._between_tokens) > self._merge_room:
            raise ConfigError(
                f"option 'level_tokens' is {self._budgets}: two such answers must fit one prompt of "
                f"{self._max_prompt_tokens} tokens; lower it or max_tokens, or raise max_model_len"
            )
