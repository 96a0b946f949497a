from typing import Any

import pytest
import torch

from rayspec.model.cuda.probe import Shapes, cases

SHAPES = Shapes(
    device="cpu", dtype="float32", hidden_size=64, inner_size=64, max_context=300, has_copies=True,
    attention=((4, 2, 16, 20, 2.0),),
)  # fmt: skip
CASES = {f"{at} {name}": (operator, arguments) for at, (name, operator, arguments) in enumerate(cases(SHAPES))}


@pytest.mark.parametrize("case", CASES)
def test_the_operators_keep_the_rules_of_torch(case: str) -> None:
    """Schema, mutation, and the shape and type that tracing sees."""
    operators: Any = torch.ops.rayspec
    operator, arguments = CASES[case]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(operators, operator).default, arguments, test_utils=tests)
