"""The demo tokenizer: byte-level BPE with 2048 entries, trained on reports. Any text survives a round trip.

    python -m tools.demo_model.tokenizer DIR

A prompt is `<|document|>` text `<|summary|>`; with a question, `<|document|>` text `<|user|>` question `<|assistant|>`.
The chat template renders a single user message as the first form, and two, document and question, as the second form.
Answers to later user messages follow `<|assistant|>`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rayspec.demo import model_path
from rayspec.demo.corpus import generate_report

__all__ = ["CHAT_TEMPLATE", "load_tokenizer", "train_tokenizer"]

_SPECIAL_TOKENS = ["<|pad|>", "<|eos|>", "<|document|>", "<|summary|>", "<|user|>", "<|assistant|>"]
_VOCAB_SIZE = 2048

# The first user message is the document, and the first answer is its summary.
CHAT_TEMPLATE = """\
{%- set state = namespace(users=0) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- ('<|summary|>' if state.users <= 1 else '<|assistant|>') + message['content'] + eos_token -}}
  {%- elif message['role'] == 'user' -%}
    {%- set state.users = state.users + 1 -%}
    {{- ('<|document|>' if state.users == 1 else '<|user|>') + message['content'] -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|summary|>' if state.users <= 1 else '<|assistant|>' -}}
{%- endif -%}"""


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Load the bundled tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path())
    return tokenizer


def train_tokenizer(num_reports: int = 3000) -> PreTrainedTokenizerFast:
    """Train a tokenizer on generated reports. The result is the same every time."""
    rng = random.Random(0)
    reports = (generate_report(seed, num_sentences=rng.randint(8, 40)) for seed in range(num_reports))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (f"{report.text}\n{report.summary}" for report in reports),
        trainers.BpeTrainer(
            vocab_size=_VOCAB_SIZE,
            special_tokens=_SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        extra_special_tokens=_SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("directory", type=Path)
    train_tokenizer().save_pretrained(parser.parse_args().directory)


if __name__ == "__main__":
    _main()
