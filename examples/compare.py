"""Compare plain decoding with `auto` on your own texts: python examples/compare.py [MODEL [FILE.txt ...]]"""

import sys
from pathlib import Path

from rayspec import LLM, SamplingParams
from rayspec.demo import sample_documents

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[2:]] or [d.text for d in sample_documents(3)]
conversations = [[{"role": "user", "content": text}] for text in texts]
sampling_params = SamplingParams(temperature=0.0, max_tokens=128)

answers = {}
for strategy in ("ar", "auto"):  # ar: plain decoding
    with LLM(model, dtype="float32", max_num_seqs=1, speculation={"strategy": strategy}) as llm:
        outputs = llm.chat(conversations, sampling_params)
        answers[strategy] = [output.outputs[0].text for output in outputs]
        stats = llm.stats
    decoding_s = stats.total_s - stats.prefill_s
    print(f"{strategy}: {stats.num_generated_tokens / decoding_s:.0f} tokens/s, prompts not counted")
print("same texts:", answers["ar"] == answers["auto"])
