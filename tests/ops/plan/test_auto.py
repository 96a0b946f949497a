"""`LLM(parallel="auto")` chooses what `rayspec plan` recommends. Its GPUs are named here: none is needed."""

from typing import Any

import pytest
import ray
import torch
from transformers import LlamaConfig

from rayspec import LLM, demo
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.loading import resolve_max_model_len
from rayspec.ops.plan import auto
from rayspec.ops.plan.auto import found_gpus, laid_out, with_layout
from rayspec.ops.plan.forecast import rank_layouts
from rayspec.ops.plan.gpus import Gpu, ask_torch, parse_gpus
from rayspec.ops.plan.options import PlanOptions
from rayspec.types import ConfigError
from tests.exhaustive import few_of
from tests.ops.plan.models import LLAMA_8B, LLAMA_70B, llama
from tests.ops.plan.test_choice import SMALL


def nodes(spec: str, count: int = 1) -> list[tuple[Gpu, ...]]:
    return [parse_gpus(spec)] * count


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


@pytest.mark.parametrize(
    ("model", "gpus", "count"), few_of([(SMALL, "4xH100", 2), (LLAMA_70B, "4xH100", 2)], [(SMALL, "4xH100", 2)])
)
def test_the_layout_is_the_planners(model: LlamaConfig, gpus: str, count: int) -> None:
    chosen = laid_out(config(), model, nodes(gpus, count))
    spec = f"{count}x{gpus}"
    best = rank_layouts(model, PlanOptions(gpus=spec)).best
    assert chosen.parallel == ParallelOptions(stages=best.stages, tensor=best.tensor, replicas=best.replicas)
    assert (chosen.max_num_seqs, chosen.max_model_len) == (best.concurrency, 16384)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [(None, 8192), ({"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 2.0}, 4096)],
)
def test_the_context_is_one_that_the_model_has(rope: dict[str, Any] | None, longest: int) -> None:
    """Such a rotary embedding changes with the length of the batch beyond its original context."""
    model = llama(1024, 6, 8, 4096)
    model.max_position_embeddings = 8192
    if rope is not None:
        factors = {name: [1.0] * 64 for name in ("short_factor", "long_factor")}
        model.rope_parameters = rope | factors | {"rope_theta": 1e4}
    chosen = laid_out(config(), model, nodes("1xH100"))
    assert chosen.max_model_len == resolve_max_model_len(config(), model) == longest
    with pytest.raises(ConfigError, match=f"'max_model_len' is {longest + 1}"):
        laid_out(config(max_model_len=longest + 1), model, nodes("1xH100"))


def test_where_memory_is_short_fewer_sequences_run_at_once_and_what_the_user_named_stays() -> None:
    chosen = laid_out(config(), LLAMA_8B, nodes("1xH100"))
    assert (chosen.parallel, chosen.max_num_seqs, chosen.max_model_len) == (None, 16, 16384)
    chosen = laid_out(config(max_num_seqs=4, max_model_len=2048), LLAMA_8B, nodes("2xH100"))
    assert (chosen.max_num_seqs, chosen.max_model_len) == (4, 2048)


def test_quantised_layers_are_not_cut_into_ranks() -> None:
    int8 = {"quant_method": "torchao", "quant_type": {"default": "int8"}}
    chosen = laid_out(config(quantization_config=int8), LLAMA_70B, nodes("8xH100"))
    assert chosen.parallel is not None
    assert chosen.parallel.tensor == 1
    fp8 = LlamaConfig(**LLAMA_70B.to_dict(), quantization_config={"quant_method": "fp8"})
    plain = {"quant_method": "fp8", "dequantize": True}  # the user's settings count
    assert laid_out(config(quantization_config=plain), fp8, nodes("8xH100")).parallel == (
        laid_out(config(), LLAMA_70B, nodes("8xH100")).parallel
    )


def test_adapters_which_ranks_refuse_get_stages() -> None:
    chosen = laid_out(config(lora_modules={"a": "folder"}), LLAMA_70B, nodes("4xH100", 2))
    assert chosen.parallel is not None
    assert (chosen.parallel.tensor, chosen.parallel.stages > 1) == (1, True)


@pytest.mark.parametrize("without", [{"cuda_kernels": "off"}, {"speculation": {"extra_weight_bytes": 0}}])
def test_copies_that_the_engine_does_not_make_take_no_memory(without: dict[str, Any]) -> None:
    asked = {"max_num_seqs": 10, "max_model_len": 34000}
    with pytest.raises(ConfigError, match="GiB are missing"):
        laid_out(config(**asked), LLAMA_8B, nodes("1xH100"))
    assert laid_out(config(**asked, **without), LLAMA_8B, nodes("1xH100")).parallel is None


def test_what_does_not_fit_is_refused_and_so_are_offloaded_weights() -> None:
    with pytest.raises(ConfigError, match=r"'parallel' is 'auto': [\d.]+ GiB are missing on 1xH100-80G, even with"):
        laid_out(config(), LLAMA_70B, nodes("1xH100"))
    with pytest.raises(ConfigError, match="'auto', which plans for weights that are all on the GPUs: with 'offload'"):
        laid_out(config(offload={}), LLAMA_70B, nodes("1xH100"))


@pytest.mark.parametrize("is_here", [True, False])
def test_a_gpu_of_another_node_gets_a_shard(is_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a cluster whose head has none: in this process, the model would run on the CPU."""
    monkeypatch.setattr(auto, "found_gpus", lambda: nodes("1xH100"))
    monkeypatch.setattr(auto, "load_config", lambda _: LLAMA_8B)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    assert with_layout(config()).parallel == (None if is_here else ParallelOptions())


def test_without_gpus_the_model_is_in_this_process() -> None:
    if found_gpus():
        pytest.skip("there are GPUs")
    with LLM("demo", parallel="auto", dtype="float32", max_model_len=64, speculation={"strategy": "ar"}) as llm:
        assert llm.config.parallel is None
        assert llm.config.model == demo.model_path()
        assert llm.generate(["The"])[0].outputs[0].text


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_without_gpus_has_none() -> None:
    assert found_gpus() == ()


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
def test_nodes_with_gpus_are_asked_which_they_have_and_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = [{**node, "Resources": {"GPU": 1}} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    assert [len(node) for node in found_gpus()] == [1] * bool(ask_torch()["names"])
    monkeypatch.setattr(auto, "_ANSWER_S", 0.0)
    with pytest.raises(ConfigError, match=r"not all nodes with GPUs have said which these are .*name the layout"):
        found_gpus()
