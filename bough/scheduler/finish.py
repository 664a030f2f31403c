"""Stop rules: when a sequence is done, and why."""

from __future__ import annotations

from bough.base.messages import Finish
from bough.scheduler.req import Req
from bough.scheduler.rows import stop_set


def stop_reason(req: Req, token: int, n_ids: int, eos_ids: tuple[int, ...]) -> Finish | None:
    """Why ``req`` ends with ``token``, its ``n_ids``-th id; None if it goes on.

    The rules in order: end-of-sequence and stop ids, stop strings and patterns, length. None but the last
    applies before ``min_tokens``; the text is fed to the stop matcher all the same.
    """
    params = req.request.params
    generated = n_ids - req.n_prompt
    match = req.stop.push(token) if req.stop is not None else None
    if generated >= params.min_tokens:
        if token in stop_set(req, eos_ids):
            return Finish("stop", matched=token if token in params.stop_token_ids else None)
        if match is not None:
            return Finish("stop", matched=match.pattern)
    if n_ids >= req.limit:
        return Finish("length")
    return None
