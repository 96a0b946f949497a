"""Decoding for model families without sublayer support: passes run the whole model, as transformers' `generate` does,
with a cache for each sequence. Sequences run one after another, or in lockstep where that is faster. The model drafts
nothing itself. Copied and recycled drafts are verified where rows can be taken back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.config import Verification
from rayspec.decode.generate_state import Cuts, GenerateState, check_generation, in_fast_layout, in_lockstep
from rayspec.decode.processing import TokenSampler
from rayspec.decode.rounds import Head, commit, script, verify_coupled
from rayspec.decode.runner import Threads, seconds
from rayspec.decode.sampling import Rows, top_logprobs
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import Stages, done
from rayspec.decode.work import (
    Chunk,
    Committed,
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
from rayspec.model.rows import RowSpan
from rayspec.types import Logprob

_MOST_OWED = 0.75  # of the seconds of a round, which are not less than a plain round's


class WholeModelStages(Stages):
    """`Stages` that run an undivided model, each prompt in one pass. The model counts as one sublayer. threads: of its
    passes. cuts: see `find_cuts`; None: rounds have no drafts. fewest_in_lockstep: sequences of a round that run in
    lockstep; None: sequences always run one after another. rejected_s: see `LatencyModel`. Raises as
    `check_generation` does."""

    takes_trees = False

    def __init__(
        self, model: PreTrainedModel, *, vocab_size: int, threads: Threads, verification: Verification = "coupled"
    ) -> None:
        super().__init__()
        # No penalties, and no special tokens, from which `generate` would guess a mask.
        use_cache = model.generation_config.use_cache if model.generation_config is not None else None
        model.generation_config = GenerationConfig(use_cache=use_cache)  # type: ignore[no-untyped-call]
        check_generation(model)
        in_fast_layout(model)
        self.cuts: Cuts | None = None
        self.lockstep = in_lockstep(model)
        self.fewest_in_lockstep: int | None = None
        self.rejected_s = self._owed_s = 0.0
        self.model = model
        self._threads = threads
        self._head = Head(
            lambda logits: logits[0], vocab_size=vocab_size, device=model.device, verification=verification, num_taps=0
        )
        self._states: dict[str, GenerateState] = {}

    @property
    def num_sublayers(self) -> int:
        return 1

    def open(self, spec: SamplerSpec) -> None:
        self._head.open(spec)

    def close(self, sequence_id: str) -> None:
        self._head.close(sequence_id)
        self._states.pop(sequence_id, None)

    def move(self, moves: Sequence[Move]) -> None:
        """Do nothing: every sequence has a cache of its own."""

    def start(self, work: Work) -> Future[Result]:
        self._threads.use(work.num_rows)
        # The last chunk brings the whole prompt, so the time of a task cannot be expected.
        with self.progress.of(type(work).__name__), torch.inference_mode():
            return done(
                lambda: PrefillResult(*self._prefilled(work.chunks)) if isinstance(work, Prefill) else self._round(work)
            )

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        raise NotImplementedError("a model that does not split into sublayers has no plans")

    def _prefilled(self, chunks: Sequence[Chunk]) -> tuple[list[Committed | None], list[list[dict[int, Logprob]]]]:
        """Run the chunks: a prompt with its last chunk, generated tokens one by one. Position 0 starts a sequence
        anew. Return the fields of PrefillResult."""
        chosen: list[Committed | None] = []
        of_prompts: list[list[dict[int, Logprob]]] = []
        for chunk in chunks:
            name, first = chunk.sequence_id, chunk.rows.context
            sampler = self._head.sampler(name)
            if first == 0:
                self._states[name] = self._begun(sampler)
            state, logits = self._states[name], None
            num_prompt_tokens = len(state.prompt)
            of_prompts.append([])
            if state.num_tokens == 0 and chunk.rows.end >= num_prompt_tokens:
                count = sampler.params.prompt_logprobs
                logits = state.run(state.prompt, num_logits=1 if count is None else num_prompt_tokens)
                if count is not None:
                    of_prompts[-1] = top_logprobs(logits[:-1], state.prompt[1:], count)
                logits = logits[-1:]
            for token in chunk.token_ids[max(0, num_prompt_tokens - first) :]:
                logits = state.run([token])
            self._head.note_computed(name, chunk.rows.end)
            if chunk.sample and logits is not None:
                rows = [Rows(sampler, 0, ())]
                chosen += commit(logits, rows, verify_coupled(logits, rows))
            else:
                chosen.append(None)
        return chosen, of_prompts

    def _round(self, work: Round) -> RoundResult:
        """Run the chunks and the round's script, whose only passes are verifies, and keep what was accepted. If a pass
        fails, the sequences are as before."""
        started = self._head.stopwatch.mark()
        prefilled, of_prompts = self._prefilled(work.chunks)
        prefill_s = seconds(started, self._head.stopwatch.mark())
        entries = work.entries
        if self.cuts is None:  # drafts that the form of an output forces come with any plan
            entries = [msgspec.structs.replace(entry, looked_up=(), parents=()) for entry in entries]
        num_pending = sum(self._state(each.sequence_id).is_pending for each in entries)
        passes = script(msgspec.structs.replace(work, entries=entries, chunks=()), self._head)
        try:
            verify = next(passes)
            while True:
                verify = passes.send(self._logits(work, verify))
        except StopIteration as end:
            result: RoundResult = end.value
        except RuntimeError:
            for entry in entries:
                self._states.pop(entry.sequence_id, None)  # a part of its layers may have run
            raise
        for entry, num_accepted in zip(entries, result.num_accepted, strict=True):
            self._states[entry.sequence_id].keep(1 + num_accepted)
        # What rejected rows cost a later round without drafts is charged to the next verify.
        owed_s = min(num_pending * self.rejected_s, _MOST_OWED * result.verify_s)
        owed_s = -self._owed_s if any(draft.token_ids for draft in result.drafts) else owed_s
        self._owed_s += owed_s
        return msgspec.structs.replace(
            result, prefilled=prefilled, prompt_logprobs=of_prompts, prefill_s=prefill_s, owed_s=owed_s
        )

    def _begun(self, sampler: TokenSampler) -> GenerateState:
        return GenerateState(self.model, sampler.token_ids[: sampler.num_prompt_tokens], cuts=self.cuts)

    def _state(self, sequence_id: str) -> GenerateState:
        """Return the state before the sequence's newest token; made anew if a pass has failed."""
        if sequence_id not in self._states:
            sampler = self._head.sampler(sequence_id)
            state = self._begun(sampler)
            state.run(state.prompt)
            for token in sampler.token_ids[len(state.prompt) : -1]:
                state.run([token])
            self._states[sequence_id] = state
        return self._states[sequence_id]

    def _logits(self, work: Round, verify: Pass) -> Tensor:
        """Return the logits [1, N, V] after each row: each entry's newest token and draft."""
        states, tokens = [self._state(entry.sequence_id) for entry in work.entries], iter(verify.token_ids)
        if len(verify.token_ids) == len(states):  # no row is rejected
            calls = [partial(state.run, [token]) for state, token in zip(states, tokens, strict=True)]
        else:
            calls = [
                partial(state.try_rows, list(itertools.islice(tokens, span.num_rows)))
                for state, span in zip(states, verify.rows, strict=True)
            ]
        in_lockstep = self.fewest_in_lockstep is not None and len(calls) >= self.fewest_in_lockstep
        rows = self.lockstep.run(calls) if in_lockstep else [call() for call in calls]
        return torch.cat(rows).unsqueeze(0)
