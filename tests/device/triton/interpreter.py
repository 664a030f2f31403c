"""Mends what Triton 3.6's interpreter gets wrong, so that kernels can be run on the CPU and compared.

* Scalars are arrays of one element, which numpy >= 2.4 does not take for integers any more.
* A product of bfloat16 multiplies the bits as if they were integers, and one of float8 goes through float16.
* Conversions to bfloat16 cut bits off, those of integers to it keep the integer's bits, and those to float8 carry no
  rounding into the exponent; all are slow.

What it cannot show: limits of shared memory, races, misaligned accesses. ``TRITON_INTERPRET`` is set where pytest
starts, in ``tests/conftest.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def convert(data: Any, source: Any, target: Any, rounding: Any = None) -> Any:
    """As torch converts; both as bits of the dtypes of the interpreter."""
    bits = np.ascontiguousarray(data)
    tensor = torch.from_numpy(bits.view(np.uint8).reshape(-1)).view(DTYPES[source])
    if target == tl.float8e4nv:
        tensor = tensor.float().clamp(-448, 448)
    made = tensor.to(DTYPES[target]).view(torch.uint8).numpy()
    return made.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(bits.shape)


def cast(self: Any, source: Any, target_type: Any) -> Any:
    """:meth:`InterpreterBuilder.cast_impl` with rounding."""
    narrow, wide = source.dtype.scalar, target_type.scalar
    numpy_type = interpreter._get_np_dtype(target_type)
    if tl.bfloat16 in (narrow, wide) and narrow != wide and narrow in DTYPES and wide in DTYPES:
        return TensorHandle(convert(source.data, narrow, wide).view(numpy_type), wide)
    if wide == tl.bfloat16 and narrow != wide:
        return TensorHandle(convert(source.data.astype(np.float32), tl.float32, wide).view(numpy_type), wide)
    return TensorHandle(source.data.astype(numpy_type), wide)


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Products in the dtype of the sum."""
    wide = [
        convert(x.data, x.dtype.scalar, tl.float32).view(np.float32)
        if x.dtype.scalar in (tl.bfloat16, tl.float8e4nv, tl.float8e5)
        else x.data
        for x in (a, b)
    ]
    result = np.matmul(*(x.astype(d.data.dtype) for x in wide))
    return TensorHandle(result + d.data, d.dtype.scalar)


def mend() -> None:
    """Once per process, before the first kernel runs."""
    run, patch_tensor = interpreter.GridExecutor.__call__, interpreter._patch_lang_tensor

    def quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        # What is not a number is not a mistake of the kernel: lanes beyond the end compute, too.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run(self, *args, **kwargs)

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
    interpreter.GridExecutor.__call__ = quietly
    interpreter._convert_float = convert
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_dot = dot
