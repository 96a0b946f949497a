"""Complete prompts. With vLLM only the import and the model differ: python examples/offline.py [MODEL]

The bundled model only knows audit reports. For sentences that make sense: `rayspec fetch smollm2`, and MODEL smollm2.
"""

import sys

from rayspec import LLM, SamplingParams

prompts = ["The agency reported that", "The committee met in May and"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, bad_words=["million"])

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo", tensor_parallel_size=1, dtype="float32", seed=0)

for output in llm.generate(prompts, sampling_params):
    print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")
