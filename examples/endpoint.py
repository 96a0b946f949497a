"""Ask an endpoint, started by `rayspec serve demo`, with OpenAI's client: python examples/endpoint.py [URL]

It needs openai.
"""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "The agency spent 40 million dollars on roads in 2021."}],
    max_tokens=24,
    temperature=0.0,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

text = "The report was published in May."
scored = client.completions.create(model=model, prompt=text, max_tokens=0, echo=True, logprobs=0)
logprobs = scored.choices[0].logprobs.token_logprobs[1:]  # the first token has none
print(f"{sum(logprobs):.2f} in {len(logprobs)} tokens")
