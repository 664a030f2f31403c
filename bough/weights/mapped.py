"""A file mapped for reading, whose pages can be given back once they have been used."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bough.base.errors import ConfigError

if TYPE_CHECKING:
    import torch


class MappedFile:
    """A read-only mapping of a whole file; ``data`` is its bytes.

    Pages that were read count as this process's memory until :meth:`forget`; the loader calls it after
    each tensor, so that a checkpoint that is copied is not held twice.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError if ``path`` cannot be read or is empty."""
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error

    def view(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [nbytes] over the file's bytes from ``start``; not to be used after :meth:`close`."""
        return np.frombuffer(self.data, np.uint8, nbytes, start)

    def read(self, start: int, nbytes: int) -> torch.Tensor:
        """A copy of these bytes, uint8 [nbytes], whose pages are given back. All threads of torch make it: what takes
        longest are first touches of the new memory."""
        import torch  # slow, and not needed by those who only read the metadata

        out = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            raw = self.view(start, nbytes)  # keeps the mapping meanwhile
            # By its address: torch warns of buffers that cannot be written.
            at = (ctypes.c_uint8 * nbytes).from_address(raw.ctypes.data)
            out.copy_(torch.frombuffer(at, dtype=torch.uint8))
            self.forget(start, nbytes)
        return out

    def forget(self, start: int, nbytes: int) -> None:
        """Let the system take back the pages that lie wholly within these bytes."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self.data.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Unmap. While a view is still held, the mapping lives on until that view dies."""
        try:
            self.data.close()
        except BufferError:
            pass
