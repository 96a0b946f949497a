"""OpenAI's Responses API: a body becomes a chat request, and its answer becomes items, as a whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import pydantic
from msgspec import UNSET
from pydantic import Field
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rayspec.errors import GrammarError, RequestError
from rayspec.openai.errors import InvalidRequestError
from rayspec.openai.requests import ONLY_TIER, ChatRequest
from rayspec.openai.responses import Answer, ChatChoice, ChatCompletion, ItemResponse, ItemUsage, StreamEvent, Usage
from rayspec.openai.strict_body import Refusals, StrictBody
from rayspec.types import RequestOutput

# Names of the chat request, each with its name here. Errors of the chat request are told by the latter.
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
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is never encrypted here
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


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
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    include: list[str] = Field(default_factory=list)
    top_logprobs: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def _takes_effect(cls, name: str, value: Any) -> bool:
        if name in _STORED:
            remedy = "nothing is stored here; send the earlier input and output again, as input"
            raise PydanticCustomError("unsupported_parameter", "{remedy}", {"field": name, "remedy": remedy})
        if name in _HERE:
            raise PydanticCustomError(
                "unknown_parameter", "unknown field; did you mean '{near}'?", {"field": name, "near": _HERE[name]}
            )
        if name in {*cls.model_fields, *cls.refused, *cls.ignored}:
            return super()._takes_effect(name, value)
        return True  # the chat request knows it, or refuses it

    def chat(self) -> dict[str, Any]:
        """Return the chat request. Raises InvalidRequestError."""
        for at, name in enumerate(self.include):
            if name not in _INCLUDED:
                raise _invalid(f"include.{at}", f"it is {name!r}; give {' or '.join(map(repr, _INCLUDED))}")
        form = dict(self.text.format)
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
        has_logprobs = _LOGPROBS in self.include or self.top_logprobs is not None
        given = {
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form,
            "reasoning_effort": self.reasoning.effort,
            "tools": [_tool(tool, f"tools.{at}") for at, tool in enumerate(self.tools)],
            "tool_choice": self._tool_choice(),
            "logprobs": has_logprobs or None,
            "top_logprobs": self.top_logprobs,
        }
        return {**(self.model_extra or {}), "messages": self._messages(), **given}

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not self.tools and choice == "auto":
            return None
        if isinstance(choice, dict) and choice.get("type") == "function":
            return {"type": "function", "function": {key: choice[key] for key in choice if key != "type"}}
        return choice

    def _messages(self) -> list[dict[str, Any]]:
        """Return the input as messages. Calls that follow each other, or an assistant's text, are of one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        thought: dict[str, Any] = {}
        may_join = False  # whether the last message is an assistant's, of the same answer
        for at, item in enumerate(items):
            place, kind = f"input.{at}", item.get("type", "message" if "role" in item else None)
            if kind == "reasoning":
                parts = [part for key in ("content", "summary") for part in _parts(item.get(key, []), f"{place}.{key}")]
                thought, may_join = {"reasoning_content": "\n".join(part["text"] for part in parts)}, False
            elif kind == "function_call":
                function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
                if not may_join:
                    messages.append({"role": "assistant", **thought})
                call = {"id": _text(item, "call_id", place), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
                thought, may_join = {}, True
            elif kind == "function_call_output":
                content = _content(item.get("output"), f"{place}.output")
                messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content})
                thought, may_join = {}, False
            elif kind == "message":
                may_join = item.get("role") == "assistant"
                content = _content(item.get("content"), f"{place}.content")
                messages.append({"role": item.get("role"), "content": content, **(thought if may_join else {})})
                thought = {}
            else:
                is_stored = kind == "item_reference"
                problem = "nothing is stored here; send the item itself" if is_stored else "not supported here"
                raise _invalid(f"{place}.type", f"{kind!r}: {problem}", "unsupported_parameter")
        return messages


def _content(content: Any, place: str) -> Any:
    """Return text, or parts, in the form of chat messages."""
    return content if isinstance(content, str) else _parts(content, place)


def _parts(parts: Any, place: str) -> list[dict[str, str]]:
    if not isinstance(parts, list):
        raise _invalid(place, "give a text, or a list of parts with text")
    found = []
    for at, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            problem = f"{kind!r}: not supported here; give parts with text only"
            raise _invalid(f"{place}.{at}.type", problem, "unsupported_parameter")
        found.append({"type": "text", "text": _text(part, "refusal" if kind == "refusal" else "text", f"{place}.{at}")})
    return found


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise _invalid(f"{place}.{name}", "it must be text")
    return text


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        problem = f"{tool.get('type')!r}: the server runs no tools; give functions, and run them yourself"
        raise _invalid(f"{place}.type", problem, "unsupported_parameter")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _invalid(param: str, problem: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}", param=param, code=code)


def _told_here(error: RequestError) -> RequestError:
    """Return an error of the chat request with the names of this body."""
    if not isinstance(error, InvalidRequestError) or error.param is None:
        return error
    param = error.param.replace(".function", "") if error.param.startswith("tools.") else error.param
    there = next((name for name in _HERE if param == name or param.startswith(f"{name}.")), "")
    param = _HERE.get(there, "") + param[len(there) :]
    message = str(error).replace(error.param, param, 1)
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
            raise _told_here(error) from None

    def refusal(self, error: GrammarError) -> RequestError:
        return _told_here(super().refusal(error))


class ItemAnswer(Answer):
    """Makes the response from that of the chat request: items, and the events that build them."""

    end_of_events = b""  # as OpenAI's: the last event has the whole response

    def __init__(self, request: ResponsesRequest, *args: Any, **options: Any) -> None:
        super().__init__(request, *args, **options)
        self._asked, self._of_chat = request.asked, request
        self._items: list[dict[str, Any]] = []
        self._texts_of_item: list[str] = []
        self._is_open, self._is_cut, self._num_events = False, False, 0

    def whole(self, outputs: Sequence[RequestOutput]) -> ItemResponse:
        chat: Any = super().whole(outputs)
        for _ in self._added(chat.choices[0], chat.choices[0].message):
            pass
        return self._response(chat.usage)

    def chunks(self, prompt_index: int, piece: RequestOutput) -> Iterator[StreamEvent]:
        if not self._num_events:
            yield self._event("created", response=self._response(None))
            yield self._event("in_progress", response=self._response(None))
        for chunk in super().chunks(prompt_index, piece):
            assert isinstance(chunk, ChatCompletion)
            for choice in chunk.choices:
                yield from self._added(choice, choice.delta)

    def end(self) -> Iterator[StreamEvent]:
        usage = self._usage(self._latest.values(), self._num_output_tokens)
        yield self._event("incomplete" if self._is_cut else "completed", response=self._response(usage))

    def _added(self, choice: ChatChoice, text: Any) -> Iterator[StreamEvent]:
        """Yield the events of new output of the chat."""
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        if text.reasoning is not UNSET:
            yield from self._grow("reasoning", text.reasoning)
        if text.content or (logprobs and text.content is not UNSET):
            yield from self._grow("message", text.content, logprobs=logprobs)
        for call in text.tool_calls or ():
            begun = call.id is not UNSET
            new = {"call_id": call.id, "name": call.function.name} if begun else {}
            yield from self._grow("function_call", call.function.arguments, **new)
        if choice.finish_reason is not None:
            self._is_cut = choice.finish_reason == "length"
            if not self._items:
                yield from self._grow("message", "")
            yield from self._close("incomplete" if self._is_cut else "completed")

    def _grow(self, kind: str, delta: str, logprobs: Sequence[Any] = (), **new: Any) -> Iterator[StreamEvent]:
        """Add text to the last item, or to a new one of the kind. new: fields of a call that begins."""
        if not self._is_open or new or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, new)
        item, place = self._items[-1], self._place
        self._texts_of_item.append(delta)
        if kind == "function_call":
            if delta:
                yield self._event("function_call_arguments.delta", **place, delta=delta)
            return
        more: dict[str, Any] = {}
        if kind == "message":
            item["content"][0]["logprobs"].extend(logprobs)
            more = {"logprobs": list(logprobs)}
        if delta or logprobs:
            yield self._event(f"{_PARTS[kind]}.delta", **place, content_index=0, delta=delta, **more)

    def _open(self, kind: str, new: Mapping[str, Any]) -> Iterator[StreamEvent]:
        item = {"type": kind, "id": f"{_PREFIXES[kind]}_{self._name}_{len(self._items)}", "status": "in_progress"}
        more: dict[str, Any] = {"arguments": "", **new}
        if kind != "function_call":
            more = {"content": [], **({"role": "assistant"} if kind == "message" else {"summary": []})}
        self._items.append(item | more)
        self._texts_of_item, self._is_open = [], True
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=item | more)
        if kind != "function_call":
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            lists = ("annotations", "logprobs") if kind == "message" else ()
            self._items[-1]["content"] = [part | {name: [] for name in lists}]
            shown = part | {name: [] for name in lists}  # the item's own grows before the event is encoded
            yield self._event("content_part.added", **self._place, content_index=0, part=shown)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        item, text, self._is_open = self._items[-1], "".join(self._texts_of_item), False
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", **self._place, name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"{part['type']}.done", **self._place, content_index=0, text=text, **more)
            yield self._event("content_part.done", **self._place, content_index=0, part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, /, **fields: Any) -> StreamEvent:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}

    def _response(self, usage: Usage | None) -> ItemResponse:
        """Return the response so far. usage: None while the answer grows."""
        asked, chat = self._asked, self._of_chat
        status: Any = "in_progress" if usage is None else "incomplete" if self._is_cut else "completed"
        return ItemResponse(
            id=f"resp_{self._name}",
            created_at=self._created,
            model=self._model,
            output=[] if usage is None else self._items,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata,
            parallel_tool_calls=chat.parallel_tool_calls,
            reasoning={"effort": asked.reasoning.effort, "summary": None},
            temperature=chat.temperature,
            text={"format": asked.text.format},
            tool_choice=asked.tool_choice,
            tools=[{"parameters": None, "strict": None, **tool} for tool in asked.tools],
            top_logprobs=asked.top_logprobs,
            top_p=chat.top_p,
            usage=None if usage is None else ItemUsage.of(usage),
        )
