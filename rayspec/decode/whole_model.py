"""Plain decoding for model families without sublayer support: no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rayspec.decode.generate_state import GenerateState, check_generation, plain_generation
from rayspec.decode.progress import Progress
from rayspec.decode.questions import Answer, Question
from rayspec.decode.sampling import Rows, TokenSampler, finite_rows, target_tokens, top_logprobs
from rayspec.decode.stages import done
from rayspec.decode.stopwatch import Stopwatch, queued_s, seconds
from rayspec.decode.work import (
    Chunk,
    Committed,
    Draft,
    Move,
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
from rayspec.model.threads import Threads
from rayspec.model.weights import num_layers
from rayspec.types import Logprob


class WholeModelStages:
    """`Stages` that run an undivided model as transformers' `generate` runs it, one sequence at a time. threads: of its
    passes.

    Raises UnsupportedModelError and CheckpointError for a model for which this is not safe.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, threads: Threads) -> None:
        self.progress = Progress()
        self._threads = threads
        model.generation_config = plain_generation(model)
        self._model = model
        self._divides_prompts = check_generation(model)
        self._vocab_size = vocab_size
        self._stopwatch = Stopwatch.of(model.device)
        self._samplers: dict[str, TokenSampler] = {}
        self._prompts: dict[str, Sequence[int]] = {}
        self._states: dict[str, GenerateState] = {}

    num_cohorts = 1

    @property
    def num_sublayers(self) -> int:
        return 2 * num_layers(self._model.config)

    @property
    def divides_prompts(self) -> bool:
        """Whether a long prompt runs in chunks, instead of in one pass."""
        return self._divides_prompts

    def open(self, spec: SamplerSpec) -> None:
        self._samplers[spec.sequence_id] = TokenSampler.of(spec, vocab_size=self._vocab_size, device=self._model.device)
        self._prompts[spec.sequence_id] = spec.prompt_token_ids

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
        del self._prompts[sequence_id]
        self._states.pop(sequence_id, None)

    def move(self, moves: Sequence[Move]) -> None:
        """Do nothing: the caches are not in an arena."""

    def start(self, work: Work) -> Future[Result]:
        self._threads.use(work.num_rows)
        size = work.num_rows if self._divides_prompts else None  # a last chunk may bring the whole prompt
        with self.progress.of(type(work).__name__, size):
            return done(lambda: self._prefill(work) if isinstance(work, Prefill) else self._round(work))

    def wait(self) -> None:
        """Return at once: `start` has already done the work."""

    def check(self) -> None:
        """Return at once: there is no other process to ask."""

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        raise NotImplementedError("a model that does not split into sublayers has no plans")

    def shutdown(self) -> None:
        """Do nothing: there are no processes to end."""

    @torch.inference_mode()
    def _prefill(self, work: Prefill) -> PrefillResult:
        return PrefillResult(self._prefilled(work.chunks))

    def _prefilled(self, chunks: Sequence[Chunk]) -> list[Committed | None]:
        run = [(chunk, self._run(chunk)) for chunk in chunks]
        return [
            self._choose(chunk.sequence_id, logits) if chunk.sample and logits is not None else None
            for chunk, logits in run
        ]

    def _run(self, chunk: Chunk) -> Tensor | None:
        """Run the chunk's tokens and return the logits [1, V] after the last. Position 0 starts the sequence anew.

        If prompts cannot be divided, the whole prompt runs with its last chunk, and generated tokens run one by one.
        """
        name = chunk.sequence_id
        if chunk.rows.context == 0:
            self._states[name] = GenerateState(self._model, self._prompts[name])
        state = self._states[name]
        if self._divides_prompts:
            return state.run(chunk.token_ids)
        num_prompt_tokens = len(state.prompt)
        logits = None
        if state.num_tokens == 0 and chunk.rows.context + len(chunk.token_ids) >= num_prompt_tokens:
            logits = state.run(state.prompt)
        for token in chunk.token_ids[max(0, num_prompt_tokens - chunk.rows.context) :]:
            logits = state.run([token])
        return logits

    @torch.inference_mode()
    def _round(self, work: Round) -> RoundResult:
        started = self._stopwatch.mark()
        committed = [
            self._choose(entry.sequence_id, self._states[entry.sequence_id].run([entry.last_token]))
            for entry in work.entries
        ]
        prefilled = self._prefilled(work.chunks)
        ended = self._stopwatch.mark()
        return RoundResult(
            committed=committed,
            drafts=[Draft() for _ in work.entries],
            num_accepted=[0] * len(work.entries),
            num_draft_steps=0,
            draft_s=0.0,
            verify_s=seconds(started, ended),
            queued_s=queued_s(started, ended),
            prefilled=prefilled,
        )

    def _choose(self, sequence_id: str, logits: Tensor) -> Committed:
        sampler = self._samplers[sequence_id]
        token_ids = target_tokens(logits, [Rows(sampler, 0, ())]).tolist()
        if not bool(finite_rows(logits)[0]):
            return Committed(token_ids, (), False)
        count = sampler.params.logprobs
        logprobs: Sequence[dict[int, Logprob]] = () if count is None else top_logprobs(logits, token_ids, count)
        sampler.commit(token_ids)
        return Committed(token_ids, logprobs, True)
