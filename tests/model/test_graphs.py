"""Which passes are captured, which graphs are replayed and switched, and that they compute what eager launches do."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayspec.choices import Choices, choices_of
from rayspec.model.graphs import ROTARY, StaticStep, StepGraphs, is_capturable
from rayspec.model.kv_cache import PAGE_SIZE, KVCache
from rayspec.model.rows import Bucket, RowSpan, bucket_of, decode_and_verify_buckets, one_run
from rayspec.model.static_rows import BatchMetadata, StepBuffers
from rayspec.model.sublayers import Decomposition
from tests.engines import step_buffers
from tests.families import checkpoint, modules_of, operator_parts_of
from tests.graph_driver import RecordingDriver

CPU = torch.device("cpu")
NUM_SLOTS = 1024
NUM_PARTS = 3  # the rotary embedding, the embedding, all sublayers


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def parts_and_buffers(family: str = "llama") -> tuple[Decomposition, StepBuffers]:
    parts = operator_parts_of(checkpoint(family))
    cache = KVCache(parts.shapes, NUM_SLOTS, dtype=torch.float32, device=CPU, num_spare=1)
    return parts, step_buffers(parts, cache, max_places=256)


def eager_step(family: str = "llama") -> StaticStep:
    return StaticStep(*parts_and_buffers(family))


def metadata(rows: Sequence[int], seed: int = 0) -> BatchMetadata:
    """Sequences that have as many rows, in pages and contexts that the seed decides."""
    rng = random.Random(f"{seed} {rows}")
    spans = [
        RowSpan(one_run(PAGE_SIZE * 4 * rng.randrange(2) + 256 * at, 160), rng.randrange(80), count)
        for at, count in enumerate(rows)
    ]
    paths: list[Any] = [()] * len(spans)
    return BatchMetadata(bucket_of(spans, paths), spans, paths, [rng.randrange(100) for _ in range(sum(rows))])


def run(step: StaticStep, work: BatchMetadata, choices: Choices | None = None) -> Tensor:
    """A pass from its tokens on; the states of its rows, [1, N, hidden_size]."""
    rows = step.hold(work)
    step.embed(rows)
    sublayers = operator_parts_of(checkpoint("llama")).sublayers
    return step.run(sublayers, rows, choices=choices)[:, : work.num_rows].clone()


def captured(driver: RecordingDriver, **limits: int) -> StepGraphs:
    return StepGraphs(*parts_and_buffers(), driver, **limits, clock=lambda: 0.0)


passes = st.lists(
    st.tuples(
        st.sampled_from([(1,), (1, 1), (4, 2), (3, 3)]),
        st.lists(st.booleans(), min_size=8, max_size=8),
        st.integers(0, 8),
        st.integers(0, 99),
    ),
    min_size=3,
    max_size=9,
)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@settings(max_examples=12, deadline=None)
@given(works=passes)
def test_passes_have_the_bits_of_eager_ones(
    works: list[tuple[tuple[int, ...], list[bool], int, int]], family: str
) -> None:
    """Each pass is cut in two, and what the one before has left enters it as its hidden states, from the buffer."""
    eager, driver = eager_step(family), RecordingDriver()
    graphs = StepGraphs(*parts_and_buffers(family), driver, max_graphs=6)
    sublayers = eager.parts.sublayers

    def states(step: StaticStep, work: BatchMetadata, keep: list[bool], cut: int) -> Tensor:
        rows = step.hold(work)
        if cut % 2:
            step.embed(rows)
        step.run(sublayers[:cut], rows, choices=choices_of(keep))
        return step.run(sublayers[cut:], rows, choices=choices_of(keep))[:, : work.num_rows].clone()

    with torch.inference_mode():
        for rows, keep, cut, seed in works:
            work = metadata(rows, seed)
            assert torch.equal(states(graphs, work, keep, cut), states(eager, work, keep, cut))
    mine, others = graphs.buffers._cache, eager.buffers._cache
    for layer in eager.parts.shapes:
        assert torch.equal(mine.keys[layer][:, :NUM_SLOTS], others.keys[layer][:, :NUM_SLOTS])
        assert torch.equal(mine.values[layer][:, :NUM_SLOTS], others.values[layer][:, :NUM_SLOTS])


def test_a_pass_without_a_plan_is_captured_at_its_second_time() -> None:
    driver = RecordingDriver()
    graphs = captured(driver)
    run(graphs, metadata((1, 1)))
    assert driver.num_captures == driver.num_replays == 0
    for seed in range(1, 6):
        run(graphs, metadata((1, 1), seed))
        assert driver.num_captures == NUM_PARTS == graphs.num_graphs
    assert graphs.buckets == (Bucket(2, 2, 1, False),)
    assert [graph.num_replays for graph in driver.graphs] == [4] * NUM_PARTS


def test_a_plan_of_a_draft_is_captured_when_it_has_run_a_few_times() -> None:
    """Plans in turn, of which none runs often, are not."""
    driver = RecordingDriver()
    graphs = captured(driver)
    graphs.warm_up([metadata((1,)).bucket])
    for seed in range(7):
        for skipped in range(8):
            run(graphs, metadata((1,), seed), choices_of([index != skipped for index in range(8)]))
    assert driver.num_captures == NUM_PARTS
    for seed in range(4):
        run(graphs, metadata((1,), seed), choices_of([index != 3 for index in range(8)]))
    assert driver.num_captures == NUM_PARTS + 1
    assert driver.graphs[-1].num_replays == 2, "the last of the eager passes was its rehearsal"


def test_a_warm_up_captures_drafts_and_passes_that_will_be_faster_count() -> None:
    """A draft has one row for each sequence, so buckets of a verify have none."""
    driver, draft = RecordingDriver(), choices_of([index % 2 == 0 for index in range(8)])
    graphs = captured(driver)
    graphs.warm_up([metadata((1,)).bucket, metadata((3,)).bucket], [draft])
    assert driver.num_captures == 2 * NUM_PARTS + 1
    run(graphs, metadata((1,)), draft)
    run(graphs, metadata((3,), 1))
    assert graphs.num_unready == 0
    other = choices_of([index % 2 == 1 for index in range(8)])
    counts = []
    for seed in range(10):
        run(graphs, metadata((1,), seed), other)
        counts.append(graphs.num_unready)
    assert counts == [*range(1, 10), 9], "eight eager passes, and the one that is captured"
    graphs.run(eager_step().parts.sublayers, graphs.hold(metadata((1,))), tap=lambda index, hidden: None)
    assert graphs.num_unready == 10


def test_chunks_of_prompts_are_captured_when_their_bucket_has_run_a_few_times() -> None:
    """Alone and beside decodes; not above the limit."""
    driver = RecordingDriver()
    graphs, eager = captured(driver, max_rows=80), eager_step()
    for seed in range(12):
        for rows in ((70,), (66 + seed, 1, 1)):
            assert torch.equal(run(graphs, metadata(rows, seed)), run(eager, metadata(rows, seed)))
        assert driver.num_captures == (0 if seed < 8 else 2 * NUM_PARTS)
    assert sorted(bucket.num_sequences for bucket in graphs.buckets) == [1, 4]
    assert {graph.num_replays for graph in driver.graphs} == {3}
    for seed in range(12):
        before = graphs.num_unready
        run(graphs, metadata((90,), seed))
        assert graphs.num_unready == before, "it will not be faster later"
    assert driver.num_captures == 2 * NUM_PARTS


def test_in_a_trial_every_plan_is_captured_at_once_and_forgotten_afterwards() -> None:
    driver = RecordingDriver()
    graphs = captured(driver)
    graphs.warm_up([metadata((1,)).bucket])
    with graphs.trial():
        for _ in range(2):
            run(graphs, metadata((1,)), choices_of([index != 3 for index in range(8)]))
        assert driver.num_captures == NUM_PARTS + 1
        assert driver.graphs[-1].num_replays == 1
    assert len(driver.graphs) == graphs.num_graphs == NUM_PARTS


def test_graphs_that_were_released_have_to_earn_their_capture() -> None:
    """Else many buckets in turn would be captured at every pass."""
    driver = RecordingDriver()
    graphs = captured(driver, max_graphs=NUM_PARTS)
    for seed in range(64):
        for rows in ((1,), (1, 1)):
            run(graphs, metadata(rows, seed))
    assert driver.num_captures <= 2 * 7 * NUM_PARTS


def test_memory_that_does_not_come_back_ends_capturing(caplog: pytest.LogCaptureFixture) -> None:
    driver = RecordingDriver(bytes_each=10)
    graphs = captured(driver, max_bytes=25)
    driver.bytes_left = 2**30
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            run(graphs, metadata((1,), seed))
    assert driver.num_captures == 0
    assert [record.getMessage() for record in caplog.records] == [
        "no more CUDA graphs are captured, those that were released have left 1024 MiB in use"
    ]


def failing(error: Exception, at: int) -> Callable[[int], bool]:
    def refuses(number: int) -> bool:
        if number == at:
            raise error
        return False

    return refuses


def test_running_out_of_memory_ends_capturing_and_not_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    driver = RecordingDriver(refuses=failing(torch.OutOfMemoryError("no 2 GiB are free"), NUM_PARTS + 2))
    graphs, eager = captured(driver), eager_step()
    with caplog.at_level(logging.WARNING):
        for rows in ((1,), (1, 1), (1, 1, 1)):
            for seed in range(3):
                assert torch.equal(run(graphs, metadata(rows, seed)), run(eager, metadata(rows, seed)))
    assert graphs.num_graphs == NUM_PARTS + 1
    assert len(caplog.records) == 1


def test_a_rotation_that_fails_half_way_leaves_the_buffers_cosines() -> None:
    """A family with two types of rotary embedding, whose second type cannot be computed in a capture."""
    step = eager_step("gemma3_text")
    rows = step.hold(metadata((1,), 1))
    rope, rotary = dict(rows.rope), step.parts.rotary
    assert len(rope) == 2

    def fails(hidden: torch.Tensor, positions: torch.Tensor, layer_type: str) -> Any:
        if layer_type == list(rope)[1]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return tuple(each * torch.nan for each in rotary(hidden, positions, layer_type))

    step.parts = replace(step.parts, rotary=fails)
    with pytest.raises(RuntimeError, match="not permitted"):
        step.launch(ROTARY, rows)
    assert list(rows.rope.values()) == list(rope.values())


def test_hooks_and_experts_keep_a_sublayer_from_being_captured() -> None:
    sublayers = modules_of(checkpoint("qwen3_moe")).sublayers
    next(iter(sublayers[2].block.children())).register_forward_pre_hook(lambda module, arguments: None)
    assert [sublayer.index for sublayer in sublayers if not is_capturable(sublayer)] == [1, 2, 5, 7]


def test_a_result_outside_the_buffer_is_copied_there() -> None:
    eager, (parts, buffers) = eager_step(), parts_and_buffers()
    sublayer = parts.sublayers[3]
    sublayers = (
        replace(each, body=lambda hidden, rows: sublayer(hidden.clone(), rows)) if each is sublayer else each
        for each in parts.sublayers
    )
    graphs = StepGraphs(replace(parts, sublayers=tuple(sublayers)), buffers, RecordingDriver())
    for seed in range(4):
        assert torch.equal(run(graphs, metadata((1,), seed)), run(eager, metadata((1,), seed)))


def test_warming_up_makes_room_and_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    driver = RecordingDriver(bytes_each=2**20)
    graphs = captured(driver, max_graphs=18, max_rows=4)
    for rows in ((1, 2), (1, 1, 2)):
        run(graphs, metadata(rows)), run(graphs, metadata(rows, 1))
    wanted = decode_and_verify_buckets(8, 1)
    with caplog.at_level(logging.INFO):
        graphs.warm_up(wanted)
    assert set(graphs.buckets) == {Bucket(1, 1, 1, False), Bucket(2, 2, 1, False), Bucket(4, 4, 1, False)}
    assert caplog.messages == ["captured 9 graphs of 3 buckets in 0.0 s; they take 9 MiB"]


def test_the_buckets_of_a_warm_up_are_those_that_decodes_and_verifies_have() -> None:
    found = set(decode_and_verify_buckets(5, 3))
    reachable = set()
    for num_sequences in range(1, 6):
        for seed in range(200):
            rng = random.Random(seed)
            spans = [RowSpan(one_run(0, 64), 0, rng.randint(1, 4)) for _ in range(num_sequences)]
            reachable.add(bucket_of(spans, [()] * num_sequences))
            reachable.add(bucket_of([RowSpan(one_run(0, 64), 0, 1)] * num_sequences, [()] * num_sequences))
    assert reachable == found
    assert NUM_PARTS * len(decode_and_verify_buckets(8, 16)) <= 384 / 2
