"""Loads an engine over shards from an EngineConfig with `parallel`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.engine import Engine
from rayspec.decode.loading import allowed_copies, make_engine, model_info, wanted_copies
from rayspec.model.kv_cache import whole_pages
from rayspec.model.sizes import ModelSizes, model_sizes, quantisation_of, quantised_bytes
from rayspec.model.weights import dtype_of_plain_weights, load_config, num_layers
from rayspec.pipeline.placement import gpus_per_shard, sized
from rayspec.pipeline.ray_stages import RayStages
from rayspec.pipeline.replica import Replica
from rayspec.pipeline.shard import Blueprint, Shard
from rayspec.pipeline.whole_shard import WholeShard
from rayspec.planning.latency import LatencyModel
from rayspec.planning.partition import Device, LayerCost, ModelCosts, partition, stage_costs
from rayspec.strategies.by_name import copying_strategy, for_undivided, make_strategy, needs_latency
from rayspec.types import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_WHY_UNDIVIDED = "its layers do not split into attention and MLP sublayers"
# Loading again costs minutes: layers are divided anew only for a pipeline that is faster by this factor.
_WORTH_RELOADING = 1.25


def load_pipeline(
    config: EngineConfig, *, with_tokenizer: bool = True, shard_type: type[Shard] = Shard, why_whole: str = ""
) -> Engine:
    """Place and load the shards of one replica, measure them, and put an engine on top. Ray must be running. why_whole:
    why layers are not split into sublayers, although their names are those of layers that are. Raises ConfigError,
    CheckpointError, PlacementError, and UnsupportedModelError for a model whose layers stages cannot divide."""
    options = config.parallel or ParallelOptions()
    model = load_config(config)
    num_gpus = gpus_per_shard(config, options)
    sizes = _sizes(config, options, model, may_split=not why_whole, on_cpu=not num_gpus)
    why_undivided = why_whole or f"{model.model_type}: {_WHY_UNDIVIDED}"
    if not sizes.splits:
        config = for_undivided(config, why_undivided)
        if options.tensor > 1:
            raise UnsupportedModelError(f"option 'tensor' is {options.tensor}: set it to 1, because {why_undivided}")
        if sizes.why_whole:
            raise UnsupportedModelError(f"{sizes.why_whole}, so it cannot be cut into stages: remove option 'parallel'")
    window = sizes.window if sizes.splits else None
    info = model_info(config, model, with_tokenizer=with_tokenizer, on_cpu=not num_gpus or options.tensor > 1)
    config = sized(config)
    blueprint = Blueprint(
        config=config.replace(parallel=options),
        costs=_costs(config, options, sizes, info.max_model_len),
        vocab_size=info.vocab_size,
        hidden_size=model.get_text_config().hidden_size,
        num_slots=whole_pages(config.kv_cache_tokens or config.num_seqs * info.max_model_len),
        window=window,
        splits=sizes.splits,
        num_gpus=num_gpus,
        shard_type=shard_type if sizes.splits else WholeShard,
    )
    try:
        stages, latency = _started(blueprint)
    except UnsupportedModelError as error:  # the check of the loaded weights has the last word
        if not sizes.splits:
            raise
        return load_pipeline(config, with_tokenizer=with_tokenizer, shard_type=shard_type, why_whole=str(error))
    with ExitStack() as undo:
        undo.callback(stages.shutdown)  # of refused options, or the shards keep their places
        replica, num_sublayers = stages.replica, stages.num_sublayers
        first = replica.loaded["stage-0"]
        if sizes.splits:
            strategy = make_strategy(config, num_sublayers, latency, ways=stages.ways)
        else:
            info = replace(info, scores_prompts=all(each.scores_prompts for each in replica.loaded.values()))
            problems = {each.problem: None for each in replica.loaded.values() if each.problem}
            why = "; ".join([why_undivided, *problems])
            strategy = copying_strategy(config, num_sublayers, latency if replica.cuts else None, why)
        engine = make_engine(
            config,
            stages,
            strategy,
            info,
            replica.cache_size,
            window=window,
            latency=latency,
            dtype=first.dtype,
            device="cuda" if blueprint.num_gpus else "cpu",
        )
        undo.pop_all()
    return engine


def balanced_cut(
    latency: LatencyModel, spans: Sequence[tuple[int, int]], costs: ModelCosts, devices: Sequence[Device]
) -> tuple[range, ...] | None:
    """Return layers for each stage that fit the memory and make the slowest stage as fast as possible; None if the
    present cut is about as good. latency: measured with the present cut. costs: used for their bytes. A layer's time on
    another stage's device is its own time, times the ratio of the mean times per layer of the two devices."""
    layer_s = latency.sublayers_s(rows=1, context=1024, batch=1).reshape(-1, 2).sum(axis=1)
    cuts = [range(first // 2, last // 2) for first, last in spans]
    pace = [float(layer_s[cut.start : cut.stop].mean()) for cut in cuts]
    owner = [stage for stage, cut in enumerate(cuts) for _ in cut]
    layers = [
        replace(cost, seconds=tuple(float(seconds) * there / pace[here] for there in pace))
        for cost, seconds, here in zip(costs.layers, layer_s, owner, strict=True)
    ]
    costs = replace(
        costs,
        embedding=replace(costs.embedding, seconds=(0.0,) * len(cuts)),
        layers=tuple(layers),
        head=replace(costs.head, seconds=(latency.head_s(1),) * len(cuts)),
    )
    better = partition(costs, devices)
    slowest = [max(cost.seconds for cost in stage_costs(costs, devices, cut)) for cut in (cuts, better)]
    return better if slowest[0] > _WORTH_RELOADING * slowest[1] else None


def _started(blueprint: Blueprint) -> tuple[RayStages, LatencyModel | None]:
    """Start a replica and measure it where that is needed. Start it again with another cut if its stages are uneven."""
    options = blueprint.options
    can_be_cut_anew = options.layers is None and options.stages > 1
    latency, better = None, None
    with ExitStack() as undo:
        replica = Replica(blueprint)
        undo.callback(replica.close)
        replica.start()
        stages = RayStages(replica)
        undo.callback(stages.shutdown)
        num_measures = 2 if can_be_cut_anew else int(needs_latency(blueprint.config))
        for _ in range(num_measures):
            latency = stages.measure()
            if can_be_cut_anew:
                better = balanced_cut(latency, replica.spans, blueprint.costs, replica.devices)
            if better is None:  # else it is measured once more: something else may have run next to a stage
                break
        if better is None:
            undo.pop_all()
            return stages, latency
    logger.warning("stages are uneven: loading them again with %s layers", [len(span) for span in better])
    options = options.replace(layers=tuple(len(span) for span in better))
    return _started(replace(blueprint, config=blueprint.config.replace(parallel=options)))


def _sizes(
    config: EngineConfig, options: ParallelOptions, model: PretrainedConfig, *, may_split: bool = True, on_cpu: bool
) -> ModelSizes:
    """Return the sizes of one rank, with copies of weights for drafts."""
    if num_layers(model) < options.stages:
        raise ConfigError(
            f"option 'stages' is {options.stages}, but the model has {num_layers(model)} layers: a stage needs one"
        )
    dtype = getattr(torch, config.dtype, None) or dtype_of_plain_weights(model)
    # Copies that drafts will have, if every stage has an even share of them.
    by_weights = {
        weights: -(-sum(quantised_bytes(model, weights, tensor=options.tensor, on_cpu=on_cpu)) // options.stages)
        for weights in wanted_copies(config, on_cpu=on_cpu)
    }
    return model_sizes(
        model,
        dtype=dtype,
        quantization=quantisation_of(config, model, on_cpu=on_cpu or options.tensor > 1),  # ranks load through the CPU
        tensor=options.tensor,
        draft_weights=allowed_copies(by_weights, config.speculation.extra_weight_bytes),
        may_split=may_split,
        on_cpu=on_cpu,
    )


def _costs(config: EngineConfig, options: ParallelOptions, sizes: ModelSizes, max_model_len: int) -> ModelCosts:
    """Return the costs of one rank. Time is given as bytes of weights, which decoding reads. Memory includes the KV
    cache of one full context, the recurrent state of all sequences, and copies of weights for drafts. Offloaded weights
    count as no memory."""

    def cost(weight_bytes: int, kv_bytes: int = 0, copy_bytes: int = 0) -> LayerCost:
        resident = 0 if config.offload else weight_bytes
        seconds = (float(weight_bytes),) * options.stages
        return LayerCost(weight_bytes=resident + copy_bytes, kv_bytes=kv_bytes, seconds=seconds)

    embedding = replace(cost(sizes.embedding_bytes), seconds=(0.0,) * options.stages)  # only one row per token is read
    return ModelCosts(
        embedding=embedding,
        layers=tuple(
            cost(
                layer.weight_bytes,
                layer.kv_bytes_read(max_model_len) + config.num_seqs * layer.state_bytes,
                layer.copy_bytes,
            )
            for layer in sizes.layers
        ),
        head=cost(sizes.last_stage_bytes(options.stages), copy_bytes=sizes.head_copy_bytes),
        starts=sizes.starts,
        embedding_everywhere=sizes.embedding_everywhere,
    )
