"""The load on an endpoint: what is asked, what is counted, and which texts are held to be wrong. The requests
themselves are in tests/serve/test_load.py, where there is an endpoint."""

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.serve_mix import Mix
from rayspec.openai.batch import ENDPOINTS

MIX = Mix(model="demo", num_requests=200, max_tokens=32, cut_share=0.2)


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


def test_nobody_at_the_url_is_an_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--url", "http://127.0.0.1:9", "--num-requests", "1"])
    assert result.exit_code == 1
    assert "error: the endpoint at 'http://127.0.0.1:9' does not answer" in result.stderr
