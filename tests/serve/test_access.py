"""Who may use the endpoint: keys, and Host and Origin headers as browsers, other clients and attackers send them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from rayspec.serve.access import ANY, Admission, ApiKeys, allowed_host, allowed_origin
from rayspec.serve.replies import BUSY, Refused

KEYS = ApiKeys.of(["first-key", "second-key"])


@pytest.mark.parametrize("header", ["Bearer first-key", "Bearer second-key", "bearer second-key", "Bearer  first-key "])
def test_each_key_opens(header: str) -> None:
    assert KEYS.admit(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer ",
        "Bearer first-key2",
        "Basic first-key",
        "first-key",
        "Bearer \udce4",
    ],
)
def test_nothing_else_does(header: str | None) -> None:
    assert not KEYS.admit(header)


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("a.localhost:1", True),
        ("127.0.0.1:8000", True),
        ("[::1]", True),
        ("", False),
        ("app.example", False),
        ("127.0.0.1.app.example", False),
        ("[::1].app.example", False),
        ("[::1", False),
        ("::1", False),
        ("user@localhost", False),
        ("localhost:app.example", False),
        ("192.0.2.7", False),
    ],
)
def test_on_loopback_only_its_own_names_are_allowed(header: str | None, allowed: bool) -> None:
    assert allowed_host(header, ()) is allowed
    assert allowed_host(header, {ANY})


def test_more_names_may_be_allowed() -> None:
    names = {"app.example"}
    assert allowed_host("App.Example:443", names)
    assert allowed_host("localhost", names)
    assert not allowed_host("other.example", names)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:8000"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ({"host": "internal", "origin": "https://app.example", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:8000", "origin": "https://known.example"}, True),
        ({"host": "localhost:8000", "origin": "https://app.example"}, False),
        ({"host": "localhost:8000", "origin": "https://app.example", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
    ],
)
def test_pages_of_other_origins_may_not_make_models_work(headers: dict[str, str], allowed: bool) -> None:
    assert allowed_origin(headers, ("https://known.example",)) is allowed
    assert allowed_origin(headers, (ANY,))


def test_the_last_place_may_be_taken_by_a_large_request_and_then_there_is_none() -> None:
    admission = Admission(4, refusal=BUSY)
    with ExitStack() as under_way:
        for weight in (1, 2, 100):
            under_way.enter_context(admission.admit(weight))
        with pytest.raises(Refused) as refused, admission.admit():
            pass
        assert refused.value.error.status == 429
        assert admission.under_way == 103
    assert admission.under_way == 0


def test_a_failure_gives_the_place_back() -> None:
    admission = Admission(1)
    with pytest.raises(OSError, match="lost"), admission.admit():
        raise OSError("lost")
    with admission.admit():
        assert admission.under_way == 1
