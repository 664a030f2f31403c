"""Connections of the backends: closed by hand, when dropped and at the end; a forked child has its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bough as sgl
from tests.e2e.serving import TINY, Server, running

from .test_backends import chat, openai


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(str(tiny_model), "--served-name", "tiny", *TINY) as server:
        yield server


def test_a_forked_child_has_connections_of_its_own(server: Server) -> None:
    backends = [sgl.RuntimeEndpoint(server.url), openai(server)]
    for backend in backends:
        assert chat.run("a", backend=backend)["a"]
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(not all(chat.run("a", backend=backend)["a"] for backend in backends))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    for backend in backends:
        assert chat.run("a", backend=backend)["a"]
        backend.shutdown()


DROPS = """
import gc, sys, warnings
import bough as sgl
warnings.simplefilter("error")
sys.unraisablehook = lambda found: print("unraisable", found.exc_value, found.object, file=sys.stderr)

@sgl.function
def program(s):
    s += sgl.user("x") + sgl.assistant(sgl.gen("a", max_tokens=2))

backends = [
    sgl.RuntimeEndpoint(URL), sgl.RuntimeEndpoint(URL),
    *(sgl.OpenAI("tiny", base_url=URL + "/v1", api_key="none") for _ in range(2)),
]
for backend in backends:
    assert isinstance(program.run(backend=backend)["a"], str)
backends[1].shutdown()
backends[2].shutdown()
del backend, backends[3]
gc.collect()
print("done")
"""


def test_connections_are_closed_by_hand_when_dropped_and_at_the_end(server: Server) -> None:
    """Warnings of what was left open are written by the interpreter as it ends."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", DROPS.replace("URL", repr(server.url))],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "done\n"
    assert not [line for line in done.stderr.splitlines() if "unclosed" in line.lower() or "unraisable" in line]
    assert "never awaited" not in done.stderr and "was destroyed" not in done.stderr
