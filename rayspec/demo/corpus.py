"""Synthetic audit reports with extractive summaries: seeded, licence-free, of any length.

A report is a title, sections of background sentences, and a few numbered findings among them. Its summary is the title
and the findings, word for word. Findings and background use disjoint halves of the vocabulary, and findings repeat no
word until their half is used up: so a model needs only induction, to copy what follows its newest words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


WORDS: Mapping[str, tuple[str, ...]] = {
    "sector": _split(
        "Harbor Forest Transit Water Energy Housing Health Land School Court Postal Customs Fisheries Aviation Rail "
        "Archive Census Bridge Grain Tariff Parks Coast Museum Prison"
    ),
    "body": _split("Office Bureau Agency Board Department Commission Authority Council Service Trust"),
    "place": _split(
        "Alder Barrow Calder Denby Elmswick Farrow Glenside Hartley Ilkeston Jarrow Kelso Linton Marlow Norwick Otley "
        "Penrith Quarrington Redcar Selby Tarrant Ulverton Venn Wexley Yarm Zeal Ashby Brigg Corby Dover Exton Frome "
        "Grays Holt Ives Kirkby Leek Maldon Neath Oakham Pinner"
    ),
    "program": _split(
        "dredging licensing inspection procurement training maintenance relief leasing mapping recruitment "
        "disposal storage modernization subsidy outreach monitoring insurance planning recycling zoning"
    ),
    "items": _split(
        "contracts permits vehicles invoices claims records licences buildings pumps terminals boats bridges surveys "
        "payments grants audits meters wells leases schools"
    ),
    "adjective": _split(
        "regional annual internal revised interim joint central local special routine seasonal "
        "external temporary national quarterly monthly"
    ),
    "month": _split("January February March April May June July August September October November December"),
    "verb": _split(
        "reviewed approved lost replaced delayed rejected sold repaired duplicated cancelled transferred renewed"
    ),
    "cause": (
        "a shortage of staff",
        "an outdated register",
        "a late budget",
        "poor supervision",
        "a change of supplier",
        "storm damage",
        "a dispute with the union",
        "missing receipts",
        "weak controls",
        "a faulty database",
        "unclear guidance",
        "a court order",
    ),
    "unit": ("million", "thousand"),
    "year": tuple(str(year) for year in range(1990, 2030)),
    "count": tuple(str(count) for count in (*range(2, 100), *range(100, 1000), *range(1000, 2001, 50))),
}

_FINDINGS = (
    "the {office} {verb} {count} of {total} {items} in {year} because of {cause}",
    "the {office} spent {money} on {items} in {place} without approval",
    "{items} worth {money} were missing from the {adjective} register of the {office}",
    "the {office} paid a supplier in {place} {money} more than agreed for {program}",
    "the cost of {program} in {place} rose from {money} to {money} by {year}",
    "{count} {items} in {place} had not been inspected since {year}",
    "the {office} could not explain {money} of spending on {program}",
    "the {office} closed {count} {items} in {place} after {cause}",
    "the {office} met its target for {program} in {month} {year} only",
    "{cause} delayed {program} in {place} until {month} {year}",
    "the {office} {verb} {count} {items} without telling its staff in {place}",
    "only {count} of {total} {items} in {place} met the {adjective} standard in {year}",
)

_BACKGROUND = (
    "{party} was established in {year} to oversee {program} in {place}",
    "in {month} {year}, {party} issued {adjective} guidance on {program}",
    "{party} manages {count} {items} across {place} and {place}",
    "its {adjective} budget for {year} was {money}",
    "officials in {place} said that {program} had been under review since {year}",
    "we interviewed {small} officials and examined {count} {items} from {year} to {later_year}",
    "the {adjective} plan lists {count} {items} for {program}",
    "{an_adjective} survey of {place} counted {count} {items}",
    "{party} and its contractor share {an_adjective} building in {place}",
    "about {small} percent of {items} are handled by contractors",
    "{program} in {place} is paid for by {an_adjective} levy",
    "the law of {year} requires {adjective} reports on {program}",
    "table {digit} shows {items} by year from {year} to {later_year}",
    "{party} agreed with {place} to move {count} {items} by {month}",
    "staff in {place} keep {adjective} lists of {items}",
    "{party} replied that {program} would improve after {year}",
    "between {year} and {later_year}, spending on {program} grew by {small} percent",
    "{party} told us that it had no record of {program} before {year}",
    "the {adjective} budget pays for {items} in {place} and for {program} in {place}",
    "we visited {place} in {month} {year} and met the staff who plan {program}",
)

_PARTIES = ("the agency", "the office", "the ministry", "the contractor", "the region")
_HEADINGS = ("Background", "Scope", "Operations", "Finance", "Controls", "Comments", "Records", "Oversight")
_DEFAULT_FINDINGS = range(3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report and its perfect summary."""

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
        num_findings = min(rng.choice(_DEFAULT_FINDINGS), num_sentences)
    if not 1 <= num_findings <= num_sentences:
        raise ValueError(
            f"num_findings={num_findings} does not fit num_sentences={num_sentences}: it must be at least 1 and at "
            "most num_sentences"
        )
    finding_words, background_words = _deal_words(rng)
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
    return Report(title=title, findings=findings, text="\n".join((title, *_paragraphs(sentences, rng))))


class _Words:
    """Fills the fields of a template. No word occurs twice before every other word of its kind has occurred once."""

    def __init__(self, words: Mapping[str, tuple[str, ...]], rng: random.Random) -> None:
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


def _deal_words(rng: random.Random) -> tuple[_Words, _Words]:
    """Return the words for the findings and for the background of one report. Kinds that both need are halved."""
    findings, background = {}, {}
    for kind, words in WORDS.items():
        shuffled = tuple(rng.sample(words, len(words)))
        share = len(words) // 2 if any(f"{{{kind}}}" in template for template in _BACKGROUND) else 0
        findings[kind], background[kind] = shuffled[share:], shuffled[:share]
    return _Words(findings, rng), _Words(background, rng)


def _sentence(template: str, words: _Words) -> str:
    text = template.format_map(words)
    return f"{text[0].upper()}{text[1:]}."


def _paragraphs(sentences: list[str], rng: random.Random) -> list[str]:
    """Join sentences to lines of 3 to 7 sentences; about every third line has a numbered heading before it."""
    lines: list[str] = []
    section = start = 0
    while start < len(sentences):
        if rng.random() < 0.35:
            section += 1
            lines.append(f"{section}. {rng.choice(_HEADINGS)}")
        end = start + rng.randint(3, 7)
        lines.append(" ".join(sentences[start:end]))
        start = end
    return lines
