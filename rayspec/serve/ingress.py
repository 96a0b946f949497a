"""The HTTP side of the endpoint: routes, keys, limits, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

import rayspec
from rayspec.openai.items import ResponsesBody, ResponsesRequest
from rayspec.openai.places import Places
from rayspec.openai.protocol import INTERNAL, ApiError
from rayspec.openai.requests import ChatRequest, CompletionRequest, check_served
from rayspec.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from rayspec.openai.tokenizing import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from rayspec.serve.access import (
    BUSY,
    OVERRUN,
    STARTING,
    Admission,
    ApiKeys,
    Entry,
    Refused,
    error_response,
    json_response,
)
from rayspec.serve.batch_routes import add_batch_routes
from rayspec.serve.bodies import BodyReader
from rayspec.serve.calls import Deadline, ModelCall, fetch, while_connected
from rayspec.serve.description import ERRORS, PAGE_HEADERS, Description
from rayspec.serve.options import TOKENIZED_AT_ONCE, ServeOptions
from rayspec.serve.scrape import CONTENT_TYPE, scrape
from rayspec.serve.unread import EventStream, Unread, WholeAnswer
from rayspec.serve.watch import PERIOD_S, EndpointStatus, Watch
from rayspec.types import RequestError

_WEB = Path(__file__).parent / "web"
_USABLE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Ingress:
    """Passes requests on to models. models, runner: Serve's handles. num_ingresses: share what the models admit."""

    def __init__(
        self,
        options: ServeOptions,
        models: Mapping[str, Any],
        runner: Any = None,
        *,
        keys: ApiKeys,
        hosts: frozenset[str],
        num_ingresses: int = 1,
    ) -> None:
        self.options, self.models, self.runner = options, dict(models), runner
        self.model_of = options.model_of
        self._cards: dict[str, ModelCard] = {}
        self._created = int(time.time())
        self._admissions = {
            one.model_id: Admission(one.max_admitted and -(-one.max_admitted // num_ingresses), refusal=BUSY)
            for one in options.llm_configs
        }
        self._num_ingresses = num_ingresses
        self._places = {one.model_id: Places(one.num_ongoing(1, num_ingresses), least=1) for one in options.llm_configs}
        self._tokenizing = {one.model_id: Places(TOKENIZED_AT_ONCE) for one in options.llm_configs}
        self.watch = Watch(
            self.models,
            replica_timeout_s=options.replica_timeout_s,
            may_be_absent=[one.model_id for one in options.llm_configs if one.scales_to_zero],
            looked=self._looked,
        )
        self.bodies, self.unread = BodyReader(options), Unread()
        self._scrape: asyncio.Task[str] | None = None
        posts, gets = (Admission(options.max_ongoing_requests, refusal=OVERRUN) for _ in range(2))
        self.entry = Entry(keys=keys, hosts=hosts, origins=options.cors, posts=posts, gets=gets)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self)

    async def generate(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        """Answer a request for text, streamed or not. Raises RequestError and Refused."""
        with ExitStack() as held:
            deadline = Deadline(self.options.request_timeout_s)
            client = self.entry.client(request)
            asked, body = await self.bodies.read(request, kind, client, held)
            model, name = self._ready_model(asked.model), _name_of(request)
            own = self.model_of[asked.model]
            owner = self.entry.keys.owner(request.headers.get("authorization"))
            held.enter_context(self._admissions[own].admit(asked.num_sequences, client))
            is_streamed = asked.stream
            del asked  # its values take several times as much memory as the body
            await while_connected(request, deadline.within(self._places[own].ask(client, held)))
            if self.watch.must_wait(own):
                await while_connected(request, deadline.within(self._presence(own)))
            if not is_streamed:
                work = fetch(model.respond.remote(kind, body, name, owner, client), deadline)
                whole = await while_connected(request, work)
                if isinstance(whole, ApiError):
                    return error_response(whole)
                return WholeAnswer(whole, self.unread, client)
            call = ModelCall(model.options(stream=True).stream.remote(kind, body, name, owner, client), deadline)
            held.callback(call.cancel)
            first = await while_connected(request, call.next())
            if isinstance(first, ApiError):
                return error_response(first)
            return EventStream(call, first, held.pop_all(), self.unread, client)

    async def tokenize(self, request: Request, kind: type[TokenizeRequest | DetokenizeRequest]) -> Response:
        """Raises RequestError and Refused."""
        with ExitStack() as held:
            client = self.entry.client(request)
            asked, body = await self.bodies.read(request, kind, client, held)
            name = asked.model or next(iter(self.models))
            model, deadline = self._ready_model(name), Deadline(self.options.request_timeout_s)
            own = self.model_of[name]
            del asked  # as above
            await while_connected(request, deadline.within(self._tokenizing[own].ask(client, held)))
            await while_connected(request, deadline.within(self._presence(own)))
            work = fetch(model.tokenize.remote(kind, body, _name_of(request), client), deadline)
            return json_response(await while_connected(request, work))

    async def card(self, model: str) -> ModelCard:
        """Return a model's or adapter's card; it says less before the first run. Raises RequestError, Refused."""
        if model not in self._cards:
            ready, own = self._ready_model(model), self.model_of[model]
            if self.watch.is_absent(own) or self.watch.must_wait(own):  # a call would start a replica, or wait for one
                return ModelCard(id=model, created=self._created, parent=None if own == model else own)
            card = await fetch(ready.card.remote(), Deadline(self.options.request_timeout_s))
            self._cards[model] = card if own == model else replace(card, id=model, parent=own)
        return self._cards[model]

    async def scraped(self) -> str:
        """Return the metrics of all nodes. Requests that come while they are gathered share them."""
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.create_task(scrape())
        return await asyncio.shield(self._scrape)

    def _looked(self) -> None:
        """Have places for the replicas that run: in Serve's queue, clients would not take turns."""
        for one in self.options.llm_configs:
            num_running = self.watch.num_running(one.model_id)
            self._places[one.model_id].resize(one.num_ongoing(num_running, self._num_ingresses))

    async def _presence(self, own: str) -> None:
        """Wait while all replicas of a model are being replaced. Raises Refused where none of the new ones starts."""
        while self.watch.must_wait(own):
            if not self.watch.can_serve(own):
                raise Refused(STARTING)
            await asyncio.sleep(PERIOD_S / 2)

    def _ready_model(self, name: str) -> Any:
        """Return the handle of a model, or of an adapter's. Raises RequestError, and Refused while none can serve."""
        check_served(name, tuple(self.model_of))
        own = self.model_of[name]
        if not self.watch.can_serve(own):
            raise Refused(STARTING)
        return self.models[own]


def build_app(ingress: Ingress) -> FastAPI:
    """Return the application. /docs, /health, /ping and the web page need no key: the page asks its user for it."""
    app = FastAPI(
        title="rayspec",
        version=rayspec.__version__,
        description="OpenAI-compatible endpoint of models that draft for themselves.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=partial(_lifespan, ingress),
        responses=ERRORS,
    )
    described = Description()
    _add_model_routes(app, ingress, described)
    of_ingress = {"runner": ingress.runner, "bodies": ingress.bodies, "unread": ingress.unread}
    add_batch_routes(app, described, ingress.options, **of_ingress, client_of=ingress.entry.client)
    _add_operator_routes(app, ingress, described)
    open_paths = frozenset({"/docs", "/health", "/ping"}) | _add_web(app)
    for kind in (RequestError, Refused, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(ingress.entry.guarded, open_paths=open_paths)
    if ingress.options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=ingress.options.cors,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # OpenAI's client for JavaScript sends many of its own
            expose_headers=("retry-after", "x-request-id"),
        )
    described.install(app, open_paths=open_paths, has_keys=bool(ingress.entry.keys.digests))
    for route in app.routes:
        methods = getattr(route, "methods", None) or set[str]()
        methods |= {"HEAD"} if "GET" in methods else set()  # the server leaves out the body
    return app


@asynccontextmanager
async def _lifespan(ingress: Ingress, _: FastAPI) -> AsyncIterator[None]:
    watching = asyncio.create_task(ingress.watch.keep())
    yield
    watching.cancel()


_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def _add_model_routes(app: FastAPI, ingress: Ingress, described: Description) -> None:
    @app.post("/v1/chat/completions", **described.takes(ChatRequest, ChatCompletion, streamed=True))
    async def chat_completions(request: Request) -> Response:
        return await ingress.generate(request, ChatRequest)

    @app.post("/v1/completions", **described.takes(CompletionRequest, Completion, streamed=True))
    async def completions(request: Request) -> Response:
        return await ingress.generate(request, CompletionRequest)

    @app.post("/v1/responses", **described.takes(ResponsesBody, dict[str, Any], streamed=True))
    async def responses(request: Request) -> Response:
        return await ingress.generate(request, ResponsesRequest)

    @app.get("/v1/models", responses=described.answers(ModelList))
    async def models() -> Response:
        asked = [ingress.card(model) for model in ingress.model_of]
        found = await asyncio.gather(*asked, return_exceptions=True)
        cards = [one for one in found if isinstance(one, ModelCard)]
        for error in found:  # a model that cannot answer now is left out, if another can
            if isinstance(error, BaseException) and not (cards and isinstance(error, Refused)):
                raise error
        return json_response(ModelList(data=cards))

    @app.get("/v1/models/{model:path}", responses=described.answers(ModelCard))
    async def model_card(model: str) -> Response:
        return json_response(await ingress.card(model))

    @app.post("/tokenize", **described.takes(TokenizeRequest, TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        return await ingress.tokenize(request, TokenizeRequest)

    @app.post("/detokenize", **described.takes(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(request: Request) -> Response:
        return await ingress.tokenize(request, DetokenizeRequest)


def _add_operator_routes(app: FastAPI, ingress: Ingress, described: Description) -> None:
    @app.get("/health")
    async def health() -> Response:
        problems = await ingress.watch.problems()
        if problems:
            return error_response(ApiError(503, "unhealthy", "; ".join(problems)))
        return JSONResponse({"status": "ok"})

    app.get("/ping")(app.post("/ping")(health))

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": rayspec.__version__})

    @app.get("/status", responses=described.answers(EndpointStatus))
    async def status() -> Response:
        return json_response(EndpointStatus(models=await ingress.watch.statuses()))

    @app.get("/metrics", responses=_METRICS, response_class=Response)
    async def metrics() -> Response:
        return Response(await ingress.scraped(), media_type=CONTENT_TYPE)


def _add_web(app: FastAPI) -> frozenset[str]:
    """Add one route per file, and return the paths. A mount at "/" would answer 404 where 405 is right."""
    files = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(_WEB.iterdir())}

    async def send(request: Request) -> Response:
        return FileResponse(files[request.scope["route"].path], headers=PAGE_HEADERS)

    for path in files:
        app.add_api_route(path, send, include_in_schema=False)
    return frozenset(files)


def _name_of(request: Request) -> str:
    """Return the end of the answer's ids: the request's own id where it is usable, else a random id."""
    asked = request.headers.get("x-request-id", "")
    return asked if _USABLE_ID.fullmatch(asked) else uuid.uuid4().hex


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case Refused():
            return error_response(error.error)
        case RequestError():
            return error_response(ApiError.of(error))
        case HTTPException():  # of the router: an unknown path, a wrong method
            code = HTTPStatus(error.status_code).name.lower()
            message = f"{request.method} {request.scope['path']}: {error.detail}."
            return error_response(ApiError(error.status_code, code, message), error.headers)
        case ClientDisconnect():  # nobody reads this; it is no server error
            return Response(status_code=400)
    return error_response(INTERNAL)  # Starlette raises the error again afterwards, so Serve logs it
