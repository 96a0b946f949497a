"""The load on an endpoint: what is asked, what is counted, and which texts are held to be wrong. The requests
themselves are in tests/serve/test_load.py, where there is an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import rayspec
from benchmarks.__main__ import app
from benchmarks.serve import differing, summary
from benchmarks.serve_client import Answer, Ask, Choice
from benchmarks.serve_mix import Mix
from rayspec.config import SamplingParams
from rayspec.openai.requests import ENDPOINTS

MIX = Mix(model="demo", num_requests=200, max_tokens=32, cut_share=0.2)
STREAM = Ask(path="/v1/completions", body={"model": "demo", "prompt": "The", "stream": True})


@pytest.fixture(scope="module")
def llm() -> Iterator[rayspec.LLM]:
    with rayspec.LLM("demo", dtype="float32", num_threads=1, max_model_len=512) as loaded:
        yield loaded


class TestMix:
    def test_everything_occurs_and_is_a_request(self) -> None:
        asks = MIX.asks()
        assert len(asks) == 200
        for ask in asks:
            ENDPOINTS[ask.path].parse(dict(ask.body))
        shares = {
            "chat": sum(ask.is_chat for ask in asks),
            "stream": sum(ask.is_stream for ask in asks),
            "seed": sum("seed" in ask.body for ask in asks),
            "n": sum(ask.body.get("n") == 2 for ask in asks),
            "stop": sum("stop" in ask.body for ask in asks),
            "logprobs": sum("logprobs" in ask.body for ask in asks),
            "cut waiting": sum(ask.cut_after_s is not None for ask in asks),
            "cut in mid-stream": sum(ask.cut_after_events is not None for ask in asks),
        }
        expected = [100, 120, 100, 40, 60, 40, 28, 12]
        assert all(abs(found - mean) < 4 * mean**0.5 for found, mean in zip(shares.values(), expected, strict=True))


class TestAnswers:
    def test_percentiles_are_of_streams_that_finished(self) -> None:
        def streamed(ending: Any, times_s: list[float]) -> Answer:
            return Answer(ask=STREAM, ending=ending, event_times_s=times_s, num_output_tokens=11, total_s=9.0)

        whole = Answer(ask=replace(STREAM, body={}), ending="finished", total_s=1.0)
        found = summary([streamed("finished", [1.0, 2.0, 4.0]), streamed("cut", [50.0, 99.0]), whole])
        assert found["endings"] == {"finished": 2, "cut": 1}
        assert found["first_text_s"]["p99"] == 1.0
        assert found["between_events_s"]["p50"] == 1.5
        assert found["per_token_s"]["p50"] == pytest.approx(0.3)
        assert found["total_s"]["p50"] == 5.0
        assert summary([])["total_s"] is None

    @pytest.mark.parametrize("change", [{"text": "x"}, {"num_logprobs": 1}])
    def test_what_differs_from_offline_is_found(self, llm: rayspec.LLM, change: dict[str, Any]) -> None:
        body = {"model": "demo", "prompt": "The report", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        said = Choice(text=llm.generate("The report", params)[0].outputs[0].text, finish_reason="length")
        ask = Ask(path="/v1/completions", body=body)
        right = Answer(ask=ask, ending="finished", choices={0: said})
        wrong = Answer(ask=ask, ending="finished", choices={0: replace(said, **change)})
        cut = Answer(ask=ask, ending="cut", choices={0: Choice(text="?")})
        assert differing(llm, [right, cut]) == []
        assert [one["found"][0]["text"] for one in differing(llm, [right, wrong])] == [wrong.choices[0].text]


def test_nobody_at_the_url_is_an_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--url", "http://127.0.0.1:9", "--num-requests", "1"])
    assert result.exit_code == 1
    assert "error: the endpoint at 'http://127.0.0.1:9' does not answer" in result.stderr
