"""Reasoning in outputs: what a model writes before its answer, found in the text as it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rayspec.openai.tool_formats import CallParser, CallPiece
from rayspec.structured import END_OF_THINK, THINK

HARMONY = "openai_gptoss"
_SIGNS_OF_HARMONY = ("<|channel|>", "<|message|>")
_SPACE = " \t\r\n"
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?: ?to=(?P<first>[^\s<]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<second>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_HEADS = ("<|start|>", "<|channel|>", " to=", "to=", "assistant<|channel|>", "assistant to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_MOST_HEADER = 256  # characters


@dataclass(frozen=True, slots=True)
class Thought:
    """New text of the reasoning."""

    text: str


Piece = str | CallPiece | Thought


def reasoning_style(template: str, name: str | None) -> str | None:
    """Return the style of the reasoning in outputs; None: it is not found. name: vLLM's name of the parser; None: only
    what the chat template shows to be gpt-oss' format."""
    return HARMONY if name is None and all(sign in template for sign in _SIGNS_OF_HARMONY) else name


class ThinkParser:
    """Finds reasoning in <think> and </think>. make_rest: makes the parser of what follows; None: it is content.
    is_inside: the prompt ended with <think>. Spaces around the reasoning belong to nothing."""

    def __init__(self, make_rest: Callable[[], CallParser | HarmonyParser] | None, *, is_inside: bool) -> None:
        self._rest = make_rest() if make_rest is not None else None
        self._held, self._has_thought = "", False
        self._at: Literal["begin", "inside", "between", "after"] = "inside" if is_inside else "begin"

    def feed(self, text: str, *, finished: bool) -> Sequence[Piece]:
        pieces: list[Piece] = []
        self._held += text
        if self._at == "begin":
            begun = self._held.lstrip(_SPACE)
            if begun.startswith(THINK):
                self._held, self._at = begun[len(THINK) :], "inside"
            elif finished or not THINK.startswith(begun):
                self._at = "after"
        if self._at == "inside":
            thought, mark, rest = self._held.partition(END_OF_THINK)
            if not mark and not finished:
                thought = thought[: len(thought) - _num_begun(thought, (END_OF_THINK,))]
            thought = thought.rstrip(_SPACE) if self._has_thought else thought.strip(_SPACE)
            if thought:
                pieces.append(Thought(thought))
                self._has_thought = True
            self._held = rest if mark else self._held[self._held.find(thought) + len(thought) :]
            self._at = "between" if mark else "inside"
        if self._at == "between":
            self._held = self._held.lstrip(_SPACE)
            self._at = "after" if self._held or finished else "between"
        if self._at == "after":
            rest, self._held = self._held, ""
            pieces += self._rest.feed(rest, finished=finished) if self._rest is not None else [rest]
        return pieces


class HarmonyParser:
    """Finds the messages in the format of gpt-oss. The analysis is reasoning, and so is what is sent to other tools
    than functions. What has no header is content. has_tools: messages to functions are calls. is_parallel: as in
    CallParser."""

    def __init__(self, *, has_tools: bool, is_parallel: bool) -> None:
        self.num_calls = 0
        self._has_tools, self._is_parallel = has_tools, is_parallel
        self._held, self._break = "", ""
        self._kind: Literal["content", "call", "thought"] | None = None
        self._shown: set[str] = set()

    def feed(self, text: str, *, finished: bool) -> Sequence[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            if self._kind is None:
                if not self._begin(pieces):
                    break
                continue
            end = _END.search(self._held)
            if end is None:
                num_shown = len(self._held) - (0 if finished else _num_begun(self._held, _ENDS))
                self._show(self._held[:num_shown], pieces)
                self._held = self._held[num_shown:]
                break
            self._show(self._held[: end.start()], pieces)
            self._held = self._held[end.start() if end[0] in _HEADS else end.end() :]
            self._kind = None
        return pieces

    def _begin(self, pieces: list[Piece]) -> bool:
        """Read the header of a message. False if it has not come yet."""
        match = _HEADER.match(self._held, 0, _MOST_HEADER)
        if match is None:
            may_begin = any(self._held.startswith(sign) or sign.startswith(self._held) for sign in _HEADS)
            if may_begin and len(self._held) < _MOST_HEADER:
                return False
            self._kind, self._break = "content", ""
            self._show(self._held[0], pieces)
            self._held = self._held[1:]
            return True
        self._held = self._held[match.end() :]
        recipient = match["first"] or match["second"] or ""
        name = recipient.removeprefix("functions.")
        if self._has_tools and name != recipient:
            self._kind = "call"
            self.num_calls += 1
            if self._is_parallel or self.num_calls == 1:
                pieces.append(CallPiece(self.num_calls - 1, name, ""))
            return True
        is_shown = match["channel"] == "final" or (match["channel"] == "commentary" and not recipient)
        self._kind = "content" if is_shown else "thought"
        self._break = "\n\n" if self._kind in self._shown else ""
        return True

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not text or self._kind is None:
            return
        if self._kind == "call":
            if self._is_parallel or self.num_calls == 1:
                pieces.append(CallPiece(self.num_calls - 1, None, text))
            return
        text, self._break = self._break + text, ""
        self._shown.add(self._kind)
        pieces.append(text if self._kind == "content" else Thought(text))


def _num_begun(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of the text may begin a mark."""
    return max(num for mark in marks for num in range(len(mark)) if text.endswith(mark[:num]))


OutputParser = CallParser | HarmonyParser | ThinkParser
"""Divides an output into content, calls and reasoning; the results do not depend on where the text is cut."""
