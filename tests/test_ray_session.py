"""Starting and losing a private Ray, each in a process of its own: signals end processes."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services, utils, worker

from rayspec.batch.ray_backend import idle_gpus
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.machine import num_cores
from rayspec.pipeline.placement import sized
from rayspec.ray_session import _own_groups, _signals_wait, _start
from rayspec.serve.app import with_sizes
from rayspec.serve.options import ServeOptions
from tests.exhaustive import few_of
from tests.jobs.job_process import processes_of, wait_until_gone

LOSING = """
    import signal
    import sys
    import ray
    from rayspec.ray_session import ClusterLostError, _own_process, ray_session

    @ray.remote(num_cpus=0)
    class Busy:
        def ready(self):
            pass

        def work(self):
            import time
            time.sleep(600)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    try:
        with ray_session(say=lambda text: print(text, flush=True)):
            busy = Busy.remote()
            ray.get(busy.ready.remote())
            work = busy.work.remote()
            _own_process(sys.argv[1]).kill()
            ray.get(work)
    except ClusterLostError as error:
        sys.exit(f"lost: {error}")
"""


def start(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=os.environ | {"RAY_TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.exhaustive
@pytest.mark.ray
def test_a_lost_control_process_is_one_error_soon_and_leaves_no_processes(
    ray_folder: Path, ray_environment: None
) -> None:
    folder = ray_folder / "lost"
    folder.mkdir()
    process = start(LOSING, folder, "gcs_server")
    output, _ = process.communicate(timeout=55)  # Ray itself ends the process after 60 s
    assert process.returncode == 1, output
    assert output.splitlines()[-1].startswith("lost: Ray's control process (gcs_server) has ended"), output
    wait_until_gone(folder, 60)


@pytest.mark.exhaustive
@pytest.mark.ray
def test_a_lost_raylet_gives_a_line_before_ray_ends_the_process(ray_folder: Path, ray_environment: None) -> None:
    folder = ray_folder / "raylet"
    folder.mkdir()
    process = start(LOSING, folder, "raylet")
    output, _ = process.communicate(timeout=55)
    assert process.returncode == 1, output
    assert "\nRay's process for this node (raylet) has ended; was it killed, or out of memory?" in output
    wait_until_gone(folder, 60)


SHARING = """
    import ray
    from contextlib import ExitStack
    from rayspec.ray_session import ray_session

    first, second = ExitStack(), ExitStack()
    first.enter_context(ray_session(say=print))
    second.enter_context(ray_session(say=print))
    first.close()
    print(ray.is_initialized())
    second.close()
    print(ray.is_initialized())
"""


@pytest.mark.ray
def test_the_last_of_the_sessions_that_share_a_ray_stops_it(ray_folder: Path, ray_environment: None) -> None:
    folder = ray_folder / "sharing"
    folder.mkdir()
    output, _ = start(SHARING, folder).communicate(timeout=280)
    assert output.splitlines() == ["starting Ray on this machine", "True", "False"]
    wait_until_gone(folder, 60)


STARTING = """
    from rayspec.ray_session import ray_session
    from rayspec.command.terminal import clean_exit

    with clean_exit():
        print("begin", flush=True)
        with ray_session():
            print("Ray is there", flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.parametrize("number", few_of([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_while_ray_starts_ends_it_cleanly(
    number: signal.Signals, ray_folder: Path, ray_environment: None
) -> None:
    folder = ray_folder / number.name
    folder.mkdir()
    process = start(STARTING, folder)
    while not any("gcs_server" in command for command in processes_of(folder)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (128 + number, "begin\n")
    wait_until_gone(folder, 60)


@pytest.mark.ray
def test_workers_have_the_priority_of_the_process_that_starts_ray(ray_cluster: None) -> None:
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_ray_calls_what_we_replace_by_these_names() -> None:
    assert "ray._private.utils.set_sigterm_handler(" in inspect.getsource(worker.init), "Ray has renamed it"
    starts = inspect.getsource(services.start_ray_process)
    assert "ray._private.utils.set_kill_on_parent_death_linux()" in starts, "Ray has renamed it"


def test_processes_of_ray_have_groups_of_their_own() -> None:
    """So a signal to the group of the command does not end Ray before it."""
    with _own_groups():
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=utils.set_kill_on_parent_death_linux)  # noqa: PLW1509
    with child:
        assert os.getpgid(child.pid) == child.pid
    assert utils.set_kill_on_parent_death_linux.__module__ == utils.__name__


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    steps = []
    with pytest.raises(SystemExit) as ended, _signals_wait():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("after the signal")
    assert (ended.value.code, steps) == (143, ["after the signal"])
    with pytest.raises(KeyboardInterrupt), _signals_wait():
        os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _signals_wait():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_those_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, print)
        with _signals_wait():
            utils.set_sigterm_handler(repr)
        assert signal.getsignal(signal.SIGTERM) is print
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with _signals_wait():
            utils.set_sigterm_handler(repr)
        assert signal.getsignal(signal.SIGTERM) is repr  # there was none: Ray's
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def errors_of_a_session(**environment: str) -> str:
    script = "from rayspec.ray_session import ray_session\nwith ray_session(): pass"
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize("address", ["nonsense://x", "127.0.0.1:1"])
def test_an_address_without_a_ray_is_named(address: str, tmp_path: Path) -> None:
    found = errors_of_a_session(RAY_ADDRESS=address, RAY_TMPDIR=str(tmp_path))
    assert f"ConfigError: RAY_ADDRESS is '{address}', and Ray cannot be used there" in found


def test_a_signal_ends_a_wait_for_an_address_that_does_not_answer(tmp_path: Path) -> None:
    session = "with ray_session(say=lambda text: print(text, flush=True)): pass"
    script = f"from rayspec.ray_session import ray_session\n{session}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = os.environ | {"RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"connecting to Ray at {address}\n".encode()
            listener.accept()  # whether something listens, before Ray waits for an answer
            process.terminate()
            assert process.wait(30) == -signal.SIGTERM


def test_a_missing_token_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
        found = errors_of_a_session(RAY_ADDRESS=address, RAY_TMPDIR=str(tmp_path), **environment)
    assert f"ConfigError: RAY_ADDRESS is '{address}', and Ray cannot be used there (Token authentication" in found


def test_a_ray_that_cannot_start_is_an_error_and_leaves_no_processes(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)  # too long for the paths of Ray's sockets
    folder.mkdir()
    found = errors_of_a_session(RAY_TMPDIR=str(folder))
    assert "ClusterStartError: Ray could not start on this machine (" in found
    assert str(folder) in found
    wait_until_gone(folder, 60)


@pytest.mark.parametrize(
    ("name", "seqs", "tokens"), [("AMD-Instinct-MI300X-OAM", 256, 8192), ("H100", 256, 8192), ("L4", 64, 4096)]
)
def test_sizes_are_those_of_the_clusters_gpus_where_this_process_has_none(
    name: str, seqs: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"CPU": 1.0, "GPU": 4.0, f"accelerator_type:{name}": 1.0}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    engines = [sized(EngineConfig(model="m", device=device)) for device in ("auto", "cpu")]
    assert [(one.num_seqs, one.num_batched_tokens) for one in engines] == [(seqs, tokens), (8, 1024)]
    config: Any = {"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"max_num_batched_tokens": 99}}
    (served,) = with_sizes(ServeOptions(llm_configs=(config,))).llm_configs
    assert (served.engine.num_seqs, served.max_ongoing_requests) == (seqs, 2 * seqs)
    assert served.engine.num_batched_tokens == 99
    told = "{} of the 4 GPUs here run the model; --replicas {} uses all of them"
    layouts: list[dict[str, Any]] = [{}, {"stages": 2}, {"gpus_per_shard": 0.5, "replicas": 7}, {"replicas": 4}]
    idle = [idle_gpus(EngineConfig(model="m", parallel=parallel)) for parallel in layouts]
    assert idle == [told.format(1, 4), told.format(2, 2), told.format(3.5, 8), None]
    assert idle_gpus(engines[1]) is None


@pytest.mark.parametrize(
    ("parallel", "least", "address"),
    [
        (ParallelOptions(stages=20, tensor=2), 41, None),
        (ParallelOptions(stages=20, replicas=2, cpus_per_shard=0.5), 21, "local"),
        (ParallelOptions(replicas=64), 4, ""),  # replicas without shards share what there is
    ],
)
def test_a_private_cluster_has_the_cpus_that_shards_reserve_and_no_dashboard(
    monkeypatch: pytest.MonkeyPatch, parallel: ParallelOptions, least: int, address: str | None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    _start(parallel.num_cpus)
    assert given["num_cpus"] == max(least, num_cores())
    assert (given["address"], given["include_dashboard"]) == ("local", False)


def test_a_relative_folder_of_ray_is_that_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's processes look for it in folders of their own, and Ray would not start."""
    found: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: found.append(os.environ["RAY_TMPDIR"]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "of-ray")
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    monkeypatch.chdir(tmp_path)
    _start(0)
    assert found == [str(tmp_path / "of-ray")]
