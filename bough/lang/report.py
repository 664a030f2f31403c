"""What a run did and what it cost, line by line of the program's source."""

from __future__ import annotations

import html
import json
import linecache
from dataclasses import dataclass
from typing import Any

from bough.lang.program import Call, Line, Program

_COLUMNS = ("calls", "computed", "reused", "generated", "wasted", "seconds")


@dataclass(slots=True)
class Cost:
    """Sums over calls.

    Attributes:
        computed, reused: prompt tokens that the engine computed, and that it had.
        generated: tokens; ``wasted`` are those of them that nobody used.
        seconds: of the calls, which may have been beside each other.
    """

    calls: int = 0
    computed: int = 0
    reused: int = 0
    generated: int = 0
    wasted: int = 0
    seconds: float = 0.0

    def add(self, call: Call) -> None:
        self.calls += 1
        self.computed += call.prompt_tokens - call.cached_tokens
        self.reused += call.cached_tokens
        self.generated += call.generated_tokens
        self.wasted += call.wasted_tokens
        self.seconds += call.seconds

    def row(self) -> list[str]:
        return [f"{getattr(self, name):,}" for name in _COLUMNS[:-1]] + [f"{self.seconds:.3f}"]

    def builtins(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _COLUMNS}


class Report:
    """The calls of one run. ``str()`` is a table; ``json()`` and ``html()`` say the same and list every call."""

    def __init__(self, program: Program) -> None:
        self.program = program.name
        self.id = program.id
        self.calls = list(program.calls)
        self.total = Cost()
        self.lines: dict[Line | None, Cost] = {}
        for call in self.calls:
            self.total.add(call)
            self.lines.setdefault(call.line, Cost()).add(call)

    @property
    def seconds(self) -> float:
        """From the start of the program to the end of its last call."""
        return max((call.started + call.seconds for call in self.calls), default=0.0)

    def __str__(self) -> str:
        rows = [["line", *_COLUMNS]]
        rows += [[_place(line), *cost.row()] for line, cost in self.lines.items()]
        rows.append(["all", *self.total.row()])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        text = [f"{self.program}: {self.seconds:.3f} s"]
        for row in rows:
            text.append("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))))
        text += [f"{_place(call.line)}: {_lease(call.lease)}" for call in self.calls if call.lease]
        return "\n".join(text)

    def builtins(self) -> dict[str, Any]:
        """The report as dicts and lists."""
        return {
            "program": self.program,
            "id": self.id,
            "seconds": self.seconds,
            "total": self.total.builtins(),
            "lines": [
                {"line": None if line is None else str(line), "source": _source(line), **cost.builtins()}
                for line, cost in self.lines.items()
            ],
            "calls": [
                {
                    "node": c.node, "parent": c.parent, "kind": c.kind, "name": c.name,
                    "line": None if c.line is None else str(c.line), "started": c.started, "seconds": c.seconds,
                    "prompt_tokens": c.prompt_tokens, "cached_tokens": c.cached_tokens,
                    "generated_tokens": c.generated_tokens, "wasted_tokens": c.wasted_tokens,
                    "attempts": c.attempts, "error": c.error, "lease": c.lease,
                }
                for c in self.calls
            ],
        }  # fmt: skip

    def json(self) -> str:
        return json.dumps(self.builtins(), ensure_ascii=False, indent=2)

    def html(self) -> str:
        """A page with a table of the lines and a bar for every call, in time."""
        head = "".join(f"<th>{name}</th>" for name in ("line", "source", *_COLUMNS))
        body = "".join(_html_row(_place(line), _source(line), cost) for line, cost in self.lines.items())
        body += _html_row("all", "", self.total)
        whole = self.seconds or 1.0
        bars = "".join(_bar(call, whole) for call in self.calls)
        return _PAGE.format(title=html.escape(self.program), seconds=self.seconds, head=head, body=body, bars=bars)

    def _repr_html_(self) -> str:
        return self.html()


def _place(line: Line | None) -> str:
    return "?" if line is None else f"{line.function}:{line.number}"


def _lease(answer: dict[str, Any]) -> str:
    return f"lease {answer['answer']}, {answer['tokens']:,} tokens for {answer['seconds']:g} s"


def _source(line: Line | None) -> str:
    return "" if line is None else linecache.getline(line.file, line.number).strip()


def _html_row(place: str, source: str, cost: Cost) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in cost.row())
    return f"<tr><td>{html.escape(place)}</td><td><code>{html.escape(source)}</code></td>{cells}</tr>"


def _bar(call: Call, whole: float) -> str:
    left, width = 100 * call.started / whole, max(0.3, 100 * call.seconds / whole)
    said = call.error or (_lease(call.lease) if call.lease else "")
    label = html.escape(f"{call.kind} {call.name or ''}: {call.generated_tokens} tokens, {call.seconds:.3f} s {said}")
    return f'<div class="call"><i style="margin-left:{left:.2f}%;width:{width:.2f}%" title="{label}"></i>{label}</div>'


_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title><style>
body{{font:14px sans-serif;margin:2em}}table{{border-collapse:collapse}}td,th{{padding:.2em .7em;text-align:right}}
td:nth-child(-n+2),th:nth-child(-n+2){{text-align:left}}tr:last-child{{border-top:1px solid;font-weight:bold}}
.call{{position:relative;height:1.5em;font-size:12px}}.call i{{display:block;height:4px;background:#37c}}
</style><h1>{title}: {seconds:.3f} s</h1><table><tr>{head}</tr>{body}</table><h2>Calls</h2>{bars}
"""
