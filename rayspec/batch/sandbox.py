"""Takes the text out of PDF, Word and HTML files, and renders Jinja templates, in a process of its own.

Strangers make such files, and {{ 'a' * 10**10 }} may take any time and memory. So both are limited for each request,
and a crash ends only this process, which imports nothing of rayspec. A request is in pickle, an answer a line of JSON.
"""

from __future__ import annotations

import codecs
import html
import io
import json
import logging
import math
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from jinja2 import Template

MAX_CHARACTERS = 2**24
_WORD_ENDS = {"tab": "\t", "br": "\n", "cr": "\n", "p": "\n"}
_BLOCK = re.compile(
    "address|article|aside|blockquote|body|br|dd|div|dl|dt|fig.*|foot.*|form|h[1-6r]|header|li|main|nav|ol|p|pre|section|"
    "table|title|tr|ul"
)
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


class Sandbox:
    """The process, for all threads. It starts with the first request, and again after a fatal one; it ends with this
    object. most_s, most_bytes: for one request, seconds of a core, and memory in addition to the process itself."""

    def __init__(self, most_s: int, most_bytes: int) -> None:
        self._limits = most_s, most_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, *request: Any) -> Any:
        """Return the text of a PDF, Word or HTML file: (suffix, bytes); the text of a template: ("rendered", template,
        values by name); or the names of the values that a template uses: ("names", template). Raises KeyError for a
        value that is not there, and ValueError for any other problem."""
        with self._lock:
            if self._process is None:
                # The process inherits the mask: signals to all processes of a job, as of `ray job stop`, do not end it.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                try:
                    self._process = subprocess.Popen(  # noqa: S603 - this file
                        [sys.executable, __file__, *map(str, self._limits)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                weakref.finalize(self, _end, self._process)
            process, line, kind = self._process, b"", "fatal"
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):  # it has ended while it read
                    pickle.dump(request, process.stdin)
                    process.stdin.flush()
                    line = process.stdout.readline()
                kind, found = json.loads(line) if line.endswith(b"\n") else (kind, _too_much(*self._limits))
            except pickle.PicklingError as error:
                raise ValueError(f"a value has a type that cannot be sent ({error})") from error
            finally:
                if kind == "fatal":
                    self._process = None
                    _end(process)
        if kind == "found":
            return found
        raise KeyError(found) if kind == "missing" else ValueError(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _too_much(most_s: int, most_bytes: int) -> str:
    return f"it takes more than {most_s} s or {most_bytes >> 20} MiB"


# --- in the process ---


def main(most_s: int, most_bytes: int) -> None:
    logging.disable()
    with suppress(ValueError, OSError):  # where memory has no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    requests: Any = sys.stdin.buffer
    while requests.peek(1):
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + most_s, hard))
        kind, *request = pickle.load(requests)  # noqa: S301 - of the process that started this one
        try:
            answer = ["found", _found(kind, *request)]
        except MemoryError:
            answer = ["fatal", _too_much(most_s, most_bytes)]
        except Exception as error:  # noqa: BLE001 - whatever a damaged file or a value of another type leads to
            name = type(error).__name__
            if kind.startswith("."):  # the next file gets a process that this one has left nothing in
                answer = ["fatal", f"{name}: {error}"]
            else:
                answer = ["missing" if name == "UndefinedError" else "problem", str(error)]
        sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()


def _found(kind: str, content: Any, values: Any = None) -> Any:
    if kind == "names":
        from jinja2.meta import find_undeclared_variables  # noqa: PLC0415 - brought here, and not to who asks

        environment = _compiled(content).environment.overlay()
        environment.globals = {}  # a column may have the name of a function of Jinja
        return sorted(find_undeclared_variables(environment.parse(content)))
    texts: Iterable[str]
    if kind == "rendered":
        texts = _compiled(content).generate(values)
    else:
        texts = {".pdf": _pdf_texts, ".docx": _docx_texts}.get(kind, _html_texts)(content)
    text = io.StringIO()
    for part in texts:
        text.write(part)
        if text.tell() > MAX_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_CHARACTERS} characters of text")
    return text.getvalue()


@cache
def _compiled(template: str) -> Template:
    from jinja2 import StrictUndefined  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)


def _pdf_texts(content: bytes) -> Iterator[str]:
    import pypdf  # noqa: PLC0415 - of an extra

    reader = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it needs a password: save it without one")
    for page in reader.pages:
        yield f"{page.extract_text()}\n"


def _docx_texts(content: bytes) -> Iterator[str]:
    """Yield the text of the body, with a line for each paragraph. Deleted text and second copies are left out."""
    around: list[ET.Element] = []  # the elements around the place that is read, of which none keeps what was read
    num_skipped = 0
    with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open("word/document.xml") as file:
        for event, element in ET.iterparse(file, ("start", "end")):  # noqa: S314 - memory and time are limited
            name = element.tag.rpartition("}")[2]
            is_skipped = name in {"Fallback", "pPr"}  # another form of what was read, and tabs of the ruler
            if event == "start":
                around.append(element)
                num_skipped += is_skipped
                continue
            around.pop()
            num_skipped -= is_skipped
            if not (num_skipped or is_skipped):
                yield (element.text or "") if name == "t" else _WORD_ENDS.get(name, "")
            if around:
                del around[-1][:]


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if _BLOCK.fullmatch(tag):
            self.found.append("\n")
        elif tag in {"td", "th"}:
            self.found.append("\t")

    def handle_endtag(self, tag: str) -> None:
        if _BLOCK.fullmatch(tag):
            self.found.append("\n")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem not in {"script", "style"}:
            self.found.append(re.sub(r"\s+", " ", data))


def _html_texts(content: bytes) -> Iterator[str]:
    """Yield the visible text, with a line for each block."""
    named = None if content.startswith(codecs.BOM_UTF8) else _CHARSET.search(content[:2048])
    parser = _Html()
    parser.feed(content.decode("utf-8-sig" if named is None else named[1].decode()))
    # Not `close`, which searches an end for every "<" after a tag or comment without one: quadratic before Python 3.14.
    if not parser.rawdata.startswith("<"):
        parser.handle_data(html.unescape(parser.rawdata))
    lines = re.sub(r" {2,}", " ", "".join(parser.found)).split("\n")
    yield re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip(" ") for line in lines)).strip()


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names are no top-level modules
    main(int(sys.argv[1]), int(sys.argv[2]))
