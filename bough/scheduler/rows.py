"""Per-row arrays of the running sequences, so that a step touches hundreds of rows in a few numpy calls."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bough.base.plan import Bools, Index, Ints
from bough.scheduler.req import NO_ROW, Req


class Rows:
    """What runs, by row. All arrays have ``n_rows`` entries; R stands for the running rows.

    For one row::

        ids       0 ........................ n_ids | ahead: sampled on the device, not yet seen here
        KV        0 ..... computed ..... planned   <= n_ids + ahead
                  present ^  in flight ^

    Attributes:
        ids: [n_rows, max_len] int32, known ids.
        flat, begin: ids one row behind the other, and where there each row begins.
        n_ids: number of them.
        ahead: tokens that steps in flight will add.
        foreseen: tokens that steps in flight will sample and that are known already, because the grammar forced them.
        computed: tokens whose KV is present, as far as the host knows.
        planned: the same once the steps in flight are done.
        limit: most ids the sequence may have.
        n_prompt: length of its prompt.
        n_entered: number of its known ids when it got the row.
        look_from: the token that makes so many ids, or more, needs a closer look: any one where there are stop strings,
            logprobs or a budget, else the last. Of guided rows every token is looked at in any case.
        guided: the row has a matcher, or will have one.
        traced: it is guided, and its logprobs are reported.
        held: its matcher is still being made, so it may not sample yet: its last id is not computed.
        background: nobody asked for it.
        in_flight: number of launched steps that contain the row.
        live: the row's request has not ended; a row that is neither live nor in flight is released.
        reqs: the request that owns each row.
        n_guided: how many of those that run are guided.
    """

    def __init__(self, n_rows: int, max_len: int) -> None:
        self.ids: Ints = np.zeros((n_rows, max_len), dtype=np.int32)
        self.flat: Ints = self.ids.reshape(-1)
        self.begin: Index = np.arange(n_rows, dtype=np.intp) * max_len
        self.n_ids: Ints = np.zeros(n_rows, dtype=np.int32)
        self.ahead: Ints = np.zeros(n_rows, dtype=np.int32)
        self.foreseen: Ints = np.zeros(n_rows, dtype=np.int32)
        self.computed: Ints = np.zeros(n_rows, dtype=np.int32)
        self.planned: Ints = np.zeros(n_rows, dtype=np.int32)
        self.limit: Ints = np.zeros(n_rows, dtype=np.int32)
        self.n_prompt: Ints = np.zeros(n_rows, dtype=np.int32)
        self.n_entered: Ints = np.zeros(n_rows, dtype=np.int32)
        self.look_from: Ints = np.zeros(n_rows, dtype=np.int32)
        self.guided: Bools = np.zeros(n_rows, dtype=np.bool_)
        self.traced: Bools = np.zeros(n_rows, dtype=np.bool_)
        self.held: Bools = np.zeros(n_rows, dtype=np.bool_)
        self.background: Bools = np.zeros(n_rows, dtype=np.bool_)
        self.in_flight: Ints = np.zeros(n_rows, dtype=np.int32)
        self.live: Bools = np.zeros(n_rows, dtype=np.bool_)
        self.reqs: list[Req | None] = [None] * n_rows
        self.n_guided = 0
        self._order: dict[int, None] = {}
        self._rows: Index | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def running(self) -> Index:
        """[R] rows in order of admission, oldest first."""
        if self._rows is None:
            self._rows = np.fromiter(self._order, dtype=np.intp, count=len(self._order))
        return self._rows

    def owners(self, rows: Iterable[int]) -> list[Req]:
        """The requests of ``rows``, which must all be owned."""
        return [self.req(row) for row in rows]

    def req(self, row: int) -> Req:
        req = self.reqs[row]
        assert req is not None
        return req

    def enter(self, row: int, req: Req, cached_len: int) -> None:
        """Give ``row`` to ``req``, whose first ``cached_len`` tokens have their KV in the cache."""
        params = req.request.params
        n = len(req.ids)
        self.ids[row, :n] = req.ids
        self.n_ids[row] = self.n_entered[row] = n
        self.ahead[row] = self.in_flight[row] = self.foreseen[row] = 0
        self.computed[row] = self.planned[row] = cached_len
        self.n_prompt[row] = req.n_prompt
        looks = (
            req.stop is not None
            or params.logprobs is not None
            or bool(params.logprob_token_ids)
            or (req.program is not None and req.program.budget is not None)
        )
        self.limit[row] = n if req.guide is not None and req.guide.complete else req.limit
        self.look_from[row] = 0 if looks else req.limit
        self.guided[row] = req.guide is not None
        self.n_guided += req.guide is not None
        self.traced[row] = req.guide is not None and params.logprobs is not None
        self.held[row] = req.held
        self.background[row] = req.background
        self.live[row] = True
        self.reqs[row] = req
        self._order[row] = None
        self._rows = None
        req.row = row

    def watch(self, reqs: Iterable[Req]) -> None:
        """Look at every token of ``reqs`` from now on, as of the next one."""
        for req in reqs:
            if req.row != NO_ROW:
                self.look_from[req.row] = 0

    def foresee(self, row: int, ids: list[int]) -> None:
        """Append ``ids``, which the grammar forces. A step in flight that samples for ``row`` will sample the first."""
        n = int(self.n_ids[row])
        self.ids[row, n : n + len(ids)] = ids
        self.n_ids[row] = n + len(ids)
        if ids and self.ahead[row]:
            self.ahead[row] -= 1
            self.foreseen[row] = 1

    def leave(self, row: int) -> None:
        """Take ``row`` away from its request, whose ``ids`` are brought up to date."""
        req = self.req(row)
        req.ids = self.ids[row, : self.n_ids[row]].copy()
        req.row = NO_ROW
        self.reqs[row] = None
        self.live[row] = False
        self.n_guided -= bool(self.guided[row])
        del self._order[row]
        self._rows = None
