"""A backend is made once, by whoever needs it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bough.base.errors import BoughError
from bough.grammar.lazy import LazyBackend
from tests.sim.grammar import FakeBackend, constraint


def test_who_comes_first_makes_it_and_the_others_wait() -> None:
    made, begun, may_end = [], threading.Event(), threading.Event()

    def make() -> FakeBackend:
        begun.set()
        assert may_end.wait(60)
        made.append(FakeBackend())
        return made[-1]

    backend = LazyBackend(make)
    backend.close()  # nothing to end
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(backend.compile, constraint(1))
        assert begun.wait(60)
        second, read = threads.submit(backend.compile, constraint(2)), threads.submit(backend.read)
        assert not (first.done() or second.done() or read.done())
        may_end.set()
        assert first.result(60).bytes and second.result(60).bytes
        read.result(60)
    assert len(made) == 1


class Panic(BaseException):
    """As pyo3's, which is no Exception."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_one_that_cannot_be_made_is_tried_once(kind: type[BaseException]) -> None:
    tried = []

    def make() -> FakeBackend:
        tried.append(1)
        raise kind("no such tokenizer")

    backend = LazyBackend(make)
    backend.read()
    for _ in range(2):
        with pytest.raises(BoughError, match="cannot be constrained: no such tokenizer"):
            backend.compile(constraint(1))
    backend.close()
    assert len(tried) == 1


class Ended(FakeBackend):
    over = False

    def close(self) -> None:
        self.over = True


def test_one_that_was_made_is_closed() -> None:
    made = Ended()
    backend = LazyBackend(lambda: made)
    backend.compile(constraint(1))
    backend.close()
    assert made.over
