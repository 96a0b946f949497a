"""Comparing strategies, and transformers generate, on the same prompts in the same run, repeats interleaved."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import rayspec
from rayspec import demo
from rayspec.config import EngineConfig, SamplingParams
from rayspec.demo.widen import widen
from rayspec.model.weights import load_model, load_tokenizer
from rayspec.service.bench_hf import HfGenerate
from rayspec.service.bench_result import BASELINE, HF, Sample, bench_row
from rayspec.service.documents import Columns, Document, read_documents
from rayspec.service.environment import describe_environment
from rayspec.service.loading import hide_progress_bars, load_llm
from rayspec.service.prompts import PromptBuilder, summary_prompt
from rayspec.types import ConfigError, EngineStats

_MIN_SENTENCES = 8
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What `rayspec bench` compares, and on what. `engine` holds whatever the strategies have in common."""

    engine: EngineConfig
    input: str
    context: int
    strategies: tuple[str, ...]
    max_tokens: int
    num_prompts: int
    batch: int
    repeats: int
    widen: int
    hf: bool


class Contender(Protocol):
    """Something that completes prompts."""

    @property
    def used(self) -> EngineStats:
        """What it did since it was warm."""

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None: ...

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Seconds, those of the prompts, and the tokens of every output. Raises what a prompt failed with."""


def run_bench(options: BenchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Loads every contender, warms it up, and lets them take turns. Raises ConfigError, CheckpointError."""
    names = _names(options)
    hide_progress_bars()
    with model_folder(options.engine, options.widen) as folder, ExitStack() as stack:
        say("loading")
        baseline = stack.enter_context(load_llm(engine_config(options, folder, BASELINE)))
        contenders: dict[str, Contender] = {BASELINE: Ours(baseline)}
        for name in names[1:]:
            if name == HF:
                contenders[name] = HfGenerate(engine_config(options, folder, BASELINE), batch=options.batch)
            else:
                contenders[name] = Ours(stack.enter_context(load_llm(engine_config(options, folder, name))))
        prompts = make_prompts(baseline, options)
        samples = _take_turns(contenders, prompts, options, say)
        rows = [asdict(bench_row(name, samples, contender.used)) for name, contender in contenders.items()]
    asked = asdict(options) | {"engine": options.engine.model_dump(mode="json")}
    prompt_tokens = [len(prompt) for prompt in prompts]
    return {"environment": describe_environment(), "options": asked, "prompt_tokens": prompt_tokens, "results": rows}


def _take_turns(
    contenders: Mapping[str, Contender], prompts: Sequence[list[int]], options: BenchOptions, say: Callable[[str], None]
) -> dict[str, list[Sample]]:
    for name, contender in contenders.items():
        say(f"warming up {name}")
        contender.warm_up(prompts, _WARM_UP_TOKENS)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for repeat, (name, contender) in itertools.product(range(options.repeats), contenders.items()):
        sample = Sample(*contender.run(prompts, options.max_tokens))
        samples[name].append(sample)
        say(f"repeat {repeat + 1} of {options.repeats}: {name} {sample.tokens_per_s:.1f} tokens/s")
    return samples


class Ours:
    """A strategy of our engine."""

    def __init__(self, llm: rayspec.LLM) -> None:
        self.llm = llm
        self._before = copy.copy(llm.stats)

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self.run(prompts[:1], max_tokens)
        self._before = copy.copy(self.llm.stats)

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[float, float, list[list[int]]]:
        total_s, prefill_s = self.llm.stats.total_s, self.llm.stats.prefill_s
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for output in outputs:
            if output.error is not None:
                raise output.error
        stats = self.llm.stats
        return stats.total_s - total_s, stats.prefill_s - prefill_s, [list(o.outputs[0].token_ids) for o in outputs]

    @property
    def used(self) -> EngineStats:
        now, before = self.llm.stats, self._before
        counts = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
        times = ("draft_s", "verify_s", "optimise_s", "total_s")
        changed = {name: getattr(now, name) - getattr(before, name) for name in (*counts, *times)}
        return EngineStats(**changed, gate_reason=now.gate_reason, plans=now.plans)


@contextmanager
def model_folder(config: EngineConfig, factor: int) -> Iterator[str]:
    """The model's own place, or a temporary folder with the widened model."""
    place = demo.model_path() if config.model == "demo" else config.model
    if factor == 1:
        yield place
        return
    local = config.replace(model=place)
    with tempfile.TemporaryDirectory(prefix="rayspec-wide-") as folder:
        try:
            wide = widen(load_model(local), factor)
        except ValueError as error:
            raise ConfigError(f"option 'widen' is {factor}: {error}") from error
        wide.save_pretrained(folder)
        load_tokenizer(local).save_pretrained(folder)
        del wide
        yield folder


def engine_config(options: BenchOptions, folder: str, strategy: str) -> EngineConfig:
    base = options.engine
    skip = base.speculation.skip if strategy == "static" else ()
    return base.replace(
        model=folder,
        max_num_seqs=options.batch,
        max_model_len=base.max_model_len or options.context + options.max_tokens,
        speculation=base.speculation.replace(strategy=strategy, skip=skip),
    )


def make_prompts(llm: rayspec.LLM, options: BenchOptions) -> list[list[int]]:
    """Token ids of each prompt, at most `options.context` long."""
    prompts = bench_prompts(llm, options, SamplingParams())
    documents = bench_documents(prompts, options)
    return [list(prompts.request(document.id, document).prompt_token_ids or ()) for document in documents]


def bench_prompts(llm: rayspec.LLM, options: BenchOptions, params: SamplingParams) -> PromptBuilder:
    """Cuts documents to `options.context` tokens."""
    return PromptBuilder(
        llm=llm,
        params=params,
        template=summary_prompt(options.engine.model),
        max_prompt_tokens=options.context,
    )


def bench_documents(prompts: PromptBuilder, options: BenchOptions) -> list[Document]:
    """So many of the input as the options say. Raises ConfigError, and what is wrong with a document."""
    return _demo_documents(prompts, options) if options.input == "demo" else _file_documents(options)


def _names(options: BenchOptions) -> list[str]:
    for name in options.strategies:
        if name != HF:
            options.engine.speculation.replace(strategy=name, skip=())  # raises, naming the nearest
    return list(dict.fromkeys([BASELINE, *options.strategies, *([HF] if options.hf else [])]))


def _demo_documents(prompts: PromptBuilder, options: BenchOptions) -> list[Document]:
    """Reports as long as fit the context, so that nothing of them is cut."""
    whole = PromptBuilder(llm=prompts.llm, params=prompts.params, template=prompts.template)
    num_sentences = max(_MIN_SENTENCES, options.context // 15)
    while True:
        samples = demo.sample_documents(options.num_prompts, num_sentences=num_sentences)
        documents = [Document(id=sample.id, source="demo", text=sample.text) for sample in samples]
        longest = max(len(whole.request(document.id, document).prompt_token_ids or ()) for document in documents)
        if longest <= options.context or num_sentences <= _MIN_SENTENCES:
            return documents
        num_sentences = max(_MIN_SENTENCES, min(num_sentences - 1, num_sentences * options.context // longest))


def _file_documents(options: BenchOptions) -> list[Document]:
    documents = list(itertools.islice(read_documents([options.input], Columns()), options.num_prompts))
    for document in documents:
        if document.error is not None:
            raise document.error
    return documents
