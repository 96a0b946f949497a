"""Measures how many lines of held-out answers a checkpoint writes exactly, by domain and size.

    python -m tools.demo_model.evaluate [--model DIR] [--tasks N] [--threads N]

Decoding is greedy and free-running, in float32, with `transformers`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rayspec.demo import Task, model_path, sample_tasks
from tools.demo_model.tokenizer import load_tokenizer

__all__ = ["Score", "complete", "score"]

logger = logging.getLogger(__name__)

_HELD_OUT_SEED = 9100
_SIZES: Mapping[str, Sequence[int]] = {
    "summary": (15, 37, 80, 131, 250),
    "question": (15, 37, 80, 131, 250),
    "ledger": (10, 20, 40),
    "schedule": (10, 20, 40),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Counts of exact lines and answers over some tasks."""

    mean_prompt_tokens: float
    exact_lines: int
    lines: int
    exact_answers: int
    tasks: int


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], *, batch_size: int = 4
) -> Score:
    """Answer the tasks with the model, `batch_size` at a time, and compare the answers."""
    exact = lines = exact_answers = 0
    for start in range(0, len(tasks), batch_size):
        batch = tasks[start : start + batch_size]
        for task, answer in zip(batch, complete(model, tokenizer, [each.prompt for each in batch]), strict=True):
            found, total = exact_lines(answer, task.answer)
            exact, lines, exact_answers = exact + found, lines + total, exact_answers + (answer == task.answer)
    num_tokens = sum(len(ids) for ids in tokenizer([task.prompt for task in tasks]).input_ids)
    return Score(
        mean_prompt_tokens=num_tokens / max(1, len(tasks)),
        exact_lines=exact,
        lines=lines,
        exact_answers=exact_answers,
        tasks=len(tasks),
    )


def exact_lines(answer: str, reference: str) -> tuple[int, int]:
    """Return how many lines of `reference` the answer has exactly, at the same place, and the lines of `reference`."""
    expected, found = reference.splitlines(), answer.splitlines()
    return sum(line == other for line, other in zip(expected, found, strict=False)), len(expected)


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_new_tokens: int = 1000
) -> list[str]:
    """Return the greedy completions of the prompts, which run as one batch."""
    inputs = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    return tokenizer.batch_decode(generated[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Measure a demo checkpoint on held-out tasks.")
    parser.add_argument("--model", type=Path, default=Path(model_path()))
    parser.add_argument("--tasks", type=int, default=16, help="for each domain and size")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = load_tokenizer()
    logger.info("| domain | prompt tokens (mean) | exact lines | exact answers |\n| --- | --- | --- | --- |")
    for domain, sizes in _SIZES.items():
        for size in sizes:
            tasks = sample_tasks(domain, options.tasks, size=size, seed=_HELD_OUT_SEED)
            result = score(model, tokenizer, tasks)
            logger.info(
                "| %s | %.0f | %d of %d (%.0f %%) | %d of %d |",
                *(domain, result.mean_prompt_tokens),
                *(result.exact_lines, result.lines, 100 * result.exact_lines / result.lines),
                *(result.exact_answers, result.tasks),
            )


if __name__ == "__main__":
    _main()
