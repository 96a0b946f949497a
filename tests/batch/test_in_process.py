from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.documents import EmptyFileError, input_row
from rayspec.batch.in_process import complete
from rayspec.batch.rows import Row
from rayspec.config import SamplingParams
from rayspec.types import CompletionOutput, PromptTooLongError, Request, RequestOutput


class EchoLLM:
    """Holds two requests at a time and finishes the younger first; texts over 10 characters are too long."""

    tokenizer: Any = None

    def __init__(self) -> None:
        self.num_taken = 0

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [ord(letter) for letter in messages[0]["content"]]

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        held: list[Request] = []
        for request in requests:
            self.num_taken += 1
            held.append(request)
            if len(held) == 2:
                yield self._output(held.pop())
        while held:
            yield self._output(held.pop())

    @staticmethod
    def _output(request: Request) -> RequestOutput:
        tokens = list(request.prompt_token_ids or ())
        text = "".join(map(chr, tokens)).upper()
        return RequestOutput(
            request_id=request.request_id,
            prompt=None,
            prompt_token_ids=tokens,
            outputs=[CompletionOutput(index=0, text=text, token_ids=tokens, finish_reason="stop")],
            finished=True,
            error=PromptTooLongError("too long") if len(tokens) > 10 else None,
        )


def chat(name: str, text: str) -> Row:
    return input_row(name, source=name, messages=[{"role": "user", "content": text}])


def builder(llm: EchoLLM) -> PromptBuilder:
    return PromptBuilder(llm=llm, params=SamplingParams())


def test_every_document_has_one_row_whatever_becomes_of_it() -> None:
    llm = EchoLLM()
    documents = [
        Row(id="bad first", source="s").refused(EmptyFileError("empty")),
        chat("a", "alpha"),
        chat("long", "a" * 11),
        Row(id="bad", source="s").refused(EmptyFileError("empty")),
        chat("b", "beta"),
        Row(id="bad last", source="s").refused(EmptyFileError("empty")),
    ]
    rows = {row.id: row for row in complete(llm, documents, builder(llm))}
    assert rows.keys() == {document.id for document in documents}
    assert (rows["a"].text, rows["b"].text) == ("ALPHA", "BETA")
    assert {name: row.error_kind for name, row in rows.items() if row.error_kind} == {
        "bad first": "empty_file",
        "long": "prompt_too_long",
        "bad": "empty_file",
        "bad last": "empty_file",
    }


def test_two_documents_of_one_id_have_a_row_each() -> None:
    llm = EchoLLM()
    rows = complete(llm, [chat("same", "one"), chat("same", "two")], builder(llm))
    assert sorted((row.id, row.text) for row in rows) == [("same", "ONE"), ("same", "TWO")]


def test_only_errors_make_rows_too() -> None:
    llm = EchoLLM()
    bad = Row(id="bad", source="s").refused(EmptyFileError("empty"))
    assert [row.error_kind for row in complete(llm, [bad], builder(llm))] == ["empty_file"]


def test_documents_are_taken_as_they_are_needed() -> None:
    llm = EchoLLM()
    endless = (chat(str(number), "x") for number in range(10**9))
    assert len(list(islice(complete(llm, endless, builder(llm)), 5))) == 5
    assert llm.num_taken <= 7
