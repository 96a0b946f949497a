"""Request bodies, and their conversion to prompts and sampling parameters. The extras are vLLM's."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self, TypeIs

from rayspec.config import SamplingParams
from rayspec.openai.forms import MOST_TOOLS, Tool, asked_form, check_tools, read_choice, schema_beside_tools
from rayspec.openai.protocol import InvalidRequestError, Refusals, StrictBody, invalid, utf8_length
from rayspec.prompts import InvalidMessageError, Rendering, read_message, truncated
from rayspec.structured import FORMS, StructuredOutputsParams
from rayspec.types import ConfigError, GrammarError, PromptTooLongError, RequestError, Role

_MAX_LOGPROBS = 20
# OpenAI has n 128, 4 stop strings, 2,048 messages. A larger request is refused before it costs anything.
MAX_N = 128
_MAX_PROMPTS = 1024
_MAX_SEQUENCES = 1024
_MAX_MESSAGES = 2048
_BYTES_OF_MESSAGE = 200  # names, and what a template adds
_MAX_STOP_STRINGS, _MAX_STOP_CHARACTERS = 16, 1000
_MAX_TOKENS_NAMED = 1024
_MAX_ALLOWED_TOKENS = 2**19  # of all sequences: the engine's thread reads them for each, more than any vocabulary
_MOST_ITEMS_OF_CHAT = _MAX_ALLOWED_TOKENS + 100_000  # a million items of messages take more than a second
_MAX_BAD_BYTES = 2**13  # the engine's thread tokenizes them, and compares the end of the text with them

_PLAINLY = Rendering()
ONLY_TIER = ("auto", "default")  # OpenAI's other tiers guarantee a price or a speed

Name = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(max_length=_MAX_STOP_CHARACTERS)]
Input = str | list[int] | list[dict[str, Any]]
"""A prompt: a text, token ids, or a conversation for the chat template."""


def is_token_ids(prompt: Input) -> TypeIs[list[int]]:
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], Mapping))


def _few_tokens(named: Any) -> Any:
    """Refuse many tokens at once: pydantic would collect an error for each of them."""
    if isinstance(named, dict | list) and len(named) > _MAX_TOKENS_NAMED:
        raise PydanticCustomError("invalid_value", f"{len(named)} tokens; at most {_MAX_TOKENS_NAMED} here")
    return named


FewTokens = pydantic.BeforeValidator(_few_tokens)


class ChatMessage(StrictBody):
    """A message of a conversation, as `read_message` returns it. Fields beyond these are for the chat template, which
    the engine asks whether it knows them. content: also a list of text parts, which line breaks join."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: Role
    content: str | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, body: Any) -> Any:
        try:
            return read_message(body)
        except InvalidMessageError as error:
            field = error.field.partition(".")[2]
            raise PydanticCustomError(error.code, "{problem}", {"problem": error.problem, "field": field}) from None

    @property
    def for_template(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True)
        return {"role": given.pop("role"), "content": self.content} | given

    @property
    def num_bytes(self) -> int:
        """About how many bytes a chat template makes of it; an empty message has some, too."""
        rest = utf8_length(repr((self.tool_calls, self.model_extra))) if self.tool_calls or self.model_extra else 0
        return utf8_length(self.content or "") + rest + _BYTES_OF_MESSAGE


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
Conversation = Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]


def bytes_of_template(messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, variables: Any) -> int:
    """Return about how many bytes a chat template makes of a conversation. It may repeat variables for each message."""
    others = sum(utf8_length(repr(tool)) for tool in tools or ()) + utf8_length(repr(variables)) * len(messages)
    return sum(message.num_bytes for message in messages) + others


def rendering_of(
    add_generation_prompt: bool | None, continue_final_message: bool, variables: Mapping[str, Any] | None
) -> Rendering:
    """Return how the chat template makes the prompt. Raises PydanticCustomError for what excludes each other."""
    if continue_final_message and add_generation_prompt is not False:
        raise invalid("continue_final_message", "give add_generation_prompt: false, too")
    return Rendering(
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=continue_final_message,
        variables=variables or {},
    )


class StreamOptions(StrictBody):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _usage_is_included(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise invalid("continuous_usage_stats", "only with include_usage: true")
        return self


# Fields of vLLM's that take no effect here, with the values that its clients send for "nothing".
_OF_VLLM: Refusals = {
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


class GenerationRequest(StrictBody):
    """The parameters of both endpoints. A parameter that is None has its default, which is the checkpoint's if it has
    one; see SamplingParams for limits."""

    ignored = frozenset(
        {
            "guided_decoding_backend",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "store",
            "user",
        }
    )

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Annotated[list[Stop], Field(max_length=_MAX_STOP_STRINGS, fail_fast=True)] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FewTokens] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], FewTokens] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=256, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=_MAX_ALLOWED_TOKENS, fail_fast=True)] | None = None
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    use_drafts: bool | None = Field(None, description=SamplingParams.model_fields["use_drafts"].description)
    prompt_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options", "only with stream: true")
        if self.stream and self.num_prompt_logprobs is not None:
            field = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            raise invalid(field, "a stream has no log-probabilities of the prompt: give stream: false")
        self.form  # noqa: B018 - raises
        count = self.num_sequences
        if count > _MAX_SEQUENCES:
            raise invalid("n", f"{count} sequences (prompts times n); at most {_MAX_SEQUENCES}, split the request")
        if (num_allowed := len(self.allowed_token_ids or ())) * count > _MAX_ALLOWED_TOKENS:
            of_each = f"{num_allowed} tokens for each of {count} sequences"
            raise invalid("allowed_token_ids", f"{of_each}; at most {_MAX_ALLOWED_TOKENS} in all, split the request")
        if (num_bad := sum(map(utf8_length, self.bad_words or ()))) > _MAX_BAD_BYTES:
            raise invalid("bad_words", f"{num_bad} bytes; at most {_MAX_BAD_BYTES} here, shorten them")
        return self

    @property
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}

    @property
    def form(self) -> tuple[str, StructuredOutputsParams] | None:
        """The form that the body asks its output to have, with the field that has it. Raises PydanticCustomError."""
        return asked_form(self._given)

    def by_own_names(self, error: RequestError) -> RequestError:
        """Return an error by the names that this body has."""
        return self.refusal(error) if isinstance(error, GrammarError) else error

    def refusal(self, error: GrammarError) -> RequestError:
        """Return the error of the output's form by the name that this body has for the form."""
        if self.form is None:
            return error
        field, place = self.form[0], str(error).removeprefix("structured_outputs")
        for name in FORMS:
            place = place.removeprefix(f".{name}")
        return InvalidRequestError(f"{field}{place}", param=field, code="invalid_value")

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * (self.n or 1)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to report for each token of a prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def rendering(self) -> Rendering:
        return _PLAINLY

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report for each chosen token; None: no log-probabilities."""

    @abstractmethod
    def _asked_tokens(self, room: int) -> int:
        """Return the most tokens to generate. room: the number for a request that may fill the context."""

    def num_output_tokens(self, num_prompt_tokens: int, max_model_len: int, max_new_tokens: int | None = None) -> int:
        """Return the most tokens to generate for a prompt of that many tokens. Raises PromptTooLongError if prompt and
        output together exceed the context, as OpenAI does. max_new_tokens: the checkpoint's default."""
        room = max(1, max_model_len - num_prompt_tokens)
        num_output_tokens = self._asked_tokens(min(room, max_new_tokens or room))
        if num_prompt_tokens + num_output_tokens > max_model_len:
            raise PromptTooLongError(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in the prompt, "
                f"{num_output_tokens} in the completion). Please reduce the length of the prompt or completion."
            )
        return num_output_tokens

    def cut(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Return the end of a prompt, if the request asks for that."""
        return truncated(token_ids, self.truncate_prompt_tokens, max_model_len, self._asked_tokens(0))

    def sampling_params(self, num_output_tokens: int, needed: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return the parameters for at most so many output tokens. needed: those that go before the body's. Raises
        InvalidRequestError for a value that SamplingParams refuses."""
        asked = {name: value for name, value in self._given.items() if name in SamplingParams.model_fields}
        form = self.form
        own: dict[str, Any] = {"logprobs": self.num_logprobs, "prompt_logprobs": self.num_prompt_logprobs}
        own |= {"max_tokens": num_output_tokens, "structured_outputs": form and form[1], **(needed or {})}
        try:
            return SamplingParams(**asked | own)
        except ConfigError as error:
            named = (word for word in re.findall(r"\w+", str(error)) if word in asked)
            raise InvalidRequestError(str(error), param=next(named, None), code="invalid_value") from None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions. Without a limit, its own or the checkpoint's, the answer may fill the context.
    If both are given, `max_completion_tokens`, OpenAI's newer name, takes precedence over `max_tokens`, as in vLLM."""

    refused: ClassVar[Refusals] = {
        **_OF_VLLM,
        "add_special_tokens": (False,),
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "return_spec_decode_metrics": (False,),
        "service_tier": ONLY_TIER,
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    most_items = _MOST_ITEMS_OF_CHAT
    messages: Conversation
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    tools: Tools | None = None
    tool_choice: Annotated[Any, pydantic.BeforeValidator(read_choice)] = None
    parallel_tool_calls: bool = True

    @property
    def rendering(self) -> Rendering:
        """How the chat template makes the prompt."""
        effort = {} if self.reasoning_effort in (None, "none") else {"reasoning_effort": self.reasoning_effort}
        variables = {**(self.chat_template_kwargs or {}), **effort}
        return rendering_of(self.add_generation_prompt, self.continue_final_message, variables)

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        self.rendering  # noqa: B018 - raises
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "only with logprobs: true")
        check_tools(self.tools or ())
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, Mapping) and (name := self.tool_choice["function"]["name"]) not in names:
            raise invalid("tool_choice", f"tools have no function {name!r}")
        if self.tool_choice == "required" and not names:
            raise invalid("tool_choice", "only with tools")
        form = self.form
        if names and self.tool_choice != "none" and form is not None and schema_beside_tools(form[1]) is None:
            raise invalid(form[0], "tools are given, too: give a JSON schema only, or tool_choice 'none'")
        return self

    def refusal(self, error: GrammarError) -> RequestError:
        if self.tools and self.tool_choice != "none":
            form = self.form
            problem = str(error).removeprefix("structured_outputs").removeprefix(".grammar").removeprefix(": ")
            names = "tools" if form is None else f"tools, or {form[0]}"
            return InvalidRequestError(f"{names}: {problem}", param="tools", code="invalid_value")
        return super().refusal(error)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that must be tokenized, here and in CompletionRequest."""
        return bytes_of_template(self.messages, self.tools, self.rendering.variables)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _asked_tokens(self, room: int) -> int:
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return room if asked is None else asked

    @property
    def prompts(self) -> Sequence[Input]:
        return [[message.for_template for message in self.messages]]


TokenIds = Annotated[list[int], Field(fail_fast=True)]
_FEW_PROMPTS = Field(max_length=_MAX_PROMPTS, fail_fast=True)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions: one prompt or several, each as text or as token ids."""

    refused: ClassVar[Refusals] = {
        **_OF_VLLM,
        "add_special_tokens": (True,),
        "return_spec_decode_metrics": (False,),
        "service_tier": ONLY_TIER,
        "suffix": ("",),
    }

    prompt: str | TokenIds | Annotated[list[str], _FEW_PROMPTS] | Annotated[list[TokenIds], _FEW_PROMPTS]
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _prompt_or_prompts(cls, prompt: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        if isinstance(prompt, list) and len(prompt) > _MAX_PROMPTS and not isinstance(prompt[0], int):
            message = f"{len(prompt)} prompts; at most {_MAX_PROMPTS} here, split the request"
            raise PydanticCustomError("invalid_value", message)
        try:
            valid = validate(prompt)
        except pydantic.ValidationError:
            valid = []
        if valid == []:
            raise PydanticCustomError("invalid_value", "it must be text, token ids, or a list of texts or of token ids")
        return valid

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of", "only as many as n are generated: leave it out")
        return self

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_bytes(self) -> int:
        return sum(utf8_length(one) for one in self.prompts if isinstance(one, str))

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is generated, as evaluation harnesses ask for to get the log-probabilities of a prompt."""
        return self.echo and self.max_tokens == 0

    def sampling_params(self, num_output_tokens: int, needed: Mapping[str, Any] | None = None) -> SamplingParams:
        # The engine always chooses a token, which the answer then leaves out.
        return super().sampling_params(1 if self.only_echoes else num_output_tokens, needed)

    def _asked_tokens(self, room: int) -> int:
        default: int = SamplingParams.model_fields["max_tokens"].default
        return min(default, room) if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> Sequence[Input]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


Request = ChatRequest | CompletionRequest


def check_served(model: str, served: Sequence[str]) -> None:
    """Check the model's name. served: the names that requests may use. Raises InvalidRequestError."""
    if model not in served:
        message = f"The model {model!r} does not exist; served here: {', '.join(map(repr, served))}."
        raise InvalidRequestError(message, param="model", code="model_not_found", status=404)
