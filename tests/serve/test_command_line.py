"""The options of `rayspec serve`: of flags, or of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayspec.command.options import Asked
from rayspec.serve.options import ServeOptions, asked_options
from rayspec.types import ConfigError

FLAGS = {"model": "org/model", "tokenizer": "org/tok", "dtype": "float32", "stages": 2, "strategy": None}


def asked(asked: Asked, file: Path | None = None, model_id: str | None = None) -> ServeOptions:
    return asked_options(file, asked, model_id=model_id, api_keys=["k"], environment={"RAYSPEC_API_KEYS": "e"})


def test_flags_are_the_engines_options() -> None:
    options = asked(Asked(flags=dict(FLAGS)))
    config = options.llm_configs[0]
    assert config.model_id == "org/model"
    assert (config.engine.model, config.engine.tokenizer, config.engine.dtype) == ("org/model", "org/tok", "float32")
    assert config.engine.parallel is not None
    assert config.engine.parallel.stages == 2
    assert options.api_keys == ("k", "e")
    assert asked(Asked(flags=dict(FLAGS)), model_id="short").llm_configs[0].model_id == "short"


def test_a_file_has_everything(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("llm_configs: [{model_loading_config: {model_id: m}}]\napi_keys: [f]\n", encoding="utf-8")
    options = asked(Asked(flags={"model": None}), file)
    assert (options.llm_configs[0].model_id, options.api_keys) == ("m", ("f", "k", "e"))
    for also in (Asked(flags={"dtype": "float32"}), Asked(overrides=["dtype=float32"]), Asked(file=file)):
        with pytest.raises(ConfigError, match="does not go with"):
            asked(also, file)
    with pytest.raises(ConfigError, match="served_model_name"):
        asked(Asked(), file, model_id="x")


def test_sampling_is_for_requests() -> None:
    with pytest.raises(ConfigError, match="sampling"):
        asked(Asked(flags=dict(FLAGS), overrides=["sampling.top_p=0.5"]))
