from pathlib import Path

import pytest


@pytest.fixture
def own_ray_folder(tmp_path: Path, ray_folder: Path, ray_environment: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = ray_folder / tmp_path.name[-6:]
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    return folder
