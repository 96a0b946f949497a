"""What all tests share: no network, nothing left in the user's folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from rayspec.pipeline.session import ray_session

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for matrices this small a second thread only gets in the way
# The same few examples in every run; `make test-all` asks for many, other ones each time.
hypothesis.settings.register_profile("few", max_examples=25, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("many", max_examples=200, deadline=None)
hypothesis.settings.load_profile("few")

# They share an endpoint, whose start takes longer than most of their tests.
_ENDPOINT_FILES = {f"tests/serve/test_{name}.py" for name in ("clients", "failures", "fuzz", "load")}


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Deals tests to processes file by file; files that share an endpoint are one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "endpoint" if file in _ENDPOINT_FILES else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where latency profiles are saved meanwhile: one folder for the whole run, so that each is measured once."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


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
    with ray_session():
        yield
