"""What all launches have in common."""

from __future__ import annotations

from functools import cache

import torch
import triton

Tensor = torch.Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def next_power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return int(triton.next_power_of_2(n))


def warps(width: int) -> int:
    """Warps for a program that holds one row of ``width`` values in registers."""
    return min(16, max(1, width // 512))


def check_floats(op: str, *tensors: Tensor) -> None:
    """ValueError unless all are contiguous and of one dtype that is computed in."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or not tensor.is_contiguous():
            raise ValueError(f"{op} takes contiguous tensors of one dtype, got {shown(*tensors)}")
    if tensors[0].dtype not in FLOATS:
        raise ValueError(f"{op} computes in float32, bfloat16 or float16, not {tensors[0].dtype}")


def check(fits: bool, op: str, *tensors: Tensor) -> None:
    """ValueError that shows the tensors unless they fit together."""
    if not fits:
        raise ValueError(f"{op} cannot take {shown(*tensors)}")


def shown(*tensors: Tensor) -> str:
    """dtypes and shapes, for people."""
    return ", ".join(f"{t.dtype} {list(t.shape)}" for t in tensors)


@cache
def resident(device: torch.device) -> int:
    """Programs that a launch asks for where there is enough work: a few for each multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
