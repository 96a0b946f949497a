"""Calls are found in the texts of each format, wherever the text is cut."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rayspec.openai.parsers import FORMATS, ArgumentTypes, CallParser, ToolFormat, format_of
from tests.openai.scripted import joined, require_one_reading

CODE = {"anyOf": [{"type": "string"}, {"type": ["null", "array"]}], "oneOf": 5}
DRY = {"type": "boolean"}
SCHEMAS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "code": CODE, "dry": DRY}},
    "now": {},
}
NAMED, LISTED, TAGGED, HERMES, LLAMA, _ = FORMATS  # the last has a parser of its own, see test_reasoning.py
PARIS = '{"city": "Paris \\"é\\" }]", "days": [1, {"a": "\\\\"}]}'
NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'
VALUES = "<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"

Result = tuple[str, list[tuple[str, str]]]


def read(form: ToolFormat, *parts: str, is_parallel: bool = True) -> Result:
    thought, *found = joined(CallParser(form, SCHEMAS, is_parallel=is_parallel), parts)
    assert thought == ""
    return tuple(found)  # type: ignore[return-value]


CASES: list[tuple[ToolFormat, str, Result]] = [
    (form, text, result)
    for form in (HERMES, TAGGED)
    for text, result in [
        ("Just text, <tool_ and <b>.\n ", ("Just text, <tool_ and <b>.\n ", [])),
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', ("", [("weather", PARIS)])),
        (
            f'Let me see.\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n{NOW} \n',
            ("Let me see.", [("weather", PARIS), ("now", "{}")]),
        ),
        ('<tool_call>{"arguments": {"a": "é"}, "name": "now"}</tool_call>', ("", [("now", '{"a": "é"}')])),
        ('<tool_call>{"name": "now"}</tool_call>', ("", [("now", "{}")])),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Pa', ("", [("weather", '{"city": "Pa')])),
        ("<tool_call> is a tag.", ("<tool_call> is a tag.", [])),
        ('<tool_call>{"x": 1}</tool_call>', ('<tool_call>{"x": 1}</tool_call>', [])),
        ('<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_', ("", [("now", "{}")])),
        ("a <tool_call", ("a <tool_call", [])),
        (
            f'<tool_call>{{"name": "weather", "arguments": {PARIS}\n</tool_call>\n{NOW}',  # a bracket is missing
            ("", [("weather", PARIS), ("now", "{}")]),
        ),
        (r'<tool_call>{"arguments": {"a": "\ud83d"}, "name": "now"}</tool_call>', ("", [("now", r'{"a": "\ud83d"}')])),
    ]
] + [
    (
        TAGGED,
        f"Well.\n<tool_call>\n<function=weather>\n{VALUES}</function>\n</tool_call>\n<tool_call><function=now></function>",
        ("Well.", [("weather", '{"city": "12", "days": 3}'), ("now", "{}")]),
    ),
    (
        TAGGED,
        "<tool_call>\n<function=other>\n<parameter=a>\nx\ny < 2\n</parameter>\n<parameter=b>\n{}\n</parameter>\n<para",
        ("", [("other", '{"a": "x\\ny < 2", "b": {}')]),
    ),
    (
        TAGGED,
        f"Well.\n<function=weather>\n{VALUES}</function>\n</tool_call>\n<function=now>\n</function>",
        ("Well.", [("weather", '{"city": "12", "days": 3}'), ("now", "{}")]),
    ),
    *((TAGGED, text, (text, [])) for text in ("Write <function=other>, or <function=x y>.", "<function=now")),
    (
        TAGGED,
        "<tool_call><function=other><parameter=c>NaN</parameter></function></tool_call>",
        ("", [("other", '{"c": "NaN"}')]),
    ),
    (
        TAGGED,
        r'<tool_call><function=other><parameter=c>"\ud83d"</parameter></function></tool_call>',
        ("", [("other", r'{"c": "\ud83d"}')]),
    ),
    *(
        (
            TAGGED,
            f"<tool_call><function=weather><parameter={name}>{text}</parameter></function></tool_call>",
            ("", [("weather", f'{{"{name}": {value}}}')]),
        )
        for name, text, value in [
            ("code", "0123", '"0123"'),
            ("code", "123", '"123"'),
            ("code", '"5"', '"5"'),
            ("code", "[1]", "[1]"),
            ("code", "None", "null"),
            ("code", "True", '"True"'),
            ("dry", "False", "false"),
            ("other", "None", '"None"'),
        ]
    ),
    (
        LISTED,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        ("", [("weather", PARIS), ("now", "{}")]),
    ),
    (LISTED, "Text [TOOL and [a]", ("Text [TOOL and [a]", [])),
    (
        NAMED,
        f"So: [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}",
        ("So:", [("weather", PARIS), ("now", "{}")]),
    ),
    (NAMED, "[TOOL_CALLS]no call", ("[TOOL_CALLS]no call", [])),
    (
        LLAMA,
        f' {{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        ("", [("weather", PARIS), ("now", "{}")]),
    ),
    (
        LLAMA,
        f'{{"name": "weather", "parameters": {PARIS}; {{"name": "now", "parameters": {{}}',
        ("", [("weather", PARIS), ("now", "{}")]),
    ),
    (LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', ("", [("weather", PARIS)])),
    (LLAMA, '{"name": "Bob", "parameters": {"a": 1}}', ('{"name": "Bob", "parameters": {"a": 1}}', [])),
    (HERMES, r'<tool_call>{"name": "get\_it", "arguments": {}}</tool_call>', ("", [("get_it", "{}")])),
    *(
        (HERMES, text, (text, []))
        for name in (r"a\w", r"\ud83d")
        for text in [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>']
    ),
    (LLAMA, 'So {"name": "now", "parameters": {}}', ('So {"name": "now", "parameters": {}}', [])),
]


@pytest.mark.parametrize(("form", "text", "result"), CASES)
def test_calls_and_content(form: ToolFormat, text: str, result: Result) -> None:
    assert read(form, text) == read(form, *text) == result
    for at in range(len(text) + 1):
        assert read(form, text[:at], text[at:]) == result, f"cut at {at}"
    assert read(form, text, is_parallel=False) == (result[0], result[1][:1])


@pytest.mark.parametrize("form", FORMATS[:-1], ids=lambda form: form.opens or form.begin)
def test_any_text_has_one_reading(form: ToolFormat) -> None:
    words = [form.begin, form.opens, form.closes, form.many_opens, form.many_closes, form.between, form.tail]
    words += [form.head.replace("NAME", name) for name in ("weather", "now", "x y")]
    words += ['{"a": "', "\\", '"', "}", "{", "]", "[", " ", "\n", "word", "<parameter=city>", "</parameter>", "{}"]
    words += [word[: len(word) // 2] for word in words]
    words = [word for word in words if word]
    require_one_reading(lambda: CallParser(form, SCHEMAS, is_parallel=True), words, 1500, keeps_text=True)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_long_text_is_read_in_parts_as_each_call_searches_the_rest_again(form: ToolFormat) -> None:
    class Watched(CallParser):
        longest = 0

        def _show(self, num_characters: int) -> None:
            self.longest = max(self.longest, len(self._rest))
            super()._show(num_characters)

    parser, text = Watched(form, SCHEMAS, is_parallel=True), f"{form.begin} no call. " * 3000
    assert "".join(map(str, parser.feed(text, finished=True))) == text
    assert parser.longest < 10_000 < len(text)


def test_the_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES, SCHEMAS, is_parallel=True)
    text = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
    pieces = [piece for sign in text for piece in parser.feed(sign, finished=False)]
    assert len(pieces) == 1 + len(PARIS)


def test_a_long_call_may_have_its_name_last() -> None:
    arguments = json.dumps({"text": "word " * 2000})
    text = f'<tool_call>{{"arguments": {arguments}, "name": "now"}}</tool_call>'
    assert read(HERMES, *(text[at : at + 500] for at in range(0, len(text), 500))) == ("", [("now", arguments)])


def test_a_format_is_found_by_the_template_or_by_its_name() -> None:
    assert [format_of("".join(form.signs), None) for form in FORMATS] == list(FORMATS)
    assert format_of("{{ tools }}", None) is None
    for others in ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "<tool_call> XML tags:\n<tool_calls>[{}]"):
        assert format_of(others, None) is None
    assert format_of("<tool_call>", "llama3_json") is LLAMA
    assert [format_of(template, "mistral") for template in ("[TOOL_CALLS][ARGS]", "")] == [NAMED, LISTED]
    assert json.loads(PARIS)


def test_a_long_schema_is_read_once_for_all_arguments_and_choices() -> None:
    """A schema of 100 KB was read for each argument of the output: 70 s of the event loop."""

    class Alternatives(list[Any]):
        num_read = 0

        def __iter__(self) -> Iterator[Any]:
            Alternatives.num_read += 1
            return super().__iter__()

    schemas = {"f": {"properties": {"x": {"anyOf": Alternatives([{"type": "integer"}, {"type": "string"}])}}}}
    text = f"<tool_call><function=f>{'<parameter=x>1</parameter>' * 50}</function></tool_call>"
    types: ArgumentTypes = {}
    for _ in range(3):
        parser = CallParser(TAGGED, schemas, is_parallel=True, types=types)
        _, _, calls = joined(parser, [text])
        assert calls == [("f", "{" + ", ".join(['"x": 1'] * 50) + "}")]
    assert Alternatives.num_read == 1
