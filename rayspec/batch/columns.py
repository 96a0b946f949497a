"""What a job takes from the columns of a row: its id, and its text, messages or a template's text."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, UndefinedError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rayspec.batch.extract import MAX_CHARACTERS
from rayspec.prompts import read_conversation
from rayspec.types import ConfigError, InputFileError, InvalidMessagesError

NO_ID_COLUMN = "none"
_DEFAULT_ID_COLUMN = "id"
MISSING_COLUMN = "missing_column"
INVALID_VALUE = "invalid_value"  # a text or id that is null, empty or of the wrong type
_MAX_EXACT_FLOAT = 2.0**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of the columns that hold the id, the text and the messages of a JSON-lines or Parquet row.

    id None: the column "id" where a row has a value there, else the file's name (`InputFile.name`) and the row number.
    id "none": always these two.
    messages: a column of chat messages, used instead of the text where a row has it; None: text only.
    template: a Jinja template that makes the text of a row's columns. reads_all: read also columns without a use.
    """

    text: str = "text"
    id: str | None = None
    messages: str | None = None
    template: str | None = None
    reads_all: bool = False

    @property
    def id_name(self) -> str | None:
        """The column of ids; None where ids are made from places."""
        return None if self.id == NO_ID_COLUMN else self.id or _DEFAULT_ID_COLUMN

    @property
    def of_whole_files(self) -> str:
        """The column of the text of a file that is one row; `{{ text }}` in a template."""
        return self.text if self.template is None else "text"

    @property
    def names(self) -> list[str]:
        contents = [self.text, self.messages] if self.template is None else _compiled(self.template)[1]
        return [name for name in (self.id_name, *contents) if name is not None]

    def row_id(self, row: Mapping[str, Any], source: str) -> str:
        """Return the id of a row. source: the row's place, which is its id where it has none. Raises InputFileError."""
        name = self.id_name
        if name is None:
            return source
        value = row.get(name)
        is_null = value is None or (isinstance(value, float) and math.isnan(value))  # pandas' null
        if self.id is None and is_null:
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
                return None, read_conversation(conversation)
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


def _present(row: Mapping[str, Any]) -> str:
    return f"the row has {', '.join(map(repr, row)) or 'none that were asked for'}"


@cache
def _compiled(template: str) -> tuple[Template, list[str]]:
    """Return the template and the names of its columns. Raises ConfigError."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        return environment.from_string(template), sorted(find_undeclared_variables(environment.parse(template)))
    except TemplateError as error:
        raise ConfigError(f"option 'prompt_template' holds no Jinja template: {error}") from None


def _rendered(template: str, row: Mapping[str, Any], source: str) -> str:
    text, compiled = "", _compiled(template)[0]
    try:
        for part in compiled.generate({name: value for name, value in row.items() if name}):
            text += part
            if len(text) > MAX_CHARACTERS:
                break
    except UndefinedError as error:
        raise InputFileError(f"{source}: option 'prompt_template': {error}; {_present(row)}", MISSING_COLUMN) from None
    except Exception as error:  # noqa: BLE001 - a value of a type that the template does not expect
        raise InputFileError(f"{source}: option 'prompt_template': {error}", INVALID_VALUE) from None
    if not text.strip() or len(text) > MAX_CHARACTERS:
        size = "no text" if not text.strip() else f"more than {MAX_CHARACTERS} characters"
        raise InputFileError(f"{source}: option 'prompt_template' makes a prompt of {size}", INVALID_VALUE)
    return text
