"""Compiles forms as a process of its own, before the engine's process does: a form of some lines may take all memory,
or end the process that compiles it. The process runs this file, and so it imports nothing of rayspec.

Each line of its input is a form and its seconds, as JSON; each form is compiled by a copy of the process, with limits.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an extra
    from llguidance import LLParserLimits

QUICK_S, MOST_S = 0.2, 5  # of a core
_MOST_BYTES = 64 * 2**20
_STACK_BYTES = 2**20  # half of what threads have at least, so that the engine's process has enough
_MAX_ITEMS = 10_000  # of llguidance's parser at a place of the text; a property that may be left out needs four
_FUEL, _FUEL_OF_CHARACTER = 100_000, 4  # expressions that a form may grow to; a million of c{240000} take 100 MB
_MAX_CHARACTERS = 600  # of an error, which may quote the form
_MAX_SCHEMAS = 200  # that are compiled to find the place of an error
_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"  # as people write JSON; without a limit, some models write nothing else
_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords of JSON schema whose value has a schema in each field, and those whose value is a schema or a list of some.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
# Those of JSON Schema. Any other describes a value and forbids none, as "int32" of OpenAPI, or "path" of pydantic.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
_SAID = {
    "NoExtensionBias": "no text has this form: a part of it matches nothing, as the regex [^\\s\\S] does, or a $ref, "
    "or a rule of a grammar, leads to itself and to nothing else",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": "oneOf is "
    "supported only where no value has two of its forms: write anyOf",
    "lexer error: too many expressions constructed": "too many expressions constructed: make its repetitions shorter",
}
# In Lark's syntax: texts, expressions and comments, which are left as they are, and tokens by their ids or names.
_TOKENS = re.compile(r'"(?:[^"\\\n]|\\.)*"|(?://|#)[^\n]*|/(?:[^/\\]|\\.)+/|<(\[\^)?[^<>\n]+>')
_TOO_HARD = f"it takes more than {MOST_S} s or {_MOST_BYTES >> 20} MiB to compile, or is nested too deeply: simplify it"


class FormChecker:
    """The processes that compile forms, one for each thread that asks. They end with this object."""

    def __init__(self) -> None:
        self._own = threading.local()

    def grammar(self, form: Mapping[str, Any], most_s: float = MOST_S) -> tuple[str, int]:
        """Return a form as llguidance reads it, and about how many bytes it takes when it is compiled. form: the fields
        of StructuredOutputsParams, and the `marks` of `_after_reasoning`. Raises ValueError for a form that cannot be
        compiled, within limits of time, memory and depth; its message begins with the place of the problem in a JSON
        schema, as ".properties.age: ". Raises TimeoutError for a form that may take longer than `most_s`, of at most
        `MOST_S`."""
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            program = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
            process = self._own.process = subprocess.Popen(  # noqa: S603 - this file
                [sys.executable, "-c", program, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # others would count as memory of the form
            )
            weakref.finalize(self, _end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([form, most_s]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._own.process = None  # its end may not be known yet
            raise OSError("the process that compiles forms has ended: try again")
        found = json.loads(line)
        if found["problem"] == _TOO_HARD and most_s < MOST_S:
            raise TimeoutError(_TOO_HARD)
        if found["problem"]:
            raise ValueError(f"{found['place']}: {found['problem']}")
        return found["grammar"], found["num_bytes"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process. In a copy of the process that started it, by a fork, only close its pipes."""
    with suppress(BrokenPipeError), process:  # does not wait for the end of its output, which a copy would never see
        process.kill()


def parser_limits(grammar: str) -> LLParserLimits:
    """Return the limits of a form, as llguidance reads it: what it may cost is in proportion to its length."""
    from llguidance import LLParserLimits  # noqa: PLC0415

    fuel = min(_FUEL + _FUEL_OF_CHARACTER * len(grammar), LLParserLimits().initial_lexer_fuel)
    return LLParserLimits(max_items_in_row=_MAX_ITEMS, initial_lexer_fuel=fuel)


def without_state(problem: str) -> str:
    """Return what llguidance says, without its dump of the state."""
    problem = problem.partition("\n<state>")[0].strip()[:_MAX_CHARACTERS]
    return _SAID.get(problem, problem)


def main() -> None:
    # Signals to a group do not end it. In a session of its own, Linux would give it as much time as the whole server.
    os.setpgid(0, 0)
    import llguidance  # noqa: F401, PLC0415 - loaded once, for all copies

    for line in sys.stdin.buffer:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                form, most_s = json.loads(line)
                _check(form, most_s, writing)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as results:
            found = results.read().splitlines()  # first without the place of a problem, which may not be found in time
        os.waitpid(pid, 0)
        problem = json.dumps({"problem": _TOO_HARD, "place": ""}).encode()
        sys.stdout.buffer.write((found[-1] if found else problem) + b"\n")
        sys.stdout.buffer.flush()


def _check(form: dict[str, Any], most_s: float, results: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, most_s)  # its signal ends the process
    limits = {resource.RLIMIT_CPU: int(most_s) + 1, resource.RLIMIT_CORE: 0}  # the first for an ignored signal
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = num_bytes + _STACK_BYTES + _MOST_BYTES
    for name, most in limits.items():
        resource.setrlimit(name, (most, most))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(form, most_s, results))
    thread.start()
    thread.join()


def _compile(form: dict[str, Any], most_s: float, results: int) -> None:
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415

    def tell(**found: Any) -> None:
        with os.fdopen(os.dup(results), "wb") as file:
            file.write(json.dumps(found).encode() + b"\n")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        grammar = _after_reasoning(_grammar_of(form), form["reasoning"], form["marks"])
        checked = json.dumps({"grammars": list(map(_with_one_token, _parts(grammar)))})
        matcher = LLMatcher(LLTokenizer("byte"), checked, log_level=0, limits=parser_limits(grammar))
        problem = without_state(matcher.get_error())
    except MemoryError:
        return
    except BaseException as error:  # noqa: BLE001 - a grammar in no known syntax, or a panic of llguidance
        problem = without_state(str(error))
    if problem:
        if form["json"] is None or most_s == MOST_S:  # else there is more time for the place
            tell(problem=problem, place="")
        if form["json"] is not None:
            tell(problem=problem, place=_place_of(json.loads(form["json"]), problem))
    else:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        tell(problem="", grammar=grammar, num_bytes=1024 * max(0, grown))


def _grammar_of(form: dict[str, Any]) -> str:
    """Return the form as llguidance reads it. Raises ValueError for a grammar in no known syntax."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    if form["regex"] is not None:
        return LLMatcher.grammar_from_regex(form["regex"])
    if form["choice"] is not None:
        # One terminal, not one rule for each: there may be thousands.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, form["choice"])))
    if form["grammar"] is not None:
        return grammar_from("grammar", form["grammar"])
    schema = {"type": "object"} if form["json"] is None else json.loads(form["json"])
    drop_other_formats(schema)
    if form["disable_additional_properties"]:
        _close(schema)
    space: Any = {"whitespace_pattern": form["whitespace_pattern"] or _WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=_ONE_LINE if form["disable_any_whitespace"] else space)


def _after_reasoning(grammar: str, reasoning: str | None, marks: Mapping[str, int]) -> str:
    """Return the grammar of reasoning and then the form. reasoning: as in StructuredOutputsParams. marks: the tokens
    around reasoning that the tokenizer has, which are no text for llguidance; <think> and </think> may be spelled."""
    if reasoning is None:
        return grammar
    (form,) = _parts(grammar)
    begin = f'("<think>" | <[{marks["<think>"]}]>)' if "<think>" in marks else '"<think>"'
    end = f" | TEXT <[{marks['</think>']}]>" if "</think>" in marks else ""
    thought = f"(spelled{end}) SPACE"
    rules = {"inside": f"start: {thought} @form", "before": f"start: ({begin} {thought})? @form"}
    if reasoning == "channels":
        channel, message, end, start = (
            f"<[{marks[mark]}]>" if mark in marks else json.dumps(mark)
            for mark in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
        )
        thought = f'{channel} /analysis|commentary/ {message} TEXT {end} {start} "assistant"'
        rules[reasoning] = f'start: ({thought})* {channel} "final" {message} @form'
    shared = (r'spelled[suffix="</think>"]: /(.|\n)*/', r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\r\n]{0,8}/")
    lark = "\n".join((rules[reasoning], *shared))
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**form, "name": "form"}]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    return json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]


def _with_one_token(part: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar with one token in place of any: the tokenizer here has 262, and one costs as much as another."""
    if not part.get("lark_grammar"):
        return part
    lark = _TOKENS.sub(lambda found: f"<{found[1] or '['}0]>" if found[0][0] == "<" else found[0], part["lark_grammar"])
    return {**part, "lark_grammar": lark}


def _place_of(schema: dict[str, Any], problem: str) -> str:
    """Return the place of a problem in a schema, as ".properties.age": of the smallest part that alone has it."""
    from llguidance import LLMatcher  # noqa: PLC0415

    drop_other_formats(schema)
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, num_left = "", _MAX_SCHEMAS
    parts = list(_parts_of(schema))
    while parts and num_left > 0:
        name, part = parts.pop(0)
        num_left -= 1
        grammar = LLMatcher.grammar_from_json_schema({**shared, **part})
        if without_state(LLMatcher.validate_grammar(grammar, limits=parser_limits(grammar))) == problem:
            place, parts = place + name, list(_parts_of(part))
    return place


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for keyword in _MAPS:
        if isinstance(several := schema.get(keyword), Mapping):
            yield from ((f".{keyword}.{name}", part) for name, part in several.items() if isinstance(part, Mapping))
    for keyword in _PARTS:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield f".{keyword}", value
        elif isinstance(value, list):
            yield from ((f".{keyword}.{at}", part) for at, part in enumerate(value) if isinstance(part, Mapping))


def drop_other_formats(schema: dict[str, Any]) -> None:
    """Take out the formats that JSON Schema does not define, which its validators ignore and llguidance refuses."""
    schemas: list[Any] = [schema]
    while schemas:
        one = schemas.pop()
        if isinstance(one.get("format"), str) and one["format"] not in _FORMATS:
            del one["format"]
        schemas += [part for _, part in _parts_of(one)]


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for _, part in _parts_of(schema):
            _close(part)


if __name__ == "__main__":
    main()
