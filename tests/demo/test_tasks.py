import re
from itertools import pairwise

import pytest

from rayspec.demo import sample_tasks
from rayspec.demo.corpus import WORDS
from rayspec.demo.tasks import generate_task


def test_a_question_asks_for_findings_of_the_report_in_its_order() -> None:
    for task in sample_tasks("question", 50):
        numbers = re.findall(r"\d+", task.question or "")
        lines = task.answer.splitlines()
        assert [line.split(":")[0] for line in lines] == [f"Finding {number}" for number in numbers]
        assert len(set(numbers)) == len(numbers) >= 1
        assert all(line in task.document for line in lines)
        assert (task.question or "").startswith("Give findings " if len(numbers) > 1 else "Give finding ")


def test_a_ledger_says_each_row_once_in_other_order() -> None:
    for task in sample_tasks("ledger", 50, size=20):
        rows, sentences = task.document.splitlines(), task.answer.splitlines()
        assert len(rows) == len(sentences) == 20
        for row, sentence in zip(rows, sentences, strict=True):
            head, year, items, money, count = row.split(" | ")
            assert sentence == f"{head} spent {money} on {count} {items} in {year}."


def test_a_schedule_goes_on_by_equal_steps_and_takes_turns() -> None:
    for task in sample_tasks("schedule", 50, size=30):
        found = re.fullmatch(r"Plan (\d+) visits from (\w+ \d+), one in (\d+) months\.", task.question or "")
        assert found is not None
        num_visits, step = int(found[1]), int(found[3])
        items, places = (line.split(": ")[1].split(", ") for line in task.document.splitlines())
        months = []
        for number, line in enumerate(task.answer.splitlines()):
            visit = re.fullmatch(r"Visit (\d+): (\w+) (\d+), (\w+) in (\w+)\.", line)
            assert visit is not None
            months.append(12 * int(visit[3]) + WORDS["month"].index(visit[2]))
            assert int(visit[1]) == number + 1
            assert (visit[4], visit[5]) == (items[number % len(items)], places[number % len(places)])
        assert len(months) == num_visits == 30
        assert {later - earlier for earlier, later in pairwise(months)} == {step}
        assert task.answer.startswith(f"Visit 1: {found[2]}, ")


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="domain 'poem' is none of summary, question, ledger, schedule"):
        generate_task("poem", 0, size=3)
    with pytest.raises(ValueError, match="size=0"):
        generate_task("ledger", 0, size=0)
    with pytest.raises(ValueError, match="n=-1"):
        sample_tasks("ledger", -1)
