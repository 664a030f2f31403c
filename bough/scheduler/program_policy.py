"""The policy ``program``: whoever ranks first among the programs that sit or can sit down."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from bough.kv.waiting import WaitingIndex
from bough.scheduler.policy import Key, KeyPolicy, lpm
from bough.scheduler.programs import AGING, Programs, ProgramState
from bough.scheduler.req import Req


class Line:
    """Programs with waiting requests, smallest key first; a heap whose stale entries are dropped when they surface."""

    def __init__(self, key: Callable[[ProgramState], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int]] = []
        self._entries: dict[int, tuple[Key, ProgramState]] = {}

    def put(self, state: ProgramState) -> None:
        """Add ``state``, or move it to where its key belongs now."""
        key = self._key(state)
        entry = self._entries.get(state.number)
        if entry is None or entry[0] != key:
            self._entries[state.number] = key, state
            heapq.heappush(self._heap, (key, state.number))
            if len(self._heap) > 64 + 4 * len(self._entries):
                self._heap = [(key, number) for number, (key, _) in self._entries.items()]
                heapq.heapify(self._heap)

    def drop(self, state: ProgramState) -> None:
        self._entries.pop(state.number, None)

    def first(self) -> ProgramState | None:
        while self._heap:
            key, number = self._heap[0]
            entry = self._entries.get(number)
            if entry is not None and entry[0] == key:
                return entry[1]
            heapq.heappop(self._heap)
        return None


class ProgramPolicy:
    """Whoever ranks first among the programs that sit or can sit down; requests of no program in between.

    The rank is :attr:`ProgramState.rank`. A program without a seat waits until there is room for its KV beside that
    of the seated ones, while anything runs. Siblings of a fork follow one another. No program waits for ever, because
    one that was passed over for ``aging`` times its own service goes first, seat or not; requests of no program are
    ordered by their match lengths and aged by the queue.
    """

    preemptive = False
    aging: float = AGING

    def __init__(self, index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> None:
        self._programs = programs
        self._singles = lpm(index, draw, programs)
        self._waiting: dict[int, KeyPolicy] = {}
        self._forks: dict[tuple[int, str], dict[int, Req]] = {}
        self._seated = Line(lambda state: state.rank)
        self._standing = Line(lambda state: state.rank)
        self._aged = Line(lambda state: (state.aged,))

    def ages(self, req: Req) -> bool:
        return req.program is not None

    def push(self, req: Req, length: int) -> None:
        state = req.program
        if state is None:
            self._singles.push(req, length)
            return
        queue = self._waiting.get(state.number)
        if queue is None:
            queue = self._waiting[state.number] = KeyPolicy(lambda req, length: (not req.started,))
            state.aged = self._programs.service + self.aging * max(state.service, self._programs.first_level)
            self._aged.put(state)
        queue.push(req, length)
        if (fork := fork_of(req)) is not None:
            self._forks.setdefault(fork, {})[req.order] = req
        self._place(state)

    def discard(self, req: Req) -> None:
        state = req.program
        if state is None:
            self._singles.discard(req)
            return
        if (fork := fork_of(req)) is not None:
            siblings = self._forks[fork]
            del siblings[req.order]
            if not siblings:
                del self._forks[fork]
        queue = self._waiting[state.number]
        queue.discard(req)
        if queue.head() is None:
            del self._waiting[state.number]
            for line in (self._seated, self._standing, self._aged):
                line.drop(state)

    def changed(self, lengths: Iterable[tuple[Req, int]]) -> None:
        self._singles.changed((req, length) for req, length in lengths if req.program is None)

    def _place(self, state: ProgramState) -> None:
        """File ``state``, which has waiting requests, in the line where it belongs now."""
        here, there = (self._seated, self._standing) if state.seated else (self._standing, self._seated)
        here.put(state)
        there.drop(state)

    def head(self) -> Req | None:
        programs = self._programs
        for moved in programs.moved():
            if moved.number in self._waiting:
                self._place(moved)
        if (siblings := self._forks.get(programs.fork)) is not None:
            return next(iter(siblings.values()))
        single, state = self._singles.head(), self._next()
        if state is None:
            return single
        req = self._waiting[state.number].head()
        if single is not None and req is not None and not state.seated and single.order < req.order:
            return single
        return req

    def _next(self) -> ProgramState | None:
        """The program whose turn it is; None when those that wait have to go on waiting for a seat."""
        programs = self._programs
        seated, other, aged = self._seated.first(), self._standing.first(), self._aged.first()
        programs.next_in_line = other
        if aged is not None and aged.aged <= programs.service:
            return aged
        if other is None or (programs.rows and not programs.has_room(other)):
            return seated
        return other if seated is None or other.rank < seated.rank else seated


def fork_of(req: Req) -> tuple[int, str] | None:
    """The fork that ``req`` is a branch of."""
    named = req.request.program
    if req.program is None or named is None or not named.fork:
        return None
    return req.program.number, named.fork
