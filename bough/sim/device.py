"""A device whose KV cells hold data that can be checked.

The cell of a token holds a hash of the token and of the cell before it, which is *read through the page
table*; the next token is a function of the last cell. So a wrong, stale, unwritten or prematurely reused
cell changes a token, at the very position, and comparing tokens with :func:`oracle_tokens` finds it. Layers that see a
window have cells of their own, which have to hold the same wherever a new token sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import LAST, Failure, Ints, Masks, PositionLogprobs, RowInit, StepPlan, StepResult, first_seen
from bough.sim.clocked import Cost

FREE = Cost(0.0, 0.0, 0.0)
MASK = (1 << 64) - 1
POISON = 0xDEAD_BEEF_DEAD_BEEF


def mix(state: int, value: int) -> int:
    """One round of splitmix64 over ``state`` and ``value``."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def next_token(state: int, seed: int, position: int, vocab_size: int, allowed: Sequence[int] | None = None) -> int:
    """The token that follows a sequence whose last cell holds ``state``; ``seed`` is 0 for greedy.

    Of the ``allowed`` ids, rising, if there are any bounds at all.
    """
    draw = mix(mix(state, seed), position)
    return draw % vocab_size if allowed is None else allowed[draw % len(allowed)]


def logprob(state: int, token: int) -> float:
    """A stand-in for the logprob of ``token`` after ``state``."""
    return -(mix(state, token) % 4096) / 256.0


def oracle_tokens(
    prompt: Iterable[int], n: int, root: int, seed: int, vocab_size: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """Up to ``n`` generated ids, computed without any cache; ends after the first id in ``stop``."""
    state, position = root, 0
    for token in prompt:
        state = mix(state, token)
        position += 1
    out: list[int] = []
    while len(out) < n:
        token = next_token(state, seed, position, vocab_size)
        out.append(token)
        if token in stop:
            break
        state = mix(state, token)
        position += 1
    return out


@dataclass(slots=True)
class _Row:
    init: RowInit
    root: int
    last: int = 0


class FailedAfterWrite(Exception):
    """A fault raises it for a forward that fails when its cells are written."""


@dataclass(slots=True)
class Launched:
    """A step of the fake device, and what the host was asked about it when it was launched.

    Attributes:
        roots: first state of each row that enters.
        failed: the plan indices that fail alone, or why the forward fails.
        outcome: None until it was sampled, or failed.
    """

    plan: StepPlan
    roots: dict[int, int]
    failed: dict[int, str] | Exception
    outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class FakeDevice:
    """An Executor that follows plans and nothing else.

    Args:
        n_cells: cells of the pool.
        n_rows, max_len: shape of the page table.
        root: first state of a sequence; lets the tests make it depend on the namespace.
        fault: looks at a plan before it runs; an exception it raises fails the forward, a mapping it
            returns names the plan indices that fail alone.
        window: positions that some layers see, the cells that these have of their own, and whether the positions are
            chunks (:func:`first_seen`); (0, 0, False): none do.
        cost: what steps are said to have taken.
    """

    def __init__(
        self,
        n_cells: int,
        n_rows: int,
        max_len: int,
        vocab_size: int,
        root: Callable[[RowInit], int] = lambda init: 0,
        fault: Callable[[StepPlan], dict[int, str]] = lambda plan: {},
        window: tuple[int, int, bool] = (0, 0, False),
        cost: Cost = FREE,
    ) -> None:
        self.cells: NDArray[np.uint64] = np.full(n_cells, POISON, dtype=np.uint64)
        self.page_table: Ints = np.full((n_rows, max_len), -1, dtype=np.int32)
        self.window, n_window_cells, self.chunked = window
        self.window_cells: NDArray[np.uint64] = np.full(n_window_cells, POISON, dtype=np.uint64)
        self.window_table = self.page_table.copy()
        self.vocab_size = vocab_size
        self.steps = 0
        self.computed_tokens = 0
        self._root = root
        self._fault = fault
        self._cost = cost
        self._rows: dict[int, _Row] = {}

    def forward(self, plan: StepPlan) -> Launched:
        launched = self.order(plan)
        self.compute(launched)
        return launched

    def order(self, plan: StepPlan) -> Launched:
        """``plan``, yet to be computed, with all that depends on the host at this moment."""
        roots = {init.row: self._root(init) for init in plan.admitted}
        try:
            return Launched(plan, roots, self._fault(plan))
        except Exception as error:
            return Launched(plan, roots, error)

    def compute(self, launched: Launched) -> None:
        """The forward of what was ordered."""
        self.steps += 1
        plan = launched.plan
        for row in plan.released.tolist():
            del self._rows[row]
            self.page_table[row] = -1
        for init in plan.admitted:
            if init.row in self._rows:
                raise AssertionError(f"row {init.row} was admitted while it was taken")
            self._rows[init.row] = _Row(init, launched.roots[init.row])
            self.page_table[init.row, : len(init.prefix_locs)] = init.prefix_locs
            if init.window_locs is not None:
                self.window_table[init.row, : len(init.prefix_locs)] = init.window_locs
        self._enter_locs(plan)
        self._check_shared(plan)
        if isinstance(launched.failed, Exception):
            launched.outcome = launched.failed
        if launched.outcome is None or isinstance(launched.failed, FailedAfterWrite):
            self._write(plan)

    def sample(self, forward: Launched, masks: Masks | None = None) -> Launched:
        if not isinstance(forward.failed, Exception):
            forward.outcome = self._sample(forward.plan, forward.failed, masks)
        return forward

    def copy(self) -> FakeDevice:
        """Another device in the same state."""
        twin = copy(self)
        twin.cells, twin.page_table = self.cells.copy(), self.page_table.copy()
        twin.window_cells, twin.window_table = self.window_cells.copy(), self.window_table.copy()
        twin._rows = {row: replace(held) for row, held in self._rows.items()}
        return twin

    def shutdown(self) -> None:
        self._rows.clear()

    def poison(self, locs: Ints, window: bool = False) -> None:
        """Overwrite cells that were freed, of layers that see a ``window`` or of the others; what is read from them
        shows in the tokens."""
        (self.window_cells if window else self.cells)[locs] = POISON

    def _enter_locs(self, plan: StepPlan) -> None:
        for row, start, begin, end in _spans(plan):
            self.page_table[row, start : start + end - begin] = plan.out_loc[begin:end]
            if plan.window_loc is not None:
                self.window_table[row, start : start + end - begin] = plan.window_loc[begin:end]

    def _check_shared(self, plan: StepPlan) -> None:
        """Whoever reads a prefix once for a group would read wrong cells if this did not hold."""
        members: list[int] = [i for prefix in plan.shared for i in prefix.rows.tolist()]
        if len(set(members)) != len(members):
            raise AssertionError("a row is in two groups")
        for rows, n_tokens in plan.shared:
            if len(rows) < 2 or n_tokens < 1 or (np.diff(rows) <= 0).any():
                raise AssertionError(f"a group of rows {rows} over {n_tokens} tokens")
            if (plan.start[rows] < n_tokens).any():
                raise AssertionError(f"a prefix of {n_tokens} tokens reaches into the new tokens of a row")
            locs = self.page_table[plan.rows[rows], :n_tokens]
            if (locs != locs[0]).any():
                raise AssertionError(f"rows {plan.rows[rows]} do not share their first {n_tokens} locs")

    def _write(self, plan: StepPlan) -> None:
        # Rows may read what others write in this step, so they are written in an order in which the cell
        # before is there: by position.
        work = sorted(
            (start + k, row, begin + k) for row, start, begin, end in _spans(plan) for k in range(end - begin)
        )
        for position, row, index in work:
            state = self._rows[row]
            token = int(plan.tokens[index])
            if token == LAST:
                token = state.last
            value = mix(self._state(row, position), token)
            self.cells[plan.out_loc[index]] = value
            if plan.window_loc is not None:
                self.window_cells[plan.window_loc[index]] = value
            self.computed_tokens += 1

    def _state(self, row: int, position: int) -> int:
        """State before the token at ``position`` of ``row``."""
        if position == 0:
            return self._rows[row].root
        return int(self.cells[self.page_table[row, position - 1]]) ^ self._unseen(row, position)

    def _unseen(self, row: int, position: int) -> int:
        """Another number than 0 if a token at ``position`` does not see through its window what is before it."""
        if not self.window:
            return 0
        seen = slice(max(0, first_seen(position, self.window, self.chunked)), position)
        locs = self.window_table[row, seen]
        if (locs < 0).any():
            return POISON
        right = np.array_equal(self.window_cells[locs], self.cells[self.page_table[row, seen]])
        return 0 if right else POISON

    def _sample(self, plan: StepPlan, failed: dict[int, str], masks: Masks | None) -> StepResult:
        allowed = {} if masks is None else dict(zip(masks.rows.tolist(), allowed_ids(masks.bits, self.vocab_size)))
        counts = np.zeros(len(plan.rows), dtype=np.int32)
        tokens: list[int] = []
        failures = {i: Failure(reason) for i, reason in failed.items()}
        result = StepResult(plan.step, np.empty(0, np.int32), counts, seconds=self._cost.of(plan), failed=failures)
        for i, (row, start, begin, end) in enumerate(_spans(plan)):
            state, stop = self._rows[row], start + end - begin
            if i in failed:
                continue
            params = state.init.params
            targets = range(max(start + 1, state.init.logprob_from), min(stop + 1, state.init.n_prompt))
            if targets:
                result.prompt_logprobs[i] = [self._logprob(row, p, int(state.init.ids[p])) for p in targets]
            if i in plan.forced:
                first, ids = plan.forced[i]
                result.logprobs[i] = [self._logprob(row, first + k, token) for k, token in enumerate(ids.tolist())]
            if plan.sample[i]:
                if i in allowed and stop < state.init.n_prompt + params.min_tokens:
                    ends = {*state.init.eos_ids, *params.stop_token_ids}
                    allowed[i] = [token for token in allowed[i] if token not in ends]
                if i in allowed and not allowed[i]:
                    result.failed[i] = Failure("nothing may be sampled", 400)
                    continue
                seed = 0 if params.temperature == 0 else state.init.seed
                token = next_token(self._state(row, stop), seed, stop, self.vocab_size, allowed.get(i))
                state.last = token
                counts[i] = 1
                tokens.append(token)
                if params.logprobs is not None:
                    result.logprobs.setdefault(i, []).append(self._logprob(row, stop, token))
        result.tokens = np.array(tokens, dtype=np.int32)
        return result

    def _logprob(self, row: int, position: int, token: int) -> PositionLogprobs:
        return PositionLogprobs(token, logprob(self._state(row, position), token), 1, [], [])


def allowed_ids(bits: Ints, vocab_size: int) -> list[list[int]]:
    """The ids that each mask of ``bits`` [N, ceil(V / 32)] allows; AssertionError if one is beyond the vocabulary."""
    found = []
    for words in bits:
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert not len(ids) or ids[-1] < vocab_size, "a mask allows ids that do not exist"
        found.append(ids.tolist())
    return found


def _spans(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(row, start, first index among the new tokens, and behind the last) of each row."""
    ends = np.cumsum(plan.n_new)
    begins = ends - plan.n_new
    return list(zip(plan.rows.tolist(), plan.start.tolist(), begins.tolist(), ends.tolist(), strict=True))
