"""The prompts of benchmarks: by domain, up to a given length, one domain at a time or in mixed streams."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import rayspec
from rayspec import demo
from rayspec.batch.columns import Columns
from rayspec.batch.document_task import PromptBuilder
from rayspec.batch.documents import read_documents
from rayspec.batch.rows import Row
from rayspec.command.locations import Location, UnreadableFileError, error_detail
from rayspec.config import SamplingParams
from rayspec.demo import Task
from rayspec.types import ConfigError, InputFileError

_TOKENS_PER_UNIT = 15
_MIN_SIZE = 2
_DEMO = "demo"
_ALL = "all"
_DEMO_TOKEN = "<|document|>"  # noqa: S105 - a token of the bundled model's vocabulary
_SUMMARIZE = "Summarize the document."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options of workloads. Raises ConfigError.

    inputs: "demo:DOMAIN" ("demo" for its summaries, "demo:all" for all domains), files of documents, question files.
    contexts: prompt tokens. num_prompts: of each workload, at most. mix_ratios: if given, there is a stream for each
    ratio instead of a workload for each domain.
    """

    inputs: tuple[str, ...]
    contexts: tuple[int, ...]
    num_prompts: int
    mix_ratios: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for context in self.contexts:
            if context < 2:
                raise ConfigError(f"option 'context' is {context}: a prompt needs 2 tokens or more")
        for ratio in self.mix_ratios:
            if not 0 <= ratio <= 1:
                raise ConfigError(f"option 'stream' is {ratio}: a ratio lies between 0 and 1")
        if self.seed < 0:
            raise ConfigError(f"option 'workload_seed' is {self.seed}: it must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, as token ids, in the order of their requests.

    domain: of all prompts; for a stream, its domains in order of first use, joined by "+". domains: of each prompt.
    context: maximum number of prompt tokens. num_left_out: number of longer prompts, which are left out. mix_ratio: for
    a stream, the probability that a prompt has another domain than the prompt before.
    """

    name: str
    domain: str
    prompts: list[list[int]]
    domains: list[str]
    context: int
    num_left_out: int = 0
    mix_ratio: float | None = None

    @property
    def is_stream(self) -> bool:
        return self.mix_ratio is not None


def make_workloads(llm: rayspec.LLM, options: WorkloadOptions, *, template: str) -> list[Workload]:
    """Return a workload for each context and each domain or stream. A domain without a fitting prompt has an empty
    workload; streams leave the domain out.

    template: prompt template for documents, see `PromptBuilder`. Raises ConfigError, and the error of an invalid
    document.
    """
    workloads: list[Workload] = []
    for context in options.contexts:
        domains = [
            one for name in _each_once(options.inputs) for one in _of_input(llm, name, context, options, template)
        ]
        _check(domains, context)
        fitting = [domain for domain in domains if domain.prompts]
        streams = [mixed(fitting, ratio, options.num_prompts, seed=options.seed) for ratio in options.mix_ratios]
        workloads += streams or domains
    return workloads


def mixed(workloads: Sequence[Workload], ratio: float, num_prompts: int, *, seed: int) -> Workload:
    """Return a stream of prompts, which begins in the first workload's domain. No prompt is used twice.

    Before each further prompt the domain changes with probability `ratio`, the mix ratio of KNN-SSD, section 4. All
    other domains are equally likely.

    Raises ConfigError if a domain runs out of prompts, or there is no other domain to change to.
    """
    if ratio > 0 and len(workloads) < 2:
        raise ConfigError(f"option 'stream' is {ratio}, and there is no second domain to go to: give another --input")
    rng = random.Random(seed)
    waiting = {workload.domain: iter(workload.prompts) for workload in workloads}
    domain, domains = workloads[0].domain, list[str]()
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        if domains and rng.random() < ratio:
            domain = rng.choice([other for other in waiting if other != domain])
        prompt = next(waiting[domain], None)
        if prompt is None:
            raise ConfigError(
                f"option 'num_prompts' is {num_prompts}, but after {len(prompts)} prompts of the stream there are no "
                f"more of {domain!r}: lower it, or give an input that has more"
            )
        domains.append(domain)
        prompts.append(prompt)
    context = workloads[0].context
    return Workload(
        name=f"mix-{ratio:g}-{context}",
        domain="+".join(dict.fromkeys(domains)),
        prompts=prompts,
        domains=domains,
        context=context,
        mix_ratio=ratio,
    )


def demo_prompts(llm: rayspec.LLM, domain: str, *, context: int, num_prompts: int, seed: int = 0) -> list[list[int]]:
    """Return token ids of prompts of a demo domain, sized to fit uncut into `context` tokens. A ledger or a schedule
    may be smaller. Raises ConfigError for an unknown domain, or if even the smallest prompts do not fit."""
    encode = _task_encoder(llm)
    tasks = fitting_tasks(domain, lambda task: len(encode(task)), context=context, num_tasks=num_prompts, seed=seed)
    return [encode(task) for task in tasks]


def fitting_tasks(
    domain: str, num_tokens: Callable[[Task], int], *, context: int, num_tasks: int, seed: int = 0
) -> list[Task]:
    """Return tasks of a demo domain, reduced in size until all fit into `context` tokens. Raises ConfigError as
    `demo_prompts` does."""
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
    documents = list(itertools.islice(read_documents([name], Columns()), num_documents))
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


def is_question_file(name: str) -> bool:
    """Return whether the first row has the fields of a question. name: any path or URI; it need not exist."""
    try:
        location = Location.parse(name)
        if location.suffix not in (".jsonl", ".ndjson") or not location.exists:
            return False
        with location.open() as file:
            row = json.loads(next((line for line in file if line.strip()), "{}"))
    except (UnreadableFileError, OSError, ValueError):
        return False  # the reader of documents reports the error
    return isinstance(row, dict) and row.keys() >= set(Question.__struct_fields__)


def read_questions(name: str) -> Iterator[Question]:
    """Yield the questions in file order. Raises UnreadableFileError, and ConfigError that names an invalid row."""
    try:
        with Location.parse(name).open() as file:
            for number, line in enumerate((line for line in file if line.strip()), 1):
                question = msgspec.json.decode(line, type=Question)
                if not question.turns or not question.turns[0].strip():
                    raise ConfigError(f"option 'input': {name}:{number} has no first turn: give it one or leave it out")
                yield question
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        place = f"{name}:{number}"
        raise ConfigError(f"option 'input': {place} is not a question of a Spec-Bench file: {error}") from error
    except OSError as error:
        raise UnreadableFileError(f"{name}: could not be read ({error_detail(error)})") from error


def _task_encoder(llm: rayspec.LLM) -> Callable[[Task], list[int]]:
    """Return an encoder of tasks. Bundled models have their own task tokens; other models get a user's message."""
    if _DEMO_TOKEN in llm.tokenizer.get_vocab():
        return lambda task: list(llm.tokenizer(task.prompt).input_ids)
    encode = _text_encoder(llm)
    return lambda task: encode(f"{task.document}\n\n{task.question or _SUMMARIZE}")


def _text_encoder(llm: rayspec.LLM) -> Callable[[str], list[int]]:
    """Return an encoder of texts, which are user messages if the tokenizer has a chat template."""
    return PromptBuilder(llm=llm, params=SamplingParams()).fitting_tokens


def _of_input(llm: rayspec.LLM, name: str, context: int, options: WorkloadOptions, template: str) -> Iterator[Workload]:
    """Yield a workload for each domain of one input, and for each category of a question file. Longer questions are
    left out, as a cut question is another question."""
    kind, _, domain = name.partition(":")
    if kind == _DEMO:
        for each in demo.DOMAINS if domain == _ALL else (domain or "summary",):
            prompts = demo_prompts(llm, each, context=context, num_prompts=options.num_prompts, seed=options.seed)
            yield _of_domain(each, prompts, context)
    elif is_question_file(name):
        encode = _text_encoder(llm)
        by_category: dict[str, list[list[int]]] = {}
        for question in read_questions(name):
            by_category.setdefault(question.category, []).append(encode(question.turns[0]))
        for category, prompts in by_category.items():
            fitting = [prompt for prompt in prompts if len(prompt) <= context]
            num_left_out = len(prompts) - len(fitting)
            yield _of_domain(category, fitting[: options.num_prompts], context, num_left_out=num_left_out)
    else:
        builder = PromptBuilder(llm=llm, params=SamplingParams(), template=template, max_prompt_tokens=context)
        documents = file_documents(name, options.num_prompts)
        yield _of_domain(Path(name).stem, [builder.tokens(document) for document in documents], context)


def _of_domain(domain: str, prompts: list[list[int]], context: int, num_left_out: int = 0) -> Workload:
    return Workload(
        name=f"{domain}-{context}",
        domain=domain,
        prompts=prompts,
        domains=[domain] * len(prompts),
        context=context,
        num_left_out=num_left_out,
    )


def _each_once(inputs: Sequence[str]) -> Sequence[str]:
    return list(dict.fromkeys("demo:summary" if name == _DEMO else name for name in inputs))


def _check(workloads: Sequence[Workload], context: int) -> None:
    names = Counter(workload.domain for workload in workloads)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise ConfigError(f"option 'input' gives two workloads named {name!r}: name it once, or rename one")
    if not any(workload.prompts for workload in workloads):
        raise ConfigError(f"option 'context' is {context}, and none of the prompts is as short: raise it")
