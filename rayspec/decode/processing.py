"""Process raw logits by the sampling parameters. Each operation runs once, over the rows of all sequences that need it.

Parameters apply in float32, in the order of vLLM and of transformers' `generate`: allowed tokens; the form of the
output; biases; forbidden tokens; repetition, frequency and presence penalties; forced tokens; (greedy stops here);
temperature; min_p; top-k; top-p. A forbidden token is -inf; each row keeps at least one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import compress

import msgspec
import torch
from torch import Tensor

from rayspec.decode.runner import Operators, integers
from rayspec.decode.work import SamplerSpec
from rayspec.forms.grammar import Constraint
from rayspec.model.cuda import reference
from rayspec.types import InvalidTokenError


class Continuations:
    """Sequences of tokens, each with a number, looked up by the end of a text."""

    def __init__(self, sequences: Iterable[tuple[Sequence[int], float]]) -> None:
        self._last: dict[tuple[int, ...], dict[int, float]] = {}
        for sequence, number in sequences:
            *before, last = sequence
            ends = self._last.setdefault(tuple(before), {})
            ends[last] = ends.get(last, 0.0) + number
        self._lengths = sorted({len(before) for before in self._last})

    def __bool__(self) -> bool:
        return bool(self._last)

    def after(self, token_ids: Sequence[int], pending: Sequence[int]) -> list[tuple[int, float]]:
        """Return the tokens that complete a sequence after `token_ids` and `pending`, with the sequences' numbers."""
        end = _end(token_ids, pending, max(self._lengths, default=0))
        fitting = (self._last.get(end[len(end) - length :]) for length in self._lengths if length <= len(end))
        return [each for ends in fitting if ends is not None for each in ends.items()]


class NgramsOfText:
    """The n-grams of a growing text. size: 0 for none."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: dict[tuple[int, ...], set[int]] = {}

    def __bool__(self) -> bool:
        return self._size > 0

    def extend(self, token_ids: Sequence[int], num_new: int) -> None:
        """Add the n-grams that end in the last `num_new` tokens of the text."""
        for at in range(max(len(token_ids) - num_new, self._size - 1), len(token_ids)):
            self._last.setdefault(tuple(token_ids[at + 1 - self._size : at]), set()).add(token_ids[at])

    def after(self, token_ids: Sequence[int], pending: Sequence[int]) -> set[int]:
        """Return the tokens that would repeat an n-gram after `token_ids`, which is the text, and `pending`."""
        if not self._size:
            return set()
        length = self._size - 1
        end = _end(token_ids, pending, length + len(pending))
        before = end[len(end) - length :]
        repeated = {
            end[at] for at in range(max(len(end) - len(pending), length), len(end)) if end[at - length : at] == before
        }
        return repeated | self._last.get(before, set())


def _end(token_ids: Sequence[int], pending: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the last `length` tokens of both, or all if there are fewer."""
    num_committed = max(0, length - len(pending))
    both = (*token_ids[len(token_ids) - min(num_committed, len(token_ids)) :], *pending)
    return both[max(0, len(both) - length) :]


_LARGEST = torch.finfo(torch.float32).max
_MAX_UNCOUNTED = 16  # tokens; with more, `TokenSampler.commit` adds them to the counts


class TokenSampler:
    """The parameters and the seed of a sequence, and what they need of its text, in the LM head's process. Tokens of
    the checkpoint's rules that lie outside the vocabulary can never be generated and are ignored. Raises
    InvalidTokenError when `logit_bias` or, where a penalty has to count it, a token lies outside the vocabulary."""

    def __init__(
        self, spec: SamplerSpec, *, vocab_size: int, device: torch.device | str, operators: Operators = reference
    ) -> None:
        self.operators = operators
        self.params = params = spec.params
        self.seed = spec.seed
        self.lookup = spec.lookup
        self.constraint = spec.constraint
        self.vocab_size = vocab_size
        prompt_token_ids, eos_token_ids = spec.prompt_token_ids, spec.eos_token_ids
        self.device = device
        self.token_ids = list(prompt_token_ids)  # committed tokens: prompt and output
        self.num_prompt_tokens = len(prompt_token_ids)
        check_tokens("logit_bias", params.logit_bias, vocab_size)
        self.bias_ids = integers(list(params.logit_bias), device)
        self.biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32).to(device)
        self.biased = Continuations(each for each in params.sequence_bias if 0 <= each[0][-1] < vocab_size)
        self.stops = self._tokens({*params.stop_token_ids, *eos_token_ids} if params.min_tokens else ())
        bad_words = [words for words in params.bad_words_ids if words not in {(token,) for token in eos_token_ids}]
        self.suppressed = self._tokens({*params.suppress_tokens, *(words[0] for words in bad_words if len(words) == 1)})
        self.suppressed_at_begin = self._tokens(params.begin_suppress_tokens)
        self.bad_words = Continuations((each, 0.0) for each in bad_words if len(each) > 1 and each[-1] < vocab_size)
        self.ngrams = NgramsOfText(params.no_repeat_ngram_size)
        check_tokens("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        self.forced: dict[int, Tensor] = {}  # by the number of output tokens before
        if params.forced_bos_token_id is not None and self.num_prompt_tokens == 1 and self.constraint is None:
            self.forced[0] = self._tokens([params.forced_bos_token_id])
        self._begin = len(self.forced)  # output token from which on the text is the model's
        if params.forced_eos_token_id and self.constraint is None:
            self.forced[params.max_tokens - 1] = self._tokens(params.forced_eos_token_id)
        if self.ngrams:
            self.ngrams.extend(self.token_ids, len(self.token_ids))
        if params.has_penalties:
            check_tokens("prompt_token_ids", prompt_token_ids, vocab_size)
        self.uncounted: list[int] = []  # output tokens that are not in `counts` yet, with penalties
        self.commit(spec.output_token_ids)

    # Made when a row is first processed: many sequences may wait, and each of these tensors has an entry for each token
    # of the vocabulary.

    @cached_property
    def others(self) -> Tensor:
        """bool [V]: the tokens that are not among the allowed ones."""
        others = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
        others[integers(self.params.allowed_token_ids or (), self.device)] = False
        return others

    @cached_property
    def is_in_prompt(self) -> Tensor:
        """bool [V]."""
        found = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        found[integers(self.token_ids[: self.num_prompt_tokens], self.device)] = True
        return found

    @cached_property
    def counts(self) -> Tensor:
        """float32 [V]: how often each token is in the output, without those that are `uncounted`."""
        return torch.zeros(self.vocab_size, dtype=torch.float32, device=self.device)

    @property
    def position(self) -> int:
        """Number of committed tokens: the position of the next token."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output. Raises InvalidTokenError as the constructor does, and changes nothing then."""
        if self.params.has_penalties:
            check_tokens("token_ids", token_ids, self.vocab_size)
            self.uncounted.extend(token_ids)
            if len(self.uncounted) > _MAX_UNCOUNTED and "counts" in vars(self):
                tokens = integers(self.uncounted, self.device)
                self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float32))
                self.uncounted = []
        self.token_ids.extend(token_ids)
        if self.ngrams:
            self.ngrams.extend(self.token_ids, len(token_ids))
        if self.constraint is not None:
            self.constraint.extend_to(self.token_ids)

    @property
    def problem(self) -> str:
        """Why the form of the output cannot be kept; "" while it can."""
        return "" if self.constraint is None else self.constraint.error

    @cached_property
    def greedy(self) -> bool:
        return self.params.greedy

    @cached_property
    def is_shifted(self) -> bool:
        """Whether the largest score of a row becomes 0."""
        one = self.params
        return not self.greedy and (one.temperature != 1 or one.min_p > 0 or one.top_p < 1)

    @cached_property
    def changes(self) -> frozenset[_Change]:
        """The changes that the parameters may ask for in some row, see `process`."""
        return frozenset(change for change, is_asked in _CHANGES.items() if is_asked(self))

    @cached_property
    def reads_history(self) -> bool:
        """Whether the values of the tokens before a row matter. If not, draft tokens may stay on the device, with
        placeholders in their place."""
        has_sequences = bool(self.biased or self.bad_words or self.ngrams)
        return self.params.has_penalties or has_sequences or self.constraint is not None

    @cached_property
    def reads_depth(self) -> bool:
        """Whether a change depends on the number or on the values of the tokens before a row."""
        return self.reads_history or not self.changes.isdisjoint(_DUE)

    @property
    def is_argmax(self) -> bool:
        """Whether this and all later tokens are the argmax of the raw logits. May become true after `min_tokens`."""
        return self._is_unchanged and self.num_output_tokens >= self._num_ruled

    @cached_property
    def _is_unchanged(self) -> bool:
        """Whether nothing but a forbidden token can change the choice of the likeliest token."""
        return self.greedy and self.changes <= {_forbid} and not (self.ngrams or self.bad_words)

    @cached_property
    def _num_ruled(self) -> float:
        """Output tokens before which the parameters forbid some token whatever the text is; infinite for ever."""
        return max(
            math.inf if len(self.suppressed) else 0,
            self.params.min_tokens if len(self.stops) else 0,
            self._begin + 1 if len(self.suppressed_at_begin) else 0,
        )

    def forbids(self, num_before: int) -> bool:
        """Return whether tokens may be forbidden in the row after `num_before` more tokens."""
        return bool(self.ngrams or self.bad_words) or self.num_output_tokens + num_before < self._num_ruled

    def always_forbidden(self, num_before: int) -> list[Tensor]:
        """Return the tokens that are forbidden after any `num_before` more tokens."""
        num_output_tokens, parts = self.num_output_tokens + num_before, [self.suppressed]
        if num_output_tokens < self.params.min_tokens:
            parts.append(self.stops)
        if num_output_tokens == self._begin:
            parts.append(self.suppressed_at_begin)
        return [part for part in parts if len(part)]

    def forbidden_after(self, before: Sequence[int]) -> list[int]:
        """Return the tokens that are forbidden because of the tokens before them."""
        repeated = self.ngrams.after(self.token_ids, before)
        bad = {token for token, _ in self.bad_words.after(self.token_ids, before)}
        return [token for token in repeated | bad if 0 <= token < self.vocab_size]

    def forced_after(self, num_before: int) -> Tensor | None:
        """Return the tokens of which one must come after `num_before` more tokens; None for any."""
        tokens = self.forced.get(self.num_output_tokens + num_before)
        return None if tokens is None or not len(tokens) else tokens

    def _tokens(self, token_ids: Collection[int]) -> Tensor:
        return integers(sorted(token for token in token_ids if 0 <= token < self.vocab_size), self.device)


class LogitRows(msgspec.Struct, frozen=True):
    """Some rows of a packed logits tensor: where they are, and whose. befores: the tokens between the committed tokens
    and the row's token. depths: their number. befores may be empty where a sampler does not `reads_history`."""

    at: Sequence[int]
    samplers: Sequence[TokenSampler]
    depths: Sequence[int]
    befores: Sequence[Sequence[int]]

    def only(self, wanted: Sequence[bool]) -> LogitRows:
        """Return the rows that are wanted."""
        at, samplers = list(compress(self.at, wanted)), list(compress(self.samplers, wanted))
        return LogitRows(at, samplers, list(compress(self.depths, wanted)), list(compress(self.befores, wanted)))


def process(logits: Tensor, rows: LogitRows) -> Tensor:
    """Return raw logits [N, V] as float32, with these rows processed: in new memory, but for logits in float32 that
    nothing changes. Rows with a temperature other than 1, min_p or top_p are shifted so that their largest score is 0.

    A row with a finite score keeps at least one. The result for a row with NaN or +inf is undefined, but no error
    occurs. With top_p and without kernels the host synchronises once with the device. Raises InvalidTokenError for a
    token in `before` that a penalty cannot count.
    """
    return changed(logits, changes_of(rows, len(logits), logits.device))


def changes_of(rows: LogitRows, num_rows: int, device: torch.device) -> list[RowsChange]:
    """Return what `process` does with these rows of scores [num_rows, V]."""
    of_sampler = {sampler: sampler.changes for sampler in set(rows.samplers)}
    asked = frozenset[_Change]().union(*of_sampler.values())
    of_all, in_order = asked.intersection(*of_sampler.values()), list(range(num_rows))
    changes = list[RowsChange]()
    for change in _CHANGES:
        if change not in asked:
            continue
        due = rows if change in of_all else rows.only([change in of_sampler[one] for one in rows.samplers])
        if (is_due := _DUE.get(change)) is not None:
            due = due.only(list(map(is_due, due.samplers, due.depths)))
        if due.at:
            changes.append((change, due, None if due.at == in_order else integers(due.at, device)))
    return changes


def changed(logits: Tensor, changes: Sequence[RowsChange]) -> Tensor:
    """Return the logits after the changes, as `process` does."""
    overwrites = bool(changes) and (changes[0][0] is not _shift or changes[0][2] is not None)
    scores = logits.to(torch.float32, copy=overwrites)
    for change, rows, where in changes:
        if where is None:
            scores = change(scores, rows)
        else:
            scores.index_copy_(0, where, change(scores[where], rows))
    return scores


def check_tokens(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidTokenError, naming the argument, if a token is not in 0 .. vocab_size - 1."""
    bad = [token for token in token_ids if not 0 <= token < vocab_size]
    if bad:
        raise InvalidTokenError(f"{name} holds token {bad[0]}: give tokens from 0 to {vocab_size - 1}")


# Returns scores [n, V] changed. All but `_shift` may overwrite those that are given.
_Change = Callable[[Tensor, LogitRows], Tensor]
RowsChange = tuple[_Change, LogitRows, Tensor | None]  # with the rows, and where they are if not in order


def _leave_allowed(scores: Tensor, rows: LogitRows) -> Tensor:
    return scores.masked_fill_(torch.stack([sampler.others for sampler in rows.samplers]), -math.inf)


def _keep_form(scores: Tensor, rows: LogitRows) -> Tensor:
    by_constraint: dict[int, tuple[Constraint, list[int]]] = {}
    for at, sampler in enumerate(rows.samplers):
        if (constraint := sampler.constraint) is not None:
            by_constraint.setdefault(id(constraint), (constraint, []))[1].append(at)
    where, words = list[int](), list[Tensor]()
    for constraint, of_sequence in by_constraint.values():
        masks = constraint.masks([rows.befores[at] for at in of_sequence])
        if masks is not None:
            where += of_sequence
            words.append(masks)
    if not words:
        return scores
    bits = torch.cat(words).to(scores.device).unsqueeze(2) & _bits_of_word(scores.device)
    forbidden = (bits == 0).flatten(1)[:, : scores.shape[1]]
    if where == list(range(len(rows.at))):
        return scores.masked_fill_(forbidden, -math.inf)
    index = integers(where, scores.device)
    return scores.index_copy_(0, index, scores[index].masked_fill_(forbidden, -math.inf))


@cache
def _bits_of_word(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32, device=device)


def _add_biases(scores: Tensor, rows: LogitRows) -> Tensor:
    pairs = zip(rows.samplers, rows.befores, strict=True)
    found = [sampler.biased.after(sampler.token_ids, before) for sampler, before in pairs]
    where = _places(
        [(at, sampler.bias_ids) for at, sampler in enumerate(rows.samplers)],
        [(at, token) for at, each in enumerate(found) for token, _ in each],
        scores.device,
    )
    more = _column([bias for each in found for _, bias in each], scores).squeeze(1)
    return scores.index_put_(where, torch.cat([*(sampler.biases for sampler in rows.samplers), more]), accumulate=True)


def _forbid(scores: Tensor, rows: LogitRows) -> Tensor:
    """Forbid tokens, except in rows that have no other token."""
    always = map(TokenSampler.always_forbidden, rows.samplers, rows.depths)
    after = map(TokenSampler.forbidden_after, rows.samplers, rows.befores)
    where = _places(
        [(at, part) for at, parts in enumerate(always) for part in parts],
        [(at, token) for at, tokens in enumerate(after) for token in tokens],
        scores.device,
    )
    masked = scores.index_put(where, scores.new_tensor(-math.inf))
    nothing_left = masked.amax(1, keepdim=True) == -math.inf
    return torch.where(nothing_left, scores, masked)


def _penalise(scores: Tensor, rows: LogitRows) -> Tensor:
    """Apply the repetition penalty of CTRL (Keskar et al., 2019) over prompt and output, and OpenAI's presence and
    frequency penalties over the output. Finite scores stay finite."""
    counts = torch.stack([sampler.counts for sampler in rows.samplers])
    tokens = [[*sampler.uncounted, *before] for sampler, before in zip(rows.samplers, rows.befores, strict=True)]
    flat = [token for each in tokens for token in each]
    check_tokens("pending", flat, counts.shape[1])
    owners = [index for index, each in enumerate(tokens) for _ in each]
    where = integers([*owners, *flat], counts.device).view(2, -1)
    counts.index_put_((where[0], where[1]), counts.new_ones(()), accumulate=True)
    is_in_output = counts > 0
    is_repeated = torch.stack([sampler.is_in_prompt for sampler in rows.samplers]).logical_or_(is_in_output)
    params = [sampler.params for sampler in rows.samplers]
    repetition = _column([min(max(one.repetition_penalty, 1e-30), 1e30) for one in params], scores)
    scaled = torch.where(scores > 0, scores / repetition, scores * repetition).clamp_(-_LARGEST, _LARGEST)
    scores = torch.where(is_repeated & scores.isfinite(), scaled, scores)
    scores.sub_(_column([one.frequency_penalty for one in params], scores) * counts)
    return scores.sub_(_column([one.presence_penalty for one in params], scores) * is_in_output)


def _force(scores: Tensor, rows: LogitRows) -> Tensor:
    forced = enumerate(map(TokenSampler.forced_after, rows.samplers, rows.depths))
    where = _places([(at, tokens) for at, tokens in forced if tokens is not None], (), scores.device)
    return scores.fill_(-math.inf).index_put_(where, scores.new_tensor(0.0))


def _shift(scores: Tensor, rows: LogitRows) -> Tensor:
    """Return scores whose maximum is 0, so that no temperature causes an overflow."""
    return scores - scores.amax(1, keepdim=True)


def _divide(scores: Tensor, rows: LogitRows) -> Tensor:
    return scores.div_(_column([sampler.params.temperature for sampler in rows.samplers], scores))


def _cut_to_min_p(scores: Tensor, rows: LogitRows) -> Tensor:
    least = _column([math.log(sampler.params.min_p) for sampler in rows.samplers], scores)
    return scores.masked_fill_(scores < least, -math.inf)


def _cut_to_top_k(scores: Tensor, rows: LogitRows) -> Tensor:
    """Keep the top k scores and all ties with the k-th, as vLLM and transformers do."""
    counts = [sampler.params.top_k for sampler in rows.samplers]
    last = integers(counts, scores.device).unsqueeze(1) - 1
    weakest = scores.topk(max(counts), dim=1).values.gather(1, last)
    return scores.masked_fill_(scores < weakest, -math.inf)


def _cut_to_top_p(scores: Tensor, rows: LogitRows) -> Tensor:
    top_p = _column([sampler.params.top_p for sampler in rows.samplers], scores, dtype=torch.float64)
    rows.samplers[0].operators.cut_to_top_p(scores, top_p)
    return scores


# The changes in their order, each with whether a sequence asks for it.
_CHANGES: Mapping[_Change, Callable[[TokenSampler], bool]] = {
    _leave_allowed: lambda sampler: sampler.params.allowed_token_ids is not None,
    _keep_form: lambda sampler: sampler.constraint is not None,
    _add_biases: lambda sampler: len(sampler.bias_ids) > 0 or bool(sampler.biased),
    _forbid: lambda sampler: bool(sampler.ngrams or sampler.bad_words) or sampler._num_ruled > 0,
    _penalise: lambda sampler: sampler.params.has_penalties,
    _force: lambda sampler: bool(sampler.forced),
    _shift: lambda sampler: sampler.is_shifted,
    _divide: lambda sampler: not sampler.greedy and sampler.params.temperature != 1,
    _cut_to_min_p: lambda sampler: not sampler.greedy and sampler.params.min_p > 0,
    _cut_to_top_k: lambda sampler: not sampler.greedy and 0 < sampler.params.top_k < sampler.vocab_size,
    _cut_to_top_p: lambda sampler: not sampler.greedy and sampler.params.top_p < 1,
}
# Of some changes, the rows of such a sequence that are changed.
_DUE: Mapping[_Change, Callable[[TokenSampler, int], bool]] = {
    _forbid: TokenSampler.forbids,
    _force: lambda sampler, depth: sampler.forced_after(depth) is not None,
}


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return _kept_column(tuple(values), dtype, like.device)


@lru_cache(maxsize=64)
def _kept_column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as [n, 1]. A batch asks for the same values in each step, so it copies them once."""
    return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device, non_blocking=True)


def _places(
    parts: Sequence[tuple[int, Tensor]], single: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return row and column of every token. parts: a row and its tokens; single: a row and one token."""
    columns = torch.cat([*(tokens for _, tokens in parts), integers([token for _, token in single], device)])
    owners = [at for at, _ in (*parts, *single)]
    lengths = [*(len(tokens) for _, tokens in parts), *(1 for _ in single)]
    both = integers([*owners, *lengths], device).view(2, -1)
    return both[0].repeat_interleave(both[1], output_size=len(columns)), columns
