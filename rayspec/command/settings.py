"""The options of a run: a YAML file, which dotted overrides and flags override. Defaults are in rayspec.config only."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayspec.config import EngineConfig, Options, ParallelOptions, SamplingParams, Settings, SpeculationOptions
from rayspec.types import ConfigError
from rayspec.vllm_names import ENGINE

_SAMPLING = "sampling"
_GROUPS: dict[tuple[str, ...], type[Options]] = {
    (): EngineConfig,
    ("parallel",): ParallelOptions,
    ("speculation",): SpeculationOptions,
}
# Sampling parameters without effect on rows, which have one output each, and its text. The values ask for nothing.
OF_ONE_ROW: Mapping[str, Any] = {"n": 1, "prompt_logprobs": None, "detokenize": True}
# PyYAML raises them for some texts, next to its own errors: `!!bool x`, `!!timestamp x`, `2024-13-45`, `[[[[...`.
_OTHER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def make_settings(
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    sampling: SamplingParams | None = None,
) -> Settings:
    """Merge the options of all sources. Raises ConfigError, also for an option that overrides or flags give twice.

    file: YAML with the names of EngineConfig, and those of SamplingParams under "sampling"; the others override it.
    overrides: "a.b=value", the value as YAML reads it. flags: by the names of options; None is unset. sampling:
    defaults.
    """
    options = read_options_file(file, "option 'config': the file") if file is not None else {}
    options = {name: value for name, value in options.items() if value is not None or (name,) not in _GROUPS}
    given = [*map(_of_override, overrides), *_of_flags(flags or {}, has_sampling=sampling is not None)]
    for number, (path, value, source) in enumerate(given):
        for other, _, earlier in given[:number]:
            least = min(len(path), len(other))
            if path[:least] == other[:least]:  # the same option, or a group and an option of it
                name = ".".join(path if len(path) > least else other)
                raise ConfigError(f"option {name!r} is given twice, by {earlier} and by {source}: remove one of them")
        target = options
        for group in path[:-1]:
            target = _group(target, group)
        target[path[-1]] = value
    asked = _group(options, _SAMPLING)
    del options[_SAMPLING]
    for name, usual in OF_ONE_ROW.items():
        if asked.get(name, usual) != usual:
            raise ConfigError(
                f"option 'sampling.{name}' is {asked[name]!r}: a row has one output, and its text; use the Python API "
                "for more"
            )
    return Settings(engine=EngineConfig(**options), sampling=(sampling or SamplingParams()).replace(**asked))


def _of_override(override: str) -> tuple[tuple[str, ...], Any, str]:
    """Return the groups and the name of the option, its value, and the words given."""
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"option 'set' is {override!r}: write it as name=value or group.name=value")
    try:
        return path, parse_yaml(text), f"--set {override}"
    except NotYamlError as error:
        raise ConfigError(f"option 'set' is {reprlib.repr(override)}, whose value is {error}") from error


def _of_flags(flags: Mapping[str, Any], *, has_sampling: bool) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    for name, value in flags.items():
        if value is not None:
            home = next((path for path, options in _GROUPS.items() if name in options.model_fields), None)
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            given = flag if isinstance(value, bool) else f"{flag} {value}"
            if home is None and name in ENGINE and not (has_sampling and name in SamplingParams.model_fields):
                home = ()
                try:  # of vLLM's: as YAML reads it, which reads JSON too
                    value = parse_yaml(value) if isinstance(value, str) else value  # noqa: PLW2901
                except NotYamlError as error:
                    raise ConfigError(f"{reprlib.repr(given)} cannot be read: {error}") from error
            yield (*((_SAMPLING,) if home is None else home), name), value, given


def _group(options: dict[str, Any], name: str) -> dict[str, Any]:
    group = options.setdefault(name, {})
    if group is None:
        group = options[name] = {}
    if not isinstance(group, dict) or not all(isinstance(key, str) for key in group):
        raise ConfigError(f"option {name!r} is {group!r}: it must be a group of options, whose names are texts")
    return group


def read_options_file(path: Path, what: str = "the file") -> dict[str, Any]:
    """Read a YAML file of options; an empty file has none. what: how an error names it. Raises ConfigError."""
    named = f"{what} {str(path)!r}"
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}; check the path") from error
    except (NotYamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named} cannot be read: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{named} must hold options, as 'name: value' lines")
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
