"""The options of a run: a YAML file, then dotted overrides, then flags. Defaults live in rayspec.config alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayspec.config import EngineConfig, ParallelOptions, SamplingParams, SpeculationOptions
from rayspec.types import ConfigError

_SAMPLING = "sampling"
_SPECULATION = "speculation"
_PARALLEL = "parallel"
_DECIDING = ("model", "tokenizer", "revision", "dtype", "quantization_config", "max_model_len", "deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine's options and those of every request."""

    engine: EngineConfig
    sampling: SamplingParams

    def resolved(self, engine: EngineConfig | None = None) -> dict[str, Any]:
        """Plain values as a config file has them, of the running engine's own config where it is given.

        The model is named as it was asked for.
        """
        options = (engine or self.engine).model_dump(mode="json")
        return options | {"model": self.engine.model, _SAMPLING: self.sampling.model_dump(mode="json")}

    @property
    def deciding(self) -> dict[str, Any]:
        """What decides the text of an output, the sampling aside: how fast it comes is no part of it."""
        engine = self.engine.model_dump(mode="json")
        return {name: engine[name] for name in _DECIDING} | {"verification": engine[_SPECULATION]["verification"]}


def make_settings(
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    sampling: SamplingParams | None = None,
) -> Settings:
    """Merge what was asked for. Raises ConfigError.

    file: YAML with the names of EngineConfig, and those of SamplingParams under "sampling". overrides: "a.b=value", the
    value as YAML reads it. flags: by name, those of EngineConfig, SpeculationOptions, ParallelOptions or
    SamplingParams; None is unset. sampling: what requests are sampled with where nothing else is said.
    """
    options = _read(file) if file is not None else {}
    for override in overrides:
        _apply(options, override)
    for name, value in (flags or {}).items():
        if value is not None:
            _group(options, _home(name))[name] = value
    asked = _group(options, _SAMPLING)
    del options[_SAMPLING]
    if asked.get("n", 1) != 1:
        raise ConfigError(f"option 'sampling.n' is {asked['n']!r}: a row has one output; use the Python API for more")
    return Settings(engine=EngineConfig(**options), sampling=(sampling or SamplingParams()).replace(**asked))


def _home(flag: str) -> str:
    """The group that an option of this name lives in; "" is the top."""
    if flag in EngineConfig.model_fields:
        return ""
    if flag in ParallelOptions.model_fields:
        return _PARALLEL
    return _SPECULATION if flag in SpeculationOptions.model_fields else _SAMPLING


def _group(options: dict[str, Any], name: str) -> dict[str, Any]:
    if not name:
        return options
    group = options.setdefault(name, {})
    if group is None:
        group = options[name] = {}
    if not isinstance(group, dict):
        raise ConfigError(f"option {name!r} is {group!r}: it must be a group of options")
    return group


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"option 'config' is {str(file)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'config' is {str(file)!r}, which is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"option 'config' is {str(file)!r}: it must hold options, as 'name: value' lines")
    return content


def _apply(options: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *groups, last = name.strip().split(".")
    if not equals or not all((*groups, last)):
        raise ConfigError(f"option 'set' is {override!r}: write it as name=value or group.name=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"option 'set' is {override!r}, whose value is not valid YAML: {error}") from error
    target = options
    for group in groups:
        target = _group(target, group)
    target[last] = value
