"""Terminal output, loading, and the end of commands and jobs: an error gives one line and an exit code for its kind."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import reprlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

import rayspec
from rayspec.config import EngineConfig
from rayspec.errors import naming_the_extra
from rayspec.types import ConfigError, RayspecError

# 3: some rows failed. 4: a budget is spent. Above 128: 128 plus the number of the signal that ended the process.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_BUDGET = range(5)
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
_STDERR = 2
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_NO_PLACE = frozenset(
    {
        *(errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.EEXIST),
        *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
# Controls other than tabs and ends of lines, and marks that change the order in which text is shown.
_ACTIVE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def inert(text: str) -> str:
    r"""Return the text with escapes, as \x1b, for characters that act on a terminal or reorder what it shows."""
    return _ACTIVE.sub(lambda found: repr(found[0])[1:-1], text)


class _InertConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=inert(segment.text))


class _InertFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return inert(super().format(record))


def output_console() -> Console:
    """Return the console for results. An id may look like markup, or have escapes of terminals: neither has effect."""
    console = _InertConsole(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120  # of tables in a file or a log
    return console


def error_console() -> Console:
    """Return the console for progress and errors, which is not stdout, so that results can be piped."""
    return _InertConsole(stderr=True, markup=False, emoji=False)


def say(line: str) -> None:
    """Print a line of progress."""
    error_console().print(line, highlight=False, soft_wrap=True)


def print_text(text: str, end: str = "\n") -> None:
    """Print a text of documents or models: as it is to a file or a pipe, without effects to a terminal."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed before the start
    print(inert(text) if is_terminal else text, end=end, flush=True)  # noqa: T201 - a command's output


def check_output(path: Path | None, option: str) -> None:
    """Check that a file can be written at the path, before minutes of work. Makes no folder, which a command that fails
    would leave behind. Raises ConfigError that names the option."""
    if path is None:
        return
    nearest = path if path.exists() else next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        reason = "it is a folder"
    elif nearest != path and not nearest.is_dir():
        reason = f"{str(nearest)!r} is no folder"
    elif not os.access(nearest, os.W_OK):
        reason = f"{str(nearest)!r} cannot be written to"
    else:
        return
    raise ConfigError(f"option {option!r} is {str(path)!r}: {reason}; choose another place")


def save_json(content: Mapping[str, Any], path: Path | None) -> None:
    """Write the numbers of a command to a file, if one is named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_llm(config: EngineConfig) -> rayspec.LLM:
    """Load a model. Raises ConfigError and CheckpointError. Slow: torch and transformers are imported here."""
    hide_progress_bars()
    return rayspec.LLM(**config.model_dump())


def hide_progress_bars() -> None:
    """Hide the progress bars of transformers, which share the terminal with our own progress and errors."""
    from transformers.utils import logging  # noqa: PLC0415 - `--help` does not wait for it

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class _LossyFile(io.FileIO):
    """Drops what cannot be written: progress that goes to a full disk, or that nobody reads any more, ends no job."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError:
            return len(content)


@contextmanager
def clean_exit() -> Iterator[None]:
    """End the process with a line and an exit code, instead of a traceback, on errors of users, a full disk,
    files that cannot be used and signals."""
    before = signal.getsignal(signal.SIGTERM)
    exit_on_sigterm()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_InertFormatter())
    if type(sys.stderr) is io.TextIOWrapper and sys.stderr.fileno() == _STDERR:
        about: dict[str, Any] = {"encoding": sys.stderr.encoding, "errors": sys.stderr.errors}
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(_STDERR, "w", closefd=False)), **about, line_buffering=True
        )
    try:
        with naming_the_extra():
            yield
    except ConfigError as error:
        fail(error, EXIT_USAGE)
    except RayspecError as error:
        fail(error, EXIT_FAILED)
    except OSError as error:
        if error.errno in _NO_PLACE and error.filename is not None:
            fail(f"{str(error.filename)!r} cannot be used ({error.strerror}): choose another place", EXIT_USAGE)
        if error.errno not in _NO_ROOM:
            raise
        place = "an output" if error.filename is None else repr(error.filename)
        fail(f"{place} cannot be written ({error.strerror}): make room or choose another place", EXIT_FAILED)
    except UnicodeEncodeError as error:
        if not isinstance(error.object, str) or not any("\ud800" <= char <= "\udfff" for char in error.object):
            raise
        fail(f"{reprlib.repr(error.object)} is not valid UTF-8: correct this value", EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def exit_on_sigterm() -> None:
    """Unwind on SIGTERM, so that files are closed. Does nothing outside the main thread, which receives the signals."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


def fail(error: RayspecError | str, code: int) -> NoReturn:
    """End the process with a line on stderr and an exit code."""
    message = " ".join(str(error).split())
    error_console().print(f"error: {message}", highlight=False, soft_wrap=True)
    sys.exit(code)
