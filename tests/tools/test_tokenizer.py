from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rayspec.demo import DOMAINS, sample_documents, sample_tasks
from tools.demo_model.tokenizer import CHAT_TEMPLATE, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_asks_for_the_summary_of_a_document(tokenizer: PreTrainedTokenizerBase) -> None:
    document = {"role": "user", "content": "Review of the ports."}
    prompt = tokenizer.apply_chat_template([document], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|document|>Review of the ports.<|summary|>"
    assert tokenizer(prompt).input_ids == tokenizer.apply_chat_template(
        [document], add_generation_prompt=True, return_dict=False
    )


def test_the_chat_template_renders_later_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Be brief."), ("user", "Text."), ("assistant", "Sum."), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|document|>Text.<|summary|>Sum.<|eos|><|user|>And?<|assistant|>"


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_chat_template_renders_tasks_as_the_model_was_taught_them(
    tokenizer: PreTrainedTokenizerBase, domain: str
) -> None:
    (task,) = sample_tasks(domain, 1)
    turns = filter(None, (task.document, task.question))
    messages = [{"role": "user", "content": content} for content in turns]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == task.prompt


def test_the_bundled_tokenizer_has_the_template_and_stops_at_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|eos|>", "<|pad|>")
    assert len(tokenizer) == 2048


def test_a_newly_trained_tokenizer_is_of_the_same_kind(tokenizer: PreTrainedTokenizerBase) -> None:
    trained = train_tokenizer(num_reports=40)
    special = ["<|pad|>", "<|eos|>", "<|document|>", "<|summary|>", "<|user|>", "<|assistant|>"]
    assert trained.convert_tokens_to_ids(special) == tokenizer.convert_tokens_to_ids(special)
    text = sample_documents(1)[0].text
    assert trained.decode(trained(text).input_ids) == text
