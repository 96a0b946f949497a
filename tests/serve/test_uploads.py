"""Forms in any pieces: the same parts, or the same error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.openai.protocol import InvalidRequestError
from rayspec.serve.access import Refused
from rayspec.serve.bodies import read_form

TYPE = 'multipart/form-data; boundary="b-o"'
Parts = list[tuple[str, str | None, bytes]]


def form(*parts: tuple[str, bytes]) -> bytes:
    """Each with what its disposition says beside `form-data`."""
    heads = [b"--b-o\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + body for head, body in parts]
    return b"\r\n".join([*heads, b"--b-o--\r\n"])


def read(body: bytes, num_bytes: int = 1 << 20, read_parts: bool = True, **limits: Any) -> Parts:
    return asyncio.run(parts_of(body, num_bytes, read_parts, **limits))


async def parts_of(
    body: bytes,
    num_bytes: int,
    read_parts: bool = True,
    *,
    pause_s: float = 0.0,
    timeout_s: float = 5.0,
    max_file_bytes: int = 1 << 30,
) -> Parts:
    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(body), num_bytes):
            yield body[start : start + num_bytes]
            await asyncio.sleep(pause_s)

    request: Any = SimpleNamespace(headers={"content-type": TYPE}, stream=stream)
    return [
        (part.name, part.filename, b"".join([one async for one in part.pieces]) if read_parts else b"")
        async for part in read_form(request, timeout_s, max_file_bytes)
    ]


@given(content=st.binary(max_size=60), num_bytes=st.integers(1, 40), read_parts=st.booleans())
def test_a_form_is_read_in_any_pieces(content: bytes, num_bytes: int, read_parts: bool) -> None:
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="ä.jsonl"', content), ('name="x"', b""))
    parts = [("purpose", None, b"batch"), ("file", "ä.jsonl", content), ("x", None, b"")]
    expected = parts if read_parts else [(name, filename, b"") for name, filename, _ in parts]
    if b"\r\n--b-o" not in b"\r\n" + content:
        assert read(body, num_bytes, read_parts=read_parts) == expected
    assert read(b"preamble\r\n" + body, num_bytes)[0] == parts[0]


@given(end=st.integers(0, 500), num_bytes=st.integers(1, 40))
def test_a_form_that_ends_early_is_refused(end: int, num_bytes: int) -> None:
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"content")).removesuffix(b"--\r\n")
    with pytest.raises(InvalidRequestError) as caught:
        read(body[:end], num_bytes)
    assert caught.value.code == "invalid_form"


@pytest.mark.parametrize(
    "body", [form(("name=" + "x" * 20_000, b"")), b"x" * 20_000 + form(("name=purpose", b"batch"))]
)
def test_long_headers_and_preambles_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="headers"):
        read(body, 100)


@pytest.mark.parametrize("many", [("name=a", b"x" * 100_000), ("name=a", b"")])
def test_a_form_is_limited_as_a_whole(many: tuple[str, bytes]) -> None:
    with pytest.raises(Refused) as caught:
        read(form(*[many] * (3 if many[1] else 3000)), 1000, max_file_bytes=1000)
    assert caught.value.error.status == 413


@pytest.mark.parametrize("pause_s", [0.02, 10])
def test_a_slow_form_has_a_limit_as_a_whole(pause_s: float) -> None:
    with pytest.raises(Refused) as caught:
        read(form(('name="file"; filename="a"', b"x" * 1000)), 1, pause_s=pause_s, timeout_s=0.3)
    assert caught.value.error.status == 408


@pytest.mark.parametrize("disposition", ["name*=unicode_escape''%5Cud800", 'name=a; filename="x', ""])
def test_odd_headers_are_refused(disposition: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(form((disposition, b"x")))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        ('name="a"; filename="a;b.jsonl"', "a;b.jsonl"),
        (r'filename="a\"b\\c"; name=a', 'a"b\\c'),
        ("name=a; filename=x; filename*=idna''xn--a", "x"),
        ("Name=a", None),
    ],
)
def test_names_as_clients_write_them(disposition: str, filename: str | None) -> None:
    assert read(form((disposition, b"x"))) == [("a", filename, b"x")]


@given(head=st.binary(max_size=80), body=st.binary(max_size=40))
def test_strange_bytes_are_parts_or_refused(head: bytes, body: bytes) -> None:
    with suppress(InvalidRequestError):
        for name, filename, _ in read(b"--b-o\r\n" + head + b"\r\n\r\n" + body + b"\r\n--b-o--", 7):
            msgspec.json.encode([name, filename])
