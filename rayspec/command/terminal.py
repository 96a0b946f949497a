"""How commands and jobs talk to a terminal and end: one clean line for an error, and an exit code that says which."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from rayspec.command.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USAGE
from rayspec.types import ConfigError, RayspecError

_PLAIN_WIDTH = 120  # of tables that go to a file or a log


def output_console() -> Console:
    """Where results go."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def error_console() -> Console:
    """Where progress and errors go, so that output can be piped."""
    return Console(stderr=True)


def say(line: str) -> None:
    """Progress."""
    error_console().print(line, highlight=False, soft_wrap=True)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Ends the process with a line and a code instead of a traceback, for what users and signals cause."""
    before = signal.getsignal(signal.SIGTERM)
    exit_on_sigterm()
    try:
        yield
    except ConfigError as error:
        _fail(error, EXIT_USAGE)
    except RayspecError as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def exit_on_sigterm() -> None:
    """Unwind on SIGTERM, so that files are closed. Does nothing outside of the main thread, which gets the signals."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)


def _fail(error: RayspecError, code: int) -> NoReturn:
    message = " ".join(str(error).split())
    error_console().print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
