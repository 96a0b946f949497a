"""The row of a job, what it takes from the columns of the input, and the engine that completes rows."""

from __future__ import annotations

import itertools
import math
import reprlib
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from rayspec.batch.sandbox import Sandbox
from rayspec.command.terminal import load_llm
from rayspec.config import DType, EngineConfig, Settings
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.prompts import parsed_messages, read_conversation
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    InputFileError,
    InvalidMessagesError,
    Logprob,
    RayspecError,
    RequestOutput,
)

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine
    from rayspec.pool.worker import Beginning, Callback

NO_ID_COLUMN = "none"
MISSING_COLUMN = "missing_column"
INVALID_VALUE = "invalid_value"  # a text or id that is null, empty or of the wrong type
_MAX_EXACT_FLOAT = 2.0**53
_NUM_NAMED = 20  # columns, in an error
TRANSIENT_KINDS: Final = frozenset({"aborted", "engine_dead", "stage_lost", "stages_replaced", "transport"})
"""Kinds of errors that the engine causes and not the row. Rows with such an error are done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An input row and its result.

    The reader sets `source` (file and row number), `document` (the input text) or `messages` (chat messages as JSON),
    and `input_hash` (a hash of these, 128 bits); or else an error and no hash. The task sets the other fields and drops
    `document` and `messages`, which are not written.

    text: the generated text. error_kind: a stable name; None for a row that succeeded. latency_s: from the first
    request's arrival at the engine to the last token. decode_s: from the first token to the last, see `counted`.
    tree: the parts of a hierarchical summary, as JSON. reasoning: the text in <think>, which `text` then lacks; see
    option reasoning_parser. logprobs: of each token, with the likeliest ones; with option logprobs.
    """

    id: str
    text: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error_kind: str | None = None
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_rate: float | None = None
    latency_s: float | None = None
    decode_s: float | None = None
    tree: str | None = None
    reasoning: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    source: str | None = None
    input_hash: str | None = None
    document: str | None = None
    messages: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the row would be the same if it were done again."""
        return self.error_kind not in TRANSIENT_KINDS and self.finish_reason != "abort"

    def without_input(self) -> Row:
        return replace(self, document=None, messages=None)

    def completed(self, output: RequestOutput) -> Row:
        """Return the row with the first completion of a finished request. A failed request keeps its text so far."""
        completion = output.outputs[0] if output.outputs else None
        row = replace(
            self.counted([output]),
            text=completion.text if completion is not None else None,
            finish_reason=completion.finish_reason if completion is not None else None,
            logprobs=_logprobs(completion) if completion is not None else None,
        )
        return row if output.error is None else row.failed(output.error)

    def failed(self, error: RayspecError, *, part: str = "") -> Row:
        """Return the row with an error. part: the part of the document that the error is about."""
        message = f"{part}: {error}" if part else str(error)
        return replace(self.without_input(), finish_reason="error", error_kind=error.kind, error=message)

    def refused(self, error: RayspecError) -> Row:
        """Return the row with an error of the input, for which no engine is needed."""
        return replace(self.failed(error), input_hash=None)

    def counted(self, outputs: Sequence[RequestOutput]) -> Row:
        """Return the row without its input, with the counts and times of all its requests. `decode_s` is a sum, also
        over requests that ran at the same time."""
        metrics = [one.metrics for one in outputs]
        num_draft, num_accepted = (
            sum(getattr(one, name) for one in metrics) for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        spans = [(one.arrival_s, one.first_token_s, one.finished_s) for one in metrics if one.finished_s is not None]
        decoding_s = [end_s - first_s for _, first_s, end_s in spans if first_s is not None]
        return replace(
            self.without_input(),
            num_prompt_tokens=sum(len(one.prompt_token_ids) for one in outputs),
            num_output_tokens=sum(len(completion.token_ids) for one in outputs for completion in one.outputs),
            num_draft_tokens=num_draft,
            num_accepted_tokens=num_accepted,
            acceptance_rate=num_accepted / num_draft if num_draft else None,
            latency_s=max(end_s for *_, end_s in spans) - min(arrival_s for arrival_s, *_ in spans) if spans else None,
            decode_s=sum(decoding_s) if decoding_s else None,
        )


def _logprobs(completion: CompletionOutput) -> list[dict[str, Any]] | None:
    def shown(one: Logprob) -> dict[str, Any]:
        # in place of minus infinity, which JSON lacks
        return {"token": one.decoded_token, "logprob": max(one.logprob, -9999.0)}

    if completion.logprobs is None:
        return None
    return [
        shown(found[token]) | {"top": [shown(one) for one in sorted(found.values(), key=lambda one: one.rank)]}
        for token, found in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


OUTPUT_COLUMNS = tuple(field.name for field in fields(Row) if field.name not in {"document", "messages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a row that hold its id, its text and its messages.

    id None: "id" where a row has a value there, else the row's place. id "none": always the place. messages: used
    instead of the text where a row has them; None: text only. template: a Jinja template that makes the text of a row's
    columns. reads_all: read also columns without a use.
    """

    text: str = "text"
    id: str | None = None
    messages: str | None = None
    template: str | None = None
    reads_all: bool = False

    @property
    def id_name(self) -> str | None:
        """The column of ids; None where ids are made from places."""
        return None if self.id == NO_ID_COLUMN else "id" if self.id is None else self.id

    @property
    def of_whole_files(self) -> str:
        """The column of the text of a file that is one row; `{{ text }}` in a template."""
        return self.text if self.template is None else "text"

    @property
    def names(self) -> list[str]:
        contents = [self.text, self.messages] if self.template is None else _names(self.template)
        names = dict.fromkeys((self.id_name, *contents))  # a template may name the id, too
        return [name for name in names if name is not None]

    def check(self, names: Collection[str], source: str) -> None:
        """Raise InputFileError for a file that has no column for what every row needs. names: of its columns."""
        there = _present(names, "file")
        if self.id not in (None, NO_ID_COLUMN, *names):
            raise InputFileError(f"{source}: no column {self.id!r} for the id; {there}", MISSING_COLUMN)
        if self.template is None and self.text not in names and self.messages not in names:
            raise InputFileError(f"{source}: no column {self.text!r} for the text; {there}", MISSING_COLUMN)

    def row_id(self, row: Mapping[str, Any], source: str) -> str:
        """Return the id of a row. source: the row's place, which is its id where it has none. Raises InputFileError."""
        name = self.id_name
        if name is None:
            return source
        value = row.get(name)
        if self.id is None and is_null(value):
            return source
        if name not in row:
            raise InputFileError(f"{source}: no column {name!r} for the id; {_present(row)}", MISSING_COLUMN)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT_FLOAT:
            return str(int(value))  # pandas makes whole numbers floats where a null is among them
        raise InputFileError(
            f"{source}: the id is {reprlib.repr(value)}; it must be text or a whole number. Choose the column with "
            f"--id-column; with --id-column {NO_ID_COLUMN} the row's place is its id",
            INVALID_VALUE,
        )

    def content(self, row: Mapping[str, Any], source: str) -> tuple[str | None, Sequence[Mapping[str, Any]] | None]:
        """Return the text of a row, or its messages as `read_conversation` returns them. Raises InputFileError."""
        if self.template is not None:
            return _rendered(self.template, row, source), None
        conversation = row.get(self.messages) if self.messages is not None else None
        if conversation is not None:
            try:
                return None, read_conversation(parsed_messages(conversation))
            except InvalidMessagesError as error:
                raise InputFileError(
                    f"{source}: column {self.messages!r} holds no conversation: {error}", INVALID_VALUE
                ) from None
        if self.text not in row:
            raise InputFileError(f"{source}: no column {self.text!r} for the text; {_present(row)}", MISSING_COLUMN)
        value = row[self.text]
        if not isinstance(value, str):
            name = "null" if value is None else type(value).__name__
            raise InputFileError(f"{source}: column {self.text!r} is {name}; it must be text", INVALID_VALUE)
        if not value.strip():
            raise InputFileError(f"{source}: column {self.text!r} is empty; there is nothing to work on", INVALID_VALUE)
        return value, None


def is_null(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))  # the latter is pandas' null


def _present(names: Collection[str], of: str = "row") -> str:
    more = f" and {len(names) - _NUM_NAMED} more" * (len(names) > _NUM_NAMED)  # of very many in each row
    shown = ", ".join(map(repr, itertools.islice(names, _NUM_NAMED)))
    return f"the {of} has {shown or 'none that were asked for'}{more}"


_templates = Sandbox(most_s=5, most_bytes=2**30)


@cache
def _names(template: str) -> list[str]:
    """Return the names of the columns of a template. Raises ConfigError."""
    try:
        return list(_templates.answer("names", template))
    except ValueError as error:
        raise ConfigError(f"option 'prompt_template' cannot be compiled: {error}") from None


def _rendered(template: str, row: Mapping[str, Any], source: str) -> str:
    values = {name: row[name] for name in _names(template) if name in row}
    try:
        text = str(_templates.answer("rendered", template, values))
    except KeyError as error:
        problem = f"{source}: option 'prompt_template': {error.args[0]}; {_present(row)}"
        raise InputFileError(problem, MISSING_COLUMN) from None
    except ValueError as error:
        raise InputFileError(f"{source}: option 'prompt_template': {error}", INVALID_VALUE) from None
    if not text.strip():
        raise InputFileError(f"{source}: option 'prompt_template' makes a prompt of no text", INVALID_VALUE)
    return text


Handler = Callable[[Any], Awaitable[Any]]


class RowTask(Protocol):
    """The engine options of a job, and the work on each row. The task is sent to the engines' actors."""

    @property
    def settings(self) -> Settings: ...

    def handler(self, engine: AsyncEngine) -> Handler:
        """Make the function that completes rows. It is called once, in the engine's actor. An error of a row is stored
        in the row that the function returns; the function raises EngineDeadError."""


@dataclass(frozen=True, slots=True)
class RowEngineFactory:
    """Loads engines that do a task. dtype: of the weights, in place of the task's; None: as the task says. texts: of
    rows that were done earlier, from which drafts are copied."""

    task: RowTask
    dtype: DType | None = None
    texts: Sequence[str] = ()

    @property
    def engine(self) -> EngineConfig:
        asked = self.task.settings.engine
        return asked if self.dtype is None else asked.replace(dtype=self.dtype)

    def load(self, config: EngineConfig) -> RowEngine:
        """Load an engine for the task. Raises ConfigError, CheckpointError, and with shards PlacementError."""
        from rayspec.llm import AsyncEngine  # noqa: PLC0415 - brings torch, which callers of the actor do not need

        if "ray" in sys.modules:  # in an actor
            from rayspec.ray_session import forget_reserved_threads  # noqa: PLC0415

            forget_reserved_threads()
        llm = load_llm(config)
        if self.texts and llm.client.engine is not None:
            llm.client.engine.remember_texts(self.texts)
        return RowEngine(self.task, AsyncEngine(llm))

    def beginning(self, item: Any) -> Beginning:
        """Return the text of the item's prompt, by which the pool chooses an engine; None if there is none."""
        if isinstance(item, Row):
            return item.messages or item.document
        found = next((item[name] for name in ("tokenized_prompt", "messages", "prompt") if item.get(name)), None)
        return found if found is None or isinstance(found, str) else str(found)


class RowEngine:
    """An engine in an actor, with the handler of its task. info: the options of the pool."""

    def __init__(self, task: RowTask, engine: AsyncEngine) -> None:
        self.client: Any = engine.client  # an EngineLoop: each actor has one engine
        self.stop = engine.llm.shutdown
        self.info = task.settings.resolved(engine.llm.config)
        self._handle = task.handler(engine)

    async def handle(self, item: Any, callback: Callback) -> Any:
        """Complete an item. Raises EngineDeadError for a row that failed through no fault of its own."""
        done = await self._handle(item)
        if isinstance(done, Row) and not done.is_final:
            raise EngineDeadError(f"the engine has failed a row and cannot go on: {done.error}")
        return done
