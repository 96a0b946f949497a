"""Which replicas count as well, as silent, and as lost; and the rates that they report."""

import asyncio
import time
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray import serve

from rayspec.pool.stopped import Place
from rayspec.serve.watch import PERIOD_S, RecentRates, Watch, WatchedReplica
from rayspec.types import EngineStats

TIMEOUT_S = 60.0


HANDLE = SimpleNamespace(
    app_name="app", deployment_name="Model:m", is_initialized=True, running_replicas_populated=lambda: True
)


def report(health: str = "ready", problem: str | None = None) -> Any:
    status = SimpleNamespace(health=health)
    return SimpleNamespace(status=status, place=Place(node_id="n", process_id=1), problem=problem)


def watched(*reports: Any) -> tuple[Watch, list[WatchedReplica]]:
    """A watch that has found replicas of the model "m" with these reports."""
    watch = Watch({"m": HANDLE}, replica_timeout_s=TIMEOUT_S)
    replicas = [WatchedReplica(actor=Mock(), report=one) for one in reports]
    watch.replicas["m"] = dict(zip("abc", replicas, strict=False))
    return watch, replicas


async def looked(
    watch: Watch, patch: pytest.MonkeyPatch, names: set[str], status: str = "UPDATING", trigger: str = "", num: int = 1
) -> None:
    """Serve sends requests to these replicas, and says this of the model. num: how many replicas it has itself."""
    model = SimpleNamespace(status=status, status_trigger=trigger, replica_states={"RUNNING": num})
    app = SimpleNamespace(deployments={"Model:m": model})
    patch.setattr("rayspec.serve.watch.replicas_of", lambda _app, _deployment: names)
    patch.setattr(ray, "is_initialized", lambda: True)
    patch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app}))
    await watch.look()
    await watch.ask_serve()


def silent(watch: Watch, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        watch.count_silence(PERIOD_S)


def test_before_anyone_has_looked_requests_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch({"m": None}, replica_timeout_s=TIMEOUT_S)
    assert (watch.can_serve("m"), watch.problem("m")) == (True, "starting")
    later_s = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not watch.can_serve("m"), "no replica has ever started"


def test_a_model_that_has_scaled_to_zero_is_no_problem() -> None:
    """A load balancer that believes /health would send no request, and so nothing would start a replica."""
    watch = Watch({"m": None, "n": None}, replica_timeout_s=TIMEOUT_S, may_be_absent={"m"})
    assert watch.known_problems == ["n: starting"]
    asyncio.run(Watch({"m": None}, replica_timeout_s=TIMEOUT_S, may_be_absent={"m"}).ask_serve())  # asks nothing
    watch.replicas |= {"m": {}, "n": {}}
    assert watch.known_problems == ["n: starting"]


@pytest.mark.parametrize("trigger", ["REPLICA_STARTUP_FAILED", "AUTOSCALING"])
def test_a_model_whose_replicas_fail_to_start_is_a_problem(trigger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks like a model that has scaled to zero."""
    watch = Watch({"m": HANDLE}, replica_timeout_s=TIMEOUT_S, may_be_absent={"m"})
    model = SimpleNamespace(status_trigger=trigger)
    app = SimpleNamespace(deployments={"Model:m": model})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app, "other": app}))
    problems = ["m: its replicas fail to start"] if trigger == "REPLICA_STARTUP_FAILED" else []
    assert asyncio.run(watch.problems()) == problems


def test_serve_is_asked_by_one_thread_however_often_the_health_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Serve's controller did not answer, the threads of all other work waited for it."""
    watch, asked, goes_on = Watch({"m": HANDLE}, replica_timeout_s=60, may_be_absent={"m"}), list[int](), Event()
    monkeypatch.setattr("rayspec.serve.watch._STATUS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: asked.append(1) or goes_on.wait(60))

    async def run() -> None:
        assert await asyncio.gather(*(watch.problems() for _ in range(4))) == [[]] * 4
        assert await watch.problems() == []
        goes_on.set()

    asyncio.run(run())
    assert len(asked) == 1


@pytest.mark.parametrize("health", ["unknown", "ready", "engine dead"])
def test_requests_wait_for_a_replica_until_its_successor_serves(health: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before anyone has looked after its end, and while Serve still says that the model is healthy."""
    killed = list[Any]()
    monkeypatch.setattr(ray, "kill", lambda actor, **_: killed.append(actor))
    watch, (replica,) = watched(None if health == "unknown" else report(health))
    asyncio.run(looked(watch, monkeypatch, {"a"}, "HEALTHY"))
    is_dead = health == "engine dead"
    assert (watch.must_wait("m"), killed) == (is_dead, [replica.actor] * is_dead)
    replica.answered(None)
    assert (watch.can_serve("m"), watch.must_wait("m"), watch.problem("m")) == (True, True, "starting")
    for status, trigger in (("HEALTHY", ""), ("UNHEALTHY", "HEALTH_CHECK_FAILED"), ("UPDATING", "")):
        asyncio.run(looked(watch, monkeypatch, set(), status, trigger))
        assert watch.replicas["m"] == {}
        assert (watch.can_serve("m"), watch.must_wait("m")) == (True, True)
    monkeypatch.setattr("rayspec.serve.watch.replicas_of", lambda _app, _deployment: {"b"})
    assert not watch.must_wait("m"), "Serve sends requests to the successor"
    begun_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun_s + 601)
    asyncio.run(looked(watch, monkeypatch, set(), "UPDATING"))
    assert not watch.can_serve("m"), "as without a place"


def test_a_serve_config_file_may_let_a_model_scale_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `deployments`, which the ingress does not see. Requests waited for a replica that only they could start."""
    watch, _ = watched()
    asyncio.run(looked(watch, monkeypatch, set(), "HEALTHY", num=0))
    assert (watch.must_wait("m"), watch.can_serve("m"), watch.problem("m")) == (False, True, None)


@pytest.mark.parametrize("given", [("UNHEALTHY", "REPLICA_STARTUP_FAILED"), ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED")])
def test_requests_wait_no_longer_when_serve_gives_up(given: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _ = watched()
    assert watch.can_serve("m")
    asyncio.run(looked(watch, monkeypatch, set(), *given))
    assert not watch.can_serve("m")
    asyncio.run(looked(watch, monkeypatch, set(), "UPDATING"))
    assert watch.can_serve("m"), "its options have changed"


@pytest.mark.parametrize("before", [None, report()])
def test_a_silent_replica_is_ill_first_and_lost_later(before: Any) -> None:
    watch, (replica,) = watched(before)
    silent(watch, 5)
    assert watch.problem("m") == ("starting" if before is None else None)
    silent(watch, 2)
    assert (watch.problem("m"), replica.fault(TIMEOUT_S), watch.can_serve("m")) == ("no answer", None, True)
    silent(watch, 54)
    assert replica.fault(TIMEOUT_S) == "its process has not answered for 61 s (replica_timeout_s)"
    replica.answered(None)
    assert (watch.problem("m"), replica.fault(TIMEOUT_S)) == ("starting", None)
    silent(watch, 61)
    assert replica.fault(TIMEOUT_S) is not None


def test_a_stopped_replica_is_lost_at_once_and_an_answer_ends_the_silence() -> None:
    watch, (replica,) = watched(report())
    replica.is_stopped = True
    assert replica.fault(TIMEOUT_S) == "its process is stopped (SIGSTOP)"
    for _ in range(50):
        replica.answered(report())
        silent(watch, 2.5)
        assert (watch.problem("m"), replica.fault(TIMEOUT_S)) == (None, None)


def test_a_machine_that_slept_and_a_replica_that_starts_are_no_problem() -> None:
    watch, (replica, _) = watched(report(), None)
    watch.count_silence(3600.0)
    assert (watch.problem("m"), replica.fault(TIMEOUT_S)) == (None, None)


def test_an_engine_that_is_stuck_is_lost_and_one_that_recovers_is_not() -> None:
    watch, replicas = watched(report("stuck", "has not finished a pass for 74 s"), report("recovering"))
    faults = [one.fault(TIMEOUT_S) for one in replicas]
    assert faults == ["its engine has not finished a pass for 74 s (engine_timeout_s)", None]
    assert (watch.problem("m"), watch.can_serve("m")) == ("recovering, stuck", True)


def test_a_replica_that_starts_is_no_problem_beside_one_that_is_ready() -> None:
    watch, (first, second) = watched(report(), report())
    second.answered(None)
    assert watch.problem("m") is None
    first.answered(None)
    assert watch.problem("m") == "starting"


def test_rates_are_of_the_window_and_begin_with_a_burst() -> None:
    rates, stats = RecentRates(), EngineStats()  # the engine's own, which grows
    assert (rates.tokens_per_s, rates.grown.acceptance_rate, rates.grown.mean_accepted_length) == (0.0, None, None)
    for second in range(16):
        grown = max(0, second - 8)
        stats.num_generated_tokens = 1000 + 20 * grown
        stats.num_draft_tokens, stats.num_accepted_tokens = 100 + 8 * grown, 6 * grown
        stats.num_rounds, stats.num_plain_rounds = 50 + 3 * grown, grown
        rates.add(stats, float(second))
    assert rates.tokens_per_s == pytest.approx(20.0)
    assert rates.grown.acceptance_rate == pytest.approx(6 / 8)
    assert rates.grown.mean_accepted_length == pytest.approx(1 + 6 / 2)
    for second in range(16, 30):
        rates.add(stats, float(second))
    assert rates.tokens_per_s == 0.0
