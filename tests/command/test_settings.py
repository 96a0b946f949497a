from pathlib import Path
from typing import Any

import pytest

from rayspec.command.settings import NotYamlError, make_settings, parse_yaml, read_options_file
from rayspec.config import SamplingParams
from rayspec.types import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_and_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "model: m\nmax_num_seqs: 2\nspeculation: {strategy: ar, gate: false}\ndtype: auto\nsampling:\n",
    )
    settings = make_settings(
        file=file,
        overrides=["speculation.exit_layer=4", "dtype=float16"],
        flags={"max_num_seqs": 4, "strategy": "knapspec", "temperature": 0.5, "device": None},
        sampling=SamplingParams(max_tokens=99, temperature=0.0),
    )
    engine, speculation = settings.engine, settings.engine.speculation
    assert (engine.model, engine.num_seqs, engine.dtype, engine.device) == ("m", 4, "float16", "auto")
    assert (speculation.strategy, speculation.gate, speculation.exit_layer) == ("knapspec", False, 4)
    assert (settings.sampling.max_tokens, settings.sampling.temperature) == (99, 0.5)


@pytest.mark.parametrize(
    ("overrides", "flags", "message"),
    [
        (
            ["speculation.strategy=ar"],
            {"strategy": "auto"},
            "option 'speculation.strategy' is given twice, by --set speculation.strategy=ar and by --strategy",
        ),
        (["max_num_seqs=3"], {"max_num_seqs": 4}, "by --set max_num_seqs=3 and by --max-num-seqs 4"),
        (["speculation.gate=true"], {"gate": False}, "and by --no-gate"),
        (["parallel={stages: 2}"], {"stages": 3}, "option 'parallel.stages'"),
        (["max_num_seqs=3", "max_num_seqs=4"], {}, "by --set max_num_seqs=3 and by --set max_num_seqs=4"),
        (["speculation.gate=false", "speculation={strategy: ar}"], {}, "option 'speculation.gate' is given twice"),
        (["parallel.stages=2", "parallel=null"], {}, "option 'parallel.stages' is given twice"),
    ],
)
def test_a_contradiction_is_refused(overrides: list[str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_settings(overrides=["model=m", *overrides], flags=flags)
    assert message in str(caught.value)


def test_the_words_on_and_off_are_no_booleans(tmp_path: Path) -> None:
    """YAML reads them as true and false."""
    file = write(tmp_path / "c.yaml", "model: m\ncuda_kernels: off\n")
    engine = make_settings(file=file, overrides=["cuda_graphs=off"]).engine
    assert (engine.cuda_kernels, engine.cuda_graphs) == ("off", "off")
    with pytest.raises(ConfigError, match=r"'cuda_graphs' 'on' does not work with option 'cuda_kernels' 'off'"):
        make_settings(file=file, overrides=["cuda_graphs=on"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model"], "option 'set' is 'model': write it as name=value"),
        (["speculation..gate=1"], "write it as name=value"),
        (["model=m", "speculation=fast"], "speculation"),
        (["model=m", "sampling={1: 2}"], "option 'sampling' is {1: 2}: it must be a group of options, whose names"),
        (["model=m", "sampling.n=2"], "option 'sampling.n' is 2: a row has one output"),
        (["model=m", "sampling.temprature=1"], "unknown option 'temprature'; did you mean 'temperature'"),
        (["model=m", "nonsense.deep=1"], "unknown option 'nonsense'"),
        (["model=m", "dtype={"], "whose value is not valid YAML"),
    ],
)
def test_an_override_that_means_nothing_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_settings(overrides=overrides)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "1: 2"])
def test_a_file_that_holds_no_options_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="option 'config'"):
        make_settings(file=write(tmp_path / "c.yaml", text))


HOSTILE = [
    "a: {", "!!bool x", "!!python/object/apply:os.system [true]", "2024-13-45", "[" * 1000, "9" * 5000, "\x00",
    "\ud800", "model: m\nmodel: n", "a: {b: 1, b: 1}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_is_no_yaml_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(NotYamlError, match=r"^not valid YAML: "):
        parse_yaml(text)
    with pytest.raises(ConfigError, match=r"^option 'set' is .*dtype=.*, whose value is not valid YAML"):
        make_settings(overrides=["model=m", f"dtype={text}"])


def test_so_are_option_files(tmp_path: Path) -> None:
    path = write(tmp_path / "options.yaml", "model: m\nmodel: n")
    with pytest.raises(ConfigError, match=r"option 'config': the file .* cannot be read: not valid YAML"):
        make_settings(file=path)
    with pytest.raises(ConfigError, match=r"options\.yaml' cannot be read: not valid YAML"):
        read_options_file(path)


def test_a_group_without_options_in_a_file_sets_none(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: demo\nspeculation:\n#  gate: false\nparallel:\nsampling:\n")
    assert make_settings(file=file) == make_settings(flags={"model": "demo"})
