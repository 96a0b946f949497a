from __future__ import annotations

from pathlib import Path

import pytest

from rayspec.command.settings import NotYamlError, make_settings, parse_yaml
from rayspec.serve.options import read_options_file
from rayspec.types import ConfigError

HOSTILE = [
    "a: {",
    "!!bool x",
    "!!python/object/apply:os.system [true]",
    "2024-13-45",
    "[" * 1000,
    "9" * 5000,
    "\x00",
    "\ud800",
    "model: m\nmodel: n",
    "a: {b: 1, b: 1}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_is_no_yaml_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(NotYamlError, match=r"^not valid YAML: "):
        parse_yaml(text)
    with pytest.raises(ConfigError, match=r"^option 'set' is .*dtype=.*, whose value is not valid YAML"):
        make_settings(overrides=["model=m", f"dtype={text}"])


def test_so_are_option_files(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("model: m\nmodel: n", encoding="utf-8")
    with pytest.raises(ConfigError, match="which cannot be read: not valid YAML"):
        make_settings(file=path)
    with pytest.raises(ConfigError, match=r"options\.yaml' cannot be read: not valid YAML"):
        read_options_file(path)
