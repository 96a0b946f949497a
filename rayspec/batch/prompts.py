"""From a document to the tokens the model is asked to go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from rayspec.batch.documents import Document
from rayspec.config import SamplingParams
from rayspec.types import ConfigError, InvalidMessagesError, Request, RequestError

SUMMARY_SAMPLING = SamplingParams(temperature=0.0, max_tokens=256)
_PLACE = "{text}"
_SUMMARY_PROMPT = f"Summarize the following document.\n\n{_PLACE}"
DEMO = "demo"


def summary_prompt(model: str) -> str:
    """What a document is wrapped in when nothing else is asked for. The bundled model needs no instruction."""
    return _PLACE if model == DEMO else _SUMMARY_PROMPT


def fitting_prompt_tokens(max_model_len: int, params: SamplingParams) -> int:
    """The longest prompt that leaves room for a whole output."""
    return max(1, max_model_len - params.max_tokens)


class Tokenizes(Protocol):
    """What is asked of an LLM to make prompts. `tokenizer` is a transformers tokenizer."""

    @property
    def tokenizer(self) -> Any: ...

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Makes requests of documents.

    template: "{text}" in it stands for the document. chat: text becomes a user's message where the tokenizer has a chat
    template; otherwise it is the prompt as it is. max_prompt_tokens: longer documents are cut at their end to fit; None
    leaves them whole, and the engine refuses those that do not fit.
    """

    llm: Tokenizes
    params: SamplingParams
    template: str = _PLACE
    chat: bool = True
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if _PLACE not in self.template:
            raise ConfigError(f"option 'prompt' is {self.template!r}: it must hold {_PLACE}, where the document goes")

    def request(self, request_id: str, document: Document) -> Request:
        """Raises what `tokens` does."""
        return Request(request_id=request_id, params=self.params, prompt_token_ids=self.tokens(document))

    def tokens(self, document: Document) -> list[int]:
        """Of the prompt. Raises RequestError for a document that is none, or messages that the template refuses."""
        if document.error is not None:
            raise document.error
        if document.messages is not None:
            return self._chat_tokens(document.messages)
        return self._fitting_tokens(document.text or "")

    def _fitting_tokens(self, text: str) -> list[int]:
        token_ids = self._text_tokens(text)
        limit = self.max_prompt_tokens
        if limit is None or len(token_ids) <= limit:
            return token_ids
        body = list(self.llm.tokenizer(text, add_special_tokens=False)["input_ids"])
        while len(token_ids) > limit and body:
            body = body[: max(0, len(body) - (len(token_ids) - limit))]
            token_ids = self._text_tokens(self.llm.tokenizer.decode(body).rstrip("\ufffd"))
        return token_ids

    def _text_tokens(self, text: str) -> list[int]:
        content = self.template.replace(_PLACE, text)
        if self.chat and self.llm.tokenizer.chat_template:
            return self._chat_tokens([{"role": "user", "content": content}])
        return list(self.llm.tokenizer(content)["input_ids"])

    def _chat_tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        try:
            return self.llm.chat_tokens(messages)
        except RequestError:
            raise
        except (TemplateError, ValueError) as error:
            raise InvalidMessagesError(f"the messages cannot be made a prompt: {error}") from error
