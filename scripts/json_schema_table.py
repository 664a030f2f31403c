"""Prints docs/json_schema.md: what strict constraints make of the JSON-Schema-Test-Suite.

Needs the suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite), as a folder or as a tar archive of it.
"""

from __future__ import annotations

import itertools
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.grammar.admission import check_constraint
from bough.grammar.base import BACKENDS, Backend, Template, Vocabulary
from bough.text.decoding import BYTE_OF_CHAR

INTRODUCTION = """# JSON Schema

What a strict JSON Schema constraint makes of the
[JSON-Schema-Test-Suite](https://github.com/json-schema-org/JSON-Schema-Test-Suite), whose optional tests of formats are
included. A schema is either **refused**, with HTTP 400 and the keyword that cannot be enforced, or enforced; the
columns behind count the instances of the suite for the schemas that are enforced. **No invalid instance can be
generated**: the last column is complete in every line, and a test keeps it so. With `"strict": false` refused keywords
are left out instead, and named in the answer's `warnings`.

Valid instances that cannot be generated cost nothing, as every value has another spelling or there are others like it:

- an integer is written without a fraction: `1`, not `1.0`;
- `date`, `time` and `date-time`: no leap second, no year 0, at most nine digits of a second;
- `hostname`: no two hyphens in a row, and so no label of an international name;
- `ipv6`: without an IPv4 part; `email`: without a quoted local part;
- `format` is enforced, though by default the newer dialect takes it for a remark;
- draft 7 ignores what stands beside `$ref`; here it counts.

An object's properties come in the order of the schema; the instances of the suite are tried in every order. A schema
that refers to another document is refused: nothing is fetched.

This page is made by `python scripts/json_schema_table.py SUITE > docs/json_schema.md`."""

DIALECTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
EOS = 256
ORDERS = 200
"""Most orders of an instance's properties that are tried: a constraint fixes one, and the suite uses any."""


@dataclass(slots=True)
class Row:
    """Counts of one keyword's tests."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    accepted: int = 0
    invalid: int = 0
    rejected: int = 0
    holes: list[str] = field(default_factory=list)
    """Invalid instances that were accepted."""


def backend(name: str) -> Backend:
    """The one of that name with a vocabulary of the 256 bytes and an end, so that every text has one tokenization."""
    tokenizer = Tokenizer(models.BPE(vocab={**BYTE_OF_CHAR, "<end>": EOS}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(tokenizer.to_str(), EOS + 1, (EOS,), {"<end>": EOS}, EOS + 1, lambda token: bytes([token]))
    return BACKENDS.get(name)(vocabulary)


def suite(source: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(dialect, keyword, cases) of the required tests, and of the optional ones of formats as ``format: NAME``."""
    files: Iterator[tuple[Path, bytes]]
    if source.is_dir():
        files = ((path, path.read_bytes()) for path in sorted(source.rglob("*.json")))
    else:
        files = _members(source)
    for path, data in files:
        parts = path.parts[path.parts.index("tests") + 1 :] if "tests" in path.parts else ()
        if not parts or parts[0] not in DIALECTS:
            continue
        if len(parts) == 2:
            yield parts[0], path.stem, json.loads(data)
        elif parts[1:-1] == ("optional", "format"):
            yield parts[0], f"format: {path.stem}", json.loads(data)


def _members(source: Path) -> Iterator[tuple[Path, bytes]]:
    with tarfile.open(source) as archive:
        for member in archive:
            if member.name.endswith(".json") and (file := archive.extractfile(member)):
                yield Path(member.name), file.read()


def measure(source: Path, name: str = "llguidance") -> dict[str, dict[str, Row]]:
    """Dialect -> keyword -> counts, with the backend ``name``."""
    strict = backend(name)
    found: dict[str, dict[str, Row]] = {dialect: {} for dialect in DIALECTS}
    for dialect, keyword, cases in suite(source):
        row = found[dialect].setdefault(keyword, Row())
        for case in cases:
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DIALECTS[dialect], **schema}
            row.schemas += 1
            try:
                constraint = Constraint(kind="json_schema", text=json.dumps(schema))
                check_constraint(constraint, DEFAULT_LIMITS)
                template = strict.compile(constraint)
            except InvalidRequest:
                row.refused += 1
                continue
            for test in case["tests"]:
                accepts = any(_accepts(template, text) for text in _texts(test["data"]))
                hole = f"{case['description']}: {test['description']}"
                if test["valid"]:
                    row.valid += 1
                    row.accepted += accepts
                else:
                    row.invalid += 1
                    row.rejected += not accepts
                    row.holes += [hole] if accepts else []
    strict.close()
    return found


def _texts(value: Any) -> Iterator[str]:
    """``value`` as JSON, its properties in any order."""
    return (json.dumps(each, ensure_ascii=False) for each in itertools.islice(_orders(value), ORDERS))


def _orders(value: Any) -> Iterator[Any]:
    match value:
        case dict():
            for names in itertools.permutations(value):
                for parts in itertools.product(*(list(itertools.islice(_orders(value[n]), ORDERS)) for n in names)):
                    yield dict(zip(names, parts, strict=True))
        case list():
            for parts in itertools.product(*(list(itertools.islice(_orders(item), ORDERS)) for item in value)):
                yield list(parts)
        case _:
            yield value


def _accepts(template: Template, text: str) -> bool:
    matcher = template.matcher()
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return False
    return all(matcher.accept(byte) for byte in [*data, EOS])


def page(found: dict[str, dict[str, Row]]) -> str:
    lines = [INTRODUCTION, ""]
    for dialect, title in (("draft2020-12", "Draft 2020-12"), ("draft7", "Draft 7")):
        head = ("keyword", "schemas", "refused", "valid, allowed", "invalid, excluded")
        lines += [f"## {title}", "", _line(*head), "|---|---:|---:|---:|---:|"]
        total = Row()
        for keyword, row in sorted(found[dialect].items(), key=lambda item: (item[0].startswith("format: "), item[0])):
            lines.append(_cells(f"`{keyword}`", row))
            for name in ("schemas", "refused", "valid", "accepted", "invalid", "rejected"):
                setattr(total, name, getattr(total, name) + getattr(row, name))
        lines += [_cells("**all**", total), ""]
    return "\n".join(lines).rstrip()


def _cells(name: str, row: Row) -> str:
    refused = "all" if row.refused == row.schemas else str(row.refused or "")
    allowed, excluded = f"{row.accepted} of {row.valid}", f"{row.rejected} of {row.invalid}"
    return _line(name, str(row.schemas), refused, allowed if row.valid else "", excluded if row.invalid else "")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/json_schema_table.py SUITE > docs/json_schema.md")
    print(page(measure(Path(sys.argv[1]))))
