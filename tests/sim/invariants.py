"""The invariants of reliability, recomputed from the raw structures and not by the code under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from bough.kv.manager import KVManager
from bough.kv.node import Node
from bough.kv.radix import RadixTree
from bough.scheduler.loop import Scheduler
from bough.scheduler.req import Status
from bough.sim.device import FakeDevice

from .adapters import NAMES as ADAPTERS
from .adapters import VERSIONS
from .oracle import NAMESPACES, root_of
from .pipeline import Pipeline, require

if TYPE_CHECKING:
    from .simulation import Simulation

U64 = NDArray[np.uint64]
_GOLDEN, _A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _1 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)
_ROOTS = {
    msgspec.structs.replace(ns, adapter=f"{name}@{version}"): root_of(i, name)
    for i, ns in enumerate(NAMESPACES)
    if ns.adapter
    for name in ADAPTERS
    for version in VERSIONS
} | {ns: root_of(i) for i, ns in enumerate(NAMESPACES)}


def mix_all(states: U64, values: U64) -> U64:
    """:func:`bough.sim.device.mix` of each pair."""
    z = states + (values + _1) * _GOLDEN
    z = (z ^ (z >> _30)) * _A
    z = (z ^ (z >> _27)) * _B
    mixed: U64 = z ^ (z >> _31)
    return mixed


def tree_of(kv: KVManager) -> RadixTree | None:
    return kv._cache if isinstance(kv._cache, RadixTree) else None


def nodes(tree: RadixTree) -> list[Node]:
    """All nodes, parents first."""
    stack = list(tree._roots.values())
    found: list[Node] = []
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


class Checker:
    """Checks one simulation after every step."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, pipeline: Pipeline) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._pipeline = pipeline

    def step(self) -> None:
        """Everything that holds between two steps."""
        all_nodes = self._ownership()
        self._rows()
        # Between a failed forward and its discovery, cells are unwritten and the device's table is behind.
        if not self._pipeline.tainted:
            device = self._pipeline.late.caught_up()
            self._content(all_nodes, device.cells)
            self._device_table(device.page_table)
            self._windows(device)
        self._lengths()

    # -- I1 to I5: who owns what

    def _ownership(self) -> list[Node]:
        kv, tree = self._kv, tree_of(self._kv)
        size = kv.page_size
        owners: list[int] = kv.pages._stack[: kv.pages.free].tolist()
        n_free = len(owners)
        all_nodes = nodes(tree) if tree is not None else []
        locks: dict[Node, int] = {}
        for row, handle in enumerate(kv._handles):
            if handle is None:
                require(kv.n_cells[row] == 0, "I7 rows", "the free row {} has cells", row)
                continue
            start, end = int(kv.n_published[row]), int(kv.n_cells[row])
            require(start % size == 0 and start <= end, "I7 rows", "row {} shares a part of a page", row)
            owners += (kv.table.locs[row, start:end:size] // size).tolist()
            if tree is not None:
                node: Node | None = handle.node
                length = 0
                while node is not None:
                    locks[node] = locks.get(node, 0) + 1
                    length += node.n_tokens
                    node = node.parent
                require(length == start, "I7 rows", "row {}: handle at {}, published {}", row, length, start)
        n_tree = locked = 0
        for node in all_nodes:
            self._well_formed(node, size)
            require(node.locks == locks.pop(node, 0), "I3 locks", "{} locks of a node are wrong", node.locks)
            owners += (np.frombuffer(node.locs, np.int32)[::size] // size).tolist()
            n_tree += node.n_tokens
            locked += node.n_tokens if node.locks else 0
        require(not locks, "I3 locks", "a handle is on a node that is gone")
        if tree is not None:
            require((tree.total_tokens, tree.locked_tokens) == (n_tree, locked), "I4 counters", "the tree miscounts")
        owners.sort()
        require(owners == list(range(kv.pages.n_pages)), "I1 one owner", "of {} pages: {}", kv.pages.n_pages, owners)
        usage = kv.usage()
        require(
            usage.free == n_free * size
            and usage.tree == n_tree
            and usage.locked == locked
            and usage.free + usage.tree + usage.private == usage.total,
            "I2 sum",
            str(usage),
        )
        return all_nodes

    @staticmethod
    def _well_formed(node: Node, size: int) -> None:
        n = node.n_tokens
        name = "I5 tree"
        require(len(node.key) == len(node.locs) == 4 * n and n % size == 0, name, "a node is not whole pages")
        require(node.parent is None or n > 0, name, "an empty node")
        require(node.parent is not None or node.children or node.locks, name, "an empty root")
        require(
            node.offered == (not node.children and not node.locks and node.parent is not None),
            "I4 leaves",
            "not exactly the unlocked leaves can be evicted",
        )
        for first, child in node.children.items():
            require(child.parent is node and child.start == node.end and child.ns == node.ns, name, "misplaced child")
            require(child.key[: 4 * size] == first, name, "a child is filed under another page")

    # -- I6 and I7: what is in the cells

    def _content(self, all_nodes: list[Node], cells: U64) -> None:
        """Every cell holds the hash of its token and of the cell before it, in the tree and in the rows."""
        befores: list[U64] = []
        tokens: list[NDArray[np.int32]] = []
        locs: list[NDArray[np.int32]] = []
        for node in all_nodes:
            if node.parent is None:
                continue
            path = np.frombuffer(node.locs, np.int32)
            up = node.parent
            first = _ROOTS[node.ns] if up.parent is None else int(cells[np.frombuffer(up.locs, np.int32)[-1]])
            befores += [np.array([first], np.uint64), cells[path[:-1]]]
            tokens.append(np.frombuffer(node.key, np.int32))
            locs.append(path)
        rows, kv = self._scheduler._rows, self._kv
        for row in rows.running.tolist():
            start, end = int(kv.n_published[row]), min(int(rows.planned[row]), int(rows.n_ids[row]))
            if end <= start:
                continue
            path = kv.table.locs[row, start:end]
            ns = rows.req(row).request.namespace
            first = _ROOTS[ns] if start == 0 else int(cells[kv.table.locs[row, start - 1]])
            befores += [np.array([first], np.uint64), cells[path[:-1]]]
            tokens.append(rows.ids[row, start:end])
            locs.append(path)
        if not locs:
            return
        where = np.concatenate(locs)
        right = mix_all(np.concatenate(befores), np.concatenate(tokens).astype(np.uint64))
        wrong = cells[where] != right
        require(not wrong.any(), "I6 content", "cells {} hold something else", where[wrong][:8].tolist())

    def _rows(self) -> None:
        rows, kv = self._scheduler._rows, self._kv
        running = rows.running.tolist()
        require(len(set(running)) == len(running) <= len(rows.live), "I7 rows", "a row runs twice")
        taken = [row for row, handle in enumerate(kv._handles) if handle is not None]
        require(sorted(running) == taken, "I7 rows", "{} run, {} are taken", running, taken)
        device_rows = self._pipeline.held_rows()
        for row in running:
            req, planned = rows.req(row), int(rows.planned[row])
            require(req.row == row, "I7 rows", "a request does not know its row")
            require(
                req.status is Status.RUNNING or rows.in_flight[row] > 0, "I9 ghost", "row {} outlives its request", row
            )
            require(
                0 <= rows.computed[row] <= planned == kv.n_cells[row], "I7 rows", "row {}: cells and plan differ", row
            )
            if rows.live[row]:
                require(planned <= rows.n_ids[row] + rows.ahead[row], "I7 rows", "row {} is planned too far", row)
            require(row in device_rows, "I7 rows", "the device does not know row {}", row)

    def _device_table(self, device: NDArray[np.int32]) -> None:
        rows, host = self._scheduler._rows, self._kv.table.locs
        for row in rows.running.tolist():
            n = int(rows.planned[row])
            require(host[row, :n].tobytes() == device[row, :n].tobytes(), "I7 rows", "row {}: stale page table", row)

    def _windows(self, device: FakeDevice) -> None:
        """What the next token of each row sees through its window is there; no more is in use than rows need."""
        kv = self._kv
        if not device.window:
            return
        rows, size = self._scheduler._rows, kv.page_size
        used: set[int] = set()
        for row in rows.running.tolist():
            end = min(int(rows.planned[row]), int(rows.n_ids[row]))
            first = end - end % device.window if device.chunked else max(0, end - device.window + 1)
            seen = kv.table.locs[row, first:end]
            locs = kv.window_locs(seen)
            require(locs is not None and (locs >= 0).all(), "I14 window", "row {} has lost a part of its window", row)
            require((device.window_cells[locs] == device.cells[seen]).all(), "I14 window", "row {} sees others", row)
            # Until it is planned again, a row also keeps what its last step saw.
            used |= set((kv.table.locs[row, : kv.n_cells[row]] // size).tolist())
        usage = kv.usage()
        held = usage.window - usage.window_free - usage.window_idle
        require(held <= len(used) * size, "I14 window", "{} cells are in use, and {} pages in rows", held, len(used))

    # -- the index of waiting requests against a fresh match

    def _lengths(self) -> None:
        queue, kv = self._scheduler._queue, self._kv
        for req in queue.reqs():
            fresh = kv.match_len(req.request.namespace, req.ids, req.match_limit)
            require(queue.length(req) == fresh, "index", "{} for {} cached tokens", queue.length(req), fresh)
        waiting = sorted(queue._index._waiters)
        require(waiting == sorted(req.order for req in queue.reqs()), "index", "other requests than the queue's")

    # -- I11: at the end

    def drained(self, simulation: Simulation) -> None:
        """Nothing is left of anybody."""
        scheduler, kv = self._scheduler, self._kv
        usage = kv.usage()
        name = "I11 drained"
        require(scheduler.idle and not scheduler._reqs and not scheduler._in_flight, name, "not idle")
        require(not len(scheduler._rows) and not len(scheduler._queue), name, "rows or queue")
        require(not len(scheduler._gates) and not scheduler._planner.suspects, name, "gates or suspects")
        for gate in simulation.gates:
            require(not gate.work, name, "a gate still works for {}", list(gate.work))
        require(not scheduler._queue.tokens, name, "{} tokens in an empty queue", scheduler._queue.tokens)
        require(not usage.locked and not usage.private and not usage.rows, name, "{}", usage)
        require(usage.window_free + usage.window_idle == usage.window, name, "{}", usage)
        require(not len(kv.waiting), name, "the index of waiting requests")
        require(not kv.waiting._places and not kv.waiting._roots, name, "places of the index")
        released = scheduler._planner._released
        require(sorted(released) == sorted(self._pipeline.held_rows()), name, "the device keeps rows for ever")
        kv.flush()
        usage = kv.usage()
        require(usage.free == usage.total and not usage.tree, name, "{}", usage)
        require(usage.window_free == usage.window, name, "{}", usage)
        kv.check()
        scheduler.check()
