"""The forms that outputs must have, compiled by llguidance, and the state of each sequence in its form.

A state consumes only committed tokens. Masks after drafted tokens are made by consuming these and going back. A token
outside its form never reaches a state, because a state of llguidance that has failed stays so.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rayspec.errors import ConfigError, GrammarError, naming_the_extra
from rayspec.structured import FORMS, StructuredOutputsParams

if TYPE_CHECKING:  # an extra
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 64  # compiled forms
_NUM_THREADS = 2
_MAX_ITEMS = 10_000  # of llguidance's parser at a place of the text; a property that may be left out needs four
_MAX_CHARACTERS = 600  # of an error, which may quote the form
_MAX_SCHEMAS = 200  # that are compiled to find the place of an error
_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"  # as people write JSON; without a limit, some models write nothing else
_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords of JSON schema whose value has a schema in each field, and those whose value is a schema or a list of some.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PARTS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form for the tokens of one model. initial: its state before the output, which must be copied for use.
    num_words: of 32 bits, in a mask of all tokens."""

    initial: LLMatcher
    num_words: int


class Grammars:
    """Compiles forms for the tokens of one model, on threads of its own, and keeps the latest. Any thread may use it.

    tokenizer: function that loads the tokenizer when the first form is compiled; it returns None if there is none.
    vocab_size: number of logits.
    """

    def __init__(
        self,
        tokenizer: Callable[[], PreTrainedTokenizerBase | None],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._load, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._kept: OrderedDict[StructuredOutputsParams, Future[CompiledForm]] = OrderedDict()  # the latest used last
        self._in_use: WeakValueDictionary[StructuredOutputsParams, Future[CompiledForm]] = WeakValueDictionary()
        self._tokenizer: LLTokenizer | None = None
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rayspec-grammar")

    def compiled(self, form: StructuredOutputsParams) -> Future[CompiledForm]:
        """Return the compiled form, at once. The future fails with GrammarError. Nothing is compiled again while a
        caller has its future."""
        with self._lock:
            future = self._in_use.get(form)
            if future is None:
                future = self._in_use[form] = self._threads.submit(self._compile, form)
            self._kept[form] = future
            self._kept.move_to_end(form)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return future

    def constraint(self, form: StructuredOutputsParams, num_prompt_tokens: int) -> Constraint:
        """Return the state of a new sequence. It waits for the compiled form when it is first used."""
        return Constraint(self.compiled(form), self._eos_token_ids, num_prompt_tokens)

    def _compile(self, form: StructuredOutputsParams) -> CompiledForm:
        name = next(name for name in FORMS if getattr(form, name) is not None)
        try:
            with naming_the_extra():
                from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

            tokenizer = self._own_tokenizer()
            limits = LLParserLimits(max_items_in_row=_MAX_ITEMS)
            matcher = LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=limits)
        # Not installed, a tokenizer that is no use, a grammar in no known syntax, a panic of llguidance.
        except BaseException as error:
            raise GrammarError(f"structured_outputs.{name}: {error}") from error
        if matcher.is_error():
            problem = _without_state(matcher.get_error())
            place = place_of(json.loads(form.json), problem, tokenizer) if isinstance(form.json, str) else ""
            raise GrammarError(f"structured_outputs.{name}{place}: {problem}")
        return CompiledForm(matcher, -(-tokenizer.vocab_size // 32))

    def _own_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # noqa: PLC0415

        with self._tokenizer_lock:
            if self._tokenizer is None:
                tokenizer = self._load()
                if not isinstance(tokenizer, PreTrainedTokenizerFast):
                    raise ConfigError("the engine has no fast tokenizer, which a form of the output needs")
                num_tokens = max(self._vocab_size, len(tokenizer))
                eos = [token for token in self._eos_token_ids if 0 <= token < num_tokens]
                self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=eos or None)
            return self._tokenizer


class Constraint:
    """Which tokens may follow in one sequence. Only one thread uses it; in one process, engine and head share it.

    error: why the output has lost its form; "" while it has not.
    """

    def __init__(self, compiled: Future[CompiledForm], eos_token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.error = ""
        self._compiled, self._eos_token_ids = compiled, eos_token_ids
        self._num_read = num_prompt_tokens
        self._consumed: list[int] = []  # the output, without what follows its end
        self._current: LLMatcher | None = None
        self._failures: dict[tuple[int, ...], str] = {}  # why no mask could be made, by the uncommitted tokens before

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Consume those committed tokens of the sequence that are new. token_ids: with the prompt. Tokens after the end
        of the output are ignored."""
        new = list(token_ids[self._num_read :])
        failures, self._failures = self._failures, {}
        if not new or (state := self._state()) is None:
            return
        self._num_read += len(new)
        for before, problem in failures.items():
            if len(before) < len(new) and tuple(new[: len(before)]) == before:
                self.error = problem
        num_consumed = state.try_consume_tokens(new)
        self._consumed += new[:num_consumed]
        if num_consumed < len(new) and (state.is_error() or not state.is_stopped()):
            usual = (
                f"token {new[num_consumed]} breaks the form of the output after {len(self._consumed)} tokens: other "
                "parameters, such as allowed_token_ids, leave none that the form allows"
            )
            self.error = self.error or _without_state(state.get_error()) or usual

    def masks(self, befores: Sequence[Sequence[int]]) -> Tensor | None:
        """Return which tokens may follow the committed tokens and each of `befores`: int32 [n, W] on the CPU, where bit
        b of word w is token 32 * w + b. All bits are set where nothing can follow, because a token before breaks the
        form or ends the output. None without a state, see `error`."""
        if self._state() is None:
            return None
        masks = torch.full((len(befores), self._compiled.result().num_words), -1, dtype=torch.int32)
        for at, state in self._visit(befores):
            state.unsafe_compute_mask_ptr(masks[at].data_ptr(), masks[at].nbytes)
            if state.is_error():
                self._failures[tuple(befores[at])] = _without_state(state.get_error())
                masks[at] = -1
        return masks

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """Return the indices of those drafted tokens that may come. parents: as in `RoundEntry`."""
        if (state := self._state()) is None:
            return []
        if not parents:
            return list(range(state.validate_tokens(list(token_ids))))
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(token_ids, parents, strict=True):
            paths.append((*paths[parent], token))
        return sorted(at for at, _ in self._visit(paths[1:]))

    def forced(self, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that must come next, unless the model splits their text differently."""
        if num_tokens <= 0 or (state := self._state()) is None or state.is_stopped():
            return []
        tokens = state.compute_ff_tokens()
        if 0 < len(tokens) < num_tokens:
            num_consumed = state.try_consume_tokens(tokens)
            if state.is_stopped() and not state.is_error():
                tokens += self._eos_token_ids[:1]
            state.rollback(num_consumed)
        return tokens[:num_tokens]

    def _state(self) -> LLMatcher | None:
        """Return the state after the committed tokens; None if there is none, see `error`."""
        if self._current is None or self._current.is_error():
            try:
                self._current = self._compiled.result().initial.deep_copy()
            except GrammarError as error:
                self.error = str(error)
                return None
            if self._current.try_consume_tokens(self._consumed) < len(self._consumed):
                self.error = _without_state(self._current.get_error()) or "the committed tokens are not of this form"
                return None
        return self._current

    def _visit(self, befores: Sequence[Sequence[int]]) -> Iterator[tuple[int, LLMatcher]]:
        """For each of these sequences of tokens that is allowed, yield its index and the state after it. Shared
        beginnings are consumed once. Afterwards the state is as before."""
        path: tuple[int, ...] = ()
        for before, at in sorted((tuple(before), at) for at, before in enumerate(befores)):
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, before, strict=False))
            num_common = sum(1 for _ in equal)
            if (state := self._state()) is None:
                return
            if num_common < len(path):
                state.rollback(len(path) - num_common)
            path = before[: num_common + state.try_consume_tokens(list(before[num_common:]))]
            if len(path) == len(before):
                yield at, state
            if state.is_error():  # the next one begins anew
                path = ()
        if path and (state := self._state()) is not None:
            state.rollback(len(path))


def grammar_of(form: StructuredOutputsParams) -> str:
    """Return the form as llguidance reads it. Raises ValueError for a grammar in no known syntax."""
    from llguidance import LLMatcher, grammar_from  # noqa: PLC0415

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        # One terminal, not one rule for each: there may be thousands.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, form.choice)))
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    schema = json.loads(form.json) if isinstance(form.json, str) else {"type": "object"}
    if form.disable_additional_properties:
        _close(schema)
    space: Any = {"whitespace_pattern": form.whitespace_pattern or _WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=_ONE_LINE if form.disable_any_whitespace else space)


def place_of(schema: Mapping[str, Any], problem: str, tokenizer: LLTokenizer) -> str:
    """Return the place of a problem in a schema, as ".properties.age": of the smallest part that alone has it."""
    from llguidance import LLMatcher  # noqa: PLC0415

    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, num_left = "", _MAX_SCHEMAS
    parts = list(_parts_of(schema))
    while parts and num_left > 0:
        name, part = parts.pop(0)
        num_left -= 1
        has_it, problems = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_json_schema({**shared, **part}), tokenizer
        )
        if has_it and _without_state(problems[0]) == problem:
            place, parts = place + name, list(_parts_of(part))
    return place


def _parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas in a schema, each with its place."""
    for keyword in _MAPS:
        if isinstance(several := schema.get(keyword), Mapping):
            yield from ((f".{keyword}.{name}", part) for name, part in several.items() if isinstance(part, Mapping))
    for keyword in _PARTS:
        value = schema.get(keyword)
        if isinstance(value, Mapping):
            yield f".{keyword}", value
        elif isinstance(value, list):
            yield from ((f".{keyword}.{at}", part) for at, part in enumerate(value) if isinstance(part, Mapping))


def _close(schema: Any) -> None:
    """Forbid properties that an object's schema does not name."""
    if isinstance(schema, dict):
        if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for _, part in _parts_of(schema):
            _close(part)


def _without_state(problem: str) -> str:
    """Return a problem as llguidance says it, without its dump of the state."""
    return problem.partition("\n<state>")[0].strip()[:_MAX_CHARACTERS]
