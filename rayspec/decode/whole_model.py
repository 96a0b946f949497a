"""Plain decoding for model families without sublayer support: no drafts. Sequences run as transformers' `generate` runs
them, and a check at load requires that this is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.decode.processing import TokenSampler
from rayspec.decode.rounds import commit
from rayspec.decode.runner import Stopwatch, queued_s, seconds
from rayspec.decode.sampling import Rows, top_logprobs
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import Stages, done
from rayspec.decode.verify import verify_coupled
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
from rayspec.model.configs import in_one_line
from rayspec.model.rows import RowSpan
from rayspec.model.threads import Threads
from rayspec.model.weights import num_layers
from rayspec.types import CheckpointError, Logprob, UnsupportedModelError

_NUM_CHECK_TOKENS = 32
_NUM_CHECK_STEPS = 1
_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)


class GenerateState:
    """The passes of one sequence: inputs, positions and cache are those of the model's own `generate`.

    prompt: the tokens before the first generated token. The model's generation config must only say whether it has a
    cache. num_tokens: that have been run.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        self._model: Any = model
        self.prompt = prompt
        self._arguments: dict[str, Any] = {}

        def keep(_model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
            """Take what `generate` gives to its decoding loop for this prompt."""
            self._arguments = arguments
            return input_ids

        token_ids = torch.tensor([list(prompt)], device=model.device)
        options = GenerationConfig(max_new_tokens=1)  # type: ignore[no-untyped-call]
        model.generate(token_ids, generation_config=options, custom_generate=keep)  # type: ignore[operator]
        for of_the_loop in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"):
            self._arguments.pop(of_the_loop, None)
        self._token_ids = token_ids[:, :0]

    @property
    def num_tokens(self) -> int:
        return self._token_ids.shape[1]

    def run(self, token_ids: Sequence[int], *, num_logits: int = 1) -> Tensor:
        """Run the next tokens in one pass and return the logits [num_logits, V] after the last tokens."""
        new = torch.tensor([list(token_ids)], device=self._token_ids.device)
        self._token_ids = torch.cat([self._token_ids, new], dim=1)
        arguments = dict(self._arguments)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = num_logits
        if (positions := arguments.get("position_ids")) is not None:
            arguments["position_ids"] = positions[..., : self.num_tokens]
        inputs = self._model.prepare_inputs_for_generation(
            self._token_ids,
            next_sequence_length=len(token_ids) if arguments["use_cache"] else None,
            is_first_iteration=self.num_tokens <= len(self.prompt),
            **arguments,
        )
        output = self._model(**inputs, return_dict=True)
        self._arguments = self._model._update_model_kwargs_for_generation(output, self._arguments)
        return output.logits[0, -num_logits:]  # type: ignore[no-any-return]


@torch.inference_mode()
def check_generation(model: PreTrainedModel) -> None:
    """Require that sequences that run in turns compute what `generate` computes for each alone, on random tokens.
    Raises UnsupportedModelError if they do not, and CheckpointError for weights that compute NaN or infinity."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocab_size, [_NUM_CHECK_TOKENS], generator=torch.Generator().manual_seed(0)).tolist()
    options = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NUM_CHECK_STEPS + 1, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    generate: Any = model.generate
    try:
        states = [GenerateState(model, each) for each in (prompt[:1], prompt)]
        inputs = [torch.tensor([state.prompt], device=model.device) for state in states]
        outputs = [generate(each, generation_config=options) for each in inputs]
        if not all(bool(logits.isfinite().all()) for output in outputs for logits in output.logits):
            raise CheckpointError(
                f"the model computes NaN or infinity on plain input in {model.dtype}: "
                "its weights are damaged, or overflow; try bfloat16 or float32"
            )
        for step in range(_NUM_CHECK_STEPS + 1):
            for state, output in zip(states, outputs, strict=True):
                at = len(state.prompt) + step
                actual = state.run(output.sequences[0, at - 1 : at].tolist() if step else state.prompt)
                expected, tolerance = output.logits[step].float(), 1e-3 if actual.dtype == torch.float32 else 5e-2
                # The root mean square of the difference, as a share of the expected logits' own spread.
                spread = expected.std().clamp(min=1e-30)
                difference = float((expected - actual.float()).square().mean().sqrt() / spread)
                if difference > tolerance:
                    raise UnsupportedModelError(
                        f"{model.config.model_type}: two sequences that decode in turns differ from generate's (by "
                        f"{difference:.1e}): the model keeps their state in its modules, or is not deterministic"
                    )
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{model.config.model_type}: generate of transformers cannot continue a text with this model "
            f"({type(error).__name__}: {in_one_line(error)})"
        ) from error


class WholeModelStages(Stages):
    """`Stages` that run an undivided model as transformers' `generate` runs it: one sequence at a time, each prompt in
    one pass. threads: of its passes. Raises as `check_generation` does."""

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, threads: Threads) -> None:
        super().__init__()
        # No penalties, and no special tokens, from which `generate` would guess a mask.
        use_cache = model.generation_config.use_cache if model.generation_config is not None else None
        model.generation_config = GenerationConfig(use_cache=use_cache)  # type: ignore[no-untyped-call]
        check_generation(model)
        self._model = model
        self._threads = threads
        self._stopwatch = Stopwatch.of(model.device)
        self._vocab_size = vocab_size
        self._samplers: dict[str, TokenSampler] = {}
        self._states: dict[str, GenerateState] = {}

    @property
    def num_sublayers(self) -> int:
        return 2 * num_layers(self._model.config)

    def open(self, spec: SamplerSpec) -> None:
        self._samplers[spec.sequence_id] = TokenSampler(spec, vocab_size=self._vocab_size, device=self._model.device)

    def close(self, sequence_id: str) -> None:
        del self._samplers[sequence_id]
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
            if first == 0:
                sampler = self._samplers[name]
                self._states[name] = GenerateState(self._model, sampler.token_ids[: sampler.num_prompt_tokens])
            state, logits = self._states[name], None
            num_prompt_tokens = len(state.prompt)
            of_prompts.append([])
            if state.num_tokens == 0 and chunk.rows.end >= num_prompt_tokens:
                count = self._samplers[name].params.prompt_logprobs
                logits = state.run(state.prompt, num_logits=1 if count is None else num_prompt_tokens)
                if count is not None:
                    of_prompts[-1] = top_logprobs(logits[:-1], state.prompt[1:], count)
                logits = logits[-1:]
            for token in chunk.token_ids[max(0, num_prompt_tokens - first) :]:
                logits = state.run([token])
            chosen.append(self._choose(name, logits) if chunk.sample and logits is not None else None)
        return chosen, of_prompts

    def _round(self, work: Round) -> RoundResult:
        started = self._stopwatch.mark()
        committed = [
            self._choose(entry.sequence_id, self._states[entry.sequence_id].run([entry.last_token]))
            for entry in work.entries
        ]
        prefilled, of_prompts = self._prefilled(work.chunks)
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
            prompt_logprobs=of_prompts,
        )

    def _choose(self, sequence_id: str, logits: Tensor) -> Committed:
        rows = [Rows(self._samplers[sequence_id], 0, ())]
        return commit(logits, rows, verify_coupled(logits, rows))[0]
