"""A plan under construction, as the planner puts it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import Index, Ints, RowInit
from bough.scheduler.req import Req

T = TypeVar("T", bound=np.generic)

RESERVE = 5
"""One in so many tokens of a step is for those who need no further step for their prompt, if others go on in one."""


@dataclass(slots=True)
class Parts:
    """Columns of a plan under construction, one entry per group of rows."""

    budget: int
    """Tokens of the step, of which prompts get shares; beside many rows that generate there may be more."""
    reserve: int = 0
    """Of these, what a prompt that goes on in the next step leaves to those that end."""
    rows: list[Index] = field(default_factory=list)
    start: list[Ints] = field(default_factory=list)
    n_new: list[Ints] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    out_loc: list[Ints] = field(default_factory=list)
    admitted: list[RowInit] = field(default_factory=list)
    cut: Req | None = None
    """Who has more to compute than this plan gives it; one at most."""
    generating: bool = False
    """Whether a row that runs computes the one token it lacks."""
    entered: int = 0
    """Tokens of rows that this plan admits."""

    def share(self, mixed_tokens: int, generated: int, prompts: int) -> int:
        """Tokens that ``prompts`` prompts may have beside ``generated`` ones of rows that generate, in a step that has
        ``mixed_tokens`` for each of them then; sets what is shared out.

        One prompt alone goes in small steps, as nobody but those rows waits for it. Of many rows each step takes a
        while anyway, so that prompts have half of the small budget beside any number of them.
        """
        whole = self.budget
        if generated:
            self.generating = True
            self.budget = min(mixed_tokens * max(prompts, 1), whole)
        self.reserve = self.budget // RESERVE if prompts > 1 else 0
        return min(whole - generated, max(self.budget - generated, ceil(self.budget / 2)))

    def chunk(self, todo: int, budget: int) -> int:
        """How many of ``todo`` tokens a row computes with ``budget`` left: all if it can, as a rest of a few would cost
        a step of its own. Who cannot leaves a reserve for those who can."""
        return todo if todo <= budget else max(budget - self.reserve, min(budget, self.reserve))

    def add(self, rows: Index, start: Ints, n_new: Ints, tokens: Ints, out_loc: Ints) -> None:
        self.rows.append(rows)
        self.start.append(start)
        self.n_new.append(n_new)
        self.tokens.append(tokens)
        self.out_loc.append(out_loc)


def joined(parts: list[NDArray[T]]) -> NDArray[T]:
    """One column of its parts; the part itself where there is only one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def column(row: int, start: int, n: int) -> tuple[Index, Ints, Ints]:
    """Row, start and number of new tokens as a plan's columns."""
    return np.array([row], np.intp), np.array([start], np.int32), np.array([n], np.int32)
