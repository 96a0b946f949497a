"""`python -m benchmarks.host_time`: the host's time of a round on the path of a GPU, measured on a CPU.

The engine decodes through static buffers and graphs whose replay does nothing, with sublayers that do nothing. The
noise of samples, which a GPU makes by one kernel, was made before. Head and the other operations of sampling run on the
CPU, with a vocabulary so small that an operation costs about as much as its launch. So the time is what a GPU waits for
each round, but for the launches of the driver.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.roofline import Accelerator, ModelShape, ideal_latency
from benchmarks.shared import Json, numbers
from rayspec.bench.result import markdown_table
from rayspec.command.terminal import clean_exit, output_console, save_json, say
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.loading import make_engine
from rayspec.decode.requests import ModelInfo
from rayspec.decode.runner import Runner
from rayspec.decode.stages import MAX_STEPS, LocalStages
from rayspec.model import noise
from rayspec.model.architecture import decompose
from rayspec.model.attention import Rows
from rayspec.model.cuda import operations
from rayspec.model.graphs import CapturedGraph, StepGraphs, Work
from rayspec.model.kv_cache import CacheSize, KVCache
from rayspec.model.rows import MAX_TREE_ROWS, decode_and_verify_buckets, padded_rows, power_of_two
from rayspec.model.static_rows import StepBuffers
from rayspec.model.sublayers import Decomposition
from rayspec.strategies.by_name import make_strategy
from rayspec.types import Request

VOCAB_SIZE = 64
NUM_DRAFT_TOKENS = 4
_MAX_MODEL_LEN = 8192
_NUM_WARM_ROUNDS = 5
_NUM_TURNS = 5
_NUM_NOISE_ROWS = 2048  # more than a round needs
_DRAFT_LOOK_INTERVAL = 4  # as on a GPU
_H100 = Accelerator(name="H100", bytes_per_s=3.35e12, flops=989e12)
_LLAMA_8B = ModelShape(
    name="8B", num_layers=32, hidden_size=4096, mlp_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256,
)  # fmt: skip
SHAPES = {"bundled": 16, "8B": 32}  # layers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Milliseconds of this thread's CPU time in a round; in each step of a round without drafts that has several.
    tokens: committed by a sequence in a round or step, on average."""

    shape: str
    strategy: str
    temperature: float
    batch: int
    best_ms: float
    median_ms: float
    tokens: float


class NoGraph:
    def replay(self) -> None:
        pass


class NoGraphs:
    """A `GraphDriver` whose graphs do nothing."""

    def rehearse(self, work: Work) -> None:
        pass

    def capture(self, work: Work) -> CapturedGraph:
        return NoGraph()

    def release(self, graphs: Collection[CapturedGraph]) -> None:
        pass

    def bytes_held(self) -> int:
        return 0


class NoiseMadeBefore:
    """Other numbers in each call, as far as there are some."""

    def __init__(self) -> None:
        self._numbers = noise.gumbel(torch.arange(2 * _NUM_NOISE_ROWS).view(2, -1), VOCAB_SIZE)
        self._first = 0

    cut_to_top_p = staticmethod(operations.cut_to_top_p)

    def gumbel(self, keys: Tensor, vocab_size: int) -> Tensor:
        self._first = (self._first + 1) % (_NUM_NOISE_ROWS - keys.shape[1])
        return self._numbers[self._first : self._first + keys.shape[1]]


def _nothing(hidden: Tensor, rows: Rows) -> Tensor:
    return hidden


def empty_model(num_layers: int) -> Decomposition:
    """Return a Llama with a tiny embedding and head, and sublayers that do nothing."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=num_layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=_MAX_MODEL_LEN,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    parts = decompose(model)
    return replace(parts, sublayers=tuple(replace(sublayer, body=_nothing) for sublayer in parts.sublayers))


def engine_of(parts: Decomposition, strategy: str, max_num_seqs: int) -> Engine:
    """Return an engine on the path of a GPU: static buffers, and a graph for each bucket that decoding can need."""
    num_sublayers = len(parts.sublayers)
    middle = range(num_sublayers // 4, 3 * num_sublayers // 4)
    own = {"skip": list(middle), "max_draft_tokens": NUM_DRAFT_TOKENS} if strategy == "static" else {}
    config = EngineConfig(
        model="empty", device="cpu", max_num_seqs=max_num_seqs, max_num_batched_tokens=8192,
        max_model_len=_MAX_MODEL_LEN, kv_cache_tokens=max_num_seqs * _MAX_MODEL_LEN,
        enable_prefix_caching=True, speculation={"strategy": strategy} | own,
    )  # fmt: skip
    size = CacheSize(max_num_seqs * _MAX_MODEL_LEN, 0)
    device = torch.device("cpu")
    cache = KVCache(parts.shapes, size.num_slots, dtype=torch.float32, device=device, num_spare=1)
    buffers = StepBuffers(
        cache,
        max_rows=padded_rows(config.num_batched_tokens + max_num_seqs * (MAX_TREE_ROWS + 1)),
        max_sequences=power_of_two(2 * max_num_seqs),
        max_places=_MAX_MODEL_LEN + 2 * MAX_TREE_ROWS,
        hidden_size=parts.config.hidden_size,
        dtype=torch.float32,
        device=device,
    )
    graphs = StepGraphs(parts, buffers, NoGraphs())
    graphs.warm_up(decode_and_verify_buckets(max_num_seqs, config.speculation.max_draft_tokens))
    runner = Runner(parts, cache, device=device, row_counts=None, buffers=buffers, graphs=graphs)
    stages = LocalStages(runner, vocab_size=VOCAB_SIZE, verification="coupled", num_tap_tokens=config.num_tap_tokens)
    stages.head.operators = NoiseMadeBefore()
    stages.head.draft_look_interval, stages.num_steps = _DRAFT_LOOK_INTERVAL, MAX_STEPS
    latency = ideal_latency(replace(_LLAMA_8B, num_layers=num_sublayers // 2), _H100)
    info = ModelInfo(vocab_size=VOCAB_SIZE, eos_token_ids=(), max_model_len=_MAX_MODEL_LEN)
    return make_engine(config, stages, make_strategy(config, num_sublayers, latency), info, size)


def time_rounds(engine: Engine, *, batch: int, context: int, temperature: float, num_rounds: int) -> list[float]:
    """Return the CPU seconds of each round, or of each of its steps. context: tokens of each prompt."""
    generator = torch.Generator().manual_seed(0)
    for index in range(batch):
        prompt: list[int] = torch.randint(VOCAB_SIZE, (context,), generator=generator).tolist()
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=_MAX_MODEL_LEN - context)
        engine.add(Request(request_id=str(index), params=params, prompt_token_ids=prompt))
    while engine.stats.num_prefilled_tokens < batch * context:
        engine.step()
    for _ in range(_NUM_WARM_ROUNDS):
        engine.step()
    engine.stats.num_generated_tokens = engine.stats.num_rounds = 0
    took_s = []
    for _ in range(num_rounds):
        started, before = time.thread_time(), engine.stats.num_rounds
        engine.step()
        took_s.append((time.thread_time() - started) * batch / (engine.stats.num_rounds - before))
    return took_s


def measure(
    parts: Decomposition,
    shape: str,
    strategy: str,
    *,
    temperatures: Sequence[float],
    batch: int,
    context: int,
    num_rounds: int,
) -> list[HostTime]:
    """Time rounds at each temperature. The temperatures take turns, so that a noisy machine slows them alike."""
    took_s: dict[float, list[float]] = {each: [] for each in temperatures}
    tokens, rounds = dict.fromkeys(temperatures, 0), dict.fromkeys(temperatures, 0)
    for turn in range(_NUM_TURNS):
        in_turn = range(turn, num_rounds, _NUM_TURNS)
        for temperature in temperatures if in_turn else ():
            engine = engine_of(parts, strategy, batch)
            took_s[temperature] += time_rounds(
                engine, batch=batch, context=context, temperature=temperature, num_rounds=len(in_turn)
            )
            tokens[temperature] += engine.stats.num_generated_tokens
            rounds[temperature] += engine.stats.num_rounds
            engine.abort_all()
    return [
        HostTime(
            shape=shape,
            strategy=strategy,
            temperature=each,
            batch=batch,
            best_ms=1000 * min(took_s[each]),
            median_ms=1000 * median(took_s[each]),
            tokens=tokens[each] / rounds[each],
        )
        for each in temperatures
    ]


def table(found: Sequence[HostTime]) -> str:
    headings = ("shape", "strategy", "temperature", "batch", "best ms", "median ms", "tokens")
    return markdown_table(headings, [_row(one) for one in found], num_left=2)


def _row(one: HostTime) -> list[str]:
    numbers = (
        f"{one.temperature:g}",
        f"{one.batch}",
        f"{one.best_ms:.2f}",
        f"{one.median_ms:.2f}",
        f"{one.tokens:.1f}",
    )
    return [one.shape, one.strategy, *numbers]


@app.command()
def host_time(
    *,
    shapes: Annotated[str, typer.Option(help="with commas, of bundled (32 sublayers) and 8B (64)")] = "bundled,8B",
    strategies: Annotated[str, typer.Option(help="with commas; static drafts four tokens")] = "ar,static,auto",
    temperatures: Annotated[str, typer.Option(help="with commas")] = "0,1",
    batches: Annotated[str, typer.Option(help="sequences, with commas")] = "1,8,64",
    context: Annotated[int, typer.Option(min=2, help="tokens of a prompt")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="measured rounds of each case")] = 40,
    json: Json = None,
) -> None:
    """Measure the host's CPU time of a decoding round on the path of a GPU, without a GPU.

    With temperature 0 the text repeats one token, so copies are always accepted. With temperature 1 it is random.
    """
    with clean_exit():
        torch.set_num_threads(1)
        found = list[HostTime]()
        for shape in shapes.split(","):
            parts = empty_model(SHAPES[shape])
            for strategy in strategies.split(","):
                for batch in numbers("batches", batches, int):
                    asked = numbers("temperatures", temperatures, float)
                    found += measure(
                        parts, shape, strategy, temperatures=asked, batch=batch, context=context, num_rounds=rounds
                    )
                    for one in found[-len(asked) :]:
                        say("  ".join(_row(one)))
        output_console().print(table(found), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_json({"rounds": [asdict(one) for one in found]}, json)


if __name__ == "__main__":
    app()
