"""Models that do not split, cut into stages: whatever is copied, preempted or lost, tokens are those of `generate`."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.generate_state import check_received
from rayspec.local_engine import load_engine
from rayspec.model.passing import as_stage
from rayspec.model.sizes import model_sizes
from rayspec.model.weights import load_model
from rayspec.pipeline.loading import load_pipeline
from rayspec.pipeline.server import stage_name
from rayspec.types import OutOfMemoryError, RayspecError, UnsupportedModelError
from tests import every_type
from tests.engines import complete, tokens_of
from tests.exhaustive import few_of
from tests.families import greedy, ragged_prompts
from tests.pipeline.loop import Chaos, loop_engine, plant_copies

LENGTHS = (1, 33, 70, 7)
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=few_of(every_type.RECURRENT, ["qwen3_next", "mamba2"]))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("qwen3_next", tmp_path_factory)


def saved(family: str, folders: pytest.TempPathFactory) -> str:
    folder = folders.mktemp(family)
    every_type.build(family).save_pretrained(folder)
    return str(folder)


def prompts() -> list[list[int]]:
    return ragged_prompts(LENGTHS, vocab_size=200)


# Layers that read embeddings, keys of earlier layers or several states, or return more than states.
OTHERS = (
    "gemma3n_text#shared", "gemma4", "gemma4_text#shared", "zamba2", "llama4", "gpt_oss", "cohere2", "phimoe", "bloom",
)  # fmt: skip
FEW = {("qwen3_next", 2)}
STAGES = [*itertools.product(every_type.RECURRENT, (2, 3, 4)), *itertools.product(OTHERS, (2, 3))]


@pytest.mark.parametrize(("family", "num_stages"), few_of(STAGES, FEW))
def test_copies_in_stages_equal_generate(
    family: str, num_stages: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = saved(family, tmp_path_factory)
    expected = greedy(path, prompts(), MAX_TOKENS)
    options: dict[str, Any] = {"kv_cache_tokens": 160, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    with loop_engine(path, num_stages, seed=num_stages, splits=False, **options) as run:
        plant_copies(run.engine, expected, num_stages)
        advance, held = run.engine.advance, list[int]()

        def advance_and_count() -> Any:
            most = max(len(shard.span.states) for shard in run.replica.parts.values())
            held.append(most - run.engine.load.num_running)
            return advance()

        run.engine.advance = advance_and_count  # type: ignore[method-assign]
        for fewest in (None, 2):
            for shard in run.replica.parts.values():
                shard.span.fewest_in_lockstep = fewest
            assert tokens_of(complete(run.engine, prompts(), GREEDY)) == expected
        run.require_clean()
        assert 0 < run.engine.stats.num_accepted_tokens < run.engine.stats.num_draft_tokens
        assert run.engine.stats.num_preemptions > 0
        assert max(held) <= 1, "a sequence that waits keeps no cache after the next message"
        run.loop.chaos = Chaos(run, num_stages, [stage_name(stage) for stage in range(num_stages)], most=1, every=40)
        assert tokens_of(complete(run.engine, prompts(), GREEDY)) == expected
        assert run.replica.num_replaced > 0
        run.require_clean()


def test_a_stage_holds_its_own_layers_only(path: str) -> None:
    config = EngineConfig(model=path, dtype="float32", device="cpu")
    held = []
    for layers in (range(1), range(1, 3), range(3, 4)):
        stage = load_model(config, layers=layers)
        as_stage(stage, layers)
        held.append({name: each.nbytes for name, each in stage.named_parameters()})
        numbers = {int(name.partition("layers.")[2].partition(".")[0]) for name in held[-1] if "layers." in name}
        assert numbers == set(layers)
    whole = {name: each.nbytes for name, each in load_model(config).named_parameters()}
    assert held[0] | held[1] | held[2] == whole
    twice = [name for name in whole if sum(name in each for each in held) > 1]
    assert all("norm" in name or "embed" in name for name in twice)


def test_what_a_prompt_and_samples_give_is_that_of_one_process(hybrid: str) -> None:
    config = every_type.engine_config(hybrid, "ar")
    alone = load_engine(config, with_tokenizer=False)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, logprobs=1),
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=2, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
    ]
    expected = complete(alone, prompts(), params)
    with loop_engine(hybrid, 3, splits=False, max_num_batched_tokens=32) as run:
        outputs = complete(run.engine, prompts(), params)
        run.require_clean()
    for one, other in zip(expected, outputs, strict=True):
        assert [each.token_ids for each in other.outputs] == [each.token_ids for each in one.outputs]
        assert [*map(_numbers, other.prompt_logprobs or ())] == [*map(_numbers, one.prompt_logprobs or ())]


def _numbers(row: Any) -> dict[int, Any]:
    return {token: pytest.approx(each.logprob, abs=1e-4) for token, each in (row or {}).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_lack_of_memory_in_a_stage_fails_one_sequence(hybrid: str, stage: int) -> None:
    """The others begin again, because some stages have run their rows and some have not."""
    known, lengths = ragged_prompts((20, 30, 25), vocab_size=200), MAX_TOKENS
    expected = greedy(hybrid, known, lengths)
    with loop_engine(hybrid, 3, splits=False) as run:
        span = run.replica.parts[stage_name(stage)].span
        verify, count = span._verify, itertools.count(1)

        def fails_once(*given: Any) -> Any:
            found = verify(*given)
            if next(count) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

        span._verify = fails_once
        outputs = complete(run.engine, known, GREEDY)
        assert sum(isinstance(output.error, OutOfMemoryError) for output in outputs) == 1
        for output, tokens in zip(outputs, expected, strict=True):
            assert output.error is not None or tokens_of([output]) == [tokens]
        run.require_clean()


def test_a_shard_is_not_replaced_by_one_with_other_weights(tmp_path: Path) -> None:
    model: Any = every_type.build("cohere2")
    model.save_pretrained(tmp_path)
    with loop_engine(str(tmp_path), 2, splits=False, max_restarts=2) as run:
        expected = tokens_of(complete(run.engine, prompts(), GREEDY))
        run.replica.kill(stage_name(1))
        assert tokens_of(complete(run.engine, prompts(), GREEDY)) == expected
        with torch.no_grad():
            model.model.layers[-1].mlp.down_proj.weight.mul_(1.001)
        model.save_pretrained(tmp_path)
        run.replica.kill(stage_name(1))
        for output in complete(run.engine, prompts(), GREEDY):
            assert "stage-1 loaded other weights than the shard before it" in str(output.error)


# The first runs its final norm before the layers, too. Layers of the next two return what the next layer reads.
@pytest.mark.parametrize(
    ("family", "why"),
    [
        *[(each, "do not simply follow one another") for each in ("nanochat", "zaya", "glm_moe_dsa")],
        ("deepseek_v4", "its layers pass on several states of a token"),
    ],
)
def test_layers_that_stages_cannot_divide_are_refused_before_they_are_loaded(family: str, why: str) -> None:
    sizes = model_sizes(every_type.config_of(family), dtype=torch.float32, may_split=False)
    assert sizes.why_whole.endswith(why)


@pytest.mark.parametrize(
    ("family", "starts", "reads_embedding"),
    [("gemma3n_text#shared", (0, 1, 2), True), ("zamba2", (0, 1, 2, 3), True), ("cohere2", (0, 1, 2, 3), False)],
)
def test_what_layers_read_decides_where_stages_begin(
    family: str, starts: tuple[int, ...], reads_embedding: bool, tmp_path: Path
) -> None:
    config = every_type.config_of(family)
    sizes = model_sizes(config, dtype=torch.float32)
    assert (sizes.starts, sizes.embedding_everywhere) == (starts, reads_embedding)
    every_type.build(family).save_pretrained(tmp_path)
    layers = range(2, len(sizes.layers))
    without: Any = load_model(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu"), layers=layers)
    without.generation_config = GenerationConfig(use_cache=True)
    as_stage(without, layers)
    with pytest.raises(UnsupportedModelError, match="need the embedding") if reads_embedding else nullcontext():
        check_received(without)


@pytest.mark.parametrize(
    ("parallel", "why"), [({"tensor": 2}, "'tensor' is 2"), ({"stages": 2}, "'lora_modules' needs")]
)
def test_options_that_need_sublayers_are_refused(hybrid: str, parallel: dict[str, int], why: str) -> None:
    adapters = {} if "tensor" in parallel else {"one": hybrid}
    config = EngineConfig(model=hybrid, device="cpu", parallel=parallel, lora_modules=adapters)
    with pytest.raises(RayspecError, match=why):
        load_pipeline(config, with_tokenizer=False)
