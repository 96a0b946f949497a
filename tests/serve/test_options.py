"""What may be asked of an endpoint, and how what is wrong is told."""

from pathlib import Path
from typing import Any

import pytest

from rayspec.command.options import Asked
from rayspec.config import ParallelOptions
from rayspec.serve.app import model_deployment
from rayspec.serve.options import ServeOptions, asked_options, serve_options
from rayspec.types import ConfigError


def model(name: str = "m", **more: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": name}} | more


def options(*models: Any, **more: Any) -> ServeOptions:
    return serve_options({"llm_configs": list(models)} | more, environment={})


def test_the_names_of_ray_serve_llm_are_understood() -> None:
    config = options(
        {
            "model_loading_config": {
                "model_id": "served",
                "model_source": "org/model",
                "tokenizer_source": "org/other",
            },
            "engine_kwargs": {"dtype": "float32", "max_num_seqs": 3, "speculation": {"strategy": "ar"}},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
            "runtime_env": {"env_vars": {"A": "b"}},
            "accelerator_type": "H100",
            "log_engine_metrics": False,
        }
    ).llm_configs[0]
    engine = config.engine
    assert (config.model_id, engine.model, engine.tokenizer) == ("served", "org/model", "org/other")
    assert (engine.dtype, engine.num_seqs, engine.speculation.strategy) == ("float32", 3, "ar")
    assert config.max_ongoing_requests == 6


def test_what_is_admitted_follows_from_what_is_decoded_at_once() -> None:
    engine = {"max_num_seqs": 4}

    def admitted(**deployment: Any) -> int | None:
        return options(model(engine_kwargs=engine, deployment_config=deployment)).llm_configs[0].max_admitted

    assert admitted() == 3 * 4
    assert admitted(num_replicas=2) == 2 * 3 * 4
    assert admitted(autoscaling_config={"max_replicas": 3}) == 3 * 3 * 4
    assert admitted(autoscaling_config={"max_replicas": "3"}) == 3 * 3 * 4, "templates quote numbers"
    assert admitted(max_queued_requests=0) == 2 * 4
    assert admitted(max_ongoing_requests=1, max_queued_requests=1) == 2
    assert admitted(max_queued_requests=-1) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"llm_configs": [model(), model()]}, ["'model_id'", "'m' names 2 models"]),
        ({"llm_configs": [model(engine_kwargs={"lora_modules": {"m": "f"}})]}, ["'lora_modules'", "'m' names 2"]),
        ({"llm_configs": []}, ["'llm_configs' is empty"]),
        ({"llm_configs": [model()], "api_key": []}, ["'api_key'", "'api_keys'"]),
        (
            {"llm_configs": [model(engine_kwargs={"dtyp": "float32"})]},
            ["'llm_configs.0': in 'engine_kwargs': ", "'dtype'"],
        ),
        ({"llm_configs": [model(engine_kwargs={"model": "x"})]}, ["engine_kwargs.model", "model_source"]),
        (
            {"llm_configs": [model(engine_kwargs={"parallel": {"stages": 2}}, accelerator_type="H100")]},
            ["accelerator_type", "parallel"],
        ),
        (
            {"llm_configs": [model(engine_kwargs={"parallel": {"stages": 2, "replicas": 3}})]},
            ["engine_kwargs.parallel.replicas", "is 3", "deployment_config.num_replicas to 3"],
        ),
        ({"llm_configs": ["absent.yaml"]}, ["absent.yaml", "cannot be read"]),
        ({"llm_configs": [model()], "api_keys": ["good", "two words"]}, ["key 2 must be printable"]),
        ({"llm_configs": [model()], "api_keys": "good"}, ["'api_keys': it must be a list"]),
        (
            {"llm_configs": [model(deployment_config={"autoscaling_config": {"min_replicas": "one"}})]},
            ["autoscaling_config'", "option 'min_replicas' is 'one'"],
        ),
        ({"llm_configs": [model()], "cors": ["app.example"]}, ["'cors'", "'app.example'", "https://app.example"]),
        *(
            ({"llm_configs": [model()], "cors": ["*", origin]}, ["'cors'", repr(origin)])
            for origin in ("https://App.example", "https://app.example:443", "http://app.example:80", "a://u@b", "")
        ),
        *(
            ({"llm_configs": [model()], "allowed_hosts": ["a", name]}, ["'allowed_hosts'", repr(name)])
            for name in ("", "*.example", "a.example:80", "https://a.example", "[::1]", "a.example.", "a b")
        ),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        serve_options(args, environment={})
    assert [word for word in words if word not in str(raised.value)] == []
    assert not {"good", "two words"} & set(str(raised.value).split("'")), "keys are secret"


@pytest.mark.parametrize(("own", "num_cpus"), [(0.5, 0.5), (None, 1), ("two", 1)])
def test_a_private_ray_has_the_cpus_of_replicas_and_shards(own: Any, num_cpus: float) -> None:
    deployment = {"num_replicas": 3, "ray_actor_options": {"num_cpus": own}}
    assert options(model(deployment_config=deployment)).llm_configs[0].num_cpus == 3 * num_cpus
    stages = model(deployment_config=deployment, engine_kwargs={"parallel": {"stages": 2, "tensor": 2}})
    assert options(stages).llm_configs[0].num_cpus == 3 * (num_cpus + 4)


def test_quoted_numbers_and_capital_letters_mean_the_same() -> None:
    scaling = {"autoscaling_config": {"min_replicas": "0", "max_replicas": "2"}}
    chosen = options(
        model(deployment_config=scaling), allowed_hosts=["API.Example.org", "*", "2001:DB8::1", "10.0.0.1"]
    )
    assert chosen.llm_configs[0].scales_to_zero
    assert chosen.allowed_hosts == ("api.example.org", "*", "2001:db8::1", "10.0.0.1")
    origins = ("*", "https://app.example:8443", "http://[::1]:3000", "tauri://localhost", "http://localhost")
    assert options(model(), cors=origins).cors == origins


def made(**deployment: Any) -> Any:
    config = options(model(deployment_config=deployment)).llm_configs[0]
    return model_deployment(config, replica_timeout_s=60.0, name="Model:m", num_gpus=0)(object)


def test_serve_gets_the_options_of_a_deployment() -> None:
    deployment = made(
        rolling_update_percentage=0.5,
        max_replicas_per_node=2,
        health_check_period_s="3",
        autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 9},
        ray_actor_options={"num_cpus": 3, "resources": {"here": 1}},
    )
    config = deployment._deployment_config
    assert (config.rolling_update_percentage, config.health_check_period_s) == (0.5, 3)
    assert config.autoscaling_config.target_ongoing_requests == 9
    assert deployment.ray_actor_options == {"num_cpus": 3, "num_gpus": 0, "resources": {"here": 1}}
    assert made(max_ongoing_requests=3).max_ongoing_requests >= 10**6, "calls that wait in Serve take no turns"


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        ({"max_ongoing_request": 3}, ["'deployment_config'", "'max_ongoing_request'", "'max_ongoing_requests'"]),
        ({"autoscaling_config": {"max_replica": 3}}, ["'deployment_config.autoscaling_config'", "'max_replicas'"]),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, ["min_replicas (3)", "max_replicas (2)"]),
        ({"ray_actor_options": {"num_gpu": 3}}, ["deployment_config", "'num_gpu'", "num_gpus"]),
    ],
)
def test_what_serve_would_ignore_or_refuse_is_named(deployment: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        made(**deployment)
    assert [word for word in words if word not in str(raised.value)] == []


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


def test_the_replicas_that_a_flag_asks_for_are_serves() -> None:
    config = asked(Asked(flags=FLAGS | {"stages": None, "replicas": 3})).llm_configs[0]
    assert (config.num_replicas, config.engine.parallel) == (3, None)
    config = asked(Asked(flags=FLAGS | {"replicas": 3})).llm_configs[0]
    assert (config.num_replicas, config.engine.parallel) == (3, ParallelOptions(stages=2))


def test_a_file_has_everything(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("llm_configs: [{model_loading_config: {model_id: m}}]\napi_keys: [f]\n", encoding="utf-8")
    options = asked(Asked(flags={"model": None}), file)
    assert (options.llm_configs[0].model_id, options.api_keys) == ("m", ("f", "k", "e"))
    file.write_text("llm_configs: [{model_loading_config: {model_id: m}}]\napi_keys: fghij\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'api_keys': it must be a list"):
        asked(Asked(), file)
    for also in (Asked(flags={"dtype": "float32"}), Asked(overrides=["dtype=float32"]), Asked(file=file)):
        with pytest.raises(ConfigError, match="does not go with"):
            asked(also, file)
    for name, named_file in (("x", file), ("", file), ("", None)):
        with pytest.raises(ConfigError, match="served_model_name"):
            asked(Asked(flags=dict(FLAGS) if named_file is None else {}), named_file, model_id=name)
    file.write_text("applications: [{args: {llm_configs: []}}]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run `serve run .*app.yaml`"):
        asked(Asked(), file)
    with pytest.raises(ConfigError, match="sampling"):
        asked(Asked(flags=dict(FLAGS), overrides=["sampling.top_p=0.5"]))
