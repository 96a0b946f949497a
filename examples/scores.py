"""Score texts by the log-probabilities of their tokens: python examples/scores.py [MODEL]"""

import sys

from rayspec import LLM, SamplingParams

texts = ["The report was published in May.", "The report were publish on in May."]
llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo", dtype="float32")

for output in llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)):
    token_ids, rows = output.prompt_token_ids, output.prompt_logprobs
    logprobs = [row[token].logprob for token, row in zip(token_ids, rows, strict=True) if row is not None]
    print(f"{sum(logprobs):8.2f} in {len(logprobs)} tokens: {output.prompt!r}")
