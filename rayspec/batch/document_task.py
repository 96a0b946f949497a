"""What is done with every document of a job: prompts are made of it, and what is answered becomes its row."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rayspec.batch.documents import Document
from rayspec.batch.engine_actor import Handler
from rayspec.batch.long_documents import LongDocumentOptions, LongDocuments, part_templates
from rayspec.batch.prompts import PromptBuilder
from rayspec.batch.results import ResultRow, is_final
from rayspec.command.settings import Settings
from rayspec.decode.engine_loop import EngineDeadError

if TYPE_CHECKING:  # torch and transformers, which the driver and the supervisor do not need
    from rayspec.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTask:
    """template: "{text}" in it stands for the document. chat: the text becomes a user's message where there is a chat
    template. long: what is done with documents beyond the context. instruct: tell the model when it reads a part."""

    settings: Settings
    template: str
    chat: bool = True
    long: LongDocumentOptions = field(default_factory=LongDocumentOptions)
    instruct: bool = True

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides what the rows say: rows made with another one do not belong in the same output."""
        return {
            "task": {"template": self.template, "chat": self.chat, "long": self.long.model_dump(mode="json")},
            "sampling": self.settings.sampling.model_dump(mode="json"),
            "engine": self.settings.deciding,
        }

    def handler(self, engine: AsyncEngine) -> Handler:
        """Raises ConfigError for a template without a place for the document, and options that cannot work."""
        prompts = PromptBuilder(llm=engine.llm, params=self.settings.sampling, template=self.template, chat=self.chat)
        templates = part_templates(self.template, instruct=self.instruct)
        documents = LongDocuments(engine=engine, prompts=prompts, templates=templates, options=self.long)

        async def complete(document: Document) -> ResultRow:
            outcome = await documents.complete(document)
            row = outcome.row(document.id)
            if not is_final(row):
                raise EngineDeadError(f"the engine has failed a row and cannot go on: {row.error}")
            tree = [node.as_dict() for node in outcome.roots]
            return replace(row, tree=json.dumps(tree) if tree else None)

        return complete
