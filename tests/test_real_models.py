from collections.abc import Iterator
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayspec import LLM, SamplingParams
from tests.real_models import smollm2

pytestmark = pytest.mark.exhaustive  # to fetch, read and convert it takes half a minute


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(str(smollm2()), dtype="float32", num_threads=1, max_model_len=2048)
    yield llm
    llm.shutdown()


def test_it_answers_a_question(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(chat, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."


def test_drafts_do_not_change_the_text(llm: LLM) -> None:
    path = smollm2()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    asked = "Repeat the first two sentences of this text, then summarize it.\n\n" + topics["assert"]
    prompt = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
    )
    tokens = torch.tensor([prompt])
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=64)
    (output,) = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), use_tqdm=False
    )
    assert list(output.outputs[0].token_ids)[: written.shape[1] - len(prompt)] == written[0, len(prompt) :].tolist()
    assert llm.stats.num_accepted_tokens > 0
