"""What the meta tests know about the package's source: every module, parsed, and what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import bough

PACKAGE = Path(bough.__file__).resolve().parent
"""The installed package, which is what ships."""

ROOT = PACKAGE.parent


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name, its path and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The package directly under bough; empty for bough itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def text(self) -> str:
        return self.path.read_text()


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        target: dotted name; for ``from x import y`` it is ``x.y``, whether y is a module or not.
        line: where.
        typing_only: under ``if TYPE_CHECKING``.
        deferred: inside a function.
    """

    target: str
    line: int
    typing_only: bool
    deferred: bool


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, sorted by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return tuple(found)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """Every import of the module: those inside functions too, and those by name through importlib."""
    named = [
        Import(node.args[0].value, node.lineno, typing_only=False, deferred=True)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("importlib.import_module", "import_module")
        and isinstance(node.args[0], ast.Constant)
    ]
    return (*_walk(module, module.tree.body, typing_only=False, deferred=False), *named)


def _walk(module: Module, body: list[ast.stmt], typing_only: bool, deferred: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only, deferred)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, typing_only, deferred)
        else:
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                for child in getattr(node, name, []):
                    inner = child.body if isinstance(child, ast.ExceptHandler | ast.match_case) else [child]
                    yield from _walk(module, inner, typing_only or (guarded and name == "body"), inside)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (module.path.name == "__init__.py")
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def native_sources() -> list[Path]:
    """C++ files that ship with the package."""
    return sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".cpp", ".h", ".hpp"))
