"""The group of states that a fork makes, and the ways to bring them together again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from bough.lang.ir import SglConcateAndAppend, SglExpr
from bough.lang.joining import Race, first_valid, majority
from bough.lang.waiting import Signal, block_on

if TYPE_CHECKING:
    from bough.lang.state import ProgramState


class ProgramStateGroup:
    """The states of a fork. ``g[i]`` is one of them; ``g += x`` appends to all."""

    def __init__(self, states: list[ProgramState], src_state: ProgramState | None = None) -> None:
        self.states = states
        self.src_state = src_state

    def join(
        self,
        mode: str = "gather_variable",
        *,
        name: str | None = None,
        valid: Callable[[Any], object] | None = None,
        key: Callable[[Any], Any] | None = None,
        until: Callable[[list[ProgramState]], object] | None = None,
    ) -> list[int]:
        """Bring the states together and end them.

        Args:
            mode: how.

                - ``gather_variable`` makes every variable that is new in the states a list of their values, in the
                  state that was forked.
                - ``concate_and_append`` appends their new texts to its text.
                - ``first_valid`` takes the variables of the first state whose variable ``name`` is there, and accepted
                  by ``valid``, if given; the others are stopped.
                - ``majority`` takes those of a state with the value of ``name`` that most states have (by ``key``, if
                  given), as soon as no other value can catch up; the others are stopped.
                - ``predicate`` gathers from the finished states as soon as ``until`` says True of the list of them;
                  the others are stopped.

        A state that is taken does all that was appended to it. Returns the numbers of those states. Raises a
        ProgramError where a state that is needed failed, or no state will do; ValueError for another mode, and for a
        majority without ``name``.
        """
        work = self._joining(mode, name, valid, key, until)
        while True:
            try:
                block_on(next(work), self._source()._executor.loop, "`await forks.ajoin(...)`")
            except StopIteration as end:
                return list(end.value)

    async def ajoin(self, mode: str = "gather_variable", **options: Any) -> list[int]:
        """As :meth:`join`, without blocking."""
        work = self._joining(mode, *(options.get(o) for o in ("name", "valid", "key", "until")))
        while True:
            try:
                await next(work).reached()
            except StopIteration as end:
                return list(end.value)

    def _joining(
        self, mode: str, name: Any, valid: Any, key: Any, until: Any
    ) -> Generator[Signal, None, Sequence[int]]:
        """What to wait for; in the end the numbers of the states that were taken."""
        source, everybody = self._source(), range(len(self.states))
        executors = [state._executor for state in self.states]
        if mode == "majority" and name is None:
            raise ValueError("a majority needs the name of the variable that it is of")
        if mode in ("first_valid", "majority", "predicate"):
            taken = yield from self._race(mode, Race(executors, name), valid, key, until)
            if mode == "predicate":
                self._gather(source, taken)
            else:
                winner = executors[taken[0]]
                if winner.error_ is not None:
                    raise winner.failure("the state that was taken is incomplete")
                source._executor.variables.update(winner.variables)
                source._executor.meta_info.update(winner.meta_info)
        elif mode == "gather_variable":
            for executor in executors:
                yield executor.idle
            self._gather(source, everybody)
            taken = everybody
        elif mode == "concate_and_append":
            source += SglConcateAndAppend(self.states)
            yield source._executor.idle
            if source._executor.error_ is not None:
                self.end()
                raise source._executor.failure("a state of the fork is incomplete")
            taken = everybody
        else:
            raise ValueError(f"Invalid join mode: {mode}")
        self.end()
        return taken

    def _race(self, mode: str, race: Race, valid: Any, key: Any, until: Any) -> Generator[Signal, None, Sequence[int]]:
        taken: Sequence[int] | None = None
        error: Exception | None = None
        try:
            for signal in race.rounds():
                if signal is not None:
                    yield signal
                elif (taken := self._decided(mode, race, valid, key, until)) is not None:
                    break
            if taken is None and mode == "majority":
                taken = majority(race, key or repr, complete=True)
        except Exception as raised:  # of what the caller gave to decide with
            error = raised
        if taken is None and mode == "predicate" and error is None:
            taken = list(race.finished)
        race.stop(taken or ())
        for executor in race.states:
            yield executor.idle  # done, or stopped, and its backend knows
        race.write_off(taken or ())
        self.end()
        if error is not None:
            raise error
        if not taken:
            raise race.failure(f"no state of the fork will do ({mode})")
        return taken

    def _decided(self, mode: str, race: Race, valid: Any, key: Any, until: Any) -> list[int] | None:
        """The states to take, where the last one that finished or failed has decided it."""
        if mode == "majority":
            return majority(race, key or repr, complete=False)
        if mode == "predicate":
            return list(race.finished) if until([self.states[i] for i in race.finished]) else None
        first = first_valid(race, valid or (lambda value: True))
        return None if first is None else [first]

    def end(self) -> None:
        """Nothing more will be appended to any of the states."""
        for state in self.states:
            state._executor.end()

    def _source(self) -> ProgramState:
        assert self.src_state is not None, "a group that no fork made cannot be joined"
        return self.src_state

    def _gather(self, source: ProgramState, taken: Sequence[int]) -> None:
        gathered: dict[Any, list[Any]] = {}
        before = source._executor.variables
        for i in sorted(taken):
            state = self.states[i]
            if state._executor.error_ is not None:
                self.end()
                raise state._executor.failure(f"state {i} of the fork is incomplete")
            for name, value in state._executor.variables.items():
                if name not in before:
                    gathered.setdefault(name, []).append(value)
        before.update(gathered)

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __setitem__(self, i: int, value: ProgramState) -> None:
        assert self.states[i] == value

    def __len__(self) -> int:
        return len(self.states)

    def __iadd__(self, other: SglExpr | Callable[[int], Any] | list[Any] | tuple[Any, ...]) -> ProgramStateGroup:
        for i in range(len(self.states)):
            if isinstance(other, SglExpr):
                self.states[i] += other
            elif callable(other):
                self.states[i] += other(i)
            elif isinstance(other, list | tuple):
                self.states[i] += other[i]
            else:
                raise ValueError(f"Invalid value: {other}")
        return self
