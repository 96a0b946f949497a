"""The prompts of benchmarks: by domain, up to a given length."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

import rayspec
from rayspec import demo
from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.documents import read_piece
from rayspec.batch.input_files import find_files
from rayspec.batch.rows import Columns, Row
from rayspec.bench.options import WorkloadOptions
from rayspec.demo import Task
from rayspec.types import ConfigError, InputFileError

_TOKENS_PER_UNIT = 15
_MIN_SIZE = 2
_DEMO = "demo"
_DEMO_TOKEN = "<|document|>"  # noqa: S105 - a token of the bundled model's vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one domain, as token ids, in the order of their requests. context: maximum number of prompt tokens.
    num_left_out: number of longer prompts, which are left out."""

    domain: str
    prompts: list[list[int]]
    context: int
    num_left_out: int = 0

    @property
    def name(self) -> str:
        return f"{self.domain}-{self.context}"


def make_workloads(llm: rayspec.LLM, options: WorkloadOptions, *, template: str) -> list[Workload]:
    """Return a workload for each context and each domain. A domain without a fitting prompt has an empty workload.

    template: prompt template for documents, see `PromptBuilder`. Raises ConfigError, and the error of an invalid
    document.
    """
    inputs = list(dict.fromkeys("demo:summary" if name == _DEMO else name for name in options.input))
    found: list[Workload] = []
    for context in dict.fromkeys(options.context):
        workloads = [one for name in inputs for one in _of_input(llm, name, context, options, template)]
        name, count = Counter(workload.domain for workload in workloads).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"option 'input' gives two workloads named {name!r}: name it once, or rename one")
        if not any(workload.prompts for workload in workloads):
            raise ConfigError(f"option 'context' is {context}, and none of the prompts is as short: raise it")
        found += workloads
    return found


def _of_input(llm: rayspec.LLM, name: str, context: int, options: WorkloadOptions, template: str) -> Iterator[Workload]:
    """Yield a workload for each domain or category of an input. Questions are not cut: longer ones are left out."""
    kind, _, domain = name.partition(":")
    if kind == _DEMO:
        for each in demo.DOMAINS if domain == "all" else (domain or "summary",):
            size = {"context": context, "num_prompts": options.num_prompts, "seed": options.workload_seed}
            yield Workload(domain=each, prompts=demo_prompts(llm, each, **size), context=context)
    elif (by_category := read_questions(name)) is not None:
        for category, questions in by_category.items():
            prompts = list(map(PromptBuilder(llm=llm).fitting_tokens, questions))
            fitting = [prompt for prompt in prompts if len(prompt) <= context]
            yield Workload(
                domain=category,
                prompts=fitting[: options.num_prompts],
                context=context,
                num_left_out=len(prompts) - len(fitting),
            )
    else:
        builder = PromptBuilder(llm=llm, template=template, max_prompt_tokens=context)
        documents = file_documents(name, options.num_prompts)
        prompts = [builder.tokens(document) for document in documents]
        yield Workload(domain=Path(name).stem, prompts=prompts, context=context)


def demo_prompts(llm: rayspec.LLM, domain: str, *, context: int, num_prompts: int, seed: int = 0) -> list[list[int]]:
    """Return token ids of prompts of a demo domain, sized to fit uncut into `context` tokens. A ledger or a schedule
    may be smaller. Raises ConfigError for an unknown domain, or if even the smallest prompts do not fit."""
    encode = PromptBuilder(llm=llm).fitting_tokens  # texts are user messages if there is a chat template

    def tokens(task: Task) -> list[int]:
        """Bundled models have their own task tokens; other models get a user's message."""
        if _DEMO_TOKEN in llm.tokenizer.get_vocab():
            return list(llm.tokenizer(task.prompt).input_ids)
        return encode(f"{task.document}\n\n{task.question or 'Summarize the document.'}")

    tasks = fitting_tasks(domain, lambda task: len(tokens(task)), context=context, num_tasks=num_prompts, seed=seed)
    return [tokens(task) for task in tasks]


def fitting_tasks(
    domain: str, num_tokens: Callable[[Task], int], *, context: int, num_tasks: int, seed: int = 0
) -> list[Task]:
    """Return tasks of a demo domain that fit into `context` tokens. Raises ConfigError as `demo_prompts` does."""
    if domain not in demo.DOMAINS:
        raise ConfigError(f"domain {domain!r} is none of {', '.join(demo.DOMAINS)}")
    size = max(_MIN_SIZE, context // _TOKENS_PER_UNIT)
    while True:
        tasks = demo.sample_tasks(domain, num_tasks, size=size, seed=seed)
        longest = max(map(num_tokens, tasks), default=0)
        if longest <= context:
            return tasks
        if size == _MIN_SIZE:
            raise ConfigError(
                f"option 'context' is {context}, and the smallest prompts of domain {domain!r} have up to {longest} "
                "tokens: raise it"
            )
        size = max(_MIN_SIZE, min(size - 1, size * context // longest))


def file_documents(name: str, num_documents: int) -> list[Row]:
    """Return the first documents of a file, folder or pattern. Raises InputFileError for an invalid document."""
    rows = (row for file in find_files([name]).files for _, row in read_piece(file, Columns()))
    documents = list(itertools.islice(rows, num_documents))
    for document in documents:
        if document.error is not None:
            raise InputFileError(document.error)
    return documents


class Question(msgspec.Struct, frozen=True):
    """A row of a question file in the format of Spec-Bench (Xia et al., 2024): JSON lines. Only the first turn of a
    question is used; later turns follow an answer."""

    question_id: int | str
    category: str
    turns: list[str]


def read_questions(name: str) -> dict[str, list[str]] | None:
    """Return the first turns of a local question file by category; None for a file whose first row is no question.
    Raises ConfigError that names an invalid row."""
    file = Path(name)
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    by_category: dict[str, list[str]] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.MsgspecError as error:
            if not by_category:
                return None  # a file of documents
            raise ConfigError(
                f"option 'input': {name}:{number} is not a question of a Spec-Bench file: {error}"
            ) from error
        if not question.turns or not question.turns[0].strip():
            raise ConfigError(f"option 'input': {name}:{number} has no first turn: give it one or leave it out")
        by_category.setdefault(question.category, []).append(question.turns[0])
    return by_category or None
