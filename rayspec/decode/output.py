"""Outputs on their way to callers: texts of tokens, stop strings, and the parts of a stream. No torch.

The engine's thread makes a `NewOutput` of tokens. Another thread decodes its texts, so that the engine can go on. Only
stop strings need the text at once: the engine's thread decodes the text of a sequence that has any.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayspec.prompts import naming_tokenizer
from rayspec.types import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rayspec.decode.work import DecodingParams


_REFUSES = "cannot decode the output"
_MANY_ROWS = 1000  # of log-probabilities; 20 in each take 50 ms


class Detokenizer:
    """Decodes the growing tokens of a sequence, and detects its stop strings. What `take` has returned is the beginning
    of the text wherever the output ends. So it never splits a character, nor a run of byte tokens, as sentencepiece has
    them: if one of their bytes fits no character, the whole run becomes replacement characters.

    It belongs to one thread: with stop strings to the engine's, else to the thread that delivers outputs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: DecodingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids: list[int] = []
        self._text = ""  # does not change any more
        self._tail = ""  # text of whole characters after it, if no later token changes it
        self._bytes = bytearray()  # after the tail: byte tokens that are no whole character yet
        self._num_grown = 0  # tokens that `_grow` has processed
        self._num_shown = 0  # tokens whose text is in _text
        self._has_half = False  # the last of these tokens ends with bytes that may become a character
        self._window = 0  # first token that is decoded again, because spaces depend on the tokens before
        self._num_taken = 0  # characters that `take` has returned
        self._is_stopped = False  # at a stop string; `_text` ends there
        self._num_held_back = max(map(len, params.stop), default=1) - 1  # characters that a stop string may begin with

    def text_of(self, new: CompletionOutput) -> str:
        """Add the tokens of a sequence without stop strings and return their text, see `take`. A token that ends the
        sequence has no text unless `include_stop_str_in_output`."""
        has_end = new.finish_reason == "stop" and not self._params.include_stop_str_in_output
        self._token_ids.extend(new.token_ids[:-1] if has_end else new.token_ids)
        return self.take(finished=new.finished)

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token of a sequence with stop strings. Return the stop string that it completed, if any; the text then
        ends there. Raises RequestError for any error of the tokenizer, after which the text stays as it is."""
        self._token_ids.append(token_id)
        length = len(self._text) + len(self._tail)
        self._is_stopped = True
        with naming_tokenizer(_REFUSES):
            self._grow()
        self._is_stopped = False
        text = self._text + self._tail
        starts = [(text.find(stop, max(0, length - len(stop) + 1)), stop) for stop in self._params.stop]
        found = [(position, stop) for position, stop in starts if position >= 0]
        if not found or not may_stop or len(text) == length:
            return None
        position, stop = min(found)
        self._text = text[: position + (len(stop) if self._params.include_stop_str_in_output else 0)]
        self._is_stopped = True
        return stop

    def take(self, *, finished: bool) -> str:
        """Return the new text since the last call; unless `finished`, without an end that later tokens may change or
        that has room for the beginning of a stop string (as in vLLM)."""
        if self._is_stopped:
            text = self._text
        elif finished:
            text = self._decode(self._token_ids)
        else:
            while self._num_grown < len(self._token_ids):
                self._grow()
            text = self._text[: max(0, len(self._text) - self._num_held_back)]
        taken, self._num_taken = self._num_taken, max(self._num_taken, len(text))
        return text[taken:]

    def _grow(self) -> None:
        """Decode one more token into the text, or into its tail if a later token may still change what it says."""
        piece = self._tokenizer.convert_ids_to_tokens(self._token_ids[self._num_grown])
        byte = _byte_of(piece) if isinstance(piece, str) else None
        self._num_grown += 1
        if byte is not None:
            self._bytes.append(byte)
            with suppress(UnicodeDecodeError):
                self._tail += self._bytes.decode()
                self._bytes.clear()
            return
        skipped = _skipped(self._tokenizer) if self._params.skip_special_tokens else ()
        if piece is None or self._token_ids[self._num_grown - 1] in skipped:  # None: the model's id is no token
            return  # it does not end a run of byte tokens
        shown = self._decode(self._token_ids[self._window : self._num_shown])
        grown = self._decode(self._token_ids[self._window : self._num_grown])
        num_known, num_new = len(shown) - self._has_half, len(grown)
        # Bytes at the end that may become a character are one replacement character.
        has_half = grown.endswith("\N{REPLACEMENT CHARACTER}")
        if num_new - has_half > num_known:
            self._text, self._tail = self._text + grown[num_known : num_new - has_half], ""
            self._bytes.clear()
            self._window, self._num_shown, self._has_half = self._num_shown, self._num_grown, has_half

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)  # type: ignore[return-value]


@functools.lru_cache(maxsize=4)
def _skipped(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens that have no text with `skip_special_tokens`."""
    special = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    found = {*tokenizer.all_special_ids, *special}
    return frozenset(one for one in found if not tokenizer.decode([one], skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class NewOutput:
    """New output of a request, with texts still to decode. detokenizers: None for a completion that has its text.
    texts: of the tokens in log-probabilities; None without a tokenizer."""

    output: RequestOutput
    detokenizers: Sequence[Detokenizer | None] = ()
    texts: TokenTexts | None = None

    @property
    def has_many_logprobs(self) -> bool:
        """Whether the texts of its log-probabilities take long."""
        rows = [self.output.prompt_logprobs or (), *(one.logprobs or () for one in self.output.outputs)]
        return sum(map(len, rows)) > _MANY_ROWS

    def decoded(self) -> RequestOutput:
        """Return the output with its texts. May be called once, on any thread; for a stream, in order. Raises
        RequestError for any error of the tokenizer."""
        output, texts = self.output, self.texts
        with naming_tokenizer(_REFUSES):
            for completion, detokenizer in zip(output.outputs, self.detokenizers, strict=True):
                if detokenizer is not None:
                    completion.text = detokenizer.text_of(completion)
                if texts is not None and completion.logprobs is not None:
                    completion.logprobs = [texts.named(row) for row in completion.logprobs]
            if texts is not None and output.prompt_logprobs is not None:
                output.prompt_logprobs = [row and texts.named(row) for row in output.prompt_logprobs]
        return output


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The text of each single token as it stands inside a running text. A token that is part of a character has the
    text "bytes:\\xe4", as in OpenAI's API, so that two such tokens differ."""

    tokenizer: PreTrainedTokenizerBase
    _known: dict[int, tuple[str, list[int] | None]] = field(default_factory=dict, init=False)

    def named(self, row: Mapping[int, Logprob]) -> dict[int, Logprob]:
        """Return the log-probabilities with the texts of their tokens."""
        return {token_id: replace(one, decoded_token=self.text(token_id)) for token_id, one in row.items()}

    def text(self, token_id: int) -> str:
        return self._look_up(token_id)[0]

    def utf8(self, token_id: int) -> list[int] | None:
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        if token_id in self._known:
            return self._known[token_id]
        # Decoded after itself, because sentencepiece drops a token's space at the start of a text.
        text = self._decode([token_id, token_id])[len(self._decode([token_id])) :]
        content: list[int] | None = list(text.encode())
        if "\N{REPLACEMENT CHARACTER}" in text:
            piece = self.tokenizer.convert_ids_to_tokens(token_id)
            content = _bytes_of_piece(piece) if isinstance(piece, str) else None
        if content is not None:
            try:
                text = bytes(content).decode()
            except UnicodeDecodeError:  # a part of a character
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        self._known[token_id] = text, content
        return text, content

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        except (IndexError, OverflowError):  # some tokenizers raise for an id of the model that is no token
            return ""


class TextOffsets:
    """The character offsets of tokens in a growing text. skip_special: it was decoded without special tokens."""

    def __init__(self, texts: TokenTexts, *, skip_special: bool) -> None:
        self._texts = texts
        self._without = frozenset(texts.tokenizer.all_special_ids) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # as tokenizers do
        self._num_characters = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return, for each of the next tokens, how many whole characters of the text precede it."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            if token_id not in self._without:
                self._num_characters += len(self._decoder.decode(bytes(self._texts.utf8(token_id) or ())))
        return offsets


def _byte_of(piece: str) -> int | None:
    """Return the byte that a vocabulary entry of sentencepiece stands for, as "<0xE4>"; None for others."""
    found = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return int(found[1], 16) if found else None


def _bytes_of_piece(piece: str) -> list[int] | None:
    """Return the bytes of a vocabulary entry, or None. In GPT-2's encoding each character stands for a byte."""
    byte = _byte_of(piece)
    if byte is not None:
        return [byte]
    # Imported here, because the endpoint's ingress imports this module but never calls this function.
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    of_character = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    return [of_character[character] for character in piece] if set(piece) <= set(of_character) else None


class PieceQueue:
    """The pieces of one request. Any thread may put them; a coroutine of the loop that created the queue reads them.
    interval_s: minimum seconds between two readings; pieces that arrive meanwhile are joined. The first piece and the
    end of the output do not wait."""

    def __init__(self, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._arrived: deque[RequestOutput | Future[RequestOutput]] = deque()
        self._is_announced = False
        self._ready, self._ended = asyncio.Event(), asyncio.Event()

    def put(self, piece: RequestOutput) -> None:
        self._arrived.append(piece)
        if not self._is_announced:  # `read` resets it before it takes all pieces, so every piece is announced
            self._is_announced = True
            self._announce(self._ready)

    def end(self, outcome: Future[RequestOutput]) -> None:
        """Put the end of the output. outcome: a future that is done and holds the last piece or an error."""
        self._arrived.append(outcome)
        self._announce(self._ready)
        self._announce(self._ended)

    async def read(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the pieces, joined, and then the last. Raises the outcome's exception after all earlier pieces. Pieces
        before a failed output are not joined to it."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._is_announced = False
            due_s = self._loop.time() + self._interval_s
            pieces: list[RequestOutput] = []
            while self._arrived:
                item = self._arrived.popleft()
                if isinstance(item, Future):
                    if pieces and (item.exception() is not None or item.result().error is not None):
                        yield joined(pieces)
                        pieces = []
                    yield joined([*pieces, item.result()])
                    return
                pieces.append(item)
            if pieces:
                yield joined(pieces)
                if (left_s := due_s - self._loop.time()) > 0:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), left_s)

    def _announce(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(event.set)


def joined(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """Join successive pieces of a request into one."""
    if len(pieces) == 1:
        return pieces[0]
    parts: dict[int, list[CompletionOutput]] = {}
    for piece in pieces:
        for one in piece.outputs:
            parts.setdefault(one.index, []).append(one)
    completions = [
        replace(
            each[-1],
            text="".join(one.text for one in each),
            token_ids=tuple(token_id for one in each for token_id in one.token_ids),
            logprobs=[row for one in each for row in one.logprobs or ()] or None,
        )
        for each in parts.values()
    ]
    of_prompt = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None)
    return replace(pieces[-1], outputs=completions, prompt_logprobs=of_prompt)
