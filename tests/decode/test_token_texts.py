"""Single tokens as text, as bytes, and where they stand."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rayspec.decode.output import TextOffsets, TokenTexts
from tests.demo_model import demo_tokenizer


@cache
def demo_texts() -> TokenTexts:
    return TokenTexts(demo_tokenizer())


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_tokens_join_to_the_text_and_offsets_point_into_it(text: str) -> None:
    tokenizer, texts = demo_tokenizer(), demo_texts()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [bytes(texts.utf8(token_id) or ()) for token_id in token_ids]
    assert b"".join(pieces) == text.encode()
    expected = [len(b"".join(pieces[:end]).decode(errors="ignore")) for end in range(len(pieces))]
    assert TextOffsets(texts, skip_special=True).of(token_ids) == expected
    in_pieces = TextOffsets(texts, skip_special=True)
    assert [offset for token_id in token_ids for offset in in_pieces.of([token_id])] == expected


@given(kinds=st.lists(st.integers(0, 3), max_size=12))
def test_offsets_count_the_characters_that_stand_for_broken_ones(kinds: list[int]) -> None:
    (a,) = demo_tokenizer()("a", add_special_tokens=False)["input_ids"]
    tokens = [a, *demo_tokenizer()("世", add_special_tokens=False)["input_ids"]]
    token_ids = [tokens[kind % len(tokens)] for kind in kinds]
    text = demo_tokenizer().decode(token_ids)
    offsets = TextOffsets(demo_texts(), skip_special=True).of(token_ids)
    for index, offset in enumerate(offsets):
        assert text[:offset].count("a") == token_ids[:index].count(a)


def test_special_tokens_take_no_place_where_the_text_has_none() -> None:
    eos = demo_tokenizer().eos_token_id
    token_ids = [*demo_tokenizer()("ab")["input_ids"], eos, eos]
    assert demo_texts().text(eos) == demo_tokenizer().eos_token
    assert TextOffsets(demo_texts(), skip_special=True).of(token_ids)[-1] == 2
    assert TextOffsets(demo_texts(), skip_special=False).of(token_ids)[-1] == 2 + len(demo_tokenizer().eos_token)


def test_the_replacement_character_itself_is_a_text() -> None:
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=_byte_level({"ï¿½": 3})))
    assert [texts.text(token_id) for token_id in (0, 3)] == ["a", "\N{REPLACEMENT CHARACTER}"]
    assert texts.text(1) == "bytes:\\xef"


def test_a_row_of_the_model_that_is_no_token_has_no_text() -> None:
    assert demo_texts().text(len(demo_tokenizer()) + 7) == ""


def _byte_level(more: dict[str, int]) -> Tokenizer:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "ï": 1, "¿": 2} | more, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return inner


def test_pieces_of_sentencepiece_keep_their_space_and_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁": 3, "<0xE4>": 4, "<0xB8>": 5, "<0x96>": 6}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))
    assert [texts.text(token_id) for token_id in (1, 2, 4)] == [" a", "a", "bytes:\\xe4"]
    assert [texts.utf8(token_id) for token_id in (1, 4, 5)] == [[32, 97], [0xE4], [0xB8]]
    assert TextOffsets(texts, skip_special=True).of([2, 4, 5, 6, 1]) == [0, 1, 1, 1, 2]
