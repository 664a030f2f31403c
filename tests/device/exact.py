"""Seeded inputs, and what outputs are compared with; without Hypothesis, for machines that have none."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(out: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Within the given number of roundings to the dtype of ``out``."""
    unit = 2**-8 if out.dtype == torch.bfloat16 else 4e-7
    assert out.isfinite().all()
    assert ((out.double() - exact).abs() <= unit * roundings * exact.abs() + 1e-6).all()


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
