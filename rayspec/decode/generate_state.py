"""One sequence of an undivided model: its passes, and two ways to take rows of a pass back.

A cache of keys and values is cut. Recurrent state cannot be cut: it is copied before a pass, and where rows are taken
back, the copy is restored. The rows that were kept then run once more, with those of the next pass. Some models
continue their recurrent state by single rows only: these modules then step through the rows of a pass. Checks at load
show whether sequences decode as `generate` decodes them and which way works, and passes of several rows are timed.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, cache_utils
from transformers.generation.utils import ALL_CACHE_NAMES

from rayspec.decode.lockstep import Lockstep, few_rows, recurrent_modules, shorten_chunks, step_rows
from rayspec.model.architecture import max_positions
from rayspec.model.blocked import block_linears
from rayspec.model.layer_bytes import MODEL_ERRORS, cached_bytes
from rayspec.model.load_check import boundaries, require_finite
from rayspec.model.passing import StandIn, at_border
from rayspec.model.weights import in_one_line
from rayspec.planning.latency import HEAD, Measurement
from rayspec.types import UnsupportedModelError

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Sequence[Callable[[], Tensor]]], list[Tensor]]
Cuts: TypeAlias = Literal["crop", "copy", "step"]

_BY_REFERENCE = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)  # updates bind new tensors
# Versions of transformers differ in these layers.
_FILLED = tuple(
    getattr(cache_utils, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DummyLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)
_MOST_PENDING = 16


class GenerateState:
    """The passes of one sequence: inputs, positions and cache are those of the model's own `generate`.

    prompt: the tokens before the first generated token. The model's generation config must only say whether it has a
    cache. cuts: how rows of passes after the prompt's are taken back; None: they never are. num_tokens: that are in the
    cache.
    """

    def __init__(self, model: PreTrainedModel, prompt: Sequence[int], *, cuts: Cuts | None = None) -> None:
        self._model: Any = model
        self._cuts = cuts
        self._tried: tuple[Tensor, Any] | None = None  # tokens of a pass whose rows are not kept yet, and its output
        self._copy: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of the cache's layers: now, and then
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
        self._token_ids = self._pending = token_ids[:, :0]  # in the cache; and kept, but not in the cache

    @property
    def num_tokens(self) -> int:
        return self._token_ids.shape[1]

    @property
    def num_pending(self) -> int:
        """Rows that were kept before and that the next pass also runs, because rows after them were taken back."""
        return self._pending.shape[1]

    @property
    def num_kept(self) -> int:
        """Tokens of the sequence, without the rows that were tried last."""
        return self.num_tokens + self.num_pending

    @property
    def cache(self) -> Any:
        """What the model keeps between passes, in transformers' or its own form; None if it keeps nothing."""
        return next((found for name in ALL_CACHE_NAMES if (found := self._arguments.get(name)) is not None), None)

    def run(self, token_ids: Sequence[int], *, num_logits: int = 1) -> Tensor:
        """Run the next tokens in one pass, keep them, and return the logits [num_logits, V] after the last."""
        self.keep(0)
        logits = self._pass(token_ids, num_logits)
        self.keep(len(token_ids))
        return logits

    def try_rows(self, token_ids: Sequence[int]) -> Tensor:
        """Run the next tokens in one pass and return the logits [N, V] after each. `keep` then says how many of these
        rows stay; before the next pass, none do."""
        self.keep(0)
        if self._cuts in ("copy", "step"):
            every = (self.cache, *getattr(self.cache, "layers", ()))
            self._copy = [(vars(each), _copied(each)) for each in every if hasattr(each, "__dict__")]
        return self._pass(token_ids, len(token_ids))

    def keep(self, num_rows: int) -> None:
        """Keep the first `num_rows` of the rows that were tried last, and take the others back."""
        if self._tried is None:
            return
        (tried, output), self._tried = self._tried, None
        copy, self._copy = self._copy, []
        num_kept = self._pending.shape[1] + num_rows
        num_cut = tried.shape[1] - num_kept
        if self._cuts in ("copy", "step") and num_cut:
            for now, then in copy:
                now.update(then)
            self._pending = tried[:, :num_kept]
            if num_kept > _MOST_PENDING:
                self._pass([], 1)
                self.keep(0)
            return
        is_first = self.num_tokens == 0
        self._pending = tried[:, :0]
        if num_kept:
            self._token_ids = torch.cat([self._token_ids, tried[:, :num_kept]], dim=1)
            self._arguments = self._grown(1 if is_first else num_kept, output)
        cache = self.cache
        if self._cuts == "crop" and cache is not None:
            if is_first:
                # From now on the cache keeps what a pass pushes out until it is cut. The prompt pushes out too much.
                cache.activate_past_recording()
            else:
                cache.crop(-num_cut)

    def fill(self, num_tokens: int) -> None:
        """Take the tokens in the cache again and again as `num_tokens` further tokens, with the same keys and values,
        without a pass. Recurrent state stays as it is. Raises NotImplementedError for a cache of another kind."""
        cache = self.cache
        for layer in () if cache is None else getattr(cache, "self_attention_cache", cache).layers:
            if type(layer) not in _FILLED:
                raise NotImplementedError(f"a {type(layer).__name__} cannot be filled without a pass")
            if getattr(layer, "keys", None) is not None:
                at = torch.arange(num_tokens, device=layer.keys.device) % layer.keys.shape[-2]
                layer.update(layer.keys[..., at, :], layer.values[..., at, :])
        at = torch.arange(num_tokens, device=self._token_ids.device) % self.num_tokens
        self._token_ids = torch.cat([self._token_ids, self._token_ids[:, at]], dim=1)
        self._arguments = self._grown(num_tokens)
        if self._cuts == "crop" and cache is not None:
            cache.crop(0)

    def _pass(self, token_ids: Sequence[int], num_logits: int) -> Tensor:
        """Run the pending and the next tokens in one pass and return the logits [num_logits, V] after the last."""
        new = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._token_ids.device)
        new = torch.cat([self._pending, new], dim=1)
        all_tokens = torch.cat([self._token_ids, new], dim=1)
        # The arguments are those of the prompt, or of one more token than are in the cache.
        arguments = self._grown(new.shape[1] - 1) if self.num_tokens else dict(self._arguments)
        if (positions := arguments.get("position_ids")) is not None:
            arguments["position_ids"] = positions[..., : all_tokens.shape[1]]
        inputs = self._model.prepare_inputs_for_generation(
            all_tokens,
            next_sequence_length=new.shape[1] if arguments["use_cache"] else None,
            is_first_iteration=all_tokens.shape[1] <= len(self.prompt),
            **arguments,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_logits
        is_short = self._cuts in ("copy", "step") and self.num_tokens > 0 and new.shape[1] > 1
        with few_rows(new.shape[1] if is_short else 0):
            output = self._model(**inputs, return_dict=True)
        self._tried = new, output
        return output.logits[0, -num_logits:]  # type: ignore[no-any-return]

    def _grown(self, num_tokens: int, output: Any = ()) -> dict[str, Any]:
        """output: of the pass before."""
        arguments = dict(self._arguments)
        if num_tokens:
            arguments = self._model._update_model_kwargs_for_generation(output, arguments, num_new_tokens=num_tokens)
        return arguments


def _copied(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer of a cache, such that later passes change none of them."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(each) for key, each in value.items()}
        if isinstance(value, list):
            return [copied(each) for each in value]
        return value.clone() if isinstance(value, Tensor) else value

    return dict(vars(layer)) if type(layer) in _BY_REFERENCE else copied(vars(layer))


_NUM_TRIAL_ROWS = 7
_NUM_CHECK_TOKENS = 32
_NUM_CHECK_STEPS = 1
_FEW_TOKENS = 8
# Of the check of cuts: how many of so many rows are kept, pass by pass; and rows before a border that the passes cross.
_KEPT, _NUM_TRIED, _NUM_BEFORE = (1, 2, 3, 2, 1), 3, 4
# A prompt of the check is no longer. Behind it, a cache is filled without passes.
_LONGEST_CHECK_PROMPT = 256
# Borders of the config beyond so many tokens are not checked, except windows: filling a cache takes memory.
_FARTHEST = 8192
# Largest difference between two computations of the same logits, as a share of their spread.
_TOLERANCE, _TOLERANCE_OF_CUTS, _TOLERANCE_IN_HALF = 1e-3, 1e-4, 5e-2
_LOCKSTEP_PROMPTS = (9, 1, _NUM_CHECK_TOKENS)
# Rows of a measured pass, repeats, and seconds of measuring; numbers of sequences, and repeats.
_ROW_COUNTS, _NUM_REPEATS, _BUDGET_S = (1, 2, 4, 8, 16), 20, 1.0
_SEQUENCE_COUNTS, _NUM_SEQUENCES, _NUM_REPEATS_OF_SEQUENCES = (1, 2, 4, 8), 8, 5
_NOTHING_S = 1e-9
# The curve of an undivided model, which counts as one sublayer.
WHOLE = "attention and all else"


@contextmanager
def _as_unsupported(message: str = "{}") -> Iterator[None]:
    try:
        yield
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(message.format(f"{type(error).__name__}: {in_one_line(error)}")) from error


@torch.inference_mode()
def check_generation(model: PreTrainedModel) -> None:
    """Require that sequences that run in turns compute what `generate` computes for each alone, on random tokens.
    Raises UnsupportedModelError if they do not, and CheckpointError for weights that compute NaN or infinity."""
    prompt = _random_tokens(model, _NUM_CHECK_TOKENS)
    options = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NUM_CHECK_STEPS + 1, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    generate: Any = model.generate
    cannot = "{}: generate of transformers cannot continue a text with this model ({{}})"
    with _as_unsupported(cannot.format(model.config.model_type)):
        states = [GenerateState(model, each) for each in (prompt[:1], prompt)]
        inputs = [torch.tensor([state.prompt], device=model.device) for state in states]
        outputs = [generate(each, generation_config=options) for each in inputs]
        for output in outputs:
            require_finite(torch.cat(output.logits))
        for step in range(_NUM_CHECK_STEPS + 1):
            for state, output in zip(states, outputs, strict=True):
                at = len(state.prompt) + step
                actual = state.run(output.sequences[0, at - 1 : at].tolist() if step else state.prompt)
                difference = _difference(actual, output.logits[step])
                if not difference <= (_TOLERANCE if actual.dtype == torch.float32 else _TOLERANCE_IN_HALF):
                    raise UnsupportedModelError(
                        f"{model.config.model_type}: two sequences that decode in turns differ from generate's (by "
                        f"{difference:.1e}): the model keeps their state in its modules, or is not deterministic"
                    )


@torch.inference_mode()
def scores_prompts(model: PreTrainedModel) -> bool:
    """Return whether one pass over a prompt gives the logits after each of its tokens, computed from the tokens up to
    it. Encoders also read the tokens that follow, and XLNet gives the last row only."""
    prompt, num_before = _random_tokens(model, _FEW_TOKENS), _FEW_TOKENS // 2
    rows = GenerateState(model, prompt).run(prompt, num_logits=_FEW_TOKENS)
    expected = GenerateState(model, prompt[:num_before]).run(prompt[:num_before])
    tolerance = _TOLERANCE if rows.dtype == torch.float32 else _TOLERANCE_IN_HALF
    return len(rows) == _FEW_TOKENS and _difference(rows[num_before - 1 : num_before], expected) <= tolerance


@torch.inference_mode()
def check_received(model: PreTrainedModel) -> None:
    """Require that what a stage without the embedding computes does not depend on what stands in for it: embeddings
    may have reached the layers in another way than by the states. Raises UnsupportedModelError."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, StandIn):
        return
    prompt, found = _random_tokens(model, _FEW_TOKENS), []
    with _as_unsupported():
        with at_border(None) as border:
            GenerateState(model, prompt).run(prompt)
        states = torch.randn(border.received_shape, generator=torch.Generator().manual_seed(0))
        for embedding.shift in (0, 1):
            with at_border(states.to(model.device, model.dtype)) as border:
                logits = GenerateState(model, prompt).run(prompt, num_logits=_FEW_TOKENS)
            found.append(border.sent[0][0] if border.sent else logits)
        difference = _difference(*found)
    if not difference <= _TOLERANCE_OF_CUTS:
        raise UnsupportedModelError(f"{model.config.model_type}: stages need the embedding, which its layers read")


@torch.inference_mode()
def find_cuts(model: PreTrainedModel, lockstep: Lockstep) -> Cuts:
    """Return how rows of a pass are taken back. Raises UnsupportedModelError if no way works."""
    with suppress(UnsupportedModelError):
        check_cuts(model, "crop")
        return "crop"
    modules = recurrent_modules(model, partial(_trial, model))
    for chunks in (shorten_chunks(modules), nullcontext()):
        with suppress(UnsupportedModelError), chunks:
            check_cuts(model, "copy")
            return "copy"
    step_rows(modules, lockstep)
    check_cuts(model, "step")
    return "step"


def weakest(found: Sequence[Cuts | None]) -> Cuts | None:
    """Return how all stages of a model can take rows back. found: how each can; one that crops can restore copies."""
    if None in found:
        return None
    return "crop" if all(cuts == "crop" for cuts in found) else "copy"


@torch.inference_mode()
def in_fast_layout(model: PreTrainedModel) -> None:
    """Give the model's linear layers the memory layout in which they are fastest."""

    def trial() -> None:
        _prefilled(model, _FEW_TOKENS, None).run(_random_tokens(model, 1))

    block_linears(model, trial)


@torch.inference_mode()
def in_lockstep(model: PreTrainedModel) -> Lockstep:
    return Lockstep(model, partial(_trial, model), num_rows=_NUM_TRIAL_ROWS)


def _trial(model: PreTrainedModel) -> None:
    prompt = _random_tokens(model, _NUM_TRIAL_ROWS)
    GenerateState(model, prompt).run(prompt, num_logits=_NUM_TRIAL_ROWS)


@torch.inference_mode()
def check_cuts(model: PreTrainedModel, cuts: Cuts) -> None:
    """Require that rows that run in one pass, and of which only the first are kept, compute what rows one by one
    compute. Random tokens begin after a prompt, and shortly before each border: sliding windows, and other lengths that
    the config names, if they are not far. Raises UnsupportedModelError."""
    end, num_tested = max_positions(model.config), sum(_KEPT) + _NUM_TRIED
    named = boundaries(model.config.get_text_config(decoder=True), end)[:-1]
    near = [each for each in named if each <= _FARTHEST]
    tokens = _random_tokens(model, num_tested, seed=2)
    with _as_unsupported("rows of a pass cannot be taken back ({})"):
        layers = getattr(_prefilled(model, 1, None).cache, "layers", ())
        windows = {each.sliding_window for each in layers if getattr(each, "is_sliding", False)}
        borders = sorted({each for each in windows if each < (end or math.inf)}.union(near))
        starts = [_NUM_CHECK_TOKENS, *(max(1, each - _NUM_BEFORE) for each in borders)]
        for start in dict.fromkeys(int(max(1, min(each, (end or math.inf) - num_tested))) for each in starts):
            plain, cut = _prefilled(model, start, None), _prefilled(model, start, cuts)
            try:
                expected = torch.cat([plain.run([token]) for token in tokens[: sum(_KEPT)]])
            except MODEL_ERRORS:
                if end is None and start > starts[0]:
                    continue  # the context ends here
                raise
            _require_cuts(cut, tokens, expected, f"after {start} tokens")


@torch.inference_mode()
def cache_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes that a sequence keeps for each token, and for itself: recurrent state, with the copy of a
    verify. A sliding window counts as if it kept every token."""
    few, many = (cached_bytes(_prefilled(model, count, None).cache) for count in (_FEW_TOKENS, 2 * _FEW_TOKENS))
    of_token = math.ceil((many - few) / _FEW_TOKENS)
    return of_token, 2 * max(0, few - _FEW_TOKENS * of_token)


def _prefilled(model: PreTrainedModel, num_tokens: int, cuts: Cuts | None) -> GenerateState:
    prompt = _random_tokens(model, min(num_tokens, _LONGEST_CHECK_PROMPT), seed=1)
    state = GenerateState(model, prompt, cuts=cuts)
    state.run(prompt)
    if cuts == "crop" and state.cache is not None and not getattr(state.cache, "is_croppable", False):
        raise UnsupportedModelError("its cache cannot be cut")
    if num_tokens > len(prompt):
        state.fill(num_tokens - len(prompt))
    return state


def _require_cuts(state: GenerateState, tokens: list[int], expected: Tensor, where: str) -> None:
    """Require these logits [N, V] of passes of several rows, of which the last are wrong and taken back."""
    at, is_exact = 0, expected.dtype == torch.float32
    for num_kept in _KEPT:
        right, others = tokens[at : at + num_kept], tokens[at + num_kept : at + _NUM_TRIED]
        actual = state.try_rows([*right, *((token + 1) % expected.shape[1] for token in others)])[:num_kept]
        state.keep(num_kept)
        wanted = expected[at : at + num_kept]
        difference = _difference(actual, wanted)
        if is_exact and bool((actual.argmax(-1) != wanted.argmax(-1)).any()):
            difference = math.inf
        if not difference <= (_TOLERANCE_OF_CUTS if is_exact else _TOLERANCE_IN_HALF):
            raise UnsupportedModelError(f"rows of one pass differ from rows of several (by {difference:.1e}, {where})")
        at += num_kept


@torch.inference_mode()
def check_lockstep(model: PreTrainedModel, lockstep: Lockstep, cuts: Cuts | None) -> None:
    """Require that sequences in lockstep compute what each computes alone, in passes of one row and of several. Raises
    UnsupportedModelError."""
    tokens = _random_tokens(model, len(_LOCKSTEP_PROMPTS), seed=2)

    def logits(run: Run) -> list[Tensor]:
        states = [_prefilled(model, length, cuts) for length in _LOCKSTEP_PROMPTS]
        found = run([partial(state.run, tokens[:1]) for state in states])
        if cuts is not None:
            found += run([partial(state.try_rows, tokens[:count]) for count, state in enumerate(states, start=1)])
        return found

    with _as_unsupported():
        pairs = zip(logits(lockstep.run), logits(_one_by_one), strict=True)
        difference = max(_difference(together, alone) for together, alone in pairs)
    if not difference <= (_TOLERANCE_OF_CUTS if model.dtype == torch.float32 else _TOLERANCE_IN_HALF):
        raise UnsupportedModelError(f"sequences in lockstep differ from sequences alone (by {difference:.1e})")


@torch.inference_mode()
def measured_sequences(model: PreTrainedModel, lockstep: Lockstep, cuts: Cuts | None) -> tuple[int | None, float]:
    """Return from how many sequences on lockstep is faster than one sequence after another (None: never), and the
    seconds of a round of 8 sequences in the faster way. Lockstep that computes something else is not used."""
    counts: tuple[int, ...] = _SEQUENCE_COUNTS
    try:
        check_lockstep(model, lockstep, cuts)
    except UnsupportedModelError as error:
        logger.warning("sequences of this model run one after another: %s", error)
        counts = counts[:1]
    calls = [partial(_prefilled(model, 1, None).run, _random_tokens(model, 1)) for _ in range(max(counts))]

    def run(count: int) -> Tensor:
        return torch.cat(lockstep.run(calls[:count]) if count > 1 else _one_by_one(calls[:1]))

    seconds = _fastest(counts, _NUM_REPEATS_OF_SEQUENCES, run)
    faster = [count for count in counts if seconds[count] < count * seconds[1]]
    return min(faster, default=None), min(seconds[count] * _NUM_SEQUENCES / count for count in (1, *faster[-1:]))


def _fastest(counts: Sequence[int], num_repeats: int, run: Callable[[int], Tensor]) -> dict[int, float]:
    """Return the seconds of each count's fastest run, as disturbances only make runs slower; all take a second."""
    until, seconds = time.perf_counter() + _BUDGET_S, dict.fromkeys(counts, math.inf)
    for repeat, count in itertools.product(range(num_repeats), counts):
        if not repeat or time.perf_counter() < until:
            started = time.perf_counter()
            run(count).argmax(-1).tolist()
            seconds[count] = min(seconds[count], time.perf_counter() - started)
    return seconds


def _one_by_one(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    return [call() for call in calls]


@torch.inference_mode()
def measured_passes(model: PreTrainedModel, cuts: Cuts | None, *, sequences_s: float) -> list[Measurement]:
    """Time passes of one and of several rows; these need cuts. sequences_s: from `measured_sequences`."""
    state, tokens = _prefilled(model, _NUM_CHECK_TOKENS, cuts), _random_tokens(model, max(_ROW_COUNTS), seed=3)
    seconds = _fastest(_ROW_COUNTS if cuts else (), _NUM_REPEATS, lambda rows: state.try_rows(tokens[:rows]))
    found = [Measurement(kind=WHOLE, rows=rows, context=0, batch=1, seconds=took) for rows, took in seconds.items()]
    several = Measurement(kind=WHOLE, rows=_NUM_SEQUENCES, context=0, batch=_NUM_SEQUENCES, seconds=sequences_s)
    return [*found, several, Measurement(kind=HEAD, rows=1, context=0, batch=1, seconds=_NOTHING_S)]


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest root mean square of a row's difference, as a share of the expected logits' spread; or NaN."""
    expected, actual = expected.float(), actual.float()
    spread = expected.std(-1, correction=0).clamp(min=1e-30)  # 0 for a vocabulary of one token
    return float(((expected - actual).square().mean(-1).sqrt() / spread).max())


def _random_tokens(model: PreTrainedModel, count: int, seed: int = 0) -> list[int]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens: list[int] = torch.randint(vocab_size, [count], generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens
