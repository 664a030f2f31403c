"""What the KV pool holds for one layer: keys or values by loc."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

LARGEST = 127
"""Of an int8 cell; -128 is not used."""


@dataclass(frozen=True, slots=True)
class QuantizedCells:
    """int8 cells, symmetric, with one scale per token and kv head: ``data * scale[..., None]``.

    Attributes:
        data: [N, KH, D] int8.
        scale: [N, KH] float32, the largest magnitude of the D numbers over 127; NaN where one was not finite.
    """

    data: Tensor
    scale: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def write(self, loc: Tensor, values: Tensor) -> None:
        """Round ``values`` [T, KH, D] into the cells at ``loc`` [T]."""
        wide = values.float()
        finite = wide.isfinite().all(-1)
        wide = wide.where(finite[..., None], 0.0)
        scale = wide.abs().amax(-1) / LARGEST
        divisor = scale.where(scale > 0, torch.inf)
        self.data[loc] = (wide / divisor[..., None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        self.scale[loc] = scale.where(finite, torch.nan)

    def read(self, loc: Tensor) -> Tensor:
        """[n, KH, D] float32."""
        return self.data[loc].float() * self.scale[loc][..., None]


Cells = Tensor | QuantizedCells
"""[N, KH, D] float32, bfloat16, float16 or, for Triton's kernels, float8_e4m3fn; or int8 with scales."""


def write_cells(cells: Cells, loc: Tensor, values: Tensor) -> None:
    """Round ``values`` [T, KH, D] into the cells at ``loc`` [T]."""
    if isinstance(cells, QuantizedCells):
        cells.write(loc, values)
    elif cells.dtype == torch.float8_e4m3fn:  # which has no infinity: too much is the most that it can hold
        # Bytes, because torch has no scattered write of this dtype.
        cells.view(torch.uint8)[loc] = values.float().clamp(-448.0, 448.0).to(cells.dtype).view(torch.uint8)
    else:
        cells[loc] = values.to(cells.dtype)


def read_cells(cells: Cells, loc: Tensor) -> Tensor:
    """[n, KH, D] float32."""
    if isinstance(cells, QuantizedCells):
        return cells.read(loc)
    if cells.dtype == torch.float8_e4m3fn:
        return cells.view(torch.uint8)[loc].view(cells.dtype).float()
    return cells[loc].float()
