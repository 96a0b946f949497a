"""The door for Ray Serve users: `build_openai_app({"llm_configs": [...]})`, as in `ray.serve.llm`."""

from rayspec.service.serve.app import build_openai_app
from rayspec.service.serve.options import LLMConfig, ServeOptions

__all__ = ["LLMConfig", "ServeOptions", "build_openai_app"]
