"""Gives the package's description on a registry absolute links. RAYSPEC_URL: the repository's address, such as
https://github.com/org/rayspec; without it the links stay as they are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\]\((?!\w+:|#)([^)]+)\)")


def _kind(path: str) -> str:
    return "raw" if path.endswith((".png", ".svg")) else "blob"


class Description(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url := os.environ.get("RAYSPEC_URL", "").rstrip("/"):
            text = _LINK.sub(lambda link: f"]({url}/{_kind(link[1])}/main/{link[1]})", text)
            metadata["urls"] = {"Homepage": url, "Issues": f"{url}/issues", "Documentation": f"{url}/tree/main/docs"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
