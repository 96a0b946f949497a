"""Answer a conversation, and have the answer continued: python examples/chat.py [MODEL]

The bundled model only knows audit reports. For sentences that make sense: `rayspec fetch smollm2`, and MODEL smollm2.
"""

import sys

from rayspec import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo", dtype="float32", max_model_len=2048)

conversation = [{"role": "user", "content": "The agency spent 40 million dollars on roads in 2021."}]
sampling_params = SamplingParams(temperature=0.0, max_tokens=24)
(output,) = llm.chat(conversation, sampling_params)
answer = output.outputs[0].text
print(f"Answer: {answer!r}")

conversation.append({"role": "assistant", "content": answer})
(output,) = llm.chat(conversation, sampling_params, add_generation_prompt=False, continue_final_message=True)
print(f"Continued: {output.outputs[0].text!r}")
