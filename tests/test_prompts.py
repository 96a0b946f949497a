import json
from typing import Any

import openai.types.chat as official
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Replace

from rayspec.batch.long_documents import TokenizedText
from rayspec.prompts import (
    InvalidMessageError,
    Rendering,
    chat_template,
    check_rendered,
    conversation_text,
    conversation_tokens,
    read_conversation,
    read_message,
    text_tokens,
    without_nulls,
)
from rayspec.types import ConfigError, InvalidMessagesError, RequestError
from tests.demo_model import demo_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": '{"a": 6, "b": null}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_everything_that_a_template_may_render_is_kept() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    before = [{"role": "user", "content": "6*7?", "name": "ann"}, CALLS | {"reasoning_content": "use the tool"}]
    result = {"role": "tool", "content": parts, "tool_call_id": "c1"}
    assert read_conversation([*before, result]) == [*before, result | {"content": "4\n2"}]


def test_null_and_empty_fields_are_left_out_at_every_depth() -> None:
    """Arrow gives each row the fields of all rows; clients send the null fields of their own classes."""
    nothing = dict.fromkeys(["annotations", "audio", "function_call", "refusal", "id", "reasoning", "name", "anything"])
    empty = {"tool_calls": [], "annotations": [], "thinking_blocks": [], "provider_specific_fields": {}}
    for fields in (nothing, empty, nothing | empty):
        assert read_message({"role": "assistant", "content": "b"} | fields) == {"role": "assistant", "content": "b"}
    padded: dict[str, Any] = json.loads(json.dumps(CALLS))
    padded["tool_calls"][0] |= {"index": None}
    padded["tool_calls"][0]["function"] |= {"strict": None}
    part = {"type": "text", "text": "a", "image_url": None}
    assert read_message(padded) == CALLS
    assert read_message({"role": "user", "content": [part]})["content"] == "a"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_may_have_said_nothing(content: dict[str, Any]) -> None:
    assert read_message({"role": "assistant"} | content) == {"role": "assistant", "content": ""}


def test_an_answer_of_a_client_can_be_sent_back() -> None:
    answer = official.ChatCompletionMessage(role="assistant", content="b")
    assert read_message(answer.model_dump()) == {"role": "assistant", "content": "b"}
    called = official.ChatCompletionMessage.model_validate(CALLS)
    assert read_message(called.model_dump()) == CALLS


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        ("hi", "0", "it is 'hi'; give {'role'"),
        ({"content": "x"}, "0.role", "it is None; give one of system, developer, user, assistant, tool"),
        ({"role": "user"}, "0.content", "it is required"),
        ({"role": "user", "content": ["x"]}, "0.content", "a part is 'x'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "0.content", "type 'image_url' is not"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "citations": [1]}]}, "0.content", "'citations'"),
        ({"role": "user", "content": "\ud800"}, "0.content", "half of a surrogate pair"),
        ({"role": "user", "content": "caf\udce9"}, "0.content", "or a byte that is not UTF-8"),
        ({"role": "user", "content": "x", "name": 5}, "0.name", "must be text"),
        (CALLS | {"tool_calls": [{"function": {}}]}, "0.tool_calls.0", "give {'function'"),
        (
            CALLS | {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "0.tool_calls.0.function.arguments",
            "5",
        ),
        (CALLS | {"extra": {"at": [object()]}}, "0.extra.at.0", "a value that JSON has"),
    ],
)
def test_what_is_no_message_is_refused_by_name(message: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        read_conversation([message])
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert str(caught.value).startswith(f"messages.{field}: ")


@pytest.mark.parametrize("conversation", ["hi", {"role": "user"}, None, []])
def test_what_is_no_conversation_is_refused(conversation: Any) -> None:
    with pytest.raises(InvalidMessagesError, match="the conversation"):
        read_conversation(conversation)


def test_deep_nesting_is_an_error_of_the_message() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidMessageError, match="nested more than 32"):
        read_message({"role": "user", "content": "x", "extra": deep})


def test_a_field_that_the_template_drops_is_refused_by_name() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    check_rendered(read_conversation([{"role": "user", "content": "x", "name": "ann"}]), plain)
    for fields, name in ((CALLS, "tool_calls"), ({"role": "assistant", "reasoning": "x"}, "reasoning")):
        conversation = read_conversation([{"role": "user", "content": "x"}, fields])
        with pytest.raises(InvalidMessageError, match=f"messages.1.{name}: .* no such field; leave it out"):
            check_rendered(conversation, plain)
        check_rendered(conversation, plain + "{{ m.tool_calls }}{{ m.thinking }}")
    with pytest.raises(InvalidMessageError, match="did you mean 'tool_calls'"):
        check_rendered([{"role": "assistant", "content": "", "tool_call": [CALL]}], plain)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=3) | st.none()},
    optional={"name": _JSON, "tool_call_id": _JSON, "tool_calls": _JSON | st.just([CALL]), "other": _JSON},
)


@given(message=_MESSAGE | _JSON)
def test_what_was_read_can_be_stored_and_read_again(message: Any) -> None:
    try:
        read = read_conversation([message])
    except InvalidMessagesError:
        return
    assert read_conversation(json.loads(json.dumps(read))) == read


def test_only_null_fields_of_objects_are_left_out() -> None:
    assert without_nulls({"a": {"5": 1, "7": None}, "b": [{"c": None}, None]}) == {"a": {"5": 1}, "b": [{}, None]}


TOKENIZER = demo_tokenizer()
USER = {"role": "user", "content": "Hi"}
HOSTILE = {
    "raise": "{{ raise_exception('roles must alternate') }}",
    "raise nothing": "{{ raise_exception() }}",
    "undefined": "{{ absent.role }}",
    "recursion": "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes its input": "{{ messages.append(1) }}",
    "syntax": "{% if %}",
    "half a pair": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_template_raises_is_an_error_of_the_conversation(template: str) -> None:
    with pytest.raises(InvalidMessagesError, match=r"the messages cannot be made a prompt: \S"):
        conversation_tokens([USER], TOKENIZER, Rendering(template=template))


def test_a_template_that_refuses_system_messages_is_told_apart() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}{{ messages }}"
    system = {"role": "system", "content": "Be short."}
    with pytest.raises(
        InvalidMessagesError, match=r"a prompt: No system; without the system message they can: put its"
    ):
        conversation_tokens([system, USER], TOKENIZER, Rendering(template=refusing))
    for template, messages in ((HOSTILE["raise"], [system, USER]), (refusing, [system])):
        with pytest.raises(InvalidMessagesError, match=r"a prompt: (roles must alternate|No system)$"):
            conversation_tokens(messages, TOKENIZER, Rendering(template=template))


def test_a_panic_of_the_tokenizer_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of a library in Rust is no Exception. Backtracking without bound in a regular expression is one."""
    backtracking = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backtracking.normalizer = Replace(Regex("(e+)+$"), "x")
    monkeypatch.setattr(TOKENIZER, "_tokenizer", backtracking)
    text = "e" * 40 + "!"
    with pytest.raises(RequestError, match=r"refuses the prompt: PanicException: .*retry-limit"):
        text_tokens(text, TOKENIZER)
    with pytest.raises(RequestError, match="the tokenizer refuses the prompt: PanicException"):
        TokenizedText(TOKENIZER, text)
    with pytest.raises(InvalidMessagesError, match="cannot be made a prompt: PanicException"):
        conversation_tokens([{"role": "user", "content": text}], TOKENIZER)


def rendered(arguments: Any, template: str = "{{ messages[0].tool_calls[0].function.arguments | tojson }}") -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    conversation = [{"role": "assistant", "tool_calls": [call]}]
    return conversation_text(conversation, TOKENIZER, Rendering(template=template))


def test_arguments_that_would_take_far_more_memory_than_their_text_are_refused() -> None:
    with pytest.raises(InvalidMessagesError, match="more than 100000 objects, arrays and fields"):
        rendered('{"a": [' + "[]," * 100_000 + "[]]}")


def test_half_of_a_surrogate_pair_in_arguments_is_named() -> None:
    for arguments in (r'{"a": "\ud800"}', r'{"\udc00": 1}'):
        with pytest.raises(
            InvalidMessagesError, match=r"arguments of a tool call: the text has '.ud.*half of a surrogate"
        ):
            rendered(arguments)
    assert "\U0001f600" in rendered(r'{"a": "\ud83d\ude00"}')


def test_arguments_of_tool_calls_are_objects_as_in_vllm() -> None:
    """Clients send their text; templates make JSON of them, and the JSON of a text would have quotes around it."""
    for arguments in ('{"a": 6, "b": null}', {"a": 6}):
        assert rendered(arguments).startswith('{"a": 6')
    assert rendered('{"a": 6, "b": null}') == '{"a": 6, "b": null}'
    assert rendered("") == rendered(None) == rendered({}) == rendered("{}") == "{}"
    assert rendered("{'a': 6}") == "\"{'a': 6}\""
    assert rendered("[" * 100_000) == f'"{"[" * 100_000}"'
    for text in ("{{ '' + messages[0].tool_calls[0]['function']['arguments'] + '' }}", "{{ call.arguments|string }}"):
        template = "{% set call = messages[0].tool_calls[0].function %}" + text
        assert rendered('{"a": null}', template) == '{"a": null}'
        assert rendered({"a": 6}, template) == '{"a": 6}'
    template = (
        "{% set call = messages[0].tool_calls[0].function %}"
        "{% if call.arguments is mapping %}{{ call.arguments.a }}{% else %}{{ '<' + call.arguments + '>' }}{% endif %}"
    )
    assert rendered({"a": 6}, template) == "6"


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("name", ["message['content']", "message.content"])
def test_a_template_that_asks_for_null_finds_messages_that_only_call(name: str, content: str | None) -> None:
    """As DeepSeek's, which lost such calls: transformers leaves out null fields."""
    template = (
        "{%- for message in messages %}"
        f"{{%- if message.role == 'assistant' and {name} is none %}}{{{{ '<' + message.tool_calls[0].id + '>' }}}}"
        f"{{%- endif %}}{{%- if {name} is not none %}}{{{{ '|' + {name} + '|' }}}}{{%- endif %}}{{%- endfor %}}"
    )
    said = CALLS | {"content": "Let me see."}
    text = conversation_text([USER, CALLS | {"content": content}, said], TOKENIZER, Rendering(template=template))
    assert text == "|Hi|<c1>|Let me see.|"


def test_several_templates_without_a_default_are_named() -> None:
    tokenizer = demo_tokenizer()
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = {"rag": "x", "tool_use": "y"}
        with pytest.raises(ConfigError, match=r"the tokenizer's chat template cannot be used: .*rag"):
            chat_template(tokenizer)
    finally:
        tokenizer.chat_template = before


# As of LLaVA, and of LLaVA-NeXT: they drop a content that is a text.
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
LLAVA_NEXT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    " [/INST]{% else %}{{ message['content'][0]['text'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"), [(LLAVA, "SYSTEM: Be short. USER: Hi ASSISTANT:"), (LLAVA_NEXT, "Be short.[INST] Hi [/INST]")]
)
def test_a_template_that_only_takes_parts_gets_parts(template: str, text: str) -> None:
    conversation = [{"role": "system", "content": "Be short."}, USER]
    assert conversation_text(conversation, TOKENIZER, Rendering(template=template)) == text
