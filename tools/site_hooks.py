"""Hooks of mkdocs: pages from files outside docs/, the reference of the command line, and llms.txt."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from typer.main import get_command
from typer.testing import CliRunner

from rayspec.cli import app

ROOT = Path(__file__).parents[1]
# Files outside docs/ that are pages, by the name of the page.
_PAGES = {
    "index.md": "README.md",
    "k8s.md": "k8s/README.md",
    "cluster.md": "cluster/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_CLI = "reference/cli.md"
_SOURCES = {source: page for page, source in _PAGES.items()}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
_COLUMNS = "100"
_summaries: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in _PAGES.items()}
    for uri, content in {**pages, _CLI: _command_line()}.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links of the repository lead to pages. A link to another file of the repository becomes its path."""
    uri = page.file.src_uri
    source = _PAGES.get(uri, f"docs/{uri}")
    _summaries[uri] = _first_sentence(markdown)

    def page_link(match: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        is_page = wanted.startswith("docs/") and (ROOT / wanted).is_file()
        target = _SOURCES.get(wanted) or (wanted.removeprefix("docs/") if is_page else None)
        if target is None:
            return match["text"] if wanted in match["text"] else f"{match['text']} (`{wanted}`)"
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"{match['image']}[{match['text']}]({relative}{match['anchor'] or ''})"

    # Not in code.
    parts = re.split(r"(^```.*?^```|`[^`\n]*`(?!\]))", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(page_link, part) for number, part in enumerate(parts))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages, for llms.txt."""
    config.extra["pages"] = nav.pages
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: every page with its first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += [f"- [{page.title}]({page.url}): {_summaries[page.file.src_uri]}" for page in config.extra["pages"]]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _first_sentence(markdown: str) -> str:
    text = re.sub(r"^```.*?^```|^[#|!<].*?$|^::: .*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    first = next(iter(re.split(r"(?<=[.:?])\s", " ".join(text.split()), maxsplit=1)), "")
    return "" if first.startswith("`rayspec bench") else first  # the command of a table


def _command_line() -> str:
    """Return the page of the command line: what each command's own help prints."""
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = _COLUMNS
    parts = ["# Command line", f"What `--help-all` prints.\n\n```text\n{_help(())}\n```"]
    group: Any = get_command(app)
    for name in group.commands:
        _, command, _ = group.resolve_command(typer.Context(group), [name])
        parts += _sections((name,), command)
    return "\n\n".join(parts) + "\n"


def _sections(path: tuple[str, ...], command: Any) -> list[str]:
    text = f"## rayspec {' '.join(path)}\n\n```text\n{_help(path, command)}\n```"
    below = getattr(command, "commands", {})
    return [text, *(section for name, each in below.items() for section in _sections((*path, name), each))]


def _help(path: tuple[str, ...], command: Any = None) -> str:
    has_more = any(param.name == "help_all" for param in getattr(command, "params", ()))
    result = CliRunner().invoke(app, [*path, "--help-all" if has_more else "--help"], prog_name="rayspec")
    if result.exit_code:
        raise RuntimeError(f"rayspec {' '.join(path)} --help: {result.output}")
    return result.output.strip()
