"""The task of a job over documents: a prompt is made of each row, and the model's answer completes the row."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rayspec.batch.long_documents import LongDocumentOptions, LongDocuments
from rayspec.batch.rows import Handler, Row
from rayspec.config import SamplingParams, Settings
from rayspec.demo import BUNDLED
from rayspec.openai.parsers import ThinkParser, Thought
from rayspec.openai.tokenizing import in_thread_if_large
from rayspec.prompts import text_tokens
from rayspec.structured import MOST_TOKENS_OF_THINK, THINK, THINKING
from rayspec.types import ConfigError, InvalidMessagesError, RequestError, UnfinishedFormError

if TYPE_CHECKING:  # torch, transformers and ray, which others do not need
    from rayspec.llm import LLM, AsyncEngine

SUMMARY_SAMPLING = SamplingParams(temperature=0.0, max_tokens=256)
_PLACE = "{text}"
_SUMMARY_PROMPT = f"Summarize the following document.\n\n{_PLACE}"


def summary_prompt(model: str) -> str:
    """Return the default prompt template for summaries. The bundled models need no instruction."""
    return _PLACE if model in BUNDLED else _SUMMARY_PROMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Makes prompts from rows.

    template: the prompt, in which "{text}" stands for the document. chat: it becomes a user's message if there is a
    chat template. max_prompt_tokens: longer documents are cut at their end; None: the engine refuses them. system: the
    first message of each chat without one; it needs a chat template.
    """

    llm: LLM
    template: str = _PLACE
    chat: bool = True
    max_prompt_tokens: int | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.llm.tokenizer.chat_template:
            raise ConfigError("option 'system' needs a model with a chat template: put it into the prompt instead")

    def tokens(self, row: Row) -> list[int]:
        """Return the prompt tokens of a row. Raises RequestError, also for any error of the template or tokenizer."""
        if row.messages is not None:
            try:
                return self._chat_tokens(json.loads(row.messages))
            except ConfigError as error:  # rows with a prompt can still be completed
                raise InvalidMessagesError(str(error)) from error
        return self.fitting_tokens(row.document or "")

    def fitting_tokens(self, text: str) -> list[int]:
        """Return the prompt tokens for a text, which is cut at its end to fit `max_prompt_tokens`."""
        token_ids = self._text_tokens(text)
        limit = self.max_prompt_tokens
        if limit is None or len(token_ids) <= limit:
            return token_ids
        body = text_tokens(text, self.llm.tokenizer, add_special_tokens=False)
        while len(token_ids) > limit and body:
            body = body[: max(0, len(body) - (len(token_ids) - limit))]
            token_ids = self._text_tokens(str(self.llm.tokenizer.decode(body)).rstrip("\ufffd"))
        return token_ids

    def _text_tokens(self, text: str) -> list[int]:
        content = self.template.replace(_PLACE, text)
        if self.chat and self.llm.tokenizer.chat_template:
            return self._chat_tokens([{"role": "user", "content": content}])
        return text_tokens(content, self.llm.tokenizer)

    def _chat_tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return self.llm.chat_tokens(messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTask:
    """The task of completing a prompt for each document. template, chat, system: as for PromptBuilder. needs_chat: a
    model without a chat template is refused. instruct: tell the model that it reads a part. prompt_template: the Jinja
    template that has made the documents of columns."""

    settings: Settings
    template: str
    chat: bool = True
    needs_chat: bool = False
    long: LongDocumentOptions = field(default_factory=LongDocumentOptions)
    instruct: bool = True
    system: str | None = None
    prompt_template: str | None = None

    def __post_init__(self) -> None:
        if _PLACE not in self.template:
            raise ConfigError(f"option 'prompt' is {self.template!r}: it must hold {_PLACE}, where the document goes")

    @property
    def identity(self) -> dict[str, Any]:
        """The options that decide the content of the rows. All rows of an output folder have the same identity."""
        return {
            "task": {
                "template": self.prompt_template or self.template,
                "chat": self.chat,
                "system": self.system,
                "long": self.long.model_dump(mode="json", include=set(LongDocumentOptions.model_fields)),
            },
            "sampling": self.settings.sampling.model_dump(mode="json", exclude={"use_drafts"}),  # decides no text
            "engine": self.settings.deciding,
        }

    def handler(self, engine: AsyncEngine) -> Handler:
        """Make the handler of rows. An error that the row causes is stored in the row. A conversation is never cut.

        Raises ConfigError for options that cannot work with this context.
        """
        params = self.settings.sampling
        prompts = PromptBuilder(llm=engine.llm, template=self.template, chat=self.chat, system=self.system)
        if self.needs_chat and not engine.tokenizer.chat_template:
            raise ConfigError("option 'chat' needs a model with a chat template: leave the option out")
        # With room for a whole output; for one token of it, where it may fill the context.
        fitting = max(1, engine.max_model_len - (params.max_tokens or 1))
        if self.long.long == "truncate":
            prompts = replace(prompts, max_prompt_tokens=fitting)
        finds_reasoning = self.settings.engine.reasoning_parser in THINKING

        def divided(text: str, prompt: list[int]) -> tuple[str, str | None]:
            """Return the text of an output without its reasoning, and the reasoning."""
            if not finds_reasoning:
                return text, None
            end = str(engine.tokenizer.decode(prompt[-MOST_TOKENS_OF_THINK:])).rstrip()
            pieces = ThinkParser(None, is_inside=end.endswith(THINK)).feed(text, finished=True)
            thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
            return "".join(one for one in pieces if isinstance(one, str)), thoughts or None

        long_documents: LongDocuments | None = None
        if self.long.long in ("map-reduce", "refine"):
            long_documents = LongDocuments(
                engine=engine,
                tokens=replace(prompts, template=_PLACE).fitting_tokens,
                params=params,
                template=self.template,
                instruct=self.instruct,
                options=self.long,
                divided=divided,
            )

        async def complete(row: Row) -> Row:
            try:
                text = row.document or row.messages or ""
                tokens = await in_thread_if_large(partial(prompts.tokens, row), len(text))
            except RequestError as error:
                return row.failed(error)
            if long_documents is not None and row.document is not None and len(tokens) > fitting:
                done = await long_documents.complete(row)
            elif (done := row.completed(await engine.run(tokens, params))).text is not None:
                text, reasoning = divided(done.text, tokens)
                done = replace(done, text=text, reasoning=reasoning)
            if params.structured_outputs is not None and done.finish_reason == "length":
                remedy = "raise max_tokens, or bound the texts and lists of the schema"
                return done.failed(UnfinishedFormError(f"the output ended before it had its form: {remedy}"))
            return done

        return complete
