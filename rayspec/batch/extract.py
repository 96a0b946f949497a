"""Takes the text out of a PDF, Word or HTML file: it reads the file from stdin and writes the text to stdout.

`documents.py` runs this file as a program of its own. Strangers make such files, so time, memory and text are limited
here, and a crash ends only this process. The first argument is the suffix. It needs the standard library and pypdf.
"""

from __future__ import annotations

import html
import io
import logging
import re
import resource
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

MAX_CPU_S, MAX_CHARACTERS = 120, 2**24
_WORD_ENDS = {"tab": "\t", "br": "\n", "cr": "\n", "p": "\n"}
_BLOCK = re.compile(
    "address|article|aside|blockquote|body|br|dd|div|dl|dt|fig.*|foot.*|form|h[1-6r]|header|li|main|nav|ol|p|pre|section|"
    "table|title|tr|ul"
)
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


def pdf_texts(content: bytes) -> Iterator[str]:
    import pypdf  # noqa: PLC0415 - of an extra

    reader = pypdf.PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it needs a password: save it without one")
    for page in reader.pages:
        yield f"{page.extract_text()}\n"


def docx_texts(content: bytes) -> Iterator[str]:
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


def html_texts(content: bytes) -> Iterator[str]:
    """Yield the visible text, with a line for each block."""
    named = _CHARSET.search(content[:2048])
    parser = _Html()
    parser.feed(content.decode("utf-8-sig" if named is None else named[1].decode()))
    # Not `close`, which searches an end for every "<" after a tag or comment without one: quadratic before Python 3.14.
    if not parser.rawdata.startswith("<"):
        parser.handle_data(html.unescape(parser.rawdata))
    lines = re.sub(r" {2,}", " ", "".join(parser.found)).split("\n")
    yield re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip(" ") for line in lines)).strip()


def main(suffix: str) -> None:
    limits = {
        resource.RLIMIT_CPU: (MAX_CPU_S, MAX_CPU_S + 5),  # at the second, the kernel would kill without a reason
        resource.RLIMIT_AS: (2**32, 2**32),
        resource.RLIMIT_CORE: (0, 0),
    }
    for limit, most in limits.items():
        with suppress(ValueError, OSError):  # macOS knows no limit of memory
            resource.setrlimit(limit, most)
    logging.disable()
    texts = {".pdf": pdf_texts, ".docx": docx_texts}.get(suffix, html_texts)
    num_characters = 0
    try:
        for text in texts(sys.stdin.buffer.read()):
            num_characters += len(text)
            if num_characters > MAX_CHARACTERS:
                raise ValueError(f"it holds more than {MAX_CHARACTERS} characters of text")  # noqa: TRY301
            sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()
    except Exception as error:  # noqa: BLE001 - whatever a damaged file leads to
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names are no top-level modules
    main(sys.argv[1])
