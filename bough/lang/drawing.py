"""A traced program as a tree of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.lang.ir import SglAct, SglArgument, SglConstantText, SglExpr, SglGen, SglSelect, SglVariable

if TYPE_CHECKING:
    from bough.lang.trace import TracerProgramState

SHOWN = 48
"""Characters of a text that are shown."""


def draw(tracer: TracerProgramState) -> str:
    """One line for each stretch of text and each call; branches stand below the text that they share."""
    return "\n".join(["program", *_lines(tracer, 0, "")])


def _lines(tracer: TracerProgramState, shared: int, indent: str) -> list[str]:
    """The lines of one state, of whose text ``shared`` characters came before."""
    items: list[tuple[str, list[TracerProgramState]]] = []
    text, chars = "", shared

    def flush() -> None:
        nonlocal text
        if text:
            items.append((f"text {len(text):,} chars {_quoted(text)}", []))
            text = ""

    for i in range(len(tracer.nodes) + 1):
        for states in [states for at, states in tracer.forks if at == i]:
            flush()
            items.append((f"fork x{len(states)} sharing {chars:,} chars", states))
        node = tracer.nodes[i] if i < len(tracer.nodes) else None
        if isinstance(node, SglConstantText | SglArgument):
            piece = shown(node)
            text += piece
            chars += len(piece)
        elif node is not None:
            flush()
            items.append((_named(node), []))
    flush()
    lines = []
    for i, (label, states) in enumerate(items):
        last = i == len(items) - 1
        lines.append(f"{indent}{'└─' if last else '├─'} {label}")
        below = indent + ("   " if last else "│  ")
        for j, state in enumerate(states):
            end = j == len(states) - 1
            lines.append(f"{below}{'└─' if end else '├─'} branch {j}")
            lines += _lines(state, chars, below + ("   " if end else "│  "))
    return lines


def shown(node: SglExpr) -> str:
    """The text that a node adds; in braces where it is not known yet."""
    match node:
        case SglConstantText(value=value):
            return str(value)
        case SglArgument(name=name) | SglGen(name=name) | SglSelect(name=name) | SglAct(name=name):
            return f"{{{name}}}"
        case SglVariable(name=name):
            return f"{{{name}}}"
    return ""


def _named(node: SglExpr) -> str:
    match node:
        case SglGen(name=name):
            return f"gen {name or '(unnamed)'}"
        case SglSelect(name=name, choices=choices):
            return f"select {name or '(unnamed)'} of {len(choices)}"
        case SglAct(name=name, tools=tools):
            return f"act {name or '(unnamed)'} with {', '.join(tool.name for tool in tools)}"
        case SglVariable(name=name):
            return f"variable {name}"
    return repr(node)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
