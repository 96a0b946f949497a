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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rayspec.batch.rows import Row
from rayspec.config import Options, SamplingParams
from rayspec.openai.answer import end_tasks
from rayspec.openai.tokenizing import in_thread_if_large
from rayspec.prompts import naming_tokenizer
from rayspec.types import ConfigError, RequestError, RequestOutput

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine

Mode = Literal["fail", "truncate", "map-reduce", "refine"]

_BETWEEN = "\n\n"
_TEXT, _SUMMARY = "{text}", "{summary}"
_PLACES = re.compile(r"\{(text|summary|number|count)\}")
_MAX_LEVELS = 6  # of answers in map-reduce, that about chunks included
_MAX_PARTS_IN_FLIGHT = 8  # map-reduce: prompts of one document in the engine at once
_ANY_NUMBER = "999"  # stands for the numbers of parts where the length of a prompt is estimated
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

_NO_ANSWER = "its output ended in its reasoning: raise level_tokens, or max_tokens where it is not given"


class DoesNotShrinkError(RequestError):
    """A part of a document does not fit a prompt, or merging the answers needs too many levels."""

    kind = "does_not_shrink"


class UnfinishedReasoningError(RequestError):
    """An answer about a part has reasoning only, so it would be missing in the answer about the document."""

    kind = "unfinished_reasoning"


class LongDocumentOptions(Options):
    """How documents are treated that do not fit the context together with their output.

    level_tokens: output tokens of an answer about a chunk, about a group of chunks, and so on; the last number also
    holds for all higher levels. The answer about the whole document has `max_tokens` of the sampling parameters.
    """

    long: Mode = Field("fail", description="how to treat documents longer than the context")
    chunk_tokens: int | None = Field(None, ge=1, description="tokens of a part of a long document; unset: what fits")
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

    @model_validator(mode="after")
    def _of_parts(self) -> Self:
        given = [name for name in ("chunk_tokens", "overlap_tokens", "level_tokens") if getattr(self, name)]
        if given and self.long not in ("map-reduce", "refine"):
            raise ValueError(
                f"option {given[0]!r} works with long 'map-reduce' or 'refine' only, not {self.long!r}: leave one out"
            )
        return self


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
        with naming_tokenizer():
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self._text = text
        import numpy as np  # noqa: PLC0415 - commands that do not split documents need no numpy

        self._offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
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


@dataclass(slots=True, kw_only=True)
class _Part:
    """A prompt about the tokens `span` of a document, and its answer.

    template: of the prompt, with places for `text`, `number`, `count` and the answer so far ("{summary}"). name: in
    messages. is_final: the answer is about the whole document. children: the parts whose answers the answer was made
    from. level: 1 for a part without children. In refine, all earlier parts are children of the last.
    """

    template: str
    text: str
    number: int
    count: int
    span: range
    name: str
    is_final: bool
    level: int = 1
    children: Sequence[_Part] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    answer: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None

    def prompt(self, summary: str = "") -> str:
        """Return the template with its places filled in one pass: a place in an inserted text stays as it is."""
        values = {"text": self.text, "summary": summary, "number": str(self.number), "count": str(self.count)}
        return _PLACES.sub(lambda place: values[place[1]], self.template)

    def tree(self) -> dict[str, Any]:
        """Return the answer and those that it was made from, as JSON values."""
        return {
            "level": self.level,
            "start": self.span.start,
            "end": self.span.stop,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "text": self.answer,
            "children": [child.tree() for child in self.children],
        }


class _PartFailedError(Exception):
    """Ends the work on a document, with the name of the part and the error; never leaves this module."""


@dataclass(slots=True)
class _LongDocument:
    """A document and its answers so far. by_start: the answered parts without a parent, by their first token."""

    text: TokenizedText
    outputs: list[RequestOutput] = field(default_factory=list)
    by_start: dict[int, _Part] = field(default_factory=dict)

    @property
    def roots(self) -> list[_Part]:
        """The answered parts without a parent, in the order of the document."""
        return [self.by_start[start] for start in sorted(self.by_start)]

    def counted(self, row: Row) -> Row:
        tree = [part.tree() for part in self.roots]
        return replace(row.counted(self.outputs), tree=json.dumps(tree) if tree else None)


class LongDocuments:
    """Completes documents in parts through one engine.

    tokens: returns the prompt tokens for the text of a part. params: for the answer about a whole document. A seed in
    them gives every part a seed; then the tree depends only on the document, the options and the model. template: asks
    about a whole document, which "{text}" stands for. instruct: tell the model that it reads parts. False for the
    bundled models, which were trained on bare documents. divided: returns an output's text without its reasoning, and
    the reasoning; the tokens are those of its prompt.
    Raises ConfigError for options that cannot work with this context.
    """

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        tokens: Callable[[str], list[int]],
        params: SamplingParams,
        template: str,
        instruct: bool,
        options: LongDocumentOptions,
        divided: Callable[[str, list[int]], tuple[str, str | None]],
    ) -> None:
        if params.max_tokens is None:
            raise ConfigError("option 'max_tokens' is null, which leaves no room for parts of documents: give a number")
        self._engine, self._tokenizer, self._tokens = engine, engine.tokenizer, tokens
        self._divided = divided
        self._params, self._options = params, options
        self._part_template, self._merge_template, self._refine_template = (
            template.replace(_TEXT, instruction if instruct else bare)
            for instruction, bare in ((_PART, _TEXT), (_MERGE, _TEXT), (_REFINE, f"{_SUMMARY}\n{_TEXT}"))
        )
        self._max_tokens = params.max_tokens
        self._budgets = options.level_tokens or (self._max_tokens,)
        self._max_prompt_tokens = engine.max_model_len - max(*self._budgets, self._max_tokens)
        self._between_tokens = self._num_tokens(_BETWEEN)
        self._refines = options.long == "refine"
        # The answer so far may have more tokens when its text is tokenized again.
        self._summary_room = self._budgets[0] * 9 // 8 if self._refines else 0
        part, merge, refine = (
            len(tokens(_PLACES.sub(lambda place: _ANY_NUMBER if place[1] in {"number", "count"} else "", template)))
            for template in (self._part_template, self._merge_template, self._refine_template)
        )
        self._merge_room = self._max_prompt_tokens - merge
        chunk_room = self._max_prompt_tokens - self._summary_room - (max(part, refine) if self._refines else part)
        self._chunk_tokens = chunk_room if options.chunk_tokens is None else options.chunk_tokens
        self._check_options(chunk_room)

    async def complete(self, row: Row) -> Row:
        """Complete the row of a document. An error of the document is stored in the row. The row also has the tree: one
        root, or, if a part failed, the finished answers in the order of the document. Raises EngineDeadError.
        Cancelling the call aborts all requests of the document."""
        text = row.document or ""
        read = partial(TokenizedText, self._tokenizer, text)
        document = _LongDocument(await in_thread_if_large(read, len(text)))
        try:
            await (self._refine if self._refines else self._map_reduce)(document)
        except _PartFailedError as failure:
            name, reason = failure.args
            return document.counted(row).failed(reason, part=name)
        except RequestError as error:
            return document.counted(row).failed(error)
        (root,) = document.roots
        done = document.counted(row)
        return replace(done, text=root.answer, reasoning=root.reasoning, finish_reason=root.finish_reason)

    async def _map_reduce(self, document: _LongDocument) -> None:
        level, parts = 1, await self._chunks_of(document)
        while True:
            await self._answer_all(parts, document)
            answered = document.roots
            if len(answered) == 1:
                return
            merges = [] if level == _MAX_LEVELS else self._merges(level + 1, answered)
            if not merges:
                raise DoesNotShrinkError(
                    f"{len(answered)} answers of level {level} are left, and few or no neighbours fit one prompt: "
                    "lower level_tokens, or raise max_model_len or chunk_tokens"
                )
            level, parts = level + 1, merges

    async def _refine(self, document: _LongDocument) -> None:
        for part in await self._chunks_of(document):
            done = document.roots
            if part.is_final and done:
                part.level, part.span, part.children = 2, range(len(document.text)), done
            await self._answer(part, document, summary=done[-1].answer if done else "")

    async def _answer_all(self, parts: Sequence[_Part], document: _LongDocument) -> None:
        waiting = iter(parts)

        async def work() -> None:
            for part in waiting:
                await self._answer(part, document)

        workers = [asyncio.ensure_future(work()) for _ in range(_MAX_PARTS_IN_FLIGHT)]
        try:
            await asyncio.gather(*workers)
        finally:
            await end_tasks(workers)

    async def _answer(self, part: _Part, document: _LongDocument, summary: str = "") -> None:
        tokens, whole = self._tokens(part.prompt(summary)), self._params
        if len(tokens) > self._max_prompt_tokens:
            raise _PartFailedError(part.name, self._does_not_fit(len(tokens)))
        budget = self._max_tokens if part.is_final else self._budgets[min(part.level, len(self._budgets)) - 1]
        seed = None if whole.seed is None else part_seed(whole.seed, part.level, part.number - 1)
        min_tokens = None if whole.min_tokens is None else min(whole.min_tokens, budget)
        form = whole.structured_outputs if part.is_final else None
        params = whole.replace(max_tokens=budget, min_tokens=min_tokens, seed=seed, structured_outputs=form)
        output = await self._engine.run(tokens, params)
        document.outputs.append(output)
        if output.error is not None:
            raise _PartFailedError(part.name, output.error)
        completion = output.outputs[0]
        part.answer, part.reasoning = self._divided(completion.text, tokens)
        if part.reasoning and not part.is_final and not part.answer.strip():
            raise _PartFailedError(part.name, UnfinishedReasoningError(_NO_ANSWER))
        part.finish_reason = completion.finish_reason
        part.num_prompt_tokens, part.num_output_tokens = len(tokens), len(completion.token_ids)
        for child in part.children:
            del document.by_start[child.span.start]
        document.by_start[part.span.start] = part

    async def _chunks_of(self, document: _LongDocument) -> list[_Part]:
        return await in_thread_if_large(partial(self._chunks, document.text), len(document.text))

    def _chunks(self, text: TokenizedText) -> list[_Part]:
        overlap = self._options.overlap_tokens

        def of(size: int) -> list[_Part]:
            spans = cut(len(text), size, overlap, text.strength)
            count = len(spans)
            return [
                _Part(
                    template=self._refine_template if self._refines and number > 1 else self._part_template,
                    text=text.text(span),
                    number=number,
                    count=count,
                    span=span,
                    name=f"part {number} of {count} (tokens {span.start} to {span.stop})",
                    is_final=number == count if self._refines else count == 1,
                )
                for number, span in enumerate(spans, start=1)
            ]

        limit = self._max_prompt_tokens - self._summary_room
        return self._fitting(of, self._chunk_tokens, limit, least=max(1, 2 * overlap))

    def _merges(self, level: int, answered: Sequence[_Part]) -> list[_Part]:
        """Return a part for each group of several answers. A single answer needs no merging."""
        sizes = [self._num_tokens(part.answer) + self._between_tokens for part in answered]

        def of(room: int) -> list[_Part]:
            groups = group(sizes, room)
            count, found = len(groups), []
            for number, members in enumerate(groups, start=1):
                if len(members) > 1:
                    children = answered[members.start : members.stop]
                    span = range(children[0].span.start, children[-1].span.stop)
                    found.append(
                        _Part(
                            template=self._merge_template,
                            text=_BETWEEN.join(child.answer.strip() for child in children),
                            number=number,
                            count=count,
                            span=span,
                            name=f"merge {number} of {count} on level {level} (tokens {span.start} to {span.stop})",
                            is_final=count == 1,
                            level=level,
                            children=children,
                        )
                    )
            return found

        return self._fitting(of, self._merge_room, self._max_prompt_tokens)

    def _fitting(self, parts_of: Callable[[int], list[_Part]], size: int, limit: int, least: int = 0) -> list[_Part]:
        """Return parts of prompts of at most `limit` tokens, of pieces up to `size`. Raises DoesNotShrinkError."""
        while True:
            parts = parts_of(size)
            longest = max((len(self._tokens(part.prompt())) for part in parts), default=0)
            if longest <= limit:
                return parts
            size = size * limit // longest
            if size < least:
                raise self._does_not_fit(longest)

    def _num_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _does_not_fit(self, num_tokens: int) -> DoesNotShrinkError:
        return DoesNotShrinkError(
            f"its prompt has {num_tokens} tokens, and {self._max_prompt_tokens} fit with the output: lower "
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
                f"option 'chunk_tokens' is {options.chunk_tokens}: {max(0, chunk_room)} tokens of a chunk fit with "
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
