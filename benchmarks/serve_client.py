"""One request to an OpenAI-compatible endpoint over HTTP, with the arrival times of its events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Path = Literal["/v1/chat/completions", "/v1/completions"]
Ending = Literal["finished", "cut", "refused", "failed", "broken"]
_END = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to send. cut_after_events, cut_after_s: the client disconnects at that point, unless None."""

    path: Path
    body: Mapping[str, Any]
    cut_after_events: int | None = None
    cut_after_s: float | None = None

    @property
    def is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Choice:
    """A choice, assembled from its chunks. num_logprobs: number of tokens with a log-probability."""

    text: str = ""
    finish_reason: str | None = None
    num_logprobs: int = 0

    def add(self, part: Mapping[str, Any], *, is_chat: bool) -> None:
        """Append a choice of a response or of a chunk."""
        message = part.get("delta", part.get("message", {}))
        self.text += (message.get("content") or "") if is_chat else part["text"]
        self.finish_reason = part["finish_reason"] or self.finish_reason
        logprobs = part.get("logprobs") or {}
        self.num_logprobs += len(logprobs.get("content" if is_chat else "tokens") or ())


@dataclass(slots=True, kw_only=True)
class Answer:
    """The result of a request. Times are seconds since the request was sent. event_times_s: of a stream's events that
    have choices.

    ending: "cut" by this client; "refused" with an HTTP status other than 200; "failed" with an error event; "broken"
    if the connection ended too early.
    """

    ask: Ask
    ending: Ending = "broken"
    status: int | None = None
    error: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    num_output_tokens: int | None = None
    event_times_s: list[float] = field(default_factory=list)
    total_s: float = 0.0

    def add(self, body: Mapping[str, Any]) -> None:
        """Add the choices and the usage of a response or a chunk."""
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part, is_chat=self.ask.is_chat)
        if body.get("usage"):
            self.num_output_tokens = body["usage"]["completion_tokens"]


async def send(session: aiohttp.ClientSession, ask: Ask) -> Answer:
    """Send a request. The session has the endpoint's address and key. Errors are reported in the answer."""
    answer = Answer(ask=ask)
    start_s = time.monotonic()
    try:
        await asyncio.wait_for(_exchange(session, answer, start_s), ask.cut_after_s)
    except asyncio.TimeoutError:
        answer.ending = "cut"
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_s = time.monotonic() - start_s
    return answer


async def _exchange(session: aiohttp.ClientSession, answer: Answer, start_s: float) -> None:
    async with session.post(answer.ask.path, json=answer.ask.body) as response:
        answer.status = response.status
        if response.status != 200:
            answer.ending, answer.error = "refused", _error_of(await response.text())
        elif answer.ask.is_stream:
            await _read_events(response, answer, start_s)
        else:
            answer.add(await response.json())
            answer.ending = "finished"


async def _read_events(response: aiohttp.ClientResponse, answer: Answer, start_s: float) -> None:
    async for data in _events(response):
        if data == _END:
            answer.ending = answer.ending if answer.ending == "failed" else "finished"
            return
        body = json.loads(data)
        if "error" in body:
            answer.ending, answer.error = "failed", body["error"]["code"]
            continue
        answer.add(body)
        if body["choices"]:
            answer.event_times_s.append(time.monotonic() - start_s)
        if answer.ask.cut_after_events is not None and len(answer.event_times_s) >= answer.ask.cut_after_events:
            answer.ending = "cut"
            return


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    while line := await response.content.readuntil(b"\n"):
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().rstrip("\n")


def _error_of(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
