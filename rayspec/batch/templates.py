"""Renders the prompts of Jinja templates in a process of its own, with limits of time and memory: one expression, such
as {{ 'a' * 10**10 }}, may take all of both, also while its template is compiled.

The process runs this file, and so it imports nothing of rayspec. A message is eight bytes with the length of its
content, and the content: a request in pickle, or an answer in JSON.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

_MOST_S, _MOST_BYTES = 5, 2**30  # of a core, and in addition to the process itself
_TOO_HARD = f"it takes more than {_MOST_S} s or {_MOST_BYTES >> 20} MiB to render"


class Templates:
    """The process that renders, for all threads. It starts with the first template, and ends with this object.
    most_s: seconds of a core for one template."""

    def __init__(self, most_s: int = _MOST_S) -> None:
        self._most_s = most_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, values: Mapping[str, Any], most: int) -> str:
        """Return the text of a template; of a text with more than `most` characters, a beginning that has more. Raises
        KeyError for a value that is not there, and ValueError for any other problem."""
        kind, found = self._answer([template, dict(values), most])
        if kind == "missing":
            raise KeyError(found)
        if kind != "text":
            raise ValueError(found)
        return str(found)

    def names(self, template: str) -> list[str]:
        """Return the names of the values that a template uses. Raises ValueError for a text that is no template."""
        kind, found = self._answer([template, None, 0])
        if kind != "names":
            raise ValueError(found)
        return list(found)

    def _answer(self, request: list[Any]) -> list[Any]:
        with self._lock:
            if self._process is None:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen(  # noqa: S603 - this file; signals to a job's group do not end it
                    [sys.executable, __file__, str(self._most_s)],
                    stdin=pipe,
                    stdout=pipe,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                weakref.finalize(self, _end, self._process)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            answer = None
            with suppress(BrokenPipeError):  # it has ended while it read
                _send(process.stdin, pickle.dumps(request))
                answer = _received(process.stdout)
            if answer is None:
                self._process = None
                _end(process)
                return ["problem", _TOO_HARD]
            found: list[Any] = json.loads(answer)
            return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _send(file: IO[bytes], content: bytes) -> None:
    file.write(len(content).to_bytes(8, "big") + content)
    file.flush()


def _received(file: IO[bytes]) -> bytes | None:
    """Return the content of a message; None where there is none."""
    head = file.read(8)
    content = file.read(int.from_bytes(head, "big"))
    return content if len(head) == 8 and len(content) == int.from_bytes(head, "big") else None


def main(most_s: int) -> None:
    with suppress(ValueError, OSError):  # where memory has no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while (content := _received(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + most_s, hard))
        template, values, most = pickle.loads(content)  # noqa: S301 - of the process that started this one
        try:
            found = ["names", _names(template)] if values is None else ["text", _text(template, values, most)]
        except MemoryError:
            found = ["problem", _TOO_HARD]
        except Exception as error:  # noqa: BLE001 - a value of a type that the template does not expect
            found = ["missing" if type(error).__name__ == "UndefinedError" else "problem", str(error)]
        _send(sys.stdout.buffer, json.dumps(found).encode())


@cache
def _compiled(template: str) -> Template:
    from jinja2 import StrictUndefined  # noqa: PLC0415 - brought here, and not to the process that asks
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)


def _names(template: str) -> list[str]:
    from jinja2.meta import find_undeclared_variables  # noqa: PLC0415

    environment = _compiled(template).environment
    return sorted(find_undeclared_variables(environment.parse(template)))


def _text(template: str, values: Mapping[str, Any], most: int) -> str:
    text = ""
    for part in _compiled(template).generate(values):
        text += part
        if len(text) > most:
            break
    return text


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names are no top-level modules
    main(int(sys.argv[1]))
