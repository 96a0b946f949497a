"""JSON schemas for tests: made at random of what llguidance supports, those of common programs, and those of
llguidance's own tests (https://github.com/guidance-ai/llguidance, MIT licence)."""

import json
import random
from pathlib import Path
from typing import Any

PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "llguidance_schemas.json").read_text())

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"$ref": "#/$defs/person"},
        "at": {"type": "string", "format": "date"},
        "kind": {"const": None},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/person"}]},
    },
    "required": ["who", "at", "kind", "more"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "ok": {"type": "boolean"}},
            "required": ["id", "ok"],
            "additionalProperties": False,
        }
    },
}

# Formats that llguidance does not know, and a property with that name.
OTHER_FORMATS: dict[str, Any] = {
    "type": "object",
    "properties": {"format": {"type": "string", "format": "path", "maxLength": 3}, "b": {"$ref": "#/$defs/b"}},
    "required": ["format", "b"],
    "additionalProperties": False,
    "$defs": {"b": {"anyOf": [{"format": "password", "enum": ["x"]}, {"type": "integer", "format": "int32"}]}},
}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object whose outputs are short, of random parts."""
    names = rng.sample(["id", "title", "count", "total price", "Größe", "a", "is_new", "items"], rng.randint(1, 4))
    properties = {name: _part(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _part(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(
        ["string", "pattern", "integer", "number", "boolean", "enum", "const", "array", "object", "anyOf"]
    )
    if depth <= 0 and kind in ("array", "object", "anyOf"):
        kind = "boolean"
    low = rng.randint(-50, 50)
    part: dict[str, Any] = {"type": kind}
    match kind:
        case "string":
            part |= {"minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 9)}
        case "pattern":
            part = {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(ab|cd)-[0-9]{2}$", "^x[yz]?$"])}
        case "integer":
            part |= {"minimum": low, "maximum": low + rng.randint(0, 99)}
        case "number":
            part |= {"minimum": low, "maximum": low + 1}
        case "enum":
            part = {"enum": rng.sample(["one", "two words", 3, None, True, "é"], 3)}
        case "const":
            part = {"const": rng.choice(["fixed", 12, None])}
        case "array":
            part |= {"items": _part(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}
        case "object":
            part = random_schema(rng, depth - 1)
        case "anyOf":
            part = {"anyOf": [_part(rng, depth - 1), {"type": "null"}]}
    return part
