"""How much a tenant may have in flight at one time, so that nobody keeps the others out."""

from __future__ import annotations

from dataclasses import dataclass

from bough.base.errors import InvalidRequest
from bough.server.errors import QuotaExceeded


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on what one tenant has in flight; None is no bound.

    Attributes:
        requests: sequences: every answer to every prompt of a request is one.
        tokens: of their prompts, and the most that they may generate.
        queue_share: of the sequences that the server takes from everybody together, in (0, 1].
    """

    requests: int | None = None
    tokens: int | None = None
    queue_share: float = 1.0


UNBOUNDED = Quota()


@dataclass(slots=True)
class Held:
    """What one tenant has in flight."""

    sequences: int = 0
    tokens: int = 0

    def check(self, quota: Quota, sequences: int, tokens: int, queue: int) -> None:
        """Whether so much more is within ``quota``, where the server takes ``queue`` sequences.

        Raises InvalidRequest for what is over it even alone, else QuotaExceeded.
        """
        share = max(1, int(quota.queue_share * queue))
        bounds = (
            ("sequences", self.sequences, sequences, share if quota.requests is None else min(share, quota.requests)),
            ("tokens", self.tokens, tokens, quota.tokens),
        )
        for what, held, more, most in bounds:
            if most is None or held + more <= most:
                continue
            if more > most:
                raise InvalidRequest(
                    f"the request may come to {more} {what}; your quota is {most}", code="quota_too_small"
                )
            raise QuotaExceeded(f"{held} {what} of yours are in flight, {more} more are over your quota of {most}")
