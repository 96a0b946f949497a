"""Runs a request on an engine and gives its response, as a whole or in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rayspec.config import SamplingParams
from rayspec.decode.output import TokenTexts
from rayspec.openai.items import ItemAnswer, ResponsesRequest
from rayspec.openai.parsers import HARMONY, HarmonyParser, OutputParser, ThinkParser, reasoning_style
from rayspec.openai.places import Places
from rayspec.openai.protocol import ApiError, InvalidRequestError
from rayspec.openai.requests import ChatRequest, CompletionRequest, Input, Request, check_served, is_token_ids
from rayspec.openai.responses import END_OF_EVENTS, Answer, Response, event
from rayspec.openai.tokenizing import check_tokens, in_thread_if_large, prompt_tokens
from rayspec.openai.tools import ToolUse
from rayspec.prompts import REASONING, Rendering, bad_word_tokens, chat_template
from rayspec.structured import MOST_TOKENS_OF_THINK, THINK
from rayspec.types import ConfigError, EmptyPromptError, RequestError, RequestOutput

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine

Prompt = tuple[Sequence[int], SamplingParams]
_MOST_PROMPT_TOKENS = 2**23  # each takes 20 bytes
_MOST_REPEATED_TOKENS = 2**22  # where each completion shows its prompt
_MOST_LOGPROBS = 500_000  # each takes about 500 bytes; the 20 most likely tokens at 23,000 places
LOGPROBS_AT_ONCE = _MOST_LOGPROBS // 2  # of an engine: of one large request, or of several of half its size
_FEW_LOGPROBS = 5_000
_BYTES_OF_BAD_WORD = 100  # which take as long to be tokenized


async def respond(
    request: Request,
    engine: AsyncEngine,
    served: Sequence[str],
    *,
    name: str,
    created: int,
    background: Places | None = None,
    logprobs: Places | None = None,
) -> Response:
    """Run a request's prompts together and return the response. Raises RequestError, any other error of an output, and
    EngineDeadError. The first prompt that fails ends the others, and so does cancelling.

    served: names of the model that a body may use, and its adapters; responses show the first. name: the end of
    the response's id.
    background: the request runs behind other requests, and its sequences take such places. logprobs: see
    `LOGPROBS_AT_ONCE`.
    """
    with _named_by(request):
        engine, answer, prompts = await _prepared(request, engine, served, name=name, created=created)
        async with _room_for(request, prompts, logprobs, engine.client_name):
            tasks = [asyncio.ensure_future(_run(engine, prompt, background)) for prompt in prompts]
            try:
                outputs = await asyncio.gather(*tasks)
            finally:
                await end_tasks(tasks)
            rows = [row for one in outputs for completion in one.outputs for row in completion.logprobs or ()]
            size = sum(len(row or ()) for row in rows)
            of_prompts = [(one, row) for one in outputs for row in one.prompt_logprobs or ()]
            size += sum(_num_shown(request, len(one.outputs)) * len(row or ()) for one, row in of_prompts)
            size += sum(len(one.outputs) * len(one.prompt_token_ids) for one in outputs) * _shows_prompts(request)
            size += sum(len(completion.text) for one in outputs for completion in one.outputs)  # parsers read the texts
            return await in_thread_if_large(partial(answer.whole, outputs), size, engine.client_name)


async def stream(
    request: Request,
    engine: AsyncEngine,
    served: Sequence[str],
    *,
    name: str,
    created: int,
    failure: Callable[[Exception], ApiError],
    interval_s: float = 0.0,
    logprobs: Places | None = None,
) -> AsyncGenerator[bytes, None]:
    """Run a request like `respond`, and yield the response as server-sent events, at least once. An error before the
    first events is raised, because the HTTP status can still change; a later one is the last event, by `failure`.
    interval_s: shortest time between two outputs of a prompt, see `PieceQueue`."""
    with _named_by(request):
        engine, answer, prompts = await _prepared(request, engine, served, name=name, created=created)
    num_running, has_begun = len(prompts), False
    together = _stream_together(engine, prompts, interval_s)
    async with _room_for(request, prompts, logprobs, engine.client_name), aclosing(together) as pieces:
        try:
            async for prompt_index, piece in pieces:
                num_running -= piece.finished
                chunks = [*answer.chunks(prompt_index, piece), *(() if num_running else answer.end())]
                if chunks or not num_running:
                    yield b"".join(map(event, chunks)) + (b"" if num_running else answer.end_of_events)
                    has_begun = True
        except Exception as problem:
            error = request.by_own_names(problem) if isinstance(problem, RequestError) else problem
            if not has_begun:
                raise error from problem
            yield event(failure(error)) + END_OF_EVENTS


@contextmanager
def _named_by(request: Request) -> Iterator[None]:
    """Raise errors of the request by the names that its body has."""
    try:
        yield
    except RequestError as error:
        raise request.by_own_names(error) from None


async def _prepared(
    request: Request, engine: AsyncEngine, served: Sequence[str], **options: Any
) -> tuple[AsyncEngine, Answer, list[Prompt]]:
    """Return the engine for the model's name, what makes the response, and the prompts. Raises RequestError."""
    config = engine.llm.config
    check_served(request.model, (*served, *config.lora_modules))
    is_adapter = request.model in config.lora_modules
    engine = engine.with_adapter(request.model) if is_adapter else engine
    texts, options["model"] = TokenTexts(engine.tokenizer), request.model if is_adapter else served[0]
    if not isinstance(request, ChatRequest):
        return engine, Answer(request, texts, **options), await _prompts(request, engine)
    tool_use = ToolUse.of(request, engine.tokenizer, config.tool_call_parser)
    try:
        template = chat_template(engine.tokenizer)
    except ConfigError:
        template = ""
    style = reasoning_style(template, config.reasoning_parser)
    # An answer can be sent back as it is, also to a chat template without a place for reasoning.
    dropped = REASONING if style is not None and not any(one in template for one in REASONING) else ()
    needed = {} if tool_use is None else tool_use.sampling
    if style == HARMONY:
        needed["skip_special_tokens"] = False  # they divide the text
        if tool_use is None and request.form is not None and request.rendering.add_generation_prompt:
            needed["structured_outputs"] = replace(request.form[1], reasoning="channels")
    prompts = await _prompts(request, engine, tool_use, needed, dropped)
    of_calls = None if tool_use is None else tool_use.parser
    make_parser: Callable[[], OutputParser] | None = of_calls
    if style == HARMONY:
        make_parser = of_calls or partial(HarmonyParser, has_tools=False, is_parallel=False)
    elif style is not None:
        end = str(engine.tokenizer.decode(list(prompts[0][0][-MOST_TOKENS_OF_THINK:])))
        make_parser = partial(ThinkParser, of_calls, is_inside=end.rstrip().endswith(THINK))
    kind: Any = ItemAnswer if isinstance(request, ResponsesRequest) else Answer
    options["has_short_ids"] = tool_use is not None and tool_use.form.has_short_ids
    return engine, kind(request, texts, make_parser=make_parser, **options), prompts


async def _prompts(
    request: Request,
    engine: AsyncEngine,
    tool_use: ToolUse | None = None,
    needed: Mapping[str, Any] | None = None,
    dropped: Collection[str] = (),
) -> list[Prompt]:
    """Check and tokenize a request. needed: see `sampling_params`. dropped: fields of messages."""
    rendering = request.rendering if tool_use is None else tool_use.rendering(request.rendering)
    num_bytes, prompts, info = request.num_bytes, list[Prompt](), engine.client.info
    params: dict[int, SamplingParams] = {}
    if request.bad_words:  # the engine's thread, which all requests share, finds them then
        work: Callable[[], Any] = partial(bad_word_tokens, tuple(request.bad_words), engine.client.tokenizer)
        await in_thread_if_large(work, _BYTES_OF_BAD_WORD * len(request.bad_words), engine.client_name)
    # One after the other, so that prompts of other requests come in between.
    for prompt in await in_thread_if_large(lambda: request.prompts, num_bytes, engine.client_name):
        await asyncio.sleep(0)  # small ones are tokenized here
        is_cut = request.truncate_prompt_tokens is not None
        given: Any = prompt if tool_use is None else tool_use.messages(prompt)
        if dropped:
            given = [{name: message[name] for name in message if name not in dropped} for message in given]
        num_added = 0 if tool_use is None else len(given) - len(prompt)
        work = partial(_tokens, given, engine, rendering, is_cut=is_cut, num_added=num_added)
        token_ids = await in_thread_if_large(work, num_bytes, engine.client_name)
        token_ids = request.cut(token_ids, engine.max_model_len)
        room = max(1, (info.config.kv_cache_tokens or engine.max_model_len) - len(token_ids))
        usual = min(info.defaults.max_new_tokens or room, room)
        length = request.num_output_tokens(len(token_ids), engine.max_model_len, usual)
        check_tokens(token_ids, engine.tokenizer)
        if length not in params:
            params[length] = request.sampling_params(length, needed)
        prompts.append((token_ids, params[length]))
    num_prompt_tokens = sum(one.n * len(token_ids) for token_ids, one in prompts)  # each sequence has its own
    most = _MOST_REPEATED_TOKENS if _shows_prompts(request) else _MOST_PROMPT_TOKENS
    if num_prompt_tokens > most:
        problem = f"prompts of {num_prompt_tokens} tokens, n times; at most {most} here in all"
        raise InvalidRequestError.of("n", f"{problem}, split the request")
    repeats = isinstance(request, ResponsesRequest) and request.stream  # its last four events have all of them
    most = _MOST_LOGPROBS // 4 if repeats else _MOST_LOGPROBS
    of_outputs, of_prompts = _num_logprobs(request, prompts)
    of_prompt = "logprobs" if isinstance(request, CompletionRequest) and request.echo else "prompt_logprobs"
    for name, count, cost in (("logprobs", of_outputs, "max_tokens"), (of_prompt, of_prompts, f"{of_prompt} or n")):
        if count > most:
            problem = f"up to {count} for all tokens; at most {most} here"
            raise InvalidRequestError.of(name, f"{problem}, lower {cost} or split the request")
    return prompts


def _shows_prompts(request: Request) -> bool:
    """Return whether each completion shows its prompt."""
    return isinstance(request, CompletionRequest) and (request.echo or request.return_token_ids)


def _num_shown(request: Request, n: int) -> int:
    """Return how often the answer shows the log-probabilities of a prompt: in each completion, or once in a chat."""
    return n if isinstance(request, CompletionRequest) else 1


def _num_logprobs(request: Request, prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Return the most log-probabilities of outputs and of prompts that the answer shows."""
    of_outputs = of_prompts = 0
    for token_ids, one in prompts:
        of_outputs += 0 if one.logprobs is None else one.n * (one.max_tokens or 0) * (1 + one.logprobs)
        of_prompt = 0 if one.prompt_logprobs is None else len(token_ids) * (1 + one.prompt_logprobs)
        of_prompts += _num_shown(request, one.n) * of_prompt
    return of_outputs, of_prompts


def _room_for(
    request: Request, prompts: Sequence[Prompt], logprobs: Places | None, client: str
) -> AbstractAsyncContextManager[None]:
    """Return the context in which a request may run. A request with few log-probabilities does not wait."""
    count = sum(_num_logprobs(request, prompts))
    return nullcontext() if logprobs is None or count <= _FEW_LOGPROBS else logprobs.take(client, count)


def _tokens(prompt: Input, engine: AsyncEngine, rendering: Rendering, **options: Any) -> list[int]:
    token_ids = prompt if is_token_ids(prompt) else prompt_tokens(engine, prompt, rendering, **options)
    if not token_ids:
        raise EmptyPromptError("the prompt has zero tokens: give it some text")
    return token_ids


async def _run(engine: AsyncEngine, prompt: Prompt, background: Places | None) -> RequestOutput:
    if background is None:
        output = await engine.run(*prompt)
    else:
        async with background.take(engine.client_name, prompt[1].n):
            output = await engine.run(*prompt, background=True)
    if output.error is not None:
        raise output.error
    return output


async def _stream_together(
    engine: AsyncEngine, prompts: Sequence[Prompt], interval_s: float
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield new output of any prompt, with the index of the prompt."""
    arrived: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]] = asyncio.Queue()

    async def pass_on(index: int, prompt: Prompt) -> None:
        async with aclosing(engine.stream(*prompt, interval_s)) as pieces:
            async for piece in pieces:
                if piece.error is not None:
                    raise piece.error
                arrived.put_nowait((index, piece))

    tasks = [asyncio.create_task(pass_on(index, prompt)) for index, prompt in enumerate(prompts)]
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
        await end_tasks(tasks)


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until all have ended; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
