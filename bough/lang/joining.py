"""Ends of a fork that need not wait for everybody: the first valid state, a majority, any rule."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bough.lang.errors import ProgramError
from bough.lang.waiting import Signal

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class Race:
    """States that finish one after the other.

    Args:
        states: of the fork.
        name: a state is finished when this variable is there, and failed when it will not be; None: when all that was
            appended to it is done.

    Attributes:
        finished: numbers of the states that finished well, in the order in which they did.
        failed: numbers of those that failed.
        fresh: the state that has just finished well, None after one that failed.
    """

    def __init__(self, states: Sequence[StreamExecutor], name: str | None) -> None:
        self.states = states
        self.name = name
        self.finished: list[int] = []
        self.failed: list[int] = []
        self.fresh: int | None = None
        self._over: list[int] = []
        self._bell = Signal()
        for i, state in enumerate(states):
            event = state.idle if name is None else state.variable_event.get(name, state.idle)
            event.then(functools.partial(self._end, i))

    def _end(self, i: int) -> None:
        self._over.append(i)
        self._bell.set()

    def rounds(self) -> Iterator[Signal | None]:
        """None whenever a state finished or failed, else what to wait for; ends when all are over."""
        seen = 0
        while seen < len(self.states):
            self._bell = bell = Signal()
            if seen == len(self._over):
                yield bell
                continue
            i = self._over[seen]
            seen += 1
            self.fresh = i if self._is_there(self.states[i]) else None
            (self.failed if self.fresh is None else self.finished).append(i)
            yield None

    def _is_there(self, state: StreamExecutor) -> bool:
        return state.error_ is None and (self.name is None or self.name in state.variables)

    def value(self, i: int) -> Any:
        return self.states[i].variables.get(self.name)

    def stop(self, winners: Sequence[int]) -> None:
        """Stop everybody else."""
        for i, state in enumerate(self.states):
            if i not in winners:
                state.cancel("the fork was decided without it")

    def write_off(self, winners: Sequence[int]) -> None:
        """What everybody else generated was for nothing. Counted when they have stopped, until when answers come in."""
        for i, state in enumerate(self.states):
            if i not in winners:
                for call in state.calls:
                    call.wasted_tokens = max(call.wasted_tokens, call.generated_tokens)

    def failure(self, what: str) -> ProgramError:
        for i in self.failed:
            if self.states[i].error_ is not None:
                return self.states[i].failure(what)
        return ProgramError(f"{what}: none has the variable {self.name!r}" if self.failed else what)


def first_valid(race: Race, valid: Callable[[Any], object]) -> int | None:
    """The state that has just finished, if its value is accepted; a ValueError rejects as False does."""
    i = race.fresh
    if i is None:
        return None
    try:
        return i if valid(race.value(i)) is not False else None
    except (ValueError, AssertionError):
        return None


def majority(race: Race, key: Callable[[Any], Any], *, complete: bool) -> list[int] | None:
    """The states with the winning value, as soon as no other can catch up; the largest group when ``complete``."""
    keys = [_hashable(key(race.value(i))) for i in race.finished]
    votes = Counter(keys)
    if not votes:
        return None
    (best, most), *others = votes.most_common(2)
    second = others[0][1] if others else 0
    open_votes = len(race.states) - len(race.finished) - len(race.failed)
    if not complete and most <= second + open_votes:
        return None
    return [i for i, one in zip(race.finished, keys) if one == best]


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key
