"""The options of a run: a YAML file, which dotted overrides and flags override. Defaults are in rayspec.config only."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams, SpeculationOptions
from rayspec.types import ConfigError

_SAMPLING = "sampling"
_SPECULATION = "speculation"
_PARALLEL = "parallel"
_GROUPS: dict[tuple[str, ...], type[Options]] = {
    (): EngineConfig,
    (_PARALLEL,): ParallelOptions,
    (_SPECULATION,): SpeculationOptions,
}
_DECIDING = (
    "model",
    "tokenizer",
    "revision",
    "generation_config",
    "dtype",
    "quantization_config",
    "max_model_len",
    "deterministic",
)
# What PyYAML raises for some texts, beside its own errors: `!!bool x`, `!!timestamp x`, `2024-13-45`, `[[[[...`.
_OTHER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the engine and the sampling parameters of every request."""

    engine: EngineConfig
    sampling: SamplingParams

    def resolved(self, engine: EngineConfig | None = None) -> dict[str, Any]:
        """Return the options as plain values of a config file. engine: the config of the running engine, if any.

        The model has the name that the user gave.
        """
        options = (engine or self.engine).model_dump(mode="json")
        return options | {"model": self.engine.model, _SAMPLING: self.sampling.model_dump(mode="json")}

    @property
    def deciding(self) -> dict[str, Any]:
        """The engine options that decide the text of an output. Options of speed are not among them."""
        engine = self.engine.model_dump(mode="json")
        return {name: engine[name] for name in _DECIDING} | {"verification": engine[_SPECULATION]["verification"]}


def make_settings(
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    sampling: SamplingParams | None = None,
) -> Settings:
    """Merge the options of all sources. Raises ConfigError, also for overrides and flags that contradict each other.

    file: YAML with the names of EngineConfig, and those of SamplingParams under "sampling"; overrides and flags take
    precedence. overrides: "a.b=value", the value as YAML reads it. flags: by name, those of EngineConfig,
    SpeculationOptions, ParallelOptions or SamplingParams; None is unset. sampling: the defaults of the
    sampling parameters.
    """
    options = _read(file) if file is not None else {}
    given = [*map(_of_override, overrides), *_of_flags(flags or {})]
    _refuse_contradictions(given)
    for one in given:
        target = options
        for group in one.path[:-1]:
            target = _group(target, group)
        target[one.path[-1]] = one.value
    asked = _group(options, _SAMPLING)
    del options[_SAMPLING]
    if asked.get("n", 1) != 1:
        raise ConfigError(f"option 'sampling.n' is {asked['n']!r}: a row has one output; use the Python API for more")
    return Settings(engine=EngineConfig(**options), sampling=(sampling or SamplingParams()).replace(**asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenValue:
    """A value that the command line gives an option. path: the option's groups and name. source: the words given."""

    path: tuple[str, ...]
    value: Any
    source: str


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves((*path, str(name)), part)


def _of_override(override: str) -> _GivenValue:
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"option 'set' is {override!r}: write it as name=value or group.name=value")
    try:
        value = parse_yaml(text)
    except NotYamlError as error:
        raise ConfigError(f"option 'set' is {reprlib.repr(override)}, whose value is {error}") from error
    return _GivenValue(path=path, value=value, source=f"--set {override}")


def _of_flags(flags: Mapping[str, Any]) -> Iterator[_GivenValue]:
    for name, value in flags.items():
        if value is not None:
            home = next((path for path, options in _GROUPS.items() if name in options.model_fields), (_SAMPLING,))
            yield _GivenValue(path=(*home, name), value=value, source=_as_flag(name, value))


def _as_flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return " ".join(f"--{flag} {one}" for one in (value if isinstance(value, list | tuple) else [value]))


def _refuse_contradictions(given: Sequence[_GivenValue]) -> None:
    """Check that no option has two different values. Raises ConfigError."""
    said: dict[tuple[str, ...], _GivenValue] = {}  # by the path of a single option
    for one in given:
        leaves = dict(_leaves(one.path, one.value))
        for path, earlier in said.items():
            is_replaced = path[: len(one.path)] == one.path
            if leaves[path] != earlier.value if path in leaves else is_replaced:
                raise ConfigError(
                    f"option {'.'.join(path)!r} is given two values, by {earlier.source} and by {one.source}: "
                    "remove one of them"
                )
        said |= {path: _GivenValue(path=path, value=value, source=one.source) for path, value in leaves.items()}


def _group(options: dict[str, Any], name: str) -> dict[str, Any]:
    group = options.setdefault(name, {})
    if group is None:
        group = options[name] = {}
    if not isinstance(group, dict):
        raise ConfigError(f"option {name!r} is {group!r}: it must be a group of options")
    return group


def _read(file: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"option 'config' is {str(file)!r}: {error.strerror}") from error
    except (NotYamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'config' is {str(file)!r}, which cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"option 'config' is {str(file)!r}: it must hold options, as 'name: value' lines")
    return content


class NotYamlError(ValueError):
    """The text is no YAML, or gives a name two values."""


def parse_yaml(text: str) -> Any:
    """Return the value of a text. Raises NotYamlError."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise NotYamlError(f"not valid YAML: {error}") from error
    except _OTHER_ERRORS as error:
        raise NotYamlError(f"not valid YAML: {type(error).__name__}: {error}") from error


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the name {twice!r} stands twice; leave one out", node.start_mark
            )
        return super().construct_mapping(node, deep=deep)
