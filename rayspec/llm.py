"""The Python door: `LLM(...).generate(prompts, params)`, shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from rayspec import demo
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.loading import load_engine
from rayspec.decode.stages import StageLostError
from rayspec.types import ConfigError, EngineStats, Request, RequestError, RequestOutput

if TYPE_CHECKING:
    from rayspec.pipeline.replicas import Replicas

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model and the engine that runs it: in this process, or with `parallel` in shards that are Ray actors.

    model: local folder, hub id, or "demo" for the bundled model. Other options are those of `EngineConfig`. With
    `parallel`, Ray is used as it is running or as RAY_ADDRESS says, and started on this machine otherwise.
    Raises ConfigError and CheckpointError; with `parallel` also PlacementError and UnsupportedModelError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        path = demo.model_path() if model == "demo" else model
        config = EngineConfig(model=path, **options)
        self._resources = ExitStack()
        self.engine: Engine | Replicas = load_engine(config) if config.parallel is None else self._pipeline(config)
        self._num_requests = 0

    @property
    def config(self) -> EngineConfig:
        """The options in force, defaults resolved."""
        return self.engine.config

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, or {"prompt_token_ids": [...]}. Outputs come in the order of the prompts.

        A prompt that cannot be completed yields an output with `error` set; the others are not affected.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = self._params_of(params, len(many))
        requests = [self._request(prompt, one) for prompt, one in zip(many, each, strict=True)]
        outputs = {output.request_id: output for output in self.stream(requests)}
        return [outputs[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the tokenizer's chat template."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self.generate([{"prompt_token_ids": self.chat_tokens(one)} for one in many], params)  # type: ignore[arg-type]

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Prompt tokens of a conversation. Raises ConfigError when the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {self.config.model!r} has no chat template: use generate()")
        conversation = [dict(message) for message in messages]
        encoded: Any = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def stream(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Run requests as they come; yields each as it finishes. Takes no more of them than keep the engine busy."""
        engine, source = self.engine, iter(requests)
        exhausted = False
        while not exhausted or engine.has_unfinished:
            while not exhausted and engine.num_unfinished < engine.num_wanted:
                request = next(source, None)
                if request is None:
                    exhausted = True
                    break
                try:
                    engine.add(request)
                except (RequestError, StageLostError) as error:
                    yield RequestOutput.refused(request, error)
            yield from engine.step()

    def shutdown(self) -> None:
        """Abort what is running and end the processes that hold the model, where there are any."""
        self.engine.shutdown()
        self._resources.close()

    def _pipeline(self, config: EngineConfig) -> Engine | Replicas:
        # Imported here, so that a model in one process never needs Ray.
        from rayspec.pipeline.loading import load_replicas  # noqa: PLC0415
        from rayspec.pipeline.session import ray_session  # noqa: PLC0415

        with ExitStack() as resources:
            resources.enter_context(ray_session())
            engine = load_replicas(config)
            self._resources = resources.pop_all()
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        if isinstance(prompt, str):
            return Request(request_id=name, params=params, prompt=prompt)
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise ConfigError(f"a prompt has the key {min(unknown)!r}; give 'prompt' or 'prompt_token_ids'")
        return Request(
            request_id=name,
            params=params,
            prompt=prompt.get("prompt"),
            prompt_token_ids=prompt.get("prompt_token_ids"),
        )

    @staticmethod
    def _params_of(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ConfigError(f"{len(params)} sampling params for {count} prompts: give one, or one for each")
        return list(params)
