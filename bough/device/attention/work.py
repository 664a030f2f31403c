"""Which program of an attention kernel reads which keys for which queries: decided on the host, once per step.

A *tile* is some new tokens whose queries one program holds: of one row, or of all rows of a group that shares a prefix.
Its keys are cut into splits, which make *items*. An item that is not alone for its tokens leaves a partial result;
partial results of a token are merged in the order of their keys. Where a row is cut depends on that row alone, and
on the prefix that it shares.

Everything is one array of int32, so that a step costs one copy and a CUDA graph one buffer: a header of HEADER numbers
(how many small items, large items, merged tokens; where small items, large items, order, positions, merged tokens,
starts, partials begin), then these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import Ints, SharedPrefix, first_seen

HEADER = 10

ITEM = 6
"""Numbers of an item: row of the page table, where its tokens begin in ``order``, how many, first key, end of the keys,
first partial result or -1."""

SPLIT = 256
"""Keys of a split of a small tile, and what shared prefixes are rounded down to; a multiple of every block of keys."""

LARGE_SPLIT = 4096

MOST_SPLITS = 16
"""Longer sequences get longer splits."""


Column = NDArray[np.integer | np.bool_]


class HostBatch(NamedTuple):
    """What attention has to know of a step before it is launched; host arrays, shapes as in ``AttentionBatch``."""

    rows: Ints
    q_start: Ints
    seq_len: Ints
    shared: tuple[SharedPrefix, ...] = ()


class Tiles(NamedTuple):
    """Tokens that a tile holds: of rows with few new tokens, and of others and of groups."""

    small: int
    large: int


class Sizes(NamedTuple):
    """Launch bounds: items of both kinds, merged tokens, and partial results of one token and all its heads."""

    small: int
    large: int
    merged: int
    partials: int


@dataclass(frozen=True, slots=True)
class Work:
    """``array`` is what the kernels read; see the module's text."""

    array: Ints
    sizes: Sizes


def most_work(n_rows: int) -> tuple[Sizes, int]:
    """Bounds for any step in which at most ``n_rows`` rows compute one token each, and for the length of the array."""
    own = n_rows * MOST_SPLITS
    # Tiles of groups hold two tokens or more; groups of three need the most of them, two each.
    shared = 2 * n_rows // 3 * MOST_SPLITS
    partials = 2 * own
    sizes = Sizes(own, shared, n_rows, partials)
    return sizes, HEADER + ITEM * (own + shared) + 4 * n_rows + 2 * n_rows + 1 + partials


@dataclass(slots=True)
class _Tile:
    """Columns of tiles, [n] each: what items say of them; whether they are large, and leave partial results whatever
    their splits; the fewest keys of a split."""

    row: Column
    first: Column
    count: Column
    begin: Column
    end: Column
    large: Column
    partial: Column
    least: Column


def plan_work(batch: HostBatch, tiles: Tiles, window: int = 0, chunked: bool = False) -> Work:
    """The work of one step; ``window`` and ``chunked`` as in :class:`bough.device.ops.heads.Scoring`."""
    n_new = np.diff(batch.q_start)
    start = batch.seq_len - n_new
    cut = np.zeros(len(n_new), np.int32)
    groups = [] if window else list(_paying(batch.shared, n_new, tiles))
    for members, n_tokens in groups:
        cut[members] = n_tokens
    order = [np.arange(batch.q_start[-1], dtype=np.int32)]
    positions = [order[0] - np.repeat(batch.q_start[:-1] - start, n_new)]
    found = [_own(batch, n_new, start, cut, tiles, (window, chunked))]
    used = len(order[0])
    for members, n_tokens in groups:
        tokens = np.concatenate([np.arange(batch.q_start[i], batch.q_start[i + 1], dtype=np.int32) for i in members])
        found.append(_of_group(batch.rows[members[0]], used, len(tokens), n_tokens, tiles))
        order.append(tokens)
        positions.append(positions[0][tokens])
        used += len(tokens)
    whole = found[0] if len(found) == 1 else _joined(found)
    return _packed(whole, np.concatenate(order), np.concatenate(positions))


def _paying(shared: Sequence[SharedPrefix], n_new: Ints, tiles: Tiles) -> list[tuple[Ints, int]]:
    """Groups whose prefix is worth a tile of its own: rows of few new tokens, at least a split of keys.

    Rows with many new tokens fill their tiles alone, and find the keys in the cache of the device anyway.
    """
    kept = []
    for rows, n_tokens in shared if tiles.large > 1 else ():
        members = rows[n_new[rows] <= tiles.small]
        if len(members) > 1 and n_tokens >= SPLIT:
            kept.append((members, n_tokens // SPLIT * SPLIT))
    return kept


def _own(batch: HostBatch, n_new: Ints, start: Ints, cut: Ints, tiles: Tiles, window: tuple[int, bool]) -> _Tile:
    """The tiles of each row's own tokens."""
    large = n_new > tiles.small
    size = np.where(large, tiles.large, tiles.small)
    n_tiles = -(-n_new // size)
    row = np.repeat(np.arange(len(n_new)), n_tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * size[row]
    count = np.minimum(size[row], n_new[row] - first)
    position = start[row] + first
    begin = cut[row]
    if window[0]:
        begin = np.maximum(0, first_seen(position, *window) // SPLIT * SPLIT)
    least = np.where(large, LARGE_SPLIT, SPLIT)[row]
    return _Tile(
        batch.rows[row], batch.q_start[row] + first, count, begin, position + count, large[row], cut[row] > 0, least
    )


def _of_group(row: np.integer, at: int, n: int, n_keys: int, tiles: Tiles) -> _Tile:
    """The tiles of ``n`` tokens that begin at ``at`` in the order, over the first keys of ``row``."""
    first = np.arange(0, n, tiles.large)
    ones = np.ones_like(first)
    count = np.minimum(tiles.large, n - first)
    return _Tile(ones * row, at + first, count, 0 * ones, ones * n_keys, ones == 1, ones == 1, ones * SPLIT)


def _joined(parts: Sequence[_Tile]) -> _Tile:
    return _Tile(*(np.concatenate([getattr(p, name) for p in parts]) for name in _Tile.__slots__))


def _packed(tile: _Tile, order: Ints, positions: Ints) -> Work:
    span = tile.end - tile.begin
    length = np.maximum(tile.least, -(-span // (MOST_SPLITS * SPLIT)) * SPLIT)
    n_splits = -(-span // length)
    of = np.repeat(np.arange(len(span)), n_splits)
    split = np.arange(len(of)) - np.repeat(np.cumsum(n_splits) - n_splits, n_splits)
    begin = tile.begin[of] + split * length[of]
    end = np.minimum(begin + length[of], tile.end[of])
    left = (tile.partial | (n_splits > 1))[of]
    count = tile.count[of]
    partial = np.cumsum(count * left) - count * left
    items = np.stack((tile.row[of], tile.first[of], count, begin, end, np.where(left, partial, -1)), axis=1)
    large = tile.large[of].astype(np.bool_)
    # Long ones first, so that programs end together.
    ranked = np.argsort(begin - end, kind="stable")
    small_items, large_items = items[ranked[~large[ranked]]], items[ranked[large[ranked]]]
    merged, starts, partials = _merges(items[left], order)
    sections = [small_items.ravel(), large_items.ravel(), order, positions, merged, starts, partials]
    at = HEADER + np.cumsum([0, *(len(section) for section in sections[:-1])])
    header = [len(small_items), len(large_items), len(merged), *at]
    array = np.concatenate([header, *sections]).astype(np.int32)
    return Work(array, Sizes(len(small_items), len(large_items), len(merged), len(partials)))


def _merges(items: Column, order: Ints) -> tuple[Column, Column, Column]:
    """Tokens with partial results, where those of each begin, and the partial results in the order of their keys."""
    count = items[:, 2]
    of = np.repeat(np.arange(len(items)), count)
    within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    token, partial = order[items[of, 1] + within], items[of, 5] + within
    by_token = np.lexsort((items[of, 3], token))
    merged, starts = np.unique(token[by_token], return_index=True)
    return merged, np.append(starts, len(of)), partial[by_token]
