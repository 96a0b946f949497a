import re

import pytest
import typer
from typer.testing import CliRunner

from rayspec.command.options import Asked, LongCommand, with_settings
from rayspec.config import EngineConfig, OffloadOptions, ParallelOptions, SamplingParams, Settings, SpeculationOptions
from rayspec.types import ConfigError

app = typer.Typer(rich_markup_mode=None)
seen: list[Settings] = []


@app.command(cls=LongCommand)
@with_settings(sampling=SamplingParams(max_tokens=77))
def command(*, asked: Asked, name: str = "nobody") -> None:
    """A command with options of its own."""
    assert name in {"nobody", "me"}
    seen.append(asked.settings())


def settings_of(*arguments: str) -> Settings:
    seen.clear()
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_flags_become_options_of_the_right_group() -> None:
    settings = settings_of(
        *("--model", "m", "--max-num-seqs", "3", "--strategy", "static", "--skip", "2", "--skip", "5,7", "--no-gate"),
        *("--temperature", "0.25", "--stop", "a", "--stop", "b", "--set", "offload.share=0.25"),
        *("--name", "me", "--deterministic", "--stages", "2", "--layers", "3", "--layers", "1"),
    )
    assert settings.engine == EngineConfig(
        model="m",
        max_num_seqs=3,
        deterministic=True,
        parallel=ParallelOptions(stages=2, layers=(3, 1)),
        speculation=SpeculationOptions(strategy="static", skip=(2, 5, 7), gate=False),
        offload=OffloadOptions(share=0.25),
    )
    assert settings.sampling == SamplingParams(temperature=0.25, stop=("a", "b"), max_tokens=77)


def test_choices_are_given_one_by_one() -> None:
    settings = settings_of("--model", "m", "--choices", "int8", "--choices", "window", "--extra-weight-bytes", "7")
    assert settings.engine.speculation == SpeculationOptions(choices=("int8", "window"), extra_weight_bytes=7)
    settings = settings_of("--model", "m", "--strategy", "static", "--static-choice", "int4+pages")
    assert settings.engine.speculation == SpeculationOptions(strategy="static", static_choice="int4+pages")
    assert settings_of("--model", "m", "--set", "speculation.choices=[]").engine.speculation.choices == ()
    with pytest.raises(ConfigError, match=r"'choices.1' is 'widow'.*did you mean 'window'"):
        settings_of("--model", "m", "--choices", "skip", "--choices", "widow")


def test_the_short_help_has_the_most_used_options_and_names_the_other() -> None:
    short, whole = (CliRunner().invoke(app, [flag], env={"COLUMNS": "200"}).output for flag in ("--help", "--help-all"))
    assert "--max-num-seqs" in short
    assert "--heartbeat-timeout-s" not in short
    assert re.search(r"^\d\d more options: .* --help-all$", short, re.MULTILINE)
    sections = re.findall(r"^(\w+):$", whole, re.MULTILINE)
    assert sections == ["Options", "Engine", "Speculation", "Shards", "Sampling"]
    assert "None: " not in whole
    assert not re.findall(r"^  --\S+( <\w+>)?$\n  --", whole, re.MULTILINE), "options without a help"


def test_help_shows_the_defaults_of_the_option_groups() -> None:
    text = " ".join(CliRunner().invoke(app, ["--help-all"], env={"COLUMNS": "200"}).output.split())
    assert "sequences decoded at once [default: 8 on a CPU, 64 on a GPU, 256 on one from 70 GiB up] --" in text
    assert "--max-tokens <int> most tokens of the output [default: 77]" in text
    assert ", static, ar, " in text
    assert "[default: auto]" in text
    assert "unset: " not in text
    assert "; any of skip, int8, int4, window, pages [default: skip, int4, window, pages]" in text


@pytest.mark.parametrize("option", ["model", "tokenizer"])
def test_a_wrong_name_of_a_model_is_refused_before_anything_is_loaded(option: str) -> None:
    with pytest.raises(ConfigError, match=f"option '{option}' is 'demoo'.*did you mean 'demo'"):
        Asked(flags={"model": "demo", option: "demoo"}).settings()
    with pytest.raises(ConfigError, match=f"option '{option}' is '/no/where', and there is no such folder"):
        Asked(flags={"model": "demo", option: "/no/where"}).settings()
