"""Rooms import only what the design lets them; the host column is free of torch, clocks, chance and threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .source import Module, imports, modules

HOST = ("base", "kv", "text", "grammar", "media", "scheduler")
DEVICE = ("device", "models", "weights", "worker", "spec", "transfer")

ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "kv": {"base"},
    "grammar": {"base"},
    "text": {"base"},
    "media": {"base"},
    "scheduler": {"base", "kv", "grammar", "text", "media"},
    "device": {"base"},
    "models": {"base", "device"},
    "weights": {"base", "device"},
    "worker": {"base", "device", "models", "weights"},
    "spec": {"base", "device", "models", "weights", "worker"},
    "transfer": {"base", "device", "models", "weights", "worker"},
    "engine": {*HOST, *DEVICE},
    "server": {"base", "text", "grammar", "media", "engine"},
    "router": {"base"},
    "lang": {"base"},
    "compat": {"base", "lang"},
    "sim": {"base", "kv", "scheduler", "router"},
    "bench": {"base", "engine", "sim", "scheduler", "kv", "grammar"},
    "cli": {*HOST, *DEVICE, "engine", "server", "router", "lang", "sim", "bench"},
    "": {"base", "engine", "lang"},
}
"""Room -> the other rooms that it may import, in functions too."""

COMPOSITION_ROOT = "bough.engine.build"

HEAVY = ("torch", "transformers", "torchvision", "triton", "flashinfer")

NONDETERMINISTIC = ("time", "datetime", "random", "secrets", "uuid", "threading", "asyncio", "socket", "select",
                    "concurrent", "subprocess", "signal")  # fmt: skip

BASE_THIRD_PARTY = {"numpy", "msgspec"}


def room_of(target: str) -> str | None:
    """The room that an import target lies in; None outside bough."""
    parts = target.split(".")
    if parts[0] != "bough":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else ""


def violations(module: Module) -> list[str]:
    found = []
    for item in imports(module):
        room = room_of(item.target)
        if room is not None and room != module.room and room not in ALLOWED[module.room]:
            # Everybody may read the package's version.
            if item.target not in ("bough", "bough.__version__"):
                found.append(f"{module.name}:{item.line} imports {item.target}")
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_module_imports_only_allowed_rooms(module: Module) -> None:
    assert module.room in ALLOWED, f"{module.room} is a new room: say in ALLOWED what it may import"
    assert not violations(module)


def test_host_column_never_imports_torch() -> None:
    found = [
        f"{m.name}:{i.line} imports {i.target}"
        for m in modules()
        if m.room in HOST
        for i in imports(m)
        if i.target.split(".")[0] in HEAVY
    ]
    assert not found


def test_kv_and_scheduler_have_no_clock_chance_or_threads() -> None:
    found = [
        f"{m.name}:{i.line} imports {i.target}"
        for m in modules()
        if m.room in ("kv", "scheduler")
        for i in imports(m)
        if i.target.split(".")[0] in NONDETERMINISTIC
    ]
    assert not found


def test_base_needs_only_the_standard_library_numpy_and_msgspec() -> None:
    found = [
        f"{m.name}:{i.line} imports {i.target}"
        for m in modules()
        if m.room == "base"
        for i in imports(m)
        if i.target.split(".")[0] not in sys.stdlib_module_names | BASE_THIRD_PARTY | {"bough"}
    ]
    assert not found


def test_only_the_composition_root_joins_the_columns() -> None:
    found = []
    for m in modules():
        rooms = {room_of(i.target) for i in imports(m)}
        if {"scheduler", "worker"} <= rooms and m.name != COMPOSITION_ROOT:
            found.append(m.name)
    assert not found


def test_no_cycles_between_modules() -> None:
    """Over the imports that run when a module is imported."""
    names = {m.name for m in modules()}
    graph: dict[str, list[str]] = {}
    for m in modules():
        targets = []
        for i in imports(m):
            if i.typing_only or i.deferred:
                continue
            target = i.target if i.target in names else i.target.rpartition(".")[0]
            # A package's own __init__ runs before its modules and is not an edge of theirs.
            if target in names and target != m.name and not m.name.startswith(target + "."):
                targets.append(target)
        graph[m.name] = targets
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in graph[name]:
            visit(target)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


def loaded_by(code: str) -> set[str]:
    """Top-level modules in memory after a fresh interpreter ran ``code``."""
    script = f"import sys\n{code}\nprint('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(run.stdout.split())


def test_importing_the_host_column_does_not_load_torch() -> None:
    names = [m.name for m in modules() if m.room in ("base", "kv", "scheduler", "text")]
    assert "torch" not in loaded_by("\n".join(f"import {name}" for name in names))


def test_the_command_line_answers_before_anything_heavy_is_loaded() -> None:
    code = "from bough.cli.main import build_parser, COMMANDS\nfor name in COMMANDS: build_parser(name).format_help()"
    heavy = {"torch", "numpy", "msgspec", "fastapi", "tokenizers", "huggingface_hub", "aiohttp", "matplotlib"}
    help_only = "from bough.cli.main import build_parser\nbuild_parser(None).format_help()"
    assert not loaded_by(help_only) & (heavy | {"asyncio"})
    assert not loaded_by(code) & (heavy - {"msgspec", "numpy"})
