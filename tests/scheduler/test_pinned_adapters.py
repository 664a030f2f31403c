"""When all places are pinned, others wait for one that is about to be free, and are refused where none will be."""

from __future__ import annotations

import pytest

from bough.base.errors import Unavailable
from bough.base.messages import Namespace, Request
from bough.base.params import SamplingParams
from bough.scheduler.adapters import Adapters
from bough.scheduler.gates import GateState
from bough.scheduler.req import EMPTY, Req, Status
from tests.sim.adapters import FakeAdapters


def make_req(order: int, adapter: str) -> Req:
    request = Request(rid=str(order), ids=b"", params=SamplingParams(), namespace=Namespace(adapter=adapter))
    return Req(request, order, 0.0, 0.0, 0, 1, None, EMPTY, 0)


def test_a_place_that_will_be_free_is_waited_for() -> None:
    adapters = Adapters(FakeAdapters(1))
    adapters.load(1, "a", "a", pinned=True)
    adapters.advance()
    using, refused, waiting = make_req(1, "a"), make_req(2, "b"), make_req(3, "b")
    adapters.start(using)
    assert adapters.poll(using) is GateState.READY
    adapters.start(refused)
    with pytest.raises(Unavailable, match="pinned"):
        adapters.poll(refused)
    adapters.cancel(refused)
    adapters.unload("a")
    adapters.start(waiting)
    assert adapters.poll(waiting) is GateState.PENDING
    using.status = Status.FINISHED
    adapters.advance()
    adapters.advance()
    assert adapters.poll(waiting) is GateState.READY
    adapters.check()
