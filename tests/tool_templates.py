"""Tokenizers of the bundled model with chat templates that describe tools."""

from pathlib import Path

from rayspec import demo

HERMES = """\
{%- for tool in tools or () %}{{ tool | tojson }}
{% endfor -%}
{%- if tools %}Call: <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
{% endif -%}
{%- for message in messages -%}
  {{- '<|' ~ {'assistant': 'assistant', 'user': 'user'}.get(message.role, 'document') ~ '|>' -}}
  {{- message.content or '' -}}
  {%- for call in message.tool_calls or () -%}
    {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
    {{- call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
  {%- endfor -%}
  {%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def tokenizer_with(template: str, folder: Path, *, special: str = "") -> str:
    """Write the bundled model's tokenizer to a folder, with a chat template. special: a text that is a special token,
    in place of <|user|>."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(demo.model_path()).iterdir():
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(text.replace("<|user|>", special) if special else text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return str(folder)
