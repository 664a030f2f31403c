"""What ``bough bench json`` asks for: schemas as people write them, or the functions of the BFCL questions."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.base.errors import ConfigError

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 24}
INTEGER: Schema = {"type": "integer", "minimum": 0, "maximum": 1000}
BOOLEAN: Schema = {"type": "boolean"}

BFCL_FILES = ("BFCL_v4_live_simple.json", "BFCL_v4_simple_python.json", "BFCL_v4_multiple.json")
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""BFCL names some types as Python does."""
SHAPE = ("enum", "minimum", "maximum", "minItems", "maxItems")


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and the schema of its answer; cases of one ``group`` are reported together."""

    group: str
    question: str
    schema: Schema


def record(**properties: Schema) -> Schema:
    """An object that has all of ``properties`` and nothing else."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def call(name: str, **arguments: Schema) -> Schema:
    """A call of the function ``name``."""
    return record(name={"const": name}, arguments=record(**arguments))


def several(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def either(*values: str) -> Schema:
    return {"enum": list(values)}


ADDRESS = record(street=STRING, city=STRING, country=either("Austria", "France", "Japan", "Kenya"))
ORDER = record(
    order_id=INTEGER,
    customer=record(name=STRING, email=STRING, address=ADDRESS),
    items=several(record(product=STRING, quantity=INTEGER, unit_price=INTEGER), 1, 3),
    status=either("pending", "shipped", "delivered"),
    gift=BOOLEAN,
)

BUILT_IN = (
    Case(
        "tool calls", "What is the weather in Paris, in celsius?",
        call("get_current_weather", location=STRING, unit=either("celsius", "fahrenheit")),
    ),
    Case(
        "tool calls", "Book a table for four people at seven at Luigi's.",
        call("make_restaurant_reservation", restaurant_name=STRING, number_of_guests=INTEGER, time_of_day=STRING),
    ),
    Case(
        "tool calls", "Find three cheap hotels in Rome with a pool.",
        call(
            "search_hotels", city_name=STRING, maximum_results=INTEGER, price_category=either("low", "medium", "high"),
            amenities=several(either("swimming_pool", "wireless_internet", "breakfast"), 1, 2),
        ),
    ),
    Case(
        "tool calls", "Remind me tomorrow to call my mother, or else write me a mail about it.",
        {"anyOf": [
            call("create_reminder", reminder_text=STRING, due_date=STRING, is_important=BOOLEAN),
            call("send_electronic_mail", recipient_address=STRING, subject_line=STRING, message_body=STRING),
        ]},
    ),
    Case(
        "tool calls", "Convert 250 dollars to euros.",
        call("convert_currency", source_amount=INTEGER, source_currency=STRING, target_currency=STRING),
    ),
    Case(
        "records", "Ada Lovelace was born in London in 1815 and wrote about the analytical engine. Who was she?",
        record(first_name=STRING, last_name=STRING, birth_year=INTEGER, born_in=STRING, is_alive=BOOLEAN),
    ),
    Case(
        "records", "Describe a film that you like.",
        record(title=STRING, director=STRING, year=INTEGER, genres=several(STRING, 1, 3), rating=INTEGER),
    ),
    Case("nested orders", "Order two lamps and a chair for Jane in Vienna.", ORDER),
    Case("nested orders", "Ship the last order of Ken in Nairobi, a blue bicycle, as a gift.", ORDER),
    Case(
        "enums", "The food was cold and the waiter rude. What does the writer feel?",
        record(sentiment=either("positive", "neutral", "negative"), confidence=either("low", "medium", "high"),
               needs_an_answer=BOOLEAN),
    ),
    Case(
        "enums", "My card was charged twice. Which department?",
        record(department=either("billing", "technical_support", "sales", "human_resources"),
               urgency=either("can_wait", "this_week", "today", "immediately"), escalate_to_manager=BOOLEAN),
    ),
)  # fmt: skip

LONG = record(records=several(record(name=STRING, age=INTEGER, city=STRING, active=BOOLEAN), 64, 128))
"""Answers that are longer than any that is measured."""


def bfcl(path: Path, most: int) -> list[Case]:
    """At most ``most`` questions of the Berkeley Function-Calling Leaderboard (v4), spread evenly over its files.

    ``path`` is a tar archive with the leaderboard's data. The answer is one call of one of a question's functions.
    Raises ConfigError where the questions are not in it.
    """
    cases = []
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name)
                if name.name in BFCL_FILES and name.parent.name == "data" and (file := archive.extractfile(member)):
                    cases += [_case(json.loads(line)) for line in file if line.strip()]
    except (OSError, tarfile.TarError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the questions in {path}: {error}") from None
    if not cases:
        raise ConfigError(f"{path} has none of {', '.join(BFCL_FILES)}")
    step = max(1, len(cases) // most)
    return cases[::step][:most]


def _case(question: dict[str, Any]) -> Case:
    calls = [
        record(name={"const": f["name"]}, arguments=plain_schema(f["parameters"], closed=True))
        for f in question["function"]
    ]
    return Case("BFCL", question["question"][0][-1]["content"], calls[0] if len(calls) == 1 else {"anyOf": calls})


def plain_schema(schema: Schema, closed: bool = False) -> Schema:
    """The JSON Schema that BFCL means by ``schema``; with ``closed``, of an object without further properties."""
    kind = BFCL_TYPES.get(schema.get("type", "any"), schema.get("type", "any"))
    plain = {key: schema[key] for key in SHAPE if key in schema}
    if kind != "any":
        plain["type"] = kind
    if "properties" in schema:
        plain["properties"] = {name: plain_schema(part) for name, part in schema["properties"].items()}
        plain["required"] = [name for name in schema.get("required", ()) if name in plain["properties"]]
    if "items" in schema:
        plain["items"] = plain_schema(schema["items"])
    if closed:
        plain["additionalProperties"] = False
    return plain
