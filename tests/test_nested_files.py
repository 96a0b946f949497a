"""A file of JSON may be nested so deeply that Python gives up: this is an error of the file, as others are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rayspec.model.adapters import _config_of
from rayspec.ops.doctor.model_files import _json_errors
from rayspec.ops.plan.forecast import load_profile
from rayspec.planning.latency import LatencyModel, StaleProfileError
from rayspec.types import CheckpointError, ConfigError, RayspecError

_NESTED = b'{"format": "", "model": 0, "key": {"a": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "read", "kind"),
    [
        ("adapter_config.json", lambda file: _config_of(str(file.parent)), CheckpointError),
        ("profile.json", load_profile, ConfigError),
        ("profile.json", lambda file: LatencyModel.load(file, {}), StaleProfileError),
    ],
)
def test_nesting_is_an_error_of_the_file(
    tmp_path: Path, name: str, read: Callable[[Path], object], kind: type[RayspecError]
) -> None:
    (tmp_path / name).write_bytes(_NESTED)
    with pytest.raises(kind, match="recursion"):
        read(tmp_path / name)


def test_doctor_names_a_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(_NESTED)
    (error,) = _json_errors(tmp_path)
    assert "config.json cannot be read" in error
