"""Drafts looked up in texts: the tokens that followed an earlier occurrence of a sequence's newest tokens. The class of
a looked-up token says how often such tokens are right.

Prompt lookup (Saxena 2023) with the longest match instead of the first: summaries and extractions copy, and the longest
match is more often the source of the copy. A corpus of finished outputs and of the texts of a file serves texts that
share a template, as the global tree of suffix decoding does (Oliaro et al. 2024).
"""

from __future__ import annotations

import codecs
import itertools
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rayspec.forms.grammar import Constraint
from rayspec.planning.learning import TEXT_HALF_LIFE, Discounted
from rayspec.prompts import text_tokens
from rayspec.types import ConfigError

_MAX_PLACES = 8  # the latest occurrences of an n-gram, which are compared
_LONGEST_MATCH = 32  # tokens that are compared at most
_COMPARABLE = 0.5  # share of the longest match that other places must match to count as support
_MAX_UNSORTED, _UNSORTED_SHARE = 512, 1 / 64  # n-grams of each length, at least and of those that are sorted
END_OF_TEXT = -1  # stands between the texts of an index of several; no copy goes beyond it
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
_NGRAM, _SHORTEST_MATCH = 4, 2  # tokens that must match in a corpus, and that suffice if no match is that long
_MOST_AT_ONCE = 8192  # tokens of a text that is added
_CHARACTERS_AT_ONCE = 2**16  # that are tokenised together
_COLUMNS = ("text", "summary")  # of the outputs of jobs
_BYTES_AT_ONCE, _MAX_LINE_BYTES, _ROWS_AT_ONCE = 2**16, 2**24, 64

OwnedText: TypeAlias = tuple[str, "array[int]"]
"""The owner of a text, see `Request.owner`, and its tokens: END_OF_TEXT stands between several texts."""

# Support of a looked-up token by other places in the text that follow the same tokens: some of these continue with
# another token, there are no such places, or all continue with this token.
AMBIGUOUS, SINGLE, UNANIMOUS = range(3)
# Numbers of matched tokens at which a class begins; and the prior acceptance of each class, here with SINGLE support.
_LENGTHS = (0, 2, 3, 4, 5, 6, 8, 11, 16, 24)
_LENGTH_CLASSES = tuple(bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1))
_SINGLE = tuple(max(length, 1) / (max(length, 1) + 2) for length in _LENGTHS)
_COPIED = (*(right / 2 for right in _SINGLE), *_SINGLE, *((1 + right) / 2 for right in _SINGLE))
# Where a copied token comes from: the sequence's own text, or a corpus of other texts, which are less often alike.
OWN_TEXT, CORPUS = range(2)
_NUM_COPIED = 2 * len(_COPIED)
# Probabilities of a recycled token at which a class begins; and the prior acceptance of each class: after a token, and
# after a pair of tokens, where the target's probabilities say more.
_PROBABILITIES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_RECYCLED = (*(0.02 + 0.3 * one for one in _PROBABILITIES), *(0.02 + 0.6 * one for one in _PROBABILITIES))
UNVERIFIED = _NUM_COPIED + len(_RECYCLED)  # the class of a successor in a prompt
FORCED = UNVERIFIED + 1  # the class of a token that the form of the output forces
_PRIORS = (*_COPIED, *(right / 2 for right in _COPIED), *_RECYCLED, 0.15, 0.95)


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may come next, and the class of each (`match_classes`). Both are empty without any. parents: for each
    token, the row that it follows, see `RoundEntry`; empty for a chain. survival: the probability of each that it, and
    all that it follows, are right; falling. copied: the part that was copied, whole."""

    token_ids: tuple[int, ...] = ()
    match_classes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    copied: Proposal | None = None

    def cut_by(self, constraint: Constraint, drafted: Sequence[int] = ()) -> Proposal:
        """Return the proposal, a chain without survival, up to the first token that breaks the form of the output.
        drafted: tokens before it."""
        num_allowed = len(constraint.allowed([*drafted, *self.token_ids])) - len(drafted)
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[: max(0, num_allowed)],
            match_classes=self.match_classes[: max(0, num_allowed)],
        )

    def with_survival(self, chances: Sequence[float]) -> Proposal:
        return Proposal(self.token_ids, self.match_classes, self.parents, tuple(chances), self.copied)


NOTHING = Proposal()


class LookupIndex:
    """The ends of each n-gram in a growing text. ngram: tokens that must match. shortest: tokens that suffice if no
    match is that long. source: OWN_TEXT or CORPUS."""

    def __init__(self, ngram: int, shortest: int | None = None, *, source: int = OWN_TEXT) -> None:
        self.ngram, self.shortest, self._source = ngram, shortest, source
        self._token_ids = array("i")
        self._ends = [_Ends(length) for length in range(ngram, (shortest or ngram) - 1, -1)]  # the longest first

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def begin_as(self, other: LookupIndex, num_tokens: int) -> None:
        """Begin with the first `num_tokens` of another index's text, as far as it goes, unless this one has a text."""
        if not self._token_ids:
            self._token_ids = other._token_ids[:num_tokens]
            for own, others in zip(self._ends, other._ends, strict=True):
                own.begin_as(others, len(self._token_ids))
                own.extend(self._token_ids)

    def extend_to(self, token_ids: Sequence[int], num_tokens: int | None = None, *, shorter: bool = True) -> None:
        """Extend the text to the first `num_tokens` of `token_ids`, by default to all. Each text begins with the text
        of the previous call. A text that is no longer than that changes nothing. shorter: whether `propose` may be
        asked for shorter matches next."""
        self.extend(token_ids[len(self._token_ids) : num_tokens], shorter=shorter)

    def extend(self, token_ids: Sequence[int], *, shorter: bool = True) -> None:
        self._token_ids.extend(token_ids)
        for ends in self._ends if shorter else self._ends[:1]:
            ends.extend(self._token_ids)

    def propose(self, num_tokens: int, drafted: Sequence[int] = (), *, shorter: bool = True) -> Proposal:
        """Propose at most `num_tokens` tokens that follow the text.

        drafted: tokens that follow the text for this call only. They are not indexed. shorter: see `propose_after`.
        """
        num_committed = len(self._token_ids)
        self._token_ids.extend(drafted)
        try:
            return self.propose_after(newest_of(self._token_ids, self.ngram), num_tokens, shorter=shorter)
        finally:
            del self._token_ids[num_committed:]

    def propose_after(self, newest: array[int], num_tokens: int, *, shorter: bool = True) -> Proposal:
        """Propose at most `num_tokens` tokens that follow the tokens `newest`, from the place with the longest match;
        of equal matches, from the latest. Newest tokens before the last `_LONGEST_MATCH` may be left out. shorter:
        whether fewer than `ngram` matching tokens may suffice."""
        if num_tokens <= 0 or not self._token_ids:
            return NOTHING
        for ends in self._ends if shorter else self._ends[:1]:
            found = sorted((self._matched(place, newest), place) for place in ends.of(newest[-ends.length :]))
            if found and found[-1][0] >= ends.length:
                num_matched, end = found.pop()
                needed = max(ends.length, _COMPARABLE * num_matched)
                others = [place for count, place in found if count >= needed]
                copied = self._token_ids[end : end + num_tokens]
                while len(copied) < num_tokens:  # at the end of the text, it continues from `end` again
                    copied += copied[: num_tokens - len(copied)]
                if END_OF_TEXT in copied:
                    del copied[copied.index(END_OF_TEXT) :]
                return Proposal(tuple(copied), match_classes(num_matched, self._supports(copied, others), self._source))
        return NOTHING

    def _supports(self, copied: array[int], others: Sequence[int]) -> list[int]:
        """Return the support of each token by the other places, as long as these continue like the proposal."""
        text = self._token_ids
        texts = [text[place : place + len(copied)] for place in others]
        lengths = [_num_equal(own, copied) for own in texts]
        differing = {length for length, own in zip(lengths, texts, strict=True) if length < len(own)}
        longest = max(lengths, default=0)
        return [AMBIGUOUS if at in differing else UNANIMOUS if at < longest else SINGLE for at in range(len(copied))]

    def _matched(self, end: int, newest: array[int]) -> int:
        """Return how many tokens before `end` equal the newest tokens."""
        text, longest = self._token_ids, min(end, len(newest))
        if text[end - longest : end] == newest[len(newest) - longest :]:
            return longest
        num_matched = 0
        while text[end - 1 - num_matched] == newest[-1 - num_matched]:
            num_matched += 1
        return num_matched


def _num_equal(some: array[int], others: array[int]) -> int:
    """Return the length of the longest common beginning of two texts, the first of which is not longer."""
    if some == others[: len(some)]:
        return len(some)
    return next(at for at, token in enumerate(some) if token != others[at])


def newest_of(text: Sequence[int], ngram: int = 0) -> array[int]:
    """Return the newest tokens of a text, as many as are compared."""
    return array("i", text[-max(ngram, _LONGEST_MATCH) :])


class _Ends:
    """The ends of the n-grams of one length, found by hash. Different n-grams may have the same hash. Sorted hashes
    find an n-gram of any text in a few comparisons and take 12 bytes a token. The newest n-grams are in a dict, until
    there are enough of them to be sorted in."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._hashes = np.empty(0, np.uint64)  # sorted; equal hashes stand in the order of the text
        self._starts = np.empty(0, np.int32)  # of the n-grams with these hashes
        self._newest: dict[tuple[int, ...], tuple[int, ...]] = {}  # the latest starts of the n-grams that follow
        self._num_starts = 0  # of both

    def begin_as(self, others: _Ends, num_tokens: int) -> None:
        """Take the sorted n-grams of others with the same length, which a token of the first `num_tokens` follows."""
        kept = others._starts < num_tokens - self.length
        self._hashes, self._starts = others._hashes[kept], others._starts[kept]
        self._num_starts = len(self._starts)

    def extend(self, text: array[int]) -> None:
        """Add the n-grams of the text that are not here yet. A proposal needs a token after its n-gram."""
        num_sorted, num_starts = len(self._starts), len(text) - self.length
        if num_starts <= self._num_starts:
            return
        num_new, num_unsorted = num_starts - self._num_starts, num_starts - num_sorted
        if num_new > _MAX_UNSORTED or num_unsorted > max(_MAX_UNSORTED, _UNSORTED_SHARE * num_sorted):
            new = _hashes(np.array(text[num_sorted:-1]).astype(np.uint64), self.length)
            order = np.argsort(new, kind="stable")
            at = np.searchsorted(self._hashes, new[order], side="right")
            self._starts = np.insert(self._starts, at, order + num_sorted)
            self._hashes = np.insert(self._hashes, at, new[order])
            self._newest = {}
        else:
            for start in range(self._num_starts, num_starts):
                ngram = tuple(text[start : start + self.length])
                self._newest[ngram] = (*self._newest.get(ngram, ())[1 - _MAX_PLACES :], start)
        self._num_starts = num_starts

    def of(self, ngram: Sequence[int]) -> list[int]:
        """Return where the latest n-grams with the hash of this one end, at most `_MAX_PLACES`."""
        if len(ngram) < self.length:
            return []
        starts = list(self._newest.get(tuple(ngram), ()))
        if len(self._hashes) and len(starts) < _MAX_PLACES:
            wanted = np.uint64(_hash_of(ngram))
            last = int(self._hashes.searchsorted(wanted, side="right"))
            if last and self._hashes[last - 1] == wanted:
                older = slice(max(0, last - _MAX_PLACES + len(starts)), last)
                starts = self._starts[older][self._hashes[older] == wanted].tolist() + starts
        return [start + self.length for start in starts]


def _hashes(tokens: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return the hash of each n-gram of this length, as `_hash_of` does."""
    num_ngrams = len(tokens) - length + 1
    hashes = tokens[:num_ngrams]
    for at in range(1, length):
        hashes = hashes * np.uint64(_MULTIPLIER) + tokens[at : at + num_ngrams]
    return hashes


def _hash_of(ngram: Sequence[int]) -> int:
    found = 0
    for token in ngram:
        found = found * _MULTIPLIER + token & _MASK
    return found


def match_classes(num_matched: int, supports: Sequence[int], source: int = OWN_TEXT) -> tuple[int, ...]:
    """Return the class of each looked-up token of a copy, by the number of matching tokens before it, its support
    (AMBIGUOUS, SINGLE or UNANIMOUS) and the copy's source (OWN_TEXT or CORPUS). num_matched: before the first token."""
    lengths = itertools.chain(_LENGTH_CLASSES[num_matched:], itertools.repeat(len(_LENGTHS) - 1))
    first = source * len(_COPIED)
    return tuple([first + support * len(_LENGTHS) + length for support, length in zip(supports, lengths, strict=False)])


def recycled_classes(probabilities: NDArray[np.float64], *, is_pair: bool) -> NDArray[np.int64]:
    """Return the classes of recycled tokens, by their probabilities when their place was last verified. is_pair:
    whether that place followed the same two tokens, or only the same token."""
    first = _NUM_COPIED + (len(_PROBABILITIES) if is_pair else 0)
    return first - 1 + np.searchsorted(_PROBABILITIES, probabilities, side="right")


def source_of(match_class: int) -> str:
    if match_class == FORCED:
        return "form"
    return ("own text", "corpus")[match_class // len(_COPIED)] if match_class < _NUM_COPIED else "recycled"


class LookupRecord:
    """Acceptance of a looked-up token by its class: how many tokens match before it, and whether other places in the
    text continue differently (as suffix decoding counts, Oliaro et al. 2024). Each accepted token adds one match, so a
    proposal passes through the classes. The classes separate text copied by the word from text copied by the page.

    Every round compares the proposal with the committed tokens, even if the proposal was not the draft. So acceptance
    is learned without trials.
    """

    def __init__(self) -> None:
        self._classes = [Discounted(TEXT_HALF_LIFE, prior=prior, strength=1) for prior in _PRIORS]
        self._by_class = list(_PRIORS)

    @property
    def by_class(self) -> tuple[float, ...]:
        return tuple(self._by_class)

    def observe_one(self, match_class: int, is_right: bool) -> None:
        self._classes[match_class].observe(is_right)
        self._by_class[match_class] = self._classes[match_class].value

    def observe(self, match_classes: Sequence[int], proposed: Sequence[int], committed: Sequence[int]) -> None:
        """Compare a proposal with the committed tokens, up to the first difference or the end of the shorter.

        match_classes: class of each proposed token.
        """
        for at, one, other in zip(match_classes, proposed, committed, strict=False):
            self.observe_one(at, one == other)
            if one != other:
                return


class Corpus:
    """The newest outputs, of `capacity` tokens at most. They are kept in two halves. When the newer half is full, the
    older half is forgotten. given: texts that are never forgotten, in addition."""

    def __init__(self, capacity: int, given: LookupIndex | None = None) -> None:
        self._most_tokens = capacity // 2
        self._given = (given,) if given is not None else ()
        self._halves = deque((_empty(),), maxlen=2)  # the newer first

    @property
    def num_tokens(self) -> int:
        return sum(half.num_tokens for half in self._halves)

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a text. Of one that is too long, the end is left out."""
        text = token_ids[: max(0, self._most_tokens - 1)]
        if self._halves[0].num_tokens + len(text) >= self._most_tokens:
            self._halves.appendleft(_empty())
        self._halves[0].extend([*text, END_OF_TEXT])

    def proposals(self, newest: array[int], num_tokens: int, *, shorter: bool = True) -> list[Proposal]:
        """Return what each half proposes after the tokens `newest`, the newer half first, and what the given texts
        propose. shorter: see `LookupIndex.propose_after`."""
        return [one.propose_after(newest, num_tokens, shorter=shorter) for one in (*self._halves, *self._given)]


def index_of(token_ids: Sequence[int]) -> LookupIndex | None:
    """Return the index of given texts, END_OF_TEXT between them; None without any."""
    if not token_ids:
        return None
    index = _empty()
    index.extend(token_ids)
    return index


def read_texts(name: str) -> Iterator[str]:
    """Yield the texts of a file, read on demand: a text file in parts, or the column "text" or "summary" of a
    JSON-lines or Parquet file, nulls left out. Raises ConfigError where no text can be read, or if there is none."""
    path = Path(name)
    readers = {".txt": _parts, ".md": _parts, ".jsonl": _of_lines, ".ndjson": _of_lines, ".parquet": _of_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _refusal(name, f"its type is not known; known are {', '.join(readers)}")
    is_empty = True
    try:
        for text in reader(path):
            yield text
            is_empty = False
    except OSError as error:
        raise _refusal(name, f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # the first is of JSON and UTF-8, too
        raise _refusal(name, str(error).partition("\n")[0]) from error
    if is_empty:
        raise _refusal(name, "it holds no text")


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"option 'corpus' is {name!r}: {reason}; name a file of texts in UTF-8, or leave the option out")


def _parts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        while content := file.read(_CHARACTERS_AT_ONCE):
            yield content


def _of_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        lines = iter(partial(file.readline, _MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"line {number} has more than {_MAX_LINE_BYTES} bytes")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # noqa: PLW2901
            if line.strip():
                try:
                    row = msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.MsgspecError as error:
                    raise ValueError(f"line {number} is no JSON object ({error})") from error
                yield from _text_of(row, f"line {number}")


def _of_parquet(path: Path) -> Iterator[str]:
    import pyarrow as pa  # noqa: PLC0415 - other files, and an engine without a corpus, do not need it
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, buffer_size=_BYTES_AT_ONCE) as file:
            names = [name for name in _COLUMNS if name in file.schema_arrow.names][:1]
            if names and file.schema_arrow.names.count(names[0]) > 1:
                raise ValueError(f"two columns are called {names[0]!r}")
            for kind in (file.schema_arrow.field(name).type for name in names):
                text = kind.value_type if pa.types.is_dictionary(kind) else kind
                if text not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):
                    # values of other types are not read: those of Ray's may be code, also in a list or struct
                    raise ValueError(f"column {names[0]!r} is {kind}, not text")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names):
                for row in batch.to_pylist():
                    yield from _text_of(row, "a row")
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _text_of(row: Mapping[str, Any], place: str) -> Iterator[str]:
    name = next((name for name in _COLUMNS if name in row), None)
    if name is None:
        raise ValueError(f"{place} has no column {' or '.join(map(repr, _COLUMNS))}")
    if (text := row[name]) is not None:
        if not isinstance(text, str):
            raise ValueError(f"column {name!r} of {place} is {type(text).__name__}, not text")
        if text:
            yield text


def tokenised(texts: Iterable[str], tokenizer: Any, *, vocab_size: int) -> Iterator[array[int]]:
    """Yield the tokens of texts, several short texts together and a long text in parts, END_OF_TEXT after each. It also
    stands in place of tokens that the model does not have. Raises RequestError, see `text_tokens`."""
    found = array("i")
    parts = (text[at : at + _CHARACTERS_AT_ONCE] for text in texts for at in range(0, len(text), _CHARACTERS_AT_ONCE))
    for part in parts:
        token_ids = text_tokens(part, tokenizer, add_special_tokens=False)
        found.extend(one if one < vocab_size else END_OF_TEXT for one in token_ids)
        found.append(END_OF_TEXT)
        if len(found) >= _MOST_AT_ONCE:
            yield from (found[at : at + _MOST_AT_ONCE] for at in range(0, len(found), _MOST_AT_ONCE))
            found = array("i")
    if found:
        yield found


def _empty() -> LookupIndex:
    return LookupIndex(_NGRAM, _SHORTEST_MATCH, source=CORPUS)
