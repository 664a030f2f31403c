"""Log-probabilities of sampled tokens and of the prompt.

All are of the raw logits: before penalties, bias, masks and temperature, in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bough.base.plan import Ints, PositionLogprobs, RowInit
from bough.worker.sampling.base import Tensor

CHUNK = 32
"""Prompt positions whose logits exist at one time; bounds the memory of a long prompt's logprobs."""


def position_logprobs(logits: Tensor, tokens: list[int], n_top: int, asked: tuple[int, ...]) -> list[PositionLogprobs]:
    """One entry per row of ``logits`` [N, V], about ``tokens`` [N], with ``n_top`` alternatives and the ``asked`` ids.

    The rank counts from 1 in the order of ``top``: falling logprob, ties by rising id.
    """
    logprobs = logits.float().log_softmax(-1)
    columns = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logprobs.gather(1, columns)
    before = (logprobs == chosen) & (torch.arange(logprobs.shape[1], device=logits.device) < columns)
    ranks = ((logprobs > chosen).sum(-1) + before.sum(-1) + 1).tolist()
    wanted = logprobs[:, list(asked)].tolist()
    tops = _tops(logprobs, n_top)
    return [
        PositionLogprobs(token, value, rank, top, list(zip(asked, values)))
        for token, value, rank, top, values in zip(tokens, chosen[:, 0].tolist(), ranks, tops, wanted)
    ]


def _tops(logprobs: Tensor, n: int) -> list[list[tuple[int, float]]]:
    """The n largest of each row, ties by rising id (which top-k alone does not promise)."""
    if n == 0:
        return [[] for _ in logprobs]
    n = min(n, logprobs.shape[1])
    thresholds = logprobs.topk(n, dim=-1).values[:, -1]
    tops = []
    for row, threshold in zip(logprobs, thresholds):
        ids = (row >= threshold).nonzero()[:, 0].cpu().numpy()
        values = row[row >= threshold].cpu().numpy()
        order = np.lexsort((ids, -values))[:n]
        tops.append(list(zip(ids[order].tolist(), values[order].tolist())))
    return tops


class Logprobs:
    """Rows that report logprobs with each sampled token.

    ``capture`` keeps what it needs of the raw logits, before other features change them in place;
    ``report`` answers when the tokens are known.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.params.logprobs is not None:
            self._rows[row] = init.params.logprobs, init.params.logprob_token_ids

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    def capture(self, logits: Tensor, rows: list[int]) -> dict[int, Tensor]:
        """Index in ``rows`` -> a copy of its raw logits [1, V], for the rows that report."""
        return {i: logits[i : i + 1].clone() for i, row in enumerate(rows) if row in self._rows}

    def report(self, row: int, raw: Tensor, tokens: list[int]) -> list[PositionLogprobs]:
        """Entries about ``tokens`` [N], from their logits ``raw`` [N, V]."""
        n_top, asked = self._rows[row]
        return position_logprobs(raw, tokens, n_top, asked)


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
    """Rows that report the logprobs of their prompt, chunk by chunk as it is computed."""

    def __init__(self) -> None:
        self._rows: dict[int, _Prompt] = {}

    def add(self, row: int, init: RowInit) -> None:
        n_top = init.params.prompt_logprobs
        if n_top is not None and init.logprob_from < init.n_prompt:
            self._rows[row] = _Prompt(init, n_top)

    def remove(self, row: int) -> None:
        self._rows.pop(row, None)

    def covers(self, row: int, start: int, n_new: int) -> bool:
        """Whether a step that computes these positions of ``row`` has anything to report."""
        return row in self._rows and len(self._rows[row].targets(start, n_new)) > 0

    def report(self, row: int, start: int, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> list[PositionLogprobs]:
        """Entries for the prompt positions that this step covers, in order.

        Args:
            row: the row.
            start: position of the first new token.
            hidden: [n_new, D] last hidden states of the row's new tokens.
            head: hidden states [N, D] -> logits [N, V].
        """
        prompt = self._rows[row]
        targets = prompt.targets(start, len(hidden))
        entries: list[PositionLogprobs] = []
        for first in range(targets.start, targets.stop, CHUNK):
            stop = min(first + CHUNK, targets.stop)
            logits = head(hidden[first - 1 - start : stop - 1 - start])
            tokens = prompt.ids[first:stop].tolist()
            entries += position_logprobs(logits, tokens, prompt.n_top, prompt.asked)
        return entries
