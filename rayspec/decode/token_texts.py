"""The texts of single tokens, and their offsets in a text."""

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
    """The text of each single token as it stands inside a running text. A token that is part of a character has the
    text "bytes:\\xe4", as in OpenAI's API, so that two such tokens differ."""

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
        # Decoded after itself, because sentencepiece drops a token's space at the start of a text.
        text = self._decode([token_id, token_id])[len(self._decode([token_id])) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text, list(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        content = _bytes_of_piece(piece) if isinstance(piece, str) else None
        return (text if content is None else _text_of_bytes(content)), content

    def _decode(self, token_ids: list[int]) -> str:
        try:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        except (IndexError, OverflowError):  # some tokenizers raise for an id of the model that is no token
            return ""


class TextOffsets:
    """Tracks the character offsets of tokens in a growing text.

    skip_special: whether the text was decoded without special tokens.
    """

    def __init__(self, texts: TokenTexts, *, skip_special: bool) -> None:
        self._texts = texts
        self._without = frozenset(texts.tokenizer.all_special_ids) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # as tokenizers do
        self._num_characters = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return, for each of the next tokens, how many whole characters of the text precede it."""
        return [self._pass(token_id) for token_id in token_ids]

    def _pass(self, token_id: int) -> int:
        offset = self._num_characters
        if token_id not in self._without:
            self._num_characters += len(self._decoder.decode(bytes(self._texts.utf8(token_id) or ())))
        return offset


def _text_of_bytes(content: list[int]) -> str:
    """Decode the bytes, or write them as "bytes:..." if they are a part of a character. Bytes of U+FFFD itself
    decode."""
    try:
        return bytes(content).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def byte_of(piece: str) -> int | None:
    """Return the byte that a vocabulary entry of sentencepiece stands for, as "<0xE4>"; None for other entries."""
    found = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return int(found[1], 16) if found else None


def _bytes_of_piece(piece: str) -> list[int] | None:
    """Return the bytes of a vocabulary entry, or None. In GPT-2's encoding each character stands for a byte."""
    byte = byte_of(piece)
    if byte is not None:
        return [byte]
    # Imported here, because the endpoint's ingress imports this module but never calls this function.
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    of_character = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    return [of_character[character] for character in piece] if set(piece) <= set(of_character) else None
