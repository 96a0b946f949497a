"""Time of a memory-bound model's step, compared with reading its weights, with a verify and with a draft."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.device.bandwidth import read_bytes_per_s
from benchmarks.device.models import Prepared, bundled_model, prepare
from benchmarks.shared import DeviceOptions, Outcome, Table, fastest_seconds, measured
from rayspec.choices import Choice, choices_of
from rayspec.model.architecture import decompose
from rayspec.model.cuda.operations import has_operators
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import bytes_per_slot, whole_pages
from rayspec.model.rows import RowSpan, one_run, padded_rows
from rayspec.model.sublayers import Decomposition

_WIDER, _WIDER_QUICK = 8, 4
_CONTEXT = 512
_BUDGET_S = 20.0
_VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_NUM_SLOTS = whole_pages(_CONTEXT + max(_VERIFY_ROWS))


def check_step_times(options: DeviceOptions) -> Outcome:
    device = options.torch_device
    factor = _WIDER_QUICK if options.is_quick else _WIDER
    parts, num_weight_bytes = _wide_parts(options, factor)
    prepared = prepare(
        parts,
        num_slots=_NUM_SLOTS,
        is_static=has_operators(device),
        max_rows=padded_rows(max(_VERIFY_ROWS)),
        max_sequences=1,
        max_places=_NUM_SLOTS,
    )
    counts = (1, 2, 9) if options.is_quick else _VERIFY_ROWS
    half = choices_of([index % 4 < 2 for index in range(len(parts.sublayers))])
    works = [partial(_step, prepared, count, None) for count in counts] + [partial(_step, prepared, 1, half)]
    *seconds, draft_s = fastest_seconds(works, device, num_repeats=3 if options.is_quick else 10, budget_s=_BUDGET_S)
    by_rows = dict(zip(counts, seconds, strict=True))
    num_bytes = num_weight_bytes + _CONTEXT * bytes_per_slot(list(parts.shapes.values()), parts.dtype)
    floor_s, step_s = num_bytes / read_bytes_per_s(device), by_rows[1]
    return measured(
        f"a step takes {step_s * 1e3:.1f} ms; reading its {num_bytes / 1e6:.0f} MB takes {floor_s * 1e3:.1f} ms, "
        f"{floor_s / step_s:.0%} of that; {max(counts)} rows cost {by_rows[max(counts)] / step_s:.2f} steps, half of "
        f"the sublayers {draft_s / step_s:.2f}",
        numbers={
            "num_bytes": num_bytes,
            "floor_s": floor_s,
            "step_s": step_s,
            "share_of_roofline": floor_s / step_s,
            "verify_cost_by_rows": {count: each / step_s for count, each in by_rows.items()},
            "draft_cost_of_half": draft_s / step_s,
        },
        tables=[_table(by_rows, draft_s)],
        counted=f"The bundled model, {factor} times as wide, in {options.torch_dtype}, one sequence of {_CONTEXT} "
        "tokens, from token ids to the most likely token: the fastest of several runs.",
    )


@torch.inference_mode()
def _step(prepared: Prepared, num_rows: int, choices: Sequence[Choice] | None) -> list[int]:
    runner = prepared.runner
    batch = runner.batch([RowSpan(one_run(0, _NUM_SLOTS), _CONTEXT, num_rows)], token_ids=[3] * num_rows)
    tokens: list[int] = runner.head(runner.run(batch, runner.embed(batch), choices=choices)).argmax(-1).tolist()
    return tokens


def _wide_parts(options: DeviceOptions, factor: int) -> tuple[Decomposition, int]:
    """Return the widened model as the engine runs it on this device, and the bytes of weights that a step reads."""
    model = bundled_model(options.torch_dtype, options.torch_device, factor=factor)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    is_tied = embedding.weight is head.weight
    return fuse(decompose(model)), num_bytes - (0 if is_tied else int(embedding.weight.nbytes))


def _table(by_rows: dict[int, float], draft_s: float) -> Table:
    step_s = by_rows[1]
    cells = [("1 row" if count == 1 else f"{count} rows", seconds) for count, seconds in by_rows.items()]
    rows = [*cells, ("1 row, half of the sublayers", draft_s)]
    return Table(
        headings=["pass", "ms", "steps"],
        rows=[[name, f"{seconds * 1e3:.1f}", f"{seconds / step_s:.2f}"] for name, seconds in rows],
    )
