"""How single tokens read, and where they stand in a text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """How single tokens read in a running text, each by itself. A token that is a part of a character reads
    "bytes:\\xe4", as OpenAI writes it, so that two such tokens differ."""

    tokenizer: PreTrainedTokenizerBase
    _known: dict[int, tuple[str, list[int] | None]] = field(default_factory=dict, init=False)

    def text(self, token_id: int) -> str:
        return self._look_up(token_id)[0]

    def utf8(self, token_id: int) -> list[int] | None:
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, list[int] | None]:
        # After itself, for at the start of a text sentencepiece drops a token's space.
        text = self._decode([token_id, token_id])[len(self._decode([token_id])) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text, list(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        content = _bytes_of_piece(piece) if isinstance(piece, str) else None
        return (text if content is None else _text_of_bytes(content)), content

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        except (IndexError, OverflowError):  # some tokenizers do so for a row of the model that is no token
            return ""


class TextOffsets:
    """Where in a growing text its tokens begin.

    skip_special: the text was decoded without special tokens.
    """

    def __init__(self, texts: TokenTexts, *, skip_special: bool) -> None:
        self._texts = texts
        self._without = frozenset(texts.tokenizer.all_special_ids) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # as tokenizers do
        self._num_characters = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Whole characters of the text before each of its next tokens."""
        return [self._pass(token_id) for token_id in token_ids]

    def _pass(self, token_id: int) -> int:
        offset = self._num_characters
        if token_id not in self._without:
            self._num_characters += len(self._decoder.decode(bytes(self._texts.utf8(token_id) or ())))
        return offset


def _text_of_bytes(content: list[int]) -> str:
    """The character U+FFFD itself is a text; a part of a character is not."""
    try:
        return bytes(content).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _bytes_of_piece(piece: str) -> list[int] | None:
    """Of a vocabulary entry: "<0xE4>" of sentencepiece, or characters that stand for bytes as in GPT-2."""
    fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    if fallback:
        return [int(fallback[1], 16)]
    # Here, because the endpoint's ingress imports this module and never gets so far.
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    return [byte_of[character] for character in piece] if set(piece) <= set(byte_of) else None
