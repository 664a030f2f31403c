"""A device whose KV cells hold data that can be checked.

The cell of a token holds a hash of the token and of the cell before it, which is *read through the page
table*; the next token is a function of the last cell. So a wrong, stale, unwritten or prematurely reused
cell changes a token, at the very position, and comparing tokens with :func:`oracle_tokens` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import LAST, Failure, Ints, PositionLogprobs, RowInit, StepPlan, StepResult

MASK = (1 << 64) - 1
POISON = 0xDEAD_BEEF_DEAD_BEEF


def mix(state: int, value: int) -> int:
    """One round of splitmix64 over ``state`` and ``value``."""
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def next_token(state: int, seed: int, position: int, vocab_size: int) -> int:
    """The token that follows a sequence whose last cell holds ``state``; ``seed`` is 0 for greedy."""
    return mix(mix(state, seed), position) % vocab_size


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


@dataclass(frozen=True, slots=True)
class Launched:
    """A step of the fake device: computed when it was launched, read when it is committed."""

    plan: StepPlan
    outcome: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeDevice:
    """An Executor that follows plans and nothing else.

    Args:
        n_cells: cells of the pool.
        n_rows, max_len: shape of the page table.
        root: first state of a sequence; lets the tests make it depend on the namespace.
        fault: looks at a plan before it runs; an exception it raises fails the forward, a mapping it
            returns names the plan indices that fail alone.
    """

    def __init__(
        self,
        n_cells: int,
        n_rows: int,
        max_len: int,
        vocab_size: int,
        root: Callable[[RowInit], int] = lambda init: 0,
        fault: Callable[[StepPlan], dict[int, str]] = lambda plan: {},
    ) -> None:
        self.cells: NDArray[np.uint64] = np.full(n_cells, POISON, dtype=np.uint64)
        self.page_table: Ints = np.full((n_rows, max_len), -1, dtype=np.int32)
        self.vocab_size = vocab_size
        self.steps = 0
        self.computed_tokens = 0
        self._root = root
        self._fault = fault
        self._rows: dict[int, _Row] = {}

    def forward(self, plan: StepPlan) -> Launched:
        self.steps += 1
        for row in plan.released.tolist():
            del self._rows[row]
            self.page_table[row] = -1
        for init in plan.admitted:
            if init.row in self._rows:
                raise AssertionError(f"row {init.row} was admitted while it was taken")
            self._rows[init.row] = _Row(init, self._root(init))
            self.page_table[init.row, : len(init.prefix_locs)] = init.prefix_locs
        self._enter_locs(plan)
        self._check_shared(plan)
        try:
            failed = self._fault(plan)
        except Exception as error:
            return Launched(plan, error)
        return Launched(plan, self._run(plan, failed))

    def sample(self, forward: Launched) -> Launched:
        return forward

    def shutdown(self) -> None:
        self._rows.clear()

    def poison(self, locs: Ints) -> None:
        """Overwrite cells that were freed; what is read from them shows in the tokens."""
        self.cells[locs] = POISON

    def _enter_locs(self, plan: StepPlan) -> None:
        begin = 0
        for row, start, n in zip(plan.rows.tolist(), plan.start.tolist(), plan.n_new.tolist(), strict=True):
            self.page_table[row, start : start + n] = plan.out_loc[begin : begin + n]
            begin += n

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

    def _run(self, plan: StepPlan, failed: dict[int, str]) -> StepResult:
        ends = np.cumsum(plan.n_new)
        begins = ends - plan.n_new
        spans = list(zip(plan.rows.tolist(), plan.start.tolist(), begins.tolist(), ends.tolist(), strict=True))
        # Rows may read what others write in this step, so they are written in an order in which the cell
        # before is there: by position.
        work = sorted((start + k, row, begin + k) for row, start, begin, end in spans for k in range(end - begin))
        for position, row, index in work:
            state = self._rows[row]
            token = int(plan.tokens[index])
            if token == LAST:
                token = state.last
            self.cells[plan.out_loc[index]] = mix(self._state(row, position), token)
            self.computed_tokens += 1
        return self._sample(plan, spans, failed)

    def _state(self, row: int, position: int) -> int:
        """State before the token at ``position`` of ``row``."""
        return self._rows[row].root if position == 0 else int(self.cells[self.page_table[row, position - 1]])

    def _sample(self, plan: StepPlan, spans: list[tuple[int, int, int, int]], failed: dict[int, str]) -> StepResult:
        counts = np.zeros(len(plan.rows), dtype=np.int32)
        tokens: list[int] = []
        failures = {i: Failure(reason) for i, reason in failed.items()}
        result = StepResult(plan.step, np.empty(0, np.int32), counts, failed=failures)
        for i, (row, start, begin, end) in enumerate(spans):
            state, stop = self._rows[row], start + end - begin
            if i in failed:
                continue
            params = state.init.params
            targets = range(max(start + 1, state.init.logprob_from), min(stop + 1, state.init.n_prompt))
            if targets:
                result.prompt_logprobs[i] = [self._logprob(row, p, int(state.init.ids[p])) for p in targets]
            if plan.sample[i]:
                seed = 0 if params.temperature == 0 else state.init.seed
                token = next_token(self._state(row, stop), seed, stop, self.vocab_size)
                state.last = token
                counts[i] = 1
                tokens.append(token)
                if params.logprobs is not None:
                    result.logprobs[i] = [self._logprob(row, stop, token)]
        result.tokens = np.array(tokens, dtype=np.int32)
        return result

    def _logprob(self, row: int, position: int, token: int) -> PositionLogprobs:
        return PositionLogprobs(token, logprob(self._state(row, position), token), 1, [], [])
