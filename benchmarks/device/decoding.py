"""How fast an engine decodes on a device: the shape of a large model, and the bundled model made wider."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.device.bandwidth import read_bytes_per_s
from benchmarks.device.models import bundled_model
from benchmarks.roofline import ModelShape
from benchmarks.shared import DeviceOptions, Measured, Table, measured
from rayspec import demo, local_engine
from rayspec.bench.workloads import fitting_tasks
from rayspec.choices import FULL, SKIP, Choice, weights_of
from rayspec.command.terminal import say
from rayspec.config import EngineConfig, OffloadOptions, SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.model.weights import load_tokenizer
from rayspec.strategies.fixed import FixedPlan, static_plan
from rayspec.types import Plan, Request, no_draft

# Contexts beyond the last prompt: what is generated while rounds are timed.
_BEYOND = 512
_NUM_REPEATS = 5
_NUM_PROFILED = 20  # steps
_ACCEPTANCE = (0.8, 0.9, 0.95)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_BEYOND, ignore_eos=True)
_SAMPLED = _GREEDY.replace(temperature=0.6, top_p=0.9, seed=0)  # as Llama 3 recommends
# The static strategy skips these middle sublayers of the bundled model's 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)


def time_shape(
    options: DeviceOptions, shape: ModelShape, cells: Sequence[tuple[int, int]], *, num_steps: int, generate: bool
) -> Measured:
    """Time plain decoding of a model of this shape with random weights, at each (batch, context), against transformers
    `generate` and against reading the weights and the keys and values once."""
    device, dtype = options.torch_device, options.torch_dtype
    found: dict[tuple[int, int], dict[str, Any]] = {cell: {} for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        config = _config(shape, dtype, folder)
        model = _random_model(config, dtype, device)
        if generate:
            for cell in cells:
                found[cell]["generate_ms"] = _generate_ms(model, shape, *cell, num_steps=num_steps)
                say(f"batch {cell[0]}, context {cell[1]}: {found[cell]['generate_ms']:.2f} ms a step by generate")
        num_bytes = sum(weight.nbytes for weight in model.parameters())
        num_bytes -= 0 if shape.tied else shape.head_parameters * dtype.itemsize
        bytes_per_s = read_bytes_per_s(device)
        longest, most = max(context for _, context in cells) + _BEYOND, max(batch for batch, _ in cells)
        num_slots = max(batch * (context + _BEYOND) for batch, context in cells)
        with _weights(model):
            del model
            engine = local_engine.load_engine(
                EngineConfig(
                    model=folder, device=str(device), dtype=options.dtype, num_threads=options.num_threads,
                    max_model_len=longest, max_num_seqs=most, kv_cache_tokens=num_slots,
                    speculation=SpeculationOptions(strategy="ar"),
                ),
                with_tokenizer=False,
            )  # fmt: skip
        for batch, context in cells:
            read = num_bytes + batch * context * shape.num_layers * shape.kv_bytes_per_token
            prompts = _prompts(shape, batch, context)
            times, busy_ms, kernels = _step_ms(engine, prompts, num_steps)
            sampled, _, of_sampled = _step_ms(engine, prompts, num_steps, _SAMPLED)
            found[batch, context] |= {
                "step_ms": median(times), "fastest_ms": min(times), "slowest_ms": max(times),
                "sampled_ms": median(sampled), "kernels_sampled": of_sampled,
                "floor_ms": read / bytes_per_s * 1e3, "busy_ms": busy_ms, "kernels": kernels,
            }  # fmt: skip
            say(
                f"batch {batch}, context {context}: {median(times):.2f} ms a step, floor {read / bytes_per_s * 1e3:.2f}"
            )
    shares = [cell["floor_ms"] / cell["step_ms"] for cell in found.values()]
    return measured(
        f"plain decoding reaches {min(shares):.0%} to {max(shares):.0%} of the memory's bandwidth",
        numbers={
            "shape": shape.name, "read_bytes_per_s": bytes_per_s,
            "cells": [{"batch": batch, "context": context} | cell for (batch, context), cell in found.items()],
        },
        tables=[_shape_table(found)],
        counted=f"{shape.name} with random weights, {options.torch_dtype}; the device reads "
        f"{bytes_per_s / 1e9:.0f} GB/s. A step is one token of each sequence: the median of {_NUM_REPEATS} runs of "
        f"{num_steps} steps, prefill left out; in brackets the fastest and the slowest run. Sampled: at temperature "
        f"{_SAMPLED.temperature} with top_p {_SAMPLED.top_p}. The floor reads weights, keys and values once. Busy: the "
        "time of a step in which a GPU runs kernels.",
    )  # fmt: skip


def time_rounds(options: DeviceOptions, shape: ModelShape, *, context: int, num_rounds: int) -> Measured:
    """Time drafted rounds of a model of this shape with random weights, one sequence: what a draft step takes beyond
    its sublayers, what a change of the plan takes, the latency model against these rounds, and `deterministic`."""
    device, dtype = options.torch_device, options.torch_dtype
    with tempfile.TemporaryDirectory() as folder:
        model = _random_model(_config(shape, dtype, folder), dtype, device)
        config = EngineConfig(
            model=folder, device=str(device), dtype=options.dtype, num_threads=options.num_threads,
            max_model_len=context + _BEYOND, max_num_seqs=1, kv_cache_tokens=context + _BEYOND, remeasure=True,
            speculation=SpeculationOptions(strategy="knapspec", choices=("skip", "int4"), max_draft_tokens=8),
        )  # fmt: skip
        with _weights(model):
            del model
            engine = local_engine.load_engine(config, with_tokenizer=False)
        plain = SpeculationOptions(strategy="ar")
        fixed = local_engine.engine_like(engine, config.replace(speculation=plain, deterministic=True))
    latency, num_sublayers = engine.latency, engine.stages.num_sublayers
    assert latency is not None, "the strategy needs one"
    assert fixed is not None, "it shares the weights"
    prompts = _prompts(shape, 1, context)

    def skipping(first: int) -> Plan:
        return static_plan([at for at in range(num_sublayers) if at // 2 % 2 == first], num_sublayers, 4)

    plans = {
        "none": no_draft(num_sublayers, "plain"),
        "one layer skipped": static_plan([num_sublayers - 2, num_sublayers - 1], num_sublayers, 4),
        "even layers skipped": skipping(0),
        "odd layers skipped": skipping(1),
        "int4": static_plan([], num_sublayers, 4, choice="int4", ways=[latency.choices_of(0)] * num_sublayers),
    }
    found: dict[str, dict[str, float]] = {}
    for name, plan in plans.items():
        turns = _run_rounds(engine, prompts, [plan], num_rounds)
        steps = plan.num_draft_tokens
        reached = {"context": context + 4 * num_rounds, "batch": 1}
        found[name] = {
            "round_ms": turns.round_ms, "draft_step_ms": turns.draft_step_ms,
            "predicted_round_ms": 1e3 * (
                latency.verify_s(rows=steps + 1, **reached) + latency.round_s
                + (steps * latency.draft_step_s(plan.choices, **reached) if steps else 0.0)
            ),
        }  # fmt: skip
        say(f"plan {name}: {found[name]}")
    turns = _run_rounds(engine, prompts, [skipping(0), skipping(1)], num_rounds)
    most, half, other = (found[f"{name} skipped"] for name in ("one layer", "even layers", "odd layers"))
    switch_ms = turns.round_ms - (half["round_ms"] + other["round_ms"]) / 2
    num_layers = num_sublayers // 2
    layer_ms = (most["draft_step_ms"] - half["draft_step_ms"]) / (num_layers - 1 - num_layers // 2)
    plain_ms, exact_ms = (median(_step_ms(each, prompts, num_rounds)[0]) for each in (engine, fixed))
    beyond_ms = most["draft_step_ms"] + layer_ms - plain_ms
    numbers = {
        "shape": shape.name, "context": context, "rounds": found, "switch_ms": switch_ms, "layer_ms": layer_ms,
        "plain_ms": plain_ms, "beyond_ms": beyond_ms, "deterministic_ms": exact_ms,
    }  # fmt: skip
    engine.shutdown()
    fixed.shutdown()
    return measured(
        f"a draft step takes {beyond_ms / plain_ms:+.1%} of a plain step beyond its sublayers; a change of the plan "
        f"takes {switch_ms:.3f} ms; `deterministic` takes {exact_ms / plain_ms - 1:+.1%}",
        numbers=numbers,
        tables=[
            Table(
                headings=["draft", "round, ms", "predicted", "draft step, ms"],
                rows=[
                    [
                        name, f"{each['round_ms']:.2f}",
                        f"{each['predicted_round_ms']:.2f} ({each['predicted_round_ms'] / each['round_ms'] - 1:+.1%})",
                        f"{each['draft_step_ms']:.2f}" if plans[name].num_draft_tokens else "-",
                    ]
                    for name, each in found.items()
                ],
            )
        ],
        counted=f"{shape.name} with random weights, {options.torch_dtype}, one sequence of {context:,} tokens, drafts "
        f"of 4 tokens. The median of {num_rounds} rounds; predicted by the latency model that the engine measures when "
        f"it loads. A plain step takes {plain_ms:.2f} ms.",
    )  # fmt: skip


def time_choices(options: DeviceOptions, shape: ModelShape, *, num_layers: int, context: int) -> Measured:
    """Measure what a sublayer costs by each choice in a model of this shape, of which the device holds `num_layers`
    layers. Predict the speed-up of drafts that run all sublayers by one choice, at some acceptance rates."""
    device, dtype = options.torch_device, options.torch_dtype
    with tempfile.TemporaryDirectory() as folder:
        config = _config(replace(shape, num_layers=num_layers), dtype, folder)
        with _weights(_random_model(config, dtype, device)):
            engine = local_engine.load_engine(
                EngineConfig(
                    model=folder, device=str(device), dtype=options.dtype, num_threads=options.num_threads,
                    max_model_len=context + _BEYOND, max_num_seqs=1, kv_cache_tokens=context + _BEYOND, remeasure=True,
                    speculation=SpeculationOptions(strategy="knapspec", choices=("skip", "int8", "int4", "window")),
                ),
                with_tokenizer=False,
            )  # fmt: skip
    latency = engine.latency
    assert latency is not None, "the strategy needs one"

    def layer_s(choice: Choice, rows: int) -> float:
        """Return the seconds of a layer; an MLP has no keys to choose."""
        kinds = [choice, weights_of(choice)]
        return sum(
            latency.sublayer_s(at, rows=rows, context=context, batch=1, choice=kind) for at, kind in enumerate(kinds)
        )

    def forward_s(choice: Choice, rows: int) -> float:
        return shape.num_layers * layer_s(choice, rows) + latency.head_s(rows) + latency.overhead_s

    step_s = forward_s(FULL, 1)
    verify = {length: forward_s(FULL, length + 1) for length in range(1, 17)}
    costs: dict[Choice, float] = {
        choice: forward_s(choice, 1) / step_s for choice in latency.choices_of(0) if choice != SKIP
    }
    gains = {
        choice: {
            rate: max(
                sum(rate**at for at in range(length + 1)) * step_s / (length * cost * step_s + verify_s)
                for length, verify_s in verify.items()
            )
            for rate in _ACCEPTANCE
        }
        for choice, cost in costs.items()
        if choice != FULL
    }
    engine.shutdown()
    return measured(
        f"a step takes {step_s * 1e3:.2f} ms; the cheapest drafts take {min(costs.values()):.2f} of it",
        numbers={
            "shape": shape.name, "num_layers": num_layers, "context": context, "step_s": step_s, "costs": costs,
            "gains": gains, "verify_costs": {length: each / step_s for length, each in verify.items()},
            "layer_s": {choice: layer_s(choice, 1) for choice in costs},
        },
        tables=[
            Table(
                headings=["choice", "ms a layer", "of a step", *(f"at {rate:.0%} accepted" for rate in _ACCEPTANCE)],
                rows=[
                    [choice, f"{layer_s(choice, 1) * 1e3:.3f}", f"{cost:.2f}"]
                    + [f"{gains[choice][rate]:.2f}x" if choice in gains else "-" for rate in _ACCEPTANCE]
                    for choice, cost in costs.items()
                ],
            )
        ],
        counted=f"{shape.name}, measured on {num_layers} of its {shape.num_layers} layers with random weights, "
        f"{options.torch_dtype}, one sequence of {context:,} tokens. Speed-ups are predicted: every sublayer of a "
        "draft runs by the choice, each drafted token is accepted with this probability, and the draft has the best "
        "length up to 16 tokens.",
    )  # fmt: skip


def time_wide(
    options: DeviceOptions,
    widen: int,
    strategies: Sequence[str],
    *,
    context: int,
    num_prompts: int,
    max_tokens: int,
    offload: float,
) -> Measured:
    """Compare strategies on the bundled model, made `widen` times as wide, one sequence at a time. The texts of each
    are compared with those of plain decoding. offload: share of the sublayers' bytes in CPU memory; 0: none."""
    device, dtype = options.torch_device, options.torch_dtype
    tokenizer = load_tokenizer(EngineConfig(model=demo.model_path()))
    prompts = {
        domain: [
            list(tokenizer(task.prompt).input_ids)
            for task in fitting_tasks(
                domain, lambda task: len(tokenizer(task.prompt).input_ids), context=context, num_tasks=num_prompts
            )
        ]
        for domain in demo.DOMAINS
    }
    rates: dict[str, dict[str, float]] = {}
    texts: dict[str, dict[str, list[Any]]] = {}
    accepted: dict[str, str] = {}
    for name in dict.fromkeys(["ar", *strategies]):
        model = bundled_model(dtype, device, factor=widen)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        chosen: dict[str, dict[str, Any]] = {
            "static": {"skip": _SKIPPED},
            "int4": {"strategy": "static", "static_choice": "int4", "gate": False},
        }
        with _weights(model.cpu() if offload else model):
            del model
            engine = local_engine.load_engine(
                EngineConfig(
                    model=demo.model_path(), device=str(device), dtype=options.dtype, num_threads=options.num_threads,
                    max_num_seqs=2, max_model_len=context + max_tokens, kv_cache_tokens=2 * (context + max_tokens) + 64,
                    speculation=SpeculationOptions(**({"strategy": name} | chosen.get(name, {}))),
                    offload=OffloadOptions(share=offload) if offload else None,
                ),
                with_tokenizer=False,
            )  # fmt: skip
        _complete(engine, prompts["summary"][:1], max_tokens)
        rates[name], texts[name] = {}, {}
        for domain, some in prompts.items():
            texts[name][domain], rates[name][domain] = _complete(engine, some, max_tokens)
            say(f"{name}, {domain}: {rates[name][domain]:.1f} tokens/s")
        share = engine.stats.acceptance_rate
        accepted[name] = "-" if share is None else f"{share:.0%}"
        engine.shutdown()
        del engine
        gc.collect()
    total = sum(map(len, prompts.values()))
    same = {
        name: sum(a == b for domain, own in each.items() for a, b in zip(own, texts["ar"][domain], strict=True))
        for name, each in texts.items()
    }
    rows = [
        [
            name,
            *(f"{rate:.0f} ({rate / rates['ar'][domain]:.2f}x)" for domain, rate in own.items()),
            accepted[name],
            f"{same[name]} of {total}",
        ]
        for name, own in rates.items()
    ]
    return measured(
        f"{num_parameters / 1e9:.2f} billion parameters: " + ", ".join(
            f"{name} {median(rates[name][domain] / rates['ar'][domain] for domain in prompts):.2f}x" for name in rates
        ),
        numbers={"num_parameters": num_parameters, "tokens_per_s": rates, "same_texts": same, "accepted": accepted},
        tables=[Table(headings=["strategy", *prompts, "accepted", "same texts"], rows=rows)],
        counted=f"Output tokens a second, prefill left out, one sequence at a time, prompts of up to {context} tokens, "
        f"{options.torch_dtype}"
        + (f"; {offload:.0%} of the sublayers' bytes are in CPU memory." if offload else "."),
    )  # fmt: skip


def _config(shape: ModelShape, dtype: torch.dtype, folder: str) -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=shape.hidden_size, intermediate_size=shape.mlp_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, tie_word_embeddings=shape.tied, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"], dtype=str(dtype).removeprefix("torch."), eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)
    return config


def _random_model(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


@contextmanager
def _weights(model: PreTrainedModel) -> Iterator[None]:
    """Let an engine that is loaded take this model, which has no checkpoint."""
    models = [model]
    with patch.object(local_engine, "load_weights", lambda config: models.pop()):
        yield


def _prompts(shape: ModelShape, batch: int, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    ids: list[list[int]] = torch.randint(3, shape.vocab_size, (batch, context), generator=generator).tolist()
    return ids


@torch.inference_mode()
def _generate_ms(model: Any, shape: ModelShape, batch: int, context: int, *, num_steps: int) -> float:
    ids = torch.tensor(_prompts(shape, batch, context), device=model.device)
    took: dict[int, list[float]] = {2: [], 2 + num_steps: []}
    for count in [*took, *took]:
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
        ).tolist()
        took[count].append(time.perf_counter() - started)
    return (min(took[2 + num_steps]) - min(took[2])) / num_steps * 1e3


class _Turns(FixedPlan):
    """Takes plans in turn, and notes the seconds of their rounds and of their draft steps."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__(plans[0])
        self.plans, self.num_chosen, self.taken = plans, 0, list[tuple[float, float]]()

    def choose(self, state: BatchState) -> RoundPlan:
        self.num_chosen += 1
        return RoundPlan(plan=self.plans[self.num_chosen % len(self.plans)])

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self.taken.append((seconds, result.draft_s / max(result.num_draft_steps, 1)))

    @property
    def round_ms(self) -> float:
        """Half of it is of the plans with an even place, if there are several."""
        turns = [self.taken[at :: len(self.plans)] for at in range(len(self.plans))]
        return sum(median(seconds for seconds, _ in each) for each in turns) / len(turns) * 1e3

    @property
    def draft_step_ms(self) -> float:
        return median(seconds for _, seconds in self.taken) * 1e3


def _run_rounds(engine: Engine, prompts: Sequence[list[int]], plans: Sequence[Plan], num_rounds: int) -> _Turns:
    """Run rounds by these plans in turn, after some that capture graphs."""
    turns = _Turns(plans)
    before = engine.replace_strategy(turns)
    with _decoding(engine, prompts, _GREEDY):
        while turns.num_chosen < 12 * len(plans):
            engine.step()
        turns.taken.clear()
        while len(turns.taken) < num_rounds:
            engine.step()
    engine.replace_strategy(before)
    return turns


@contextmanager
def _decoding(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[None]:
    """Let all prompts decode at once; end them afterwards."""
    for at, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(at), params=params, prompt_token_ids=prompt))
    before = engine.stats.num_generated_tokens
    while engine.stats.num_generated_tokens < before + 12 * len(prompts):
        engine.step()
    yield
    engine.abort_all()
    while engine.has_unfinished:
        engine.step()


def _step_ms(
    engine: Engine, prompts: Sequence[list[int]], num_steps: int, params: SamplingParams = _GREEDY
) -> tuple[list[float], float | None, dict[str, float]]:
    """Return the milliseconds of a plain step in each run, when all sequences decode; and of one in which a GPU is
    busy, with the longest kernels."""
    previous = engine.replace_strategy(FixedPlan(no_draft(engine.stages.num_sublayers, "plain")))

    def step_ms(num_steps: int) -> float:
        first, started = engine.stats.num_generated_tokens, time.perf_counter()
        while (made := engine.stats.num_generated_tokens - first) < num_steps * len(prompts):
            engine.step()
        return (time.perf_counter() - started) / made * len(prompts) * 1e3

    busy_ms, kernels = None, dict[str, float]()
    with _decoding(engine, prompts, params):
        times = [step_ms(num_steps) for _ in range(_NUM_REPEATS)]
        if engine.config.device.startswith("cuda"):
            first = engine.stats.num_generated_tokens
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                step_ms(_NUM_PROFILED)
                torch.cuda.synchronize()
            steps = (engine.stats.num_generated_tokens - first) / len(prompts)
            busy_ms, kernels = _busy(seen, steps)
    engine.replace_strategy(previous)
    return times, busy_ms, kernels


def _busy(seen: profile, num_steps: float) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a step in which the GPU runs a kernel, and those of the kernels that take longest."""
    events: Any = seen.events()  # type: ignore[no-untyped-call]
    ran = [one for one in events or () if one.device_type == DeviceType.CUDA]
    by_name: Counter[str] = Counter()
    busy_us = end = 0.0
    for one in sorted(ran, key=lambda one: one.time_range.start):
        by_name[one.name[:60]] += one.time_range.elapsed_us()
        busy_us += max(0.0, one.time_range.end - max(end, one.time_range.start))
        end = max(end, one.time_range.end)
    return busy_us / num_steps / 1e3, {name: each / num_steps / 1e3 for name, each in by_name.most_common(8)}


def _complete(engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[Sequence[int]], float]:
    """Return the texts and the output tokens a second without prefill."""
    texts: list[Sequence[int]] = []
    engine.forget_texts()
    started, prefill_s = time.perf_counter(), engine.stats.prefill_s
    for at, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.add(Request(request_id=str(at), params=params, prompt_token_ids=prompt))
        while engine.has_unfinished:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                texts.append(output.outputs[0].token_ids)
    took = time.perf_counter() - started - (engine.stats.prefill_s - prefill_s)
    return texts, sum(map(len, texts)) / took


def _shape_table(found: Mapping[tuple[int, int], Mapping[str, float]]) -> Table:
    rows = []
    for (batch, context), cell in found.items():
        step, floor, generate = cell["step_ms"], cell["floor_ms"], cell.get("generate_ms")
        rows.append(
            [
                str(batch), f"{context:,}", f"{step:.2f} ({cell['fastest_ms']:.2f} to {cell['slowest_ms']:.2f})",
                f"{batch / step * 1e3:,.0f}", f"{cell['sampled_ms']:.2f}",
                "-" if (busy := cell["busy_ms"]) is None else f"{busy:.2f}",
                f"{floor:.2f}", f"{floor / step:.0%}",
                "-" if generate is None else f"{generate:.2f}", "-" if generate is None else f"{generate / step:.2f}x",
            ]
        )  # fmt: skip
    return Table(
        headings=[
            "batch",
            "context",
            "step, ms",
            "tokens/s",
            "sampled, ms",
            "busy, ms",
            "floor, ms",
            "of bandwidth",
            "generate, ms",
            "speed-up",
        ],
        rows=rows,
    )
