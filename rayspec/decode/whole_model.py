"""Plain decoding for model families without sublayer support: no drafts. Sequences run as transformers' `generate` runs
them, and a check at load requires that this is possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rayspec.decode.processing import TokenSampler
from rayspec.decode.progress import Progress
from rayspec.decode.sampling import Rows, finite_rows, target_tokens, top_logprobs
from rayspec.decode.search import Answer, Question
from rayspec.decode.stages import StageUse, done
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
from rayspec.model.configs import in_one_line
from rayspec.model.rows import RowSpan
from rayspec.model.threads import Threads
from rayspec.model.weights import num_layers
from rayspec.types import CheckpointError, Logprob, UnsupportedModelError

_NUM_CHECK_TOKENS = 32
_CHECK_CHUNK = 15
_CHECK_WINDOW = 6  # so that the tokens of the check leave it
_NUM_CHECK_STEPS = 1
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "attention_window_size", "index_topk")
_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)


class GenerateState:
    """The passes of one sequence: inputs, positions and cache are those of the model's own `generate`.

    prompt: the tokens before the first generated token. The model's generation config must be `plain_generation`.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int]) -> None:
        self._model: Any = model
        self.prompt = prompt
        self._token_ids = torch.tensor([list(prompt)], device=model.device)
        self._arguments = self._prepared()
        self._token_ids = self._token_ids[:, :0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have been run."""
        return self._token_ids.shape[1]

    def run(self, token_ids: Sequence[int]) -> Tensor:
        """Run the next tokens in one pass and return the logits [1, V] after the last token."""
        new = torch.tensor([list(token_ids)], device=self._token_ids.device)
        self._token_ids = torch.cat([self._token_ids, new], dim=1)
        arguments = dict(self._arguments)
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
        return output.logits[0, -1:]  # type: ignore[no-any-return]

    def _prepared(self) -> dict[str, Any]:
        """Return the arguments that `generate` gives to its decoding loop for this prompt."""
        prepared: dict[str, Any] = {}

        def keep(_model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
            prepared.update(arguments)
            return input_ids

        options = GenerationConfig(max_new_tokens=1)  # type: ignore[no-untyped-call]
        self._model.generate(self._token_ids, generation_config=options, custom_generate=keep)
        for of_the_loop in ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"):
            prepared.pop(of_the_loop, None)
        return prepared


def plain_generation(model: PreTrainedModel) -> GenerationConfig:
    """Return a generation config that only says whether the model has a cache: no penalties, and no special tokens,
    from which `generate` would guess a mask."""
    known = model.generation_config
    return GenerationConfig(use_cache=known.use_cache if known is not None else None)  # type: ignore[no-untyped-call]


@torch.inference_mode()
def check_generation(model: PreTrainedModel) -> bool:
    """Require that sequences that run in turns compute what `generate` computes for each alone, on random tokens.
    Return whether prompts may be divided into chunks, too.

    Raises UnsupportedModelError for a model that computes something else, and CheckpointError for weights that compute
    NaN or infinity.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocab_size, [_NUM_CHECK_TOKENS], generator=torch.Generator().manual_seed(0)).tolist()
    try:
        _check_turns(model, [prompt[:1], prompt])
    except _MODEL_ERRORS as error:
        raise UnsupportedModelError(
            f"{model.config.model_type}: generate of transformers cannot continue a text with this model "
            f"({type(error).__name__}: {in_one_line(error)})"
        ) from error
    try:
        with _narrow_windows(model):
            return _divides(model, prompt)
    except _MODEL_ERRORS:
        return False


def _check_turns(model: PreTrainedModel, prompts: Sequence[list[int]]) -> None:
    outputs = [_generated(model, prompt) for prompt in prompts]
    states = [GenerateState(model, prompt) for prompt in prompts]
    for step in range(_NUM_CHECK_STEPS + 1):
        for state, (token_ids, logits) in zip(states, outputs, strict=True):
            actual = state.run([token_ids[step - 1]] if step else state.prompt)
            if (difference := _difference(logits[step], actual)) > _tolerance(actual):
                raise UnsupportedModelError(
                    f"{model.config.model_type}: two sequences that decode in turns differ from generate's (by "
                    f"{difference:.1e}): the model keeps their state in its modules, or is not deterministic"
                )


def _divides(model: PreTrainedModel, prompt: Sequence[int]) -> bool:
    """Return whether the prompt in chunks, and steps after it, compute what they compute after the whole prompt."""
    token_ids, logits = _generated(model, prompt)
    state = GenerateState(model, prompt)
    state.run(prompt[:_CHECK_CHUNK])
    actual = [state.run(prompt[_CHECK_CHUNK:]), *(state.run([token]) for token in token_ids[:_NUM_CHECK_STEPS])]
    return all(_difference(wanted, found) <= _tolerance(found) for wanted, found in zip(logits, actual, strict=True))


def _generated(model: PreTrainedModel, prompt: Sequence[int]) -> tuple[list[int], list[Tensor]]:
    """Return what `generate` makes of the prompt: token ids and logits [1, V] of a few steps."""
    options = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NUM_CHECK_STEPS + 1, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    written: Any = model.generate(torch.tensor([prompt], device=model.device), generation_config=options)  # type: ignore[operator]
    if not all(bool(logits.isfinite().all()) for logits in written.logits):
        raise CheckpointError(
            f"the model computes NaN or infinity on plain input in {model.dtype}: "
            "its weights are damaged, or overflow; try bfloat16 or float32"
        )
    return written.sequences[0, len(prompt) :].tolist(), list(written.logits)


def _tolerance(logits: Tensor) -> float:
    """Return the largest difference that rounding explains."""
    return 1e-3 if logits.dtype == torch.float32 else 5e-2


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the root mean square of the difference as a share of the expected logits' own spread."""
    wanted = expected.float()
    return float((wanted - actual.float()).square().mean().sqrt() / wanted.std().clamp(min=1e-30))


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make sliding windows and attention chunks so short that the check leaves them."""
    owners = {id(one): one for one in (model.config.get_text_config(decoder=True), *model.modules())}.values()
    named = [(owner, name, vars(owner).get(name)) for owner in owners for name in _WINDOW_NAMES]
    places = [place for place in named if isinstance(place[2], int) and place[2] > _CHECK_WINDOW]
    try:
        for owner, name, _ in places:
            setattr(owner, name, _CHECK_WINDOW)
        yield
    finally:
        for owner, name, window in places:
            setattr(owner, name, window)


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
    is_recovering = False

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
        with self.progress.of(type(work).__name__, size), torch.inference_mode():
            return done(
                lambda: PrefillResult(self._prefilled(work.chunks)) if isinstance(work, Prefill) else self._round(work)
            )

    def wake(self) -> None:
        """Do nothing: `wait` does not wait."""

    def wait(self) -> None:
        """Return at once: `start` has already done the work."""

    def check(self) -> None:
        """Return at once: there is no other process to ask."""

    def recent_use(self) -> Sequence[StageUse]:
        return ()

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        raise NotImplementedError("a model that does not split into sublayers has no plans")

    def shutdown(self) -> None:
        """Do nothing: there are no processes to end."""

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
