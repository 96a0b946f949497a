"""Synthetic audit reports with extractive summaries: seeded, licence-free, of any length.

A summary is the report's title and its findings, word for word. Findings and background use disjoint halves of the
vocabulary, and no word is repeated too soon: so a model needs only induction, to copy what follows its newest words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXTS: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
WORDS: Mapping[str, Sequence[str]] = {
    **_TEXTS["words"],
    "year": [str(year) for year in range(1990, 2030)],
    "count": [str(count) for count in (*range(2, 100), *range(100, 1000), *range(1000, 2001, 50))],
}
_FINDINGS, _BACKGROUND = _TEXTS["findings"], _TEXTS["background"]  # templates of sentences
_PARTIES, _HEADINGS = _TEXTS["parties"], _TEXTS["headings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    title: str
    findings: tuple[str, ...]
    text: str

    @property
    def summary(self) -> str:
        """The title and the findings, a line each, word for word as in `text`."""
        return "\n".join((self.title, *self.findings))


def generate_report(seed: int, *, num_sentences: int, num_findings: int | None = None) -> Report:
    """Generate the report of a seed. Equal arguments give equal reports.

    `num_sentences` counts the findings; a sentence is about 15 tokens of the demo tokenizer. Without `num_findings`
    the seed chooses 3 to 8. Raises `ValueError` unless 1 <= num_findings <= num_sentences.
    """
    rng = random.Random(seed)
    if num_findings is None:
        num_findings = min(rng.choice(range(3, 9)), num_sentences)
    if not 1 <= num_findings <= num_sentences:
        raise ValueError(
            f"num_findings={num_findings} does not fit num_sentences={num_sentences}: it must be at least 1 and at "
            "most num_sentences"
        )
    own, others = {}, {}  # words for findings and for the background: kinds that both need are halved
    for kind, words in WORDS.items():
        shuffled = tuple(rng.sample(words, len(words)))
        share = len(words) // 2 if any(f"{{{kind}}}" in template for template in _BACKGROUND) else 0
        own[kind], others[kind] = shuffled[share:], shuffled[:share]
    finding_words, background_words = _Words(own, rng), _Words(others, rng)
    title = "Review of the {program} program of the {office} in {place}, {year}".format_map(finding_words)
    findings = tuple(
        f"Finding {number}: {_sentence(rng.choice(_FINDINGS), finding_words)}" for number in range(1, num_findings + 1)
    )
    positions = set(rng.sample(range(num_sentences), num_findings))
    upcoming = iter(findings)
    sentences = [
        next(upcoming) if position in positions else _sentence(rng.choice(_BACKGROUND), background_words)
        for position in range(num_sentences)
    ]
    # Lines of 3 to 7 sentences; about every third line has a numbered heading before it.
    lines, section, start = [title], 0, 0
    while start < len(sentences):
        if rng.random() < 0.35:
            section += 1
            lines.append(f"{section}. {rng.choice(_HEADINGS)}")
        end = start + rng.randint(3, 7)
        lines.append(" ".join(sentences[start:end]))
        start = end
    return Report(title=title, findings=findings, text="\n".join(lines))


class _Words:
    """Fills the fields of a template. No word occurs twice before every other word of its kind has occurred once."""

    def __init__(self, words: Mapping[str, Sequence[str]], rng: random.Random) -> None:
        self._words = words
        self._rng = rng
        self._unused: dict[str, list[str]] = {}
        self._last: dict[str, str] = {}

    def __getitem__(self, field: str) -> str:
        rng = self._rng
        if field in self._words:
            if not self._unused.get(field):
                self._unused[field] = rng.sample(self._words[field], len(self._words[field]))
            self._last[field] = self._unused[field].pop()
            return self._last[field]
        composed: Mapping[str, Callable[[], object]] = {
            "office": lambda: f"{self['sector']} {self['body']}",
            "total": lambda: int(self._last["count"]) + rng.randint(5, 400),
            "later_year": lambda: int(self._last["year"]) + rng.randint(1, 9),
            "money": lambda: f"${rng.randint(1, 99)}.{rng.randint(0, 9)} {rng.choice(WORDS['unit'])}",
            "party": lambda: rng.choice(_PARTIES),
            "small": lambda: rng.randint(2, 99),
            "digit": lambda: rng.randint(1, 9),
        }
        if field == "an_adjective":
            adjective = self["adjective"]
            return f"{'an' if adjective[0] in 'aeiou' else 'a'} {adjective}"
        return str(composed[field]())


def _sentence(template: str, words: _Words) -> str:
    text = template.format_map(words)
    return f"{text[0].upper()}{text[1:]}."
