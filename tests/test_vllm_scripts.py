"""Scripts that were written for vLLM run with their imports changed. examples/ has others: offline.py, chat.py, and
endpoint.py for a server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rayspec import demo

pytestmark = pytest.mark.slow

STRUCTURED = """
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Kind(str, Enum):
    road = "road"
    school = "school"


class Project(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Kind
    year: int = Field(ge=2000, le=2030)


llm = LLM(model=MODEL, dtype="float32", max_model_len=256, gpu_memory_utilization=0.5, enforce_eager=True)
schema = StructuredOutputsParams(json=Project.model_json_schema(), disable_any_whitespace=True)
choice = StructuredOutputsParams(choice=["good", "bad"])
regex = StructuredOutputsParams(regex=r"\\d{4}-\\d{2}")
prompts = ["The project was:", "The report was", "The date was"]
params = [SamplingParams(temperature=0, max_tokens=60, structured_outputs=one) for one in (schema, choice, regex)]
texts = [output.outputs[0].text for output in llm.generate(prompts=prompts, sampling_params=params, use_tqdm=False)]
project = Project.model_validate_json(texts[0])
"""

LORA = """
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model=MODEL, dtype="float32", max_model_len=256, enable_lora=True, max_loras=1, max_lora_rank=8)
prompts = ["The agency reported that", "The committee met in May and"]
sampling_params = SamplingParams(temperature=0, max_tokens=12, stop=["[/assistant]"])
plain = llm.generate(prompts, sampling_params)
adapted = llm.generate(prompts, sampling_params, lora_request=LoRARequest("sql_adapter", 1, ADAPTER))
texts = [[output.outputs[0].text for output in outputs] for outputs in (plain, adapted)]
"""

EMBED = """
from vllm import LLM

llm = LLM(model=MODEL, dtype="float32", max_model_len=256, enforce_eager=True)
try:
    llm.embed(["Hello, my name is"])
except AttributeError as error:
    told = str(error)
try:
    LLM(model=MODEL, runner="pooling")
except ValueError as error:
    of_runner = str(error)
"""


def run(script: str, **given: Any) -> dict[str, Any]:
    """Return what a script has at its end."""
    changed, count = re.subn(r"^from vllm(\.\w+)* import", "from rayspec import", script, flags=re.MULTILINE)
    assert count == script.count("vllm")
    names = {"__name__": "script", "MODEL": "demo", **given}
    exec(compile(changed, "script", "exec", dont_inherit=True), names)
    names["llm"].shutdown()
    return names


def test_structured_outputs() -> None:
    found = run(STRUCTURED)
    project, choice, date = found["texts"]
    assert json.loads(project)["kind"] in ("road", "school")
    assert 2000 <= found["project"].year <= 2030
    assert choice in ("good", "bad")
    assert re.fullmatch(r"\d{4}-\d{2}", date)


def test_an_adapter(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.model_path())
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=8, lora_alpha=64)
    get_peft_model(model, config).save_pretrained(tmp_path)
    plain, adapted = run(LORA, ADAPTER=str(tmp_path))["texts"]
    assert all(plain)
    assert plain != adapted


def test_embeddings_are_refused_with_a_remedy() -> None:
    found = run(EMBED)
    for said in (found["told"], found["of_runner"]):
        assert "generates text only: use another library for embeddings and scores" in said
