"""Tasks for the demo model in four domains, each with one right answer: seeded, in any number.

- `summary`: a report; the answer is its title and findings, word for word. Long passages are copied from the prompt.
- `question`: a report and "Give findings 5, 2 and 4."; the answer copies these findings, in the order of the question.
- `ledger`: rows of fields; the answer has a sentence for each row, with the fields in another order. It copies no more
  than a word at a time.
- `schedule`: the answer lists dates a number of months apart, with items and places in turn; hardly anything is copied.

Only summaries and questions can have any length: a ledger has at most 40 rows, and a schedule a short prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rayspec.demo.corpus import WORDS, generate_report

_MAX_MONTHS = 12 * 20  # from the earliest start to the end of the last year in WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request to the demo model. Without a question, the document is to be summarized."""

    document: str
    question: str | None
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt that the model's chat template makes from the document and the question, as user messages."""
        if self.question is None:
            return f"<|document|>{self.document}<|summary|>"
        return f"<|document|>{self.document}<|user|>{self.question}<|assistant|>"


def generate_task(domain: str, seed: int, *, size: int) -> Task:
    """Generate the task of a seed; equal arguments give equal tasks. size: number of sentences, rows or visits; ledgers
    and schedules have at most 40.

    Raises ValueError for a domain that is not in `DOMAINS`, and unless size >= 1.
    """
    if domain not in DOMAINS:
        raise ValueError(f"domain {domain!r} is none of {', '.join(DOMAINS)}")
    if size < 1:
        raise ValueError(f"size={size}: it must be at least 1")
    return DOMAINS[domain](seed, size)


def _summary(seed: int, num_sentences: int) -> Task:
    report = generate_report(seed, num_sentences=num_sentences)
    return Task(document=report.text, question=None, answer=report.summary)


def _question(seed: int, num_sentences: int) -> Task:
    rng = random.Random(seed)
    num_findings = max(1, min(9, num_sentences // 2, rng.randint(3, 9)))
    report = generate_report(seed, num_sentences=num_sentences, num_findings=num_findings)
    wanted = rng.sample(range(num_findings), rng.randint(1, num_findings))
    numbers = [str(index + 1) for index in wanted]
    listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    question = f"Give finding{'s' if len(numbers) > 1 else ''} {listed}."
    return Task(document=report.text, question=question, answer="\n".join(report.findings[index] for index in wanted))


def _ledger(seed: int, num_rows: int) -> Task:
    rng = random.Random(seed)
    places = rng.sample(WORDS["place"], min(num_rows, len(WORDS["place"])))
    rows, sentences = [], []
    for number, place in enumerate(places, start=1):
        items, count, year = (rng.choice(WORDS[kind]) for kind in ("items", "count", "year"))
        money = f"${rng.randint(1, 99)}.{rng.randint(0, 9)} {rng.choice(WORDS['unit'])}"
        rows.append(f"Row {number}: {place} | {year} | {items} | {money} | {count}")
        sentences.append(f"Row {number}: {place} spent {money} on {count} {items} in {year}.")
    return Task(document="\n".join(rows), question="Write the rows as sentences.", answer="\n".join(sentences))


def _schedule(seed: int, num_visits: int) -> Task:
    rng = random.Random(seed)
    num_visits = min(num_visits, 40)
    step = rng.randint(1, max(1, min(11, _MAX_MONTHS // num_visits)))
    items = rng.sample(WORDS["items"], rng.randint(2, 4))
    places = rng.sample(WORDS["place"], rng.randint(2, 4))
    first = rng.randrange(12 * 20)
    lines = []
    for number in range(num_visits):
        item, place = items[number % len(items)], places[number % len(places)]
        lines.append(f"Visit {number + 1}: {_date(first + number * step)}, {item} in {place}.")
    question = f"Plan {num_visits} visits from {_date(first)}, one in {step} months."
    document = f"Items: {', '.join(items)}\nPlaces: {', '.join(places)}"
    return Task(document=document, question=question, answer="\n".join(lines))


def _date(month: int) -> str:
    return f"{WORDS['month'][month % 12]} {WORDS['year'][month // 12]}"


# Each function makes a task from a seed and a size.
DOMAINS: Mapping[str, Callable[[int, int], Task]] = {
    "summary": _summary,
    "question": _question,
    "ledger": _ledger,
    "schedule": _schedule,
}
