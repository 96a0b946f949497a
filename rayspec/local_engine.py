"""Makes an engine in this process from an EngineConfig."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.generate_state import WHOLE
from rayspec.decode.loading import (
    affordable_slots,
    affordable_tokens,
    bytes_of_passes,
    cache_size,
    choices_here,
    copies_for_drafts,
    load_weights,
    make_engine,
    make_runner,
    model_info,
    prepare_span,
    total_bytes,
)
from rayspec.decode.profile import LoadLock, chosen_threads, load_or_measure
from rayspec.decode.requests import ModelInfo
from rayspec.decode.runner import Threads, YieldingThreads, asked_threads, in_thread_of_its_own, on_device, ways_of
from rayspec.decode.stages import LocalStages
from rayspec.decode.whole_model import WholeModelStages, WholeSpan
from rayspec.machine import num_cores, user_folder
from rayspec.model.adapters import install_adapters
from rayspec.model.architecture import decompose
from rayspec.model.kv_cache import CacheSize, whole_pages
from rayspec.model.offload import OffloadedWeights
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import in_fast_dtype, load_config, resolve_device
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.by_name import COPYING, copying_strategy, for_undivided, make_strategy, needs_latency
from rayspec.types import ConfigError, UnsupportedModelError


def load_engine(config: EngineConfig, *, with_tokenizer: bool = True) -> Engine:
    """Load model and tokenizer, split the model, measure it, and make its engine.

    Raises ConfigError and CheckpointError. A family that does not split into sublayers gets an engine whose drafts are
    copied, or that decodes plainly, and a warning that says why; UnsupportedModelError if even that would not generate
    the model's own text.
    """
    torch.set_num_threads(asked_threads(config.num_threads) or num_cores())
    device = resolve_device(config.device)

    def load() -> Engine:
        with on_device(device), LoadLock(user_folder(config.profile_cache)) as lock:
            lock.share()
            sized = config.sized(total_bytes(device) if device.type == "cuda" else None)
            on_cpu = resolve_device(sized.device).type == "cpu"
            info = model_info(sized, load_config(sized), with_tokenizer=with_tokenizer, on_cpu=on_cpu)
            model = in_fast_dtype(load_weights(sized), sized)
            try:
                parts = decompose(model)
            except UnsupportedModelError as error:
                return _whole_engine(sized, model, str(error), info)
            parts, offloaded, _ = prepare_span(sized, model, parts)
            return _local_engine(sized, parts, info, lock, offloaded)

    return in_thread_of_its_own(load)


def way_of(engine: Engine) -> Literal["drafts", "copies", "plain"]:
    """Return how a local engine can draft: by skipping as well, by copied and recycled tokens only, or not at all."""
    if not isinstance(engine.stages, WholeModelStages):
        return "drafts"
    return "plain" if engine.stages.span.cuts is None else "copies"


def load_adapter(engine: Engine | None, name: str, folder: str) -> None:
    """Load another adapter into an engine of this process, while it runs. Raises ConfigError where the model is not in
    this process or does not split, and CheckpointError."""
    stages = None if engine is None else engine.stages
    if isinstance(stages, WholeModelStages):
        raise ConfigError(
            f"adapter {name!r} needs a model that splits into sublayers: merge it with merge_and_unload()"
        )
    if engine is None or not isinstance(stages, LocalStages):
        raise ConfigError(f"adapter {name!r} is not loaded, and this engine takes no more: name it in 'lora_modules'")
    install_adapters(stages.runner.parts, {name: folder}, first=len(engine.model.adapters) + 1)
    engine.model.adapters.append(name)


def engine_like(engine: Engine, config: EngineConfig) -> Engine | None:
    """Make another engine with the weights and the tokenizer of `engine`, but with its own KV cache. config: must name
    the same model, data type and device. Return None if weights cannot be shared, or copies for drafts are missing.
    Raises ConfigError for options that the model cannot serve."""
    stages = engine.stages
    if not isinstance(stages, LocalStages) or config.offload is not None or config.parallel is not None:
        return None
    parts = stages.runner.parts
    wanted, there = (set(copies_for_drafts(each, parts)) for each in (config, engine.config))
    made = {weights for sublayer in parts.sublayers for weights in sublayer.quantised}
    if not wanted <= there | made:
        return None
    with LoadLock(user_folder(config.profile_cache)) as lock:
        return _local_engine(config, parts, engine.model, lock)


def _local_engine(
    config: EngineConfig,
    parts: Decomposition,
    info: ModelInfo,
    lock: LoadLock,
    offloaded: OffloadedWeights | None = None,
) -> Engine:
    device = resolve_device(config.device)
    num_tokens = config.kv_cache_tokens
    if num_tokens is None:
        fitting = affordable_slots(config, parts, device, pass_bytes=bytes_of_passes(config, parts))
        num_tokens = min(config.num_seqs * info.max_model_len, fitting)
    num_slots = whole_pages(num_tokens)
    window = max(parts.windows.values(), default=None)
    size = cache_size(config, num_slots, window)
    runner = make_runner(config, parts, size, info.max_model_len)
    # Whatever other engines of the process use. In deterministic mode the bits of a row may depend on the number of
    # threads, so no measurement decides it.
    asked = asked_threads(config.num_threads)
    measured: Threads | None = None
    if device.type == "cpu" and asked is None and not config.deterministic:
        runner.threads = measured = chosen_threads(runner, config.profile_cache, remeasure=config.remeasure)
    elif device.type == "cpu":
        runner.threads = Threads(asked or num_cores(), asked or num_cores())
    latency = None
    if needs_latency(config):
        latency = load_or_measure(
            runner, config.profile_cache, lock=lock, offloaded=offloaded, remeasure=config.remeasure
        )
    if measured is not None:
        runner.threads = YieldingThreads(measured)
    stages = LocalStages(
        runner,
        vocab_size=info.vocab_size,
        verification=config.speculation.verification,
        num_tap_tokens=config.num_tap_tokens,
    )
    strategy = make_strategy(config, runner.end_sublayer, latency, ways=ways_of(parts, choices_here(config, parts)))
    dtype = str(parts.dtype).removeprefix("torch.")
    return make_engine(
        config, stages, strategy, info, size, window=window, latency=latency, dtype=dtype, device=str(device)
    )


def _whole_engine(config: EngineConfig, model: PreTrainedModel, reason: str, info: ModelInfo) -> Engine:
    """Make the engine of a model that does not split, for this reason. Its drafts are copied or recycled, if any."""
    config = for_undivided(config, reason)
    asked = asked_threads(config.num_threads)
    threads = Threads(asked or num_cores(), asked or num_cores())
    span = WholeSpan(model, threads=threads if asked else YieldingThreads(threads))
    num_tokens = config.num_seqs * info.max_model_len
    if config.kv_cache_tokens is None:
        num_tokens = min(num_tokens, affordable_tokens(config, model))
    num_slots = whole_pages(config.kv_cache_tokens or num_tokens)
    if config.speculation.strategy in COPYING and (problem := span.find_cuts()):
        reason = f"{reason}; {problem}"
    measured = span.measured(1)
    latency = replace(LatencyModel.fit(measured, [WHOLE]), rejected_s=span.rejected_s) if span.cuts else None
    stages = WholeModelStages(span, vocab_size=info.vocab_size, verification=config.speculation.verification)
    strategy = copying_strategy(config, stages.num_sublayers, latency, reason)
    info = replace(info, scores_prompts=span.scores_prompts)
    return make_engine(config, stages, strategy, info, CacheSize(num_slots), latency=latency)
