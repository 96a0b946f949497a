"""The example of docs/adding_a_strategy.md: one file outside the package is enough for a strategy."""

from pathlib import Path

import pytest

import rayspec
from rayspec import demo
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.types import ConfigError
from tests.demo_model import EOS, demo_prompts
from tests.families import greedy

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding_a_strategy.md"


def test_a_strategy_of_at_most_40_lines_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DOCUMENT.read_text().split("```python\n")[1].split("```")[0]
    assert len(source.splitlines()) <= 40
    (tmp_path / "my_strategy.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = rayspec.LLM(
        "demo",
        dtype="float32",
        device="cpu",
        max_model_len=512,
        kv_cache_tokens=1024,
        speculation={"strategy": "my_strategy:ShorterWhenWrong", "gate": False},
    )
    prompts = demo_prompts(2, 8)
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == greedy(demo.model_path(), prompts, 40, eos=(EOS,))
    assert llm.stats.num_draft_tokens > 0
    assert llm.stats.gate_reason == "drafts of changing length"
    with pytest.raises(ConfigError, match=r"'nowhere:Strategy', which cannot be imported .*give 'module:name'"):
        rayspec.LLM("demo", dtype="float32", profile_cache=str(tmp_path), speculation={"strategy": "nowhere:Strategy"})
    llm.shutdown()


def test_a_name_that_is_neither_known_nor_of_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"choose one of auto, .*did you mean 'knapspec'\?"):
        SpeculationOptions(strategy="knapspek")
