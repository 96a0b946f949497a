"""Report on the recommended layout, its predicted performance, the certainty of the prediction, and flags to paste."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rayspec.ops.plan.forecast import EFFICIENCY, Performance, Ranking
from rayspec.ops.plan.gpus import DEFAULT_GPUS_PER_NODE
from rayspec.ops.plan.options import PUBLISHED_ACCEPTANCE, PlanOptions, choices_with
from rayspec.ops.plan.placement import Layout, two_digits

_GIB = 2**30
_NUM_SHOWN = 8
_LEAST, _MOST = 0.63, 0.80  # of the roofline that engines reach


def flags_of(layout: Layout, options: PlanOptions) -> dict[str, str | None]:
    """Return flags that make this layout: of commands that make an engine, of `rayspec.LLM` after the model, of
    `rayspec placement`, which shows the first copy, and of `rayspec k8s render`. The last are None for copies on
    different kinds of GPUs, which Ray could not distinguish. options: with a context."""
    dtype = None if options.dtype == "auto" else options.dtype
    engine: dict[str, Any] = {"max_model_len": options.num_tokens, "max_num_seqs": layout.concurrency}
    engine |= {"max_num_batched_tokens": options.max_num_batched_tokens, "dtype": dtype}
    copy: dict[str, Any] = {"gpus": layout.groups[0].options.gpus, "stages": layout.stages, "tensor": layout.tensor}
    copy |= {"context": options.num_tokens, "concurrency": layout.concurrency}
    copy |= {"quantization": options.quantization, "dtype": dtype}
    if (choices := choices_with(options.draft_weights)) is not None:
        copy["draft_weights"] = ",".join(options.draft_weights) or "none"
    copies = {"replicas": layout.replicas if layout.replicas > 1 else None}
    copies |= {"gpus_per_node": options.max_ranks if options.max_ranks != DEFAULT_GPUS_PER_NODE else None}

    python = {**engine, "speculation": choices and {"choices": choices}, "parallel": layout.parallel}

    def joined(values: dict[str, Any]) -> str:
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value)

    return {
        "engine": joined(engine | {"choices": choices and ",".join(choices)} | layout.parallel),
        "python": ", ".join(f"{name}={value!r}" for name, value in python.items() if value),
        "placement": joined(copy),
        "render": joined(copy | copies) if len(layout.groups) == 1 else None,
    }


def plan_table(plan: Ranking) -> Group:
    if not plan.fits:
        return Group(
            f"nothing fits: at least {plan.missing_bytes / _GIB:.1f} GiB are missing; use more or larger GPUs, "
            "quantization, drafts without copies (--draft-weights none), or plan for fewer or shorter sequences"
        )
    options, best = plan.options, plan.best
    headings = ["layout", "GPUs", "GiB\nleft", "tokens/s\nplain", "tokens/s\nwith drafts", "gain"]
    headings += ["first\ntoken s", "alone\nfirst s", "alone ms\na token", "idle"]
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings + (["$ a million\ntokens"] if options.price else []):
        table.add_column(heading, justify="right", no_wrap=True)
    for candidate in plan.candidates[:_NUM_SHOWN]:
        layout, plain, drafted, fastest = candidate.layout, candidate.plain, candidate.drafted, candidate.best
        table.add_row(
            layout.name,
            str(layout.num_gpus),
            f"{layout.bytes_left / _GIB:.1f}",
            two_digits(plain.tokens_per_s),
            two_digits(drafted.tokens_per_s) if drafted else "-",
            f"{drafted.tokens_per_s / plain.tokens_per_s:.2f}x" if drafted else "-",
            "-" if fastest.first_token_s is None else two_digits(fastest.first_token_s),
            two_digits(fastest.alone_first_token_s),
            two_digits(1000 * candidate.alone_token_s),
            f"{fastest.idle_share:.0%}",
            *([two_digits(fastest.dollars(layout.num_gpus, options.price))] if options.price else []),
        )
    is_published = options.acceptance == PUBLISHED_ACCEPTANCE
    given = (
        "as published for drafts like these (0.85 to 0.95): --acceptance sets another" if is_published else "as given"
    )
    certainty = (
        f"how sure: not very: speeds are {EFFICIENCY:.0%} of the roofline; engines reach {_LEAST:.0%} to {_MOST:.0%}, "
        f"so tokens/s may be {1 - _LEAST / EFFICIENCY:.0%} lower or {_MOST / EFFICIENCY - 1:.0%} higher; better with "
        "--profile, a file that `rayspec profile` saves on one such GPU"
    )
    if plan.measured_on is not None:
        certainty = (
            f"how sure: fairly, where a stage is one GPU: passes as measured on {plan.measured_on}; such predictions "
            "may be off by a fifth; tensor-parallel ranks are taken to share evenly"
        )
    drafts = f"drafts leave out {options.skip:.0%} of the layers; acceptance {options.acceptance:.2f}, {given}"
    assumed = (
        f"assumed, not measured: {options.hop_us:g} us for a hop between stages, {options.all_reduce_us:g} us and more "
        f"for an all-reduce; prompts are read {options.max_num_batched_tokens} tokens between two rounds"
    )
    legend = (
        "layout: stages x tensor-parallel ranks x replicas; first token: median under this load; alone: a request that "
        "has a replica to itself"
    )
    others = [f"{len(plan.others)} other layouts do not fit"] if plan.others else []
    if options.quantization:
        others.append(f"each stage is one GPU: tensor-parallel ranks cannot split {options.quantization} weights")
    flags = flags_of(best, options)
    pasted = {
        "jobs, rayspec serve": flags["engine"],
        "Python": f"LLM(MODEL, {flags['python']})",
        "rayspec placement": flags["placement"],
        "rayspec k8s render": flags["render"] or "not possible: the copies are on unlike GPUs",
    }
    return Group(
        f"recommended for {options.goal}: {best.title}; for {options.concurrency} sequences at once, of "
        f"{options.num_tokens} tokens with an answer of {options.output_tokens}",
        table,
        f"{drafts}. Lookup is not counted.",
        assumed,
        legend,
        certainty,
        *others,
        Text("to use the recommended layout:"),
        # Each on one unbroken line.
        *(Text(f"  {f'{name}:':21}{text}", no_wrap=True, overflow="ignore") for name, text in pasted.items()),
    )


def plan_json(plan: Ranking) -> dict[str, Any]:
    """Return options and candidates as JSON values, in seconds, bytes, and output tokens per second."""
    price = plan.options.price

    def numbers(found: Performance, layout: Layout) -> dict[str, Any]:
        return asdict(found) | {"dollars_per_million_tokens": found.dollars(layout.num_gpus, price) if price else None}

    candidates = []
    for one in plan.candidates[:_NUM_SHOWN]:
        layout, stages = one.layout, one.layout.groups[0].stages
        candidates.append(
            {
                **{name: getattr(layout, name) for name in ("stages", "tensor", "replicas", "num_gpus", "bytes_left")},
                "layers": [len(stage.layers) for stage in stages],
                "weight_bytes": [stage.weight_bytes for stage in stages],
                "kv_bytes": [stage.kv_bytes for stage in stages],
                "plain": numbers(one.plain, layout),
                "drafted": numbers(one.drafted, layout) if one.drafted else None,
            }
        )
    return {
        "options": plan.options.model_dump(mode="json"),
        "measured_on": plan.measured_on,
        "num_layouts_that_do_not_fit": len(plan.others),
        "missing_bytes": plan.missing_bytes,
        "flags": flags_of(plan.best, plan.options) if plan.fits else None,
        "candidates": candidates,
    }
