"""Measure an OpenAI-compatible endpoint under a mixed load, and compare its texts with those of an offline engine."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
from rich.console import Group
from rich.table import Table

import rayspec
from benchmarks.serve_client import Answer, Ask, Choice, send
from benchmarks.serve_mix import Mix
from rayspec.bench.result import describe_environment
from rayspec.llm import Prompt
from rayspec.openai.batch import ENDPOINTS
from rayspec.openai.requests import is_token_ids
from rayspec.types import RayspecError, RequestOutput

_PERCENTILES = (50, 90, 99)
_SHOWN = {
    "first_text_s": "until the first text of a stream",
    "between_events_s": "between events of a stream",
    "per_token_s": "a token of a stream, after its first event",
    "total_s": "a whole answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """url: of the endpoint, without /v1. concurrency: requests under way at the same time."""

    url: str
    api_key: str | None
    mix: Mix
    concurrency: int


class LoadError(RayspecError):
    """The endpoint cannot be measured."""

    kind = "load"


async def run_load(options: ServeBenchOptions, asks: Sequence[Ask]) -> list[Answer]:
    """Send all requests in order, `concurrency` at a time. Raises LoadError if the endpoint does not answer."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    places = asyncio.Semaphore(options.concurrency)

    async def in_turn(ask: Ask) -> Answer:
        async with places:
            return await send(session, ask)

    connector = aiohttp.TCPConnector(limit=options.concurrency, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(
            options.url, headers=headers, connector=connector, timeout=timeout, read_bufsize=2**20
        ) as session:
            async with session.get("/v1/models", raise_for_status=True):
                pass
            return list(await asyncio.gather(*map(in_turn, asks)))
    except (aiohttp.ClientError, ValueError) as error:
        raise LoadError(f"the endpoint at {options.url!r} does not answer: {error}") from error


def run_serve_bench(
    options: ServeBenchOptions, offline: rayspec.LLM | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the endpoint. offline: the same model, to compare texts; None: no comparison. Raises LoadError."""
    asks = options.mix.asks()
    say(f"{len(asks)} requests to {options.url}")
    answers = asyncio.run(run_load(options, asks))
    found = summary(answers)
    if offline is not None:
        say("the same offline")
        wrong = differing(offline, answers)
        found |= {"identical": found["endings"].get("finished", 0) - len(wrong), "differing": wrong}
    return {
        "environment": describe_environment(),
        "options": asdict(options) | {"api_key": None},
        "results": found,
    }


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return counts, and percentiles in seconds. first_text_s: until a stream's first event. between_events_s: between
    events of a stream, which may contain several tokens each. per_token_s: a stream's time after its first event,
    divided by the number of tokens less 1. total_s: time of a finished answer."""
    streams = [one for one in answers if one.ending == "finished" and one.ask.is_stream and one.event_times_s]
    gaps = [after - before for one in streams for before, after in itertools.pairwise(one.event_times_s)]
    per_token = [
        (one.event_times_s[-1] - one.event_times_s[0]) / (one.num_output_tokens - 1)
        for one in streams
        if one.num_output_tokens is not None and one.num_output_tokens > 1
    ]
    finished = [one for one in answers if one.ending == "finished"]
    return {
        "endings": dict(Counter(one.ending for one in answers)),
        "errors": dict(Counter(one.error for one in answers if one.error is not None)),
        "num_output_tokens": sum(one.num_output_tokens or 0 for one in finished),
        "first_text_s": _percentiles([one.event_times_s[0] for one in streams]),
        "between_events_s": _percentiles(gaps),
        "per_token_s": _percentiles(per_token),
        "total_s": _percentiles([one.total_s for one in finished]),
    }


def differing(llm: rayspec.LLM, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the finished answers that differ from the offline model, with both texts. Requests must be greedy or
    have a seed."""
    finished = [one for one in answers if one.ending == "finished"]
    expected = _offline(llm, [one.ask for one in finished])
    return [
        {"body": dict(answer.ask.body), "found": _shown(answer.choices), "expected": _shown(choices)}
        for answer, choices in zip(finished, expected, strict=True)
        if answer.choices != choices
    ]


def _offline(llm: rayspec.LLM, asks: Sequence[Ask]) -> list[dict[int, Choice]]:
    """Return the expected choices of each request; all requests run together."""
    prompts: list[Prompt] = []
    params = []
    for ask in asks:
        request = ENDPOINTS[ask.path].parse(dict(ask.body))
        (prompt,) = request.prompts
        token_ids = prompt if is_token_ids(prompt) else _tokens(llm, prompt)
        prompts.append({"prompt_token_ids": token_ids})
        info = llm.engine.info
        length = request.num_output_tokens(len(token_ids), info.max_model_len, info.defaults.max_new_tokens)
        params.append(request.sampling_params(length))
    return [_choices(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def _tokens(llm: rayspec.LLM, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    return list(llm.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else llm.chat_tokens(prompt)


def _choices(output: RequestOutput) -> dict[int, Choice]:
    """Return the choices by index. Raises the error of a failed request."""
    if output.error is not None:
        raise output.error
    return {
        one.index: Choice(text=one.text, finish_reason=one.finish_reason, num_logprobs=len(one.logprobs or ()))
        for one in output.outputs
    }


def _shown(choices: Mapping[int, Choice]) -> dict[int, dict[str, Any]]:
    return {index: asdict(choice) for index, choice in choices.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the percentiles; None for an empty sequence."""
    if not seconds:
        return None
    return {f"p{one}": float(np.percentile(seconds, one)) for one in _PERCENTILES}


def succeeded(result: dict[str, Any]) -> bool:
    """Return whether all requests that the client did not cut were answered, with the texts of the offline engine."""
    found = result["results"]
    return set(found["endings"]) <= {"finished", "cut"} and not found.get("differing")


def serve_bench_table(result: dict[str, Any]) -> Group:
    """Return the latencies that the client measured as a table, with counts of endings and errors."""
    options, environment, found = result["options"], result["environment"], result["results"]
    heading = (
        f"{options['mix']['num_requests']} requests, {options['concurrency']} at a time, to {options['mix']['model']} "
        f"at {options['url']}; measured on {environment['hardware']}"
    )
    table = Table()
    for column in ("seconds", *(f"p{one}" for one in _PERCENTILES)):
        table.add_column(column, justify="left" if column == "seconds" else "right", no_wrap=True)
    for key, name in _SHOWN.items():
        if found[key] is not None:
            table.add_row(name, *(f"{found[key][f'p{one}']:.3f}" for one in _PERCENTILES))
    counts = ", ".join(f"{count} {ending}" for ending, count in sorted(found["endings"].items()))
    same = f"; {found['identical']} of {found['endings'].get('finished', 0)} as offline" if "identical" in found else ""
    return Group(heading, table, f"{counts}{same}; errors: {found['errors'] or 'none'}")
