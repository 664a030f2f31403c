"""Requests that wait before gates."""

from __future__ import annotations

import pytest
from msgspec import structs

from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import Outputs
from bough.grammar.compiler import GrammarCompiler
from tests.sim.grammar import Background, FakeBackend, constraint, tags

from .world import World, request


def test_a_failed_compile_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    world, turns = World(), [0]
    background = Background(lambda: turns[0])
    compiler = GrammarCompiler(FakeBackend(), DEFAULT_LIMITS, background.submit, 1, tags())
    scheduler = world.scheduler
    scheduler._constraints._compiler = compiler
    bad = constraint(1, delay=2, fails=True)
    background.expected = bad.text
    scheduler.receive(structs.replace(request("bad", [1, 2, 3]), constraint=bad))
    for turn in range(5):
        turns[0] = turn
        scheduler.step()
    said = [output for message in scheduler.outbox if isinstance(message, Outputs) for output in message.items]
    assert [(o.rid, o.finish and o.finish.status) for o in said] == [("bad", 400)]
    assert scheduler.idle and not caplog.records
