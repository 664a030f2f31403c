"""What programs are about to append, computed while nobody else wants the device.

A client that knows what it will append to an answer says so (:attr:`bough.base.program.Program.after`). Once the
answer is there, prompt, answer and that text wait here. They run through rows, cells and plans as requests do, in a
class below all of them: one at a time, only where no request that waits could run, slowly beside others, with cells
that hold nothing worth more, and away at once where a request wants the row or the cells. What was computed until then
stays in the cache, where the program's next request finds it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from bough.base.messages import Request
from bough.base.plan import NO_ADAPTER
from bough.base.shares import Shares
from bough.kv.manager import KVManager
from bough.scheduler.adapters import Adapters
from bough.scheduler.program_state import Ahead
from bough.scheduler.programs import Programs
from bough.scheduler.req import NO_ROW, Req, Status

BESIDE = 4
"""Beside requests, one token is computed ahead for so many of theirs, and at least one."""
ALONE_TOKENS = 16
ALONE_SECONDS = 0.02
"""A step without requests computes so many tokens, or what it can in that time: whoever arrives waits for its end."""
WAITING = 256
"""Most that wait, of all tenants; whose tenant has most goes first, the oldest of it."""


class Background:
    """Holds what waits; the planner gives rows."""

    def __init__(self, kv: KVManager, programs: Programs, adapters: Adapters) -> None:
        self._kv = kv
        self._programs = programs
        self._adapters = adapters
        self._waiting: dict[int, Req] = {}  # by order, oldest first
        self._shares: Shares[int] = Shares()
        self.running: Req | None = None
        """What has a row, unless it was stopped."""
        self._record: Ahead | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self.running is not None)

    def push(self, req: Req) -> None:
        self._waiting[req.order] = req
        self._shares.put(req.request.namespace.tenant, req.order)
        if len(self._waiting) > WAITING:
            self._drop(self._waiting[self._shares.oldest()[1]])

    def _drop(self, req: Req) -> None:
        del self._waiting[req.order]
        self._shares.pop(req.request.namespace.tenant, req.order)

    def clear(self) -> None:
        """Forget what waits."""
        for req in list(self._waiting.values()):
            self._drop(req)

    @property
    def alone(self) -> int:
        """How many tokens a step without requests may compute."""
        token_seconds = self._programs.costs.token_seconds
        return max(ALONE_TOKENS, int(ALONE_SECONDS / token_seconds)) if token_seconds else ALONE_TOKENS

    def next(self) -> Req | None:
        """What to go on with, or to begin with."""
        if self.running is not None:
            return self.running
        while self._waiting:
            req = next(iter(self._waiting.values()))
            if self._wanted(req) and self._adapt(req):
                return req
            self._drop(req)
        return None

    def began(self, req: Req, cached_len: int) -> None:
        """``req``, which waited, has a row."""
        self._drop(req)
        self.running = req
        assert req.program is not None
        req.cached_len = cached_len
        self._record = Ahead(req.request.namespace, req.ids, cached_len)
        self._programs.runs_ahead(req.program, self._record)

    def planned(self, n: int) -> None:
        """The next ``n`` tokens of what runs are in a plan."""
        assert self._record is not None
        self._record.end += n
        self._programs.prefetched += n

    def stopped(self, req: Req) -> None:
        """``req``, which may be what runs here, is over."""
        if req is self.running:
            self.running = None

    def stale(self) -> bool:
        """Nobody waits any more for what runs, or it has lost its adapter."""
        req = self.running
        return req is not None and not (self._wanted(req) and self._adapt(req))

    def overtaken(self, request: Request) -> bool:
        """``request`` begins as what waits or runs here does, and goes on by itself; whether what runs has to stop."""
        for req in [req for req in self._waiting.values() if self._overtakes(request, req)]:
            self._drop(req)
        return self.running is not None and self._overtakes(request, self.running)

    def _overtakes(self, request: Request, req: Req) -> bool:
        state, named = req.program, request.program
        assert state is not None
        if named is None or state.key != (request.namespace.tenant, named.id):
            return False
        known = req.cached_len
        if req.row == NO_ROW:
            self._adapt(req)
            known = self._kv.match_len(req.request.namespace, req.ids, req.match_limit)
        prompt = request.prompt
        return known < len(prompt) and bool(np.array_equal(prompt[: known + 1], req.ids[: known + 1]))

    def _wanted(self, req: Req) -> bool:
        """The program of ``req`` goes on."""
        state = req.program
        assert state is not None
        return not state.ended and self._programs.find(*state.key) is state

    def _adapt(self, req: Req) -> bool:
        """``req`` has its adapter, which is there and stays; it never makes anybody wait for one."""
        namespace = req.request.namespace
        name = namespace.adapter.partition("@")[0]
        if not name:
            return True
        found = self._adapters.ready(name)
        if found is None:
            return False
        if req.adapter != NO_ADAPTER:
            return found == (req.adapter, namespace.adapter)
        req.adapter = found[0]
        req.request = msgspec.structs.replace(
            req.request, namespace=msgspec.structs.replace(namespace, adapter=found[1])
        )
        return True


def made(request: Request, order: int, arrival: float, seed: int) -> Req:
    """The Req of ``request``, which computes a prompt and tells nobody. Its program is yet to be set."""
    return Req(
        request=request,
        order=order,
        arrival=arrival,
        deadline=float("inf"),
        seed=seed,
        limit=len(request.prompt),
        stop=None,
        ids=request.prompt,
        logprob_from=len(request.prompt),
        status=Status.WAITING,
        background=True,
    )
