"""Memory on large pages.

What a decode step reads is far more than the translation buffers of a processor cover with pages of 4 KiB: it reads
weights and cells up to a third faster from pages of 2 MiB, where the system has any.
"""

from __future__ import annotations

import ctypes
import math
from mmap import PAGESIZE

import torch

Tensor = torch.Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

CHUNK = 32 << 20
"""Bytes that an arena takes from the system at a time."""

LINE = 64

_LIBC = ctypes.CDLL(None)


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages behind a tensor that was not written yet. Advice only: a system that cannot, does not."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= HUGE_PAGE:
        _advise(start, length // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)


def populate(tensor: Tensor) -> None:
    """Have the system put memory behind a tensor that is about to be written; its numbers stay. Advice only, too."""
    start = tensor.data_ptr() // PAGESIZE * PAGESIZE
    _advise(start, tensor.data_ptr() + tensor.nbytes - start, MADV_POPULATE_WRITE)


def _advise(start: int, length: int, advice: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


class Arena:
    """Hands out tensors that lie next to each other on large pages, though each may be smaller than one.

    A chunk, at least ``chunk`` bytes, is given back to the system when nobody has a tensor of it any more.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._rest = self._before = torch.empty(0, dtype=torch.uint8)

    def join(self, tensors: list[Tensor]) -> Tensor:
        """A copy of tensors of one dtype, one behind the other along their first dimension, on their device: only on a
        CPU in the arena."""
        if tensors[0].device.type != "cpu":
            return torch.cat(tensors)
        shape = sum(len(t) for t in tensors), *tensors[0].shape[1:]
        return torch.cat(tensors, out=self._empty(shape, tensors[0].dtype))

    def room(self, n: int, like: Tensor) -> Tensor:
        """An uninitialised tensor of ``n`` such elements of the first dimension as ``like`` has, on its device."""
        if like.device.type != "cpu":
            return like.new_empty((n, *like.shape[1:]))
        return self._empty((n, *like.shape[1:]), like.dtype)

    def take_back(self) -> None:
        """What was handed out last in the arena is free again; nobody may have it any more."""
        self._rest = self._before

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        n = math.prod(shape) * dtype.itemsize
        self._before = self._rest
        if n > len(self._rest):
            chunk = torch.empty(max(n, self._chunk) + HUGE_PAGE, dtype=torch.uint8)
            advise_huge_pages(chunk)
            self._rest = chunk[-chunk.data_ptr() % HUGE_PAGE :]
        taken, self._rest = self._rest[:n], self._rest[-(-n // LINE) * LINE :]
        return taken.view(dtype).view(shape)
