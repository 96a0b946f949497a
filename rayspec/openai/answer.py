"""Runs a request on an engine and gives its response, as a whole or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from msgspec import UNSET, UnsetType

from rayspec.config import SamplingParams
from rayspec.decode.output import TokenTexts
from rayspec.openai.chunks import Chunk, chunks_of, has_end
from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.models import check_served
from rayspec.openai.requests import ChatRequest, Input, Request, is_token_ids
from rayspec.openai.responses import ChatCompletion, Completion, Response, Stamp
from rayspec.openai.tokenizing import Tokenizes, check_tokens, in_thread_if_large, prompt_tokens
from rayspec.openai.usage import UsageTally
from rayspec.types import EmptyPromptError, RequestOutput

_MOST_PROMPT_TOKENS = 2**25
_MOST_LOGPROBS = 4_000_000  # the 20 most likely tokens of a context of 190,000 tokens; each takes some hundred bytes


class Completes(Tokenizes, Protocol):
    """The interface of an engine that completes prompts. AsyncEngine has it."""

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput: ...


class Streams(Tokenizes, Protocol):
    """The interface of an engine that streams. AsyncEngine has it. Outputs hold new tokens only; the last one ends."""

    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float
    ) -> AsyncGenerator[RequestOutput, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One prompt."""

    token_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Chunks of a stream that are sent together. is_last: no part follows. Only the last part may have no chunks."""

    chunks: Sequence[Chunk]
    is_last: bool


async def respond(
    request: Request,
    engine: Completes,
    served: Sequence[str],
    *,
    name: str,
    created: int,
) -> Response:
    """Run a request's prompts together and return the response.

    served: names of the model that a body may use; responses show the first. name: the end of the response's id.
    created: Unix seconds. Raises RequestError; the first prompt that fails fails the request and ends the others.
    Raises any other error of an output, and EngineDeadError if the engine is gone. Cancelling ends all prompts.
    """
    outputs = await _run_together(engine, await _jobs(request, engine, served))
    texts, stamp = TokenTexts(engine.tokenizer), _stamp(request, name, created, served)
    if isinstance(request, ChatRequest):
        return ChatCompletion.of(request, outputs[0], texts, stamp)
    return Completion.of(request, outputs, texts, stamp)


async def stream(
    request: Request,
    engine: Streams,
    served: Sequence[str],
    *,
    name: str,
    created: int,
    interval_s: float = 0.0,
) -> AsyncGenerator[Part, None]:
    """Run a request like `respond`, and yield the response in parts as it is generated. There is at least one part.

    interval_s: shortest time between two outputs of a prompt, see `PieceQueue`. An error of the request raises
    before the first part, a later error after the parts that precede it. Closing the generator, or cancelling the wait
    for a part, ends all prompts.
    """
    jobs = await _jobs(request, engine, served)
    chunks = chunks_of(request, TokenTexts(engine.tokenizer), _stamp(request, name, created, served))
    tally, num_running = UsageTally(), len(jobs)
    async with aclosing(_stream_together(engine, jobs, interval_s)) as pieces:
        async for prompt_index, piece in pieces:
            tally.add(prompt_index, piece)
            num_running -= piece.finished
            new: list[Chunk] = list(chunks.of(prompt_index, piece))
            if not num_running and has_end(request):
                new.append(chunks.end(tally))
            if new or not num_running:
                yield Part(chunks=new, is_last=not num_running)


async def _jobs(request: Request, engine: Tokenizes, served: Sequence[str]) -> list[_Job]:
    """Check and tokenize a request. Raises RequestError for all errors that are known before the engine runs."""
    check_served(request.model, served)
    num_characters, jobs = request.num_characters, []
    params: dict[int, SamplingParams] = {}
    for prompt in request.prompts:  # one after the other, so that prompts of other requests come in between
        token_ids = await in_thread_if_large(partial(_tokens, prompt, engine), num_characters)
        length = request.num_output_tokens(len(token_ids), engine.max_model_len, engine.max_new_tokens)
        check_tokens(token_ids, engine.tokenizer)
        if length not in params:
            params[length] = request.sampling_params(length)
        jobs.append(_Job(token_ids=token_ids, params=params[length]))
    _check_size(request, jobs)
    return jobs


def _check_size(request: Request, jobs: Sequence[_Job]) -> None:
    """Refuse more tokens and log-probabilities than memory is good for, before the engine begins. Raises
    InvalidRequestError."""
    num_prompt_tokens = sum(job.params.n * len(job.token_ids) for job in jobs)  # each sequence has its own
    if num_prompt_tokens > _MOST_PROMPT_TOKENS:
        message = f"n: prompts of {num_prompt_tokens} tokens, n times; at most {_MOST_PROMPT_TOKENS} here in all"
        raise InvalidRequestError(f"{message}, split the request", param="n", code="invalid_value")
    if request.num_logprobs is not None:
        num_tokens = sum(job.params.n * (job.params.max_tokens or 0) for job in jobs)
        if num_tokens * (1 + request.num_logprobs) > _MOST_LOGPROBS:
            raise InvalidRequestError(
                f"logprobs: {1 + request.num_logprobs} for each of up to {num_tokens} tokens; at most {_MOST_LOGPROBS} "
                "here in all, lower max_tokens or split the request",
                param="logprobs",
                code="invalid_value",
            )


def _tokens(prompt: Input, engine: Tokenizes) -> list[int]:
    token_ids = prompt if is_token_ids(prompt) else prompt_tokens(engine, prompt)
    if not token_ids:
        raise EmptyPromptError("the prompt has zero tokens: give it some text")
    return token_ids


def _stamp(request: Request, name: str, created: int, served: Sequence[str]) -> Stamp:
    if not isinstance(request, ChatRequest):
        return Stamp(id=f"cmpl-{name}", created=created, model=served[0])
    tier: Literal["default"] | UnsetType = UNSET if request.service_tier is None else "default"
    return Stamp(id=f"chatcmpl-{name}", created=created, model=served[0], service_tier=tier)


async def _run_together(engine: Completes, jobs: Iterable[_Job]) -> list[RequestOutput]:
    tasks = [asyncio.ensure_future(_run(engine, job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _run(engine: Completes, job: _Job) -> RequestOutput:
    output = await engine.run(job.token_ids, job.params)
    if output.error is not None:
        raise output.error
    return output


async def _stream_together(
    engine: Streams, jobs: Iterable[_Job], interval_s: float
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield new output of any prompt, with the index of the prompt."""
    arrived: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pass_on(engine, index, job, interval_s, arrived)) for index, job in enumerate(jobs)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        num_running = len(tasks)
        while num_running:
            item = await arrived.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises the error that ended the task
                num_running -= 1
            else:
                yield item
    finally:
        await _end(tasks)


async def _pass_on(
    engine: Streams,
    index: int,
    job: _Job,
    interval_s: float,
    arrived: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]],
) -> None:
    async with aclosing(engine.stream(job.token_ids, job.params, interval_s)) as pieces:
        async for piece in pieces:
            if piece.error is not None:
                raise piece.error
            arrived.put_nowait((index, piece))


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
