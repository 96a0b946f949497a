"""Documents in, result rows out: one engine, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from rayspec.batch.documents import Document
from rayspec.batch.prompts import PromptBuilder
from rayspec.batch.results import ResultRow
from rayspec.types import Request, RequestError, RequestOutput


class Streams(Protocol):
    """What is asked of an LLM: requests are taken as there is room for them, outputs come as they finish."""

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]: ...


def complete(llm: Streams, documents: Iterable[Document], prompts: PromptBuilder) -> Iterator[ResultRow]:
    """One row a document, as they finish. Documents are read as the engine has room for them."""
    names: dict[str, str] = {}
    failed: deque[ResultRow] = deque()

    def requests() -> Iterator[Request]:
        for number, document in enumerate(documents):
            try:
                request = prompts.request(str(number), document)
            except RequestError as error:
                failed.append(ResultRow.of_error(document.id, error))
                continue
            names[request.request_id] = document.id
            yield request

    for output in llm.stream(requests()):
        yield from _drain(failed)
        yield ResultRow.of_output(names.pop(output.request_id), output)
    yield from _drain(failed)


def _drain(rows: deque[ResultRow]) -> Iterator[ResultRow]:
    while rows:
        yield rows.popleft()
