"""Stores the linear layers of an undivided model in the memory layout that is fastest on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rayspec.model.architecture import largest_difference, rounding_tolerance
from rayspec.model.matrices import Matrix, empty_linears, has_blocked_layout, is_plain, random_rows

_OF_ANY_LAYOUT = (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__)  # type: ignore[attr-defined]


class _Reads(TorchFunctionMode):
    """Counts the operators that read each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[int]()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in _OF_ANY_LAYOUT:
            self.of.update(id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def block_linears(model: PreTrainedModel, trial: Callable[[], object]) -> None:
    """Let the model's plain linear layers multiply in oneDNN's layout, if they then compute the same, and free their
    weights. A layer whose weights anything else reads stays; but a tied head is copied. trial: runs passes as decoding
    does."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = [each for each in model.modules() if is_plain(each) and has_blocked_layout(each.weight)]
    calls = Counter[int]()
    with _Reads() as reads, ExitStack() as hooks:
        for each in linears:
            hooks.enter_context(each.register_forward_hook(lambda module, *_: calls.update([id(module.weight)])))
        trial()
    for each in linears:
        name = id(each.weight)
        is_own = reads.of[name] == calls[name] > 0
        if is_own or each is head:
            matrix = Matrix([each], blocked=True)
            rows = random_rows(each)
            if largest_difference(matrix(rows), each(rows)) <= rounding_tolerance(rows.dtype):
                each.forward = matrix.forward  # type: ignore[method-assign, assignment]
                if is_own:
                    empty_linears([each])
