"""Plain decoding for model families without sublayer support: transformers' own forward and cache, no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rayspec.decode.drafting.skip_draft import Draft
from rayspec.decode.head import Committed, SamplerSpec
from rayspec.decode.plan_search import TappedToken
from rayspec.decode.progress import Progress
from rayspec.decode.questions import Answer, Question
from rayspec.decode.rounds import Prefill, PrefillResult, Result, Round, RoundResult, Work
from rayspec.decode.sampling import Rows, TokenSampler, finite_rows, target_tokens, top_logprobs
from rayspec.decode.scheduler import Chunk, Move
from rayspec.decode.stages import done
from rayspec.decode.stopwatch import Stopwatch, queued_s, seconds
from rayspec.model.rows import RowSpan
from rayspec.types import Logprob


class WholeModelStages:
    """`Stages` that run an undivided model, one sequence at a time. Each sequence has its own cache."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int) -> None:
        self.progress = Progress()
        self._model = model
        self._vocab_size = vocab_size
        self._stopwatch = Stopwatch.of(model.device)
        self._samplers: dict[str, TokenSampler] = {}
        self._caches: dict[str, DynamicCache] = {}

    num_cohorts = 1

    @property
    def num_sublayers(self) -> int:
        return 2 * int(self._model.config.num_hidden_layers)

    def open(self, spec: SamplerSpec) -> None:
        self._samplers[spec.sequence_id] = spec.sampler(self._vocab_size, self._model.device)

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
        self._caches.pop(sequence_id, None)

    def move(self, moves: Sequence[Move]) -> None:
        """Do nothing: the caches are not in an arena."""

    def start(self, work: Work) -> Future[Result]:
        with self.progress.of(type(work).__name__, work.num_rows):
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
        return [
            self._choose(chunk.sequence_id, logits) if chunk.sample else None
            for chunk in chunks
            for logits in [self._forward(chunk.sequence_id, chunk.rows.context, chunk.token_ids)]
        ]

    @torch.inference_mode()
    def _round(self, work: Round) -> RoundResult:
        started = self._stopwatch.mark()
        committed = [
            self._choose(entry.sequence_id, self._forward(entry.sequence_id, entry.length - 1, [entry.last_token]))
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

    def _forward(self, sequence_id: str, position: int, token_ids: Sequence[int]) -> Tensor:
        """Run the tokens and return the logits [1, V] after the last. Position 0 starts the sequence with an empty
        cache."""
        if position == 0:
            self._caches[sequence_id] = DynamicCache(config=self._model.config)
        tokens = torch.tensor([list(token_ids)], device=self._model.device)
        output = self._model(
            input_ids=tokens, past_key_values=self._caches[sequence_id], use_cache=True, logits_to_keep=1
        )
        return output.logits[0, -1:]  # type: ignore[no-any-return]

    def _choose(self, sequence_id: str, logits: Tensor) -> Committed:
        sampler = self._samplers[sequence_id]
        token_ids = target_tokens(logits, [Rows(sampler, 0, ())]).tolist()
        if not bool(finite_rows(logits)[0]):
            return Committed(token_ids, (), False)
        count = sampler.params.logprobs
        logprobs: Sequence[dict[int, Logprob]] = () if count is None else top_logprobs(logits, token_ids, count)
        sampler.commit(token_ids)
        return Committed(token_ids, logprobs, True)
