"""Summarize the rows of a Ray Data dataset: python examples/ray_data.py [MODEL]"""

import sys

import ray

from rayspec.data import ProcessorConfig, build_processor
from rayspec.demo import sample_documents

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
documents = ray.data.from_items([{"id": each.id, "text": each.text} for each in sample_documents(3)])
processor = build_processor(
    ProcessorConfig(model_source=model, engine_kwargs={"dtype": "float32", "max_model_len": 2048}),
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": row["text"]}],
        "sampling_params": {"temperature": 0.0, "max_tokens": 64},
    },
    postprocess=lambda row: {"id": row["id"], "summary": row["generated_text"]},
)
with processor:
    for row in processor(documents).take_all():
        print(f"{row['id']}: {row['summary'].splitlines()[0]}")
