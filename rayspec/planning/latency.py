"""What a forward costs: seconds of each sublayer, of the head, of hops and of weight transfers.

A curve is fitted for each kind of sublayer on each device, from measurements on that very device. Nothing is assumed
about which kind is the heavy one, and there is no cap on their ratio.
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
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import FULL, SKIP, Choice, combinations, weights_of
from rayspec.planning.least_squares import independent_columns, robust_relative_fit
from rayspec.types import RayspecError

Floats = NDArray[np.float64]

FORMAT = "rayspec-latency-3"
HEAD, OVERHEAD, ROUND, WAKE = "head", "overhead", "round", "wake"
_FAR = 4096  # tokens of context
_CHOICES = combinations(("int8", "int4", "window", "pages"))


class StaleProfileError(RayspecError):
    """A saved profile cannot be used: another model, device or version, or not a profile at all. Profile again."""

    kind = "stale_profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one run.

    kind: "attention", "mlp", or any other kind of sublayer (one that starts with "attention" reads context), with the
        choice behind it where that is not `full`, as `kind_of` names it; "head";
        "overhead", what a forward costs outside sublayers and head; "round", what a round costs outside its forwards;
        "wake", by how much a forward is slower after a pause in which others had the caches.
    rows: new tokens in total over the batch. context: tokens that each sequence already held. batch: sequences.
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

    base is piecewise linear through the measured row counts (what GEMMs cost is a staircase rather than a line),
    never falls, is constant below the first knot and goes on beyond the last with the slope of the upper half. From a
    single knot it grows in proportion. sequence_s: of each sequence but the first, which base contains; attention is
    called once a sequence. masked_s: more for a sequence with several rows, which need a mask; several, the share of
    such sequences, is rows / batch - 1, and 1 at most. residual: median relative error on the measurements.
    """

    rows: tuple[int, ...]
    base_s: tuple[float, ...]
    sequence_s: float = 0.0
    masked_s: float = 0.0
    kv_s: float = 0.0
    score_s: float = 0.0
    residual: float = 0.0

    CONTEXT_KIND: ClassVar[str] = "attention"

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> Curve:
        """From measurements of one kind on one device. Repeats count by their median."""
        repeats: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for each in measurements:
            if each.rows < 1 or each.context < 0 or each.batch < 1 or not 0 < each.seconds < float("inf"):
                raise ValueError(f"{each} cannot be: rows and batch start at 1, context at 0, seconds above 0")
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
        matrix = np.concatenate(columns, axis=1).astype(np.float64)
        matrix[:, ~independent_columns(matrix)] = 0.0  # what the measurements do not tell is base's
        found = robust_relative_fit(matrix, seconds)
        sequence_s, masked_s, kv_s, score_s = found[len(knots) :] if len(columns) > 1 else (0.0, 0.0, 0.0, 0.0)
        return cls(
            rows=tuple(int(count) for count in knots),
            base_s=tuple(float(value) for value in np.cumsum(found[: len(knots)])),
            sequence_s=float(sequence_s),
            masked_s=float(masked_s),
            kv_s=float(kv_s),
            score_s=float(score_s),
            residual=float(np.median(np.abs(matrix @ found / seconds - 1))),
        )

    @classmethod
    def reads_context(cls, kind: str) -> bool:
        """Whether sublayers of this kind take longer with a longer context."""
        return kind.startswith(cls.CONTEXT_KIND)

    def seconds(self, *, rows: float, context: float = 0, batch: float = 1) -> float:
        if rows <= 0:
            return 0.0
        base = float(np.interp(rows, self.rows, self.base_s)) + self._slope_s * max(rows - self.rows[-1], 0)
        calls_s = (self.sequence_s + self.masked_s * float(_several(rows, batch))) * max(batch - 1, 0)
        return base + calls_s + context * (self.kv_s * batch + self.score_s * rows)

    @property
    def _slope_s(self) -> float:
        """Seconds a row beyond the last knot, over the upper half: two close knots would make it a matter of noise."""
        last = self.rows[-1]
        middle = max((k for k, count in enumerate(self.rows) if 2 * count <= last), default=0)
        if self.rows[middle] == last:
            return self.base_s[-1] / last
        return (self.base_s[-1] - self.base_s[middle]) / (last - self.rows[middle])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Seconds of forwards over `rows` new tokens of `batch` sequences that hold `context` tokens each.

    sublayers: name of the curve of each sublayer in full; one by another choice has a curve with the choice in its
    name, where that was measured. head: name of the head's curve. overhead_s: of a forward; round_s:
    of a round, on top of its forwards. stages: stage of each sublayer; a forward hops from the first stage (embedding)
    over the stages where something is kept to the last (head) and back, hop_s each, and each has been idle until then,
    which costs wake_s. transfer_s: to bring the weights of each sublayer, whenever it runs. measured_context,
    measured_batch: the longest context and the most sequences among the measurements.
    """

    sublayers: tuple[str, ...]
    curves: Mapping[str, Curve]
    head: str
    overhead_s: float = 0.0
    round_s: float = 0.0
    hop_s: float = 0.0
    wake_s: float = 0.0
    stages: tuple[int, ...]
    transfer_s: tuple[float, ...]
    measured_context: int = 0
    measured_batch: int = 1
    _lines: dict[tuple[float, float], tuple[float, float]] = field(
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
        hop_s: float = 0.0,
        transfer_s: Sequence[float] | None = None,
    ) -> LatencyModel:
        """One curve for each kind and device in `measurements`.

        devices: of each sublayer, needed if the measurements come from several; the head is on the last one. Raises
        ValueError if a sublayer or the head has no measurement.
        """
        if not sublayer_kinds:
            raise ValueError("sublayer_kinds is empty: name the kind of each sublayer")
        grouped: dict[str, list[Measurement]] = defaultdict(list)
        for each in measurements:
            grouped[_curve_name(each.kind, each.device)].append(each)
        found = {each.device for each in measurements}
        if devices is None and len(found) > 1:
            raise ValueError(f"measurements come from {sorted(found)}: tell the device of each sublayer in `devices`")
        places = list(devices) if devices is not None else list(found or {""}) * len(sublayer_kinds)
        return cls(
            sublayers=tuple(map(_curve_name, sublayer_kinds, places)),
            curves={
                name: Curve.fit(group)
                for name, group in grouped.items()
                if group[0].kind not in (OVERHEAD, ROUND, WAKE)
            },
            head=_curve_name(HEAD, places[-1]),
            overhead_s=_median_s(measurements, OVERHEAD),
            round_s=_median_s(measurements, ROUND),
            hop_s=hop_s,
            wake_s=_median_s(measurements, WAKE),
            stages=tuple(stages) if stages is not None else (0,) * len(sublayer_kinds),
            transfer_s=tuple(transfer_s) if transfer_s is not None else (0.0,) * len(sublayer_kinds),
            measured_context=max(each.context for each in measurements),
            measured_batch=max(each.batch for each in measurements),
        )

    def covers(self, cells: Iterable[tuple[int, int, int]]) -> bool:
        """Whether contexts as long and batches as large as in cells of (rows, context, batch) were measured."""
        return all(context <= self.measured_context and batch <= self.measured_batch for _, context, batch in cells)

    def sublayer_s(self, sublayer: int, *, rows: float, context: float, batch: float, choice: Choice = FULL) -> float:
        """Seconds of one sublayer, its weight transfer included; 0 for no rows."""
        if rows <= 0 or choice == SKIP:
            return 0.0
        computing_s = self._computing_s(self.sublayers[sublayer], choice, rows, context, batch)
        return computing_s + (self.transfer_s[sublayer] if weights_of(choice) == FULL else 0.0)

    def sublayers_s(
        self, *, rows: float, context: float, batch: float, choices: Sequence[Choice] | None = None
    ) -> Floats:
        """[num_sublayers]: `sublayer_s` of each by its choice, in full without `choices`."""
        if rows <= 0:
            return np.zeros(len(self.sublayers))
        ways = list(zip(self.sublayers, (FULL,) * len(self.sublayers) if choices is None else choices, strict=True))
        computing_s = {way: self._computing_s(*way, rows, context, batch) for way in set(ways)}
        found = np.asarray([computing_s[way] for way in ways], np.float64)
        if not any(self.transfer_s):
            return found
        is_fetched = [choice != SKIP and weights_of(choice) == FULL for _, choice in ways]
        return found + np.where(is_fetched, self.transfer_s, 0.0)

    def choices_of(self, sublayer: int) -> tuple[Choice, ...]:
        """By which it can run, for all that was measured: `full` first, not to run it last."""
        name = self.sublayers[sublayer]
        measured = (choice for choice in _CHOICES if choice != FULL and _chosen_name(name, choice) in self.curves)
        return (FULL, *measured, SKIP)

    def _computing_s(self, name: str, choice: Choice, rows: float, context: float, batch: float) -> float:
        """Of a sublayer with this curve, without its transfer."""
        if choice == SKIP:
            return 0.0
        if (curve := self.curves.get(_chosen_name(name, choice))) is None:
            raise ValueError(f"choice {choice!r} was not measured for {name!r}: name it in 'speculation.choices'")
        return curve.seconds(rows=rows, context=context, batch=batch)

    def head_s(self, rows: float) -> float:
        return self.curves[self.head].seconds(rows=rows)

    def hops_s(self, choices: Sequence[Choice]) -> float:
        """Seconds between stages in a forward; those whose sublayers are all skipped are bypassed."""
        hop_s = self.hop_s + self.wake_s
        if not self.stages or hop_s == 0:
            return 0.0
        first, last = self.stages[0], self.stages[-1]
        route = [
            first,
            *(stage for stage, choice in zip(self.stages, choices, strict=True) if choice != SKIP),
            last,
            first,
        ]
        return hop_s * sum(here != there for here, there in itertools.pairwise(route))

    def draft_step_s(self, choices: Sequence[Choice], *, context: float, batch: float) -> float:
        """One draft step: one row of each sequence through the sublayers, by their choices, and the head."""
        sublayers = self.sublayers_s(rows=batch, context=context, batch=batch, choices=choices)
        return self._forward_s(float(sublayers.sum()), batch, choices)

    def verify_s(
        self, *, rows: float, context: float, batch: float, from_sublayer: int = 0, leading_rows: float = 0
    ) -> float:
        """One forward of the target over `rows` rows.

        Where the draft has run the sublayers before `from_sublayer` already, only `leading_rows` rows still need them:
        usually one a sequence, because the last token drafted has not been run at all.
        """
        if from_sublayer == 0:
            return self._whole_s(rows, context, batch)
        sublayers = self.sublayers_s(rows=rows, context=context, batch=batch)[from_sublayer:].sum()
        leading = self.sublayers_s(rows=leading_rows, context=context, batch=batch)[:from_sublayer].sum()
        return self._forward_s(float(sublayers + leading), rows, (FULL,) * len(self.sublayers))

    def decode_step_s(self, *, context: float, batch: float) -> float:
        """A whole round without a draft: one row of each sequence through everything, and the round's overhead."""
        return self._whole_s(batch, context, batch) + self.round_s

    def row_s(self, *, context: float, batch: float) -> float:
        """One more row of one sequence in a verify."""
        one, many = (self.verify_s(rows=rows * batch, context=context, batch=batch) for rows in (1, 8))
        return (many - one) / (7 * batch)

    def _whole_s(self, rows: float, context: float, batch: float) -> float:
        """A forward of the target. It is asked in every round. All curves are lines in the context: what is kept is
        theirs, for each number of rows and sequences."""
        if (rows, batch) not in self._lines:
            ends = [
                self._forward_s(
                    float(self.sublayers_s(rows=rows, context=far, batch=batch).sum()),
                    rows,
                    (FULL,) * len(self.sublayers),
                )
                for far in (0, _FAR)
            ]
            self._lines[rows, batch] = ends[0], (ends[1] - ends[0]) / _FAR
        least, slope = self._lines[rows, batch]
        return least + slope * context

    def _forward_s(self, sublayers_s: float, rows: float, choices: Sequence[Choice]) -> float:
        return sublayers_s + self.head_s(rows) + self.overhead_s + self.hops_s(choices)

    def save(self, path: str | os.PathLike[str], key: Mapping[str, Any]) -> None:
        """Writes JSON, whole or not at all. `key` says what the numbers hold for: model, dtype, device, versions."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
        model = {name: value for name, value in dataclasses.asdict(self).items() if not name.startswith("_")}
        content = {"format": FORMAT, "key": dict(key), "model": model}
        scratch.write_text(json.dumps(content, indent=1, sort_keys=True))
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], key: Mapping[str, Any]) -> LatencyModel:
        """What `save` wrote under the same key. Raises FileNotFoundError, or StaleProfileError saying what differs."""
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise StaleProfileError(
                    f"profile {path} has format {content['format']!r}, not {FORMAT!r}: profile again"
                )
            saved, wanted = content["key"], json.loads(json.dumps(dict(key)))
            names = [name for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]
            differing = [f"{name} is {saved.get(name)!r}, not {wanted.get(name)!r}" for name in names]
            if differing:
                raise StaleProfileError(f"profile {path} is for something else: {'; '.join(differing)}: profile again")
            return cls._from_json(content["model"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StaleProfileError(f"profile {path} is not readable ({error!r}): delete it") from error

    @classmethod
    def _from_json(cls, values: Mapping[str, Any]) -> LatencyModel:
        curves = {
            name: Curve(**{**curve, "rows": tuple(curve["rows"]), "base_s": tuple(curve["base_s"])})
            for name, curve in values["curves"].items()
        }
        lists = {name: tuple(values[name]) for name in ("sublayers", "stages", "transfer_s")}
        return cls(**{**values, **lists, "curves": curves})


def _several(rows: Floats | float, batch: Floats | float) -> Floats:
    """Share of the sequences that have several rows, where the rows are dealt evenly."""
    return np.clip(np.asarray(rows) / np.maximum(batch, 1) - 1, 0.0, 1.0)


def kind_of(sublayer_kind: str, choice: Choice) -> str:
    """The kind of measurements of sublayers that run by this choice."""
    return sublayer_kind if choice == FULL else f"{sublayer_kind} {choice}"


def _curve_name(kind: str, device: str) -> str:
    return f"{kind}@{device}" if device else kind


def _chosen_name(name: str, choice: Choice) -> str:
    """Of the curve of a choice. name: of that of the sublayer in full."""
    kind, _, device = name.partition("@")
    return _curve_name(kind_of(kind, choice), device)


def _median_s(measurements: Sequence[Measurement], kind: str) -> float:
    seconds = [each.seconds for each in measurements if each.kind == kind]
    return float(np.median(seconds)) if seconds else 0.0
