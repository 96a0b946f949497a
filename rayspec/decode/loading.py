"""Load weights, choose the weights and KV cache that a device can hold, and make the parts of an engine."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from transformers import PretrainedConfig, PreTrainedModel

from rayspec.choices import FULL, Choice, Choices, Weights, drafts_by_copies, keys_of
from rayspec.config import KV_CACHE_SHARE, EngineConfig
from rayspec.decode.drafting.lookup import read_texts, tokenised
from rayspec.decode.engine import Engine
from rayspec.decode.generate_state import cache_bytes
from rayspec.decode.generation_config import eos_token_ids, generation_defaults
from rayspec.decode.profile import cache_file
from rayspec.decode.rehearsal import empty_caches, rehearse, self_test
from rayspec.decode.requests import ModelInfo
from rayspec.decode.runner import Runner, ways_of
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.stages import MAX_STEPS, Stages
from rayspec.decode.strategy import Strategy
from rayspec.errors import reason_of
from rayspec.machine import bytes_available, installed_version
from rayspec.model.adapters import install_adapters
from rayspec.model.architecture import max_positions, why_context_ends
from rayspec.model.cuda import probe
from rayspec.model.cuda.graphs import CudaDriver
from rayspec.model.fused import draft_head_bytes, fuse, in_one_order
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_cache import PAGE_SIZE, CacheSize, KVCache, WindowedPages, bytes_per_slot
from rayspec.model.load_check import enough_memory, lack_of_memory
from rayspec.model.matrices import ONE_ORDER
from rayspec.model.offload import OffloadedWeights, offload
from rayspec.model.row_counts import (
    FIXED,
    FIXED_IN_BUFFERS,
    SINGLE_ROWS,
    RowCounts,
    has_experts,
    independent_row_counts,
)
from rayspec.model.rows import MAX_TREE_ROWS, Bucket, decode_and_verify_buckets, padded_rows, power_of_two
from rayspec.model.sizes import copy_bytes
from rayspec.model.static_rows import STATIC_KEYS, StepBuffers
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import load_model, load_tokenizer, num_layers, resolve_device, route_of_weights, vocab_size
from rayspec.planning.latency import LatencyModel
from rayspec.types import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Shapes of passes whose graphs are captured at load: about two seconds for 64 sublayers. Others follow in use.
_NUM_WARM_BUCKETS = 24
# Positions behind the newest token whose windows stay in the cache: 8 rounds of up to 16 tokens, all of them tapped.
_NUM_BEHIND = 128


def model_info(config: EngineConfig, model: PretrainedConfig, *, with_tokenizer: bool, on_cpu: bool) -> ModelInfo:
    """on_cpu: whether the model is on a CPU, perhaps of another node. Raises ConfigError and CheckpointError."""
    tokenizer, given = load_tokenizer(config) if with_tokenizer else None, array("i")
    if (name := config.speculation.corpus) is not None:
        if tokenizer is None:
            raise ConfigError(f"option 'corpus' is {name!r}, which needs a tokenizer: leave it out")
        parts = tokenised(read_texts(name), tokenizer, vocab_size=vocab_size(model))
        given.extend(itertools.islice(itertools.chain.from_iterable(parts), config.speculation.corpus_tokens))
    return ModelInfo(
        vocab_size=vocab_size(model),
        eos_token_ids=eos_token_ids(config),
        max_model_len=resolve_max_model_len(config, model),
        tokenizer=tokenizer,
        defaults=generation_defaults(config),
        adapters=list(config.lora_modules),
        adapter=config.adapter,
        given_texts=given,
        weights=route_of_weights(config, model, on_cpu=on_cpu),
    )


def load_weights(config: EngineConfig, *, layers: range | None = None, with_embedding: bool = False) -> PreTrainedModel:
    """Call `load_model`. A model that will be offloaded is loaded into CPU memory and stays there until then."""
    config = config if config.offload is None else config.replace(device="cpu")
    return load_model(config, layers=layers, with_embedding=with_embedding)


@enough_memory()
def prepare_span(
    config: EngineConfig,
    model: PreTrainedModel,
    parts: Decomposition,
    split: Callable[[Decomposition], Decomposition] = lambda parts: parts,
    agree: Callable[[bool], bool] | None = None,
) -> tuple[Decomposition, OffloadedWeights | None, EngineConfig]:
    """Offload and fuse the sublayers of a loaded model or stage, and make the copies of weights that drafts want.
    Return them with what is offloaded and the options in force: ranks of a stage sum rows of equal passes, so all of
    them run the kernels, or none. split: keeps the share of this rank. agree: see `StepGraphs`. Raises ConfigError for
    an unknown sublayer to offload; CheckpointError without the memory."""
    offloaded, options = None, config.offload
    if options is not None:
        num_sublayers = 2 * num_layers(parts.config)
        foreign = [index for index in options.sublayers or () if not 0 <= index < num_sublayers]
        if foreign:
            raise ConfigError(f"option 'sublayers' names sublayer {foreign[0]}; the model has 0 to {num_sublayers - 1}")
        device = resolve_device(config.device)
        chosen = options.sublayers if options.sublayers is not None else least_needed(parts, options.share)
        here = [index for index in chosen if parts.sublayers[0].index <= index <= parts.sublayers[-1].index]
        folder = Path(options.folder) if options.folder is not None else None
        offloaded = offload(parts, here, to=options.to, device=device, folder=folder)
        model.to(device)  # type: ignore[arg-type]
    parts = split(parts)
    runs_kernels = has_kernels(config, parts)
    if agree is not None and not agree(runs_kernels) and runs_kernels:
        if config.cuda_graphs == "on":
            raise ConfigError(
                "option 'cuda_graphs' is 'on', and a rank of this stage cannot run the kernels: set it to auto"
            )
        logger.warning("%s runs without the GPU kernels, as another rank of its stage does", parts.device)
        config = config.replace(cuda_kernels="off")
    if config.own_bits and parts.device.type != "cpu":
        raise ConfigError(f"option 'own_bits' works on a CPU, and the model is on {parts.device}: leave it out")
    copies = copies_for_drafts(config, parts)
    if config.own_bits and "int4" not in copies:
        copies.append("int4")
    parts = fuse(
        parts,
        apart_from=offloaded.sublayers if offloaded else (),
        use_operators=has_kernels(config, parts),
        quantised=copies,
        own_bits=config.own_bits,
    )
    install_adapters(parts, config.lora_modules)
    return parts, offloaded, config


@enough_memory("lower kv_cache_share, kv_cache_tokens, max_num_batched_tokens or max_num_seqs")
def make_runner(
    config: EngineConfig,
    parts: Decomposition,
    size: CacheSize,
    max_model_len: int,
    agree: Callable[[bool], bool] | None = None,
) -> Runner:
    """Make the runner of these sublayers, with its KV cache, and with static buffers and CUDA graphs where the device
    has the operators. In deterministic mode the row counts of decode passes are fixed: ranks of a stage use a count
    without testing the kernels. agree: see `StepGraphs`. Raises ConfigError and CheckpointError for too little memory.
    """
    counts = None
    if config.deterministic:
        is_split = config.parallel is not None and config.parallel.tensor > 1
        if has_experts(parts):
            counts = SINGLE_ROWS
        elif _has_buffers(config, parts):
            one_order = in_one_order(parts)
            counts = FIXED_IN_BUFFERS if one_order is None else RowCounts(1, ONE_ORDER)
            parts = one_order or parts
        else:
            counts = FIXED if is_split else independent_row_counts(parts)
    choices = choices_here(config, parts)
    if unread := {keys_of(choice) for choice in config.speculation.draft_choices} - {*map(keys_of, choices)}:
        left_out = ", ".join(sorted(unread))
        logger.info("drafts do not use %s here: passes with static shapes on a GPU cannot read such keys", left_out)
    device = resolve_device(config.device)
    try:
        cache = KVCache(
            parts.shapes,
            size.num_slots,
            num_windowed_slots=size.num_windowed_slots,
            windowed_layers=parts.windows,
            dtype=parts.dtype,
            device=device,
            num_spare=1 if counts is None else counts.least,  # slots for padding rows, which write keys and values too
            notes_pages=any(keys_of(choice) == "pages" for choice in choices),
            keeps_finite=counts is not None and counts.longest_chain > 1,
        )
    except Exception as error:
        if (lack := lack_of_memory(error)) is None:
            raise
        raise ConfigError(
            f"option 'kv_cache_tokens' is {size.num_slots}, which do not fit ({lack}): lower it"
        ) from error
    buffers = make_buffers(config, parts, cache, max_model_len)
    graphs = make_graphs(config, parts, buffers, agree)
    runner = Runner(
        parts, cache, device=device, row_counts=counts, buffers=buffers, graphs=graphs, choices=choices,
        may_retry=config.parallel is None or config.parallel.tensor == 1,
    )  # fmt: skip
    if has_kernels(config, parts):
        runner.on_loss = partial(_note_loss, _verdict_file(config, parts))
        if graphs is not None and runner.may_retry:
            buckets = decode_and_verify_buckets(config.num_seqs, _num_draft_tokens(config))
            drafts = [*drafts_by_copies(config.speculation.draft_weights, ways_of(parts, choices)).values()]
            if counts is not None:
                fitting = [one for one in buckets if one.num_rows <= counts.most]
                buckets = [one._replace(num_rows=max(one.num_rows, counts.least)) for one in fitting]
                drafts = drafts if counts.least == 1 else []  # they run in other buckets
            before = (FULL,) * runner.first_sublayer  # a plan has choices for the whole model
            _warm_up(runner, graphs, buckets, [before + draft for draft in drafts])
        if runner.may_retry:  # ranks would have to decide together
            self_test(runner)
    return runner


def _warm_up(runner: Runner, graphs: StepGraphs, buckets: Sequence[Bucket], drafts: Collection[Choices]) -> None:
    """Capture graphs of the first buckets. After an error, give up the graphs: the buffers are tested next."""
    try:
        graphs.warm_up(buckets[:_NUM_WARM_BUCKETS], drafts)
    except Exception as error:  # noqa: BLE001 - Triton, CUDA and libraries raise errors of many types
        runner.note_loss(error)
        logger.warning("passes run %s, after an error at the start: %s", runner.give_up(), reason_of(error))


def _note_loss(path: Path, reason: str) -> None:
    """Note an error that has made the GPU unusable for this process: the next start avoids the kernels."""
    probe.keep(path, f"an earlier process has lost the GPU ({reason})")
    logger.error("the GPU is lost for this process: %s. Its next start runs without the GPU kernels", reason)


def least_needed(parts: Decomposition, share: float) -> list[int]:
    """Return the sublayers that drafts need least, with `share` of the span's bytes. MLP sublayers come first, then
    attention, each from the middle outwards: drafts best skip sublayers near the middle (KnapSpec, figure 5)."""
    middle = (parts.sublayers[0].index + parts.sublayers[-1].index) / 2
    order = sorted(parts.sublayers, key=lambda sublayer: (sublayer.kind != "mlp", abs(sublayer.index - middle)))
    sizes = {one.index: sum(weight.nbytes for weight in one.block.parameters()) for one in order}
    chosen, num_bytes = [], 0
    for sublayer in order:
        if num_bytes >= share * sum(sizes.values()):
            break
        chosen.append(sublayer.index)
        num_bytes += sizes[sublayer.index]
    return sorted(chosen)


def has_kernels(config: EngineConfig, parts: Decomposition) -> bool:
    """Return whether this engine runs the operators `rayspec::*` with Triton kernels. They are tried at the first call
    for a GPU and the shapes of a model; see `probe.works`."""
    if config.cuda_kernels == "off" or parts.device.type != "cuda":
        return False
    return probe.works(kernel_shapes(config, parts), _verdict_file(config, parts), remeasure=config.remeasure)


def kernel_shapes(config: EngineConfig, parts: Decomposition) -> probe.Shapes:
    """Return what decides the kernels that this process runs."""
    text = parts.config.get_text_config()
    num_heads = int(text.num_attention_heads) // (config.parallel.tensor if config.parallel is not None else 1)
    softcap = float(getattr(text, "attn_logit_softcapping", None) or 0.0)
    inner_size = getattr(text, "intermediate_size", None)
    attention = [
        (max(1, num_heads // shape.num_heads) * shape.num_heads, shape.num_heads, shape.key_dim, window, softcap)
        for layer, shape in parts.shapes.items()
        for window in [parts.windows.get(layer, 0)]
        if shape.key_dim == shape.value_dim
    ]
    return probe.Shapes(
        device=str(parts.device),
        dtype=str(parts.dtype).removeprefix("torch."),
        hidden_size=int(text.hidden_size),
        inner_size=inner_size if isinstance(inner_size, int) else 4 * int(text.hidden_size),
        attention=tuple(dict.fromkeys(attention)),
        max_context=_max_places(config, resolve_max_model_len(config, parts.config)),
        has_copies=bool(config.speculation.draft_weights),
    )


def _verdict_file(config: EngineConfig, parts: Decomposition) -> Path:
    """Return the file of the kernels' verdict, one for each GPU, version of the software, and shapes of a model."""
    gpu = torch.cuda.get_device_properties(parts.device)
    versions = [installed_version(name) for name in ("rayspec", "torch", "triton")]
    shapes = structs.asdict(structs.replace(kernel_shapes(config, parts), device=f"{gpu.name} {gpu.uuid}"))
    return cache_file(config.profile_cache, "kernels", {"versions": versions, "shapes": str(shapes)})


def _max_places(config: EngineConfig, max_model_len: int) -> int:
    return max_model_len + config.speculation.max_draft_tokens + config.speculation.num_branch_tokens


def copies_for_drafts(config: EngineConfig, parts: Decomposition) -> list[Weights]:
    """Return the quantised copies that drafts want and `extra_weight_bytes` allows, the smallest first. On a GPU,
    copies need the operators `rayspec::*`."""
    on_cpu = parts.device.type == "cpu"
    by_weights = {
        weights: draft_head_bytes(parts, weights)
        + sum(copy_bytes(one, weights, on_cpu=on_cpu) for one in parts.sublayers)
        for weights in config.speculation.draft_weights
        if on_cpu or has_kernels(config, parts)
    }
    return allowed_copies(by_weights, config.speculation.extra_weight_bytes)


def wanted_copies(config: EngineConfig, *, on_cpu: bool) -> tuple[Weights, ...]:
    """Return the quantised copies that drafts want, the smallest first: on a GPU none without the kernels."""
    return config.speculation.draft_weights if on_cpu or config.cuda_kernels != "off" else ()


def allowed_copies(by_weights: Mapping[Weights, int], most: int | None) -> list[Weights]:
    """Return the copies that together take at most `most` bytes in this process. by_weights: the bytes of each."""
    chosen: list[Weights] = []
    for weights, num_bytes in by_weights.items():
        if most is None or num_bytes <= most:
            chosen.append(weights)
            most = None if most is None else most - num_bytes
        else:
            message = "drafts have no %s weights: they take %d bytes, extra_weight_bytes leaves %d"
            logger.info(message, weights, num_bytes, most)
    return chosen


def choices_here(config: EngineConfig, parts: Decomposition) -> tuple[Choice, ...]:
    """Return the draft choices whose keys the rows of this process's passes can read."""
    readable = STATIC_KEYS if _has_buffers(config, parts) else ("all", "window", "pages")
    return tuple(choice for choice in config.speculation.draft_choices if keys_of(choice) in readable)


def cache_size(config: EngineConfig, num_slots: int, window: int | None) -> CacheSize:
    """window: the longest of the model's layers, which have a store of their own if that takes less memory."""
    num_windowed_slots = _num_windowed_slots(config, window) if window else num_slots
    return CacheSize(num_slots, num_windowed_slots if num_windowed_slots < num_slots else 0)


def _num_windowed_slots(config: EngineConfig, window: int) -> int:
    return WindowedPages.num_slots_needed(
        window,
        _NUM_BEHIND,
        max_num_seqs=config.num_seqs,
        max_rows=_lookahead(config) + config.speculation.num_branch_tokens,
        max_prefill_tokens=config.num_batched_tokens,
        num_cohorts=config.parallel.num_cohorts if config.parallel is not None else 1,
    )


def _lookahead(config: EngineConfig) -> int:
    """Return how many tokens after its newest one a round may write of a sequence."""
    return max(_num_draft_tokens(config), MAX_STEPS - 1)


def _num_draft_tokens(config: EngineConfig) -> int:
    return config.speculation.max_draft_tokens if config.speculation.strategy != "ar" else 0


def make_engine(
    config: EngineConfig,
    stages: Stages,
    strategy: Strategy,
    info: ModelInfo,
    size: CacheSize,
    *,
    window: int | None = None,
    latency: LatencyModel | None = None,
    **resolved: str,
) -> Engine:
    """Make the engine of loaded stages. window: see `cache_size`. resolved: values of options that were "auto"."""
    windowed = None
    if window and size.num_windowed_slots:
        windowed = WindowedPages(size.num_windowed_slots, window, _NUM_BEHIND)
    scheduler = Scheduler(
        size.num_slots,
        windowed=windowed,
        max_num_seqs=config.num_seqs,
        max_prefill_tokens=config.num_batched_tokens,
        lookahead=_lookahead(config),
        num_beside=config.speculation.num_branch_tokens,
        chunk_grid=config.num_batched_tokens if config.deterministic else None,
        num_cohorts=stages.num_cohorts,
        shares_pages=config.enable_prefix_caching,
    )
    return Engine(
        config.replace(max_model_len=info.max_model_len, kv_cache_tokens=size.num_slots, **resolved),
        stages=stages,
        scheduler=scheduler,
        strategy=strategy,
        model=info,
        latency=latency,
    )


def make_buffers(config: EngineConfig, parts: Decomposition, cache: KVCache, max_model_len: int) -> StepBuffers | None:
    """Make buffers for passes with static shapes; None where `_has_buffers` says so."""
    if not _has_buffers(config, parts):
        return None
    return StepBuffers(
        cache,
        max_rows=padded_rows(config.num_batched_tokens + config.num_seqs * (MAX_TREE_ROWS + 1)),
        max_sequences=power_of_two(2 * config.num_seqs),
        max_places=_max_places(config, max_model_len),
        hidden_size=parts.config.get_text_config().hidden_size,
        dtype=parts.dtype,
        device=parts.device,
    )


def _has_buffers(config: EngineConfig, parts: Decomposition) -> bool:
    """The operators for attention need keys and values of one size. In deterministic mode, all passes in buffers have
    the same number of rows. That does not help experts, the rows of a tree, adapters and stages."""
    if config.deterministic and (
        has_experts(parts) or config.speculation.num_branch_tokens or config.lora_modules or config.parallel is not None
    ):
        return False
    has_one_size = all(shape.key_dim == shape.value_dim for shape in parts.shapes.values())
    return has_one_size and has_kernels(config, parts)


def make_graphs(
    config: EngineConfig,
    parts: Decomposition,
    buffers: StepBuffers | None,
    agree: Callable[[bool], bool] | None = None,
) -> StepGraphs | None:
    """Make the CUDA graphs for passes in these buffers, or None, as `config.cuda_graphs` says. Raises ConfigError if
    the requested graphs are impossible here."""
    way = config.cuda_graphs
    is_split = config.parallel is not None and config.parallel.tensor > 1  # sums in graphs have not run on GPUs yet
    if way == "off" or (way == "auto" and (buffers is None or is_split)):
        return None
    if buffers is None:
        wanted = "a GPU that runs Triton kernels"
        if config.deterministic:
            wanted += ", and with 'deterministic' a model without experts, adapters and stages, whose drafts are chains"
        raise ConfigError(f"option 'cuda_graphs' is {way!r}, which needs {wanted}: leave it at auto")
    return StepGraphs(parts, buffers, CudaDriver(parts.device), agree=agree)


def resolve_max_model_len(config: EngineConfig, model: PretrainedConfig) -> int:
    """Return `config.max_model_len`, or by default the model's own limit. Raises ConfigError above that limit."""
    limit = max_positions(model)
    if config.max_model_len is None:
        if limit is not None and limit < getattr(model, "max_position_embeddings", limit):
            logger.warning("max_model_len is %d: %s", limit, why_context_ends(model))
        return limit or 4096
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(f"option 'max_model_len' is {config.max_model_len}, {why_context_ends(model)}: lower it")
    return config.max_model_len


def bytes_of_passes(config: EngineConfig, parts: Decomposition) -> int:
    """Return the memory that the largest passes take on a GPU, which run once for it; 0 on a CPU. 0 without a run if
    `kv_cache_tokens` says what the cache takes."""
    if config.kv_cache_tokens is not None:
        return 0
    max_model_len = resolve_max_model_len(config, parts.config)

    def make(cache: KVCache) -> Runner:
        buffers = make_buffers(config, parts, cache, max_model_len)
        runner = Runner(parts, cache, device=parts.device, row_counts=None, buffers=buffers)
        if buffers is not None:
            runner.on_loss = partial(_note_loss, _verdict_file(config, parts))
        return runner

    return rehearse(
        parts,
        make,
        num_prompt_rows=config.num_batched_tokens,
        num_sequences=config.num_seqs,
        rows_each=1 + _num_draft_tokens(config),
        max_model_len=max_model_len,
        may_divide=config.parallel is None or config.parallel.tensor == 1,
    )


def affordable_slots(
    config: EngineConfig, parts: Decomposition, device: torch.device, *, pass_bytes: int = 0, num_sharing: int = 1
) -> int:
    """Return how many tokens' keys and values fit into the part of the free memory that the options allow. pass_bytes:
    of the largest passes, see `bytes_of_passes`. num_sharing: processes that share this memory. Raises CheckpointError
    for fewer than 16."""
    budget = _cache_budget(config, device, num_sharing, pass_bytes)
    windowed = bytes_per_slot([parts.shapes[layer] for layer in parts.windows], parts.dtype)
    others = bytes_per_slot(list(parts.shapes.values()), parts.dtype) - windowed
    affordable = int(budget / (windowed + others))
    if windowed:
        num_windowed_slots = _num_windowed_slots(config, max(parts.windows.values()))
        if affordable > num_windowed_slots:
            affordable = int((budget - num_windowed_slots * windowed) / max(others, 1))
    if device.type == "cuda":  # the kernels have 32-bit offsets in a head
        affordable = min(affordable, 2**31 // max(shape.key_dim for shape in parts.shapes.values()) - 2 * PAGE_SIZE)
    return _enough(affordable, budget, device, num_sharing)


def affordable_tokens(config: EngineConfig, model: PreTrainedModel, *, num_sharing: int = 1) -> int:
    """Return how many tokens fit into that part of the memory if each sequence of an undivided model has a cache of its
    own. Raises CheckpointError for fewer than 16."""
    of_token, of_sequence = cache_bytes(model)
    budget = _cache_budget(config, model.device, num_sharing, 0)
    left = budget - config.num_seqs * of_sequence
    return _enough(int(left / max(of_token, 1)), budget, model.device, num_sharing)


def _cache_budget(config: EngineConfig, device: torch.device, num_sharing: int, pass_bytes: int) -> float:
    free = free_bytes(device) // num_sharing - pass_bytes
    if device.type == "cuda" and config.kv_cache_share is None and config.gpu_memory_utilization is not None:
        return free - (1 - config.gpu_memory_utilization) * total_bytes(device) / num_sharing
    return free * (config.kv_cache_share or KV_CACHE_SHARE[device.type])


def _enough(affordable: int, budget: float, device: torch.device, num_sharing: int) -> int:
    if affordable < 16:
        raise CheckpointError(
            f"the KV cache may have {max(budget, 0) / 2**30:.1f} GiB of the "
            f"{free_bytes(device) // num_sharing / 2**30:.1f} that are free for each process on {device}, which is too "
            "little: raise kv_cache_share or gpu_memory_utilization, lower max_num_seqs, or free memory"
        )
    return affordable


def total_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1]


def free_bytes(device: torch.device) -> int:
    """Return the memory that can be allocated on the device. Blocks that torch caches count as free."""
    if device.type == "cuda":
        empty_caches()
        return torch.cuda.mem_get_info(device)[0]
    return bytes_available()
