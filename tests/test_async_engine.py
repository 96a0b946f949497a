import asyncio
from collections.abc import Iterator

import pytest

from rayspec import LLM, SamplingParams, demo
from rayspec.llm import AsyncEngine
from rayspec.types import RequestOutput
from tests.demo_model import demo_prompts

PARAMS = SamplingParams(temperature=0.0, max_tokens=48, stop=["Total"])
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(
        LLM(demo.model_path(), dtype="float32", num_threads=1, speculation={"strategy": "static", "skip": [3, 5]})
    )
    yield engine
    engine.llm.shutdown()


async def _streamed(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return [piece async for piece in engine.stream(prompt, params)]


async def _aborted(engine: AsyncEngine, before: int) -> None:
    while engine.client.load.num_running or engine.client.load.kv_used_tokens:
        await asyncio.sleep(0.01)
    assert engine.client.stats.num_generated_tokens - before < 2000, "the request was not aborted"


def test_streams_beside_one_another_add_up(engine: AsyncEngine) -> None:
    prompts = demo_prompts(4, 6)

    async def both() -> tuple[list[RequestOutput], list[list[RequestOutput]]]:
        whole = [await engine.run(prompt, PARAMS) for prompt in prompts]
        return whole, await asyncio.gather(*(_streamed(engine, prompt, PARAMS) for prompt in prompts))

    whole, streams = asyncio.run(both())
    for output, pieces in zip(whole, streams, strict=True):
        assert len(pieces) > 3
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert "".join(one.text for piece in pieces for one in piece.outputs) == output.outputs[0].text
        assert pieces[-1].metrics.num_draft_tokens > 0


class _Panic(BaseException):
    """As that of a library in Rust."""


_Panic.__name__ = "PanicException"


@pytest.mark.parametrize("stop", [[], ["Total"]])
@pytest.mark.parametrize("kind", [IndexError, _Panic])
def test_a_token_that_the_tokenizer_cannot_decode_costs_its_request_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], stop: list[str]
) -> None:
    """As sentencepiece raises for the ids by which a model has more than its tokenizer."""
    (prompt,), bad, decode = demo_prompts(1, 6), 1999, type(engine.tokenizer).decode

    def refusing(tokenizer: object, token_ids: list[int], **options: object) -> object:
        if bad in token_ids:
            raise kind("piece id is out of range")
        return decode(tokenizer, token_ids, **options)

    monkeypatch.setattr(type(engine.tokenizer), "decode", refusing)
    forced = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=[bad], ignore_eos=True, stop=stop)

    async def together() -> tuple[RequestOutput, list[RequestOutput], RequestOutput]:
        runs = engine.run(prompt, forced), _streamed(engine, prompt, forced), engine.run(prompt, PARAMS)
        return await asyncio.gather(*runs)

    whole, pieces, other = asyncio.run(together())
    problem = f"the tokenizer cannot decode the output: {kind.__name__}: piece id is out of range"
    assert [str(whole.error), str(pieces[-1].error)] == [problem, problem]
    assert other.error is None
    assert other.outputs[0].text
    asyncio.run(_aborted(engine, engine.client.stats.num_generated_tokens))


def test_closing_and_cancelling_abort_the_request(engine: AsyncEngine) -> None:
    (prompt,) = demo_prompts(1, 6)
    stats = engine.client.stats

    async def closed() -> None:
        before = stats.num_generated_tokens
        stream = engine.stream(prompt, LONG)
        async for _ in stream:
            break
        assert engine.client.load.num_running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await _aborted(engine, before)

    async def cancelled() -> None:
        before = stats.num_generated_tokens
        task = asyncio.create_task(_streamed(engine, prompt, LONG))
        while not engine.client.load.num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _aborted(engine, before)

    asyncio.run(closed())
    asyncio.run(cancelled())


def test_a_waiter_whose_event_loop_is_gone_does_not_harm_the_engine(engine: AsyncEngine) -> None:
    (prompt,) = demo_prompts(1, 6)
    stream = engine.stream(prompt, LONG)

    async def first() -> RequestOutput:
        return await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.close()
    assert asyncio.run(engine.run(prompt, PARAMS)).finished
    stream.close() if hasattr(stream, "close") else None
