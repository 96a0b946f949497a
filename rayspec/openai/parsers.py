"""The formats in which models write tool calls and reasoning, and the parsers that find both in a text that arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayspec.structured import END_OF_THINK, THINK

_MOST_HEAD = 4096  # characters before the arguments of a call
_MOST_ODD = 16_384  # of a call that does not begin with its name, or has no arguments
_SPACE = " \t\r\n"
_MOST_AT_ONCE = 4096  # characters that are searched again after each call and each false beginning of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes calls. name: vLLM's name of its parser. signs: texts of the chat templates that ask for it.

    begin: what calls begin with. opens, closes: around each call; many_opens, many_closes: around all of them. between:
    two calls. head: before the arguments; the name replaces "NAME". tail: after the arguments. may_be_bare: the output
    may also begin with the call itself. has_short_ids: its chat templates take ids of 9 characters only.
    """

    name: str
    signs: tuple[str, ...]
    begin: str
    opens: str = ""
    closes: str = ""
    many_opens: str = ""
    many_closes: str = ""
    between: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    may_be_bare: bool = False
    has_short_ids: bool = False

    @property
    def has_tags(self) -> bool:
        """Whether each argument has a tag of its own; else the arguments are JSON."""
        return self.head.startswith("<function=")

    @property
    def has_channels(self) -> bool:
        """Whether a call is a message to a function, as in gpt-oss' format; see HarmonyParser."""
        return self.name == "openai"

    @property
    def is_named(self) -> bool:
        """Whether a call begins with the name of its function."""
        return self.head.startswith("NAME")


_TAGS: dict[str, Any] = {"begin": "<tool_call>", "opens": "<tool_call>\n", "closes": "\n</tool_call>", "between": "\n"}
# The first whose signs are all in the chat template.
FORMATS: Sequence[ToolFormat] = (
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        opens="[TOOL_CALLS]",
        head="NAME[ARGS]",
        tail="",
        has_short_ids=True,
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        many_opens="[TOOL_CALLS][",
        many_closes="]",
        between=", ",
        has_short_ids=True,
    ),
    ToolFormat(
        name="qwen3_coder",
        signs=("<tool_call>", "<function=", "<parameter="),
        **_TAGS,
        head="<function=NAME>\n",
        tail="</function>",
    ),
    ToolFormat(name="hermes", signs=("<tool_call>",), **_TAGS),
    ToolFormat(
        name="llama3_json",
        signs=("<|start_header_id|>", '"parameters": '),
        begin="<|python_tag|>",
        between="; ",
        head='{"name": "NAME", "parameters": ',
        may_be_bare=True,
    ),
    ToolFormat(
        name="openai",
        signs=("<|channel|>", "<|message|>", "functions."),
        begin="<|channel|>",
        head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        tail="",
    ),
)
HERMES = FORMATS[3]
_OF_OTHERS = ("<arg_key>", "<tool_calls>")  # tags of GLM and Apriel, whose templates have <tool_call>, too


def format_of(template: str, name: str | None) -> ToolFormat | None:
    """Return the format that a chat template asks for, if it is a known one. name: of the format, in its place."""
    if name is None and any(tag in template for tag in _OF_OTHERS):
        return None
    named = [one for one in FORMATS if name in (None, one.name)]
    found = [one for one in named if all(sign in template for sign in one.signs)]
    return found[0] if found else named[-1] if name is not None else None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New output of a call. index: of the call. name: in its first piece. arguments: text of JSON, to be joined."""

    index: int
    name: str | None
    arguments: str


ArgumentTypes = dict[tuple[str, str], set[str] | None]
"""The types that its schema names, by a function and its argument; None: the argument is text."""

Steps = Generator[None, None, bool]
"""A part of a parse: it yields where it needs more text, and returns whether it found what it looks for."""

_JSON_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_NAME_HEAD = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_PART_OF_NAME_HEAD = re.compile(r"[\w.-]+(?:\[[A-Z_]*(?:\]\w*)?){0,2}\s*")
_TAG_HEAD = re.compile(r"<function=(?P<name>[^>\s]+)>")
_TAG = "<function="
_PART_OF_TAG_HEAD = re.compile(rf"{_TAG}[^>\s]*")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^>\s]+)>(?P<value>.*?)</parameter>", re.DOTALL)
_JSON = json.JSONDecoder(strict=False)


class CallParser:
    """Divides an output into content and calls. The pieces join to the same result however the text is cut.

    Spaces around calls are no content. A text that begins like a call and is no call is content. schemas: the JSON
    schema of each function's arguments, by its name. is_parallel: if not, calls after the first are dropped. is_forced:
    a grammar allows calls only, so the text that belongs to none is the begin of a call that has no end; it is dropped.
    types: those of arguments, as far as the parsers that share it have read them: a schema may be long.
    """

    def __init__(
        self,
        form: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        is_parallel: bool,
        is_forced: bool = False,
        types: ArgumentTypes | None = None,
    ) -> None:
        self.num_calls = 0
        self._form, self._schemas, self._is_parallel, self._is_forced = form, schemas, is_parallel, is_forced
        self._types = {} if types is None else types
        self._rest, self._is_last = "", False  # the text that belongs to no piece yet, and whether no more follows
        self._pieces: list[str | CallPiece] = []
        self._has_content = False
        self._begins = (form.begin, _TAG) if form.has_tags else (form.begin,)  # Qwen3-Coder may leave out the first
        self._steps = self._output()

    def feed(self, text: str, *, finished: bool) -> list[str | CallPiece]:
        """Add new text. Return the new content, as texts, and the new pieces of calls."""
        for start in range(0, len(text), _MOST_AT_ONCE):
            self._rest += text[start : start + _MOST_AT_ONCE]
            next(self._steps, None)
        if finished:
            self._is_last = True
            next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _output(self) -> Steps:
        while (yield from self._begin()):
            while (yield from self._call()) and (yield from self._another()):
                pass
        return False

    def _begin(self) -> Steps:
        """Show the content before a call. The rest then begins with the call, or with spaces before it."""
        while True:
            text = self._rest.lstrip(_SPACE)
            is_bare = self._form.may_be_bare and not self._has_content and not self.num_calls
            if is_bare and text.startswith("{"):
                return True
            if found := [at for begin in self._begins if (at := self._rest.find(begin)) >= 0]:
                self._show(len(self._rest[: min(found)].rstrip(_SPACE)))
                return True
            if self._is_last:
                self._show(len(self._rest) if text or not self.num_calls else 0)
                return False
            num_begun = _num_begun(self._rest, self._begins)
            self._show(len(self._rest[: len(self._rest) - num_begun].rstrip(_SPACE)))
            yield

    def _call(self) -> Steps:
        """Read a call, with what it begins with. False if it is none; then the text is content."""
        space = len(self._rest) - len(self._rest.lstrip(_SPACE))
        mark = space + self._rest.startswith(self._form.begin, space) * len(self._form.begin)
        while True:
            body = self._rest[mark:].lstrip(_SPACE + "[")
            pattern = _JSON_HEAD if body.startswith("{") else _NAME_HEAD if self._form.is_named else _TAG_HEAD
            if (match := pattern.match(body, 0, _MOST_HEAD)) is not None:
                name = _decoded(match["name"]) if pattern is _JSON_HEAD else match["name"]
                is_marked = pattern is not _TAG_HEAD or mark > space  # else the text may be about functions
                if name is not None and self._may_be_called(name) and (is_marked or name in self._schemas):
                    self._add(name, "")
                    self._rest = body[match.end() :]
                    if pattern is _TAG_HEAD:
                        return (yield from self._tagged(name))
                    yield from self._arguments(is_enclosed=pattern is _JSON_HEAD)
                    return True
            elif pattern is _JSON_HEAD and self._is_odd_call(body):
                return True
            most = _MOST_ODD if pattern is _JSON_HEAD else _MOST_HEAD
            if match is not None or self._is_last or len(self._rest) - mark > most or not self._may_begin(body):
                self._show(max(space + 1, mark))
                return False
            yield

    def _is_odd_call(self, body: str) -> bool:
        """Read a whole call in JSON whose fields have another order."""
        try:
            call, end = _JSON.raw_decode(body[:_MOST_ODD])
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return False
        if not isinstance(name, str) or not self._may_be_called(name):
            return False
        self._add(name, text)
        self._rest = body[end:]
        return True

    def _may_begin(self, body: str) -> bool:
        if self._form.is_named and _PART_OF_NAME_HEAD.fullmatch(body):
            return True
        if not body or body.startswith("{"):
            return True
        return not self._form.is_named and (_TAG.startswith(body) or _PART_OF_TAG_HEAD.fullmatch(body) is not None)

    def _may_be_called(self, name: str) -> bool:
        return name in self._schemas or not self._form.may_be_bare

    def _arguments(self, *, is_enclosed: bool) -> Steps:
        """Show the object that comes next. is_enclosed: it is a field of an object, whose rest is dropped."""
        depth, is_text, is_escaped, is_shown = 0, False, False, True
        while True:
            start = at = 0
            for at, sign in enumerate(self._rest, start=1):
                if is_text:
                    is_text = is_escaped or sign != '"'
                    is_escaped = sign == "\\" and not is_escaped
                elif sign == '"':
                    is_text = True
                elif sign in "{[":
                    depth += 1
                elif sign in "}]":
                    depth -= 1
                    if depth == 0 and is_shown:
                        self._add(None, self._rest[start:at])
                        start, is_shown = at, False
                    if depth < 0 or (depth == 0 and not is_enclosed):
                        self._rest = self._rest[at:]
                        return True
                elif sign in "<;" and depth == 0 and not is_shown:  # what follows a call whose last bracket is missing
                    self._rest = self._rest[at - 1 :]
                    return True
            if is_shown and at > start:
                self._add(None, self._rest[start:at])
            self._rest = ""
            if self._is_last:
                return False
            yield

    def _tagged(self, function: str) -> Steps:
        """Show the arguments that come next, each in a tag of its own."""
        num_shown = 0
        while True:
            # The search for the end comes first, because it is much faster than the pattern on a long value.
            while "</parameter>" in self._rest and (match := _PARAMETER.match(self._rest)) is not None:
                name, value = match["name"], match["value"].removeprefix("\n").removesuffix("\n")
                if (function, name) not in self._types:
                    self._types[function, name] = _types_of_argument(self._schemas.get(function, {}), name)
                text = f"{json.dumps(name, ensure_ascii=False)}: {_as_json(value, self._types[function, name])}"
                self._add(None, f"{', ' if num_shown else '{'}{text}")
                self._rest, num_shown = self._rest[match.end() :], num_shown + 1
            text = self._rest.lstrip(_SPACE)
            if text == "</function>" or not (_begins("<parameter=", text) or "</function>".startswith(text)):
                self._add(None, "}" if num_shown else "{}")
                self._rest = text.removeprefix("</function>")
                return True
            if self._is_last:
                self._rest = ""
                return False
            yield

    def _another(self) -> Steps:
        """Drop what follows a call, and return whether another call comes at once."""
        end, drops = self._form.closes.strip(), _SPACE + self._form.many_closes + self._form.between
        while True:
            self._rest = self._rest.lstrip(drops)
            if end and self._rest.startswith(end):
                self._rest = self._rest[len(end) :]
                return False
            if self._rest and not end.startswith(self._rest):
                return self._rest.startswith("{")
            if self._is_last:
                self._rest = ""
                return False
            yield

    def _show(self, num_characters: int) -> None:
        if num_characters:
            if not self._is_forced:
                self._pieces.append(self._rest[:num_characters])
            self._rest, self._has_content = self._rest[num_characters:], True

    def _add(self, name: str | None, arguments: str) -> None:
        self.num_calls += name is not None
        if self._is_parallel or self.num_calls == 1:
            self._pieces.append(CallPiece(self.num_calls - 1, name and _spelled(name), _spelled(arguments)))


def _spelled(text: str) -> str:
    """Return a text of JSON with half of a surrogate pair as JSON spells it, because UTF-8 has none."""
    return text.encode(errors="backslashreplace").decode()


def _decoded(name: str) -> str | None:
    """Return the name that stands in JSON, None if it is none. Some models write an underscore as in Markdown."""
    try:
        found = str(json.loads(name.replace("\\_", "_"), strict=False))
        found.encode()
    except ValueError:  # an escape that JSON does not know, or half a character
        return None
    return found


def _begins(sign: str, text: str) -> bool:
    return text.startswith(sign) or sign.startswith(text)


def _as_json(value: str, types: set[str] | None) -> str:
    """Return the JSON of an argument that stands in a tag. Text is JSON if it is valid, unless its schema is for texts
    and for no such value. types: see `ArgumentTypes`."""
    if types is not None:
        try:
            found = json.loads(_OF_PYTHON.get(value, value) if types else value)
            if "string" not in types or types & _TYPES[type(found)]:
                return json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)


_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write them, and so models
_TYPES: Mapping[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
    str: {"string"},
}


def _types_of_argument(schema: Mapping[str, Any], name: str) -> set[str] | None:
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    return None if isinstance(own, Mapping) and own.get("type") == "string" else _types(own)


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema names, also as one of several."""
    if not isinstance(schema, Mapping):
        return set()
    named, found = schema.get("type"), set[str]()
    for one in named if isinstance(named, list) else [named]:
        found |= {one} if isinstance(one, str) else set()
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        found = found.union(*map(_types, several if isinstance(several, list) else ()))
    return found


HARMONY = "openai_gptoss"
_SIGNS_OF_HARMONY = ("<|channel|>", "<|message|>")
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?: ?to=(?P<first>[^\s<]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<second>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_HEADS = ("<|start|>", "<|channel|>", " to=", "to=", "assistant<|channel|>", "assistant to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MOST_HEADER = 256  # characters


@dataclass(frozen=True, slots=True)
class Thought:
    """New text of the reasoning."""

    text: str


Piece = str | CallPiece | Thought


def reasoning_style(template: str, name: str | None) -> str | None:
    """Return the style of the reasoning in outputs; None: it is not found. name: vLLM's name of the parser; None: only
    what the chat template shows to be gpt-oss' format."""
    return HARMONY if name is None and all(sign in template for sign in _SIGNS_OF_HARMONY) else name


class ThinkParser:
    """Finds reasoning in <think> and </think>. make_rest: makes the parser of what follows; None: it is content.
    is_inside: the prompt ended with <think>. Spaces around the reasoning belong to nothing."""

    def __init__(self, make_rest: Callable[[], CallParser | HarmonyParser] | None, *, is_inside: bool) -> None:
        self._rest = make_rest() if make_rest is not None else None
        self._held, self._has_thought = "", False
        self._at: Literal["begin", "inside", "between", "after"] = "inside" if is_inside else "begin"

    def feed(self, text: str, *, finished: bool) -> Sequence[Piece]:
        pieces: list[Piece] = []
        self._held += text
        if self._at == "begin":
            begun = self._held.lstrip(_SPACE)
            if begun.startswith(THINK):
                self._held, self._at = begun[len(THINK) :], "inside"
            elif finished or not THINK.startswith(begun):
                self._at = "after"
        if self._at == "inside":
            thought, mark, rest = self._held.partition(END_OF_THINK)
            if not mark and not finished:
                thought = thought[: len(thought) - _num_begun(thought, (END_OF_THINK,))]
            thought = thought.rstrip(_SPACE) if self._has_thought else thought.strip(_SPACE)
            if thought:
                pieces.append(Thought(thought))
                self._has_thought = True
            self._held = rest if mark else self._held[self._held.find(thought) + len(thought) :]
            self._at = "between" if mark else "inside"
        if self._at == "between":
            self._held = self._held.lstrip(_SPACE)
            self._at = "after" if self._held or finished else "between"
        if self._at == "after":
            rest, self._held = self._held, ""
            pieces += self._rest.feed(rest, finished=finished) if self._rest is not None else [rest]
        return pieces


class HarmonyParser:
    """Finds the messages in the format of gpt-oss. The analysis is reasoning, and so is what is sent to other tools
    than functions. What has no header is content. has_tools: messages to functions are calls. is_parallel: as in
    CallParser."""

    def __init__(self, *, has_tools: bool, is_parallel: bool) -> None:
        self.num_calls = 0
        self._has_tools, self._is_parallel = has_tools, is_parallel
        self._held, self._break = "", ""
        self._kind: Literal["content", "call", "thought"] | None = None
        self._shown: set[str] = set()

    def feed(self, text: str, *, finished: bool) -> Sequence[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            if self._kind is None:
                if not self._begin(pieces):
                    break
                continue
            end = _END.search(self._held)
            if end is None:
                num_shown = len(self._held) - (0 if finished else _num_begun(self._held, _ENDS))
                self._show(self._held[:num_shown], pieces)
                self._held = self._held[num_shown:]
                break
            self._show(self._held[: end.start()], pieces)
            self._held = self._held[end.start() if end[0] in _HEADS else end.end() :]
            self._kind = None
        return pieces

    def _begin(self, pieces: list[Piece]) -> bool:
        """Read the header of a message. False if it has not come yet."""
        match = _HEADER.match(self._held, 0, _MOST_HEADER)
        if match is None:
            may_begin = any(self._held.startswith(sign) or sign.startswith(self._held) for sign in _HEADS)
            if may_begin and len(self._held) < _MOST_HEADER:
                return False
            self._kind, self._break = "content", ""
            self._show(self._held[0], pieces)
            self._held = self._held[1:]
            return True
        self._held = self._held[match.end() :]
        recipient = match["first"] or match["second"] or ""
        name = recipient.removeprefix("functions.")
        if self._has_tools and name != recipient:
            self._kind = "call"
            self.num_calls += 1
            if self._is_parallel or self.num_calls == 1:
                pieces.append(CallPiece(self.num_calls - 1, name, ""))
            return True
        is_shown = match["channel"] == "final" or (match["channel"] == "commentary" and not recipient)
        self._kind = "content" if is_shown else "thought"
        self._break = "\n\n" if self._kind in self._shown else ""
        return True

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not text or self._kind is None:
            return
        if self._kind == "call":
            if self._is_parallel or self.num_calls == 1:
                pieces.append(CallPiece(self.num_calls - 1, None, text))
            return
        text, self._break = self._break + text, ""
        self._shown.add(self._kind)
        pieces.append(text if self._kind == "content" else Thought(text))


def _num_begun(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of the text may begin a mark."""
    return max(num for mark in marks for num in range(len(mark)) if text.endswith(mark[:num]))


OutputParser = CallParser | HarmonyParser | ThinkParser
"""Divides an output into content, calls and reasoning; the results do not depend on where the text is cut."""
