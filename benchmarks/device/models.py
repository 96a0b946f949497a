"""What checks run: the bundled model, small random models of several families, and passes over sequences in a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rayspec import demo
from rayspec.choices import Choices
from rayspec.config import EngineConfig
from rayspec.decode.runner import Runner
from rayspec.demo.widen import widen
from rayspec.model.architecture import decompose
from rayspec.model.fused import fuse
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_cache import PAGE_SIZE, KVCache
from rayspec.model.rows import RowSpan, Runs, padded_rows, power_of_two, runs_of_pages
from rayspec.model.static_rows import StepBuffers
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import load_model

# How sublayers run: transformers' modules, fused layers of torch's operations, fused layers of `rayspec::*`.
Way: TypeAlias = Literal["modules", "fused", "operators"]
Capture: TypeAlias = Callable[[Decomposition, StepBuffers], StepGraphs]
BUNDLED = "bundled"
SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that layers matter, the most likely token varies, and the two most likely ones are far apart.
    "initializer_range": 0.25,
}
# They cover plain layers; head norms; and windows, softcaps, norms before and after, and another activation.
RANDOM_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 1},
    "gemma2": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 32,
    },
}
_NUM_SEQUENCES, _PAGES_EACH = 4, 16
_WINDOWED_SHIFT = 3  # pages by which sequences are shifted in the windowed store
NUM_SLOTS = _NUM_SEQUENCES * _PAGES_EACH * PAGE_SIZE


def bundled_model(dtype: torch.dtype, device: torch.device, *, factor: int = 1) -> PreTrainedModel:
    """Return the bundled model. factor: factor by which it is widened."""
    name = str(dtype).removeprefix("torch.")
    model = load_model(EngineConfig(model=demo.model_path(), dtype=name, device=str(device)))
    return model if factor == 1 else widen(model, factor)


def random_model(family: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a small random model, with the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | RANDOM_FAMILIES[family]))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # ones and zeros would hide mistakes in norms
                weight.add_(torch.randn_like(weight) * 0.1)
            weight.data = weight.data.to(dtype)  # not the buffers: rotary frequencies are float32 in any model
    moved: PreTrainedModel = model.to(device)
    return moved


def split(model: PreTrainedModel, way: Way) -> Decomposition:
    """Split the model into sublayers that run in the given way. Fusing frees the model's own weights."""
    parts = decompose(model)
    return parts if way == "modules" else fuse(parts, use_operators=way == "operators")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A runner with its own KV cache. buffers: static buffers of its passes; None if each pass allocates its own."""

    runner: Runner
    buffers: StepBuffers | None

    @property
    def parts(self) -> Decomposition:
        return self.runner.parts

    @property
    def vocab_size(self) -> int:
        return int(self.parts.config.get_text_config().vocab_size)


def prepare(
    parts: Decomposition,
    *,
    is_static: bool = False,
    capture: Capture | None = None,
    num_slots: int = NUM_SLOTS,
    max_rows: int = padded_rows(NUM_SLOTS),
    max_sequences: int = power_of_two(_NUM_SEQUENCES),
    max_places: int = _PAGES_EACH * PAGE_SIZE,
) -> Prepared:
    """Make a runner and a KV cache, in which layers with a sliding window have a store of their own. is_static: passes
    of at most `max_rows` rows run in static buffers. capture: makes graphs of these passes."""
    cache = KVCache(
        parts.shapes,
        num_slots,
        num_windowed_slots=num_slots,
        windowed_layers=parts.windows,
        dtype=parts.dtype,
        device=parts.device,
        num_spare=1,
    )
    buffers = None
    if is_static:
        buffers = StepBuffers(
            cache,
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_places=max_places,
            hidden_size=parts.config.get_text_config().hidden_size,
            dtype=parts.dtype,
            device=parts.device,
        )
    graphs = capture(parts, buffers) if capture is not None and buffers is not None else None
    runner = Runner(parts, cache, device=parts.device, row_counts=None, buffers=buffers, graphs=graphs)
    return Prepared(runner, buffers)


def prepare_model(name: str, way: Way, dtype: torch.dtype, device: torch.device, *, is_static: bool) -> Prepared:
    """Make a new model by name, and a runner of it."""
    model = bundled_model(dtype, device) if name == BUNDLED else random_model(name, dtype, device)
    return prepare(split(model, way), is_static=is_static)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """A pass over some sequences. contexts: filled positions of each sequence. num_rows: rows of each sequence, 0 for
    none. parents: of each sequence's rows in a tree, see `RowSpan`. first_page: shifts all sequences in the cache."""

    name: str
    contexts: Sequence[int]
    num_rows: Sequence[int]
    parents: tuple[int, ...] = ()
    first_page: int = 0

    def spans(self) -> list[RowSpan]:
        return [
            RowSpan(
                _runs(index, self.first_page),
                context,
                num_rows,
                self.parents,
                windowed=_runs(index, self.first_page + _WINDOWED_SHIFT),
            )
            for index, (context, num_rows) in enumerate(zip(self.contexts, self.num_rows, strict=True))
            if num_rows
        ]

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return random token ids, the same every time."""
        generator = torch.Generator().manual_seed(sum(self.contexts))
        ids: list[int] = torch.randint(3, vocab_size, (sum(self.num_rows),), generator=generator).tolist()
        return ids


# A prompt in two chunks, then each kind of pass in a round.
CHUNKS = (
    PassShape(name="chunk", contexts=(0, 0, 0), num_rows=(80, 70, 33)),
    PassShape(name="later chunk", contexts=(80, 70, 33), num_rows=(20, 0, 0)),
)
SINGLE_ROWS = PassShape(name="single rows", contexts=(100, 70, 33), num_rows=(1, 1, 1))
ROUNDS = (
    SINGLE_ROWS,
    PassShape(name="chain", contexts=(101, 71, 34), num_rows=(5, 3, 1)),
    PassShape(name="tree", contexts=(106, 74, 35), num_rows=(5, 5, 5), parents=(-1, 0, 0, 1, -2)),
)


@torch.no_grad()
def logits_of(prepared: Prepared, shape: PassShape, choices: Choices | None = None) -> Tensor:
    """Run the pass, with all sublayers by default, and return its logits: [rows, vocab_size], float32 on the host."""
    runner = prepared.runner
    batch = runner.batch(shape.spans(), token_ids=shape.token_ids(prepared.vocab_size))
    return runner.head(runner.run(batch, runner.embed(batch), choices=choices)).float().cpu()


def _runs(sequence: int, first_page: int) -> Runs:
    """Return the sequence's pages as two runs: first the second half of its pages, then the first half."""
    num_pages = _NUM_SEQUENCES * _PAGES_EACH
    order = [*range(_PAGES_EACH // 2, _PAGES_EACH), *range(_PAGES_EACH // 2)]
    return runs_of_pages([(first_page + sequence * _PAGES_EACH + page) % num_pages for page in order], PAGE_SIZE)
