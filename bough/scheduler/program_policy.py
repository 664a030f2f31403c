"""The policy ``program``: whoever ranks first among the programs that sit or can sit down."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from bough.kv.waiting import WaitingIndex
from bough.scheduler.policy import Key, KeyPolicy, lpm
from bough.scheduler.program_state import ProgramState, before
from bough.scheduler.programs import Programs
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


class Lines:
    """A :class:`Line` for each tenant: what a program asks for, such as a priority, moves it in that of its own tenant;
    among the first ones goes first whoever has the smallest :attr:`ProgramState.standing`."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._first = Line(lambda state: state.standing)
        self._leading: dict[str, ProgramState] = {}

    def put(self, state: ProgramState) -> None:
        """Add ``state``, or move it to where its rank belongs now."""
        tenant = state.key[0]
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = Line(lambda state: state.rank)
        line.put(state)
        self._lead(tenant, line)

    def drop(self, state: ProgramState) -> None:
        tenant = state.key[0]
        line = self._lines.get(tenant)
        if line is not None:
            line.drop(state)
            self._lead(tenant, line)

    def first(self) -> ProgramState | None:
        return self._first.first()

    def _lead(self, tenant: str, line: Line) -> None:
        """Note who is the first of ``tenant`` now."""
        first, before = line.first(), self._leading.get(tenant)
        if before is not None and before is not first:
            self._first.drop(before)
        if first is None:
            self._leading.pop(tenant, None)
            self._lines.pop(tenant, None)
        else:
            self._leading[tenant] = first
            self._first.put(first)


class ProgramPolicy:
    """Whoever ranks first among the programs that sit or can sit down; every other admission is for a request of no
    program, while some wait: neither may keep the other from running. But siblings of a fork follow one another.

    The order of programs is that of :class:`Lines`. A program without a seat waits until there is room for its KV
    beside that of the seated ones, while anything runs. No program waits for ever: the one that has waited the longest
    gets a turn (:meth:`Programs.take_turn`). Requests of no program are ordered by their match lengths and aged by the
    queue.
    """

    preemptive = False

    def __init__(self, index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> None:
        self._programs = programs
        self._singles = lpm(index, draw, programs)
        self._waiting: dict[int, KeyPolicy] = {}
        self._forks: dict[tuple[int, str], dict[int, Req]] = {}
        self._seated = Lines()
        self._standing = Lines()
        self._longest = Line(lambda state: (state.since,))

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
            state.since = self._programs.now
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
            for line in (self._seated, self._standing, self._longest):
                line.drop(state)

    def changed(self, lengths: Iterable[tuple[Req, int]]) -> None:
        self._singles.changed((req, length) for req, length in lengths if req.program is None)

    def _place(self, state: ProgramState) -> None:
        """File ``state``, which has waiting requests, in the line where it belongs now."""
        here, there = (self._seated, self._standing) if state.seated else (self._standing, self._seated)
        here.put(state)
        there.drop(state)
        self._longest.put(state)

    def head(self) -> Req | None:
        programs = self._programs
        for moved in programs.moved():
            if moved.number in self._waiting:
                self._place(moved)
        if (longest := self._longest.first()) is not None:
            programs.take_turn(longest)
        turn = programs.turn
        if turn is not None and programs.turn_is_up and (queue := self._waiting.get(turn.number)) is not None:
            return queue.head()
        if (siblings := self._forks.get(programs.fork)) is not None:
            return next(iter(siblings.values()))
        single, state = self._singles.head(), self._next()
        if state is None or (single is not None and not programs.single_last):
            return single
        return self._waiting[state.number].head()

    def _next(self) -> ProgramState | None:
        """The program whose turn it is; None when those that wait have to go on waiting for a seat."""
        programs = self._programs
        seated, other = self._seated.first(), self._standing.first()
        if programs.turn is not None and programs.turn.number in self._waiting and not programs.turn.seated:
            other = programs.turn
        programs.next_in_line = other
        if other is None or (programs.rows and not programs.has_room(other)):
            return seated
        return other if seated is None or before(other, seated) else seated


def fork_of(req: Req) -> tuple[int, str] | None:
    """The fork that ``req`` is a branch of."""
    named = req.request.program
    if req.program is None or named is None or not named.fork:
        return None
    return req.program.number, named.fork
