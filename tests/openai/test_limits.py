"""What is too much for one request."""

from __future__ import annotations

from typing import Any

import pytest

from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.limits import Limits
from rayspec.openai.requests import ChatRequest, CompletionRequest

LIMITS = Limits(max_n=3, max_prompts=2, max_stop_strings=1)


@pytest.mark.parametrize(
    ("allowed", "refused", "param"),
    [
        ({"n": 3}, {"n": 4}, "n"),
        ({"stop": ["a"]}, {"stop": ["a", "b"]}, "stop"),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt"),
        ({"prompt": [5, 6, 7]}, {"prompt": [[5], [6], [7]]}, "prompt"),
    ],
)
def test_what_is_over_a_limit_is_refused_by_name(allowed: dict[str, Any], refused: dict[str, Any], param: str) -> None:
    text = {"model": "m", "prompt": "x"}
    LIMITS.check(CompletionRequest.parse(text | allowed))
    with pytest.raises(InvalidRequestError, match=rf"{param}: \d.*at most \d") as caught:
        LIMITS.check(CompletionRequest.parse(text | refused))
    assert (caught.value.param, caught.value.code, caught.value.status) == (param, "invalid_value", 400)


def test_a_conversation_is_one_prompt() -> None:
    messages = [{"role": "user", "content": "x"}] * 3
    Limits(max_prompts=1).check(ChatRequest.parse({"model": "m", "messages": messages}))


def test_the_defaults_are_those_of_openai_and_more() -> None:
    many = {"model": "m", "n": 128, "stop": ["a"] * 16, "prompt": ["x"] * 1024}
    Limits().check(CompletionRequest.parse(many))
