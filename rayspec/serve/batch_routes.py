"""The routes of OpenAI's Files and Batch APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import IO, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from rayspec.openai.batches import (
    Batch,
    BatchDeleted,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    PageRequest,
)
from rayspec.openai.errors import InvalidRequestError
from rayspec.serve.admission import response_of
from rayspec.serve.batch_store import BatchStore
from rayspec.serve.description import answers, errors, takes
from rayspec.serve.replies import Reply
from rayspec.serve.uploads import Part, read_form

_DISABLED = "this endpoint keeps no files and runs no batches: it is to be started with --batches FOLDER"
_PIECE = 2**18
_MOST_BATCHES, _FEW_BATCHES, _MOST_FILES = 100, 20, 10_000
_ERRORS = (400, 401, 403, 404, 429, 500)
_BODY_ERRORS = (408, 413, 415)
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
ReadBody = Callable[[Request, type[BatchRequest]], Awaitable[BatchRequest]]


class BatchDesk:
    """Handles clients' requests about files and batches. store: None where batches are off. runner: Serve's handle of
    the BatchRunner. max_file_bytes: largest upload."""

    def __init__(self, store: BatchStore | None, runner: Any, *, max_file_bytes: int, body_timeout_s: float) -> None:
        self._store, self._runner = store, runner
        self._max_file_bytes, self._body_timeout_s = max_file_bytes, body_timeout_s

    @property
    def store(self) -> BatchStore:
        if self._store is None:
            raise InvalidRequestError(_DISABLED, code="batches_disabled", status=404)
        return self._store

    async def upload(self, request: Request) -> FileObject:
        """Store the file of a form with the fields `purpose` and `file`, in any order. Both are required."""
        store, purpose, file_id = self.store, None, None
        with ExitStack() as kept:
            async for part in read_form(request, self._body_timeout_s, self._max_file_bytes):
                if part.name == "file" and file_id is None:
                    new = await asyncio.to_thread(kept.enter_context, store.new_file(part.filename or "", "batch"))
                    file_id = new.id
                    await self._receive(part, new.content)
                elif part.name == "purpose":
                    purpose = await part.text()
                else:
                    raise _invalid(f"{part.name}: not supported here; leave it out", part.name, "unknown_parameter")
            if purpose != "batch":
                raise _invalid(f"purpose: it is {purpose!r} and must be 'batch'", "purpose")
            if file_id is None:
                raise _invalid("file: it is missing", "file", "missing_required_parameter")
            await asyncio.to_thread(kept.close)
        return await asyncio.to_thread(store.file, file_id)

    async def create(self, asked: BatchRequest) -> Batch:
        batch = await asyncio.to_thread(self.store.new_batch, asked)
        self._runner.wake.remote()
        return batch

    async def files(self, query: PageRequest) -> FileList:
        data, has_more = await asyncio.to_thread(
            self.store.files,
            after=query.after,
            limit=query.limit or _MOST_FILES,
            order=query.order,
            purpose=query.purpose,
        )
        return FileList.of(data, has_more=has_more)

    async def batches(self, query: PageRequest) -> BatchList:
        limit = min(query.limit or _FEW_BATCHES, _MOST_BATCHES)
        data, has_more = await asyncio.to_thread(self.store.batches, after=query.after, limit=limit)
        return BatchList.of(data, has_more=has_more)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Return the content of a file, in chunks. Raises InvalidRequestError for an unknown file."""
        file = await asyncio.to_thread(self.store.open_file, file_id)
        return _pieces(file)

    async def _receive(self, part: Part, content: IO[bytes]) -> None:
        num_bytes = 0
        async for piece in part.pieces:
            num_bytes += len(piece)
            if num_bytes > self._max_file_bytes:
                message = f"file: it has more than {self._max_file_bytes} bytes; split it"
                raise InvalidRequestError(message, param="file", code="request_too_large", status=413)
            await asyncio.to_thread(content.write, piece)


def add_batch_routes(app: FastAPI, desk: BatchDesk, read: ReadBody) -> None:
    """Add the routes. read: reads the JSON body of a request, within the endpoint's limits."""
    _add_file_routes(app, desk)

    @app.post("/v1/batches", summary="Run a file of requests", **takes(BatchRequest, Batch, *_ERRORS, *_BODY_ERRORS))
    async def create(request: Request) -> Response:
        return _answer(await desk.create(await read(request, BatchRequest)))

    @app.get("/v1/batches", responses=answers(BatchList) | errors(*_ERRORS), summary="Batches, the newest first")
    async def batches(request: Request) -> Response:
        return _answer(await desk.batches(PageRequest.parse(dict(request.query_params))))

    @app.get("/v1/batches/{batch_id}", responses=answers(Batch) | errors(*_ERRORS), summary="How far a batch has come")
    async def batch(batch_id: str) -> Response:
        return _answer(await asyncio.to_thread(desk.store.batch, batch_id))

    @app.delete(
        "/v1/batches/{batch_id}",
        responses=answers(BatchDeleted) | errors(*_ERRORS, 409),
        summary="Delete a batch that has ended, but not its files",
    )
    async def delete(batch_id: str) -> Response:
        await asyncio.to_thread(desk.store.delete_batch, batch_id)
        return _answer(BatchDeleted(id=batch_id))

    @app.post("/v1/batches/{batch_id}/cancel", responses=answers(Batch) | errors(*_ERRORS, 409), summary="End a batch")
    async def cancel(batch_id: str) -> Response:
        return _answer(await asyncio.to_thread(desk.store.cancel, batch_id))


def _add_file_routes(app: FastAPI, desk: BatchDesk) -> None:
    @app.post(
        "/v1/files",
        responses=answers(FileObject) | errors(*_ERRORS, *_BODY_ERRORS),
        openapi_extra=_TAKES_FORM,
        summary="Keep a file",
    )
    async def upload(request: Request) -> Response:
        return _answer(await desk.upload(request))

    @app.get("/v1/files", responses=answers(FileList) | errors(*_ERRORS), summary="The files that are kept")
    async def files(request: Request) -> Response:
        return _answer(await desk.files(PageRequest.parse(dict(request.query_params))))

    @app.get("/v1/files/{file_id}", responses=answers(FileObject) | errors(*_ERRORS), summary="What a file is")
    async def file(file_id: str) -> Response:
        return _answer(await asyncio.to_thread(desk.store.file, file_id))

    @app.get(
        "/v1/files/{file_id}/content",
        responses=_CONTENT | errors(*_ERRORS),
        response_class=Response,
        summary="What is in a file",
    )
    async def content(file_id: str) -> Response:
        headers = {"x-content-type-options": "nosniff"}
        return StreamingResponse(await desk.content(file_id), media_type="application/octet-stream", headers=headers)

    @app.delete("/v1/files/{file_id}", responses=answers(FileDeleted) | errors(*_ERRORS), summary="Delete a file")
    async def delete(file_id: str) -> Response:
        await asyncio.to_thread(desk.store.delete_file, file_id)
        return _answer(FileDeleted(id=file_id))


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _answer(body: FileObject | FileList | FileDeleted | Batch | BatchList | BatchDeleted) -> Response:
    return response_of(Reply(status=200, body=msgspec.json.encode(body)))


def _invalid(message: str, param: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)
