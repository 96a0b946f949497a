"""What all tests share: no network, nothing left in the user's folders."""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ["HF_HUB_OFFLINE"] = "1"
# The processes of the tests run the code of this checkout, also where another one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # The processes of the tests import torch, transformers and Ray again and again. Compiling those takes most of the
    # time of a start, so what is compiled is kept, here instead of beside the sources.
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parent.parent / ".pytest_cache" / "compiled"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for matrices this small a second thread only gets in the way
# Shells start background processes with SIGINT ignored, and children inherit that; some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same few examples in every run; `make test-all` asks for many, other ones each time.
hypothesis.settings.register_profile("few", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("many", max_examples=200, deadline=None)
hypothesis.settings.load_profile("few")

# Tests with processes of their own, one after another: all at once they would wait for each other. The first use one
# Ray, the next one endpoint.
_OTHER_PROCESSES = tuple(
    f"tests/{name}.py"
    for name in (
        "batch/test_drain", "batch/test_job", "batch/test_processor", "batch/test_ray_backend", "batch/test_tables",
        "benchmarks/test_on_ray", "jobs/test_openai_batch", "jobs/test_summarize", "ops/plan/test_auto",
        "pipeline/test_placement", "pipeline/test_ray_stages", "pool/test_replicas", "pool/test_worker",
        "serve/test_model_server", "serve/test_metrics", "serve/test_endpoint", "serve/test_clients",
        "serve/test_tools", "serve/test_web", "serve/test_batches", "serve/test_attacks", "serve/test_failures",
        "serve/test_fuzz", "jobs/test_jobs_api", "test_ray_session",
    )
)  # fmt: skip


# Only `-m gpu` sees a GPU. In all other runs kernels run in Triton's interpreter, and everything else on a CPU. Triton
# asks when it is imported, which the conftest of a folder may do before `pytest_configure`.
_WITHOUT_GPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
_before = {name: os.environ.get(name) for name in _WITHOUT_GPU}
os.environ.update(_WITHOUT_GPU)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        for name, value in _before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _scope(nodeid: str) -> str:
    """What is dealt to a process as one: a file, those with other processes, or a test on a GPU."""
    file = nodeid.split("::", 1)[0]
    return "other processes" if file in _OTHER_PROCESSES else nodeid if file == "tests/test_cuda.py" else file


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Deals tests to processes file by file, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False
    return _ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is there once all tests are collected stays to the end: the garbage collector need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # passes of models make many tuples, and hardly a cycle
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left alone with it in the end."""
    order = {file: place for place, file in enumerate(_OTHER_PROCESSES)}
    for item in items:
        file, fixtures = item.nodeid.split("::", 1)[0], getattr(item, "fixturenames", ())
        shared = {"ray_cluster", "demo_endpoint"}.intersection(fixtures)
        if shared and file not in order and not item.get_closest_marker("exhaustive"):
            raise pytest.UsageError(f"{file} uses {shared}: add it to _OTHER_PROCESSES, or it starts a second one")
    items.sort(key=lambda item: order.get(item.nodeid.split("::", 1)[0], len(order)))


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where latency profiles are saved meanwhile: one folder for all processes of the run, so that each is measured
    once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def latency_profiles() -> Iterator[None]:
    """Engines of this process that would measure the same for folders of their own have one profile, of fewer repeats
    and warmer caches than in use: what their tests look at are tokens."""
    profile: Any = sys.modules.get("rayspec.decode.profile")
    if profile is None:  # no test needs it, and its import takes seconds
        yield
        return
    kept: dict[str, Any] = {}
    measure = profile.measure

    def measure_once(runner: Any, offloaded: Any = None, budget_s: float | None = None) -> Any:
        sublayers = list(offloaded.sublayers) if offloaded else []
        key = json.dumps([profile.profile_key(runner), sublayers, runner.cache.num_slots], sort_keys=True)
        if key not in kept:
            # On a GPU only the coarse grid, because only texts count there.
            kept[key] = measure(runner, offloaded, None if runner.device.type == "cpu" else 0.0)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_NUM_REPEATS", {"cpu": 2, "cuda": 1})
        patch.setattr(profile, "_CACHE_BYTES", 2**20)
        patch.setattr("rayspec.decode.generate_state._NUM_REPEATS", 2)
        patch.setattr("rayspec.decode.generate_state._NUM_REPEATS_OF_SEQUENCES", 1)
        patch.setattr(profile, "measure", measure_once)
        yield


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`rayspec`, the test file's COMMAND and these words, in a folder of the test's own."""
    from typer.testing import CliRunner  # noqa: PLC0415 - most tests need neither

    from rayspec.cli import app  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    command = getattr(request.module, "COMMAND", ())
    return lambda *words: CliRunner().invoke(app, [*command, *map(str, words)])


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's sessions with a short name: the paths of its sockets may have about 100 characters."""
    folder = Path(tempfile.mkdtemp(prefix="rs-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_environment(ray_folder: Path) -> Iterator[None]:
    """Ray keeps its files to itself, here and in processes started from here."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_TMPDIR", str(ray_folder))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # 5 are too few where the machine does other things
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        patch.delenv(name, raising=False)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def ray_cluster(ray_environment: None) -> Iterator[None]:
    """One private Ray for all tests that need one in this process."""
    # Imported here, so that the tests of engines in one process run where Ray is not installed.
    from rayspec.ray_session import ray_session  # noqa: PLC0415

    with ray_session():
        yield
