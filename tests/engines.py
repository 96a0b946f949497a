"""Engines over a model that is loaded once, and selectors that try harder than any real one to break them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from typing_extensions import Self

from rayspec.choices import FULL, SKIP, Choice, choices_of, combinations, keys_of
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode import loading
from rayspec.decode.engine import Engine
from rayspec.decode.requests import ModelInfo
from rayspec.decode.runner import Mark, Runner
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.search import Knapsack
from rayspec.decode.stages import LocalStages, Stages
from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.decode.work import GenerationDefaults, KeepDrafting, Pass, Result, Round, RoundEntry, RoundResult, Work
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, WindowedPages
from rayspec.model.row_counts import FIXED
from rayspec.model.static_rows import StepBuffers
from rayspec.model.sublayers import Decomposition
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan, PlanRecord, Request, RequestOutput, no_draft

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
# Positions behind the newest token whose windows stay, for plan searches.
NUM_BEHIND = 24
# Drafts that read few keys do so from the fourth page on.
TINY_BUDGETS = KeyBudgets(window=KeyBudget(newest=1), pages=KeyBudget(newest=1, looked_at=1))
ALL_CHOICES = combinations(("skip", "int8", "int4", "window", "pages"))


@contextmanager
def tiny_budgets() -> Iterator[None]:
    """Arenas that are made meanwhile have these budgets, wherever they are loaded."""
    with patch.object(loading, "KVCache", partial(KVCache, budgets=TINY_BUDGETS)):
        yield


def ways_of(parts: Decomposition, choices: Sequence[Choice] = ALL_CHOICES) -> list[list[Choice]]:
    """Of each sublayer, by which of these choices it can run; skip among them."""
    return [[one for one in choices if one == SKIP or sublayer.can_run(one)] for sublayer in parts.sublayers]


def random_plan(rng: random.Random, num_sublayers: int, max_draft_tokens: int) -> Plan:
    """Nothing, everything, all attention or all MLP skipped, or a random set of random size."""
    kind = rng.choice(["nothing", "everything", "attention", "mlp", "some", "some", "some", "few", "few", "few"])
    number = {"some": rng.randint(0, num_sublayers), "few": rng.randint(1, 2)}.get(kind, 0)
    skip = {
        "nothing": set(),
        "everything": set(range(num_sublayers)),
        "attention": set(range(0, num_sublayers, 2)),
        "mlp": set(range(1, num_sublayers, 2)),
    }.get(kind, set(rng.sample(range(num_sublayers), number)))
    keep = tuple(index not in skip for index in range(num_sublayers))
    num_lookup_tokens = rng.randint(1, max_draft_tokens) if rng.random() < 0.4 and max_draft_tokens else 0
    num_draft_tokens = rng.randint(0, max_draft_tokens)
    return Plan(
        choices=choices_of(keep), num_draft_tokens=num_draft_tokens, source=kind, num_lookup_tokens=num_lookup_tokens
    )


def varied(rng: random.Random, plan: Plan, ways: Sequence[Sequence[Choice]]) -> Plan:
    """The plan, whose sublayers run by some of their ways: all by any, nearly all in full, or all by one."""
    kind = rng.choice(["any", "any", "few", "one"])
    share = {"any": 1.0, "few": 0.3, "one": 1.0}[kind]
    names = list(dict.fromkeys(choice for each in ways for choice in each if choice != SKIP))
    only = [rng.choice(names)] if kind == "one" else names
    choices = []
    for choice, each in zip(plan.choices, ways, strict=True):
        possible = [one for one in each if one in only]
        choices.append(rng.choice(possible) if choice == FULL and possible and rng.random() < share else choice)
    return replace(plan, choices=tuple(choices))


def branching(rng: random.Random, plan: Plan) -> Plan:
    """The plan, now and then with trees."""
    widths = (1, 2, 3, 5) if rng.random() < 0.4 else ()
    return replace(plan, tree_widths=widths, lookahead=rng.random() < 0.15)


class RandomPlans:
    """Another random plan in every round; drafts end at random, and hidden states are captured now and then. ways: of
    each sublayer, by which choices it can run; by default in full or not at all."""

    status = "random"

    def __init__(
        self,
        seed: int,
        num_sublayers: int,
        max_draft_tokens: int = 6,
        *,
        ways: Sequence[Sequence[Choice]] | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._branch_rng = random.Random(f"branches {seed}")
        self._choice_rng = random.Random(f"choices {seed}")
        self._ways = ways
        self._num_sublayers = num_sublayers
        self._max_draft_tokens = max_draft_tokens
        self.plans: list[Plan] = []
        self.num_searches = 0

    def choose(self, state: BatchState) -> RoundPlan:
        plan = random_plan(self._rng, self._num_sublayers, self._max_draft_tokens)
        if self._ways is not None:
            plan = varied(self._choice_rng, plan, self._ways)
        self.plans.append(branching(self._branch_rng, plan))
        return RoundPlan(plan=self.plans[-1], keep_drafting=self.rule(), capture=self._rng.random() < 0.25)

    def rule(self) -> KeepDrafting | None:
        if self._rng.random() < 0.5:
            return None
        return lambda confidences: [self._rng.random() < 0.7 for _ in confidences]

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        assert num_tokens > 0 or not any(one.finite for one in result.committed)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Searches now and then, as in the middle of everything one would, which must leave no trace."""
        if self._rng.random() < 0.1:
            savings: list[dict[Choice, int]] = [{SKIP: 2 - index % 2} for index in range(self._num_sublayers)]
            for each, ways in zip(savings, self._ways or (), strict=False):
                each.update({choice: 1 for choice in ways if choice not in (FULL, SKIP)})
            also = [plan.choices for plan in self.plans[-2:]]
            question = Knapsack(
                num_tokens=4, savings=savings, max_saved=5, min_similarity=-1.0, max_states=4, also=also
            )
            under_way = ask(question)
            self.num_searches += under_way is not None
        return None


def step_buffers(parts: Decomposition, cache: KVCache, *, max_places: int) -> StepBuffers:
    return StepBuffers(
        cache,
        max_rows=1024,
        max_sequences=16,
        max_places=max_places,
        hidden_size=parts.config.hidden_size,
        dtype=parts.dtype,
        device=parts.device,
    )


def windowed_pages(
    windows: Collection[int],
    num_slots: int,
    config: EngineConfig,
    *,
    max_rows: int,
    num_cohorts: int = 1,
    is_forced: bool = False,
) -> WindowedPages | None:
    """The pages of a windowed store for layers with these windows, if it is forced or smaller than a store of
    `num_slots`."""
    if not windows:
        return None
    needed = WindowedPages.num_slots_needed(
        max(windows),
        NUM_BEHIND,
        max_num_seqs=config.num_seqs,
        max_rows=max_rows,
        max_prefill_tokens=config.num_batched_tokens,
        num_cohorts=num_cohorts,
    )
    return WindowedPages(needed, max(windows), NUM_BEHIND) if is_forced or needed < num_slots else None


def engine_with(
    parts: Decomposition,
    strategy: Strategy | Plan | None = None,
    *,
    wrap: Callable[[LocalStages], Stages] = lambda stages: stages,
    eos: Sequence[int] = (),
    defaults: GenerationDefaults | None = None,
    max_model_len: int = 1024,
    tokenizer: Any = None,
    verification: str = "coupled",
    max_draft_tokens: int = 6,
    num_beside: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    choices: Sequence[Choice] = (FULL, SKIP),
    is_static: bool = False,
    capture: Callable[[Decomposition, StepBuffers], StepGraphs] | None = None,
    has_windowed_store: bool = False,
    **options: Any,
) -> Engine:
    """An engine like `load_engine`'s over parts that are loaded already. No strategy: plain decoding. choices: by which
    drafts may run sublayers; those that read few keys have tiny budgets. is_static: passes run in static buffers, and
    the host looks at drafts every few steps, as on a GPU. capture: makes graphs of these passes. has_windowed_store:
    layers with a sliding window have a store of their own, even if it is larger than the other."""
    config = EngineConfig(
        model="test", device="cpu", max_model_len=max_model_len, **({"kv_cache_tokens": 4096} | options)
    )
    num_sublayers = len(parts.sublayers)
    if strategy is None:
        strategy = FixedPlan(no_draft(num_sublayers, "ar"))
    elif isinstance(strategy, Plan):
        strategy = FixedPlan(strategy)
    assert config.kv_cache_tokens is not None
    counts = FIXED if config.deterministic else None
    device, weight = torch.device("cpu"), parts.final_norm.weight
    assert isinstance(weight, torch.Tensor)
    windowed = windowed_pages(
        parts.windows.values(),
        config.kv_cache_tokens,
        config,
        max_rows=max_draft_tokens + num_beside,
        is_forced=has_windowed_store,
    )
    cache = KVCache(
        parts.shapes,
        config.kv_cache_tokens,
        num_windowed_slots=windowed.pool.num_pages * PAGE_SIZE if windowed else 0,
        windowed_layers=parts.windows,
        dtype=weight.dtype,
        device=device,
        num_spare=counts.least if counts else 1,
        budgets=TINY_BUDGETS,
        notes_pages=any(keys_of(choice) == "pages" for choice in choices),
    )
    buffers = step_buffers(parts, cache, max_places=max_model_len + 64) if is_static or capture else None
    graphs = capture(parts, buffers) if capture and buffers else None
    vocab_size = int(parts.config.get_text_config().vocab_size)
    stages = LocalStages(
        Runner(parts, cache, device=device, row_counts=counts, buffers=buffers, graphs=graphs, choices=choices),
        vocab_size=vocab_size,
        verification=verification,  # type: ignore[arg-type]
        num_tap_tokens=config.num_tap_tokens,
        clock=clock,
    )
    stages.head.draft_look_interval = 3 if is_static else 1
    return Engine(
        config,
        stages=wrap(stages),
        scheduler=Scheduler(
            config.kv_cache_tokens,
            windowed=windowed,
            max_num_seqs=config.num_seqs,
            max_prefill_tokens=config.num_batched_tokens,
            lookahead=max_draft_tokens,
            num_beside=num_beside,
            chunk_grid=config.num_batched_tokens if config.deterministic else None,
            shares_pages=config.enable_prefix_caching,
        ),
        strategy=strategy,
        model=ModelInfo(
            vocab_size=vocab_size,
            eos_token_ids=tuple(eos),
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            defaults=defaults or GenerationDefaults(),
        ),
        clock=clock,
    )


@dataclass(slots=True)
class QueuedEvent:
    """A point in the queue of a device that `clock` is of."""

    clock: RowClock
    reached_s: float

    def synchronize(self) -> None:
        self.clock.now_s = max(self.clock.now_s, self.reached_s)

    def elapsed_time(self, end_event: Self) -> float:
        return 1000 * (end_event.reached_s - self.reached_s)


class RowClock:
    """A clock that stands still but for passes: each row of a pass takes the device a second.

    behind: the device works behind the host, like a GPU; the host waits for it where logits become tokens.
    """

    def __init__(self, *, behind: bool = False) -> None:
        self.now_s = self._done_s = 0.0
        self._behind = behind

    def __call__(self) -> float:
        return self.now_s

    def count(self, stages: LocalStages) -> LocalStages:
        """The stages, whose passes move this clock from now on."""
        run, logits = stages.span.run, stages.head.logits

        def counted(work: Pass, hidden: Tensor | None = None, *, drawn: Tensor | None = None) -> Tensor:
            self._done_s = max(self.now_s, self._done_s) + len(work.token_ids)
            if not self._behind:
                self.now_s = self._done_s
            return run(work, hidden, drawn=drawn)

        def waited(hidden: Tensor) -> Tensor:
            self.now_s = max(self.now_s, self._done_s)
            return logits(hidden)

        stages.span.run, stages.head.logits = counted, waited  # type: ignore[method-assign]
        if self._behind:
            stages.head.stopwatch.mark = lambda: Mark(self(), QueuedEvent(self, max(self.now_s, self._done_s)))  # type: ignore[method-assign]
        return stages


def requests_for(
    prompts: Iterable[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[Request]:
    prompts = list(prompts)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    return [
        Request(request_id=str(index), params=one, prompt_token_ids=prompt)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
    ]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left, and checks that nothing stays behind."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    require_idle(engine)
    return outputs


class Pieces:
    """What streaming requests have told so far, by request id."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[RequestOutput]] = {}

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            earlier = self._pieces.setdefault(output.request_id, [])
            assert not (earlier and earlier[-1].finished), "nothing comes after the end"
            assert output.finished or output.outputs, "every piece but the last tells something"
            earlier.append(output)

    def of(self, request_id: str) -> list[RequestOutput]:
        return self._pieces[request_id]

    def tokens(self, request_id: str, index: int = 0) -> tuple[int, ...]:
        """Of a completion, all pieces joined."""
        found = [one for piece in self.of(request_id) for one in piece.outputs if one.index == index]
        return tuple(token for one in found for token in one.token_ids)

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(one.text for piece in self.of(request_id) for one in piece.outputs if one.index == index)


def streaming(requests: Iterable[Request]) -> list[Request]:
    return [replace(request, stream=True) for request in requests]


def require_idle(engine: Engine) -> None:
    scheduler = engine._scheduler
    assert scheduler.kv.num_used_slots == 0
    if scheduler.kv.windowed is not None:
        assert scheduler.kv.windowed.pool.num_free == scheduler.kv.windowed.pool.num_pages
    assert not scheduler.waiting
    assert not scheduler.running
    assert not engine._under_way
    head = getattr(engine.stages, "head", None)
    assert head is None or not head.samplers
    stats = engine.stats
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert sum(length * count for length, count in stats.accepted_lengths.items()) == stats.num_accepted_tokens


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    """All prompts at once, outputs in their order."""
    requests = requests_for(prompts, params)
    for request in requests:
        engine.add(request)
    outputs = finish(engine)
    return [outputs[request.request_id] for request in requests]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    """The tokens of each request's first output; an error is raised."""
    tokens = []
    for output in outputs:
        if output.error is not None:
            raise output.error
        tokens.append(tuple(output.outputs[0].token_ids))
    return tokens


def random_tree(
    rng: random.Random, max_tokens: int, known: Sequence[int], vocab_size: int
) -> tuple[list[int], list[int]]:
    """Tokens and the row that each follows (`RoundEntry.parents`): deep, wide or neither. Of what is known to come
    next, some tokens lie on it, on any branch."""
    kind = rng.choice(["deep", "wide", "any"])
    token_ids: list[int] = []
    parents: list[int] = []
    depths = [0]
    for row in range(rng.randint(0, max_tokens)):
        parent = {"deep": rng.randint(max(0, row - 2), row), "wide": rng.randint(0, min(row, 2))}.get(
            kind, rng.randint(0, row)
        )
        depth = depths[parent] + 1
        is_known = depth <= len(known) and rng.random() < 0.5
        token_ids.append(known[depth - 1] if is_known else rng.randrange(vocab_size))
        parents.append(parent)
        depths.append(depth)
    return token_ids, parents


def plant_trees(
    engine: Engine, known: Mapping[tuple[str, int], Sequence[int]], seed: int, *, max_tokens: int = 40
) -> None:
    """From now on most entries verify a random tree in place of what they were to. known: the output tokens of requests
    and their sequences, which some branches are made of."""
    rng, start = random.Random(seed), engine.stages.start
    vocab_size = engine.model.vocab_size

    def planted(entry: RoundEntry) -> RoundEntry:
        if rng.random() < 0.2:
            return entry
        _, request_id, index = entry.sequence_id.rstrip("+").split("/")  # after preemptions
        live = engine._requests[request_id]
        expected = known[request_id, int(index)][entry.length - len(live.prompt_token_ids) :]
        limit = min(max_tokens, entry.max_tree_tokens)
        token_ids, parents = random_tree(rng, limit, expected, vocab_size)
        num_probes = rng.randint(0, len(token_ids) // 3)
        return msgspec.structs.replace(entry, looked_up=token_ids, parents=parents, num_probes=num_probes)

    def started(work: Work) -> Future[Result]:
        if isinstance(work, Round) and not work.plan.lookahead:
            work = msgspec.structs.replace(work, entries=[planted(entry) for entry in work.entries])
        return start(work)

    engine.stages.start = started  # type: ignore[method-assign]
