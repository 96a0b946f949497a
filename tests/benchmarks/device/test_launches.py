from __future__ import annotations

import torch

from benchmarks.device.launches import Launch, LaunchRecorder, first_difference


def recorded(work: object, *arguments: object) -> list[Launch]:
    with torch.no_grad(), LaunchRecorder() as recorder:
        work(*arguments)  # type: ignore[operator]
    return recorder.launches


def names(work: object, *arguments: object) -> list[str]:
    return [launch.name for launch in recorded(work, *arguments)]


def test_views_and_allocations_are_no_launches() -> None:
    numbers = torch.randn(4, 6)
    assert names(lambda: (numbers[1:], numbers.view(6, 4), numbers.T, numbers.chunk(2, -1), numbers.contiguous())) == []
    assert names(lambda: (torch.empty(3), torch.empty_like(numbers), numbers.new_empty(2))) == []


def test_streams_differ_by_shape_offset_number_and_place() -> None:
    first, second = torch.randn(4, 4), torch.randn(4, 4)

    def add(to: torch.Tensor, number: float) -> list[Launch]:
        return recorded(lambda: to + number)

    assert first_difference(add(first, 1.0), add(first, 1.0)) is None
    for other in (add(first, 2.0), add(first[1:], 1.0), add(first[:3], 1.0), add(first.T, 1.0), add(second, 1.0), []):
        assert first_difference(add(first, 1.0), other) is not None
