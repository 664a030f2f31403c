"""The contract between the host column, which decides, and the device column, which computes.

The scheduler writes a :class:`StepPlan`; an :class:`Executor` turns it into a :class:`StepResult`. Both are
plain data (numpy arrays of int32), so the same plan drives a CPU, a GPU, every rank of a parallel group,
or the fake device of the simulation.

Shapes: B rows in the plan, T new tokens of all rows together, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bough.base.params import PoolingParams, SamplingParams

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Index = NDArray[np.intp]
"""What numpy looks up with: ten times as fast as with other integers."""

LAST = -1
"""Stands in ``StepPlan.tokens`` for the token that the row sampled in its previous step.

With overlap the host has not seen that token when it writes the plan; the device has."""

NO_ADAPTER = -1
"""Stands for the place of an adapter where there is none."""

Position = TypeVar("Position", int, Ints)


def first_seen(position: Position, window: int, chunked: bool) -> Position:
    """The first position that a token at ``position`` sees through a window, negative if that is before the first.

    Tokens see themselves and the ``window - 1`` before them (Beltagy et al. 2020), or with ``chunked`` what has come
    since the last multiple of ``window`` (Llama 4).
    """
    return position // window * window if chunked else position - window + 1


@dataclass(slots=True)
class RowInit:
    """A sequence that enters the device's tables with a plan.

    Attributes:
        row: its index in every per-row array.
        prefix_locs: [cached_len] locs of the tokens taken from the cache.
        ids: all ids known so far: the prompt, and after a retraction what was generated before it.
        n_prompt: how many of ``ids`` are the prompt.
        params: sampling options.
        seed: 64-bit seed of the draws, chosen by the scheduler where the client sent none.
        eos_ids: the model's end-of-sequence ids that ``min_tokens`` has to mask (empty with ignore_eos).
        logprob_from: first prompt position whose logprob is still to be reported (n_prompt: none).
        pooling: which vector is made of its hidden states; None for rows that generate.
        adapter: the place of its adapter, or NO_ADAPTER.
        window_locs: [cached_len] ``prefix_locs`` as ``StepPlan.window_loc``; negative where no new token sees them.
    """

    row: int
    prefix_locs: Ints
    ids: Ints
    n_prompt: int
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    logprob_from: int
    pooling: PoolingParams | None = None
    adapter: int = NO_ADAPTER
    window_locs: Ints | None = None


class SharedPrefix(NamedTuple):
    """Rows of one plan that read the same cells first.

    Attributes:
        rows: [n >= 2] plan indices, rising.
        n_tokens: how many of their first locs are equal, at least 1; all come before the rows' new tokens.
    """

    rows: Ints
    n_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One forward: an ordered list of rows and, for each, the tokens it computes. There are no phases.

    A prompt, a chunk of one, the rest after a cache hit and a decode step differ only in ``n_new``. Arrays of plans and
    results may be one another's, or those of rows and requests: nobody writes to them.
    Within a layer the KV of all T tokens is written before any row attends, so a row may read cells that
    an earlier row of the same plan writes.

    Attributes:
        step: increases by one per plan.
        released: rows whose device state is dropped before ``admitted`` is added.
        admitted: rows that enter with this plan.
        rows: [B] row of each planned sequence.
        start: [B] number of tokens whose KV is present before this step (position of the first new token).
        n_new: [B] number of tokens that the row computes, at least 1.
        tokens: [T] ids of the new tokens in row order; LAST where the device knows better.
        out_loc: [T] loc that receives the KV of each new token.
        sample: [B] whether the row samples a token from the logits of its last new position.
        forced: plan index -> (position of the first, ids) of generated tokens that are known without sampling and whose
            logprobs are wanted; that of position p follows from the logits of p - 1, which this step computes.
        shared: disjoint groups of rows with equal leading locs, which a device may read once. What pays is for the
            device to know; results do not depend on it.
        window_loc: [T] what ``out_loc`` is, in the pool of layers that see a window; None where they have no pool of
            their own. Cells that no token can see any more are handed out again.
    """

    step: int
    released: Ints
    admitted: tuple[RowInit, ...]
    rows: Ints
    start: Ints
    n_new: Ints
    tokens: Ints
    out_loc: Ints
    sample: Bools
    forced: dict[int, tuple[int, Ints]] = field(default_factory=dict)
    shared: tuple[SharedPrefix, ...] = ()
    window_loc: Ints | None = None


@dataclass(slots=True)
class Masks:
    """Which ids the constrained rows of a plan may sample.

    Attributes:
        rows: [N] plan indices, rising; rows that are not among them are free.
        bits: [N, ceil(V / 32)] int32; bit i % 32 of word i // 32 is set where id i is allowed. The memory is used again
            once the step's result was taken.
    """

    rows: Ints
    bits: Ints


@dataclass(slots=True)
class PositionLogprobs:
    """Log-probabilities (natural, of the raw logits before penalties and temperature) at one position.

    ``top`` is sorted by falling logprob, ties by rising id; ``asked`` follows ``logprob_token_ids``.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    asked: list[tuple[int, float]]


class Failure(NamedTuple):
    """Why a row failed alone; ``status`` is 400 where the request itself is to blame."""

    message: str
    status: int = 500


@dataclass(slots=True)
class StepResult:
    """What one plan produced.

    Attributes:
        step: the plan's.
        tokens: [sum(counts)] sampled ids in plan order.
        counts: [B] ids sampled by each planned row (0 where ``sample`` is False or the row failed).
        logprobs: plan index -> entries for the row's ``forced`` ids, then for the sampled one, for rows that asked.
        prompt_logprobs: plan index -> entries for the prompt positions that this step covered.
        pooled: plan index -> [n] float32, for pooled rows whose last token this step computed.
        failed: plan index -> reason, for rows that failed alone (for example logits that are not finite).
        seconds: device time of the forward and the sampling.
        idle: seconds for which the device waited for this step's launches since it had done those before them.
    """

    step: int
    tokens: Ints
    counts: Ints
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    failed: dict[int, Failure] = field(default_factory=dict)
    seconds: float = 0.0
    idle: float = 0.0


class Pending(Protocol):
    """A step that was launched and not awaited."""

    def result(self) -> StepResult:
        """Wait for the step. Raises whatever the shared forward raised; row errors are in ``failed``.

        DeviceLost where no later step can succeed either: whoever waits has to end the process.
        """
        ...


F = TypeVar("F")


class Executor(Protocol[F]):
    """The scheduler's only handle on a device, be it local, remote, a group of ranks or a fake.

    Plans are executed in the order in which they were handed over. ``F`` is whatever stands for a forward
    that was launched and not awaited. Errors of the device surface in :meth:`Pending.result`, not here.
    """

    def forward(self, plan: StepPlan) -> F:
        """Launch the forward of ``plan`` without waiting for it."""
        ...

    def sample(self, forward: F, masks: Masks | None) -> Pending:
        """Launch the sampling that follows ``forward``, under ``masks``, without waiting for it."""
        ...

    def shutdown(self) -> None:
        """Finish what runs and free the device."""
        ...


class AdapterLoad(Protocol):
    """An adapter on its way to its place."""

    def done(self) -> bool: ...

    def result(self) -> object:
        """Once it is done: raises BoughError where it could not be loaded."""
        ...


class AdapterDevice(Protocol):
    """Where adapters are read and held: ``places`` of them, one each.

    What changes in a place takes effect behind every forward that was launched before.
    """

    places: int

    def load(self, place: int, name: str, path: str) -> AdapterLoad:
        """Begin to read the adapter in the folder ``path`` into a place that is empty and that no new plan uses.

        The result of the load is the version of what was read.
        """
        ...

    def clear(self, place: int) -> None:
        """Give the memory of a place back that no new plan uses."""
        ...
