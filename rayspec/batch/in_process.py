"""Completes the rows of a command with one engine in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.rows import Row
from rayspec.types import Request, RequestError, RequestOutput


class Streams(Protocol):
    """The interface of LLM that is used here. It takes requests when it has room, and yields outputs as they finish."""

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]: ...


def complete(llm: Streams, rows: Iterable[Row], prompts: PromptBuilder) -> Iterator[Row]:
    """Yield the completed rows as they finish. Rows are read when the engine has room for them. The results have no
    `source` and no `input_hash`."""
    under_way: dict[str, Row] = {}
    failed: deque[Row] = deque()

    def requests() -> Iterator[Request]:
        for number, row in enumerate(rows):
            placeless = replace(row.without_input(), source=None, input_hash=None)
            if row.error_kind is not None:
                failed.append(placeless)
                continue
            try:
                request = prompts.request(str(number), row)
            except RequestError as error:
                failed.append(placeless.failed(error))
                continue
            under_way[request.request_id] = placeless
            yield request

    for output in llm.stream(requests()):
        yield from _drain(failed)
        yield under_way.pop(output.request_id).completed(output)
    yield from _drain(failed)


def _drain(rows: deque[Row]) -> Iterator[Row]:
    while rows:
        yield rows.popleft()
