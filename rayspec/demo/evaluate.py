"""How many lines of held-out summaries a checkpoint copies exactly, by document length.

    python -m rayspec.demo.evaluate [--model DIR] [--reports N] [--threads N]

Free-running greedy decoding in float32 with `transformers`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rayspec.demo import SampleDocument, exact_lines, model_path, sample_documents
from rayspec.demo.tokenizer import load_tokenizer

__all__ = ["Score", "score", "summarize"]

logger = logging.getLogger(__name__)

_HELD_OUT_SEED = 9100
_NUM_SENTENCES = (15, 37, 80, 131, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What came out right over some documents."""

    mean_prompt_tokens: float
    exact_lines: int
    lines: int
    exact_summaries: int
    documents: int


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[SampleDocument],
    *,
    batch_size: int = 4,
) -> Score:
    """Summarizes the documents, which must have summaries, `batch_size` at a time, and compares."""
    exact = lines = exact_summaries = 0
    for start in range(0, len(documents), batch_size):
        batch = documents[start : start + batch_size]
        for document, summary in zip(batch, summarize(model, tokenizer, [each.text for each in batch]), strict=True):
            if document.summary is None:
                raise ValueError(f"document {document.id!r} has no summary to compare with")
            found, total = exact_lines(summary, document.summary)
            exact, lines, exact_summaries = (
                exact + found,
                lines + total,
                exact_summaries + (summary == document.summary),
            )
    num_tokens = sum(len(ids) for ids in tokenizer([_prompt(each.text) for each in documents]).input_ids)
    return Score(
        mean_prompt_tokens=num_tokens / max(1, len(documents)),
        exact_lines=exact,
        lines=lines,
        exact_summaries=exact_summaries,
        documents=len(documents),
    )


@torch.inference_mode()
def summarize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_new_tokens: int = 320
) -> list[str]:
    """The greedy summaries of the texts, as one batch."""
    prompts = tokenizer([_prompt(text) for text in texts], padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(**prompts, do_sample=False, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    summaries = generated[:, prompts.input_ids.shape[1] :]
    return tokenizer.batch_decode(summaries, skip_special_tokens=True)


def _prompt(text: str) -> str:
    return f"<|document|>{text}<|summary|>"


def _main() -> None:
    parser = argparse.ArgumentParser(description="Measure a demo checkpoint on held-out reports.")
    parser.add_argument("--model", type=Path, default=Path(model_path()))
    parser.add_argument("--reports", type=int, default=16, help="for each length")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = load_tokenizer()
    logger.info("| prompt tokens (mean) | exact lines | exact summaries |\n| --- | --- | --- |")
    for num_sentences in _NUM_SENTENCES:
        documents = sample_documents(options.reports, num_sentences=num_sentences, seed=_HELD_OUT_SEED)
        result = score(model, tokenizer, documents)
        logger.info(
            "| %.0f | %d of %d (%.0f %%) | %d of %d |",
            *(result.mean_prompt_tokens, result.exact_lines, result.lines, 100 * result.exact_lines / result.lines),
            *(result.exact_summaries, result.documents),
        )


if __name__ == "__main__":
    _main()
