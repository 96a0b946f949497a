"""Check how often the host reads from the device in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from benchmarks.device.models import BUNDLED, PassShape, Prepared, prepare_model
from benchmarks.shared import DeviceOptions, Outcome, Table, judged
from rayspec.choices import choices_of
from rayspec.decode.stages import LocalStages
from rayspec.decode.work import Chunk, DecodingParams, Prefill, PrefillResult, Round, RoundEntry, SamplerSpec, Work
from rayspec.types import Plan, no_draft

# Reads allowed in a plain round. A drafting round may have as many for its verify, and more for each draft step.
MAX_READS_PLAIN = 1
MAX_READS_A_DRAFT_STEP = 1
_NUM_DRAFT_TOKENS = 4
_PROMPTS = PassShape(name="prompts", contexts=(0, 0), num_rows=(40, 33))
_READS = frozenset(
    {
        "__bool__",
        "__float__",
        "__index__",
        "__int__",
        "cpu",
        "equal",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "tolist",
    }
)


class ReadCounter(TorchFunctionMode):
    """Counts calls that copy numbers from a tensor to the host, which waits for the device.

    device: only tensors on this device count. On a CPU these include the host's own tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._reads(name, args, kwargs or {}):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def _reads(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        mine = [each for each in args if isinstance(each, Tensor) and each.device.type == self._device.type]
        if name in _READS:
            return bool(mine)
        if name == "__getitem__":
            return bool(mine) and any(_is_mask(each) for each in tree_leaves(args[1:]))
        is_copy = name == "to" and "cpu" in map(str, (*args[1:], *kwargs.values()))
        return is_copy and bool(mine) and self._device.type != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReads:
    """Reads of one round, by call. num_draft_steps: of the round. allowed: maximum number of reads."""

    name: str
    num_draft_steps: int
    reads: dict[str, int]
    allowed: int

    @property
    def num_reads(self) -> int:
        return sum(self.reads.values())

    @property
    def is_good(self) -> bool:
        return self.num_reads <= self.allowed


def check_host_reads(options: DeviceOptions) -> Outcome:
    device = options.torch_device
    found = reads_of_rounds(prepare_model(BUNDLED, "operators", torch.float32, device, is_static=True))
    return judged(
        is_good=all(one.is_good for one in found),
        found="; ".join(f"{one.name}: {one.num_reads} reads (at most {one.allowed})" for one in found),
        numbers=[asdict(one) | {"num_reads": one.num_reads} for one in found],
        tables=[_table(found)],
        counted=_counted(device),
    )


def reads_of_rounds(prepared: Prepared) -> list[RoundReads]:
    """Count the reads of greedy rounds of two sequences: a plain round, and drafting with half of the sublayers."""
    num_sublayers = len(prepared.parts.sublayers)
    half = Plan(
        choices=choices_of([index % 4 < 2 for index in range(num_sublayers)]),
        num_draft_tokens=_NUM_DRAFT_TOKENS,
        source="selfcheck",
    )
    return [_reads_of_round(prepared, plan) for plan in (no_draft(num_sublayers, "selfcheck"), half)]


def _reads_of_round(prepared: Prepared, plan: Plan) -> RoundReads:
    stages = LocalStages(prepared.runner, vocab_size=prepared.vocab_size, verification="coupled", num_tap_tokens=0)
    entries = _prefilled(stages, _PROMPTS, prepared.vocab_size, plan.num_draft_tokens)
    with ReadCounter(prepared.runner.device) as counter:
        result: Any = _done(stages, Round(id=1, entries=entries, plan=plan))
    steps = int(result.num_draft_steps)
    return RoundReads(
        name=f"drafting round of {steps} steps" if plan.drafts else "plain round",
        num_draft_steps=steps,
        reads=dict(counter.counts),
        allowed=MAX_READS_PLAIN + MAX_READS_A_DRAFT_STEP * steps,
    )


def _prefilled(stages: LocalStages, prompts: PassShape, vocab_size: int, num_draft_tokens: int) -> list[RoundEntry]:
    """Prefill the sequences and return them with their first token, which is not in the KV cache yet."""
    chunks, end = [], 0
    token_ids = prompts.token_ids(vocab_size)
    for index, span in enumerate(prompts.spans()):
        own, end = token_ids[end : end + span.num_rows], end + span.num_rows
        stages.open(
            SamplerSpec(
                sequence_id=str(index),
                params=DecodingParams(temperature=0.0),
                seed=0,
                prompt_token_ids=own,
                output_token_ids=(),
                eos_token_ids=(),
            )
        )
        chunks.append(Chunk(str(index), span, own, sample=True))
    result: PrefillResult = _done(stages, Prefill(id=0, chunks=chunks))
    return [
        RoundEntry(
            sequence_id=chunk.sequence_id,
            runs=chunk.rows.runs,
            length=chunk.rows.num_rows + 1,
            last_token=committed.token_ids[0],
            max_draft_tokens=num_draft_tokens,
        )
        for chunk, committed in zip(chunks, result.committed, strict=True)
        if committed is not None
    ]


def _done(stages: LocalStages, work: Work) -> Any:
    return stages.start(work).result()


def _is_mask(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _counted(device: torch.device) -> str:
    calls = (
        "Calls that bring numbers of a tensor to the host (item, tolist, bool, int, cpu, nonzero, boolean masks ...)"
    )
    if device.type == "cpu":
        return f"{calls}. On a CPU all tensors count, those of the host too: on a GPU there are as many or fewer."
    return f"{calls}, of tensors on the GPU."


def _table(found: Sequence[RoundReads]) -> Table:
    return Table(
        headings=["round", "reads", "allowed", "calls"],
        rows=[
            [
                one.name,
                str(one.num_reads),
                str(one.allowed),
                ", ".join(f"{count} {name}" for name, count in sorted(one.reads.items())),
            ]
            for one in found
        ],
    )
