"""The bundled models, and documents to try them on. Importing this needs neither torch nor transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from rayspec.demo.registry import FETCHABLE as FETCHABLE
from rayspec.demo.registry import cached_path
from rayspec.demo.registry import fetch as fetch
from rayspec.demo.tasks import DOMAINS as DOMAINS
from rayspec.demo.tasks import Task as Task
from rayspec.demo.tasks import generate_task
from rayspec.errors import ConfigError

# The folder of each bundled model. "demo" was trained with stochastic depth, which makes it tolerant of skipped
# sublayers; "demo-plain" was trained without.
BUNDLED: Mapping[str, str] = {"demo": "model", "demo-plain": "model_plain"}
_MAX_DOCUMENTS = 100_000  # with one seed
_NUM_EXAMPLES = 12
_EXAMPLE_PAGES = ("with", "class", "exceptions", "async", "for", "context-managers")  # topics of Python's `help()`


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDocument:
    """A document to summarize. `summary` is the one right summary, or None where there is none."""

    id: str
    text: str
    summary: str | None


def model_path(name: str = "demo") -> str:
    """Return the directory of a bundled `transformers` checkpoint with tokenizer. Raises KeyError for other names."""
    return str(Path(__file__).parent / BUNDLED[name])


def local_path(model: str, *, option: str = "model") -> str:
    """Return the place of a bundled or fetched model for its name; return any other name or path unchanged. Raises
    ConfigError for a model that has not been fetched."""
    if model in FETCHABLE and not (path := cached_path(model)).exists():
        raise ConfigError(f"option {option!r} is {model!r}, which is not at {path}: rayspec fetch {model}")
    if model in BUNDLED or model in FETCHABLE:
        _tell_of_a_folder(model)
    return model_path(model) if model in BUNDLED else str(cached_path(model)) if model in FETCHABLE else model


@cache  # once
def _tell_of_a_folder(model: str) -> None:
    if (Path(model) / "config.json").exists():
        logger.warning("%r is the model of rayspec's; ./%s would be the model in the folder of this name", model, model)


def sample_documents(n: int, *, num_sentences: int = 40, seed: int = 0) -> list[SampleDocument]:
    """Return `n` synthetic audit reports, the same for equal arguments; a sentence is about 15 tokens.

    With a seed below a million, none of the reports occurs in training. Raises `ValueError` unless 0 <= n <= 100000 and
    num_sentences >= 1.
    """
    tasks = sample_tasks("summary", n, size=num_sentences, seed=seed)
    return [
        SampleDocument(id=f"report-{seed}-{index}", text=task.document, summary=task.answer)
        for index, task in enumerate(tasks)
    ]


def sample_tasks(domain: str, n: int, *, size: int = 40, seed: int = 0) -> list[Task]:
    """Return `n` tasks of a domain of `DOMAINS`, the same for equal arguments. The domain decides the unit of `size`.

    With a seed below a million, none of the tasks occurs in training. Raises `ValueError` unless 0 <= n <= 100000, and
    for arguments that `generate_task` refuses.
    """
    if not 0 <= n <= _MAX_DOCUMENTS:
        raise ValueError(f"n={n}: n must be from 0 to {_MAX_DOCUMENTS}")
    return [generate_task(domain, seed * _MAX_DOCUMENTS + index, size=size) for index in range(n)]


def example_documents(*, pages: bool) -> list[SampleDocument]:
    """Return twelve documents of 200 to 2000 words: audit reports, and with `pages` in place of the last six of them
    pages of Python's own documentation, as far as this Python has them."""
    found = [name for name in _EXAMPLE_PAGES if pages and name in topics]
    reports = [
        SampleDocument(id=f"report-{number:02}", text=report.text, summary=report.summary)
        for number in range(1, _NUM_EXAMPLES - len(found) + 1)
        for report in sample_documents(1, num_sentences=8 + 4 * number, seed=number - 1)
    ]
    return [*reports, *(SampleDocument(id=f"python-{name}", text=topics[name], summary=None) for name in found)]
