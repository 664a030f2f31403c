"""Bugs that are put in on purpose: the tests are tested.

Each models something that happened to a serving engine, or that nearly happened here. A bug is a change of a
few words in the source of one function, so it breaks exactly what it says, and it no longer applies, loudly,
when that function changes.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bough.grammar.compiler import GrammarCompiler
from bough.grammar.reasoning import ReasoningMatcher
from bough.kv import manager
from bough.kv.claims import Claims
from bough.kv.eviction import RankedEviction
from bough.kv.manager import KVManager
from bough.kv.pages import PageAllocator
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree
from bough.kv.sharing import Sharing
from bough.kv.waiting import WaitingIndex
from bough.kv.window import WindowPages
from bough.scheduler import commit, policy
from bough.scheduler.commit import Committer
from bough.scheduler.constraints import Constraints
from bough.scheduler.gates import GateSet
from bough.scheduler.loop import Scheduler
from bough.scheduler.planner import Planner
from bough.scheduler.policy import KeyPolicy
from bough.scheduler.program_policy import ProgramPolicy
from bough.scheduler.programs import Programs
from bough.scheduler.queue import WaitQueue
from bough.scheduler.req import Req
from bough.scheduler.rows import Rows
from bough.sim.device import FakeDevice
from bough.sim.late import LateDevice

from .grammar import FakeTemplate


@dataclass(frozen=True, slots=True)
class Edit:
    """In the function ``name`` of ``owner`` (a class or a module), ``old`` becomes ``new``."""

    owner: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Bug:
    """``incident`` says what it is modelled on."""

    name: str
    incident: str
    edits: tuple[Edit, ...]


def _edited(edit: Edit) -> Any:
    """The function of ``edit``, compiled again with the change."""
    original = inspect.getattr_static(edit.owner, edit.name)
    function: Any = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(edit.old) != 1:
        raise LookupError(f"{edit.name} has {source.count(edit.old)} times {edit.old!r}: renew the planted bug")
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(edit.old, edit.new)
    exec(compile(code, f"<planted in {edit.name}>", "exec"), function.__globals__, scope)
    return scope[edit.name]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is there while this is open."""
    with ExitStack() as undo:
        for edit in bug.edits:
            before = inspect.getattr_static(edit.owner, edit.name)
            setattr(edit.owner, edit.name, _edited(edit))
            undo.callback(setattr, edit.owner, edit.name, before)
        yield


def _bug(name: str, incident: str, owner: Any, function: str, old: str, new: str) -> Bug:
    return Bug(name, incident, (Edit(owner, function, old, new),))


CACHE = (
    _bug(
        "namespace_ignored",
        "the salt was parsed and carried, never delivered: tenants shared KV",
        RadixTree,
        "match",
        "self._roots.get(ns)",
        "next(iter(self._roots.values()), None)",
    ),
    _bug(
        "adapter_not_in_key",
        "the external KV key left the adapter out",
        KVManager,
        "admit",
        "self._cache.match(ns, ",
        "self._cache.match(Namespace(ns.model, '', ns.tenant, ns.salt), ",
    ),
    _bug(
        "salt_aliases_tenant",
        "a client's key could take the value that the server gives to an adapter",
        KVManager,
        "admit",
        "self._cache.match(ns, ",
        "self._cache.match(Namespace(ns.model, ns.adapter, '', ns.tenant or ns.salt), ",
    ),
    _bug(
        "hit_without_comparing_tokens",
        "a hash hit was taken for equality",
        RadixTree,
        "_walk",
        "if rest != child.key:",
        "if len(rest) != len(child.key):",
    ),
    _bug(
        "partial_page_shared",
        "a partly filled last page was matched and then written by two",
        RadixTree,
        "_walk",
        "position += matched - matched % page",
        "position += matched",
    ),
    _bug(
        "lock_lost_at_split",
        "a node was split under a running request and became evictable",
        RadixTree,
        "_split",
        "lower.stamp, lower.hits, lower.locks",
        "lower.stamp, lower.hits, 0",
    ),
    _bug(
        "locked_stays_evictable",
        "KV of a running request was evicted",
        RadixTree,
        "_acquire",
        "if node.offered:",
        "if node.offered and node.children:",
    ),
    _bug(
        "inner_node_evictable",
        "a node with children was evicted and orphaned them",
        RadixTree,
        "_settle",
        "if node.locks or node.children:",
        "if node.locks:",
    ),
    _bug(
        "unlock_forgets_parents",
        "locks of a path leaked upwards and the cache filled with locked nodes",
        RadixTree,
        "unlock",
        "for node in _path(handle.node):",
        "for node in [handle.node]:",
    ),
    _bug(
        "split_mixes_locs",
        "the halves of a split node kept each other's cells",
        RadixTree,
        "_split",
        "bytes(lower.locs[:cut])",
        "bytes(lower.locs[-cut:])",
    ),
    _bug(
        "eviction_frees_wrong_cells",
        "the cells of the head were freed for those of the tail",
        RadixTree,
        "_trim",
        "bytes(node.key[cut:]), bytes(node.locs[cut:])",
        "bytes(node.key[cut:]), bytes(node.locs[: len(node.locs) - cut])",
    ),
    _bug(
        "eviction_ignores_use",
        "the prefix that everybody uses was evicted first",
        RadixTree,
        "unlock",
        "node.stamp = self._now",
        "pass",
    ),
    _bug(
        "eviction_newest_first",
        "the order of the heap was turned around",
        RankedEviction,
        "offer",
        "self._rank(node)",
        "(-self._rank(node)[0], 0)",
    ),
    _bug(
        "insert_takes_duplicates",
        "a duplicate insert leaked the pages that the tree had already",
        RadixTree,
        "insert",
        "return known // WIDTH",
        "return 0",
    ),
    _bug(
        "publish_over_another_copy",
        "two copies of one prefix got mixed up",
        KVManager,
        "publish",
        "end > start and not handle.follows(ids[start : start + self.page_size])",
        "end > start",
    ),
    _bug(
        "flush_drops_locked",
        "flush_cache under load pulled the cache from under running requests",
        KVManager,
        "flush",
        "locs = self._cache.evict(",
        "[setattr(node, 'locks', 0) for root in self._cache._roots.values() for node in root.children.values()]\n"
        "    locs = self._cache.evict(",
    ),
    _bug(
        "index_misses_growth",
        "waiting requests never learned of what was cached since",
        WaitingIndex,
        "on_extend",
        "self._hang(waiters, node, old_end + matched)",
        "self._hang(waiters, node, old_end + min(matched, 1))",
    ),
    _bug(
        "index_misses_eviction",
        "waiting requests counted on what had been evicted",
        WaitingIndex,
        "on_shrink",
        "if place is None:",
        "if place is None or node.end > node.start:",
    ),
    _bug(
        "index_misses_split",
        "a split moved too few of those that wait",
        WaitingIndex,
        "on_split",
        "bisect_right(place.positions, upper.end)",
        "bisect_right(place.positions, upper.end - 1)",
    ),
    _bug(
        "index_leaks_places",
        "an index of the waiting grew for ever",
        WaitingIndex,
        "_drop_if_empty",
        "if self._places[key].weight:",
        "if self._places[key].weight or not isinstance(key, Node):",
    ),
)

POOL = (
    _bug(
        "page_handed_out_twice",
        "the free list gave one page to two requests",
        PageAllocator,
        "alloc",
        "self._free -= n",
        "self._free -= n - (n > 1)",
    ),
    _bug(
        "freed_in_wrong_order",
        "the free list held a page twice",
        PageAllocator,
        "free_pages",
        "= pages[::-1]",
        "= pages[0]",
    ),
    _bug(
        "double_free",
        "pages of an aborted request were freed by two owners",
        KVManager,
        "_free",
        "self._free_locs(self.table.locs[row, start:end])",
        "[self._free_locs(self.table.locs[row, start:end]) for _ in range(2)]",
    ),
    _bug(
        "release_leaks_tail",
        "memory leak detected: the private tail was never freed",
        KVManager,
        "release",
        "self._free(row, whole, end)",
        "self._free(row, whole, end) if upto else None",
    ),
    _bug(
        "release_leaks_duplicates",
        "a request that lost a race for the tree leaked its own copy",
        KVManager,
        "release",
        "self._free(row, start, known)",
        "pass",
    ),
    _bug(
        "retract_without_unlock",
        "retracted requests kept their prefix locked",
        KVManager,
        "release",
        "self._cache.unlock(handle)",
        "self._cache.unlock(handle) if upto != end else None",
    ),
    _bug(
        "truncate_frees_used_page",
        "a rejected token took its half-full page along",
        KVManager,
        "truncate",
        "-(-length // self.page_size) * self.page_size",
        "length // self.page_size * self.page_size",
    ),
    _bug(
        "undo_forgotten",
        "cells of a plan that was never made stayed with the row",
        Planner,
        "_undo",
        "self._kv.truncate(row, length)",
        "pass",
    ),
    _bug(
        "row_leak",
        "request rows were not given back after failures",
        KVManager,
        "_leave",
        "self.table.give_row(row)",
        "pass",
    ),
    _bug(
        "stale_page_table",
        "the row's next owner read through the last owner's table",
        KVManager,
        "admit",
        "self.table.locs[row, :cached_len] = handle.locs()",
        "pass",
    ),
    _bug(
        "page_opens_at_wrong_place",
        "a decode step that opens a page wrote beside it",
        KVManager,
        "grow_rows",
        "opens = position % self.page_size == 0",
        "opens = position % self.page_size == 1",
    ),
)

LIFE = (
    _bug(
        "abort_leaks_row",
        "the state was deleted before the abort: ghosts decoded for minutes",
        Committer,
        "end",
        "if self._rows.in_flight[row] == 0:",
        "if False:",
    ),
    _bug(
        "abort_frees_in_flight",
        "a row was freed and given away while a step still ran on it",
        Committer,
        "end",
        "if self._rows.in_flight[row] == 0:",
        "if True:",
    ),
    _bug(
        "retract_in_flight",
        "overlap and retraction: a retracted request lost the token in flight",
        Planner,
        "next",
        "if not settled:",
        "if False:",
    ),
    _bug(
        "preempt_in_flight",
        "a preempted request was resumed without its last token",
        Planner,
        "next",
        "if not settled and (self.suspects or self._preempt):",
        "if not settled and self.suspects:",
    ),
    _bug(
        "retraction_loses_answer",
        "a retracted request forgot what it had generated",
        Rows,
        "leave",
        "self.n_ids[row]]",
        "self.n_prompt[row]]",
    ),
    _bug(
        "retraction_repeats_logprobs",
        "K + N logprobs for N tokens after a retraction",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.logprob_from = min(req.logprob_from, 1)",
    ),
    _bug(
        "retraction_repeats_tokens",
        "the stream began again after a preemption",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.n_sent = 0",
    ),
    _bug(
        "oldest_is_retracted",
        "preempt, re-add, 0 tokens per second: livelock",
        Planner,
        "_victim",
        "min(candidates[1:])",
        "min(candidates, key=lambda c: -c[2])",
    ),
    _bug(
        "chunk_loses_a_token",
        "a token at the boundary of two chunks was skipped",
        Planner,
        "_finish",
        "rows.planned[r] = end",
        "rows.planned[r] = end + ((n_new > 1) & (end < known))",
    ),
    _bug(
        "match_limit_off_by_one",
        "a full cache hit left nothing to compute",
        Req,
        "match_limit",
        "len(self.ids) - 1",
        "len(self.ids)",
    ),
    _bug(
        "cached_prompt_has_no_logprobs",
        "a cache hit swallowed the prompt's logprobs",
        Req,
        "match_limit",
        "if self.logprob_from < self.n_prompt:",
        "if False:",
    ),
    _bug(
        "prompt_logprobs_off_by_one",
        "logprobs of a chunked prompt were shifted",
        Committer,
        "_prompt_logprobs",
        "max(req.logprob_from, 1) + len(positions)",
        "req.logprob_from + len(positions)",
    ),
    _bug(
        "stale_row_state",
        "a row's counters survived its owner",
        Rows,
        "enter",
        "self.ahead[row] = self.in_flight[row] = self.foreseen[row] = 0",
        "self.foreseen[row] = 0",
    ),
    _bug(
        "late_token_is_sent",
        "with overlap, the token after the end of sequence was streamed",
        Committer,
        "commit",
        "live = rows.live[r]",
        "live = np.ones(len(r), np.bool_)",
    ),
    _bug(
        "closed_row_goes_on",
        "a finished request ended twice",
        Committer,
        "_close",
        "self._rows.live[req.row] = False",
        "pass",
    ),
    _bug(
        "output_index_stands_still",
        "coalescing lost tokens because the index was wrong",
        Committer,
        "_outputs",
        "req.n_sent += len(news)",
        "req.n_sent += finish is None and req.n_sent < 2",
    ),
    _bug(
        "cached_len_of_last_admission",
        "usage counted a retracted request's own tokens as cached",
        Planner,
        "_try_admit",
        "if not req.started:",
        "if True:",
    ),
    _bug(
        "released_rows_not_told",
        "the device kept sampling state of rows that were gone",
        Planner,
        "vacate",
        "self._released.append(row)",
        "pass",
    ),
    _bug(
        "stop_before_min_tokens",
        "min_tokens was ignored",
        commit,
        "stop_reason",
        "if generated >= params.min_tokens:",
        "if True:",
    ),
    _bug(
        "min_tokens_off_by_one",
        "the first token that may end the answer did not",
        commit,
        "stop_reason",
        "generated >= params.min_tokens",
        "generated > params.min_tokens",
    ),
    _bug(
        "many_stop_ids_missed",
        "only the first stop ids were looked at",
        Rows,
        "enter",
        "or len(stops) > STOP_WIDTH",
        "",
    ),
    _bug(
        "stop_id_not_named",
        "the finish reason did not say which stop id matched",
        commit,
        "stop_reason",
        "token if token in params.stop_token_ids else None",
        "None",
    ),
    _bug(
        "eos_is_not_ignored",
        "ignore_eos did nothing",
        commit,
        "stop_reason",
        "if token in stop_set(req, eos_ids):",
        "if token in (*eos_ids, *params.stop_token_ids):",
    ),
    _bug(
        "draws_follow_the_step",
        "seeded answers depended on the company in the batch",
        FakeDevice,
        "_sample",
        "seed, stop, self.vocab_size",
        "seed, self.steps if seed else stop, self.vocab_size",
    ),
)

ORDER = (
    _bug(
        "priority_inverted",
        "low priority went first",
        policy,
        "priority",
        "-req.request.priority",
        "req.request.priority",
    ),
    _bug(
        "priority_pushes_equals",
        "equals pushed each other out in turn",
        Planner,
        "_preempted_by",
        "if lowest < req.request.priority",
        "if lowest <= req.request.priority",
    ),
    _bug(
        "lpm_starves",
        "longest prefix match starved a request without a prefix",
        WaitQueue,
        "head",
        "if oldest is not None and",
        "if False and",
    ),
    _bug(
        "passed_over_not_counted",
        "the bound on waiting was never reached",
        WaitQueue,
        "take",
        "self._passed_over + 1",
        "self._passed_over",
    ),
    _bug(
        "policy_deaf_to_changes",
        "the queue was sorted by old match lengths",
        KeyPolicy,
        "changed",
        "if self._follows_cache:",
        "if False:",
    ),
    _bug(
        "preempted_goes_last",
        "preempted requests starved behind new arrivals",
        policy,
        "fcfs",
        "not req.started",
        "req.started",
    ),
    _bug(
        "queue_bound_ignored",
        "a burst filled the memory",
        Scheduler,
        "_arrive",
        ">= self._limits.queue_requests",
        "> self._limits.queue_requests",
    ),
    _bug(
        "queue_tokens_leak",
        "after days the queue counted as full",
        WaitQueue,
        "remove",
        "self.tokens -= len(req.ids)",
        "self.tokens -= req.n_prompt",
    ),
    _bug(
        "timeout_ignored_while_waiting",
        "a request waited past its deadline",
        Scheduler,
        "_expire",
        "and req.order == order",
        "and req.status is Status.RUNNING",
    ),
    _bug(
        "timeout_of_a_reused_id",
        "a new request inherited the deadline of an old one",
        Scheduler,
        "_expire",
        "and req.order == order",
        "",
    ),
    _bug(
        "budget_ignored",
        "one long prompt made one long step",
        Planner,
        "_try_admit",
        "n = min(todo - req.held, budget)",
        "n = todo - req.held",
    ),
    _bug(
        "budget_not_reduced",
        "the decode rows were not counted",
        Planner,
        "_plan_running",
        "budget -= len(single)",
        "pass",
    ),
    _bug(
        "impossible_request_waits",
        "no space left for only one request",
        Scheduler,
        "_limit",
        "most = min(self._model.context_length, self._kv.capacity)",
        "most = self._model.context_length",
    ),
)

FAULTS = (
    _bug(
        "gate_failure_hangs",
        "a failed compile left its request in the waiting room for ever",
        GateSet,
        "poll",
        "failed.append((req, error))",
        "self._held[req.order] = req",
    ),
    _bug(
        "gate_cancel_leak",
        "an aborted request's compile was never cancelled",
        Scheduler,
        "_end",
        "self._gates.cancel(req)",
        "self._gates._held.pop(req.order)",
    ),
    _bug(
        "gate_refusal_leak",
        "the second gate refused and the first one worked on",
        GateSet,
        "hold",
        "self.cancel(req)",
        "pass",
    ),
    _bug(
        "gated_runs_at_once",
        "a request ran before its grammar was there",
        Scheduler,
        "_arrive",
        "if held:",
        "if held and False:",
    ),
    _bug(
        "failed_cells_stay_cached",
        "cells that a failed forward never wrote were served as a cache hit",
        Scheduler,
        "_recover",
        "int(rows.computed[row])",
        "int(rows.planned[row])",
    ),
    _bug(
        "discard_keeps_all",
        "the tree kept what was published by a failed plan",
        RadixTree,
        "discard",
        "if node.end <= keep:",
        "if True:",
    ),
    _bug(
        "discard_eldest_first",
        "the writer of a prefix left before its readers",
        Scheduler,
        "_recover",
        "reversed([row for row in rows.running.tolist() if row in by_row])",
        "[row for row in rows.running.tolist() if row in by_row]",
    ),
    _bug(
        "failure_ends_everybody",
        "one poisoned request took the whole batch along",
        Scheduler,
        "_recover",
        "if req.failures >= MAX_FAILURES or (alone and req in flight.reqs):",
        "if True:",
    ),
    _bug(
        "failure_blames_a_neighbour",
        "whoever was in the batch was blamed",
        Scheduler,
        "_recover",
        "alone = len(affected) == 1",
        "alone = req is flight.reqs[0] if (req := flight.reqs[0]) else False",
    ),
    _bug(
        "poison_never_ends",
        "a poisoned request was tried for ever",
        Scheduler,
        "_recover",
        "if req.failures >= MAX_FAILURES or (alone and req in flight.reqs):",
        "if False:",
    ),
    _bug(
        "steps_behind_a_failure_count",
        "results computed from cells that were never written were used",
        Scheduler,
        "_recover",
        "while self._in_flight:",
        "while self._in_flight and False:",
    ),
    _bug(
        "suspects_survive_abort",
        "an aborted request came back after a failure",
        Scheduler,
        "_end",
        "self._planner.suspects.remove(req)",
        "pass",
    ),
    _bug(
        "row_failure_is_silent",
        "a failed row's client waited for ever",
        Committer,
        "commit",
        'outputs.append(terminal(req, Finish("error", message=failure.message, status=failure.status)))',
        "pass",
    ),
    _bug(
        "reused_id_is_forgotten",
        "the late end of an aborted request deleted its successor",
        Scheduler,
        "_forget",
        "self._reqs.get(req.request.rid) is req",
        "req.request.rid in self._reqs",
    ),
    _bug(
        "abort_misses_gated",
        "a disconnect in the waiting room went unnoticed",
        Scheduler,
        "_arrive",
        "self._reqs[request.rid] = req",
        "self._reqs |= {} if req.status is Status.GATED else {request.rid: req}",
    ),
    _bug(
        "abort_all_misses_waiting",
        "a drain left requests in the queue",
        Scheduler,
        "_control",
        "for req in list(self._reqs.values()):",
        "for req in [r for r in self._reqs.values() if r.row >= 0]:",
    ),
)

GRAMMAR = (
    _bug(
        "mask_lags_a_token",
        "with overlap, masks were made before the token before was known",
        Scheduler,
        "_launch",
        "self._commit_all()",
        "pass",
    ),
    _bug(
        "forced_tokens_unknown_to_matcher",
        "jump-forward: the matcher stood still and forced the same again",
        Constraints,
        "_forced",
        "if not guide.matcher.accept(token):",
        "if False:",
    ),
    _bug(
        "jump_past_the_length",
        "forced tokens went beyond max_tokens",
        Constraints,
        "_forced",
        "req.limit - n_ids - 1",
        "req.limit - n_ids + 2",
    ),
    _bug(
        "jump_over_min_tokens",
        "a forced stop token was appended where the sampler would have forbidden it",
        Constraints,
        "_forced",
        "if n_ids + len(taken) < early and",
        "if False and",
    ),
    _bug(
        "constraint_lost_on_the_way_back",
        "after a preemption the answer went on without its grammar",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.guide = None",
    ),
    _bug(
        "matcher_starts_again",
        "after a preemption the grammar began from its beginning",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.guide and req.guide.matcher and req.guide.matcher.__init__("
        "*([req.request.reasoning, (0, 3), req.guide.matcher.inner] if req.request.reasoning else"
        " [req.guide.matcher._automaton, -1]))",
    ),
    _bug(
        "failed_compile_runs_free",
        "fail-open: the grammar was refused and the text came unconstrained",
        Constraints,
        "settle",
        "failed.append((req, error))",
        "req.guide = None; self._rows.held[:] = False; self._rows.guided[:] = False",
    ),
    _bug(
        "samples_before_its_grammar",
        "the first token was sampled while the grammar was still compiled",
        Planner,
        "_plan_running",
        "known - rows.planned[running] - rows.held[running]",
        "known - rows.planned[running]",
    ),
    _bug(
        "foreseen_counted_twice",
        "a token that was known and sampled was waited for for ever",
        Committer,
        "commit",
        "rows.ahead[r] -= plan.sample & ~foreseen",
        "rows.ahead[r] -= plan.sample",
    ),
    _bug(
        "foreseen_appended_twice",
        "a token that was known and sampled came twice",
        Committer,
        "commit",
        "new = sampled & ~foreseen",
        "new = sampled",
    ),
    _bug(
        "masks_in_wrong_rows",
        "the mask of one request was applied to another",
        Constraints,
        "masks",
        "indices.append(i)",
        "indices.insert(0, i)",
    ),
    _bug(
        "late_forward_forgotten",
        "a forward launched behind a failing step was sampled and committed",
        Scheduler,
        "_recover",
        "if self._forward is not None:",
        "if False:",
    ),
    _bug(
        "siblings_share_a_matcher",
        "two requests with one grammar moved the same matcher",
        FakeTemplate,
        "matcher",
        "return FakeMatcher(self.automaton, self.breaks)",
        "return _shared(self)",
    ),
    _bug(
        "broken_matcher_goes_on",
        "the matcher failed and the answer was cut off as if it were complete",
        Constraints,
        "accept",
        "req.guide.runs += self.jump(req)\n    return req.guide.matcher.error()",
        "req.guide.runs += self.jump(req)",
    ),
    _bug(
        "reasoning_ends_the_answer",
        "the model stopped within its reasoning and the constrained part never came",
        ReasoningMatcher,
        "write",
        "for token in self._eos_ids:",
        "for token in ():",
    ),
    _bug(
        "reasoning_budget_off_by_one",
        "one token of reasoning too many",
        ReasoningMatcher,
        "_spent",
        "self._tokens >= self._budget",
        "self._tokens > self._budget",
    ),
    _bug(
        "forced_tokens_without_logprobs",
        "a retracted request lost the logprobs of forced tokens",
        Req,
        "match_limit",
        "if self.request.params.logprobs is not None:",
        "if False:",
    ),
    _bug(
        "forced_logprobs_shifted",
        "the logprobs of forced tokens were those of their neighbours",
        FakeDevice,
        "_sample",
        "self._logprob(row, first + k, token)",
        "self._logprob(row, first + k - 1, token)",
    ),
    _bug(
        "compiled_again",
        "two requests that came together compiled one grammar twice",
        GrammarCompiler,
        "start",
        "if (running := self._running.get(key)) is not None:",
        "if False:",
    ),
)

SHARING = (
    _bug(
        "writer_reads_its_own_prefix",
        "a row that was still computing the prefix read it as finished",
        Sharing,
        "plan",
        "start < self.n_tokens[group]",
        "start < 0",
    ),
    Bug(
        "groups_of_the_last_owner",
        "a row's next owner stayed in the group of the last one",
        tuple(Edit(KVManager, name, "self._sharing = None", "pass") for name in ("admit", "publish", "_leave")),
    ),
    _bug(
        "groups_of_the_longest_path",
        "the prefix of one row was taken for that of its group",
        manager,
        "find_sharing",
        "(node.end for node in numbers)",
        "(max(h.length for h in handles if h is not None and h.length >= node.end) for node in numbers)",
    ),
    _bug(
        "group_indices_are_rows",
        "plan indices and rows were mixed up",
        Sharing,
        "plan",
        "SharedPrefix(order[begin:end], n)",
        "SharedPrefix(np.sort(rows[order[begin:end]]), n)",
    ),
    _bug(
        "one_row_is_a_group",
        "a row shared a prefix with nobody",
        Sharing,
        "plan",
        "if end - begin > 1",
        "if end - begin > 0",
    ),
)

PROGRAMS = (
    _bug(
        "seat_leaks",
        "programs that had ended went on holding their share of the cache, until nobody could sit down",
        Programs,
        "forget",
        "self.stand(state)",
        "pass",
    ),
    _bug(
        "seat_costs_nothing",
        "the sum of what the seated need was not kept, and everybody sat down",
        Programs,
        "_settle",
        "self._needed += need",
        "pass",
    ),
    _bug(
        "favour_outlives_the_seat",
        "the cache went on keeping what belonged to programs without a seat",
        Programs,
        "stand",
        "self._claims.favour(state.number, False)",
        "pass",
    ),
    _bug(
        "hold_is_never_released",
        "the KV of agents that never came back from their tool was kept for ever",
        Programs,
        "tick",
        "self.stand(state)",
        "pass",
    ),
    _bug(
        "ended_program_is_remembered",
        "what an ended program left was not let go, because it might come back",
        Programs,
        "_leave",
        "if state.ended:",
        "if False:",
    ),
    _bug(
        "close_forgets_those_that_run",
        "a program was forgotten while its requests ran",
        Programs,
        "close",
        "if not state.reqs:",
        "if True:",
    ),
    _bug(
        "cancel_stops_one",
        "only the first request of a cancelled program stopped",
        Scheduler,
        "_end_program",
        "list(state.reqs.values())",
        "list(state.reqs.values())[:1]",
    ),
    _bug(
        "programs_of_tenants_meet",
        "two tenants used the same id, and each other's budget",
        Programs,
        "arrive",
        "key = request.namespace.tenant, named.id",
        "key = '', named.id",
    ),
    _bug(
        "rows_miscounted",
        "nobody seemed to run no more, and who had no seat waited for ever",
        Programs,
        "vacated",
        "self.rows -= 1",
        "pass",
    ),
    _bug(
        "budget_off_by_one",
        "a program generated one token more than its budget",
        commit,
        "stop_reason",
        "if program.spent >= program.budget:",
        "if program.spent > program.budget:",
    ),
    _bug(
        "budget_not_checked_on_arrival",
        "a program with nothing left was still taken in, and generated nothing",
        Programs,
        "check",
        "state.spent >= state.budget",
        "state.spent > state.budget",
    ),
    _bug(
        "siblings_separated",
        "others came between the branches of a fork, and its prefix was computed again",
        ProgramPolicy,
        "head",
        "self._forks.get(programs.fork)",
        "self._forks.get((0, ''))",
    ),
    _bug(
        "lease_never_ends",
        "leases ran out on paper only",
        Claims,
        "tick",
        "(heapq.heappop(self._leases)[2], -1)",
        "(heapq.heappop(self._leases)[2], 0)",
    ),
    _bug(
        "lease_counted_twice",
        "two leases on one prefix used the budget up twice",
        ProgramEviction,
        "lease",
        "if above.leases == (1 if by > 0 else 0):",
        "if True:",
    ),
    _bug(
        "lease_lost_at_split",
        "a leased node was split and only its lower half stayed leased",
        RadixTree,
        "_split",
        "lower.owner, lower.spent, lower.leases",
        "lower.owner, lower.spent, 0",
    ),
    _bug(
        "lease_beyond_its_budget",
        "leases took more of the pool than they may",
        Claims,
        "_lease",
        "ids[:asked]), room)",
        "ids[:asked]), self._budget)",
    ),
    _bug(
        "shared_node_keeps_its_owner",
        "what everybody used went with the program that had computed it",
        RadixTree,
        "_use",
        "self._policy.shared(node, before)",
        "pass",
    ),
    _bug(
        "ended_owner_is_kept",
        "what an ended program left was evicted last",
        ProgramEviction,
        "over",
        "self._over.add(owner)",
        "pass",
    ),
)

LATE = (
    _bug(
        "stale_sampled_id",
        "the next forward did not wait for the sampling on another stream and took the id before the last",
        LateDevice,
        "forward",
        "self._queue.append(_Forward(launched))",
        "self._queue.insert(max(0, len(self._queue) - 1), _Forward(launched))",
    ),
    _bug(
        "result_is_not_waited_for",
        "the host read pinned memory before the copy into it was done",
        LateDevice,
        "result",
        "while launched.outcome is None:\n        self._advance()",
        "if launched.outcome is None:\n        plan = launched.plan\n"
        "        return StepResult(plan.step, plan.rows[plan.sample] * 0, plan.sample.astype('int32'))",
    ),
    _bug(
        "plans_share_their_memory",
        "a plan was written over the one before, which had yet to be copied to the device",
        Planner,
        "_finish",
        "tokens=np.concatenate(parts.tokens),",
        "tokens=np.concatenate(parts.tokens, out=self.__dict__.setdefault('memory', np.empty(1 << 12, np.int32))"
        "[: int(n_new.sum())]),",
    ),
    _bug(
        "late_token_is_counted",
        "with overlap, usage counted the token behind the last",
        Committer,
        "commit",
        "look = self._append(",
        "self.generated_tokens += int((~live & (result.counts > 0)).sum()); look = self._append(",
    ),
    _bug(
        "finished_row_freed_in_flight",
        "the row of a finished request was given away before the step behind its end had run",
        Committer,
        "commit",
        "(rows.in_flight[r] == 0)",
        "(rows.in_flight[r] >= 0)",
    ),
)
"""Of overlap, on a device that is behind the host."""

WINDOWS = (
    _bug(
        "window_let_go_too_early",
        "cells of a sliding window were freed while the next token still saw them",
        WindowPages,
        "pass_by",
        "positions - self.window + 1",
        "positions - self.window + 1 + self._size",
    ),
    _bug(
        "hit_without_its_window",
        "a prefix was taken from the cache although the layers with a window had dropped it",
        KVManager,
        "_servable",
        "if self._window is None or not match.length:",
        "if True:",
    ),
    _bug(
        "window_one_short",
        "a hit one token short of a window passed",
        WindowPages,
        "servable",
        ">= self.window - 1",
        ">= self.window - 2",
    ),
    _bug(
        "window_of_a_hit_unlocked",
        "the cached part of a window could be evicted while a row saw it",
        WindowPages,
        "enter",
        "len(pages) * self._size - self.window + 1",
        "len(pages) * self._size - self.window + 1 + self._size",
    ),
    _bug(
        "window_handed_over_twice",
        "a cell of a window belonged to two pages after a merge",
        WindowPages,
        "hand_over",
        "self._twin[own] = -1",
        "pass",
    ),
    _bug(
        "idle_windows_miscounted",
        "what somebody uses again was still counted as free for all",
        WindowPages,
        "enter",
        "self._idle -= int(np.count_nonzero(self._users[used] == 0))",
        "pass",
    ),
    _bug(
        "window_locs_of_the_last_plan",
        "the device learned of a row's cells of full attention alone",
        FakeDevice,
        "_enter_locs",
        "if plan.window_loc is not None:",
        "if plan.window_loc is not None and end - begin > 1:",
    ),
)

BUGS: tuple[Bug, ...] = CACHE + POOL + LIFE + ORDER + FAULTS + GRAMMAR + SHARING + LATE + PROGRAMS + WINDOWS
BY_NAME = {bug.name: bug for bug in BUGS}
