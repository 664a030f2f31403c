"""Stop rules: when a sequence is done, and why."""

from __future__ import annotations

from bough.base.messages import Finish
from bough.scheduler.req import Req

OVER_BUDGET = Finish("length", message="the program has generated its budget")
"""The ending of a request whose next token is beyond the budget of its program; that token is not sent."""


def stop_reason(req: Req, token: int, n_ids: int) -> Finish | None:
    """Why ``req`` ends with ``token``, its ``n_ids``-th id; None if it goes on.

    The rules in order: end-of-sequence and stop ids, stop strings and patterns, length. None but the last
    applies before ``min_tokens``; the text is fed to the stop matcher all the same. A program's budget comes first.
    """
    program = None if req.request.unseen else req.program
    if program is not None and program.budget is not None:
        if program.spent >= program.budget:
            return OVER_BUDGET
        program.spent += 1
    params = req.request.params
    generated = n_ids - req.n_prompt
    match = req.stop.push(token) if req.stop is not None else None
    if generated >= params.min_tokens:
        if token in req.stops:
            return Finish("stop", matched=token if token in params.stop_token_ids else None)
        if match is not None:
            return Finish("stop", matched=match.pattern)
    if n_ids >= req.limit:
        return Finish("length")
    if program is not None and program.spent == program.budget:
        return Finish("length", message=OVER_BUDGET.message)
    return None
