import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rayspec.demo import DOMAINS, sample_tasks
from tools.demo_model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_renders_later_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Be brief."), ("user", "Text."), ("assistant", "Sum."), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|document|>Text.<|summary|>Sum.<|eos|><|user|>And?<|assistant|>"


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_chat_template_renders_tasks_as_taught(tokenizer: PreTrainedTokenizerBase, domain: str) -> None:
    (task,) = sample_tasks(domain, 1)
    turns = filter(None, (task.document, task.question))
    messages = [{"role": "user", "content": content} for content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == task.prompt
