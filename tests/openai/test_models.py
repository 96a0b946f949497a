"""The list of models, as the official client reads it."""

from __future__ import annotations

import openai.types as official
import pytest

from rayspec.openai.encoding import plain_body
from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.models import ModelCard, ModelList, check_served


def test_the_list_is_read_by_the_official_client() -> None:
    cards = [ModelCard(id=name, created=5, max_model_len=512) for name in ("a", "b")]
    body = plain_body(ModelList.of(cards))
    assert body["object"] == "list"
    models = [official.Model.model_validate(one, strict=True) for one in body["data"]]
    assert [(one.id, one.created, one.owned_by) for one in models] == [("a", 5, "rayspec"), ("b", 5, "rayspec")]
    assert models[0].model_extra == {"max_model_len": 512}


def test_a_model_that_is_not_served_is_404() -> None:
    check_served("b", ["a", "b"])
    with pytest.raises(InvalidRequestError, match="'c' does not exist; served here: 'a'") as caught:
        check_served("c", ["a", "b"])
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
