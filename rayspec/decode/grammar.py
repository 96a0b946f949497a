"""The forms that outputs must have, compiled by llguidance, and the state of each sequence in its form.

A state consumes only committed tokens. Masks after drafted tokens are made by consuming these and going back. A token
outside its form never reaches a state, because a state of llguidance that has failed stays so.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rayspec.decode.form_checker import FormChecker, parser_limits, problem_of
from rayspec.errors import ConfigError, GrammarError, naming_the_extra
from rayspec.structured import FORMS, StructuredOutputsParams

if TYPE_CHECKING:  # an extra
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 64  # compiled forms
_NUM_THREADS = 2
_MAX_KEPT_BYTES = 2**27
# Seconds of a core to follow a form, at first and for each token. A slow form is not drafted for, and not kept, because
# its states may take much memory; a form that is too slow would hold up all other sequences.
_SLOW_S, _TOO_SLOW_S = (0.1, 0.003), (0.5, 0.01)


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form for the tokens of one model. initial: its state before the output, which must be copied for use.
    num_words: of 32 bits, in a mask of all tokens. num_bytes: about how much memory it takes."""

    initial: LLMatcher
    num_words: int
    num_bytes: int


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
        self._wishes: dict[StructuredOutputsParams, list[Callable[[], bool]]] = {}  # of forms that wait
        self._checker = FormChecker()
        self._tokenizer: LLTokenizer | None = None
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="rayspec-grammar")

    def compiled(
        self, form: StructuredOutputsParams, is_wanted: Callable[[], bool] = lambda: True
    ) -> Future[CompiledForm]:
        """Return the compiled form, at once. The future fails with GrammarError; and with CancelledError if nobody
        wants the form when its turn comes. Nothing is compiled again while a caller has its future."""
        with self._lock:
            future = self._in_use.get(form)
            if future is None:
                self._wishes[form] = []
                future = self._in_use[form] = self._threads.submit(self._compile, form)
            if form in self._wishes:
                self._wishes[form].append(is_wanted)
            self._kept[form] = future
            self._kept.move_to_end(form)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return future

    def constraint(self, form: StructuredOutputsParams, num_prompt_tokens: int) -> Constraint:
        """Return the state of a new sequence. It waits for the compiled form when it is first used."""
        return Constraint(self.compiled(form), self._eos_token_ids, num_prompt_tokens, partial(self._forget, form))

    def _forget(self, form: StructuredOutputsParams) -> None:
        with self._lock:
            self._kept.pop(form, None)

    def _compile(self, form: StructuredOutputsParams) -> CompiledForm:
        with self._lock:
            if not any(is_wanted() for is_wanted in self._wishes.pop(form)):
                del self._in_use[form]
                self._kept.pop(form, None)
                raise CancelledError
        name = next(name for name in FORMS if getattr(form, name) is not None)
        try:
            with naming_the_extra():
                from llguidance import LLMatcher  # noqa: PLC0415

            tokenizer = self._own_tokenizer()
            grammar, num_bytes = self._checker.grammar(dataclasses.asdict(form))
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        # Not installed, a tokenizer that is no use, a form that cannot be compiled, a panic of llguidance.
        except BaseException as error:
            has_place = isinstance(error, ValueError) and not isinstance(error, ConfigError)  # of the form checker
            message = str(error) if has_place else f": {error}"
            raise GrammarError(f"structured_outputs.{name}{message}") from error
        if matcher.is_error():
            raise GrammarError(f"structured_outputs.{name}: {problem_of(matcher)}")
        self._drop_large(num_bytes)
        return CompiledForm(matcher, -(-tokenizer.vocab_size // 32), num_bytes)

    def _drop_large(self, num_bytes: int) -> None:
        """Keep no more compiled forms than have room, together with a new one of that size."""
        with self._lock:
            for form, future in reversed(list(self._kept.items())):
                if future.done() and future.exception() is None:
                    num_bytes += future.result().num_bytes
                    if num_bytes > _MAX_KEPT_BYTES:
                        del self._kept[form]

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

    def __init__(
        self,
        compiled: Future[CompiledForm],
        eos_token_ids: Sequence[int],
        num_prompt_tokens: int,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        """on_slow: called after work on a form that is slow."""
        self.error = ""
        self._compiled, self._eos_token_ids, self._on_slow = compiled, eos_token_ids, on_slow
        self._work_s = 0.0
        self._num_read = num_prompt_tokens
        self._consumed: list[int] = []  # the output, without what follows its end
        self._current: LLMatcher | None = None
        self._failures: dict[tuple[int, ...], str] = {}  # why no mask could be made, by the uncommitted tokens before

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Consume those committed tokens of the sequence that are new. token_ids: with the prompt. Tokens after the end
        of the output are ignored."""
        new = list(token_ids[self._num_read :])
        failures, self._failures = self._failures, {}
        if not new:
            return
        with self._timed() as state:
            if state is not None:
                self._extend(state, new, failures)

    def _extend(self, state: LLMatcher, new: list[int], failures: dict[tuple[int, ...], str]) -> None:
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
            self.error = self.error or problem_of(state) or usual

    def masks(self, befores: Sequence[Sequence[int]]) -> Tensor | None:
        """Return which tokens may follow the committed tokens and each of `befores`: int32 [n, W] on the CPU, where bit
        b of word w is token 32 * w + b. All bits are set where nothing can follow, because a token before breaks the
        form or ends the output. None without a state, see `error`."""
        with self._timed() as current:
            if current is None:
                return None
            masks = torch.full((len(befores), self._compiled.result().num_words), -1, dtype=torch.int32)
            for at, state in self._visit(befores):
                state.unsafe_compute_mask_ptr(masks[at].data_ptr(), masks[at].nbytes)
                if state.is_error():
                    self._failures[tuple(befores[at])] = problem_of(state)
                    masks[at] = -1
            return masks

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """Return the indices of those drafted tokens that may come; of a slow form, none. parents: as in
        `RoundEntry`."""
        with self._timed() as state:
            if state is None or self._takes_more_than(_SLOW_S):
                return []
            if not parents:
                return list(range(state.validate_tokens(list(token_ids))))
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(token_ids, parents, strict=True):
                paths.append((*paths[parent], token))
            return sorted(at for at, _ in self._visit(paths[1:]))

    def forced(self, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that must come next, unless the model splits their text differently; of a
        slow form, none."""
        if num_tokens <= 0:
            return []
        with self._timed() as state:
            if state is None or state.is_stopped() or self._takes_more_than(_SLOW_S):
                return []
            tokens = state.compute_ff_tokens()
            if 0 < len(tokens) < num_tokens:
                num_consumed = state.try_consume_tokens(tokens)
                if state.is_stopped() and not state.is_error():
                    tokens += self._eos_token_ids[:1]
                state.rollback(num_consumed)
            return tokens[:num_tokens]

    @contextmanager
    def _timed(self) -> Iterator[LLMatcher | None]:
        """Count the time of the work on the state, which is None if there is none, see `error`."""
        start_s = time.thread_time()
        try:
            yield self._state()
        finally:
            self._work_s += time.thread_time() - start_s
            if self._takes_more_than(_SLOW_S):
                self._on_slow()

    def _takes_more_than(self, limit_s: tuple[float, float]) -> bool:
        at_first_s, of_a_token_s = limit_s
        return self._work_s > at_first_s + of_a_token_s * len(self._consumed)

    def _state(self) -> LLMatcher | None:
        """Return the state after the committed tokens; None if there is none, see `error`."""
        if self._takes_more_than(_TOO_SLOW_S):
            self.error = (
                self.error or "structured_outputs: following it takes too long: make its texts and repetitions shorter"
            )
            return None
        if self._current is None or self._current.is_error():
            try:
                self._current = self._compiled.result().initial.deep_copy()
            except GrammarError as error:
                self.error = str(error)
                return None
            if self._current.try_consume_tokens(self._consumed) < len(self._consumed):
                self.error = problem_of(self._current) or "the committed tokens are not of this form"
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
