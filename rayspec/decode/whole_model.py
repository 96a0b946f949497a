"""Decoding for model families without sublayer support: passes run the whole model, as transformers' `generate` does,
with a cache for each sequence. Sequences run one after another, or in lockstep where that is faster. The model drafts
nothing itself. Copied and recycled drafts are verified where rows can be taken back.

`WholeSpan` is such a model in this process, or a stage of it. The script of some work is that of `decode/rounds.py`,
with a pass of its own for chunks. It gets logits in place of hidden states.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.config import Verification
from rayspec.decode.generate_state import (
    Cuts,
    GenerateState,
    check_generation,
    find_cuts,
    in_fast_layout,
    in_lockstep,
    measured_passes,
    measured_sequences,
    scores_prompts,
)
from rayspec.decode.rounds import Head, choose, first_pass, script
from rayspec.decode.runner import Threads, seconds
from rayspec.decode.sampling import top_logprobs
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import Stages, done, run_script
from rayspec.decode.work import (
    Chunk,
    Move,
    Pass,
    Prefill,
    PrefillResult,
    Result,
    Round,
    RoundResult,
    SamplerSpec,
    TappedToken,
    Work,
)
from rayspec.model.passing import Border, at_border
from rayspec.model.rows import RowSpan
from rayspec.planning.latency import Measurement
from rayspec.types import Logprob, UnsupportedModelError

_MOST_OWED = 0.75  # of the seconds of a round, which are not less than a plain round's
_MOST_ROWS_IN_LOCKSTEP = 2048

T = TypeVar("T")


class WholeSpan:
    """An undivided model, or a stage of it (see `model/passing.py`), with a `GenerateState` for each sequence. Each
    prompt runs in one pass. is_last: whether it has the head. Raises as `check_generation` does.

    scores_prompts: see the function of this name. cuts: see `find_cuts`; None: rounds have no drafts.
    fewest_in_lockstep: sequences of a round that run in lockstep; None: sequences always run one after another.
    rejected_s: see `LatencyModel`. owed_s: of it, that no verify was charged with yet. num_pending: sequences of the
    last verify of which rows were rejected before.
    """

    def __init__(self, model: PreTrainedModel, *, threads: Threads, is_last: bool = True) -> None:
        # No penalties, and no special tokens, from which `generate` would guess a mask.
        use_cache = model.generation_config.use_cache if model.generation_config is not None else None
        model.generation_config = GenerationConfig(use_cache=use_cache)  # type: ignore[no-untyped-call]
        check_generation(model)
        in_fast_layout(model)
        self.model = model
        self.scores_prompts = not is_last or scores_prompts(model)
        self.cuts: Cuts | None = None
        self.lockstep = in_lockstep(model)
        self.fewest_in_lockstep: int | None = None
        self.rejected_s = self.owed_s = 0.0
        self.num_pending = 0
        self.states: dict[str, GenerateState] = {}
        self._threads = threads
        self._is_last = is_last
        self._specs: dict[str, SamplerSpec] = {}

    def find_cuts(self) -> str:
        """Find how rows are taken back. Return why no way works; "" if one does."""
        try:
            self.cuts = find_cuts(self.model, self.lockstep)
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def measured(self, num_parts: int) -> list[Measurement]:
        """Time the passes, choose when sequences run in lockstep, and return the seconds of each of so many parts."""
        self.fewest_in_lockstep, sequences_s = measured_sequences(self.model, self.lockstep, self.cuts)
        found = measured_passes(self.model, self.cuts, sequences_s=sequences_s)
        if self.cuts in ("copy", "step"):  # the rows that were kept run again
            self.rejected_s = max(0.0, found[1].seconds - found[0].seconds)
        return [replace(each, seconds=each.seconds / num_parts) for each in found]

    def open(self, spec: SamplerSpec) -> None:
        self._specs[spec.sequence_id] = spec

    def close(self, sequence_id: str) -> None:
        self._specs.pop(sequence_id, None)
        self.states.pop(sequence_id, None)

    def forget(self) -> None:
        self._specs.clear()
        self.states.clear()

    def move(self, moves: Sequence[Move]) -> None:
        """Every sequence has a cache of its own."""

    def first_pass(self, work: Work) -> Pass:
        """Return the first pass of the work's script: of the chunks, else of the round."""
        if work.chunks:
            pass_of_chunks = first_pass(Prefill(id=work.id, chunks=work.chunks))
            return replace(pass_of_chunks, sequence_ids=[each.sequence_id for each in work.chunks], is_prefill=True)
        assert isinstance(work, Round)
        return first_pass(self.allowed(work))

    def allowed(self, work: Round) -> Round:
        """Return the round as it can run. Drafts that the form of an output forces come with any plan."""
        if self.cuts is not None:
            return work
        bare = [msgspec.structs.replace(entry, looked_up=(), parents=(), num_probes=0) for entry in work.entries]
        return msgspec.structs.replace(work, entries=bare)

    @torch.inference_mode()
    def run(self, work: Pass, hidden: Tensor | None = None) -> Tensor:
        """Run the pass from these states on, [1, M, hidden_size], and return the states for the next stage; of the last
        stage the logits [1, N, V]: after each row of a verify; of a chunk after the rows of its prompt if the sequence
        wants their log-probabilities, and after its last row. A chunk before the last of a prompt runs no rows. If it
        fails, its sequences must begin again at position 0."""
        tokens = iter(work.token_ids)
        chains = [list(itertools.islice(tokens, span.num_rows)) for span in work.rows]
        self._threads.use(len(work.token_ids))
        with at_border(hidden) as border:
            logits = (self._prefill if work.is_prefill else self._verify)(work, chains, border)
        parts = [each.unsqueeze(0) for each in logits] if self._is_last else border.sent
        return torch.cat(parts, 1) if parts else torch.empty(1, 0, 1)

    def _prefill(self, work: Pass, chains: Sequence[list[int]], border: Border) -> list[Tensor]:
        logits = []
        for name, rows, token_ids in zip(work.sequence_ids, work.rows, chains, strict=True):
            spec = self._specs[name]
            prompt, wants_all = spec.prompt_token_ids, spec.params.prompt_logprobs is not None
            if rows.context == 0:
                self.states[name] = GenerateState(self.model, prompt, cuts=self.cuts)
            if rows.end < len(prompt):
                continue
            state, last = self.states[name], torch.empty(0)
            if rows.context < len(prompt):
                of_prompt = state.run(prompt, num_logits=len(prompt) if wants_all else 1)
                last = of_prompt[-1:]
                logits += [of_prompt] if wants_all else []
            for token in token_ids[max(0, len(prompt) - rows.context) :]:
                last = state.run([token])
            logits.append(last)
        return logits

    def _verify(self, work: Pass, chains: Sequence[list[int]], border: Border) -> list[Tensor]:
        """Run each sequence's newest token and draft. Of the verify before, the rows up to the newest token stay."""
        states = [self.states[name] for name in work.sequence_ids]
        for state, rows in zip(states, work.rows, strict=True):
            state.keep(rows.context - state.num_kept)
        self.num_pending = sum(state.num_pending > 0 for state in states)
        is_plain = len(work.token_ids) == len(states)  # then no row is rejected

        def run(state: GenerateState, tokens: list[int], received: Tensor | None) -> tuple[Tensor, list[Tensor]]:
            with at_border(received) as own:
                return state.run(tokens) if is_plain else state.try_rows(tokens), own.sent

        calls = [
            partial(run, state, chain, border.take(state.num_pending + len(chain)))
            for state, chain in zip(states, chains, strict=True)
        ]
        in_lockstep = self.fewest_in_lockstep is not None and len(calls) >= self.fewest_in_lockstep
        found = self._in_lockstep(calls, states, chains) if in_lockstep else [call() for call in calls]
        border.sent += [states for _, sent in found for states in sent]
        return [logits for logits, _ in found]

    def _in_lockstep(
        self, calls: Sequence[Callable[[], T]], states: Sequence[GenerateState], chains: Sequence[list[int]]
    ) -> list[T]:
        """Run the calls in lockstep, as many at once as have few enough rows, each of which may take a thread."""
        counts = (state.num_pending + len(chain) for state, chain in zip(states, chains, strict=True))
        ends = itertools.accumulate(counts)
        found = list[T]()
        for _, some in itertools.groupby(calls, key=lambda _: next(ends) // _MOST_ROWS_IN_LOCKSTEP):
            found += self.lockstep.run(list(some))
        return found


class WholeModelStages(Stages):
    """`Stages` that run an undivided model in this process. It counts as one sublayer."""

    takes_trees = False
    keeps_state = True
    num_sublayers = 1

    def __init__(self, span: WholeSpan, *, vocab_size: int, verification: Verification = "coupled") -> None:
        super().__init__()
        self.span = span
        self._head = whole_head(span, vocab_size=vocab_size, verification=verification)

    def open(self, spec: SamplerSpec) -> None:
        self._head.open(spec)
        self.span.open(spec)

    def close(self, sequence_id: str) -> None:
        self._head.close(sequence_id)
        self.span.close(sequence_id)

    def move(self, moves: Sequence[Move]) -> None:
        self.span.move(moves)

    def start(self, work: Work) -> Future[Result]:
        # The last chunk brings the whole prompt, so the time of a task cannot be expected.
        with self.progress.of(type(work).__name__):
            return done(lambda: run_script(whole_script(work, self._head, self.span), self.span.run))

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        raise NotImplementedError("a model that does not split into sublayers has no plans")


def whole_head(span: WholeSpan, **options: Any) -> Head:
    """Return the head of an undivided model, whose own LM head is in the span. options: see `Head`."""
    return Head(lambda logits: logits[0], device=span.model.device, num_taps=0, **options)


def whole_script(work: Work, head: Head, span: WholeSpan) -> Generator[Pass, Tensor, Result]:
    """Yield the pass of the chunks, then those of the round's script, which are only verifies. Receive the logits
    [1, N, V] of `WholeSpan.run`, and return the result."""
    started, prefilled = head.stopwatch.mark(), PrefillResult(())
    if work.chunks:
        prefilled = _of_chunks(work.chunks, (yield span.first_pass(work))[0], head)
    if isinstance(work, Prefill):
        return prefilled
    prefill_s = seconds(started, head.stopwatch.mark())
    result = yield from script(msgspec.structs.replace(span.allowed(work), chunks=()), head)
    assert isinstance(result, RoundResult)
    # What rejected rows cost a later round without drafts is charged to the next verify.
    owed_s = min(span.num_pending * span.rejected_s, _MOST_OWED * result.verify_s)
    owed_s = -span.owed_s if any(draft.token_ids for draft in result.drafts) else owed_s
    span.owed_s += owed_s
    return msgspec.structs.replace(
        result,
        prefilled=prefilled.committed,
        prompt_logprobs=prefilled.prompt_logprobs,
        prefill_s=prefill_s,
        owed_s=owed_s,
    )


def _of_chunks(chunks: Sequence[Chunk], logits: Tensor, head: Head) -> PrefillResult:
    """Choose the tokens after the chunks. logits: [N, V], see `WholeSpan.run`."""
    of_prompts, last_rows, at = list[list[dict[int, Logprob]]](), list[int](), 0
    for chunk in chunks:
        sampler = head.samplers[chunk.sequence_id]
        count, prompt = sampler.params.prompt_logprobs, sampler.token_ids[: sampler.num_prompt_tokens]
        of_prompts.append([])
        if chunk.rows.end < len(prompt):
            continue
        if count is not None and chunk.rows.context < len(prompt):
            of_prompts[-1] = top_logprobs(logits[at : at + len(prompt) - 1], prompt[1:], count)
            at += len(prompt)
        if chunk.sample:
            last_rows.append(at)
        at += 1
    return PrefillResult(choose(head, chunks, logits[last_rows]), of_prompts)
