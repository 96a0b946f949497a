"""OpenAI's Responses API: a body becomes a chat request, and its answer becomes items, as a whole or as events."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from msgspec import UNSET
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.errors import RequestError
from rayspec.openai.protocol import InvalidRequestError, Refusals, StrictBody
from rayspec.openai.requests import ONLY_TIER, ChatRequest
from rayspec.openai.responses import Answer, StreamEvent, Usage
from rayspec.types import RequestOutput

# Names of the chat request, each with its name here. Errors of the chat request are reported by the latter.
_HERE = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_STORED = ("previous_response_id", "conversation")
_LOGPROBS = "message.output_text.logprobs"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_NEW: Mapping[str, Mapping[str, Any]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}
_FIXED = {"object": "response", "error": None, "previous_response_id": None, "store": False, "truncation": "disabled"}
_OF_BODY = ("instructions", "max_output_tokens", "metadata", "top_logprobs")
_MOST_REPEATED = 2**20  # characters of the fields that a response repeats, and a stream of events three times
_ROLES = ("system", "developer", "user", "assistant")
_invalid = InvalidRequestError.of
_OF_TEXT = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ReasoningOptions(StrictBody):
    ignored = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: str | None = None


class TextOptions(StrictBody):
    refused: ClassVar[Refusals] = {"verbosity": ("medium",)}

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


class ResponsesBody(StrictBody):
    """The body of /v1/responses. Fields beyond these are those of ChatRequest, such as `temperature` and `seed`."""

    model_config = pydantic.ConfigDict(extra="allow")
    refused: ClassVar[Refusals] = {
        "asked": (),  # a name of ResponsesRequest
        "background": (False,),
        "context_management": ([],),
        "max_tool_calls": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "return_token_ids": (False,),
        "service_tier": ONLY_TIER,
        "truncation": ("disabled",),
    }
    ignored = (ChatRequest.ignored | {"stream_options"}) - {"metadata"}

    model: str
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Objects = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)
    ] = Field(default_factory=list)
    top_logprobs: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _small(self) -> Self:
        lengths = {
            "instructions": len(self.instructions or ""),
            "metadata": sum(len(name) + len(value) for name, value in self.metadata.items()),
            "text": len(repr(self.text)),
        }
        for name, length in lengths.items():
            if length > _MOST_REPEATED:
                problem = f"{length} characters; at most {_MOST_REPEATED} here, shorten it"
                raise PydanticCustomError("invalid_value", "{problem}", {"field": name, "problem": problem})
        return self

    @classmethod
    def _takes_effect(cls, name: str, value: Any) -> bool:
        if name in _HERE or name in _STORED:
            stored = "nothing is stored here; send the earlier input and output again, as input"
            remedy = f"unknown field; did you mean {_HERE[name]!r}?" if name in _HERE else stored
            raise PydanticCustomError("unsupported_parameter", "{remedy}", {"field": name, "remedy": remedy})
        is_own = name in {*cls.model_fields, *cls.refused, *cls.ignored}
        return super()._takes_effect(name, value) if is_own else True  # the chat request knows it, or refuses it

    def chat(self) -> dict[str, Any]:
        """Return the chat request. Raises InvalidRequestError."""
        for at, tool in enumerate(self.tools):
            if tool.get("type") != "function":
                problem = f"{tool.get('type')!r}: the server runs no tools; give functions, and run them yourself"
                raise _invalid(f"tools.{at}.type", problem)
        form, choice = self.text.format, self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = _nested(choice, "function")
        return {
            **(self.model_extra or {}),
            "model": self.model,
            "messages": [message for message, _ in self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _nested(form, "json_schema") if form.get("type") == "json_schema" else form,
            "reasoning_effort": self.reasoning.effort,
            "tools": [_nested(tool, "function") for tool in self.tools],
            "tool_choice": choice,
            "logprobs": _LOGPROBS in self.include or self.top_logprobs is not None,
            "top_logprobs": self.top_logprobs,
        }

    def messages(self) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Return the input as messages, each with the places in the body from which its fields are. The items of an
        answer are of one message: reasoning, text, and calls. Raises InvalidRequestError."""
        messages: list[tuple[dict[str, Any], dict[str, str]]] = []
        if self.instructions is not None:
            messages.append(({"role": "system", "content": self.instructions}, {"content": "instructions"}))
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for at, item in enumerate(items):
            place, kind = f"input.{at}", item.get("type", "message" if "role" in item else None)
            if kind == "message":
                if item.get("role") not in _ROLES:
                    raise _invalid(f"{place}.role", f"it is {item.get('role')!r}; give one of {', '.join(_ROLES)}")
                message = {"role": item.get("role"), "content": _content(item, "content", place)}
            elif kind == "function_call":
                function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
                call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
                message = {"role": "assistant", "tool_calls": [call]}
            elif kind == "function_call_output":
                message = {"role": "tool", "tool_call_id": _text(item, "call_id", place)}
                message["content"] = _content(item, "output", place)
            elif kind == "reasoning":
                parts = [_content(item, name, place) for name in ("content", "summary") if name in item]
                text = "\n".join(part["text"] for part in itertools.chain(*parts))
                if not text:  # it has another server's encrypted content
                    continue
                message = {"role": "assistant", "reasoning_content": text}
            else:
                remedy = "nothing is stored here; send the item itself" if kind == "item_reference" else "leave it out"
                raise _invalid(f"{place}.type", f"{kind!r}: not supported here; {remedy}")
            last, places = messages[-1] if messages else ({}, {})
            found = dict.fromkeys(message, "input" if isinstance(self.input, str) else place)
            may_join = kind == "function_call" or (kind == "message" and last.keys() == {"role", "reasoning_content"})
            if may_join and last.get("role") == message["role"] == "assistant":
                calls = last.setdefault("tool_calls", [])
                calls += message.pop("tool_calls", ())  # in place: thousands of calls may follow each other
                last |= message
                places |= found | places
            else:
                messages.append((message, found))
        return messages


def _content(item: Mapping[str, Any], name: str, place: str) -> Any:
    parts, found = item.get(name), []
    if isinstance(parts, str) and item.get("type") != "reasoning":
        return parts
    if not isinstance(parts, list):
        raise _invalid(f"{place}.{name}", "give a text, or a list of parts with text")
    for at, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _OF_TEXT:
            raise _invalid(f"{place}.{name}.{at}.type", f"{kind!r}: not supported here; give parts with text only")
        text = _text(part, "refusal" if kind == "refusal" else "text", f"{place}.{name}.{at}")
        found.append({"type": "text", "text": text})
    return found


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    if not isinstance(item.get(name), str):
        raise _invalid(f"{place}.{name}", "it must be text")
    return str(item[name])


def _nested(flat: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object in the form of chat requests, where all fields but the type are in an object of their own."""
    return {"type": flat["type"], name: {key: value for key, value in flat.items() if key != "type"}}


def _by_own_names(error: RequestError, asked: ResponsesBody) -> RequestError:
    """Return an error of the chat request with the names of the body."""
    if not isinstance(error, InvalidRequestError) or error.param is None:
        return error
    param = error.param.replace(".function", "") if error.param.startswith("tools.") else error.param
    if (of_message := re.match(r"messages\.(\d+)(?:\.(\w+))?", param)) is not None:
        param = asked.messages()[int(of_message[1])][1].get(of_message[2] or "role", "input")
    there = next((name for name in _HERE if param == name or param.startswith(f"{name}.")), "")
    param = _HERE.get(there, "") + param[len(there) :]
    message = str(error).replace(error.param, param, 1).replace('"function": {"name": ...}', '"name": ...')
    return InvalidRequestError(message, param=param, code=error.code, status=error.status)


class ResponsesRequest(ChatRequest):
    """The chat request of a body of /v1/responses. asked: the body."""

    asked: pydantic.SkipValidation[ResponsesBody]

    @classmethod
    def parse(cls, body: object) -> Self:
        asked = ResponsesBody.parse(body)
        try:
            return super().parse(asked.chat() | {"asked": asked})
        except InvalidRequestError as error:
            raise _by_own_names(error, asked) from None

    def by_own_names(self, error: RequestError) -> RequestError:
        return _by_own_names(super().by_own_names(error), self.asked)


class ItemAnswer(Answer):
    """Makes the response from that of the chat request: items, and the events that build them."""

    end_of_events = b""  # as OpenAI's: the last event has the whole response

    def __init__(self, request: ResponsesRequest, *args: Any, **options: Any) -> None:
        super().__init__(request, *args, **options)
        self._asked, self._of_chat = request.asked, request
        self._items: list[dict[str, Any]] = []
        self._parts: list[str] = []  # of the last item's text
        self._logprobs: list[Any] = []
        self._held: list[Any] = []  # log-probabilities of tokens whose text has not come
        self._is_open, self._status, self._num_events = False, "in_progress", 0

    def whole(self, outputs: Sequence[RequestOutput]) -> StreamEvent:
        chat: Any = super().whole(outputs)
        list(self._added(chat.choices[0], chat.choices[0].message))
        return self._response(chat.usage)

    def chunks(self, prompt_index: int, piece: RequestOutput) -> Iterator[StreamEvent]:
        if not self._num_events:
            yield self._event("created", response=self._response(None))
            yield self._event("in_progress", response=self._response(None))
        chunks: Iterator[Any] = super().chunks(prompt_index, piece)
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            yield from self._added(choice, choice.delta)

    def end(self) -> Iterator[StreamEvent]:
        usage = self._usage(self._latest.values(), self._num_output_tokens)
        yield self._event(self._status, response=self._response(usage))

    def _added(self, choice: Any, text: Any) -> Iterator[StreamEvent]:
        self._held += choice.logprobs.content if choice.logprobs is not None else []
        if text.reasoning is not UNSET:
            yield from self._grow("reasoning", text.reasoning)
        if text.content:
            yield from self._grow("message", text.content, self._held)
            self._held = []
        for call in text.tool_calls or ():
            new = {"call_id": call.id, "name": call.function.name} if call.id is not UNSET else {}
            yield from self._grow("function_call", call.function.arguments, **new)
        if choice.finish_reason is not None:
            self._status = "incomplete" if choice.finish_reason == "length" else "completed"
            if not self._items or (self._held and self._items[-1]["type"] == "message"):
                yield from self._grow("message", "", self._held)
            yield from self._close(self._status)

    def _grow(self, kind: str, delta: str, logprobs: Sequence[Any] = (), **new: Any) -> Iterator[StreamEvent]:
        """Add text to the last item, or to a new one of the kind. new: fields of a call that begins."""
        if not self._is_open or new or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            item = {"type": kind, "id": f"{_PREFIXES[kind]}_{self._name}_{len(self._items)}", "status": "in_progress"}
            self._items.append({**item, **_NEW[kind], **new})
            self._parts, self._logprobs, self._is_open = [], [], True
            yield self._event("output_item.added", item=dict(self._items[-1]))
            if kind in _PARTS:
                yield self._event("content_part.added", part=self._part(kind))
        self._parts.append(delta)
        self._logprobs += logprobs
        if delta or logprobs:
            more = {"logprobs": list(logprobs)} if kind == "message" else {}
            yield self._event(f"{_PARTS.get(kind, 'function_call_arguments')}.delta", delta=delta, **more)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        kind, item["status"], text = item["type"], status, "".join(self._parts)
        if kind in _PARTS:
            item["content"] = [self._part(kind)]
            more = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._event(f"{_PARTS[kind]}.done", text=text, **more)
            yield self._event("content_part.done", part=item["content"][0])
        else:
            item["arguments"] = text
            yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
        yield self._event("output_item.done", item=item)

    def _part(self, kind: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": list(self._logprobs)} if kind == "message" else {}
        return {"type": _PARTS[kind], "text": "".join(self._parts), **more}

    def _event(self, kind: str, /, **fields: Any) -> StreamEvent:
        place: dict[str, Any] = {}
        if "response" not in fields:
            place = {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"], "content_index": 0}
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **place, **fields}

    def _response(self, usage: Usage | None) -> StreamEvent:
        """Return the response so far. usage: None while the answer grows."""
        asked, status = self._asked, "in_progress" if usage is None else self._status
        body: dict[str, Any] = {"id": f"resp_{self._name}", "created_at": self._created, "model": self._model, **_FIXED}
        body |= {name: getattr(asked, name) for name in _OF_BODY}
        body |= {name: getattr(self._of_chat, name) for name in ("parallel_tool_calls", "temperature", "top_p")}
        body |= {"reasoning": asked.reasoning.model_dump(), "text": {"format": asked.text.format}}
        body |= {"tool_choice": asked.tool_choice or "auto", "status": status, "output": [], "usage": None}
        body["tools"] = [{"parameters": None, "strict": None, **tool} for tool in asked.tools]
        body["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if usage is not None:
            cached, thought = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
            counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
            details = {"input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0}}
            details |= {"output_tokens_details": {"reasoning_tokens": thought.reasoning_tokens if thought else 0}}
            body |= {"output": self._items, "usage": {**counts, **details, "total_tokens": usage.total_tokens}}
        return body
