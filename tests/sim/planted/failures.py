"""Bugs of failures, of adapters and of overlap."""

from __future__ import annotations

from bough.kv.radix import RadixTree
from bough.scheduler.adapters import Adapters
from bough.scheduler.commit import Committer
from bough.scheduler.gates import GateSet
from bough.scheduler.loop import Scheduler
from bough.scheduler.planner import Planner
from bough.sim.late import LateDevice

from .mechanism import simple

FAULTS = (
    simple(
        "gate_failure_hangs",
        "a failed compile left its request in the waiting room for ever",
        GateSet,
        "poll",
        "failed.append((req, error))",
        "self._held[req.order] = req",
    ),
    simple(
        "gate_cancel_leak",
        "an aborted request's compile was never cancelled",
        Scheduler,
        "_end",
        "self._gates.cancel(req)",
        "self._gates._held.pop(req.order)",
    ),
    simple(
        "gate_refusal_leak",
        "the second gate refused and the first one worked on",
        GateSet,
        "hold",
        "self.cancel(req)",
        "pass",
    ),
    simple(
        "gated_runs_at_once",
        "a request ran before its grammar was there",
        Scheduler,
        "_arrive",
        "if held:",
        "if held and False:",
    ),
    simple(
        "failed_cells_stay_cached",
        "cells that a failed forward never wrote were served as a cache hit",
        Scheduler,
        "_recover",
        "int(rows.computed[row])",
        "int(rows.planned[row])",
    ),
    simple(
        "discard_keeps_all",
        "the tree kept what was published by a failed plan",
        RadixTree,
        "discard",
        "if node.end <= keep:",
        "if True:",
    ),
    simple(
        "discard_eldest_first",
        "the writer of a prefix left before its readers",
        Scheduler,
        "_recover",
        "reversed([row for row in rows.running.tolist() if row in by_row])",
        "[row for row in rows.running.tolist() if row in by_row]",
    ),
    simple(
        "failure_ends_everybody",
        "one poisoned request took the whole batch along",
        Scheduler,
        "_recover",
        "if req.failures >= MAX_FAILURES or (alone and req in flight.reqs):",
        "if True:",
    ),
    simple(
        "failure_blames_a_neighbour",
        "whoever was in the batch was blamed",
        Scheduler,
        "_recover",
        "alone = len(affected) == 1",
        "alone = req is flight.reqs[0] if (req := flight.reqs[0]) else False",
    ),
    simple(
        "poison_never_ends",
        "a poisoned request was tried for ever",
        Scheduler,
        "_recover",
        "if req.failures >= MAX_FAILURES or (alone and req in flight.reqs):",
        "if False:",
    ),
    simple(
        "steps_behind_a_failure_count",
        "results computed from cells that were never written were used",
        Scheduler,
        "_recover",
        "while self._in_flight:",
        "while self._in_flight and False:",
    ),
    simple(
        "suspects_survive_abort",
        "an aborted request came back after a failure",
        Scheduler,
        "_end",
        "self._planner.suspects.remove(req)",
        "pass",
    ),
    simple(
        "row_failure_is_silent",
        "a failed row's client waited for ever",
        Committer,
        "commit",
        'outputs.append(terminal(req, Finish("error", message=failure.message, status=failure.status)))',
        "pass",
    ),
    simple(
        "reused_id_is_forgotten",
        "the late end of an aborted request deleted its successor",
        Scheduler,
        "_forget",
        "self._reqs.get(req.request.rid) is req",
        "req.request.rid in self._reqs",
    ),
    simple(
        "abort_misses_gated",
        "a disconnect in the waiting room went unnoticed",
        Scheduler,
        "_arrive",
        "self._reqs[request.rid] = req",
        "self._reqs |= {} if req.status is Status.GATED else {request.rid: req}",
    ),
    simple(
        "abort_all_misses_waiting",
        "a drain left requests in the queue",
        Scheduler,
        "_control",
        "self._abort(list(self._reqs.values()),",
        "self._abort([r for r in self._reqs.values() if r.row >= 0],",
    ),
)


ADAPTERS = (
    simple(
        "pinned_adapter_leaves",
        "an adapter that an operator had pinned was evicted",
        Adapters,
        "_room",
        "entry.state is State.READY and not entry.pinned",
        "entry.state is State.READY",
    ),
)
"""Of adapters; they are looked for in the storms."""


LATE = (
    simple(
        "stale_sampled_id",
        "the next forward did not wait for the sampling on another stream and took the id before the last",
        LateDevice,
        "forward",
        "self._queue.append(_Forward(launched))",
        "self._queue.insert(max(0, len(self._queue) - 1), _Forward(launched))",
    ),
    simple(
        "result_is_not_waited_for",
        "the host read pinned memory before the copy into it was done",
        LateDevice,
        "result",
        "while launched.outcome is None:\n        self._advance()",
        "if launched.outcome is None:\n        plan = launched.plan\n"
        "        return StepResult(plan.step, plan.rows[plan.sample] * 0, plan.sample.astype('int32'))",
    ),
    simple(
        "plans_share_their_memory",
        "a plan was written over the one before, which had yet to be copied to the device",
        Planner,
        "_finish",
        "tokens=joined(parts.tokens),",
        "tokens=np.concatenate(parts.tokens, out=self.__dict__.setdefault('memory', np.empty(1 << 12, np.int32))"
        "[: int(n_new.sum())]),",
    ),
    simple(
        "late_token_is_counted",
        "with overlap, usage counted the token behind the last",
        Committer,
        "_tell_apart",
        "look = self._append(",
        "self.generated_tokens += int((~live & (result.counts > 0)).sum()); look = self._append(",
    ),
    simple(
        "finished_row_freed_in_flight",
        "the row of a finished request was given away before the step behind its end had run",
        Committer,
        "commit",
        "(rows.in_flight[r] == 0)",
        "(rows.in_flight[r] >= 0)",
    ),
)
"""Of overlap, on a device that is behind the host."""
