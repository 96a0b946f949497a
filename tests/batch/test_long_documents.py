"""Long documents: the decisions by their properties, the calls with an engine that records them, and for real."""

import asyncio
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec import LLM, demo
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.documents import input_row
from rayspec.batch.long_documents import LongDocumentOptions, TokenizedText, cut, group, part_seed
from rayspec.batch.rows import Handler, Row
from rayspec.command.settings import make_settings
from rayspec.config import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.llm import AsyncEngine
from rayspec.prompts import conversation_tokens
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    NonFiniteLogitsError,
    RayspecError,
    RequestMetrics,
    RequestOutput,
)
from tests.demo_model import demo_tokenizer

CONTEXT = 600
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, Callable[[int], int]]:
    chunk = draw(st.integers(1, 60))
    overlap = draw(st.integers(0, chunk // 2))
    strengths = draw(st.lists(st.integers(-1, 4), min_size=1, max_size=30))
    return draw(st.integers(0, 500)), chunk, overlap, lambda position: strengths[position % len(strengths)]


@given(cuts())
def test_chunks_hold_every_token_and_share_what_was_asked(case: tuple[int, int, int, Callable[[int], int]]) -> None:
    num_tokens, chunk, overlap, strength = case
    spans = cut(num_tokens, chunk, overlap, strength)
    assert {token for span in spans for token in span} == set(range(num_tokens))
    assert all(len(span) <= chunk for span in spans)
    assert all(after.start == before.stop - overlap for before, after in itertools.pairwise(spans))
    assert len(spans) == max(1, -(-(num_tokens - overlap) // (chunk - overlap)))
    if len(spans) > 1:
        assert min(map(len, spans)) >= overlap + max(1, (chunk - overlap) // 4)


def test_the_strongest_place_near_the_equal_one_wins_and_then_the_nearest() -> None:
    assert cut(200, 120, 0, lambda place: {80: 1, 90: 2, 111: 2, 70: 0}.get(place, 0))[0].stop == 90
    assert cut(200, 180, 0, lambda place: 4 if place in {54, 146} else 0)[0].stop == 100  # both too far away
    assert cut(200, 180, 0, lambda place: 4 if place == 145 else 0)[0].stop == 145


@given(st.lists(st.integers(1, 30), max_size=9), st.integers(1, 60))
def test_groups_are_the_fewest_and_the_most_even(sizes: list[int], room: int) -> None:
    groups = group(sizes, room)
    assert [index for members in groups for index in members] == list(range(len(sizes)))
    weights = [sum(sizes[members.start : members.stop]) for members in groups]
    assert all(weight <= room or len(members) == 1 for weight, members in zip(weights, groups, strict=True))
    others = [other for other in partitions(sizes) if all(sum(one) <= room or len(one) == 1 for one in other)]
    fewest = min(map(len, others))
    assert len(groups) == fewest
    assert max(weights, default=0) == min(max(map(sum, other), default=0) for other in others if len(other) == fewest)


def partitions(sizes: Sequence[int]) -> list[list[Sequence[int]]]:
    """All ways to cut them into runs."""
    if not sizes:
        return [[]]
    return [[sizes[:end], *rest] for end in range(1, len(sizes) + 1) for rest in partitions(sizes[end:])]


def test_seeds_of_parts_differ_and_are_fixed() -> None:
    seeds = {part_seed(seed, level, index) for seed in (-1, 0, 7) for level in (1, 2) for index in range(50)}
    assert len(seeds) == 300
    assert part_seed(7, 1, 3) == -3053098226137701608  # a change would change the texts of seeds in use


@given(
    st.lists(st.characters(exclude_categories=["Cs"]), unique=True, min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(0, 6),
)
def test_chunks_hold_every_character(characters: list[str], chunk: int, overlap: int) -> None:
    text = "".join(characters)
    tokenized = TokenizedText(demo_tokenizer(), text)
    spans = cut(len(tokenized), chunk, min(overlap, chunk // 2), tokenized.strength)
    held = 0
    for piece in map(tokenized.text, spans):
        start = text.index(piece)
        assert start <= held <= start + len(piece)
        held = start + len(piece)
    assert held == len(text)


def test_ends_of_paragraphs_are_better_than_those_of_lines_sentences_and_words() -> None:
    tokenized = TokenizedText(demo_tokenizer(), "One two. Three\nfour\n\nfive。世界")
    best: dict[int, int] = {}
    for position in range(1, len(tokenized)):
        best[len(tokenized.text(range(position)))] = tokenized.strength(position)
    for strength, places in ((1, (3, 4)), (2, (8, 9)), (3, (14, 15)), (4, (20, 21))):
        assert {best[place] for place in places if place in best} == {strength}
    assert best[len("One two. Three\nfour\n\nfive。")] in {2, -1}
    assert -1 in {tokenized.strength(position) for position in range(1, len(tokenized))}


class RecordingEngine:
    """Answers with the prompt's first and last words and its seed, in an order of its own."""

    max_model_len = CONTEXT
    tokenizer: Any = demo_tokenizer()
    llm = property(lambda self: self)

    def __init__(self, seed: int = 0, *, answer: str = "", fail: Callable[[str], RayspecError | None] | None = None):
        self._rng = random.Random(seed)
        self._answer = answer
        self._fail = fail or (lambda prompt: None)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.num_running = self.most_running = self.num_cancelled = 0
        self.frozen_from = sys.maxsize  # this call and later ones never end

    def chat_tokens(self, messages: Sequence[Any]) -> list[int]:
        return conversation_tokens(messages, self.tokenizer)

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        assert len(prompt_token_ids) + params.max_tokens <= self.max_model_len
        prompt = demo_tokenizer().decode(list(prompt_token_ids))
        self.prompts.append(prompt.removeprefix("<|document|>").removesuffix("<|summary|>"))
        self.params.append(params)
        pause_s = 3600 if len(self.prompts) > self.frozen_from else 0
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(self._rng.randint(1, 9)):
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        words = prompt.split()
        text = self._answer or f"{words[0][:30]} {words[-1][-30:]} {params.seed}"
        error = self._fail(prompt)
        completion = CompletionOutput(index=0, text=text, token_ids=range(7), finish_reason="stop")
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=prompt_token_ids,
            outputs=[] if error else [completion],
            finished=True,
            metrics=RequestMetrics(
                num_draft_tokens=4, num_accepted_tokens=3, arrival_s=1.0, first_token_s=2.0, finished_s=4.0
            ),
            error=error,
        )


def long_documents(
    engine: Any, *, params: SamplingParams = GREEDY, template: str = "{text}", instruct: bool = False, **options: Any
) -> Handler:
    settings = make_settings(flags={"model": "demo"}, sampling=params)
    long = LongDocumentOptions(**options)
    return DocumentTask(settings=settings, template=template, instruct=instruct, long=long).handler(engine)


def read_with_thoughts(mode: Any, answer: str) -> tuple[RecordingEngine, Row]:
    """A long document, read by a model that thinks, and gives this answer about every part."""
    engine = RecordingEngine(answer=answer)
    settings = make_settings(flags={"model": "demo", "reasoning_parser": "qwen3"}, sampling=GREEDY)
    task = DocumentTask(settings=settings, template="{text}", instruct=False, long=LongDocumentOptions(long=mode))
    return engine, completed(task.handler(engine)(document(reports(6))))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["map-reduce", "refine"])
def test_the_reasoning_about_parts_is_in_no_later_prompt(mode: Any) -> None:
    engine, row = read_with_thoughts(mode, "<think>odd</think>fine")
    assert (row.text, row.reasoning) == ("fine", "odd")
    assert len(engine.prompts) > 1
    assert not any("odd" in prompt for prompt in engine.prompts)
    assert "odd" not in (row.tree or "")


@pytest.mark.parametrize("mode", ["map-reduce", "refine"])
def test_a_part_whose_answer_ends_in_its_reasoning_fails_the_document(mode: Any) -> None:
    _, row = read_with_thoughts(mode, "<think>odd")
    assert row.error_kind == "unfinished_reasoning"
    assert re.match(r"part \d of \d \(tokens \d+ to \d+\): its output ended in its reasoning", str(row.error))


def document(text: str) -> Row:
    return input_row("d", source="d", text=text)


def reports(count: int, num_sentences: int = 40) -> str:
    return "\n\n".join(report.text for report in demo.sample_documents(count, num_sentences=num_sentences, seed=5))


def completed(coroutine: Coroutine[Any, Any, Row]) -> Row:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


Node = dict[str, Any]


def roots(row: Row) -> list[Node]:
    """Of the tree of parts."""
    nodes: list[Node] = json.loads(row.tree or "[]")
    return nodes


def nodes_below(node: Node) -> list[Node]:
    return [node, *(below for child in node["children"] for below in nodes_below(child))]


def leaves(node: Node) -> list[Node]:
    return [below for below in nodes_below(node) if not below["children"]]


@pytest.mark.parametrize("mode", ["fail", "truncate", "map-reduce", "refine"])
def test_a_document_that_fits_runs_as_it_always_did(mode: str) -> None:
    engine, text = RecordingEngine(), reports(1, 10)
    row = completed(long_documents(engine, long=mode, template="Sum up: {text}")(document(text)))
    assert (engine.prompts, engine.params) == ([f"Sum up: {text}"], [GREEDY])
    assert (row.num_output_tokens, row.latency_s, row.tree, row.document) == (7, 3.0, None, None)
    assert row.text is not None
    assert row.text.endswith(" None")


def test_map_reduce_makes_a_tree_of_the_whole_document() -> None:
    engine, text = RecordingEngine(answer=" ".join(["word"] * 30)), reports(7)
    row = completed(long_documents(engine, long="map-reduce", overlap_tokens=20)(document(text)))
    (root,) = roots(row)
    chunks, tokenized = leaves(root), TokenizedText(demo_tokenizer(), text)
    assert (root["start"], root["end"], chunks[0]["start"], chunks[-1]["end"]) == (0, len(tokenized)) * 2
    assert all(after["start"] == before["end"] - 20 for before, after in itertools.pairwise(chunks))
    expected = [tokenized.text(range(chunk["start"], chunk["end"])) for chunk in chunks]
    assert sorted(engine.prompts[: len(chunks)]) == sorted(expected)
    assert root["level"] >= 3
    assert all(child["level"] < root["level"] for child in root["children"])
    assert engine.prompts[-1] == "\n\n".join(child["text"] for child in root["children"])
    assert engine.most_running == min(8, len(chunks))
    calls = len(engine.prompts)
    assert (row.text, row.finish_reason, row.error, row.latency_s) == (root["text"], "stop", None, 3.0)
    assert (row.num_output_tokens, row.num_draft_tokens, row.acceptance_rate) == (7 * calls, 4 * calls, 0.75)
    assert (row.decode_s, len(nodes_below(root))) == (2.0 * calls, calls)
    assert row.num_prompt_tokens == sum(node["num_prompt_tokens"] for node in nodes_below(root))


@pytest.mark.parametrize("mode", ["map-reduce", "refine"])
def test_the_tree_does_not_depend_on_the_order_in_which_parts_finish(mode: str) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, min_tokens=30)
    trees = set()
    for order in range(4):
        engine = RecordingEngine(order)
        long = long_documents(engine, params=params, long=mode, level_tokens=(20,))
        trees.add(completed(long(document(reports(5)))).tree)
        assert len({params.seed for params in engine.params}) == len(engine.params)
        assert [params.max_tokens for params in engine.params] == [20] * (len(engine.params) - 1) + [40]
        assert {params.min_tokens for params in engine.params} == {20, 30}
    assert len(trees) == 1


def test_refine_carries_its_answer_along_and_a_text_is_never_taken_for_a_template() -> None:
    engine, text = RecordingEngine(), "{summary} {number} " + reports(4)
    row = completed(long_documents(engine, long="refine", template="Sum up: {text}", instruct=True)(document(text)))
    (root,) = roots(row)
    tokenized, answers = TokenizedText(demo_tokenizer(), text), [*root["children"], root]
    count = len(answers)
    assert len(engine.prompts) == count > 3
    beginning = f"Sum up: (This is part 1 of {count} of a longer document.)\n\n{{summary}} {{number}} "
    assert engine.prompts[0].startswith(beginning)
    for number in range(2, count):
        prompt, before, part = engine.prompts[number - 1], answers[number - 2], answers[number - 1]
        assert f"{before['text']}\n\n(Here is part {number}." in prompt
        assert prompt.endswith("\n\n" + tokenized.text(range(part["start"], part["end"])))
    assert [(one["level"], one["children"]) for one in root["children"]] == [(1, [])] * (count - 1)
    assert (root["level"], root["start"], root["end"], root["text"]) == (2, 0, len(tokenized), row.text)
    assert text.endswith(engine.prompts[-1][-200:])


@pytest.mark.parametrize("mode", ["map-reduce", "refine"])
def test_a_failing_part_fails_its_document_and_keeps_the_others(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.batch.long_documents._MAX_PARTS_IN_FLIGHT", 1)
    good = RecordingEngine()
    completed(long_documents(good, long=mode)(document(reports(5))))
    third = good.prompts[2].split("\n", 1)[-1] if mode == "refine" else good.prompts[2]
    engine = RecordingEngine(fail=lambda prompt: NonFiniteLogitsError("NaN") if third[-90:] in prompt else None)
    row = completed(long_documents(engine, long=mode)(document(reports(5))))
    assert (row.error_kind, row.finish_reason, row.text) == ("non_finite_logits", "error", None)
    assert row.error is not None
    assert row.error.startswith("part 3 of ")
    assert row.error.endswith("): NaN")
    assert [(node["level"], node["start"] == 0) for node in roots(row)] == [(1, True), (1, False)]
    assert (row.num_output_tokens, len(engine.prompts)) == (14, 3)


def test_the_other_parts_of_a_failed_document_are_cancelled() -> None:
    engine = RecordingEngine(fail=lambda prompt: NonFiniteLogitsError("NaN"))
    engine.frozen_from = 1
    assert completed(long_documents(engine, long="map-reduce")(document(reports(7)))).error is not None
    assert (len(engine.prompts), engine.num_cancelled, engine.num_running) == (8, 7, 0)


@pytest.mark.parametrize(("mode", "num_running"), [("map-reduce", 8), ("refine", 1)])
def test_cancelling_a_document_cancels_all_that_it_has_in_the_engine(mode: str, num_running: int) -> None:
    engine = RecordingEngine()
    engine.frozen_from = 0

    async def cancel() -> None:
        task = asyncio.ensure_future(long_documents(engine, long=mode)(document(reports(7))))
        while engine.num_running < num_running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(cancel())
    assert (engine.num_cancelled, engine.num_running, len(engine.prompts)) == (num_running, 0, num_running)


def test_a_dead_engine_is_not_the_documents_fault() -> None:
    class Dead(RecordingEngine):
        async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
            raise EngineDeadError("gone")

    with pytest.raises(EngineDeadError, match="gone"):
        completed(long_documents(Dead(), long="map-reduce")(document(reports(5))))


def test_answers_that_do_not_shrink_end_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingEngine(answer="\ufffd" * 200)  # far more tokens when read again than an answer may have
    row = completed(long_documents(engine, long="map-reduce")(document(reports(5))))
    assert row.error_kind == "does_not_shrink"
    assert "lower level_tokens" in str(row.error)
    assert len(roots(row)) == len(engine.prompts) > 4
    row = completed(long_documents(engine, long="refine")(document(reports(5))))
    assert row.error_kind == "does_not_shrink"
    assert str(row.error).startswith("part 2 of ")
    monkeypatch.setattr("rayspec.batch.long_documents._MAX_LEVELS", 2)
    row = completed(long_documents(RecordingEngine(answer="word " * 40), long="map-reduce")(document(reports(7))))
    assert row.error_kind == "does_not_shrink"
    assert " answers of level 2 are left" in str(row.error)
    assert {root["level"] for root in roots(row)} == {2}


def test_chunks_and_groups_whose_prompts_are_longer_than_they_are_made_smaller() -> None:
    engine, text = RecordingEngine(), reports(3)
    (root,) = roots(completed(long_documents(engine, long="map-reduce", template="{text} {text}")(document(text))))
    sizes = [leaf["num_prompt_tokens"] for leaf in leaves(root)]
    assert max(sizes) <= CONTEXT - 40
    assert sum(sizes) > 2 * root["end"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"long": "map_reduce"}, "'long' is 'map_reduce'.*did you mean 'map-reduce'"),
        ({"long": "refine", "level_tokens": (0,)}, "'level_tokens'.*1 token or more"),
        ({"chunk_tokens": 100}, "'chunk_tokens' works with long 'map-reduce' or 'refine' only, not 'fail'"),
        ({"long": "refine", "chunk_tokens": 550}, "'chunk_tokens' is 550: 51. tokens of a chunk fit"),
        (
            {"long": "map-reduce", "chunk_tokens": 100, "overlap_tokens": 51},
            "'overlap_tokens' is 51.*half of a chunk, 50",
        ),
        ({"long": "map-reduce", "level_tokens": (40, 320)}, "'level_tokens' is .40, 320.: two such"),
        ({"long": "map-reduce", "level_tokens": (700,)}, "'chunk_tokens' is None: 0 tokens of a chunk fit"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        long_documents(RecordingEngine(), **options)


def test_parts_need_a_tokenizer_that_knows_where_its_tokens_are() -> None:
    class Slow:
        is_fast, chat_template = False, None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

    engine = RecordingEngine()
    engine.tokenizer = Slow()
    with pytest.raises(ConfigError, match="'long' is 'refine': it needs a fast tokenizer"):
        long_documents(engine, long="refine")


def test_the_bundled_model_answers_parts_as_it_answers_documents() -> None:
    params, text = SamplingParams(temperature=0.0, max_tokens=24), reports(3)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "speculation": {"strategy": "ar"}}
    engine = AsyncEngine(LLM("demo", max_model_len=1200, max_num_seqs=4, **options))
    try:
        row = completed(long_documents(engine, params=params, long="map-reduce")(document(text)))
        assert row.error is None
        (root,) = roots(row)
        first = leaves(root)[0]
        prompt = TokenizedText(demo_tokenizer(), text).text(range(first["start"], first["end"]))
        alone = asyncio.run(engine.run(engine.llm.chat_tokens([{"role": "user", "content": prompt}]), params))
    finally:
        engine.llm.shutdown()
    assert first["text"] == alone.outputs[0].text
    assert first["text"].startswith(text.splitlines()[0])
    assert root["num_output_tokens"] <= 24
