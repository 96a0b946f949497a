"""The bundled model for tests: loaded once, with short documents to summarize."""

from functools import cache
from typing import Any

from transformers import AutoTokenizer

from rayspec import demo
from rayspec.choices import Weights
from rayspec.model.sublayers import Decomposition
from tests.families import parts_of

EOS = 1


def demo_parts(dtype: str = "float32", quantised: tuple[Weights, ...] = ()) -> Decomposition:
    return parts_of(demo.model_path(), dtype, quantised)


@cache
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.model_path())


def demo_prompts(count: int, num_sentences: int, seed: int = 3) -> list[list[int]]:
    return [
        list(
            demo_tokenizer().apply_chat_template(
                [{"role": "user", "content": document.text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for document in demo.sample_documents(count, num_sentences=num_sentences, seed=seed)
    ]
