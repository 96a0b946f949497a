"""The page of predicted step times, docs/gpu_predictions.md: `python -m benchmarks.device.predictions`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device.counting import step_ledger
from benchmarks.device.ledger import Assumptions, StepLedger, host_seconds, replayed_seconds
from benchmarks.roofline import ACCELERATORS, SHAPES
from rayspec.bench.result import markdown_table

# Models by name, with the number of GPUs that share every matrix.
_MODELS = {"Llama-3.1-8B": 1, "Qwen3-14B": 1, "Llama-3.1-70B": 8}
_BATCHES = (1, 8, 64)
_CONTEXTS = (1024, 8192, 32768, 131072)
_MEMORY_BYTES = {"H100": 80e9, "H200": 141e9}

# Of a plain greedy step, by batch: the host's milliseconds as `benchmarks.host_time` measures them for 64 sublayers, a
# median on two busy cores of an AMD EPYC.
_HOST_MS = {1: 0.13, 8: 0.17, 64: 0.55, 256: 3.0}
_CONTEXT = 1024

_HEAD = """\
# Predicted step times on H100 and H200

**Nothing here is measured.** The numbers follow from a count and from assumptions.
[One H100](benchmarks/gpu-h100-2026-11.md) was measured: an 8B step at batch 1 took 6.6 ms where this page says 6.0.
`python -m benchmarks.device checks` measures on a GPU.

`python -m benchmarks.device.predictions` prints this page.

Counted: the kernels and the bytes of a plain decoding step, one token for each sequence, from token ids to logits. The
count runs the fused layers with rayspec's operators in static buffers, in bfloat16, on tensors without storage.
Attention counts as two kernels. Bytes are what each kernel reads and writes, and the keys and values of all earlier
tokens.

Assumed:

- Kernels reach {share:.0%} of the memory's peak bandwidth (H100 3.35 TB/s, H200 4.8 TB/s).
- A replayed graph needs {replayed:.1f} µs a kernel. These gaps are in the columns of the GPUs.
- A launch from Python takes {eager:.0f} µs. The host works ahead of the GPU: without graphs a step takes the longer of
  "host, ms" and the GPU's column. A Triton kernel takes longer to launch from Python than torch's own kernels do, so
  graphs may gain more than the table shows.
- Arithmetic hides behind reading: up to about 190 rows on an H100, 130 on an H200.
- Choosing the token, packing the rows and the rest of the engine cost nothing, but in the last table. The true step is
  longer.
- Llama-3.1-70B runs on 8 GPUs by tensor parallelism: each GPU has an eighth of every layer's matrices and key heads,
  and the whole head, which one GPU reads. Kernels, GB and memory are of that GPU. Two sums over all GPUs a layer take
  {reduce:.0f} µs each. Graphs there need `cuda_graphs: on`.
- Qwen3-14B reads contexts of more than 40,960 tokens only with a rescaled rotary embedding.

A dash: weights, keys and values need more than the memory (H100 80 GB, H200 141 GB).
"""
_WITH_HOST = """\
## With the host's time

Llama-3.1-8B on one H100 at {context:,} tokens of context. "Host" is the median of a greedy step of `ar` on two
busy cores of an AMD EPYC, without the driver's launches:
`python -m benchmarks.host_time --shapes 8B --strategies ar --batches 1,8,64,256`. The host prepares three of four
steps while the GPU runs the step before. So the truth lies between "overlapped", where the slower of both counts, and
"in turn", where both are added. At 256 rows arithmetic takes about as long as reading; the table leaves that out.

The GPU was slower when it was measured: 6.6 ms at batch 1 (151 tokens/s), and 11.3 ms at 64 (5,646 tokens/s),
where attention takes 4.6 ms and reading its keys and values would take 2.8.
"""


def predictions_page() -> str:
    """Return the page in Markdown."""
    assumed = Assumptions()
    head = _HEAD.format(
        share=assumed.share_of_peak,
        replayed=assumed.replayed_s * 1e6,
        eager=assumed.eager_s * 1e6,
        reduce=assumed.all_reduce_s * 1e6,
    )
    columns = [f"{name}, {unit}" for name in _MEMORY_BYTES for unit in ("ms", "tokens/s")]
    headings = ["model", "batch", "context", "kernels", "host, ms", "GB", *columns]
    tables = (
        markdown_table(headings, _rows(assumed), num_left=1),
        markdown_table(
            ["batch", "H100, ms", "host, ms", "overlapped, tokens/s", "in turn, tokens/s"],
            _rows_with_host(assumed),
            num_left=0,
        ),
    )
    return f"{head}\n{tables[0]}\n\n{_WITH_HOST.format(context=_CONTEXT)}\n{tables[1]}\n"


def _rows_with_host(assumed: Assumptions) -> Iterator[list[str]]:
    for batch, host_ms in _HOST_MS.items():
        ledger = step_ledger(SHAPES["Llama-3.1-8B"], batch)
        gpu_s, host_s = replayed_seconds(ledger, _CONTEXT, ACCELERATORS["H100"], assumed), host_ms / 1e3
        speeds = (f"{batch / seconds:,.0f}" for seconds in (max(gpu_s, host_s), gpu_s + host_s))
        yield [str(batch), f"{gpu_s * 1e3:.1f}", f"{host_ms:.2f}", *speeds]


def _rows(assumed: Assumptions) -> Iterator[list[str]]:
    for name, num_ranks in _MODELS.items():
        shown = f"{name}, {num_ranks} GPUs" if num_ranks > 1 else name
        for batch in _BATCHES:
            ledger = step_ledger(SHAPES[name], batch, num_ranks=num_ranks)
            for context in _CONTEXTS:
                yield [
                    shown,
                    str(batch),
                    f"{context // 1024}K",
                    f"{ledger.num_kernels:,}",
                    f"{host_seconds(ledger, assumed) * 1e3:.1f}",
                    f"{ledger.bytes_with(context) / 1e9:.1f}",
                    *(cell for gpu in _MEMORY_BYTES for cell in _cells(ledger, context, gpu, assumed)),
                ]


def _cells(ledger: StepLedger, context: int, gpu: str, assumed: Assumptions) -> list[str]:
    if not ledger.fits(context, _MEMORY_BYTES[gpu]):
        return ["-"] * 2
    seconds = replayed_seconds(ledger, context, ACCELERATORS[gpu], assumed)
    return [f"{seconds * 1e3:.1f}", f"{ledger.batch / seconds:,.0f}"]


if __name__ == "__main__":
    print(predictions_page(), end="")
