"""The endpoint: OpenAI's HTTP protocol over Ray Serve, its front, its metrics and its page.

Belongs here: HTTP, deployments, admission, keys, health. Does not: the protocol itself (openai/), the placement of a
model (pipeline/), manifests for Kubernetes (ops/).

Users import `build_openai_app({"llm_configs": [...]})` from here, as from `ray.serve.llm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayspec.serve.options import LLMConfig, ServeOptions

if TYPE_CHECKING:
    from rayspec.serve.app import build_openai_app

__all__ = ["LLMConfig", "ServeOptions", "build_openai_app"]


def __getattr__(name: str) -> Any:
    """Import the app when it is first used, because it imports Ray Serve and torch."""
    if name == "build_openai_app":
        from rayspec.serve.app import build_openai_app  # noqa: PLC0415

        return build_openai_app
    raise AttributeError(f"module 'rayspec.serve' has no attribute {name!r}")
