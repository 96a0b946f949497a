"""Passes in static buffers and captured graphs: the texts of transformers' generate, and few questions to devices."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks.device.host_reads import ReadCounter
from rayspec.choices import FULL
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.loading import make_graphs
from rayspec.decode.stages import LocalStages
from rayspec.model.graphs import StepGraphs
from rayspec.types import ConfigError, Plan
from tests.engines import GREEDY, RandomPlans, complete, engine_with, requests_for, tokens_of
from tests.families import cases, checkpoint, operator_parts_of, parts_of
from tests.graph_driver import RecordingDriver

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 80, 37, 3)
NUM_TOKENS = 16


def graphs_with(driver: RecordingDriver) -> Callable[..., StepGraphs]:
    return partial(StepGraphs, driver=driver)


def _graphs(engine: Engine) -> StepGraphs:
    graphs = engine.stages.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, StepGraphs)
    return graphs


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_greedy_equals_generate_under_a_random_plan_every_round(family: str) -> None:
    parts, known = operator_parts_of(checkpoint(family)), cases(checkpoint(family), PROMPT_LENGTHS, NUM_TOKENS)
    driver = RecordingDriver()
    engine = engine_with(
        parts, RandomPlans(4, len(parts.sublayers)), max_num_seqs=4, max_num_batched_tokens=64,
        capture=graphs_with(driver),
    )  # fmt: skip
    for _ in range(2):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    graphs = _graphs(engine)
    assert driver.num_replays > driver.num_captures > 0
    assert graphs.num_graphs == driver.num_captures, "nothing is captured twice"


def test_a_sublayer_that_fails_to_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
    driver = RecordingDriver(refuses=lambda number: number in (3, 5))
    engine = engine_with(parts, RandomPlans(4, len(parts.sublayers)), max_num_seqs=4, capture=graphs_with(driver))
    with caplog.at_level(logging.WARNING):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    messages = [record.getMessage() for record in caplog.records if "no CUDA graph of" in record.getMessage()]
    assert messages == [
        f"no CUDA graph of {part}: operation not permitted when stream is capturing; "
        "it is launched eagerly from now on (cuda_kernels='off' avoids GPU kernels and graphs)"
        for part in ("sublayer 7", "the embedding")
    ]
    assert _graphs(engine).num_graphs > 0


def test_graphs_that_were_asked_for_and_cannot_be_are_refused() -> None:
    parts = operator_parts_of(checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"'cuda_graphs' is 'on'.*leave it at auto"):
        make_graphs(EngineConfig(model="m", cuda_graphs="on"), parts, None)
    for way in ("auto", "off"):
        assert make_graphs(EngineConfig(model="m", cuda_graphs=way), parts, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=5, max_tokens=16)])
def test_texts_and_drafts_do_not_depend_on_how_often_the_host_looks(verification: str, params: SamplingParams) -> None:
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), (1, 80, 37, 3), 16)
    found = []
    for interval in (1, 2, 5):
        engine = engine_with(
            parts, RandomPlans(7, len(parts.sublayers)), verification=verification, max_num_seqs=4,
            max_num_batched_tokens=512, is_static=True,
        )  # fmt: skip
        assert isinstance(engine.stages, LocalStages)
        engine.stages.head.draft_look_interval = interval
        texts = tokens_of(complete(engine, known.prompts, params))
        stats = engine.stats
        found.append((texts, stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens))
    assert found[0] == found[1] == found[2]
    assert found[0][2] > 0


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize(
    ("params", "is_shorter"),
    [
        (GREEDY, True),
        (SamplingParams(temperature=1.0, seed=5, max_tokens=16), True),
        (SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=15, min_tokens=9), True),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=13), False),
        (SamplingParams(temperature=0.0, logprobs=2, max_tokens=13), False),
    ],
)
def test_texts_do_not_depend_on_the_steps_of_a_round(params: SamplingParams, is_shorter: bool, is_static: bool) -> None:
    """Ends of texts within a round included; a token that reads those before it has a round of its own."""
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
    ends = sorted({known.expected[0][5], known.expected[2][9]})
    found = []
    for num_steps in (1, 3, 4):
        engine = engine_with(parts, max_num_seqs=3, is_static=is_static, eos=ends, speculation={"strategy": "ar"})
        engine.stages.num_steps = num_steps
        for request in requests_for(known.prompts, params):
            engine.add(request)
        outputs, num_calls = {}, 0
        while engine.has_unfinished:
            outputs |= {one.request_id: one.outputs[0] for one in engine.step()}
            num_calls += 1
        texts = {name: (tuple(one.token_ids), one.finish_reason) for name, one in outputs.items()}
        found.append((texts, num_calls))
    assert found[0][0] == found[1][0] == found[2][0]
    assert (found[2][1] < found[1][1] < found[0][1]) == is_shorter


@pytest.mark.parametrize(
    ("num_draft_tokens", "expected", "strategy"),
    [(0, 1, "knapspec"), (3, 2, "knapspec"), (6, 3, "knapspec"), (0, 2, "recycling")],
)
def test_the_host_looks_once_a_round_and_once_for_three_drafted_tokens(
    num_draft_tokens: int, expected: int, strategy: str
) -> None:
    """And once more where tokens are recycled, for the likeliest ones."""
    parts, known = parts_of(checkpoint("llama")), cases(checkpoint("llama"), (1, 80, 37, 3), 16)
    choices = (FULL,) * len(parts.sublayers)
    plan = Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="test") if num_draft_tokens else None
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "speculation": {"strategy": strategy}}
    engine = engine_with(parts, plan, is_static=True, **options)
    assert isinstance(engine.stages, LocalStages)
    engine.stages.runner.buffers = None  # whose CPU reference looks at everything
    for request in requests_for(known.prompts, GREEDY):
        engine.add(request)
    engine.step()
    before = engine.stats.num_rounds
    with ReadCounter(CPU) as reads:
        engine.step()
    assert engine.stats.num_rounds == before + 4
    assert reads.counts.total() == expected
