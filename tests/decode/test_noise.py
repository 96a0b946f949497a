"""The noise is Philox's, a pure function of its arguments, and has the distribution it claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import scipy.stats
import torch

from rayspec.decode import sampling
from rayspec.decode.sampling import Stream, gumbel, philox, uniform

EXTREME_SEEDS = [0, 1, -1, 2**31, 2**32, -(2**32), 2**63 - 1, -(2**63), 0x123456789ABCDEF]

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors only: more threads would just wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox([torch.tensor([word]) for word in counter], [torch.tensor([word]) for word in key])
    assert torch.cat(words).tolist() == answer


def test_seed_position_origin_and_stream_are_where_the_documentation_says() -> None:
    words = philox(
        [torch.tensor([word]) for word in (0, 7, 5, Stream.RECOVER)], [torch.tensor([word]) for word in (0x9, 0x1)]
    )
    uniforms = (torch.cat(words).double() + 0.5) * 2.0**-32
    expected = -(-uniforms.log()).log()
    assert torch.equal(gumbel([0x100000009], [7], 4, Stream.RECOVER, "cpu", origins=[5])[0], expected.float())


def test_a_row_does_not_depend_on_its_batch_or_its_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = list(range(len(EXTREME_SEEDS)))
    whole = gumbel(EXTREME_SEEDS, positions, 103, Stream.TARGET, "cpu")
    for row, (seed, position) in enumerate(zip(EXTREME_SEEDS, positions, strict=True)):
        assert torch.equal(gumbel([seed], [position], 50, Stream.TARGET, "cpu")[0], whole[row, :50])
    monkeypatch.setitem(sampling._CHUNK_BLOCKS, "cpu", 60)  # two rows at a time
    assert torch.equal(gumbel(EXTREME_SEEDS, positions, 103, Stream.TARGET, "cpu"), whole)
    streams = torch.tensor([position % 4 for position in positions])
    mixed = gumbel(torch.tensor(EXTREME_SEEDS), torch.tensor(positions), 103, streams, "cpu")
    assert torch.equal(mixed[::4], whole[::4])
    assert torch.equal(mixed[1::4], gumbel(EXTREME_SEEDS[1::4], positions[1::4], 103, Stream.DRAFT, "cpu"))


@pytest.mark.parametrize("vary", ["seed", "position", "origin"])
def test_distribution(vary: str) -> None:
    """Kolmogorov-Smirnov at odds of 1e-6, and correlation of neighbours within 5 standard deviations (6e-7)."""
    count = 100_000
    index, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    seeds, positions, origins = (index if vary == name else zero for name in ("seed", "position", "origin"))
    u = uniform(seeds, positions, Stream.ACCEPT, origins=origins)
    g = gumbel(seeds, positions, 6, Stream.TARGET, "cpu", origins=origins).double()
    assert u.dtype is torch.float64
    assert scipy.stats.kstest(u.numpy(), "uniform", method="asymp").pvalue > 1e-6
    for column in g.unbind(1):
        assert scipy.stats.kstest(column.numpy(), "gumbel_r", method="asymp").pvalue > 1e-6
    series = [u, *g.unbind(1)]
    pairs = [(a, b) for a, b in itertools.combinations(series, 2)] + [(a[1:], a[:-1]) for a in series]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 5 / math.sqrt(count)
