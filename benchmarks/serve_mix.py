"""A realistic mixture of requests, drawn with a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.serve_client import Ask
from rayspec import demo

_SENTENCES = (1, 4)
_STOPS = (["."], ["the", "million"], ["\n"])
_MOST_EVENTS_BEFORE_CUT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Options of a mixture. model: its name at the endpoint. All shares are of all requests, drawn independently.

    cut_share: requests that the client cuts. Half of the cut streams end after a few events; all other cut requests end
    after a random time of at most `longest_wait_s`. several_share: requests for two choices.
    """

    model: str
    num_requests: int
    max_tokens: int
    seed: int = 0
    stream_share: float = 0.6
    chat_share: float = 0.5
    sampled_share: float = 0.5
    several_share: float = 0.2
    stop_share: float = 0.3
    logprobs_share: float = 0.2
    cut_share: float = 0.2
    longest_wait_s: float = 3.0

    def asks(self) -> list[Ask]:
        """Return the requests; the same options give the same requests."""
        chance = random.Random(self.seed)
        documents = demo.sample_documents(self.num_requests, num_sentences=_SENTENCES[1], seed=self.seed)
        return [self._ask(document.text, chance) for document in documents]

    def _ask(self, text: str, chance: random.Random) -> Ask:
        is_chat, is_stream = chance.random() < self.chat_share, chance.random() < self.stream_share
        sentences = text.split(". ")[: chance.randint(*_SENTENCES)]
        prompt = ". ".join(sentences)
        body: dict[str, Any] = {"model": self.model, "max_tokens": chance.randint(1, self.max_tokens)}
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        body |= self._sampling(chance, is_chat=is_chat)
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Ask(
            path="/v1/chat/completions" if is_chat else "/v1/completions",
            body=body,
            **self._cut(chance, is_stream=is_stream),
        )

    def _sampling(self, chance: random.Random, *, is_chat: bool) -> dict[str, Any]:
        chosen: dict[str, Any] = {"temperature": 0.0}
        if chance.random() < self.sampled_share:
            chosen = {"temperature": 0.8, "top_p": 0.95, "seed": chance.randrange(2**31)}
        if chance.random() < self.several_share:
            chosen["n"] = 2
        if chance.random() < self.stop_share:
            chosen["stop"] = chance.choice(_STOPS)
        if chance.random() < self.logprobs_share:
            chosen |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
        return chosen

    def _cut(self, chance: random.Random, *, is_stream: bool) -> dict[str, Any]:
        if chance.random() >= self.cut_share:
            return {}
        if is_stream and chance.random() < 0.5:
            return {"cut_after_events": chance.randint(1, _MOST_EVENTS_BEFORE_CUT)}
        return {"cut_after_s": chance.uniform(0.0, self.longest_wait_s)}
