"""The routes of OpenAI's Files and Batch APIs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from functools import wraps
from typing import IO, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from rayspec.errors import reason_of
from rayspec.openai.batch import Batch, BatchRequest, Deleted, FileObject, Page, PageRequest
from rayspec.openai.places import Places
from rayspec.openai.protocol import InvalidRequestError
from rayspec.openai.responses import json_body
from rayspec.serve.access import NO_STORE, Refused, json_response
from rayspec.serve.batch_store import STORE_ERRORS, BatchStore, new_id
from rayspec.serve.bodies import BodyReader, read_form
from rayspec.serve.calls import while_connected
from rayspec.serve.description import Description
from rayspec.serve.options import ServeOptions
from rayspec.serve.unread import Unread, WholeAnswer

_logger = logging.getLogger(__name__)
_MOST_PURPOSE = 4096
_DISABLED = "this endpoint keeps no files and runs no batches: it is to be started with --batches FOLDER"
_FORM = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
    "additionalProperties": False,
}
_TAKES_FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The content.", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}


def add_batch_routes(
    app: FastAPI,
    described: Description,
    options: ServeOptions,
    *,
    runner: Any,
    bodies: BodyReader,
    unread: Unread,
    client_of: Callable[[Request], str],
) -> None:
    """Add the routes. runner: Serve's handle of the BatchRunner, where `options` name a folder of batches. unread: of
    all answers. client_of: returns what stands for the client of a request."""
    folder = None if options.batches is None else BatchStore.at(options.batches)
    listing = Places(1)  # a list may read every file.json; other requests need the threads, too

    async def store() -> BatchStore:
        if folder is None:
            raise InvalidRequestError(_DISABLED, code="batches_disabled", status=404)
        await asyncio.to_thread(folder.check)
        return folder

    def of_list(work: Callable[[BatchStore, PageRequest], Any]) -> Callable[..., Any]:
        async def route(request: Request) -> Response:
            query = PageRequest.parse(dict(request.query_params))
            client = client_of(request)

            async def page() -> bytes:
                async with listing.take(client):
                    return json_body(await asyncio.to_thread(work, await store(), query))

            return WholeAnswer(await while_connected(request, page()), unread, client)

        return route

    def of_object(work: Callable[[BatchStore, str], Any]) -> Callable[..., Any]:
        async def route(object_id: str) -> Response:
            return json_response(await asyncio.to_thread(work, await store(), object_id))

        return route

    for method, path, route, answer in (
        ("GET", "/v1/batches", of_list(BatchStore.batches), Page[Batch]),
        ("GET", "/v1/batches/{object_id}", of_object(BatchStore.batch), Batch),
        ("DELETE", "/v1/batches/{object_id}", of_object(BatchStore.delete_batch), Deleted),
        ("POST", "/v1/batches/{object_id}/cancel", of_object(BatchStore.cancel), Batch),
        ("GET", "/v1/files", of_list(BatchStore.files), Page[FileObject]),
        ("GET", "/v1/files/{object_id}", of_object(BatchStore.file), FileObject),
        ("DELETE", "/v1/files/{object_id}", of_object(BatchStore.delete_file), Deleted),
    ):
        app.add_api_route(path, _told(route), methods=[method], responses=described.answers(answer))

    @app.post("/v1/batches", **described.takes(BatchRequest, Batch))
    @_told
    async def create_batch(request: Request) -> Response:
        client = client_of(request)
        with ExitStack() as held:
            asked, _ = await bodies.read(request, BatchRequest, client, held)
        batch = await asyncio.to_thread((await store()).new_batch, asked, client)
        runner.wake.remote()
        return json_response(batch)

    @app.post("/v1/files", responses=described.answers(FileObject), openapi_extra=_TAKES_FORM)
    @_told
    async def upload_file(request: Request) -> Response:
        return json_response(await _upload(request, await store(), options))

    @app.get("/v1/files/{object_id}/content", responses=_CONTENT, response_class=Response)
    @_told
    async def file_content(object_id: str) -> Response:
        pieces = _pieces(await asyncio.to_thread((await store()).open_file, object_id))
        headers = {"x-content-type-options": "nosniff"}
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


def _told(route: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Return the route with Refused in place of an error of the store, which the log tells."""

    @wraps(route)
    async def told(*args: Any, **fields: Any) -> Response:
        try:
            return await route(*args, **fields)
        except STORE_ERRORS as error:
            _logger.warning("the folder of files and batches cannot be used now: %s", reason_of(error))
            raise Refused(NO_STORE) from error

    return told


async def _upload(request: Request, store: BatchStore, options: ServeOptions) -> FileObject:
    """Store the file of a form with the fields `purpose` and `file`, in any order. Both are required."""
    purpose, content, file_id, max_bytes = None, None, new_id("file-"), options.max_batch_file_bytes
    async with AsyncExitStack() as kept:
        async for part in read_form(request, options.body_timeout_s, max_bytes):
            if part.name == "file" and content is None:
                new = store.new_file(file_id, part.filename or "", "batch")
                content, num_bytes = await asyncio.to_thread(new.__enter__), 0
                kept.push_async_exit(_end_in_thread(new))
                async for piece in part.pieces:
                    num_bytes += len(piece)
                    if num_bytes > max_bytes:
                        problem = f"it has more than {max_bytes} bytes; split it"
                        raise InvalidRequestError.of("file", problem, code="request_too_large", status=413)
                    await asyncio.to_thread(content.write, piece)
            elif part.name == "purpose" and purpose is None:
                purpose = ""
                async for piece in part.pieces:
                    purpose += piece.decode("utf-8", "replace")
                    if len(purpose) > _MOST_PURPOSE:
                        raise InvalidRequestError.of("purpose", f"it has more than {_MOST_PURPOSE} characters")
            else:
                raise InvalidRequestError.of(part.name, "not supported here; leave it out", code="unknown_parameter")
        if purpose != "batch":
            raise InvalidRequestError.of("purpose", f"it is {purpose!r} and must be 'batch'")
        if content is None:
            raise InvalidRequestError.of("file", "it is missing", code="missing_required_parameter")
    return await asyncio.to_thread(store.file, file_id)


def _end_in_thread(block: AbstractContextManager[Any]) -> Callable[..., Awaitable[bool | None]]:
    return lambda *error: asyncio.to_thread(block.__exit__, *error)


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, 2**18):
            yield piece
