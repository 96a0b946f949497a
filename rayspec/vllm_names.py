"""vLLM's names of arguments, and what each one does here. `docs/guides/from_vllm.md` shows these tables.

A name that is no option here sets one, or has no effect, or is refused with the remedy. Each says which values ask for
nothing, so that a script that writes vLLM's defaults runs.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayspec.errors import ConfigError

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of vLLM.

    does: what it does here, or why it is refused and what to do instead. option: the option that it sets, as
    "group.name"; "" if it sets none. neutral: values that ask for nothing. values: what other values become.
    is_refused: other values are refused. is_flag: on a command line it has no value.
    """

    does: str
    option: str = ""
    neutral: tuple[Any, ...] = (None,)
    values: Mapping[Any, Any] = field(default_factory=dict)
    is_refused: bool = False
    is_flag: bool = False


def _table(name: str) -> dict[str, Argument]:
    """Return a table of `vllm_names.json`: arguments that are refused `unless` they have a value, or have no effect."""
    return {
        argument: Argument(
            does=entry.get("refused") or entry["no effect"],
            neutral=(None, *entry.get("unless", ())),
            is_refused="refused" in entry,
            is_flag=entry.get("is_flag", False),
        )
        for argument, entry in _TABLES[name].items()
    }


_STRATEGIES = {"ngram": "lookup", "suffix": "auto"}  # by vLLM's method of speculation
_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ENGINE: Mapping[str, Argument] = {
    "tensor_parallel_size": Argument(does="ranks of each stage", option="parallel.tensor", neutral=(None, 1)),
    "pipeline_parallel_size": Argument(does="pipeline stages", option="parallel.stages", neutral=(None, 1)),
    "data_parallel_size": Argument(
        does="copies of the model; of an endpoint: `deployment_config.num_replicas`",
        option="parallel.replicas",
        neutral=(None, 1),
    ),
    "enforce_eager": Argument(
        does="no CUDA graphs", option="cuda_graphs", neutral=(None, False), values={True: "off"}, is_flag=True
    ),
    "speculative_config": Argument(
        does='{"method": "ngram"} sets strategy "lookup" and {"method": "suffix"} strategy "auto", both with '
        "num_speculative_tokens as `speculation.max_draft_tokens`; other methods need a second model, and are refused: "
        "leave it out, as the model drafts for itself by default",
        option="speculation",
    ),
    "spec_method": Argument(
        does="as `method` in `speculative_config`",
        option="speculation.strategy",
        values=_STRATEGIES,
    ),
    "spec_tokens": Argument(does="the longest draft", option="speculation.max_draft_tokens"),
    "spec_model": Argument(does="the model drafts for itself, without a second model: leave it out", is_refused=True),
    **_table("engine"),
}
"""Arguments of `LLM(...)`, and flags of `vllm serve`, that are no options of EngineConfig, or have other values."""

SAME_NAME: Mapping[str, Mapping[Any, Any]] = {
    "generation_config": {"vllm": "none"},
    "max_model_len": {-1: None, "auto": None},
}
"""Options of vLLM's name, with values of vLLM's that are called otherwise here."""

_NONE_IS_DEFAULT = ("dtype", "enable_prefix_caching", "trust_remote_code")

CALLS: Mapping[str, Argument] = _table("calls")
"""Arguments of `generate` and `chat`."""

SAMPLING: Mapping[str, Argument] = _table("sampling")
"""Fields of vLLM's SamplingParams that ours has not."""

METHODS: Mapping[str, str] = {
    "beam_search": "beams are not samples, and drafts cannot verify them: use generate() with n, or transformers' "
    "generate(num_beams=...)",
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), ENGINE["pooler_config"].does),
    **dict.fromkeys(("sleep", "wake_up"), "an engine keeps its memory: use shutdown(), and load the model again"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model's processes run no other programs: use `engine`"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use `stats`, or `rayspec profile`"),
    "reset_prefix_cache": "give enable_prefix_caching=False, or load the model again",
    "llm_engine": "use `engine`, or `stream` to add requests while others run",
    "get_metrics": "use `stats`",
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"), "use `stream` to add requests while others run"
    ),
    "get_world_size": "option `parallel` says how many processes hold the model",
    **dict.fromkeys(("reset_mm_cache", "release_kv_cache_memory"), "load the model again"),
}
"""Methods and attributes of vLLM's LLM that ours has not, and why."""


def from_vllm(given: Mapping[str, Any], table: Mapping[str, Argument], own: Collection[str]) -> dict[str, Any]:
    """Return the options with vLLM's names replaced by ours. own: names of our options, which stay. Raises ConfigError
    for an argument that is refused, and for one whose option is given too."""
    options = {name: value for name, value in given.items() if name not in table or name in own}
    for name, values in SAME_NAME.items():
        if name in own and _lookup(options.get(name, _ABSENT), values) is not _ABSENT:
            options[name] = _lookup(options[name], values)
    for name in _NONE_IS_DEFAULT:
        if name in own and options.get(name, _ABSENT) is None:
            del options[name]
    for name, value in given.items():
        if name not in table or name in own:
            continue
        argument = table[name]
        if any(_is_same(one, value) for one in argument.neutral):
            continue
        if argument.is_refused:
            raise ConfigError(f"option {name!r} is {reprlib.repr(value)}: {argument.does}")
        if argument.option:
            found = _speculation(value) if name == "speculative_config" else _lookup(value, argument.values)
            _set(options, argument.option, value if found is _ABSENT else found, given=name)
    return options


@contextmanager
def naming_given(given: Mapping[str, Any]) -> Iterator[None]:
    """Add to an error of one of our options the argument of vLLM's that has set it."""
    try:
        yield
    except ConfigError as error:
        options = {name: ENGINE[name].option.split(".") for name in given if name in ENGINE and ENGINE[name].option}
        for name, parts in options.items():
            if repr(name) not in str(error) and all(repr(part) in str(error) for part in parts):
                raise ConfigError(f"{error} ({name!r} sets it)") from None
        raise


def _set(options: dict[str, Any], option: str, value: Any, *, given: str) -> None:
    group, _, name = option.rpartition(".")
    if not group:
        if option in options:
            raise ConfigError(f"option {given!r} is given, and {option!r} too: remove one of them")
        options[option] = value
        return
    if options.get(group) is None:
        options[group] = _Made()
    made = options[group]
    if not isinstance(made, _Made):
        raise ConfigError(f"option {given!r} is given, and {group!r} too: put it there, as {name!r}")
    made[name] = value


class _Made(dict[str, Any]):
    """A group of options that vLLM's names have made."""


def _speculation(config: Any) -> dict[str, Any]:
    method = config.get("method") if isinstance(config, Mapping) else None
    strategy = _STRATEGIES.get(method) if isinstance(method, str) else None
    if strategy is None:
        raise ConfigError(
            f"option 'speculative_config' is {reprlib.repr(config)}: the model drafts for itself, without a second "
            "model; leave it out, or give method 'ngram' or 'suffix'; see option 'speculation'"
        )
    count = config.get("num_speculative_tokens")
    return {"strategy": strategy} | ({} if count is None else {"max_draft_tokens": count})


def _lookup(value: Any, values: Mapping[Any, Any]) -> Any:
    return next((found for one, found in values.items() if _is_same(one, value)), _ABSENT)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; 0 is not False here, nor 1 True, and a tuple is a list."""
    other = list(other) if isinstance(other, tuple) else other
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
