"""What a job gained over plain decoding: for the terminal, and as a page that stands alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from pathlib import Path
from string import Template

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import rayspec
from rayspec.batch.rows import Row
from rayspec.machine import cpu_name, num_cores
from rayspec.types import EngineStats

_NUM_SHOWN = 2
_SHOWN_CHARS = 700
_LEAST_SHARE = 0.005
_PAGE = Path(__file__).with_name("comparison.html")
_SOURCES = {
    "own text": "copied from the document or from the text so far",
    "corpus": "copied from earlier texts",
    "recycled": "recycled: the tokens that were likely after the same token before",
    "model": "drafted by the model with sublayers left out",
}
_BY_MODEL = "written by the full model, token by token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A document with its text by plain decoding and by the fast strategy. document: its text."""

    name: str
    document: str
    plain: Row
    fast: Row

    @property
    def is_same(self) -> bool:
        """Whether both runs succeeded with the same text."""
        return self.plain.error_kind is None and self.fast.error_kind is None and self.plain.text == self.fast.text

    @property
    def speed_up(self) -> float | None:
        """Ratio of the decoding times."""
        return self.plain.decode_s / self.fast.decode_s if self.plain.decode_s and self.fast.decode_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The same documents by two jobs that ran one after the other. plain, fast: the statistics of their engines."""

    model: str
    pairs: Sequence[Pair]
    plain: EngineStats
    fast: EngineStats

    @property
    def num_same(self) -> int:
        return sum(pair.is_same for pair in self.pairs)

    @property
    def decoding(self) -> tuple[float, float]:
        """Tokens per second without the time for prompts: plain, fast."""
        return _rate(self.plain, self.plain.prefill_s), _rate(self.fast, self.fast.prefill_s)

    @property
    def in_all(self) -> tuple[float, float]:
        """Tokens per second with the time for prompts: plain, fast."""
        return _rate(self.plain), _rate(self.fast)

    @property
    def headline(self) -> str:
        return f"{_gain(*self.decoding)} plain decoding, {self.checked}"

    @property
    def checked(self) -> str:
        num = len(self.pairs)
        if self.num_same == num:
            return f"same text (checked: {num} of {num})"
        return f"but only {self.num_same} of {num} texts are the same"

    @property
    def sources(self) -> list[tuple[str, float]]:
        """Shares of the tokens by where they came from, largest first, without shares that would round to nothing. The
        full model's own tokens are last."""
        num_tokens = max(1, self.fast.num_generated_tokens)
        by_source = sorted(self.fast.accepted_by_source.items(), key=itemgetter(1), reverse=True)
        shares = [(_SOURCES.get(name, name), count / num_tokens) for name, count in by_source]
        left = 1 - sum(share for _, share in shares)
        return [*((name, share) for name, share in shares if share >= _LEAST_SHARE), (_BY_MODEL, left)]

    @property
    def examples(self) -> list[Pair]:
        """The first document of each kind, by the beginnings of their names, that has a text."""
        kinds = {pair.name.partition("-")[0]: pair for pair in reversed(self.pairs) if pair.fast.text}
        firsts = sorted(kinds.values(), key=self.pairs.index)
        more = [pair for pair in self.pairs if pair.fast.text and pair not in firsts]
        return [*firsts, *more][:_NUM_SHOWN]

    def shown(self) -> Iterator[RenderableType]:
        """Yield what the terminal shows."""
        examples = Table(show_lines=True, expand=True, padding=(0, 1))
        examples.add_column("document", ratio=1)
        examples.add_column("text with auto", ratio=1)
        for pair in self.examples:
            text = Text(_beginning(pair.document))
            examples.add_row(Text.assemble((pair.name, "bold"), "\n", text), Text((pair.fast.text or "").strip()))
        yield examples
        rates = Table(title=f"{len(self.pairs)} documents, tokens a second", title_justify="left")
        for heading in ("", "plain decoding", "auto", "gain"):
            rates.add_column(heading, justify="right" if heading else "left")
        for name, (plain, fast) in (("decoding", self.decoding), ("prompts included", self.in_all)):
            rates.add_row(name, f"{plain:.0f}", f"{fast:.0f}", f"{_ratio(plain, fast):.1f}x")
        yield rates
        yield "Tokens with auto: " + "; ".join(f"{100 * share:.0f} % {name}" for name, share in self.sources)
        yield Text(self.headline, style="bold")

    def html(self) -> str:
        """Return the report: one page without scripts or outside resources."""
        plain, fast = self.decoding
        cards = (
            (f"{_ratio(plain, fast):.1f}x", "speed of decoding, compared with plain decoding"),
            (f"{_ratio(*self.in_all):.1f}x", "with the time for prompts included"),
            (f"{plain:.0f} → {fast:.0f}", "decoded tokens a second"),
            (f"{self.num_same} of {len(self.pairs)}", "texts are the same as with plain decoding"),
        )
        widest = max((pair.speed_up or 0.0 for pair in self.pairs), default=1.0) or 1.0
        return Template(_PAGE.read_text(encoding="utf-8")).substitute(
            headline=escape(_capital(self.headline)),
            setting=escape(
                f"{len(self.pairs)} documents, model {self.model}, float32, one document at a time, on {num_cores()} "
                f"cores ({cpu_name()}). rayspec {rayspec.__version__}, {dt.datetime.now(tz=dt.timezone.utc).date()}."
            ),
            cards="".join(
                f"<div class=card><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in cards
            ),
            bars="".join(
                f'<i class=s{number} style="flex-grow:{1000 * share:.0f}"></i>'
                for number, (_, share) in enumerate(self.sources)
                if share > 0
            ),
            legend="".join(
                f"<li><i class=s{number}></i>{100 * share:.0f} % {escape(name)}</li>"
                for number, (name, share) in enumerate(self.sources)
            ),
            examples="".join(
                f"<div class=pair><div><h3>{escape(pair.name)}</h3><pre tabindex=0>{escape(pair.document)}</pre></div>"
                f"<div><h3>Text with auto</h3><p class=text>{escape((pair.fast.text or '').strip())}</p></div></div>"
                for pair in self.examples
            ),
            rows="".join(_html_row(pair, widest) for pair in self.pairs),
        )


def _html_row(pair: Pair, widest: float) -> str:
    gain = pair.speed_up
    shown = "-" if gain is None else f"{gain:.1f}x"
    cells = [
        f"<th scope=row>{escape(pair.name)}</th>",
        f"<td>{pair.fast.num_prompt_tokens}</td><td>{pair.fast.num_output_tokens}</td>",
        f"<td>{_seconds(pair.plain.decode_s)}</td><td>{_seconds(pair.fast.decode_s)}</td>",
        f'<td class=gain><i style="width:{100 * (gain or 0) / widest:.0f}%"></i><span>{shown}</span></td>',
        f"<td>{'yes' if pair.is_same else 'no'}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _rate(stats: EngineStats, without_s: float = 0.0) -> float:
    seconds = stats.total_s - without_s
    return stats.num_generated_tokens / seconds if seconds > 0 else 0.0


def _ratio(plain: float, fast: float) -> float:
    return fast / plain if plain else 0.0


def _gain(plain: float, fast: float) -> str:
    ratio = _ratio(plain, fast)
    return f"{ratio:.1f}x faster than" if ratio >= 1.05 else f"{ratio:.1f}x as fast as"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS].rpartition(" ")[0] + " ..."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
