"""Log-probabilities of sampled tokens and of the prompt.

All are of the raw logits: before penalties, bias, masks and temperature, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import Ints, PositionLogprobs, RowInit
from bough.device.ops.registry import Ops
from bough.device.ops.sampling import TokenLogprobs
from bough.device.platform.copies import Fetch, to_device
from bough.worker.sampling.base import Tensor

CHUNK = 32
"""Prompt positions whose logits exist at one time; bounds the memory of a long prompt's logprobs."""


def position_logprobs(
    ops: Ops, logits: Tensor, tokens: list[int], n_top: int, asked: tuple[int, ...]
) -> list[PositionLogprobs]:
    """One entry per row of ``logits`` [N, V], about ``tokens`` [N], with ``n_top`` alternatives and the ``asked`` ids.

    The rank counts from 1 in the order of ``top``: falling logit, ties by rising id.
    """
    report = Report.launch(ops, logits, to_device(np.array(tokens, np.int64), logits.device), n_top, asked)
    return report.entries(tokens, Fetch(*report.tensors).arrays())


@dataclass(frozen=True, slots=True)
class Report:
    """Logprobs of N rows, still on the device.

    Attributes:
        asked: ids that were asked for.
        found: what the op gave.
        members: indices of the rows in their step, where they are not all.
    """

    asked: tuple[int, ...]
    found: TokenLogprobs
    members: list[int]

    @classmethod
    def launch(
        cls,
        ops: Ops,
        logits: Tensor,
        tokens: Tensor,
        n_top: int,
        asked: tuple[int, ...],
        members: list[int] | None = None,
    ) -> Report:
        """About ``tokens`` [N] int64, from ``logits`` [N, V]."""
        wanted = to_device(np.array(asked, np.int64), logits.device)
        found = ops.logprobs(logits, tokens, min(n_top, logits.shape[1]), wanted)
        return cls(asked, found, [] if members is None else members)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What has to come to the host."""
        found = self.found
        return found.chosen, found.ranks, found.top_ids, found.top, found.asked

    def entries(self, tokens: list[int], arrays: list[NDArray[Any]]) -> list[PositionLogprobs]:
        """One for each of ``tokens`` [N]; ``arrays`` are the tensors on the host."""
        return [
            PositionLogprobs(
                token, value, rank, [(i, p) for i, p in zip(ids, values) if i >= 0], list(zip(self.asked, wanted))
            )
            for token, value, rank, ids, values, wanted in zip(tokens, *(array.tolist() for array in arrays))
        ]


class Logprobs:
    """Rows that report logprobs with each sampled token.

    Attributes:
        rows: they, with how many alternatives and which ids they want.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.rows: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.params.logprobs is not None:
            self.rows[row] = init.params.logprobs, init.params.logprob_token_ids

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def launch(self, logits: Tensor, rows: list[int], tokens: Tensor) -> list[Report]:
        """Reports of ``tokens`` [S], for the rows that ask for them; those who ask for the same are answered together.

        ``logits`` [S, V] are raw. Of a row that fails, whose token is negative, a report says nothing.
        """
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        if self.rows:
            for i, row in enumerate(rows):
                if row in self.rows:
                    groups.setdefault(self.rows[row], []).append(i)
        reports = []
        for (n_top, asked), members in groups.items():
            part, chosen = logits, tokens.clamp(min=0)
            if len(members) < len(logits):
                at = to_device(np.array(members), logits.device)
                part, chosen = logits[at], chosen[at]
            reports.append(Report.launch(self._ops, part, chosen, n_top, asked, members))
        return reports

    def finish(
        self, reports: list[Report], arrays: list[NDArray[Any]], tokens: list[int], failed: Container[int]
    ) -> dict[int, list[PositionLogprobs]]:
        """Index -> report of the token sampled there; ``arrays`` are the tensors of all reports on the host."""
        found: dict[int, list[PositionLogprobs]] = {}
        for n, report in enumerate(reports):
            columns = arrays[n * len(report.tensors) : (n + 1) * len(report.tensors)]
            entries = report.entries([tokens[i] for i in report.members], columns)
            found |= {i: [entry] for i, entry in zip(report.members, entries) if i not in failed}
        return found

    def of(self, row: int, raw: Tensor, tokens: list[int]) -> list[PositionLogprobs]:
        """Entries about ``tokens`` [N] of ``row``, from their logits ``raw`` [N, V]."""
        n_top, asked = self.rows[row]
        return position_logprobs(self._ops, raw, tokens, n_top, asked)


class _Prompt:
    """The prompt of one row that reports prompt logprobs."""

    def __init__(self, init: RowInit, n_top: int) -> None:
        self.ids: Ints = init.ids[: init.n_prompt].copy()
        # Nothing precedes position 0, so it has no logprob.
        self.first = max(1, init.logprob_from)
        self.n_top, self.asked = n_top, init.params.logprob_token_ids

    def targets(self, start: int, n_new: int) -> range:
        """Prompt positions whose logprobs follow from the logits of positions ``start .. start + n_new - 1``."""
        return range(max(self.first, start + 1), min(start + n_new + 1, len(self.ids)))


class PromptLogprobs:
    """Rows that report the logprobs of their prompt, chunk by chunk as it is computed.

    Attributes:
        rows: they, and what is to be reported.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.rows: dict[int, _Prompt] = {}

    def add(self, row: int, init: RowInit) -> None:
        n_top = init.params.prompt_logprobs
        if n_top is not None and init.logprob_from < init.n_prompt:
            self.rows[row] = _Prompt(init, n_top)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def covers(self, row: int, start: int, n_new: int) -> bool:
        """Whether a step that computes these positions of ``row`` has anything to report."""
        return row in self.rows and len(self.rows[row].targets(start, n_new)) > 0

    def report(self, row: int, start: int, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> list[PositionLogprobs]:
        """Entries for the prompt positions that this step covers, in order.

        Args:
            row: the row.
            start: position of the first new token.
            hidden: [n_new, D] last hidden states of the row's new tokens.
            head: hidden states [N, D] -> logits [N, V].
        """
        prompt = self.rows[row]
        targets = prompt.targets(start, len(hidden))
        entries: list[PositionLogprobs] = []
        for first in range(targets.start, targets.stop, CHUNK):
            stop = min(first + CHUNK, targets.stop)
            logits = head(hidden[first - 1 - start : stop - 1 - start])
            tokens = prompt.ids[first:stop].tolist()
            entries += position_logprobs(self._ops, logits, tokens, prompt.n_top, prompt.asked)
        return entries
