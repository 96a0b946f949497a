"""`python -m benchmarks.hybrid`: copied drafts for a hybrid model of 200 million random weights.

Each layout has recurrent layers or short convolutions besides attention, so it is not split: its drafts are copied or
recycled tokens. Two tasks: a prompt that repeats a phrase, whose greedy text repeats too; and random text, sampled at
temperature 1, in which nothing is worth copying. The strategies take turns. The time is the CPU time of this process
with one thread, without the prompt's pass. No text can be copied from another: each run forgets the earlier ones.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.shared import Json
from rayspec.bench.result import markdown_table
from rayspec.command.terminal import clean_exit, output_console, save_json, say
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.whole_model import WholeModelStages
from rayspec.local_engine import load_engine
from rayspec.strategies.by_name import make_strategy
from rayspec.types import Request

_PHRASE, _NUM_PHRASES = 24, 8
_LAYER_SCALE = 0.3
_SIZES = {"vocab_size": 32000, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
_LAYERS = {"num_hidden_layers": 16, "intermediate_size": 3072, "tie_word_embeddings": True}
_LINEAR = {
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_EVERY_FOURTH = [*["linear_attention"] * 3, "full_attention"] * 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": [*["conv"] * 3, "full_attention"] * 4, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {"layer_types": _EVERY_FOURTH} | _LINEAR,
    "qwen3_next": {"layer_types": _EVERY_FOURTH, "mlp_only_layers": list(range(16)), "num_experts": 4} | _LINEAR,
    "granitemoehybrid": {
        "layer_types": [*["mamba"] * 3, "attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 3072,
        "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64,
    },
}  # fmt: skip

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """token_ms: median CPU milliseconds of a token. speed_ups: over plain decoding, in each repeat. accepted: share of
    the tokens that came from accepted drafts. verified: share of rounds with a draft."""

    layout: str
    task: str
    strategy: str
    token_ms: float
    speed_ups: Sequence[float]
    accepted: float
    verified: float


def build(layout: str, task: str, folder: str) -> int:
    """Save a random model of this layout, and return the number of its weights. To copy, its layers are so weak that
    greedy text repeats."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[layout](**(_SIZES | _LAYERS | LAYOUTS[layout] | {"eos_token_id": None, "pad_token_id": 0}))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if task == "copying" and weight.ndim > 1 and "embed" not in name:
                weight.mul_(_LAYER_SCALE)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def prompt_of(task: str, seed: int) -> list[int]:
    draw = random.Random(seed)
    phrase = [draw.randrange(1, _SIZES["vocab_size"]) for _ in range(_PHRASE)]
    if task == "copying":
        return phrase * _NUM_PHRASES
    return [draw.randrange(1, _SIZES["vocab_size"]) for _ in range(_PHRASE * _NUM_PHRASES)]


def run(engine: Engine, strategy: str, task: str, seed: int, num_tokens: int) -> tuple[float, float, float, list[int]]:
    """Return CPU seconds of a token, the shares of `Measured`, and the tokens."""
    stages, options = engine.stages, engine.config.speculation
    assert isinstance(stages, WholeModelStages)
    config = engine.config.replace(speculation=options.replace(strategy=strategy))
    engine.forget_texts()
    engine.replace_strategy(make_strategy(config, stages.num_sublayers, engine.latency))
    cuts = stages.span.cuts
    stages.span.cuts = None if strategy == "ar" else cuts  # plain decoding takes nothing back
    temperature = 0.0 if task == "copying" else 1.0
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    engine.add(Request(request_id="one", params=params, prompt_token_ids=prompt_of(task, seed)))
    stats, outputs = engine.stats, []
    before = stats.num_generated_tokens
    while stats.num_generated_tokens == before:
        outputs = engine.step()
    first, accepted = stats.num_generated_tokens, stats.num_accepted_tokens
    rounds, plain, started = stats.num_rounds, stats.num_plain_rounds, time.process_time()
    while engine.has_unfinished:
        outputs = engine.step()
    took_s, count = time.process_time() - started, stats.num_generated_tokens - first
    stages.span.cuts = cuts
    verified = 1 - (stats.num_plain_rounds - plain) / (stats.num_rounds - rounds)
    accepted_share = (stats.num_accepted_tokens - accepted) / count
    return took_s / count, accepted_share, verified, list(outputs[0].outputs[0].token_ids)


def measure(
    engine: Engine, layout: str, strategies: Sequence[str], task: str, *, repeats: int, num_tokens: int
) -> list[Measured]:
    """Raises AssertionError if a strategy's text differs from plain decoding's."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in strategies}
    for repeat in range(repeats):
        texts = {}
        for strategy in strategies:
            *numbers, texts[strategy] = run(engine, strategy, task, repeat, num_tokens)
            found[strategy].append(tuple(numbers))  # type: ignore[arg-type]
        assert all(text == texts["ar"] for text in texts.values()), f"{layout}, {task}: texts differ"
    return [
        Measured(
            layout=layout, task=task, strategy=name,
            token_ms=1000 * median(took_s for took_s, _, _ in runs),
            speed_ups=[plain[0] / own[0] for plain, own in zip(found["ar"], runs, strict=True)],
            accepted=median(accepted for _, accepted, _ in runs),
            verified=median(verified for _, _, verified in runs),
        )
        for name, runs in found.items()
    ]  # fmt: skip


def table(found: Sequence[Measured]) -> str:
    headings = ("layout", "task", "strategy", "ms a token", "speed-up", "in each repeat", "accepted", "verified")
    rows = [
        [
            one.layout, one.task, one.strategy, f"{one.token_ms:.2f}", f"{median(one.speed_ups):.3f}",
            " ".join(f"{each:.2f}" for each in sorted(one.speed_ups)), f"{one.accepted:.0%}", f"{one.verified:.0%}",
        ]
        for one in found
    ]  # fmt: skip
    return markdown_table(headings, rows, num_left=3)


@app.command()
def hybrid(
    *,
    layouts: Annotated[str, typer.Option(help=f"with commas, of {', '.join(LAYOUTS)}")] = "lfm2,qwen3_5_text",
    strategies: Annotated[str, typer.Option(help="with commas, in addition to ar")] = "auto,lookup",
    tasks: Annotated[str, typer.Option(help="with commas")] = "copying,random",
    max_tokens: Annotated[int, typer.Option(min=2, help="of a text")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="texts of each task, of other prompts")] = 5,
    json: Json = None,
) -> None:
    """Measure tokens for each CPU second of copied drafts, and require plain decoding's text."""
    with clean_exit():
        torch.set_num_threads(1)
        found: list[Measured] = []
        for layout, task in itertools.product(layouts.split(","), tasks.split(",")):
            with tempfile.TemporaryDirectory(prefix="rayspec-hybrid-") as folder:
                say(f"{layout}, {task}: {build(layout, task, folder) / 1e6:.0f} million weights")
                config = EngineConfig(
                    model=folder, dtype="float32", device="cpu", num_threads=1, max_num_seqs=1, max_model_len=1024
                )
                engine = load_engine(config, with_tokenizer=False)
            names = ["ar", *strategies.split(",")]
            found += measure(engine, layout, names, task, repeats=repeats, num_tokens=max_tokens)
            say("\n".join(f"{one.task} {one.strategy}: {median(one.speed_ups):.3f}" for one in found[-len(names) :]))
        output_console().print(table(found), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_json({"texts": [asdict(one) for one in found]}, json)


if __name__ == "__main__":
    app()
