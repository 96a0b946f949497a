"""The HTTP side of the endpoint: routes, keys, limits, and errors as OpenAI tells them."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import rayspec
from rayspec.service.openai.encoding import json_body
from rayspec.service.openai.errors import ApiError, parse_json
from rayspec.service.openai.models import ModelCard, ModelList, check_served
from rayspec.service.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from rayspec.service.openai.responses import ChatCompletion, Completion
from rayspec.service.openai.tokenizing import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from rayspec.service.serve.auth import ApiKeys
from rayspec.service.serve.bodies import read_body
from rayspec.service.serve.calls import Relay, call, fetch
from rayspec.service.serve.description import answers, body, describe, errors
from rayspec.service.serve.probes import Probe
from rayspec.service.serve.replies import ENDING, INTERNAL, UNAUTHORIZED, Reply, invalid, unable
from rayspec.service.serve.scrape import CONTENT_TYPE, scrape
from rayspec.service.serve.status import EndpointStatus
from rayspec.types import RequestError

_WEB = Path(__file__).parent / "web"
_STATUS_TIMEOUT_S = 2.0
_USABLE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies on the way must not collect it


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """What of ServeOptions the ingress goes by."""

    keys: ApiKeys
    max_request_bytes: int
    body_timeout_s: float
    request_timeout_s: float | None
    engine_timeout_s: float


class Ingress:
    """Carries requests to models. A plain class; `app.py` makes it a deployment.

    models: Serve's handles, by the ids that requests use. Request ids (x-request-id) are echoed or made by Serve's
    proxy, before a request comes here.
    """

    def __init__(self, settings: IngressSettings, models: Mapping[str, Any]) -> None:
        self._settings, self._models = settings, dict(models)
        self._cards: dict[str, ModelCard] = {}
        self._num_under_way = 0
        self.draining = False

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self, self._settings.keys)

    async def drain(self) -> int:
        """Take no new requests. Returns how many are under way."""
        self.draining = True
        return self._num_under_way

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """While a request is."""
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1

    async def generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        """Raises RequestError."""
        asked = kind.parse(await self._json(request))
        model, name = self._model(asked.model), _name_of(request)
        if isinstance(asked, GenerationRequest) and asked.stream:
            return await self._stream(model.options(stream=True).stream.remote(asked, name))
        return _response(await call(model.respond.remote(asked, name), self._settings.request_timeout_s))

    async def tokenize(self, request: Request, kind: type[TokenizeRequest | DetokenizeRequest]) -> Response:
        """Raises RequestError."""
        asked = kind.parse(await self._json(request))
        model = self._model(asked.model or next(iter(self._models)))
        return _response(await call(model.tokenize.remote(asked, _name_of(request)), self._settings.request_timeout_s))

    async def card(self, model: str) -> ModelCard | ApiError:
        """Raises RequestError for a model that is not served."""
        if model not in self._cards:
            found = await fetch(self._model(model).card.remote(), self._settings.request_timeout_s)
            if isinstance(found, ApiError):
                return found
            self._cards[model] = found
        return self._cards[model]

    async def cards(self) -> ModelList | ApiError:
        found = await asyncio.gather(*[self.card(model) for model in self._models])
        failure = next((one for one in found if isinstance(one, ApiError)), None)
        return failure or ModelList.of(one for one in found if isinstance(one, ModelCard))

    async def ailments(self) -> list[str]:
        """What is wrong with the models; nothing: all are well. A replica that is being started does not count, as long
        as the model has another."""
        found = await asyncio.gather(*[probe.health() for probe in self._probes(self._settings.engine_timeout_s)])
        return [
            f"{model}: {', '.join(sorted(set(ill))) or 'starting'}"
            for model, states in zip(self._models, found, strict=True)
            if (ill := [state for state in states if state not in {"ready", "starting"}]) or "ready" not in states
        ]

    async def statuses(self) -> list[dict[str, Any]]:
        """A ModelStatus of each replica that answers."""
        found = await asyncio.gather(*[probe.statuses() for probe in self._probes(_STATUS_TIMEOUT_S)])
        return [status for statuses in found for status in statuses]

    async def _stream(self, response: Any) -> Response:
        relay = Relay(response, self._settings.request_timeout_s)
        try:
            reply = await relay.begin()
        except BaseException:
            relay.close()
            raise
        return _EventStream(relay, reply.body) if reply.ok else _response(reply)

    async def _json(self, request: Request) -> Any:
        return parse_json(await read_body(request, self._settings.max_request_bytes, self._settings.body_timeout_s))

    def _model(self, name: str) -> Any:
        check_served(name, tuple(self._models))
        return self._models[name]

    def _probes(self, timeout_s: float) -> list[Probe]:
        return [
            Probe(app=handle.app_name, deployment=handle.deployment_name, timeout_s=timeout_s)
            for handle in self._models.values()
        ]


class _EventStream(StreamingResponse):
    """Server-sent events of a model. However it ends, the request ends with it."""

    def __init__(self, relay: Relay, first: bytes) -> None:
        super().__init__(relay.events(first), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._relay.close()


class _Door:
    """ASGI middleware: nobody gets further without a key, except to the open paths, nor once the endpoint is to end."""

    def __init__(self, app: ASGIApp, *, ingress: Ingress, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app, self._ingress, self._keys, self._open_paths = app, ingress, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._ingress.under_way():
            await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["path"] not in self._open_paths and not self._keys.admit(Headers(scope=scope).get("authorization")):
            return _error(UNAUTHORIZED, headers={"www-authenticate": "Bearer"})
        if self._ingress.draining:
            return _error(ENDING)
        return None


def build_app(ingress: Ingress, keys: ApiKeys) -> FastAPI:
    """The application. /health and the web page need no key: the page asks for it."""
    app = FastAPI(
        title="rayspec",
        version=rayspec.__version__,
        description="OpenAI-compatible endpoint of models that draft for themselves.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_openai_routes(app, ingress)
    _add_vllm_routes(app, ingress)
    _add_operator_routes(app, ingress)
    open_paths = frozenset({"/health"}) | _add_web(app)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_failure)
    app.add_middleware(_Door, ingress=ingress, keys=keys, open_paths=open_paths)
    describe(app, open_paths=open_paths, has_keys=bool(keys.digests))
    return app


_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_GENERATION_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)


def _add_openai_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.post(
        "/v1/chat/completions",
        responses=answers(ChatCompletion, streamed=True) | errors(*_GENERATION_ERRORS),
        openapi_extra=body(ChatRequest),
        summary="Answer a conversation",
    )
    async def chat_completions(request: Request) -> Response:
        return await ingress.generate(request, ChatRequest)

    @app.post(
        "/v1/completions",
        responses=answers(Completion, streamed=True) | errors(*_GENERATION_ERRORS),
        openapi_extra=body(CompletionRequest),
        summary="Complete prompts",
    )
    async def completions(request: Request) -> Response:
        return await ingress.generate(request, CompletionRequest)

    @app.get("/v1/models", responses=answers(ModelList) | errors(401, 429, 500, 503, 504))
    async def models() -> Response:
        return _body_or_error(await ingress.cards())

    @app.get("/v1/models/{model:path}", responses=answers(ModelCard) | errors(401, 404, 429, 500, 503, 504))
    async def model_card(model: str) -> Response:
        return _body_or_error(await ingress.card(model))


def _add_vllm_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.post(
        "/tokenize",
        responses=answers(TokenizeResponse) | errors(*_GENERATION_ERRORS),
        openapi_extra=body(TokenizeRequest),
        summary="The tokens of a text or a conversation",
    )
    async def tokenize(request: Request) -> Response:
        return await ingress.tokenize(request, TokenizeRequest)

    @app.post(
        "/detokenize",
        responses=answers(DetokenizeResponse) | errors(*_GENERATION_ERRORS),
        openapi_extra=body(DetokenizeRequest),
        summary="The text of tokens",
    )
    async def detokenize(request: Request) -> Response:
        return await ingress.tokenize(request, DetokenizeRequest)


def _add_operator_routes(app: FastAPI, ingress: Ingress) -> None:
    @app.get("/health", responses=errors(503), summary="Whether every model can serve")
    async def health() -> Response:
        ailments = await ingress.ailments()
        if ailments:
            return _error(unable(503, "unhealthy", "; ".join(ailments)))
        return JSONResponse({"status": "ok"})

    @app.get("/status", responses=answers(EndpointStatus) | errors(401, 500), summary="What each model does")
    async def status() -> Response:
        return JSONResponse({"models": await ingress.statuses()})

    @app.get(
        "/metrics",
        responses=_METRICS | errors(401, 500),
        response_class=Response,
        summary="Metrics of all nodes, for Prometheus",
    )
    async def metrics() -> Response:
        return Response(await scrape(), media_type=CONTENT_TYPE)


def _add_web(app: FastAPI) -> frozenset[str]:
    """A route a file; a mount at "/" would make a 404 of what should be a 405. Returns their paths."""
    files = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(_WEB.iterdir())}
    for path, file in files.items():
        app.add_api_route(path, _sender(file), include_in_schema=False)
    return frozenset(files)


def _sender(file: Path) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(file)

    return send


def _name_of(request: Request) -> str:
    """What the ids of its answer end in: the request's own id where that is fit."""
    asked = request.headers.get("x-request-id", "")
    return asked if _USABLE_ID.fullmatch(asked) else uuid.uuid4().hex


def _response(reply: Reply) -> Response:
    headers = {} if reply.retry_after_s is None else {"retry-after": str(reply.retry_after_s)}
    return Response(reply.body, status_code=reply.status, media_type="application/json", headers=headers)


def _body_or_error(found: ModelCard | ModelList | ApiError) -> Response:
    if isinstance(found, ApiError):
        return _error(found)
    return _response(Reply(status=200, body=json_body(found)))


def _error(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    response = _response(Reply.failed(error))
    response.headers.update(headers or {})
    return response


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(ApiError.of(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Of the router: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = HTTPStatus(status).name.lower()
    return _error(invalid(status, code, f"{request.method} {request.url.path}: {error.detail}."), error.headers)


async def _on_disconnect(_: Request, error: Exception) -> Response:
    """The client has left before its body was here; nobody reads this, and nothing of ours has failed."""
    return Response(status_code=400)


async def _on_failure(_: Request, error: Exception) -> Response:
    """Starlette raises the error again after this, so Serve logs it."""
    return _error(INTERNAL)
