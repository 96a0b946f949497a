"""Measures the size and the shape of the package: `python tools/house.py`, from the root of a checkout.

It prints one line per figure: lines, the largest folders, class names with several meanings, private functions that
are used once, and short modules.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

_SHORT_LINES = 60


def main() -> None:
    package = {path: path.read_text(encoding="utf-8") for path in sorted(Path("rayspec").rglob("*.py"))}
    tests = sum(path.read_text(encoding="utf-8").count("\n") for path in Path("tests").rglob("*.py"))
    lines = {path: text.count("\n") for path, text in package.items()}
    total = sum(lines.values())
    print(f"lines: package {total}, tests {tests}")

    by_folder = Counter[str]()
    for path, count in lines.items():
        by_folder[path.parts[1] if len(path.parts) > 2 else "(top)"] += count
    print("folders: " + ", ".join(f"{name} {count / total:.0%}" for name, count in by_folder.most_common(5)))

    classes, private = defaultdict[str, set[Path]](set), list[str]()
    for path, text in package.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_[^_]", node.name):
                private.append(node.name)
    several = sorted(name for name, paths in classes.items() if len(paths) > 1)
    print(f"class names in two or more files: {len(several)} ({', '.join(several)})")
    words = Counter(re.findall(r"\b_\w+\b", "\n".join(package.values())))
    print(f"private functions used once: {sum(words[name] == 2 for name in private)} of {len(private)}")
    short = [path for path, count in lines.items() if count < _SHORT_LINES and path.name != "__init__.py"]
    print(f"modules under {_SHORT_LINES} lines: {len(short)} of {len(package)}")


if __name__ == "__main__":
    main()
