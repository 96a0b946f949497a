"""How the prompt, and the form of the output, make the model call the tools of a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayspec.forms.checker import drop_other_formats
from rayspec.openai.forms import Tool, schema_beside_tools
from rayspec.openai.parsers import HERMES, ArgumentTypes, CallParser, HarmonyParser, ToolFormat, format_of
from rayspec.openai.protocol import InvalidRequestError
from rayspec.openai.requests import ChatRequest
from rayspec.prompts import Rendering, chat_template
from rayspec.structured import END_OF_THINK, MAX_CHARACTERS, THINK, StructuredOutputsParams
from rayspec.types import ConfigError

# As most chat templates have it, and templates of transformers write JSON.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PARAMETER_END = "\n</parameter>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How the model is made to call the tools of a request. called: those that it may call. added: ids of added
    tokens, which are no text in a grammar. hidden: those that `skip_special_tokens` leaves out. is_known: the chat
    template describes tools; else a system message does. content: JSON schema of an output without calls; None: it is
    any text."""

    tools: Sequence[Tool]
    called: Sequence[Tool]
    form: ToolFormat
    is_forced: bool
    is_parallel: bool
    is_known: bool
    added: Mapping[str, int]
    hidden: Collection[str] = ()
    content: Mapping[str, Any] | None = None
    types: ArgumentTypes = field(default_factory=dict)  # which all choices share

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: Any, parser: str | None) -> ToolUse | None:
        """Return None for a request without calls. parser: name of the format. Raises InvalidRequestError where the
        model would not know what to write."""
        tools = request.tools
        choice: Any = request.tool_choice or "auto"
        if not tools or choice == "none":
            return None
        is_named = isinstance(choice, Mapping)
        try:
            template = request.rendering.template or chat_template(tokenizer, [tool.for_template for tool in tools])
        except ConfigError:
            template = ""
        is_known = "tools" in template
        form = format_of(template, parser)
        if choice == "auto" and (not is_known or form is None):
            obstacle = "does not describe tools" if not is_known else "asks for calls in a format that is not known"
            remedy = "" if not is_known else ", or start the server with --tool-call-parser"
            problem = f"the model's chat template {obstacle}: give tool_choice 'required' or a function{remedy}"
            raise InvalidRequestError.of("tools", problem, code="unsupported_parameter")
        # Templates of Llama 3 and gpt-oss take one call at a time.
        has_one = form is not None and (form.may_be_bare or form.has_channels)
        takes_one = is_named or (choice == "required" and has_one)
        tokens = tokenizer.added_tokens_decoder.items()
        return cls(
            tools=tools,
            called=[tool for tool in tools if not is_named or tool.function.name == choice["function"]["name"]],
            form=form or HERMES,
            is_forced=choice != "auto",
            is_parallel=request.parallel_tool_calls and not takes_one,
            is_known=is_known,
            added={str(token): number for number, token in tokens},
            hidden=[str(token) for _, token in tokens if token.special],
            content=None if request.form is None else schema_beside_tools(request.form[1]),
        )

    def parser(self) -> CallParser | HarmonyParser:
        if self.form.has_channels:
            return HarmonyParser(has_tools=True, is_parallel=self.is_parallel)
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in self.tools}
        options: Any = {"is_parallel": self.is_parallel, "is_forced": self.is_forced, "types": self.types}
        return CallParser(self.form, schemas, **options)

    def rendering(self, rendering: Rendering) -> Rendering:
        return replace(rendering, tools=[tool.for_template for tool in self.tools]) if self.is_known else rendering

    def messages(self, messages: Any) -> list[Mapping[str, Any]]:
        """Return the messages, with the tools in the system message if the chat template does not describe them."""
        if self.is_known:
            return list(messages)
        functions = "\n".join(json.dumps(tool.for_template, ensure_ascii=False) for tool in self.tools)
        call = f"{self.form.many_opens}{self.form.opens}{self.form.head}ARGUMENTS{self.form.tail}"
        call += f"{self.form.closes}{self.form.many_closes}"
        text = f"Answer with a call of these functions:\n{functions}\nWrite a call in this form:\n{call}"
        first = messages[0]
        if first["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that calls need. Raises InvalidRequestError for too many schemas."""
        marks = f"{self.form.begin}{self.form.many_opens}{self.form.head}{self.form.closes}"
        needed: dict[str, Any] = {}
        if any(token in marks for token in self.hidden) and not self.form.may_be_bare:
            needed["skip_special_tokens"] = False  # they divide the text
        if self.is_forced or self.content is not None or any(tool.function.strict for tool in self.called):
            try:
                needed["structured_outputs"] = StructuredOutputsParams(grammar=self._grammar())
            except ConfigError as error:
                raise InvalidRequestError.of("tools", str(error).removeprefix("structured_outputs: ")) from None
        return needed

    def _grammar(self) -> str:
        """Return the grammar of outputs in Lark's syntax: calls, or any text with calls in it. Raises ConfigError
        for one that is too long."""
        form, rules, num_characters = self.form, ["%llguidance {}", r"TEXT: /(.|\n)*/"], 0
        for at, tool in enumerate(self.called):
            head = form.head.replace("NAME", tool.function.name)
            rules.append(f"call_{at}: {self._literal(head)} arguments_{at} {self._literal(form.tail)}")
            for rule in self._rules_of_arguments(at, tool.function.schema_of_arguments):
                num_characters += len(rule)
                if num_characters > MAX_CHARACTERS:  # each argument may have all the definitions that its schema shares
                    raise ConfigError(f"the grammar of the calls has more than {MAX_CHARACTERS} characters: shorten it")
                rules.append(rule)
        one = " | ".join(f"call_{at}" for at in range(len(self.called)))
        rules.append(f"call: {self._literal(form.opens)} ({one}) {self._literal(form.closes)}")
        more = f"({self._literal(form.between)} call)*" if self.is_parallel else ""
        rules.append(f"calls: {self._literal(form.many_opens)} call {more} {self._literal(form.many_closes)}")
        if self.content is not None:
            rules.append(f"content: {_json_rule(self.content)}")
        if self.is_forced:
            rules.append("start: calls")
        elif form.has_channels:
            content = "TEXT" if self.content is None else "content"
            channel, message = self._literal("<|channel|>"), self._literal("<|message|>")
            end = self._literal("<|end|><|start|>assistant")
            rules.append(f"thought: {channel} /analysis|commentary/ {message} TEXT {end}")
            rules.append(f'start: thought* (calls | {channel} "final" {message} {content})')
        elif self.content is not None:
            rules.append("start: calls | content")
        elif form.may_be_bare:
            rules += [f"start: {self._thought} (calls | OTHER)", r"OTHER: /\s*([^\s{](.|\n)*)?/"]
        else:
            after = self._literal((form.many_opens + form.opens).removeprefix(form.begin))
            many = more if form.many_opens else ""
            begin = f"TEXT {self._literal(form.begin)}"
            rules += ["begun: " + begin] if form.begin in self.added else ["begun[lazy]: " + begin]
            closes = f"{self._literal(form.closes)} {many} {self._literal(form.many_closes)}"
            found = f"found{'*' if self.is_parallel else '?'}"
            rules += [f"found: begun {after} ({one}) {closes}", f"start: {self._thought} {found} TEXT"]
        return "\n".join(rules)

    @property
    def _thought(self) -> str:
        """The rule of reasoning before any text, whose marks are no text in a grammar where they are tokens. The prompt
        may have begun it; where calls begin with text, that would let any text through."""
        if not {THINK, END_OF_THINK} <= self.added.keys():
            return ""
        begun = "?" if self.form.begin in self.added and not self.form.may_be_bare else ""
        return f"(<[{self.added[THINK]}]>{begun} TEXT <[{self.added[END_OF_THINK]}]>)?"

    def _rules_of_arguments(self, at: int, schema: Mapping[str, Any]) -> Iterator[str]:
        name = f"arguments_{at}"
        if not self.form.has_tags:
            yield f"{name}: {_json_rule(schema)}"
            return
        parts = []
        for number, (key, value) in enumerate(dict(schema.get("properties", {})).items()):
            part, end = f"{name}_{number}", json.dumps(_PARAMETER_END)
            parts.append(part if key in schema.get("required", ()) else f"{part}?")
            yield f"{part}: {json.dumps(f'<parameter={key}>{chr(10)}')} {part}_value"
            own = value if isinstance(value, Mapping) else {}
            choices = own.get("enum")
            if own.get("type") != "string":
                shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                yield f"{part}_value: {part}_json {end}\n{part}_json: {_json_rule({**shared, **own})}"
            elif isinstance(choices, list) and all(isinstance(one, str) for one in choices):
                yield f"{part}_value: ({' | '.join(map(json.dumps, choices))}) {end}"
            else:
                yield f"{part}_value[lazy]: TEXT {end}"
        yield f"{name}: {' '.join(parts)}"

    def _literal(self, text: str) -> str:
        """Return a text in Lark's syntax, with its added tokens as such."""
        found = sorted((token for token in self.added if token in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        return " ".join(f"<[{self.added[part]}]>" if part in self.added else json.dumps(part) for part in parts if part)


def _json_rule(schema: Mapping[str, Any]) -> str:
    own = json.loads(json.dumps({**schema, "x-guidance": _ONE_LINE}))
    drop_other_formats(own)
    return f"%json {json.dumps(own)}"
