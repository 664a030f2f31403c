"""JSON Schemas as people write them for tools and answers, drawn from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

from bough.base.constraint import Constraint

NAMES = ("name", "age", "city", "unit", "query", "tags", "is_active", "start_date", "max_results", "id", "items",
         "price", "status", "location", "options", "user_id")  # fmt: skip
WORDS = ("celsius", "fahrenheit", "low", "medium", "high", "London", "Paris", "pending", "done", "é", 'a "b"', "")


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances are short."""
    kinds = ["string", "enum", "integer", "boolean", "const", "null", "pattern", "format", "any_of"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 2
    kind = rng.choice(kinds)
    match kind:
        case "string":
            return {"type": "string", "minLength": rng.choice((0, 2)), "maxLength": rng.choice((2, 6))}
        case "enum":
            return {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randint(1, 4))}
        case "integer":
            low = rng.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 3, 500))}
        case "boolean" | "null":
            return {"type": kind}
        case "const":
            return {"const": rng.choice(([1, "x"], "fixed", 7, {"a": "get_weather"}))}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(("^[a-c]{2}-[0-9]{1,3}$", "^(foo|foobar)$", "^x?yz$"))}
        case "format":
            return {"type": "string", "format": rng.choice(("uuid", "ipv4"))}
        case "any_of":
            return {"anyOf": [schema(rng, 0), schema(rng, 0)]} if depth else {"type": ["boolean", "null"]}
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": schema(rng, depth - 1), "minItems": least,
                    "maxItems": least + rng.randint(0, 2)}  # fmt: skip
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def tool_call(rng: random.Random) -> dict[str, Any]:
    """The schema of a call to one of a few functions."""
    calls = []
    for i in range(rng.randint(1, 3)):
        arguments = {name: schema(rng, 0) for name in rng.sample(NAMES, rng.randint(1, 4))}
        calls.append({
            "type": "object",
            "properties": {
                "name": {"const": f"get_{rng.choice(NAMES)}_{i}"},
                "arguments": {"type": "object", "properties": arguments, "required": list(arguments),
                              "additionalProperties": False},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls} if len(calls) > 1 else calls[0]


def drawn(seed: int) -> dict[str, Any]:
    """The schema of ``seed``; every third one is a tool call, every fifth one uses references."""
    rng = random.Random(seed)
    made = tool_call(rng) if seed % 3 == 0 else schema(rng, 3)
    if seed % 5 == 0:
        made = {"type": "object", "properties": {"first": {"$ref": "#/$defs/part"}, "more": {"$ref": "#/$defs/part"}},
                "required": ["first", "more"], "additionalProperties": False, "$defs": {"part": made}}  # fmt: skip
    return made


def constraint(made: dict[str, Any], seed: int) -> Constraint:
    whitespace = ("fixed", "fixed", "compact")[seed % 3]
    return Constraint(kind="json_schema", text=json.dumps(made), whitespace=whitespace)
