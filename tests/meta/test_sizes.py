"""Files and functions stay small enough to be read; what may be larger is listed by name."""

from __future__ import annotations

import ast

from .source import PACKAGE, modules, native_sources

FILE_LINES = 800
FUNCTION_LINES = 100

LARGE_FILES: dict[str, str] = {}
"""Path below the package -> why it may be longer (generated tables and kernels only)."""

LARGE_FUNCTIONS: dict[str, str] = {}
"""module:function -> why it may be longer."""


def test_files_are_at_most_800_lines() -> None:
    files = [m.path for m in modules()] + native_sources()
    large = {
        str(path.relative_to(PACKAGE)): lines
        for path in files
        if (lines := len(path.read_text().splitlines())) > FILE_LINES
    }
    assert large.keys() == LARGE_FILES.keys(), large


def test_functions_are_at_most_100_lines() -> None:
    large = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    large[f"{module.name}:{node.name}"] = lines
    assert large.keys() == LARGE_FUNCTIONS.keys(), large
