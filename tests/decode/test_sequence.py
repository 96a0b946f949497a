"""Where sequences end, what their streams tell, and the texts of single tokens."""

import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rayspec.decode.output import Detokenizer, TextOffsets, TokenTexts
from rayspec.decode.requests import SequenceState
from rayspec.decode.work import DecodingParams
from rayspec.types import CompletionOutput, Logprob
from tests.decode.samplers import sequence_of
from tests.demo_model import demo_tokenizer

EOS = 1


def _encode(text: str) -> list[int]:
    tokens: list[int] = demo_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return tokens


@cache
def _byte_fallback() -> Any:
    """A tokenizer as sentencepiece makes them: bytes for what is not in the vocabulary, spaces as a sign, and the first
    space is not text."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "é", "東", "▁�", "ab", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _sequence(
    with_text: bool = True, max_model_len: int = 1000, tokenizer: Any = None, eos: int = EOS, **params: Any
) -> SequenceState:
    options = DecodingParams(**({"max_tokens": 500} | params))
    prompt = _encode("A prompt.")
    return sequence_of(
        prompt,
        params=options,
        max_total_tokens=min(len(prompt) + options.max_tokens, max_model_len),
        eos_token_ids=(eos,),
        detokenizer=Detokenizer(tokenizer or demo_tokenizer(), options) if with_text else None,
    )


def _new_output(sequence: SequenceState) -> CompletionOutput | None:
    """What is new of the sequence, with its text, as a request's output has it."""
    new = sequence.take_new_output()
    if new is not None and sequence.detokenizer is not None and not sequence.params.stop:
        new.text = sequence.detokenizer.text_of(new)
    return new


def _output(sequence: SequenceState) -> CompletionOutput:
    """All of a sequence's output, which ends here."""
    sequence.finish_reason = sequence.finish_reason or "length"
    output = _new_output(sequence)
    assert output is not None
    return output


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30)
EMOJI = "The fee is 5 €, naïve 👩‍👩‍👧‍👦 and 日本語 🎉 done."


@given(TEXTS, st.data())
def test_a_stop_string_ends_the_text_wherever_tokens_end(text: str, data: st.DataObject) -> None:
    """Against the rule by the book: the first position, of the text so far, at which a stop string is complete."""
    whole = demo_tokenizer().decode(_encode(text))
    first = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[first : first + data.draw(st.integers(1, 5))]
    for include in (False, True):
        sequence = _sequence(stop=[stop], include_stop_str_in_output=include)
        num_taken = sequence.commit(_encode(text))
        output = _output(sequence)
        at = whole.index(stop)
        assert output.text == whole[: at + (len(stop) if include else 0)]
        assert output.finish_reason == "stop"
        assert output.stop_reason == stop
        assert num_taken == len(output.token_ids)
        shown = demo_tokenizer().decode(list(output.token_ids))
        assert stop in shown
        assert stop not in demo_tokenizer().decode(list(output.token_ids)[:-1])


def test_min_tokens_holds_stop_strings_back_and_keeps_their_text() -> None:
    tokens = _encode("one stop two stop three stop")
    second = _encode("one stop two stop")
    sequence = _sequence(stop=["stop"], min_tokens=len(_encode("one stop two")))
    sequence.commit(tokens)
    assert sequence.output_token_ids == second
    assert _output(sequence).text == "one stop two "


@pytest.mark.parametrize(
    ("params", "tokens", "taken", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7, 8], 3, "length", None),
        ({"max_tokens": 3}, [5, 6, EOS, 8], 3, "stop", None),
        ({"ignore_eos": True}, [5, EOS, 7, 8], 4, None, None),
        ({"stop_token_ids": [7, 9]}, [5, 6, 7, 8], 3, "stop", 7),
        ({"stop_token_ids": [7], "min_tokens": 4}, [7, 7, 7, 7, 7], 4, "stop", 7),
        ({"min_tokens": 2}, [EOS, 6, EOS, 8], 3, "stop", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS, 7], 2, "stop", EOS),
    ],
)
def test_where_a_sequence_ends(
    params: dict[str, Any], tokens: list[int], taken: int, reason: str | None, stop_reason: int | None
) -> None:
    for with_text in (True, False):
        sequence = _sequence(with_text, **params)
        assert sequence.commit(tokens) == taken
        assert sequence.output_token_ids == tokens[:taken]
        assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)


def _streamed(
    tokens: list[int], pieces: list[int], **params: Any
) -> tuple[SequenceState, CompletionOutput, list[CompletionOutput]]:
    """A sequence after commits of so many tokens, its output, and what a stream of it told after each commit."""
    whole, stream, told = _sequence(**params), _sequence(**params), []
    for num_tokens in pieces:
        if stream.finished:
            break
        now, tokens = tokens[:num_tokens], tokens[num_tokens:]
        rows = [{token: Logprob(logprob=-float(token), rank=1)} for token in now]
        for sequence in (whole, stream):
            sequence.commit(now, rows if params.get("logprobs") is not None else ())
        told += [new for new in [_new_output(stream)] if new is not None]
    if not stream.finished:
        told.append(_output(stream))
    assert stream.take_new_output() is None, "after the end there is nothing new"
    return stream, _output(whole), told


@given(TEXTS, st.data())
def test_what_streams_adds_up_to_the_output(text: str, data: st.DataObject) -> None:
    tokens = _encode(text)
    pieces = data.draw(st.lists(st.integers(1, 3), min_size=len(tokens), max_size=len(tokens)))
    whole = demo_tokenizer().decode(tokens)
    stops = [
        whole[at : at + length] for at, length in data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6))))
    ]
    stops = [stop for stop in stops if stop][:4]
    _, output, told = _streamed(tokens, pieces, stop=stops, logprobs=1)
    assert "".join(one.text for one in told) == output.text
    assert [token for one in told for token in one.token_ids] == list(output.token_ids)
    assert [row for one in told for row in one.logprobs or []] == output.logprobs
    assert [one.finish_reason for one in told] == [None] * (len(told) - 1) + [output.finish_reason]
    assert told[-1].stop_reason == output.stop_reason
    assert told[-1].cumulative_logprob == output.cumulative_logprob


BYTES = [*range(256, 265), *"東京 €\n".encode(), 0xE6, 0x9D, 0x80, 0x20]


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
@given(st.data())
def test_the_stream_is_what_the_whole_text_says_wherever_it_ends(name: str, data: st.DataObject) -> None:
    tokenizer, known = (_byte_fallback(), BYTES) if name == "bytes" else (demo_tokenizer(), [*_encode(EMOJI), 0, 2])
    tokens = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=20))
    pieces = data.draw(st.lists(st.integers(1, 3), min_size=len(tokens), max_size=len(tokens)))
    skip_special_tokens = data.draw(st.booleans())
    # The second stop string never comes; that there is one changes when tokens are decoded.
    for stop in ((), ("never there",)):
        options = {"tokenizer": tokenizer, "eos": -1, "stop": stop, "skip_special_tokens": skip_special_tokens}
        _, output, told = _streamed(tokens, pieces, **options)
        whole = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        assert "".join(one.text for one in told) == output.text == whole


@pytest.mark.parametrize("stop", [(), ("never there",)])
def test_an_id_that_is_no_token_does_not_end_a_run_of_byte_tokens(stop: tuple[str, ...]) -> None:
    tokens = [258, *"東".encode(), 999, 0x80, 258]
    _, output, told = _streamed(tokens, [1] * len(tokens), tokenizer=_byte_fallback(), eos=-1, stop=stop)
    assert "".join(one.text for one in told) == output.text == _byte_fallback().decode(tokens)


def test_a_stop_string_of_byte_tokens_ends_the_text_at_its_last_byte() -> None:
    tokens = [257, *"\n東京".encode(), 258, 258]
    for stop, num_tokens, text in (("\n", 2, "the"), ("京", 8, "the\n東"), ("東京", 8, "the\n"), ("京a", 9, "the\n東")):
        sequence = _sequence(tokenizer=_byte_fallback(), eos=-1, stop=[stop])
        assert sequence.commit(tokens) == num_tokens
        assert _output(sequence).text == text


@pytest.mark.parametrize("name", ["bytes", "no character", "special"])
def test_a_long_run_of_tokens_without_text_costs_no_more_than_its_length(name: str) -> None:
    """A request can ask for such a run, by `allowed_token_ids`."""
    tokenizer = _byte_fallback() if name == "bytes" else demo_tokenizer()
    no_character = next(one for one in range(2048) if demo_tokenizer().decode([one]) == "\N{REPLACEMENT CHARACTER}")
    token = {"bytes": ord("\n"), "no character": no_character, "special": 0}[name]
    for stop in ((), ("end",)):
        sequence = _sequence(tokenizer=tokenizer, eos=-1, stop=stop, max_tokens=20_000, max_model_len=30_000)
        started = time.thread_time()
        for _ in range(10_000):
            sequence.commit([token])
            new = _new_output(sequence)
            assert new is not None
        assert time.thread_time() - started < 2.0


@pytest.mark.parametrize("stop", [(), ("never there",)])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_token_that_ends_it_is_dropped_unless_asked_for(stop: tuple[str, ...], include: bool) -> None:
    words, (end,) = _encode("some words"), _encode("!")
    for params in ({"stop_token_ids": [end]}, {"eos": end}):
        options = {"stop": stop, "include_stop_str_in_output": include} | params
        for pieces in ([1] * 20, [20]):
            _, output, told = _streamed([*words, end, *words], pieces, **options)
            assert output.token_ids == (*words, end)
            assert "".join(one.text for one in told) == output.text == "some words" + "!" * include


def test_of_two_stop_strings_in_a_token_the_first_in_the_text_ends_it() -> None:
    sequence = _sequence(tokenizer=_byte_fallback(), stop=("b", "a"))
    sequence.commit(_byte_fallback().convert_tokens_to_ids(["ab"]))
    assert (_output(sequence).text, sequence.stop_reason) == ("", "a")


def test_only_as_much_as_a_stop_string_begins_with_is_held_back() -> None:
    sequence, told = _sequence(stop=["three days"]), ""
    for token in _encode("one two three and four"):
        sequence.commit([token])
        told += getattr(_new_output(sequence), "text", "")
    assert told == "one two three and four"[: -len("three days") + 1]


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
    texts, (space_the, a) = TokenTexts(_byte_fallback()), (257, 258)
    broken = "世".encode()
    assert [texts.text(token_id) for token_id in (space_the, a, broken[0])] == [" the", "a", "bytes:\\xe4"]
    assert [texts.utf8(token_id) for token_id in (space_the, *broken[:2])] == [[*b" the"], [0xE4], [0xB8]]
    assert TextOffsets(texts, skip_special=True).of([a, *broken, space_the]) == [0, 1, 1, 1, 2]
