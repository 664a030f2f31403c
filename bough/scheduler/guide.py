"""Guide: a Req's part that knows its constraint."""

from __future__ import annotations

from dataclasses import dataclass

from bough.grammar.base import Matcher
from bough.grammar.compiler import Ticket


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
    """

    jumps: bool
    ticket: Ticket | None = None
    matcher: Matcher | None = None
    warnings: tuple[str, ...] = ()
    complete: bool = False
