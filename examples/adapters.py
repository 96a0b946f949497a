"""Run a model with LoRA adapters and without, in one batch: python examples/adapters.py

It needs peft, which makes two adapters with random weights here. They stand for adapters that were trained, so their
texts make no sense.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rayspec import LLM, LoRARequest, SamplingParams
from rayspec.demo import model_path, sample_documents

folder = Path(tempfile.mkdtemp())
for name in ("legal", "medical"):
    torch.manual_seed(len(name))
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_path()), config).save_pretrained(folder / name)

llm = LLM("demo", dtype="float32", max_model_len=2048, lora_modules={"legal": str(folder / "legal")})
conversation = [{"role": "user", "content": sample_documents(1)[0].text}]
requests = [None, LoRARequest("legal"), LoRARequest("medical", 2, str(folder / "medical"))]  # the last is loaded now
outputs = llm.chat([conversation] * 3, SamplingParams(temperature=0, max_tokens=24), lora_request=requests)
for request, output in zip(requests, outputs, strict=True):
    print(f"{request and request.lora_name}: {output.outputs[0].text!r}")
