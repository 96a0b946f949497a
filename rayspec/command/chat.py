"""`rayspec chat`: a conversation with a model on the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

from rayspec.command.terminal import load_llm, say
from rayspec.config import SamplingParams, Settings
from rayspec.llm import AsyncEngine
from rayspec.types import RayspecError


def converse(settings: Settings, prompt: str | None, system: str | None) -> None:
    """Answer the prompt; without one, answer each line of stdin, and remember the conversation. Texts go to stdout as
    they come. Raises ConfigError and RayspecError."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    with load_llm(settings.engine) as llm:
        engine = AsyncEngine(llm)
        for question in [prompt] if prompt is not None else _lines():
            asked = [*messages, {"role": "user", "content": question}]
            try:
                answer = asyncio.run(_answer(engine, engine.chat_tokens(asked), settings.sampling))
            except RayspecError as error:
                if prompt is not None:
                    raise
                say(f"error: {error}")
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Yield the lines of stdin that are not blank, with a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line


async def _answer(engine: AsyncEngine, prompt_token_ids: list[int], params: SamplingParams) -> str:
    pieces = []
    async for piece in engine.stream(prompt_token_ids, params):
        if piece.error is not None:
            raise piece.error
        pieces.append(piece.outputs[0].text)
        print(pieces[-1], end="", flush=True)  # noqa: T201 - the command's output
    print()  # noqa: T201
    return "".join(pieces)
