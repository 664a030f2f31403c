"""Guide: a Req's part that knows its constraint."""

from __future__ import annotations

from dataclasses import dataclass

from bough.grammar.base import Matcher
from bough.grammar.compiler import Ticket

JUMPY = 8
"""A request is told to be jumpy when at least one in so many of its sampled tokens brings a forced run along."""


@dataclass(slots=True)
class Guide:
    """The matcher of one constrained request, or the compile that will give it one.

    The matcher has taken in exactly the generated ids that the host knows, whether they were sampled or forced; so
    it survives retractions and failed steps as it is.

    Attributes:
        jumps: forced ids may be appended without sampling them.
        ticket: the compile; None when it is over.
        matcher: None until then.
        warnings: what of the constraint is not enforced.
        complete: the known ids end with a forced end of sequence, so nothing is left to be sampled.
        sampled: tokens that were sampled.
        runs: how many of them were followed by forced ones.
    """

    jumps: bool
    ticket: Ticket | None = None
    matcher: Matcher | None = None
    warnings: tuple[str, ...] = ()
    complete: bool = False
    sampled: int = 0
    runs: int = 0

    @property
    def jumpy(self) -> bool:
        """Its next token is likely to bring forced ones along."""
        return self.jumps and self.runs * JUMPY >= self.sampled
