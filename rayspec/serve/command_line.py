"""Options of an endpoint that a command line gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayspec.command.options import Asked
from rayspec.config import SamplingParams
from rayspec.serve.options import ServeOptions, read_options_file, serve_options
from rayspec.types import ConfigError

_IN_LOADING = {"model", "tokenizer"}


def asked_options(
    file: Path | None,
    asked: Asked,
    *,
    model_id: str | None,
    api_keys: Sequence[str],
    cors: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    batches: str | None = None,
    environment: Mapping[str, str],
) -> ServeOptions:
    """Return the options of an endpoint. Raises ConfigError.

    file: options of ServeOptions, in place of the engine's options. model_id: name of the model in requests; None: its
    name in the engine's options. api_keys, cors, allowed_hosts: added to the file's. batches: replaces the file's.
    """
    if file is None:
        args = {"llm_configs": [_llm_config(asked, model_id)]}
    else:
        given = [name for name, value in asked.flags.items() if value is not None]
        given += ["served_model_name"] * (model_id is not None) + ["set"] * bool(asked.overrides)
        given += ["config"] * (asked.file is not None)
        if given:
            raise ConfigError(f"option {given[0]!r} does not go with {str(file)!r}: write it there")
        args = read_options_file(file)
    more = {"api_keys": api_keys, "cors": cors, "allowed_hosts": allowed_hosts}
    lists = {name: [*(args.get(name) or ()), *values] for name, values in more.items() if values}
    chosen = {"batches": batches} if batches is not None else {}
    return serve_options(args | lists | chosen, environment=environment)


def _llm_config(asked: Asked, model_id: str | None) -> dict[str, object]:
    settings = asked.settings()
    if settings.sampling != SamplingParams():
        raise ConfigError("options of 'sampling' have no effect here, requests bring their own: remove them")
    engine = settings.engine
    return {
        "model_loading_config": {
            "model_id": model_id or engine.model,
            "model_source": engine.model,
            "tokenizer_source": engine.tokenizer,
        },
        "engine_kwargs": engine.model_dump(exclude_defaults=True, exclude=_IN_LOADING),
    }
