"""Latency of a forward pass: seconds of each sublayer, of the head, of hops and of weight transfers.

A curve is fitted for each kind of sublayer on each device, from measurements on that very device.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rayspec.choices import FULL, SKIP, Choice, Choices, combinations, combined, weights_of
from rayspec.machine import write_at_once
from rayspec.types import RayspecError

Floats = NDArray[np.float64]

# Of a saved profile; a file that was edited may hold any number.
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]

FORMAT = "rayspec-latency-5"
HEAD, DRAFT_HEAD, OVERHEAD, ROUND, WAKE = "head", "draft head", "overhead", "round", "wake"
SEARCH = "search"
_FAR = 4096  # tokens of context
_MOST_LINES = 4096  # kept, of shapes of passes
_NUM_REWEIGHTINGS = 12
_OUTLIER_FLOOR = 1e-3  # relative errors below this count alike
_CHOICES = combinations(("int8", "int4", "window", "pages"))


class StaleProfileError(RayspecError):
    """A saved profile is unusable: for another model, device or version, or damaged. The remedy is to profile again."""

    kind = "stale_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one measured run over `rows` new tokens of `batch` sequences that held `context` tokens each.

    kind: of a sublayer, with a choice other than `full` appended (`kind_of`); a kind that starts with "attention" reads
    context. Or "head"; "draft head", its copy for drafts; "overhead", a forward outside sublayers and head; "round", a
    round outside its forwards; "wake", what a forward takes more after a pause in which other work used the caches;
    "search", what the host takes for a sublayer in a plan search.
    """

    kind: str
    rows: int
    context: int
    batch: int
    seconds: float
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """base(rows) + (sequence_s + masked_s * several) * (batch - 1) + (kv_s * batch + score_s * rows) * context, in s.

    base is piecewise linear through the measured row counts, because the time of GEMMs is a staircase. It never falls,
    is constant below the first knot and goes on beyond the last with the slope of the upper half. sequence_s: of each
    sequence but the first, as attention is called once per sequence. masked_s: more for a sequence with several rows,
    which need a mask. several: the share of such sequences, rows / batch - 1, at most 1.
    """

    rows: tuple[int, ...]
    base_s: tuple[_Seconds, ...]
    sequence_s: _Seconds = 0.0
    masked_s: _Seconds = 0.0
    kv_s: _Seconds = 0.0
    score_s: _Seconds = 0.0

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> Curve:
        """Fit a curve to measurements of one kind on one device. Repeated measurements count by their median."""
        repeats: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for each in measurements:
            repeats[each.rows, each.context, each.batch].append(each.seconds)
        cells = np.asarray(list(repeats), np.float64)
        seconds = np.asarray([float(np.median(values)) for values in repeats.values()])
        rows, context, batch = cells.T
        knots = np.unique(rows)
        columns = [rows[:, None] >= knots]  # base as a sum of steps up, each >= 0
        if cls.reads_context(measurements[0].kind):
            several = _several(rows, batch)
            columns += [
                column[:, None] for column in (batch - 1, several * (batch - 1), batch * context, rows * context)
            ]
        found = _robust_fit(np.concatenate(columns, axis=1).astype(np.float64), seconds)
        names = ("sequence_s", "masked_s", "kv_s", "score_s")
        return cls(
            rows=tuple(int(count) for count in knots),
            base_s=tuple(np.cumsum(found[: len(knots)]).tolist()),
            **dict(zip(names, found[len(knots) :].tolist(), strict=False)),
        )

    @staticmethod
    def reads_context(kind: str) -> bool:
        """Whether sublayers of this kind take longer with a longer context."""
        return kind.startswith("attention")

    def seconds(self, *, rows: float, context: float = 0, batch: float = 1) -> float:
        if rows <= 0:
            return 0.0
        base = float(np.interp(rows, self.rows, self.base_s)) + self._slope_s * max(rows - self.rows[-1], 0)
        calls_s = (self.sequence_s + self.masked_s * float(_several(rows, batch))) * max(batch - 1, 0)
        return base + calls_s + context * (self.kv_s * batch + self.score_s * rows)

    @property
    def _slope_s(self) -> float:
        """Seconds per row beyond the last knot, from the upper half of the knots: two close knots would give noise."""
        last = self.rows[-1]
        middle = max((k for k, count in enumerate(self.rows) if 2 * count <= last), default=0)
        if self.rows[middle] == last:
            return self.base_s[-1] / last
        return (self.base_s[-1] - self.base_s[middle]) / (last - self.rows[middle])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Seconds of forwards over `rows` new tokens of `batch` sequences that hold `context` tokens each.

    sublayers, head: names of curves; those of other choices have the choice in their names. overhead_s: of a forward,
    in addition to sublayers and head. round_s: of a round, in addition to its forwards. stages: stage of each sublayer.
    A forward hops from the first stage over the stages that run any sublayer to the last stage (head) and back; each
    hop takes hop_s and wake_s. link_s: measured seconds of a hop from each stage to the next, and from the last to the
    first; a hop that bypasses stages takes as long as the slowest link on its way. transfer_s: to fetch the weights of
    each sublayer, for every run with the target's own weights. rejected_s: that a later pass takes for a sequence of
    which rows were rejected. search_s: that the host takes for each sublayer in a plan search. measured_context,
    measured_batch: the largest measured.
    """

    sublayers: tuple[str, ...]
    curves: Mapping[str, Curve]
    head: str
    overhead_s: _Seconds = 0.0
    round_s: _Seconds = 0.0
    hop_s: _Seconds = 0.0
    link_s: tuple[_Seconds, ...] = ()
    wake_s: _Seconds = 0.0
    stages: tuple[int, ...]
    transfer_s: tuple[_Seconds, ...]
    rejected_s: _Seconds = 0.0
    search_s: _Seconds = 0.0
    measured_context: int = 0
    measured_batch: int = 1
    _lines: dict[tuple[Choices | None, float, float], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        missing = {*self.sublayers, self.head} - set(self.curves)
        if missing:
            raise ValueError(f"no curve for {sorted(missing)}; there are {sorted(self.curves)}: measure them too")
        for name, values in (("stages", self.stages), ("transfer_s", self.transfer_s)):
            if len(values) != len(self.sublayers):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.sublayers)} sublayers")

    @classmethod
    def fit(
        cls,
        measurements: Sequence[Measurement],
        sublayer_kinds: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        stages: Sequence[int] | None = None,
        link_s: Sequence[float] = (),
        transfer_s: Sequence[float] | None = None,
    ) -> LatencyModel:
        """Fit one curve for each kind and device in `measurements`. devices: of each sublayer, if there are several;
        the head is on the last one. Raises ValueError if a sublayer or the head has no measurement."""
        grouped: dict[str, list[Measurement]] = defaultdict(list)
        for each in measurements:
            grouped[_curve_name(each.kind, each.device)].append(each)
        found = {each.device for each in measurements}
        places = list(devices) if devices is not None else list(found) * len(sublayer_kinds)
        return cls(
            sublayers=tuple(map(_curve_name, sublayer_kinds, places)),
            curves={
                name: Curve.fit(group)
                for name, group in grouped.items()
                if group[0].kind not in (OVERHEAD, ROUND, WAKE, SEARCH)
            },
            head=_curve_name(HEAD, places[-1]),
            overhead_s=_median_s(measurements, OVERHEAD),
            round_s=_median_s(measurements, ROUND),
            hop_s=float(np.mean(link_s)) if link_s else 0.0,
            link_s=tuple(link_s),
            wake_s=_median_s(measurements, WAKE),
            search_s=_median_s(measurements, SEARCH),
            stages=tuple(stages) if stages is not None else (0,) * len(sublayer_kinds),
            transfer_s=tuple(transfer_s) if transfer_s is not None else (0.0,) * len(sublayer_kinds),
            measured_context=max(each.context for each in measurements),
            measured_batch=max(each.batch for each in measurements),
        )

    def covers(self, cells: Iterable[tuple[int, int, int]]) -> bool:
        """Whether the measurements reach the context and batch of all cells (rows, context, batch)."""
        return all(context <= self.measured_context and batch <= self.measured_batch for _, context, batch in cells)

    def sublayer_s(self, sublayer: int, *, rows: float, context: float, batch: float, choice: Choice = FULL) -> float:
        """Return the seconds of one sublayer, its weight transfer included; 0 without rows, and for skip."""
        if rows <= 0 or choice == SKIP:
            return 0.0
        computing_s = self._curve(self.sublayers[sublayer], choice).seconds(rows=rows, context=context, batch=batch)
        return computing_s + (self.transfer_s[sublayer] if weights_of(choice) == FULL else 0.0)

    def sublayers_s(
        self, *, rows: float, context: float, batch: float, choices: Sequence[Choice] | None = None
    ) -> Floats:
        """Return [num_sublayers]: `sublayer_s` of each sublayer by its choice; all in full without `choices`."""
        if rows <= 0:
            return np.zeros(len(self.sublayers))
        ways = list(zip(self.sublayers, (FULL,) * len(self.sublayers) if choices is None else choices, strict=True))
        computing_s = {
            way: self._curve(*way).seconds(rows=rows, context=context, batch=batch)
            for way in set(ways)
            if way[1] != SKIP
        }
        found = np.asarray([computing_s.get(way, 0.0) for way in ways], np.float64)
        if not any(self.transfer_s):
            return found
        is_fetched = [choice != SKIP and weights_of(choice) == FULL for _, choice in ways]
        return found + np.where(is_fetched, self.transfer_s, 0.0)

    def choices_of(self, sublayer: int) -> tuple[Choice, ...]:
        """Return the choices of a sublayer that were measured, with `full` first and `skip` last."""
        name = self.sublayers[sublayer]
        measured = (choice for choice in _CHOICES if choice != FULL and _chosen_name(name, choice) in self.curves)
        return (FULL, *measured, SKIP)

    def _curve(self, name: str, choice: Choice) -> Curve:
        """Return the curve of sublayers like `name` by another choice. Raises ValueError for one not measured."""
        if (curve := self.curves.get(_chosen_name(name, choice))) is None:
            raise ValueError(f"choice {choice!r} was not measured for {name!r}: name it in 'speculation.choices'")
        return curve

    def head_s(self, rows: float, *, drafting: bool = False) -> float:
        of_drafts = self.curves.get(self.head.replace(HEAD, DRAFT_HEAD, 1)) if drafting else None
        return (of_drafts or self.curves[self.head]).seconds(rows=rows)

    def hops_s(self, choices: Sequence[Choice]) -> float:
        """Return the seconds of hops in a forward; stages whose sublayers are all skipped are bypassed."""
        if not self.stages or self.hop_s + self.wake_s == 0:
            return 0.0
        first, last = self.stages[0], self.stages[-1]
        visited = [stage for stage, choice in zip(self.stages, choices, strict=True) if choice != SKIP]
        hops = [hop for hop in itertools.pairwise([first, *visited, last, first]) if hop[0] != hop[1]]
        if not self.link_s:
            return (self.hop_s + self.wake_s) * len(hops)
        count = len(self.link_s)
        slowest_s = (
            max(self.link_s[link % count] for link in range(here, there if here < there else there + count))
            for here, there in hops
        )
        return sum(slowest_s) + self.wake_s * len(hops)

    def draft_step_s(self, choices: Choices, *, context: float, batch: float) -> float:
        """Return the seconds of a draft step: one row of each sequence through the sublayers and the head."""
        return self._pass_s(choices, rows=batch, context=context, batch=batch)

    def verify_s(self, *, rows: float, context: float, batch: float) -> float:
        """Return the seconds of one forward of the target over `rows` rows."""
        return self._pass_s(None, rows=rows, context=context, batch=batch)

    def _pass_s(self, choices: Choices | None, *, rows: float, context: float, batch: float) -> float:
        """Return the seconds of a forward: of a draft by these choices, or else of the target. Every round asks several
        times, and all curves are linear in the context. So the sum's intercept and slope are kept."""
        key = (choices, rows, batch)
        line = self._lines.get(key)  # once: another thread may clear them
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._lines.clear()
            ways, drafting = choices or (FULL,) * len(self.sublayers), choices is not None
            near_s, far_s = (
                float(self.sublayers_s(rows=rows, context=far, batch=batch, choices=ways).sum()) for far in (0, _FAR)
            )
            fixed_s = self.head_s(rows, drafting=drafting) + self.overhead_s + self.hops_s(ways)
            line = self._lines[key] = near_s + fixed_s, (far_s - near_s) / _FAR
        least, slope = line
        return least + slope * context

    def decode_step_s(self, *, context: float, batch: float) -> float:
        """Return the seconds of a round without a draft: one row of each sequence, and the round's overhead."""
        return self.verify_s(rows=batch, context=context, batch=batch) + self.round_s

    def row_s(self, *, context: float, batch: float) -> float:
        """Return the seconds of one more row of one sequence in a verify."""
        one, many = (self.verify_s(rows=rows * batch, context=context, batch=batch) for rows in (1, 8))
        return (many - one) / (7 * batch)

    def save(self, path: str | os.PathLike[str], key: Mapping[str, Any]) -> None:
        """Write JSON, atomically. key: the conditions under which the numbers hold: model, dtype, device, versions."""
        model = {name: value for name, value in dataclasses.asdict(self).items() if not name.startswith("_")}
        content = {"format": FORMAT, "key": dict(key), "model": model}
        write_at_once(Path(path), json.dumps(content, indent=1, sort_keys=True).encode())

    def _measured(self) -> LatencyModel:
        """Return itself. Raises ValueError for curves that no measurement gives, as in a file that was edited."""
        for name, curve in self.curves.items():
            rows, base_s = curve.rows, curve.base_s
            is_rising = all(a < b for a, b in itertools.pairwise(rows)) and list(base_s) == sorted(base_s)
            if not rows or len(rows) != len(base_s) or rows[0] < 1 or not is_rising:
                raise ValueError(f"the curve {name!r} has the times {base_s} for the rows {rows}")
        sublayers_s = float(self.sublayers_s(rows=1, context=0, batch=1).sum())
        if not all((sublayers_s, self.head_s(1), self.head_s(1, drafting=True))):
            raise ValueError("the sublayers or the head take no time")
        for sublayer in range(len(self.sublayers)):
            choices = [choice for choice in self.choices_of(sublayer) if choice != SKIP]
            if lacking := {combined(weights_of(choice), "all") for choice in choices}.difference(choices):
                raise ValueError(f"{self.sublayers[sublayer]!r} has no curve of {sorted(lacking)}")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: Mapping[str, Any]) -> LatencyModel:
        """Read a model that was saved under this key. Raises FileNotFoundError; StaleProfileError, with the reason."""
        try:
            content = msgspec.json.decode(Path(path).read_bytes(), type=_Saved)
            if content.format != FORMAT:
                raise StaleProfileError(f"profile {path} has format {content.format!r}, not {FORMAT!r}: profile again")
            saved, wanted = content.key, json.loads(json.dumps(dict(key)))
            differing = [
                f"{name} is {saved.get(name)!r}, not {wanted.get(name)!r}"
                for name in sorted({*saved, *wanted})
                if saved.get(name) != wanted.get(name)
            ]
            if differing:
                raise StaleProfileError(f"profile {path} is for something else: {'; '.join(differing)}: profile again")
            return msgspec.json.decode(content.model, type=cls)._measured()
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise StaleProfileError(f"profile {path} is not readable ({error!r}): profile again") from error


class _Saved(msgspec.Struct):
    format: str
    key: dict[str, Any]
    model: msgspec.Raw


def _robust_fit(matrix: Floats, target: Floats) -> Floats:
    """Return an x >= 0 that makes the relative errors of matrix x against target > 0 small; outliers hardly count:
    least absolute deviations by reweighting. A column that depends linearly on the columns before it gets 0."""
    from scipy.optimize import nnls  # noqa: PLC0415 (the import takes a third of a second; a saved profile needs none)

    relative = matrix / target[:, None]
    norms = np.linalg.norm(relative, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    scaled = relative / scale
    ranks = [0, *(int(np.linalg.matrix_rank(scaled[:, : count + 1])) for count in range(scaled.shape[1]))]
    scaled[:, np.diff(ranks) == 0] = 0.0
    weight = np.ones(len(target))
    for _ in range(_NUM_REWEIGHTINGS + 1):
        solution, _ = nnls(scaled * weight[:, None], weight)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(scaled @ solution - 1.0), _OUTLIER_FLOOR))
    return np.asarray(solution / scale)


def _several(rows: Floats | float, batch: Floats | float) -> Floats:
    """Return the share of the sequences that have several rows, if the rows are distributed evenly."""
    return np.clip(np.asarray(rows) / np.maximum(batch, 1) - 1, 0.0, 1.0)


def kind_of(sublayer_kind: str, choice: Choice) -> str:
    """Return the kind under which sublayers that run by this choice are measured."""
    return sublayer_kind if choice == FULL else f"{sublayer_kind} {choice}"


def _curve_name(kind: str, device: str) -> str:
    return f"{kind}@{device}" if device else kind


def _chosen_name(name: str, choice: Choice) -> str:
    """Return the name of a choice's curve. name: curve of the same sublayer in full."""
    kind, _, device = name.partition("@")
    return _curve_name(kind_of(kind, choice), device)


def _median_s(measurements: Sequence[Measurement], kind: str) -> float:
    seconds = [each.seconds for each in measurements if each.kind == kind]
    return float(np.median(seconds)) if seconds else 0.0
