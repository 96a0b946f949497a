"""Rows of a command: completed by one engine, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.rows import Row
from rayspec.types import Request, RequestError, RequestOutput


class Streams(Protocol):
    """What is asked of an LLM: requests are taken as there is room for them, outputs come as they finish."""

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]: ...


def complete(llm: Streams, rows: Iterable[Row], prompts: PromptBuilder) -> Iterator[Row]:
    """The rows completed, as they finish. Rows are read as the engine has room for them. The results of a command do
    not say where their rows are."""
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
