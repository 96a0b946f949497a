"""How many threads decode, by measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rayspec import LLM, SamplingParams, demo
from rayspec.config import EngineConfig
from rayspec.decode import profile
from rayspec.decode.engine_loop import EngineLoop
from rayspec.decode.profile import chosen_threads, fastest_number
from rayspec.decode.runner import Runner
from rayspec.local_engine import load_engine
from rayspec.model.kv_cache import KVCache
from rayspec.model.threads import Threads
from rayspec.types import Request
from tests.families import checkpoint, parts_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _runner() -> Runner:
    parts = parts_of(checkpoint("llama"))
    return Runner(parts, KVCache(parts.shapes, 64, dtype=parts.dtype, device=CPU), device=CPU, row_counts=None)


class _Clock:
    """A clock by which a pass takes as long as `seconds` says for torch's number of threads."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        self._now += self._seconds[torch.get_num_threads()]
        return self._now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 2: 1.6, 4: 3.0}, 1),
        ({1: 4.0, 2: 2.1, 4: 2.0}, 2),
        ({1: 8.0, 2: 4.0, 4: 2.0}, 4),
        ({1: 2.0, 2: 1.0, 4: 9.0}, 2),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_as_any(seconds: dict[int, float], expected: int) -> None:
    scaled = {number: value / 1000 for number, value in seconds.items()}
    assert fastest_number(_runner(), [1, 2, 4], _Clock(scaled)) == expected


def test_the_number_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts later decodes with the same number, so with the same rounding."""
    answers = iter([2, 1, 1])
    monkeypatch.setattr(profile, "num_cores", lambda: 4)
    monkeypatch.setattr(profile, "fastest_number", lambda runner, numbers: next(answers))
    runner, folder = _runner(), str(tmp_path)
    assert [chosen_threads(runner, folder) for _ in range(2)] == [Threads(few=2, many=4)] * 2
    assert chosen_threads(runner, folder, remeasure=True) == Threads(few=1, many=4)
    (path,) = tmp_path.iterdir()
    for damaged in ("", "{", '{"few": 2}', "99"):
        path.write_text(damaged)
        answers = iter([1])
        assert chosen_threads(runner, folder).few == 1


def test_passes_of_many_rows_use_all_cores_and_tokens_stay_the_same() -> None:
    prompt = {"prompt_token_ids": [5 + index % 90 for index in range(200)]}
    llm = LLM(
        demo.model_path(), dtype="float32", max_model_len=512, num_threads=1, enable_prefix_caching=False,
        speculation={"strategy": "ar"},
    )  # fmt: skip
    runner = llm.engine.stages.runner  # type: ignore[union-attr]
    seen, texts = [], []
    use = Threads.use
    for threads in (Threads(few=1, many=1), Threads(few=1, many=2), Threads(few=2, many=1)):
        runner.threads = threads
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    with pytest.MonkeyPatch.context() as patch:

        def noted(self: Threads, num_rows: int) -> None:
            use(self, num_rows)
            seen.append((num_rows, torch.get_num_threads()))

        patch.setattr(Threads, "use", noted)
        runner.threads = Threads(few=1, many=2)
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert set(seen) == {(200, 2), (1, 1)}
    llm.shutdown()


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_engines_of_a_process_keep_their_numbers(family: str) -> None:
    """A thread that runs its first operator takes torch's number, which is that of the engine that was loaded last."""
    config = EngineConfig(model=checkpoint(family), dtype="float32", max_model_len=64, speculation={"strategy": "ar"})
    engines = {number: load_engine(config.replace(num_threads=number), with_tokenizer=False) for number in (1, 2)}
    request = Request(request_id="a", prompt_token_ids=[5, 6, 7], params=SamplingParams(temperature=0, max_tokens=4))
    for number, engine in engines.items():
        loop, seen = EngineLoop(engine), []
        hook = register_module_forward_hook(lambda *_, seen=seen: seen.append(torch.get_num_threads()))
        assert loop.submit(request).result(60).error is None
        hook.remove()
        loop.stop()
        assert set(seen[-4:]) == {number}
