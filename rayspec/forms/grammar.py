"""The forms that outputs must have, compiled by llguidance, and the state of each sequence in its form.

A state consumes only committed tokens. Masks after drafted tokens are made by consuming these and going back. A token
outside its form never reaches a state, because a state of llguidance that has failed stays so.

Threads of their own do this work, because a mask may take a second. Only the mask takes long, and it needs no lock of
Python: so each token is consumed after the mask before it, which leaves what the consuming needs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rayspec.errors import ConfigError, GrammarError, naming_the_extra
from rayspec.forms.checker import MOST_S, QUICK_S, FormChecker, parser_limits, without_state
from rayspec.structured import CHANNELS, END_OF_THINK, FORMS, THINK, StructuredOutputsParams

if TYPE_CHECKING:  # an extra
    from llguidance import LLMatcher, LLTokenizer

Result = TypeVar("Result")

_MAX_KEPT = 64  # compiled forms
_NUM_THREADS = 2
_MAX_KEPT_BYTES = 2**27
_BYTES_OF_MASK_S = 2**28  # that the lexer grows by in a second of making masks; b{240000} takes 80 MB in 0.3 s
# Seconds of a core to follow a form, at first and for each token. A slow form is not drafted for, and not kept, because
# its states may take much memory; a form that is too slow fails its sequence.
_SLOW_S, _TOO_SLOW_S = (0.1, 0.003), (0.5, 0.01)
_TAKES_TOO_LONG = "following it takes too long: make its texts and repetitions shorter"
_LIGHT = 8192  # characters of a JSON schema without expressions, whose masks take 15 ms at most
_PATIENCE_S = 0.02  # how long other sequences wait for work on a form


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form for the tokens of one model. grammar: as llguidance reads it. initial: its state before the output, which
    must be copied for use; copies share a lexer, whose size is limited. It has made the first mask, unless that took
    long, because copies would then be large. mask: the first, int32 [W].
    mask_s: seconds of a core that llguidance took for it. num_bytes: about how much memory the form takes. is_light:
    its masks are made at once, because only long texts, expressions and grammars make a mask take long. end_tokens: of
    which one ends the output: the model's eos tokens, or the tokenizer's if the model has none."""

    grammar: str
    initial: LLMatcher
    mask: Tensor
    mask_s: float
    num_bytes: int
    is_light: bool
    end_tokens: tuple[int, ...]


class _FairThreads:
    """Threads that work for clients in turn."""

    def __init__(self, num_threads: int, begin: Callable[[], None] | None = None) -> None:
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # by client, whose turn it is first
        self._threads, self._lock = ThreadPoolExecutor(num_threads, "rayspec-grammar", begin), threading.Lock()

    def submit(self, client: str, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.setdefault(client, deque()).append(work)
        self._threads.submit(self._next)

    def _next(self) -> None:
        with self._lock:
            client, works = self._waiting.popitem(last=False)
            work = works.popleft()
            if works:
                self._waiting[client] = works
        work()


@dataclass(slots=True)
class _WaitingForm:
    """A form until it is compiled. wishes: whether somebody still wants it. clients: whose turn compiles it, too.
    is_slow: it has taken too long once, and comes behind all others."""

    future: Future[CompiledForm]
    wishes: list[Callable[[], bool]] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    is_slow: bool = False
    has_begun: bool = False


class Grammars:
    """Compiles forms for the tokens of one model, on threads of its own, and keeps the latest. Any thread may use it.

    tokenizer: function that loads the tokenizer when the first form is compiled; it returns None if there is none.
    vocab_size: number of logits. patience_s: see `Constraint`. fast: threads that follow forms; slow: those of slow
    forms, which come after everything else that the machine has to do.
    """

    def __init__(
        self,
        tokenizer: Callable[[], PreTrainedTokenizerBase | None],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._load, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._kept: OrderedDict[StructuredOutputsParams, Future[CompiledForm]] = OrderedDict()  # the latest used last
        self._in_use: WeakValueDictionary[StructuredOutputsParams, Future[CompiledForm]] = WeakValueDictionary()
        self._waiting: dict[StructuredOutputsParams, _WaitingForm] = {}
        self._checker = FormChecker()
        self._tokenizer: LLTokenizer | None = None
        self._marks: dict[str, int] = {}  # the tokens around reasoning, once there is a tokenizer
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._threads, self._patient = _FairThreads(_NUM_THREADS), _FairThreads(1, _yield_to_others)
        self.patience_s = patience_s
        self.fast = ThreadPoolExecutor(2 * _NUM_THREADS, thread_name_prefix="rayspec-masks")
        self.slow = ThreadPoolExecutor(_NUM_THREADS, "rayspec-slow-masks", _yield_to_others)

    def compiled(
        self, form: StructuredOutputsParams, is_wanted: Callable[[], bool] = lambda: True, client: str = ""
    ) -> Future[CompiledForm]:
        """Return the compiled form, at once. The future fails with GrammarError; and with CancelledError if nobody
        wants the form when its turn comes. Nothing is compiled again while a caller has its future.
        client: of the request. The forms of clients are compiled in turn, and slow forms come last."""
        with self._lock:
            future = self._in_use.get(form)
            if future is None:
                future = self._in_use[form] = Future()
                self._waiting[form] = _WaitingForm(future)
            waiting = self._waiting.get(form)
            if waiting is not None:
                waiting.wishes.append(is_wanted)
                if client not in waiting.clients:
                    waiting.clients.append(client)
                    self._submit(form, waiting, client)
            if not (future.done() and future.exception()):  # a failure that was forgotten must not come back
                self._kept[form] = future
                self._kept.move_to_end(form)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return future

    def constraint(self, form: StructuredOutputsParams, num_prompt_tokens: int) -> Constraint:
        """Return the state of a new sequence, whose first mask is made when the form is compiled."""
        return Constraint(self, form, num_prompt_tokens)

    def forget(self, form: StructuredOutputsParams) -> None:
        """Keep the form for no later request."""
        with self._lock:
            self._kept.pop(form, None)

    def _submit(self, form: StructuredOutputsParams, waiting: _WaitingForm, client: str) -> None:
        threads = self._patient if waiting.is_slow else self._threads
        threads.submit(client, partial(self._settle, form, waiting, is_slow=waiting.is_slow))

    def _settle(self, form: StructuredOutputsParams, waiting: _WaitingForm, *, is_slow: bool) -> None:
        """Compile the form, in the turn of the first of its clients that has one."""
        with self._lock:
            if waiting.has_begun or waiting.is_slow != is_slow:
                return
            waiting.has_begun = True
        future = waiting.future
        try:
            future.set_result(self._compile(form, waiting))
        except TimeoutError:
            with self._lock:
                waiting.has_begun, waiting.is_slow = False, True
                for client in waiting.clients:
                    self._submit(form, waiting, client)
            return
        except BaseException as error:  # noqa: BLE001 - whoever has the future gets it
            if isinstance(error.__cause__, OSError):  # of a process: the next request may succeed
                with self._lock:
                    self._drop(form)
            error.__cause__ = error.__context__ = None  # the frames of tracebacks hold what has been compiled
            future.set_exception(error.with_traceback(None))
        with self._lock:
            if self._waiting.get(form) is waiting:
                del self._waiting[form]

    def _drop(self, form: StructuredOutputsParams) -> None:
        """Let the next request compile the form again."""
        del self._in_use[form], self._waiting[form]
        self._kept.pop(form, None)

    def _compile(self, form: StructuredOutputsParams, waiting: _WaitingForm) -> CompiledForm:
        with self._lock:
            if not any(is_wanted() for is_wanted in waiting.wishes):
                self._drop(form)
                raise CancelledError
        name = next(name for name in FORMS if getattr(form, name) is not None)
        try:
            with naming_the_extra():
                from llguidance import LLMatcher  # noqa: PLC0415

            tokenizer, most_s = self._own_tokenizer(), MOST_S if waiting.is_slow else QUICK_S
            grammar, num_bytes = self._checker.grammar({**dataclasses.asdict(form), "marks": self._marks}, most_s)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        except TimeoutError:
            raise
        # Not installed, a tokenizer that is no use, a form that cannot be compiled, a panic of llguidance.
        except BaseException as error:
            has_place = isinstance(error, ValueError) and not isinstance(error, ConfigError)  # of the form checker
            message = str(error) if has_place else f": {error}"
            raise GrammarError(f"structured_outputs.{name}{message}") from error
        first, mask_s = matcher.deep_copy(), 0.0
        mask = torch.full((-(-tokenizer.vocab_size // 32),), -1, dtype=torch.int32)
        if not first.is_error():
            start_s = time.thread_time()
            first.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            mask_s = time.thread_time() - start_s
        if first.is_error():
            raise GrammarError(f"structured_outputs.{name}: {without_state(first.get_error())}")
        if mask_s > _TOO_SLOW_S[0]:  # now, because it takes much memory until its request fails
            self.forget(form)
            raise GrammarError(f"structured_outputs.{name}: {_TAKES_TOO_LONG}")
        num_bytes += int(mask_s * _BYTES_OF_MASK_S)
        num_kept_bytes = num_bytes
        with self._lock:
            for kept, future in reversed(list(self._kept.items())):
                if future.done() and future.exception() is None:
                    num_kept_bytes += future.result().num_bytes
                    if num_kept_bytes > _MAX_KEPT_BYTES:
                        del self._kept[kept]
        schema = repr(form.json)
        is_short = form.json is not None and len(schema) <= _LIGHT and form.whitespace_pattern is None
        is_light = is_short and not any(word in schema for word in ("attern", "multipleOf"))
        initial = first if mask_s < _PATIENCE_S else matcher
        return CompiledForm(grammar, initial, mask, mask_s, num_bytes, is_light, tuple(tokenizer.eos_tokens))

    def renewed(self, form: StructuredOutputsParams, full: CompiledForm) -> Future[CompiledForm]:
        """Return the form with a lexer for one sequence alone. The form whose lexer is full is kept for no other."""
        from llguidance import LLMatcher  # noqa: PLC0415

        with self._lock:
            future = self._in_use.get(form)
            if future is not None and future.done() and not future.exception() and future.result() is full:
                del self._in_use[form]
                self._kept.pop(form, None)
        renewed: Future[CompiledForm] = Future()
        matcher = LLMatcher(self._own_tokenizer(), full.grammar, log_level=0, limits=parser_limits(full.grammar))
        renewed.set_result(dataclasses.replace(full, initial=matcher))
        return renewed

    def _own_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # noqa: PLC0415

        with self._tokenizer_lock:
            if self._tokenizer is None:
                tokenizer = self._load()
                if not isinstance(tokenizer, PreTrainedTokenizerFast):
                    raise ConfigError("the engine has no fast tokenizer, which a form of the output needs")
                added = tokenizer.added_tokens_decoder.items()
                self._marks = {str(token): at for at, token in added if str(token) in (THINK, END_OF_THINK, *CHANNELS)}
                num_tokens = max(self._vocab_size, len(tokenizer))
                eos = [token for token in self._eos_token_ids if 0 <= token < num_tokens]
                self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=eos or None)
            return self._tokenizer


def _yield_to_others() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class Constraint:
    """Which tokens may follow in one sequence. Only one thread uses it; in one process, engine and head share it. Its
    methods wait for other threads' work for `patience_s` at most, and return less then; all but the mask after the
    committed tokens, which is there once it `is_ready`. error: why the output has lost its form; "" while it has
    not."""

    def __init__(self, grammars: Grammars, form: StructuredOutputsParams, num_prompt_tokens: int) -> None:
        self.error = ""
        self._grammars, self._form, self._compiled = grammars, form, grammars.compiled(form)
        self._num_at_renewal = -1  # the committed tokens of the output when it got a lexer of its own
        self._num_read = num_prompt_tokens
        # Work on the state, in order; each with how many tokens are followed after it.
        self._todo: deque[tuple[Callable[[], None], int]] = deque([(self._take_first, num_prompt_tokens)])
        self._since_s = time.perf_counter()  # since when there has been some
        self._changed = threading.Condition()
        self._num_followed, self._is_light = -1, False
        self._late: set[tuple[int, ...]] = set()
        # The work's own; others read what is complete.
        self._work_s = 0.0  # seconds of a core that llguidance has taken
        self._consumed: list[int] = []  # the output, without what follows its end
        self._current: LLMatcher | None = None
        # By the uncommitted tokens before: the masks, int32 [W]; None where nothing can follow. And why none was made.
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._failures: dict[tuple[int, ...], str] = {}
        self._forced: list[int] = []
        begin = [self._work]  # a future keeps its callbacks, and so this one must not keep the state
        self._compiled.add_done_callback(lambda _: begin.pop()())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """See `CompiledForm`, which is waited for."""
        return self._compiled.result().end_tokens

    @property
    def is_ready(self) -> bool:
        """Whether no work is under way."""
        return not self._todo

    @property
    def is_slow(self) -> bool:
        """Whether drafts are not worth the work on the form."""
        return self._takes_more_than(_SLOW_S)

    def wait(self, at_most_s: float | None = None) -> bool:
        """Wait until it is ready, by default until its work has taken `patience_s`. Return whether it is."""
        with self._changed:
            left_s = self._since_s + self._grammars.patience_s - time.perf_counter() if at_most_s is None else at_most_s
            return self._changed.wait_for(lambda: not self._todo, max(0.0, left_s))

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Consume those committed tokens of the sequence that are new. token_ids: with the prompt. Tokens after the end
        of the output are ignored."""
        new = list(token_ids[self._num_read :])
        if not new:
            return
        for at, token in enumerate(new):
            before = tuple(new[:at])
            if before in self._masks and not self._allows(before, token):
                self.error = self.error or self._failures.get(before) or self._broken_by(token, at)
            if token in self.end_tokens:
                new = new[: at + 1]
                break
        self._num_read = len(token_ids)
        self._begin(partial(self._extend, new))

    def masks(self, befores: Sequence[Sequence[int]]) -> Tensor | None:
        """Return which tokens may follow the committed tokens and each of `befores`: int32 [n, W] on the CPU, where bit
        b of word w is token 32 * w + b. All bits are set where nothing can follow, because a token before breaks the
        form or ends the output; and where the mask `is_late`. None without a state, see `error`."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_followed == self._num_read)
        paths = [tuple(before) for before in befores]
        if not all(path in self._masks for path in paths) and not self.error:
            self._ask(partial(self._walk, paths))
        if (first := self._masks.get(())) is None:
            self._late = set()
            return None
        free, masks = torch.full_like(first, -1), dict(self._masks)
        self._late = {path for path in paths if path not in masks}
        found = (masks.get(path) for path in paths)
        return torch.stack([free if mask is None else mask for mask in found])

    def is_late(self, before: Sequence[int]) -> bool:
        """Whether the last call of `masks` had no mask after these tokens; a token chosen there must be dropped."""
        return tuple(before) in self._late

    def allowed(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        """Return the indices of drafted tokens that may come; of a slow form, none. parents: as in `RoundEntry`."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(token_ids, parents or range(len(token_ids)), strict=True):
            paths.append((*paths[parent], token))
        if not token_ids or self.is_slow or not self._ask(partial(self._walk, paths)):
            return []
        return [at for at, path in enumerate(paths[1:]) if self._allows(path[:-1], path[-1])]

    def forced(self, num_tokens: int) -> list[int]:
        """Return at most `num_tokens` tokens that must come next, if the model splits the text so; none if slow."""
        if num_tokens <= 0 or self.is_slow or not self._ask(partial(self._force, num_tokens)):
            return []
        return self._forced

    def _ask(self, work: Callable[[], None]) -> bool:
        """Return whether this work was done in time. It does not begin while other work is under way."""
        if not self.wait():
            return False
        self._begin(work)
        return self.wait()

    def _begin(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._todo.append((work, self._num_read))
            if len(self._todo) > 1:
                return
            self._since_s = time.perf_counter()
        self._submit()

    def _submit(self) -> None:
        if self._is_light and not self.is_slow:  # another thread would cost more than the work
            self._work()
        else:
            (self._grammars.slow if self.is_slow else self._grammars.fast).submit(self._work)

    def _work(self) -> None:
        try:
            self._todo[0][0]()
        except GrammarError as error:
            self.error = str(error)
        except BaseException as error:  # noqa: BLE001 - a panic of llguidance
            self.error = self.error or f"structured_outputs: {without_state(str(error))}"
        if self.is_slow:
            self._grammars.forget(self._form)
        with self._changed:
            self._num_followed = self._todo.popleft()[1]
            self._changed.notify_all()
            if not self._todo:
                return
        self._submit()

    def _timed(self, call: Callable[..., Result], *given: Any) -> Result:
        """Call llguidance, and count its time, without that of Python, such as collections of garbage."""
        start_s = time.thread_time()
        try:
            return call(*given)
        finally:
            self._work_s += time.thread_time() - start_s

    def _takes_more_than(self, limit_s: tuple[float, float]) -> bool:
        at_first_s, of_a_token_s = limit_s
        return self._work_s > at_first_s + of_a_token_s * len(self._consumed)

    def _take_first(self) -> None:
        compiled = self._compiled.result()
        self._work_s = compiled.mask_s
        self._masks[()], self._is_light = compiled.mask, compiled.is_light

    def _extend(self, new: list[int]) -> None:
        self._masks, self._failures = {}, {}
        if self.error or (state := self._state()) is None:
            return
        num_consumed = self._timed(state.try_consume_tokens, new)
        if num_consumed < len(new) and not _has_ended(state) and self._renew():
            if (state := self._state()) is None:
                return
            num_consumed = self._timed(state.try_consume_tokens, new)
        self._consumed += new[:num_consumed]
        if num_consumed < len(new) and not _has_ended(state):
            self.error = _named(state) or self._broken_by(new[num_consumed], 0)
        elif new[-1] not in self.end_tokens:
            self._walk([()])

    def _broken_by(self, token: int, num_before: int) -> str:
        return (
            f"structured_outputs: token {token} breaks the form after {len(self._consumed) + num_before} tokens: "
            "other parameters, such as allowed_token_ids, leave none that the form allows, or the form is too hard to "
            "follow: simplify it"
        )

    def _force(self, num_tokens: int) -> None:
        self._forced = []
        if (state := self._state()) is None or state.is_stopped():
            return
        tokens = self._timed(state.compute_ff_tokens)
        self._walk([tokens[:num_tokens]])
        if (state := self._state()) is None or self.is_slow:
            return
        if 0 < len(tokens) < num_tokens:
            num_consumed = self._timed(state.try_consume_tokens, tokens)
            if state.is_stopped() and not state.is_error():
                tokens += self.end_tokens[:1]
            self._timed(state.rollback, num_consumed)
        self._forced = tokens[:num_tokens]

    def _walk(self, befores: Sequence[Sequence[int]]) -> None:
        """Make the masks after each of these sequences and after their beginnings; of a slow form, only the first."""
        path: tuple[int, ...] = ()
        for before in sorted(map(tuple, befores)):
            if before in self._masks:
                continue
            if (state := self._state()) is None:
                return
            common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, before, strict=False))
            num_common = sum(1 for _ in common)
            if num_common < len(path):
                self._timed(state.rollback, len(path) - num_common)
            path = path[:num_common]
            while self._make(state, path) and len(path) < len(before):
                token = before[len(path)]
                if not self._allows(path, token) or not self._timed(state.try_consume_tokens, [token]):
                    break
                path = (*path, token)
            if state.is_error():  # the next one begins anew
                path = ()
                if self._renew():
                    self._masks = {key: mask for key, mask in self._masks.items() if key not in self._failures}
                    self._failures = {}
                    self._walk([before])
            if before and self.is_slow and before not in self._masks:
                break
            self._masks.setdefault(before, None)
        if path and not self.error and (state := self._state()) is not None:
            self._timed(state.rollback, len(path))

    def _make(self, state: LLMatcher, path: tuple[int, ...]) -> bool:
        """Make the mask of the state after the path, unless it is there. Return whether to go on from here."""
        if path not in self._masks:
            mask = torch.full_like(self._compiled.result().mask, -1)
            self._timed(state.unsafe_compute_mask_ptr, mask.data_ptr(), mask.nbytes)
            if state.is_error():
                self._failures[path] = _named(state)
            self._masks[path] = None if state.is_error() else mask
        return self._masks[path] is not None and not self.is_slow

    def _allows(self, before: tuple[int, ...], token: int) -> bool:
        mask = self._masks.get(before)
        return mask is not None and 0 <= token < 32 * len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)

    def _renew(self) -> bool:
        """Begin anew with a lexer of this sequence alone: that of all may be full. Return whether that may help."""
        if self._num_at_renewal == len(self._consumed):
            return False
        self._num_at_renewal = len(self._consumed)
        self._compiled = self._timed(self._grammars.renewed, self._form, self._compiled.result())
        self._current = None
        return True

    def _state(self) -> LLMatcher | None:
        """Return the state after the committed tokens; None if there is none, see `error`."""
        if self._takes_more_than(_TOO_SLOW_S):
            self.error = self.error or f"structured_outputs: {_TAKES_TOO_LONG}"
            return None
        if self._current is None or self._current.is_error():
            compiled = self._compiled.result()
            self._current = compiled.initial.deep_copy()
            if compiled.mask_s >= _PATIENCE_S:
                mask = compiled.mask.clone()
                self._timed(self._current.unsafe_compute_mask_ptr, mask.data_ptr(), mask.nbytes)
            if self._timed(self._current.try_consume_tokens, self._consumed) < len(self._consumed):
                self.error = _named(self._current) or "structured_outputs: it is too hard to follow: simplify it"
                return None
        return self._current


def _has_ended(matcher: LLMatcher) -> bool:
    """Return whether the output has its form, and nothing may follow."""
    return bool(matcher.is_stopped()) and not matcher.is_error()


def _named(matcher: LLMatcher) -> str:
    """Return what llguidance says, after the name of the option; an empty text if it says nothing."""
    problem = without_state(matcher.get_error())
    return problem and f"structured_outputs: {problem}"
