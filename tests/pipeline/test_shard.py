"""A shard's inbox, and its ranks' common step."""

import heapq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rayspec.config import EngineConfig
from rayspec.decode.runner import Runner
from rayspec.decode.search import PlanSearch
from rayspec.decode.stages import SpanRunner
from rayspec.decode.work import Chunk, Move, Pass, Prefill, Round, TappedToken
from rayspec.model.kv_cache import CacheSize, KVCache
from rayspec.model.load_check import lack_of_memory
from rayspec.model.rows import RowSpan, one_run
from rayspec.pipeline import ranks
from rayspec.pipeline import shard as shard_module
from rayspec.pipeline.messages import Begin, Follow, Message, Seek
from rayspec.pipeline.ranks import LeadingSpan, RanksOutOfStepError, follow
from rayspec.pipeline.server import ENGINE, NewEpoch
from rayspec.pipeline.shard import Shard
from rayspec.pipeline.transport import Received, Secret
from rayspec.types import no_draft
from tests.families import changed_checkpoint, checkpoint, parts_of
from tests.pipeline.loop import blueprint_of

PREFILL = Begin(work=Prefill(id=1, chunks=[Chunk("a", RowSpan(one_run(0, 1000), 0, 1), [1], sample=True)]))
ROUND = Begin(work=Round(id=2, entries=[], plan=no_draft(8, "test")))


def a_pass(*, fixed_shape: bool, round_id: int = 1) -> Pass:
    return Pass(round_id=round_id, token_ids=[1], rows=[RowSpan(one_run(0, 1000), 0, 1)], fixed_shape=fixed_shape)


def shard(rank: int = 0, tensor: int = 1, model: str | None = None, **options: Any) -> Shard:
    parallel: Any = {"stages": 2, "tensor": tensor}
    config = EngineConfig(
        model=model or checkpoint("llama"), device="cpu", dtype="float32", parallel=parallel, **options
    )
    return Shard(blueprint_of(config, CacheSize(64), Shard), Secret(), 0, rank)


class _Messages:
    """Come in at known times."""

    def __init__(self, clock: Any, messages: list[tuple[float, Message]]) -> None:
        self._clock, self._messages = clock, messages

    def receive(self, timeout_s: float | None) -> Received | None:
        if not self._messages:
            return None
        self._clock.now, message = self._messages.pop(0)
        return Received(ENGINE, message, [])


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_rounds_overtake_prefills_and_those_searches_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(shard_module, "time", clock)
    later = Begin(work=Round(id=3, entries=[], plan=no_draft(8, "test")))
    last = Begin(work=Round(id=4, entries=[], plan=no_draft(8, "test")))
    seek = Seek(search_id=1, tokens=[], rows=[])
    messages = [(0.0, seek), (0.0, PREFILL), (0.0, ROUND), (0.0, later), (0.05, last), (0.2, ROUND)]
    one = shard()
    one.receive = _Messages(clock, messages).receive  # type: ignore[method-assign]
    one.collect()
    order = [heapq.heappop(one._inbox).received.message for _ in range(6)]
    assert order == [ROUND, later, PREFILL, last, seek, ROUND]


@pytest.mark.parametrize(("rank", "num_forgotten"), [(0, 1), (1, 0)])
def test_in_a_new_epoch_ranks_wait_for_the_leader(
    rank: int, num_forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_epoch() -> None:
        raise NewEpoch

    one = shard(rank, 2)
    one.span, one.head = SpanRunner(_runner(), num_taps=4), None
    one.span.run(Pass(round_id=5, token_ids=[3, 4], rows=[RowSpan(one_run(0, 1000), 0, 2)], save_at=2))
    monkeypatch.setattr(one, "collect", new_epoch)
    one._inbox = [shard_module._Due(0.0, 0, Received("stage-0", Follow(), []))]
    one.serve_epoch()
    assert len(one.span._saved) == 1 - num_forgotten
    assert len(one._inbox) == 1 - num_forgotten


def _runner() -> Runner:
    parts = parts_of(checkpoint("llama"))
    return Runner(
        parts,
        KVCache(parts.shapes, 64, dtype=torch.float32, device=torch.device("cpu")),
        device=torch.device("cpu"),
        row_counts=None,
    )


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[LeadingSpan, SpanRunner]:
    """A leader whose announcements are collected, and a follower. Nothing is broadcast."""
    announced: list[Follow] = []
    monkeypatch.setattr(ranks, "_shared", lambda states: states)
    leader = LeadingSpan(_runner(), num_taps=4, announce=announced.append)
    leader.announced = announced  # type: ignore[attr-defined]
    return leader, SpanRunner(_runner(), num_taps=4)


def test_what_the_leader_runs_moves_and_forgets_the_others_do_too(pair: Any) -> None:
    leader, follower = pair
    saved = Pass(round_id=5, token_ids=[3, 4], rows=[RowSpan(one_run(0, 1000), 0, 2)], save_at=2)
    leader.run(saved)
    leader.move([Move(0, 32), Move(1, 33)])
    for message in leader.announced:
        follow(follower, message, lambda: None)
    for layer, keys in leader.runner.cache.keys.items():
        assert torch.equal(keys, follower.runner.cache.keys[layer])
        assert keys[:, 32:34].abs().sum() > 0
    assert list(leader._saved) == list(follower._saved) == [5]
    leader.forget()
    assert list(leader._saved) == []
    assert list(follower._saved) == [5]
    follow(follower, leader.announced[-1], lambda: None)
    assert list(follower._saved) == []


def test_running_out_of_memory_puts_ranks_out_of_step(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, _ = pair

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    leader.run(replace(a_pass(fixed_shape=True), taps=[(0, TappedToken("a", 0))]))
    monkeypatch.setattr(PlanSearch, "run", full)
    search = leader.search([TappedToken("a", 0)], [RowSpan(one_run(0, 1000), 0, 1)], None)
    monkeypatch.setattr(leader.runner, "run", full)
    for together in (lambda: leader.run(a_pass(fixed_shape=True)), lambda: search.run(0, "full", search.start())):
        with pytest.raises(RanksOutOfStepError, match="allocate memory") as caught:
            together()
        assert lack_of_memory(caught.value) is None, "the shard ends"


def test_a_shard_states_which_weights_and_adapters_it_has_loaded(tmp_path: Path) -> None:
    def scaled(name: str, factor: float) -> str:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.0.mlp.down_proj.weight"] *= factor

        return str(changed_checkpoint("llama", tmp_path / name, change))

    def adapter(name: str, seed: int) -> dict[str, str]:
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        base = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
        get_peft_model(base, config).save_pretrained(tmp_path / name)
        return {"a": str(tmp_path / name)}

    kinds: list[dict[str, Any]] = [
        {},
        {"model": scaled("other", 1.001)},
        {"lora_modules": adapter("one", 1)},
        {"lora_modules": adapter("two", 2)},
    ]
    found = [shard(**options).load(((0, 4), (4, 8)), None).weights for options in kinds]
    assert len(set(found)) == 4
    again = {"model": scaled("same", 1.0)}, {"lora_modules": adapter("again", 1)}
    assert [shard(**options).load(((0, 4), (4, 8)), None).weights for options in again] == [found[0], found[2]]
