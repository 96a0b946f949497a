"""Bodies in gzip and deflate, read from a real server."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rayspec.openai.errors import ApiError, InvalidRequestError
from rayspec.serve.access import Admission, error_response
from rayspec.serve.bodies import read_body, read_form
from rayspec.serve.replies import Refused
from tests.serve.endpoint_process import served

MAX_BYTES = 3 * 2**20
BODY = json.dumps({"prompt": "é " * 1000}).encode()
# Without the time of the day, which would stand in the names of the tests, and workers collect at different times.
pack = partial(gzip.compress, mtime=0)
large = Admission(MAX_BYTES)


async def echo(request: Request) -> Response:
    try:
        with ExitStack() as held:
            body = await read_body(request, MAX_BYTES, 5.0, large=large, held=held)
            return Response(body, headers={"x-large": str(large.under_way)})
    except (InvalidRequestError, Refused) as error:
        return error_response(error.error if isinstance(error, Refused) else ApiError.of(error))


async def upload(request: Request) -> Response:
    try:
        return Response(b"".join([part.name.encode() async for part in read_form(request, 5.0, MAX_BYTES)]))
    except (InvalidRequestError, Refused) as error:
        return error_response(error.error if isinstance(error, Refused) else ApiError.of(error))


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/upload", upload, methods=["POST"])])
    with served(app) as address:
        yield address


def post(address: tuple[str, int], body: Any, encoding: str | None, path: str = "/echo", **headers: str) -> Any:
    connection = http.client.HTTPConnection(*address, timeout=20)
    named = {} if encoding is None else {"content-encoding": encoding}
    connection.request("POST", path, body=body, headers={"content-type": "application/json"} | named | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content if answer.status == 200 else json.loads(content)["error"], answer.headers


def deflated(content: bytes, bits: int) -> bytes:
    stream = zlib.compressobj(wbits=bits)
    return stream.compress(content) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        (None, BODY),
        ("", BODY),
        ("identity", BODY),
        ("gzip", pack(BODY)),
        (" GZip ", pack(BODY)),
        ("x-gzip", pack(BODY, 0)),
        ("gzip", pack(BODY[:100]) + pack(b"") + pack(BODY[100:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", deflated(BODY, -15)),
    ],
)
def test_a_body_is_inflated(address: tuple[str, int], encoding: str | None, content: bytes) -> None:
    assert post(address, content, encoding)[:2] == (200, BODY)
    pieces = (content[start : start + 1] for start in range(len(content)))
    if len(content) < 1000:
        assert post(address, pieces, encoding)[:2] == (200, BODY)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip;q=1", "x" * 1000])
def test_another_encoding_is_refused_by_name(address: tuple[str, int], encoding: str) -> None:
    status, error, _ = post(address, BODY, encoding)
    assert (status, error["code"]) == (415, "unsupported_encoding")
    assert error["message"].startswith(
        f"Content-Encoding '{encoding[:100]}' is not supported here: send the body as it is"
    )


def test_an_upload_has_no_encoding(address: tuple[str, int]) -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n--x--'
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert post(address, form, None, "/upload", **kind)[:2] == (200, b"a")
    assert post(address, pack(form), "gzip", "/upload", **kind)[0] == 415


@pytest.mark.parametrize(
    ("encoding", "content", "problem"),
    [
        ("gzip", BODY, "incorrect header check"),
        ("gzip", pack(BODY)[:-9], "ends too early"),
        ("gzip", pack(BODY)[:-8] + bytes(8), "incorrect data check"),
        ("gzip", pack(BODY) + b"more", "incorrect header check"),
        ("deflate", zlib.compress(BODY) + b"more", "data follows its end"),
        ("deflate", BODY, "invalid"),
    ],
)
def test_damaged_data_is_the_clients_fault(
    address: tuple[str, int], encoding: str, content: bytes, problem: str
) -> None:
    status, error, _ = post(address, content, encoding)
    assert (status, error["code"]) == (400, "invalid_encoding")
    assert problem in error["message"]


@pytest.mark.parametrize("content", [bytes(MAX_BYTES + 1), bytes(2**28)])
def test_the_limit_is_of_the_inflated_size(address: tuple[str, int], content: bytes) -> None:
    for encoding, packed in (("gzip", pack(content, 1)), ("deflate", zlib.compress(content, 1))):
        status, error, _ = post(address, packed, encoding)
        assert (status, error["code"]) == (413, "request_too_large")
    assert large.under_way == 0


def test_the_limit_is_of_the_received_size_too(address: tuple[str, int]) -> None:
    empty = pack(b"") * (MAX_BYTES // 20)
    assert post(address, iter([empty, empty]), "gzip")[0] == 413


def test_an_inflated_body_counts_by_its_size(address: tuple[str, int]) -> None:
    for num_bytes, expected in ((2**20, "0"), (2**20 + 1, str(MAX_BYTES))):
        assert post(address, pack(bytes(num_bytes)), "gzip")[2]["x-large"] == expected


def test_a_length_of_many_digits_is_refused(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        connection.sendall(head + b"9" * 5000 + b"\r\n\r\n")
        assert connection.recv(100).startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))
