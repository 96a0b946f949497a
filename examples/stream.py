"""Print a text while it is written: python examples/stream.py [MODEL]"""

import sys

from rayspec import LLM, SamplingParams
from rayspec.demo import sample_documents
from rayspec.types import Request

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo", dtype="float32", max_model_len=2048)

document = sample_documents(1)[0].text
request = Request(
    request_id="summary",
    params=SamplingParams(temperature=0.0, max_tokens=64),
    prompt_token_ids=llm.chat_tokens([{"role": "user", "content": document}]),
    stream=True,
)
for piece in llm.stream([request]):
    print(piece.outputs[0].text, end="", flush=True)
print()
