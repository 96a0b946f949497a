"""Several passes of one undivided model in lockstep: matrices run once for the rows of all passes.

A pass has its own cache, mask and positions, and runs the model's own forward in a thread of its own until it calls a
module that computes each row alone. There it waits for the others. Between modules one pass runs at a time, in a fixed
order: passes may share a cache, and modules may have buffers. A trial at load finds the modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Semaphore
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rayspec.decode.runner import on_device
from rayspec.model.architecture import rounding_tolerance

T = TypeVar("T")

# Methods of a cache that change recurrent state, in all versions of transformers.
_UPDATES = ("update_recurrent_state", "update_conv_state", "set_linear_cache")
_few_rows: ContextVar[int] = ContextVar("rayspec_few_rows", default=0)


class _Shared(NamedTuple):
    """A module that computes each row alone. given, made: the axis of rows in its only argument and in its results."""

    forward: Callable[[Tensor], Any]
    given: int
    made: tuple[int, ...]

    def split(self, results: Any, counts: list[int]) -> list[Any]:
        if isinstance(results, Tensor):
            return list(torch.split(results, counts, self.made[0]))
        return list(
            zip(*(torch.split(each, counts, at) for each, at in zip(results, self.made, strict=True)), strict=True)
        )


class _Pass:
    """A call of the model in a thread of its own. meeting: the module that it waits for, and the argument."""

    def __init__(self) -> None:
        self._turn, self._back = Semaphore(0), Semaphore(0)
        self.meeting: tuple[_Shared, Tensor] | None = None
        self.answer: Any = None  # of the module
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = self.is_given_up = False

    def run(self, call: Callable[[], Any], device: torch.device) -> None:
        here = _here.set(self)
        try:
            with torch.inference_mode(), on_device(device):
                self._wait()
                self.result = call()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self.error = error
        finally:
            _here.reset(here)
            self.has_ended = True
            self._back.release()

    def resume(self) -> None:
        """Let the pass run until it meets the next module, or ends."""
        self._turn.release()
        self._back.acquire()

    def meet(self, shared: _Shared, rows: Tensor) -> Any:
        self.meeting = shared, rows
        self._back.release()
        self._wait()
        return self.answer

    def _wait(self) -> None:
        self._turn.acquire()
        self.meeting = None
        if self.is_given_up:
            raise RuntimeError("another pass in lockstep has failed")


_here: ContextVar[_Pass | None] = ContextVar("rayspec_pass", default=None)


class Lockstep:
    """Runs calls of `model` in lockstep. trial: runs a pass of so many rows, with the logits of each."""

    def __init__(self, model: PreTrainedModel, trial: Callable[[], object], *, num_rows: int) -> None:
        self._device = model.device
        # Each thread runs its operators alone: OpenMP would keep helpers for every thread.
        self._threads = ThreadPoolExecutor(4096, "rayspec-lockstep", initializer=torch.set_num_threads, initargs=(1,))
        for module, shared in _shared_modules(model, trial, num_rows).items():
            module.forward = partial(_met, shared, module.forward)

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the calls' results. If a call or a module fails, all are given up, and the first error is raised. A
        call may itself run others in lockstep."""
        outer, num_threads = _here.get(), torch.get_num_threads()
        passes = [_Pass() for _ in calls]
        for each, call in zip(passes, calls, strict=True):
            self._threads.submit(each.run, call, self._device)
        waiting = passes
        try:
            while waiting:
                for each in waiting:
                    each.resume()
                    if each.error is not None:
                        raise each.error
                groups: dict[_Shared, list[tuple[_Pass, Tensor]]] = defaultdict(list)
                for each in waiting:
                    if each.meeting is not None:
                        shared, rows = each.meeting
                        groups[shared].append((each, rows))
                waiting = [each for group in groups.values() for each, _ in group]
                for shared, group in groups.items():
                    together = torch.cat([rows for _, rows in group], shared.given)
                    results = shared.forward(together) if outer is None else outer.meet(shared, together)
                    answers = shared.split(results, [rows.shape[shared.given] for _, rows in group])
                    for (each, _), answer in zip(group, answers, strict=True):
                        each.answer = answer
        finally:
            for each in passes:
                each.is_given_up = True
                while not each.has_ended:
                    each.resume()
            torch.set_num_threads(num_threads)  # new threads have changed what others begin with
        return [each.result for each in passes]


def _met(shared: _Shared, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    here = _here.get()
    if here is None or len(given) + len(named) != 1:
        return forward(*given, **named)
    return here.meet(shared, *given, *named.values())


def _shared_modules(model: PreTrainedModel, trial: Callable[[], object], num_rows: int) -> dict[nn.Module, _Shared]:
    """Return the largest modules with matrices that compute each row of the trial alone."""
    calls: dict[nn.Module, tuple[Tensor, Any]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], results: Any) -> None:
        every = [*given, *named.values()]
        if len(every) == 1 and isinstance(every[0], Tensor) and every[0].is_floating_point():
            calls[module] = every[0].clone(), results

    with_matrices = (each for each in model.modules() if any(weight.ndim > 1 for weight in each.parameters()))
    with ExitStack() as hooks:
        for each in with_matrices:
            hooks.enter_context(each.register_forward_hook(note, with_kwargs=True))
        trial()
    found: dict[nn.Module, _Shared] = {}
    left: list[nn.Module] = [model]
    while left:
        module = left.pop()
        shared = _as_shared(module, *calls[module], num_rows) if module in calls else None
        if shared is not None:
            found[module] = shared
        else:
            left.extend(module.children())
    return found


def _as_shared(module: nn.Module, given: Tensor, results: Any, num_rows: int) -> _Shared | None:
    def axis(value: Any) -> int:
        shape = value.shape if isinstance(value, Tensor) else ()
        return 1 if shape[:2] == (1, num_rows) else 0 if shape[:1] == (num_rows,) else -1

    several = (results,) if isinstance(results, Tensor) else results if isinstance(results, tuple) else (None,)
    shared = _Shared(module.forward, axis(given), tuple(map(axis, several)))
    if -1 in (shared.given, *shared.made):
        return None
    counts, tolerance = [num_rows // 2, num_rows - num_rows // 2], rounding_tolerance(given.dtype)
    for rows, together in zip(torch.split(given, counts, shared.given), shared.split(results, counts), strict=True):
        alone = module(rows)
        pairs = [(alone, together)] if isinstance(alone, Tensor) else list(zip(alone, together, strict=True))
        for one, other in pairs:
            if one.shape != other.shape:
                return None
            difference, scale = (one.float() - other.float()).abs().max(), other.float().abs().max()
            if not difference <= tolerance * scale:
                return None
    return shared


@contextmanager
def few_rows(count: int) -> Iterator[None]:
    """Run the recurrent state over the rows of a pass of this thread as `step_rows` or `shorten_chunks` says, if it has
    this number of rows; 0: as the model does."""
    before = _few_rows.set(count)
    try:
        yield
    finally:
        _few_rows.reset(before)


def recurrent_modules(model: PreTrainedModel, trial: Callable[[], object]) -> list[nn.Module]:
    """Return the modules that update recurrent state in a pass. trial: runs one."""
    inside: list[nn.Module] = []
    found: dict[nn.Module, None] = {}

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for cache in (each for each in (*given, *named.values()) if isinstance(each, Cache)):
            inside.append(module)
            for name in _UPDATES:
                if hasattr(cache, name) and name not in vars(cache):
                    setattr(cache, name, partial(update, getattr(cache, name)))

    def update(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found[inside[-1]] = None
        return method(*given, **named)

    def leave(module: nn.Module, *_: Any) -> None:
        while module in inside:
            inside.pop()

    with ExitStack() as hooks:
        for each in model.modules():
            hooks.enter_context(each.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(each.register_forward_hook(leave))
        trial()
    return list(found)


@contextmanager
def shorten_chunks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules compute a pass of few rows as one chunk of so many rows: the usual chunk, of 64 rows or more,
    would be filled with zeros. They read its size from `chunk_size`, or hand the argument on. An error undoes this."""
    before = [(each, type(each), each.forward) for each in modules]
    for each in modules:
        if (usual := getattr(each, "chunk_size", None)) is None:
            each.forward = partial(_in_one_chunk, each.forward)
        else:
            each.__class__ = _with_short_chunks(type(each), usual)
    try:
        yield
    except BaseException:
        for each, kind, forward in before:
            each.__class__, each.forward = kind, forward
        raise


def step_rows(modules: Sequence[nn.Module], lockstep: Lockstep) -> None:
    """Let these modules run the rows of a pass one after another, as decoding does, with their matrices in lockstep."""
    for module in modules:
        module.forward = partial(_by_row, lockstep, module.forward)


def _with_short_chunks(kind: type[nn.Module], usual: int) -> type[nn.Module]:
    """Return the class with a `chunk_size` that each thread has for itself: passes in lockstep differ in their rows."""
    chunk_size = property(lambda module: _few_rows.get() or usual)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "chunk_size": chunk_size})


def _in_one_chunk(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if _few_rows.get():
        named["chunk_size"] = _few_rows.get()
    return forward(*given, **named)


def _by_row(lockstep: Lockstep, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    hidden = next(each for each in (*given, *named.values()) if isinstance(each, Tensor))
    num_rows = hidden.shape[1]
    if num_rows == 1 or not _few_rows.get():
        return forward(*given, **named)

    def of_row(value: Any, row: int) -> Any:
        if isinstance(value, Tensor):
            return value[:, row : row + 1] if value.ndim > 1 and value.shape[1] == num_rows else value
        return tuple(of_row(each, row) for each in value) if isinstance(value, tuple) else value

    outputs = lockstep.run(
        [
            partial(forward, *of_row(given, row), **{name: of_row(each, row) for name, each in named.items()})
            for row in range(num_rows)
        ]
    )
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    return torch.cat([output[0] for output in outputs], 1), *outputs[0][1:]
