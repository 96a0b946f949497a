"""YAML of option files and overrides, in which a name may stand once only."""

from __future__ import annotations

from typing import Any

import yaml

# What PyYAML raises for some texts, beside its own errors: `!!bool x`, `!!timestamp x`, `2024-13-45`, `[[[[...`.
_OTHER_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


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
