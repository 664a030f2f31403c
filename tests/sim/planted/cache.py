"""Bugs of the tree, the pool, what rows share and what a window keeps."""

from __future__ import annotations

from bough.kv import manager
from bough.kv.eviction import RankedEviction
from bough.kv.manager import KVManager
from bough.kv.pages import PageAllocator
from bough.kv.radix import RadixTree
from bough.kv.sharing import Sharing
from bough.kv.waiting import WaitingIndex
from bough.kv.window import WindowPages
from bough.scheduler.planner import Planner
from bough.sim.device import FakeDevice

from .mechanism import Bug, Edit, simple

CACHE = (
    simple(
        "namespace_ignored",
        "the salt was parsed and carried, never delivered: tenants shared KV",
        RadixTree,
        "match",
        "self._roots.get(ns)",
        "next(iter(self._roots.values()), None)",
    ),
    simple(
        "adapter_not_in_key",
        "the external KV key left the adapter out",
        KVManager,
        "admit",
        "self._cache.match(ns, ",
        "self._cache.match(Namespace(ns.model, '', ns.tenant, ns.salt), ",
    ),
    simple(
        "salt_aliases_tenant",
        "a client's key could take the value that the server gives to an adapter",
        KVManager,
        "admit",
        "self._cache.match(ns, ",
        "self._cache.match(Namespace(ns.model, ns.adapter, '', ns.tenant or ns.salt), ",
    ),
    simple(
        "hit_without_comparing_tokens",
        "a hash hit was taken for equality",
        RadixTree,
        "_walk",
        "if rest != child.key:",
        "if len(rest) != len(child.key):",
    ),
    simple(
        "partial_page_shared",
        "a partly filled last page was matched and then written by two",
        RadixTree,
        "_walk",
        "position += matched - matched % page",
        "position += matched",
    ),
    simple(
        "lock_lost_at_split",
        "a node was split under a running request and became evictable",
        RadixTree,
        "_split",
        "lower.stamp, lower.hits, lower.locks",
        "lower.stamp, lower.hits, 0",
    ),
    simple(
        "locked_stays_evictable",
        "KV of a running request was evicted",
        RadixTree,
        "_acquire",
        "if node.offered:",
        "if node.offered and node.children:",
    ),
    simple(
        "inner_node_evictable",
        "a node with children was evicted and orphaned them",
        RadixTree,
        "_settle",
        "if node.locks or node.children:",
        "if node.locks:",
    ),
    simple(
        "unlock_forgets_parents",
        "locks of a path leaked upwards and the cache filled with locked nodes",
        RadixTree,
        "unlock",
        "for node in _path(handle.node):",
        "for node in [handle.node]:",
    ),
    simple(
        "split_mixes_locs",
        "the halves of a split node kept each other's cells",
        RadixTree,
        "_split",
        "bytes(lower.locs[:cut])",
        "bytes(lower.locs[-cut:])",
    ),
    simple(
        "eviction_frees_wrong_cells",
        "the cells of the head were freed for those of the tail",
        RadixTree,
        "_trim",
        "bytes(node.key[cut:]), bytes(node.locs[cut:])",
        "bytes(node.key[cut:]), bytes(node.locs[: len(node.locs) - cut])",
    ),
    simple(
        "eviction_ignores_use",
        "the prefix that everybody uses was evicted first",
        RadixTree,
        "unlock",
        "node.stamp = self._now",
        "pass",
    ),
    simple(
        "eviction_newest_first",
        "the order of the heap was turned around",
        RankedEviction,
        "offer",
        "self._rank(node)",
        "(-self._rank(node)[0], 0)",
    ),
    simple(
        "insert_takes_duplicates",
        "a duplicate insert leaked the pages that the tree had already",
        RadixTree,
        "insert",
        "return known // WIDTH",
        "return 0",
    ),
    simple(
        "publish_over_another_copy",
        "two copies of one prefix got mixed up",
        KVManager,
        "publish",
        "end > start and not handle.follows(ids[start : start + self.page_size])",
        "end > start",
    ),
    simple(
        "flush_drops_locked",
        "flush_cache under load pulled the cache from under running requests",
        KVManager,
        "flush",
        "locs = self._cache.evict(",
        "[setattr(node, 'locks', 0) for root in self._cache._roots.values() for node in root.children.values()]\n"
        "    locs = self._cache.evict(",
    ),
    simple(
        "index_misses_growth",
        "waiting requests never learned of what was cached since",
        WaitingIndex,
        "on_extend",
        "self._hang(waiters, node, old_end + matched)",
        "self._hang(waiters, node, old_end + min(matched, 1))",
    ),
    simple(
        "index_misses_eviction",
        "waiting requests counted on what had been evicted",
        WaitingIndex,
        "on_shrink",
        "if place is None:",
        "if place is None or node.end > node.start:",
    ),
    simple(
        "index_misses_split",
        "a split moved too few of those that wait",
        WaitingIndex,
        "on_split",
        "bisect_right(place.positions, upper.end)",
        "bisect_right(place.positions, upper.end - 1)",
    ),
    simple(
        "index_leaks_places",
        "an index of the waiting grew for ever",
        WaitingIndex,
        "_drop_if_empty",
        "if self._places[key].weight:",
        "if self._places[key].weight or not isinstance(key, Node):",
    ),
)


POOL = (
    simple(
        "page_handed_out_twice",
        "the free list gave one page to two requests",
        PageAllocator,
        "alloc",
        "self._free -= n",
        "self._free -= n - (n > 1)",
    ),
    simple(
        "freed_in_wrong_order",
        "the free list held a page twice",
        PageAllocator,
        "free_pages",
        "= pages[::-1]",
        "= pages[0]",
    ),
    simple(
        "double_free",
        "pages of an aborted request were freed by two owners",
        KVManager,
        "_free",
        "self._free_locs(self.table.locs[row, start:end])",
        "[self._free_locs(self.table.locs[row, start:end]) for _ in range(2)]",
    ),
    simple(
        "release_leaks_tail",
        "memory leak detected: the private tail was never freed",
        KVManager,
        "release",
        "self._free(row, whole, end)",
        "self._free(row, whole, end) if upto else None",
    ),
    simple(
        "release_leaks_duplicates",
        "a request that lost a race for the tree leaked its own copy",
        KVManager,
        "release",
        "self._free(row, start, known)",
        "pass",
    ),
    simple(
        "retract_without_unlock",
        "retracted requests kept their prefix locked",
        KVManager,
        "release",
        "self._cache.unlock(handle)",
        "self._cache.unlock(handle) if upto != end else None",
    ),
    simple(
        "truncate_frees_used_page",
        "a rejected token took its half-full page along",
        KVManager,
        "truncate",
        "-(-length // self.page_size) * self.page_size",
        "length // self.page_size * self.page_size",
    ),
    simple(
        "undo_forgotten",
        "cells of a plan that was never made stayed with the row",
        Planner,
        "_undo",
        "self._kv.truncate(row, length)",
        "pass",
    ),
    simple(
        "row_leak",
        "request rows were not given back after failures",
        KVManager,
        "_leave",
        "self.table.give_row(row)",
        "pass",
    ),
    simple(
        "stale_page_table",
        "the row's next owner read through the last owner's table",
        KVManager,
        "admit",
        "self.table.locs[row, :cached_len] = handle.locs()",
        "pass",
    ),
    simple(
        "page_opens_at_wrong_place",
        "a decode step that opens a page wrote beside it",
        KVManager,
        "grow_rows",
        "opens = position % self.page_size == 0",
        "opens = position % self.page_size == 1",
    ),
)


SHARING = (
    simple(
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
    simple(
        "groups_of_the_longest_path",
        "the prefix of one row was taken for that of its group",
        manager,
        "find_sharing",
        "(node.end for node in numbers)",
        "(max(h.length for h in handles if h is not None and h.length >= node.end) for node in numbers)",
    ),
    simple(
        "group_indices_are_rows",
        "plan indices and rows were mixed up",
        Sharing,
        "plan",
        "SharedPrefix(order[begin:end], n)",
        "SharedPrefix(np.sort(rows[order[begin:end]]), n)",
    ),
    simple(
        "one_row_is_a_group",
        "a row shared a prefix with nobody",
        Sharing,
        "plan",
        "if end - begin > 1",
        "if end - begin > 0",
    ),
)


WINDOWS = (
    simple(
        "window_let_go_too_early",
        "cells of a sliding window were freed while the next token still saw them",
        WindowPages,
        "pass_by",
        "first_seen(positions, self.window, self.chunked)",
        "first_seen(positions, self.window, self.chunked) + self._size",
    ),
    simple(
        "hit_without_its_window",
        "a prefix was taken from the cache although the layers with a window had dropped it",
        KVManager,
        "_servable",
        "if self._window is None or not match.length:",
        "if True:",
    ),
    simple(
        "window_one_short",
        "a hit one token short of a window passed",
        WindowPages,
        "servable",
        ">= (lost + 1) * self._size",
        ">= (lost + 1) * self._size - 1",
    ),
    simple(
        "window_of_a_hit_unlocked",
        "the cached part of a window could be evicted while a row saw it",
        WindowPages,
        "enter",
        "self._first_page(len(pages) * self._size)",
        "self._first_page(len(pages) * self._size) + 1",
    ),
    simple(
        "window_handed_over_twice",
        "a cell of a window belonged to two pages after a merge",
        WindowPages,
        "hand_over",
        "self._twin[own] = -1",
        "pass",
    ),
    simple(
        "idle_windows_miscounted",
        "what somebody uses again was still counted as free for all",
        WindowPages,
        "enter",
        "self._idle -= int(np.count_nonzero(self._users[used] == 0))",
        "pass",
    ),
    simple(
        "window_locs_of_the_last_plan",
        "the device learned of a row's cells of full attention alone",
        FakeDevice,
        "_enter_locs",
        "if plan.window_loc is not None:",
        "if plan.window_loc is not None and end - begin > 1:",
    ),
)
