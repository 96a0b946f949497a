"""What is done with every document of a job: a prompt is made of it, and its completion becomes its row."""

from __future__ import annotations

from dataclasses import dataclass

from rayspec.service.async_engine import AsyncEngine
from rayspec.service.documents import Document, DuplicateCheck
from rayspec.service.engine_actor import Handler
from rayspec.service.prompts import PromptBuilder, fitting_prompt_tokens
from rayspec.service.results import ResultRow
from rayspec.service.settings import Settings
from rayspec.types import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTask:
    """template: "{text}" in it stands for the document. chat: the text becomes a user's message where there is a chat
    template. truncate: a document beyond the context is cut instead of refused."""

    settings: Settings
    template: str
    chat: bool = True
    truncate: bool = False

    def handler(self, engine: AsyncEngine) -> Handler:
        """Raises ConfigError for a template without a place for the document."""
        prompts = self.prompts(engine)
        check = DuplicateCheck()

        async def complete(document: Document) -> ResultRow:
            document = check(document)
            try:
                tokens = prompts.tokens(document)
            except RequestError as error:
                return ResultRow.of_error(document.id, error)
            return ResultRow.of_output(document.id, await engine.run(tokens, prompts.params))

        return complete

    def prompts(self, engine: AsyncEngine) -> PromptBuilder:
        params = self.settings.sampling
        room = fitting_prompt_tokens(engine.max_model_len, params) if self.truncate else None
        return PromptBuilder(
            llm=engine.llm, params=params, template=self.template, chat=self.chat, max_prompt_tokens=room
        )
