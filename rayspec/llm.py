"""The Python interface, modelled on vLLM's: `LLM(...).generate(prompts, sampling_params)`."""

from __future__ import annotations

import asyncio
import atexit
import copy
import itertools
import logging
import queue
import random
import reprlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self, Unpack

from rayspec import demo
from rayspec.config import EngineConfig, EngineKeywords, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.output import PieceQueue
from rayspec.decode.stages import StageLostError
from rayspec.errors import naming_the_extra
from rayspec.local_engine import load_adapter, load_engine
from rayspec.model.sources import base_model
from rayspec.model.weights import load_tokenizer
from rayspec.prompts import Rendering, chat_template, conversation_tokens
from rayspec.types import ConfigError, EngineStats, LoRARequest, Request, RequestError, RequestOutput
from rayspec.vllm_names import CALLS, ENGINE, METHODS, from_vllm

if TYPE_CHECKING:
    from rayspec.pool.replicas import Replicas

    Client = EngineLoop | Replicas  # what runs requests, for callers in any thread

Prompt = str | Mapping[str, Any] | Sequence[int]
Message = Mapping[str, Any]
ProgressBar = Callable[..., Any]  # has the parameters of tqdm
Observe = Callable[[RequestOutput], None]
_PLAINLY = Rendering()

logger = logging.getLogger(__name__)


class LLMKeywords(EngineKeywords, total=False):
    """The keywords of `LLM(model, ...)`: those of the engine, and vLLM's names of options that are called otherwise
    here. `vllm_names` has more, without effect or refused."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enforce_eager: bool
    speculative_config: Mapping[str, Any] | None
    spec_method: str | None
    spec_tokens: int | None


class LLM:
    """A model and the engine that runs it: in this process, or with `parallel` in shards that are Ray actors.

    model: folder, GGUF file, hub id, "smollm2", or the bundled "demo" or "demo-plain". Other options are those of
    `EngineConfig`; vLLM's names are taken, mapped or refused, see docs/guides/from_vllm.md. seed: `generate` and `chat`
    derive seeds from it for requests without one. With `parallel`, a running Ray or that of RAY_ADDRESS is used; else
    Ray is started on this machine. parallel="auto": the layout that `rayspec plan` recommends for the GPUs of that Ray,
    or of this machine; without GPUs, the model runs in this process.
    Raises ConfigError and CheckpointError; with `parallel` also PlacementError and UnsupportedModelError.

    `generate`, `chat` and `stream` may be called from any thread; requests of all calls run together. An exception in a
    call, such as KeyboardInterrupt, aborts the requests of that call only.
    """

    def __init__(self, model: str, *, seed: int | None = None, **options: Unpack[LLMKeywords]) -> None:
        self._seeds = None if seed is None else random.Random(seed)
        config = _config_of(demo.local_path(model), options)
        if (found := base_model(config.model)) is not None:  # the model is the folder of an adapter
            base, revision = found[0], config.revision or found[1]
            name = Path(config.model).resolve().name
            adapters = {**config.lora_modules, name: config.model}
            adapter = config.adapter or name
            if config.tokenizer is None and any(Path(config.model).glob("tokenizer.*")):
                config = config.replace(tokenizer=config.model)  # of training, with the chat template of its texts
            model = demo.local_path(base)
            config = config.replace(model=model, revision=revision, lora_modules=adapters, adapter=adapter)
        if options.get("parallel") == "auto":
            config = _laid_out(config)
        if config.tokenizer is not None:
            config = config.replace(tokenizer=demo.local_path(config.tokenizer, option="tokenizer"))
        self._resources = ExitStack()
        self.client: Client = EngineLoop(load_engine(config)) if config.parallel is None else self._with_ray(config)
        # A copy of a fast tokenizer, which keeps the settings of a call, such as truncation: the engine has its own.
        own = self.client.tokenizer
        self._tokenizer = copy.deepcopy(own) if own is not None and own.is_fast else own
        self._adapters = dict(config.lora_modules)  # loaded
        self._adapters_lock = threading.Lock()
        self._request_numbers = itertools.count(1)
        self._shutdown_lock = threading.RLock()
        self._is_shut_down = False
        # Else the thread would keep the model in memory, and shards would go on to serve.
        self._end = weakref.finalize(self, self.client.shutdown)

    @property
    def config(self) -> EngineConfig:
        """The options in force, defaults resolved."""
        return self.client.info.config

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    @property
    def engine(self) -> Engine:
        """The engine that this process runs. Raises ConfigError for several replicas, which are in other processes."""
        if self.client.engine is None:
            raise ConfigError("the engines of several replicas are in other processes: use `client`, or replicas=1")
        return self.client.engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """A tokenizer for the caller's use. `chat` uses its chat template."""
        assert self._tokenizer is not None
        return self._tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with the remedy for what vLLM's class has and this class has not."""
            reason = f"is not here: {METHODS[name]}" if name in METHODS else "is unknown"
            raise AttributeError(f"LLM.{name} {reason}")

    def __reduce__(self) -> str:
        raise TypeError("an LLM holds a model and threads, so it cannot be pickled: make one in each process")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | ProgressBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, {"prompt_token_ids": [...]}, or lists of token ids. Arrays and tensors count as
        lists. Outputs come in the order of the prompts.

        sampling_params: one for all prompts or one for each; None: the checkpoint's, see `default_sampling_params`.
        use_tqdm: show a progress bar if standard error is a terminal; or a callable that makes the bar, as tqdm does.
        lora_request: the adapter of all prompts, or one or None for each. An engine in this process loads a new one.
        unsupported: other arguments of vLLM, which are refused unless they ask for nothing.

        A prompt that cannot be completed yields an output with `error` set; the others are not affected. Raises
        ConfigError for other misuse, and EngineDeadError if `shutdown` is called meanwhile.
        """
        _refuse(unsupported)
        given: Any = _as_list(prompts)
        given = [given] if isinstance(given, str | Mapping) or _is_token_ids(given) else given
        if isinstance(given, bytes) or not isinstance(given, Iterable) or hasattr(given, "keys"):  # as a table has
            raise ConfigError(
                f"prompts is {reprlib.repr(given)}: give a text, {{'prompt_token_ids': [...]}}, or a list of these"
            )
        many = list(given)
        each = self._params_of(sampling_params, len(many))
        adapters = self._adapters_of(lora_request, len(many))
        asked = [self._request(prompt, one, adapter) for prompt, one, adapter in zip(many, each, adapters, strict=True)]
        return self._complete(asked, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the tokenizer's chat template or `chat_template`.

        add_generation_prompt: whether the prompt ends with the beginning of an answer. continue_final_message: the
        answer continues the last message. tools, chat_template_kwargs: for the template, which must know them. Other
        arguments and errors are as in `generate`. Raises ConfigError when the tokenizer has no chat template.
        """
        _refuse(unsupported)
        rendering = Rendering(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=chat_template,
            tools=tools,
            variables=chat_template_kwargs or {},
        )
        given: Any = messages
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise ConfigError(
                f"messages is {reprlib.repr(given)}: give a list of {{'role': 'user', 'content': 'text'}}, or a list "
                "of such lists"
            )
        many = list(given)
        many = [many] if many and isinstance(many[0], Mapping) else many
        asked: list[Request | RequestOutput] = []
        each, adapters = self._params_of(sampling_params, len(many)), self._adapters_of(lora_request, len(many))
        for conversation, params, adapter in zip(many, each, adapters, strict=True):
            try:
                token_ids = self.chat_tokens(conversation, rendering)
                asked.append(self._request({"prompt_token_ids": token_ids}, params, adapter))
            except RequestError as error:  # noqa: PERF203 - one bad conversation is one bad output
                asked.append(RequestOutput.refused(self._request(None, params), error))
        return self._complete(asked, use_tqdm)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none: the checkpoint's, its `max_new_tokens` included."""
        max_new_tokens = self.client.info.defaults.max_new_tokens
        return SamplingParams() if max_new_tokens is None else SamplingParams(max_tokens=max_new_tokens)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default_sampling_params

    def chat_tokens(self, messages: Sequence[Message], rendering: Rendering = _PLAINLY) -> list[int]:
        """Return the prompt tokens of a conversation. Raises InvalidMessagesError; ConfigError without a template."""
        if rendering.template is None:
            if not self.tokenizer.chat_template:
                raise ConfigError(f"the tokenizer of {self.config.model!r} has no chat template: use generate()")
            rendering = replace(rendering, template=chat_template(self.tokenizer, rendering.tools))
        assert self.client.tokenizer is not None
        return conversation_tokens(messages, self.client.tokenizer, rendering)

    def stream(self, requests: Iterable[Request]) -> Generator[RequestOutput, None, None]:
        """Run requests and yield each output when it finishes. No more requests are taken than keep the engine busy.

        Closing the generator aborts unfinished requests. Request ids are the caller's and need not be unique. Raises
        ConfigError for an object that is no request.
        """
        if self._is_shut_down:
            raise ConfigError(f"this LLM of {self.config.model!r} has been shut down: load the model again")
        if isinstance(requests, str | Mapping) or not isinstance(requests, Iterable):
            raise ConfigError(f"requests is {reprlib.repr(requests)}: give Request objects, or use generate()")
        return self._run(_checked(requests), at_once=len(requests) + 1 if isinstance(requests, Sequence) else 1)

    def shutdown(self) -> None:
        """Abort all requests and end the processes that hold the model, if there are any.

        Calls that are under way raise EngineDeadError, later ones ConfigError.
        """
        with self._shutdown_lock:
            self._is_shut_down = True
            self._end.detach()
            try:
                self.client.shutdown()
            finally:
                self._resources.close()

    def _with_ray(self, config: EngineConfig) -> Client:
        # Imported here, so that a model in one process never needs Ray.
        with naming_the_extra():
            from rayspec.pipeline.loading import load_pipeline  # noqa: PLC0415
            from rayspec.pool.replicas import Replicas  # noqa: PLC0415
            from rayspec.ray_session import ray_session, refuse_client  # noqa: PLC0415
            from rayspec.request_engine import RequestEngineFactory  # noqa: PLC0415

        client: Client
        logger.warning("starting processes for the model through Ray, which takes 15 s or more")
        with ExitStack() as resources:
            resources.enter_context(ray_session(config.parallel.num_cpus if config.parallel is not None else 0))
            if config.parallel is None or config.parallel.replicas == 1:
                client = EngineLoop(load_pipeline(config))
            else:
                refuse_client()
                client = Replicas(RequestEngineFactory(config), load_tokenizer(config))
            # At exit this hook runs before the hook of Ray, which was registered earlier.
            end = partial(_shut_down, weakref.ref(self))
            atexit.register(end)
            resources.callback(atexit.unregister, end)
            self._resources = resources.pop_all()
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _params_of(self, params: Any, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params
        if isinstance(params, SamplingParams):
            return [params] * count
        several = isinstance(params, Iterable) and not isinstance(params, str | bytes | Mapping)
        each = list(params) if several else [params]
        for one in each:
            if not isinstance(one, SamplingParams):
                raise ConfigError(
                    f"sampling_params has {reprlib.repr(one)}: give SamplingParams(...), or a list with one for each "
                    "prompt"
                )
        if len(each) != count:
            raise ConfigError(f"{len(each)} sampling params for {count} prompts: give one, or one for each")
        return each

    def _adapters_of(self, given: Any, count: int) -> list[str | None]:
        """Return the name of the adapter of each prompt, loaded."""
        several = isinstance(given, list | tuple)
        each = list(given) if several else [given] * count
        if len(each) != count or not all(one is None or isinstance(one, LoRARequest) for one in each):
            raise ConfigError(f"lora_request is {reprlib.repr(given)}: give one LoRARequest, or one or None a prompt")
        asked = [one for one in each if one is not None]
        for one in asked:
            if not (isinstance(one.lora_name, str) and isinstance(one.lora_path, str | Path)):
                raise ConfigError(f"lora_request is {reprlib.repr(one)}: lora_name and lora_path are texts")
        for one in dict.fromkeys(asked):
            with self._adapters_lock:
                known = self._adapters.get(one.lora_name)
                if known is None and one.lora_path:
                    load_adapter(self.client.engine, one.lora_name, one.lora_path)
                    self._adapters[one.lora_name] = one.lora_path
                elif known is not None and one.lora_path and Path(known).resolve() != Path(one.lora_path).resolve():
                    raise ConfigError(
                        f"adapter {one.lora_name!r} is {known!r}, not {one.lora_path!r}: name it otherwise"
                    )
        return [None if one is None else one.lora_name for one in each]

    def _request(self, prompt: Any, params: SamplingParams, adapter: str | None = None) -> Request:
        """Make a request from any value. The engine refuses a value that is no prompt."""
        name = f"request-{next(self._request_numbers)}"
        prompt = _as_list(prompt)
        if self._seeds is not None and params.seed is None:
            params = params.model_copy(update={"seed": self._seeds.getrandbits(63)})
        given: dict[str, Any] = {"prompt_token_ids" if _is_token_ids(prompt) else "prompt": prompt}
        if isinstance(prompt, Mapping):
            named = {key: value for key, value in prompt.items() if value is not None}
            given = named if named and named.keys() <= {"prompt", "prompt_token_ids"} else given
        return Request(request_id=name, params=params, adapter=adapter, **given)

    def _complete(self, asked: Sequence[Request | RequestOutput], use_tqdm: bool | ProgressBar) -> list[RequestOutput]:
        """Run the requests and return all outputs in the order of `asked`."""
        outputs = {one.request_id: one for one in asked if isinstance(one, RequestOutput)}
        bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=None if use_tqdm else True)
        with (
            closing(self.stream([one for one in asked if isinstance(one, Request)])) as stream,
            bar(total=len(asked), initial=len(outputs), desc="Processed prompts", unit="prompt") as shown,
        ):
            for output in stream:
                outputs[output.request_id] = output
                shown.update(1)
        return [outputs[one.request_id] for one in asked]

    def _run(self, source: Iterator[Request], *, at_once: int) -> Generator[RequestOutput, None, None]:
        """at_once: requests submitted together. With 1, each is submitted before the source is asked for the next."""
        # Receives the new output of streaming requests, and the futures that are done.
        arrived: queue.SimpleQueue[RequestOutput | Future[RequestOutput]] = queue.SimpleQueue()
        running: dict[Future[RequestOutput], Request] = {}
        try:
            while True:
                taken = list(itertools.islice(source, min(at_once, self.client.num_wanted - len(running))))
                try:
                    futures = self.client.submit_all(taken, arrived.put)
                except EngineDeadError as death:
                    if not isinstance(death.__cause__, StageLostError):
                        raise
                    yield from (RequestOutput.refused(request, death.__cause__) for request in taken)
                    continue
                running |= zip(futures, taken, strict=True)
                for future in futures:
                    future.add_done_callback(arrived.put)
                if not running:
                    return
                if taken and at_once == 1 and arrived.empty():
                    continue
                news = arrived.get()
                if isinstance(news, RequestOutput):
                    yield news
                    continue
                request, failure = running.pop(news), news.exception()
                if failure is None:
                    yield news.result()
                elif isinstance(failure.__cause__, StageLostError):
                    yield RequestOutput.refused(request, failure.__cause__)
                else:
                    raise failure.__cause__ or failure
        finally:
            for future in running:
                future.cancel()


def _unobserved() -> AbstractContextManager[Observe]:
    return nullcontext(lambda output: None)


class AsyncEngine:
    """The engine of an LLM, for coroutines: one engine loop runs all of them. client: says what the engine does, and
    whether it lives. client_name: of the requests, see `Request.client`. observing: gives what gets every output of a
    request, while the request runs."""

    def __init__(self, llm: LLM, observing: Callable[[], AbstractContextManager[Observe]] = _unobserved) -> None:
        self.llm, self._observing = llm, observing
        self.tokenizer: PreTrainedTokenizerBase = llm.tokenizer
        self.client = llm.client
        self._numbers = itertools.count()
        self._owner = self.client_name = ""
        self._adapter: str | None = None

    @property
    def max_model_len(self) -> int:
        """The most prompt and output tokens of a request together."""
        return self.client.info.max_model_len

    def owned_by(self, owner: str, client: str = "") -> Self:
        """Return the same engine for the requests of an owner and a client, see `Request`."""
        other = copy.copy(self)
        other._owner, other.client_name = owner, client
        return other

    def with_adapter(self, adapter: str) -> Self:
        """Return the same engine for requests with this adapter."""
        other = copy.copy(self)
        other._adapter = adapter
        return other

    async def run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, background: bool = False
    ) -> RequestOutput:
        """Run a request and return its finished output. An error of the request is in `error` of the output. Raises
        EngineDeadError. Cancelling the call aborts the request. background: other requests go first."""
        request = self._request(prompt_token_ids, params, background=background)
        with self._observing() as observe:
            output = await asyncio.wrap_future(self.client.submit(request))
            observe(output)
        return output

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output as it is generated, see RequestOutput. interval_s: outputs that follow each other faster are
        joined, see PieceQueue. Raises EngineDeadError. Closing the generator aborts the request."""
        pieces = PieceQueue(interval_s)
        with self._observing() as observe:
            future = self.client.submit(self._request(prompt_token_ids, params, stream=True), pieces.put)
            future.add_done_callback(pieces.end)
            try:
                async for piece in pieces.read():
                    observe(piece)
                    yield piece
            finally:
                future.cancel()

    def _request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, stream: bool = False, background: bool = False
    ) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            params=params,
            prompt_token_ids=prompt_token_ids,
            stream=stream,
            background=background,
            owner=self._owner,
            client=self.client_name,
            adapter=self._adapter,
        )


def _shut_down(llm: weakref.ref[LLM]) -> None:
    """Shut an LLM down at exit, if it still exists."""
    if (found := llm()) is not None:
        found.shutdown()


def _config_of(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the config of options, still without a layout for "auto"."""
    from_vllm(options, ENGINE, EngineConfig.model_fields)  # refuses "auto" with a number of ranks
    return EngineConfig(model=model, **{**options} | ({"parallel": None} if options.get("parallel") == "auto" else {}))


def _laid_out(config: EngineConfig) -> EngineConfig:
    with naming_the_extra():  # imported here, because only "auto" needs the planner
        from rayspec.ops.plan.auto import with_layout  # noqa: PLC0415

    return with_layout(config)


def _checked(requests: Iterable[Any]) -> Iterator[Request]:
    for request in requests:
        if not isinstance(request, Request):
            raise ConfigError(f"a request is {reprlib.repr(request)}: give a Request, or use generate()")
        if not isinstance(request.params, SamplingParams):
            raise ConfigError(f"the params of a request are {reprlib.repr(request.params)}: give SamplingParams(...)")
        for name in ("owner", "client"):
            if not isinstance(getattr(request, name), str):
                raise ConfigError(f"the {name} of a request is {reprlib.repr(getattr(request, name))}: give a text")
        yield request


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown arguments, and for those of vLLM's that ask for what is not supported."""
    for name in arguments:
        if name == "params":
            raise ConfigError("argument 'params' is called 'sampling_params', as in vLLM: rename it")
        if name not in CALLS:
            raise ConfigError(f"unknown argument {name!r}: leave it out")
    from_vllm(arguments, CALLS, ())


def _as_list(value: Any) -> Any:
    """Return the list of an array, a tensor or a column of a table; any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_token_ids(prompt: Any) -> bool:
    several = isinstance(prompt, list | tuple) and len(prompt) > 0
    return several and all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
