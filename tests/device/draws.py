"""Parameters of draws, and the distribution that they ask for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from bough.device.ops.reference import ReferenceOps
from bough.device.ops.sampling import Draws, dropped

Tensor = torch.Tensor
REFERENCE = ReferenceOps("the twin")


def draws_of(logits: Tensor, rows: list[dict[str, Any]]) -> Draws:
    """One row of parameters for each row of logits; absent ones keep everything."""

    def column(name: str, default: float, dtype: type) -> Any:
        return np.array([row.get(name, default) for row in rows], dtype)

    return Draws(
        best=REFERENCE.argmax(logits),
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", logits.shape[1], np.int64),
        top_p=column("top_p", 1.0, np.float64),
        least_z=column("least_z", -math.inf, np.float64),
        seeds=column("seed", 0, np.uint64),
        positions=column("position", 0, np.int64),
    )


def distribution(logits: Tensor, row: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Probabilities of one row by a full sort of float64."""
    z = (logits.float() - logits.float().max()) / np.float32(row.get("temperature", 1.0))
    weights = z.double().exp()
    gone = dropped(z, weights, row.get("top_k", len(z)), row.get("top_p", 1.0))
    weights[gone] = 0.0
    weights[z.double() < row.get("least_z", -math.inf)] = 0.0
    return (weights / weights.sum()).numpy()
