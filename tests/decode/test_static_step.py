"""Passes in static buffers and captured graphs, and faults in them: the texts of transformers' generate, few questions
to devices, and one warning."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.device.host_reads import ReadCounter
from rayspec.choices import FULL
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode import loading
from rayspec.decode.engine import Engine
from rayspec.decode.loading import make_graphs, make_runner
from rayspec.decode.rehearsal import self_test
from rayspec.decode.stages import LocalStages
from rayspec.local_engine import load_engine
from rayspec.model import static_rows
from rayspec.model.architecture import decompose
from rayspec.model.cuda.operations import attend
from rayspec.model.fused import fuse
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_cache import CacheSize
from rayspec.model.rows import MAX_TREE_ROWS
from rayspec.model.static_rows import Staging, StaticRows
from rayspec.model.weights import load_model
from rayspec.types import ConfigError, OutOfMemoryError, Plan
from tests.engines import GREEDY, RandomPlans, complete, engine_with, requests_for, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, operator_parts_of, parts_of
from tests.graph_driver import RecordedGraph, RecordingDriver

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 80, 37, 3)
NUM_TOKENS = 16
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=16)
ERRORS = [
    OutOfResources(81920, 65536, "shared memory"),
    RuntimeError("CUDA error: invalid argument\nCompile with TORCH_USE_CUDA_DSA"),
]


def _engine(family: str = "llama", driver: RecordingDriver | None = None, **options: Any) -> tuple[Engine, LocalStages]:
    parts, own = operator_parts_of(checkpoint(family)), driver or RecordingDriver()
    engine = engine_with(
        parts,
        RandomPlans(4, len(parts.sublayers)),
        max_num_seqs=4,
        capture=partial(StepGraphs, driver=own),
        **options,
    )
    assert isinstance(engine.stages, LocalStages)
    return engine, engine.stages


def _texts_are_right(engine: Engine, family: str = "llama") -> None:
    known = cases(checkpoint(family), PROMPT_LENGTHS, NUM_TOKENS)
    assert tokens_of(complete(engine, known.prompts)) == known.expected


@pytest.mark.parametrize("family", few_of(["llama", "gemma2", "qwen3_moe"], ["gemma2"]))
def test_greedy_equals_generate_under_a_random_plan_every_round(family: str) -> None:
    driver = RecordingDriver()
    engine, stages = _engine(family, driver, max_num_batched_tokens=64)
    for _ in range(2):
        _texts_are_right(engine, family)
    assert driver.num_replays > driver.num_captures > 0
    assert stages.runner.graphs is not None
    assert stages.runner.graphs.num_graphs == driver.num_captures, "nothing is captured twice"


def test_a_sublayer_that_fails_to_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    engine, stages = _engine(driver=RecordingDriver(refuses=lambda number: number in (3, 5)))
    with caplog.at_level(logging.WARNING):
        _texts_are_right(engine)
    messages = [record.getMessage() for record in caplog.records if "no CUDA graph of" in record.getMessage()]
    assert messages == [
        f"no CUDA graph of {part}: operation not permitted when stream is capturing; "
        "it is launched eagerly from now on (cuda_kernels='off' avoids GPU kernels and graphs)"
        for part in ("sublayer 7", "the embedding")
    ]
    assert stages.runner.graphs is not None
    assert stages.runner.graphs.num_graphs > 0


def test_graphs_that_were_asked_for_and_cannot_be_are_refused() -> None:
    parts = operator_parts_of(checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"'cuda_graphs' is 'on'.*leave it at auto"):
        make_graphs(EngineConfig(model="m", cuda_graphs="on"), parts, None)
    for way in ("auto", "off"):
        assert make_graphs(EngineConfig(model="m", cuda_graphs=way), parts, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verification", "params"),
    few_of(list(product(["coupled", "rejection"], [GREEDY, SAMPLED])), [("rejection", GREEDY), ("coupled", SAMPLED)]),
)
def test_texts_and_drafts_do_not_depend_on_how_often_the_host_looks(verification: str, params: SamplingParams) -> None:
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
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


@pytest.mark.parametrize("is_static", few_of([True, False], [True]))
@pytest.mark.parametrize(
    ("params", "is_shorter"),
    [
        (GREEDY, True),
        (SAMPLED, True),
        (SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=15, min_tokens=9), True),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=13), False),
        (SamplingParams(temperature=0.0, logprobs=2, max_tokens=13), False),
        (GREEDY.replace(use_drafts=False), True),
    ],
)
def test_texts_do_not_depend_on_the_steps_of_a_round(params: SamplingParams, is_shorter: bool, is_static: bool) -> None:
    """Ends of texts within a round included; a token that reads those before it has a round of its own. Requests that
    want no drafts have such rounds under every strategy."""
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
    ends = sorted({known.expected[0][5], known.expected[2][9]})
    found = []
    for num_steps in (1, 3, 4):
        strategy = None if params.use_drafts else RandomPlans(1, len(parts.sublayers))
        speculation = {"strategy": "ar" if params.use_drafts else "auto"}
        engine = engine_with(parts, strategy, max_num_seqs=3, is_static=is_static, eos=ends, speculation=speculation)
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
    parts, known = parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
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


@contextmanager
def _one_warning(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.clear()
    messages: list[str] = []
    with caplog.at_level(logging.WARNING):
        yield messages
    messages += [record.getMessage() for record in caplog.records]
    assert len(messages) == 1, messages


def _failing(call: Callable[..., Any], error: Exception, when: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            raise error
        return call(*args, **options)

    return wrapped


def _once(number: int) -> Callable[..., bool]:
    counter = iter(range(10**9))
    return lambda *args, **options: next(counter) == number


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_replay_ends_graphs(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, stages = _engine()
    monkeypatch.setattr(RecordedGraph, "replay", _failing(RecordedGraph.replay, error, _once(40)))
    with _one_warning(caplog) as messages:
        for _ in range(2):
            _texts_are_right(engine)
    assert messages[0].startswith("passes run without CUDA graphs (cuda_graphs='off' avoids them) from now on, after")
    assert messages[0].endswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert stages.runner.graphs is None


@pytest.mark.parametrize("place", ["operator", "rehearsal", "upload"])
def test_an_error_that_comes_back_ends_graphs_and_buffers(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator fails for chunks of prompts, as on a GPU with too little shared memory for their tiles."""
    error, (engine, stages) = ERRORS[0], _engine()
    if place == "operator":
        fails = _failing(attend, error, lambda *args, max_rows, **options: max_rows > 64)
        monkeypatch.setattr(static_rows, "attend", fails)
    elif place == "rehearsal":
        monkeypatch.setattr(RecordingDriver, "rehearse", _failing(RecordingDriver.rehearse, error, lambda *_: True))
    else:
        monkeypatch.setattr(Staging, "upload", _failing(Staging.upload, error, lambda *_: True))
    with _one_warning(caplog) as messages:
        for _ in range(2):
            _texts_are_right(engine)
    has_buffers = place == "rehearsal"  # without graphs nothing is rehearsed
    assert (" and without static buffers (cuda_kernels='off' avoids them)" in messages[0]) == (not has_buffers)
    assert (stages.runner.buffers is None) == (not has_buffers)


def test_without_memory_graphs_go_before_passes_are_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on at most half of the rows run at once, and no request fails."""
    engine, stages = _engine(max_num_batched_tokens=512)
    _texts_are_right(engine)
    graphs, through, sizes = stages.runner.graphs, stages.span._through, list[int]()
    assert graphs is not None
    assert graphs.num_graphs > 0

    def limited(work: Any, batch: Any, hidden: Tensor, *rest: Any) -> Tensor:
        if hidden.shape[1] > 200:
            sizes.append(graphs.num_graphs)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return through(work, batch, hidden, *rest)

    monkeypatch.setattr(stages.span, "_through", limited)
    known = cases(checkpoint("llama"), (300, 90, 5), 16)
    with _one_warning(caplog) as messages:
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    assert re.search(r"in parts of (1\d\d) rows \(max_num_batched_tokens=\1 saves the memory\)", messages[0])
    assert sizes[0] > 0
    assert sizes[1:] == [0], "the graphs are released before a pass is divided"


def test_without_memory_at_the_head_graphs_go_and_the_round_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stages = _engine()
    _texts_are_right(engine)
    graphs = stages.runner.graphs
    assert graphs is not None
    num_before = graphs.num_graphs
    lacks = lambda *_: graphs.num_graphs >= num_before  # noqa: E731
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(stages.head, "logits", _failing(stages.head.logits, error, lacks))
    _texts_are_right(engine)


def test_rows_fail_only_when_no_way_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stages = _engine()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(stages.span, "_through", _failing(stages.span._through, error, lambda *_: True))
    outputs = complete(engine, [[5] * 300], GREEDY)
    assert isinstance(outputs[0].error, OutOfMemoryError)
    assert stages.runner.most_rows is not None
    monkeypatch.undo()
    _texts_are_right(engine)


def test_an_error_that_makes_the_gpu_unusable_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is noted for the next start of the process, once."""
    engine, stages = _engine()
    reasons: list[str] = []
    stages.runner.on_loss = reasons.append
    monkeypatch.setattr("rayspec.decode.runner.is_lost", lambda device: True)
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
    monkeypatch.setattr(stages.span, "_through", _failing(stages.span._through, error, lambda *_: True))
    engine.add(*requests_for([[5, 6, 7]]))
    with pytest.raises(RuntimeError, match="illegal memory"):
        engine.step()
    assert reasons == ["RuntimeError: CUDA error: an illegal memory access was encountered"]
    assert stages.runner.graphs is not None, "nothing is tried again"


def _mixed_wrongly(is_wrong: Callable[[StaticRows], bool]) -> Callable[..., Tensor]:
    """Attention whose second sequence reads the pages of the first."""
    mixed = StaticRows._mixed

    def wrong(rows: StaticRows, *args: Any) -> Tensor:
        table = rows.block_table[:1].expand_as(rows.block_table)
        return mixed(replace(rows, block_table=table) if is_wrong(rows) else rows, *args)

    return wrong


def test_a_test_of_the_weights_keeps_what_computes_right(caplog: pytest.LogCaptureFixture) -> None:
    engine, stages = _engine("qwen3_moe")
    caplog.clear()
    self_test(stages.runner)
    assert stages.runner.graphs is not None
    assert not caplog.records
    assert all(not cached[:, :192].any() for cached in stages.runner.cache.keys.values())
    _texts_are_right(engine, "qwen3_moe")


WRONG = {
    "chunk": lambda rows: rows.bucket.max_rows > 64,
    "decode": lambda rows: rows.bucket.max_rows == 1,
    "verify": lambda rows: rows.bucket.max_rows == MAX_TREE_ROWS,
}


@pytest.mark.parametrize("kind", WRONG)
def test_buffers_with_wrong_attention(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, stages = _engine()
    with _one_warning(caplog) as messages:
        monkeypatch.setattr(StaticRows, "_mixed", _mixed_wrongly(WRONG[kind]))
        self_test(stages.runner)
        assert stages.runner.buffers is None
        assert stages.runner.graphs is None
        _texts_are_right(engine)
    assert "without CUDA graphs (cuda_graphs='off' avoids them) and without static buffers" in messages[0]
    assert "differ from plain PyTorch" in messages[0]


@pytest.mark.parametrize("error", [None, *ERRORS[:1]])
def test_graphs_whose_replays_differ_in_a_bit_are_given_up(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, stages = _engine()
    replay = RecordedGraph.replay

    def differs(graph: RecordedGraph) -> None:
        if error is not None:
            raise error
        replay(graph)
        assert stages.runner.buffers is not None
        stages.runner.buffers._residual[0, 0, 0] += 1e-6

    monkeypatch.setattr(RecordedGraph, "replay", differs)
    with _one_warning(caplog) as messages:
        self_test(stages.runner)
        _texts_are_right(engine)
    assert messages[0].startswith("passes run without CUDA graphs (cuda_graphs='off' avoids them), after a test")
    assert stages.runner.buffers is not None


@pytest.mark.parametrize("lost", [False, True])
def test_buffers_that_raise_an_error_are_given_up(
    lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the error has made the GPU unusable, the load ends soon, and the next one avoids the kernels."""
    engine, stages = _engine()
    reasons: list[str] = []
    stages.runner.on_loss = reasons.append
    monkeypatch.setattr("rayspec.decode.runner.is_lost", lambda device: lost)
    monkeypatch.setattr(Staging, "upload", _failing(Staging.upload, ERRORS[0], lambda *_: True))
    with _one_warning(caplog):
        self_test(stages.runner)
        _texts_are_right(engine)
    assert len(reasons) == lost


def _loaded_with_operators(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> Engine:
    """An engine on a device that has the operators."""
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: True)
    monkeypatch.setattr(loading, "_verdict_file", lambda config, parts: folder / "verdict.json")
    config = EngineConfig(
        model=checkpoint("llama"), device="cpu", max_model_len=256, kv_cache_tokens=1024, num_threads=1,
        profile_cache=str(folder), speculation=SpeculationOptions(strategy="ar"), **options,
    )  # fmt: skip
    return load_engine(config, with_tokenizer=False)


def test_an_engine_tests_its_weights_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Whose attention over pages is wrong."""
    monkeypatch.setattr(StaticRows, "_mixed", _mixed_wrongly(lambda rows: True))
    engine = _loaded_with_operators(monkeypatch, tmp_path, cuda_graphs="off")
    assert [one.name for one in caplog.records if "test of the loaded weights" in one.getMessage()] == [
        "rayspec.decode.rehearsal"
    ]
    _texts_are_right(engine)
    assert isinstance(engine.stages, LocalStages)
    assert engine.stages.runner.on_loss is not None
    engine.stages.runner.on_loss("CUDA error: an illegal memory access was encountered")
    assert "an illegal memory access" in (tmp_path / "verdict.json").read_text()


def test_a_kernel_that_fails_before_the_first_capture_ends_graphs_and_not_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "CudaDriver", lambda device: RecordingDriver())
    monkeypatch.setattr(RecordingDriver, "rehearse", _failing(RecordingDriver.rehearse, ERRORS[0], lambda *_: True))
    with _one_warning(caplog) as messages:
        engine = _loaded_with_operators(monkeypatch, tmp_path)
        _texts_are_right(engine)
    assert messages[0].startswith("passes run without CUDA graphs (cuda_graphs='off' avoids them), after an error at")
    assert isinstance(engine.stages, LocalStages)
    assert engine.stages.runner.graphs is None
    assert engine.stages.runner.buffers is not None


def test_a_later_stage_captures_drafts_by_its_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: True)
    monkeypatch.setattr(loading, "_verdict_file", lambda config, parts: tmp_path / "verdict.json")
    monkeypatch.setattr(loading, "CudaDriver", lambda device: RecordingDriver())
    layers = range(2, 4)
    config = EngineConfig(
        model=checkpoint("llama"), device="cpu", dtype="float32", max_model_len=256, max_num_seqs=2,
        parallel={"stages": 2}, speculation=SpeculationOptions(strategy="knapspec", choices=("skip", "int4")),
    )  # fmt: skip
    parts = fuse(decompose(load_model(config, layers=layers), layers=layers), use_operators=True, quantised=("int4",))
    runner = make_runner(config, parts, CacheSize(1024), 256)
    assert caplog.messages == []
    assert isinstance(runner.graphs, StepGraphs)
    drafts = {part for _, part in runner.graphs._graphs if ("int4" in str(part))}
    assert drafts == {tuple((index, "int4") for index in range(4, 8))}
