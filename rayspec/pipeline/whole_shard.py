"""The shard of a model that does not split: a stage of its layers, with the states of all sequences."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from rayspec.decode.generate_state import WHOLE, check_received
from rayspec.decode.loading import affordable_tokens, load_weights
from rayspec.decode.rounds import Head
from rayspec.decode.runner import Threads
from rayspec.decode.whole_model import WholeSpan, whole_head, whole_script
from rayspec.decode.work import Pass, Result, Work
from rayspec.model.kv_cache import CacheSize
from rayspec.model.passing import as_stage
from rayspec.model.weights import num_layers, tensors_fingerprint
from rayspec.pipeline import messages as wire
from rayspec.pipeline.server import ENGINE
from rayspec.pipeline.shard import Loaded, Shard
from rayspec.strategies.by_name import COPYING


class WholeShard(Shard):
    """Every stage knows the sequences, because each prompt runs in one pass and layers keep state of their own."""

    span: WholeSpan  # type: ignore[assignment]

    def _load(self, layers: range, meeting_place: str | None) -> Loaded:
        self._num_layers = len(layers)
        with_embedding = self._blueprint.costs.embedding_everywhere
        model = load_weights(self._config, layers=layers, with_embedding=with_embedding)
        weights = tensors_fingerprint(model.state_dict().values())
        as_stage(model, layers)
        threads = Threads(torch.get_num_threads(), torch.get_num_threads())
        self.span = WholeSpan(model, threads=threads, is_last=self._is_last)
        if self.stage:
            check_received(model)
        problem = self.span.find_cuts() if self._config.speculation.strategy in COPYING else ""
        dtype = str(model.dtype).removeprefix("torch.")
        return Loaded(
            dtype=dtype,
            weights=weights,
            cuts=self.span.cuts,
            problem=problem,
            scores_prompts=self.span.scores_prompts,
        )

    def rehearse(self) -> None:
        """Do nothing: the part of the memory that caches get leaves enough for a pass."""

    def num_slots(self, num_sharing: int) -> int:
        return affordable_tokens(self._config, self.span.model, num_sharing=num_sharing)

    def prepare(self, size: CacheSize) -> None:
        self.span.cuts = self.cuts
        self._measured()
        self.head = None
        if self._is_last:
            self.head = whole_head(
                self.span,
                vocab_size=self._blueprint.vocab_size,
                verification=self._config.speculation.verification,
                grammars=self.grammars(),
            )

    def first_pass(self, work: Work) -> Pass:
        return self.span.first_pass(work)

    def script(self, work: Work, head: Head) -> Generator[Pass, Tensor, Result]:
        return whole_script(work, head, self.span)

    def note_loss(self, error: Exception) -> None:
        """Do nothing: this shard has no kernels that a next start could avoid."""

    def size_of(self, message: wire.Message) -> int | None:
        """The last chunk brings the whole prompt, so the time of a task cannot be expected."""
        return None

    def _enter(self, begin: wire.Begin) -> None:
        for sequence_id in begin.closed:
            self.span.close(sequence_id)
        for spec in begin.opened:
            self.span.open(spec)
        super()._enter(begin)

    def _measure(self) -> None:
        self._send(ENGINE, self._measured())

    def _measured(self) -> wire.Measured:
        """Time this stage's passes. Each of its sublayers gets an equal part."""
        num_sublayers = 2 * self._num_layers
        found = self.span.measured(num_sublayers)
        rejected_s = self.span.rejected_s
        self.span.rejected_s *= num_layers(self.span.model.config) / self._num_layers  # of all stages
        return wire.Measured(
            names=[WHOLE] * num_sublayers,
            measurements=[replace(each, device=self.name) for each in found],
            transfer_s=[0.0] * num_sublayers,
            rejected_s=rejected_s,
        )
