"""Which scheme holds a model's weights."""

from __future__ import annotations

from typing import Literal

import torch

from bough.base.errors import ConfigError
from bough.device.ops.packed import Kind, PackedWeight
from bough.device.ops.registry import Ops
from bough.device.quant.base import Parameter, Scheme
from bough.device.quant.blocks import pack_as_stored
from bough.device.quant.dense import DenseScheme, RoundedScheme
from bough.device.quant.fp8 import Fp8Ops, Fp8Scheme, KeptFp8Scheme
from bough.device.quant.packed import Pack, PackedScheme, pack_dense

Quantize = Literal["auto", "none", "int8", "int4", "fp8"]


def _rounding(ops: Ops, kind: Kind) -> Pack:
    return lambda parameter: ops.suited(ops.quantise(kind, parameter.dense().contiguous()))


def _keeping(ops: Ops) -> Pack:
    def pack(parameter: Parameter) -> PackedWeight | None:
        found = pack_as_stored(parameter)
        return None if found is None else ops.suited(found)

    return pack


def resolve_scheme(quantize: Quantize, ops: Ops, dtype: torch.dtype, features: tuple[str, ...] = ()) -> Scheme:
    """The scheme that is asked for, on a machine with these ``features`` of its processor.

    * "auto": bfloat16 with compiled kernels keeps blocks that a file holds and there is a kernel for, and devices that
      multiply 8-bit floats keep those; all else is as "none".
    * "none": the model's dtype. bfloat16 is packed for the kernels of this package: those of oneDNN are up to a quarter
      faster for some shapes with hundreds of rows, but their bits depend on the number of rows. float32 is not packed;
      its bits do not depend on it, either.
    * "int8", "int4": rounded while loading; embedding and head to 8 bits. On the CPU 8 bits are those of the weight's
      Hadamard transform, with a scale for each output; on a GPU of the weight itself, those of embedding and head in
      groups of 32. Without compiled kernels weights are rounded so and held in the model's dtype; their inputs, which
      the kernels round, too, stay as they are.
    * "fp8": rounded while loading, with a scale for each output; embedding and head stay. ConfigError where the device
      cannot multiply them.
    """
    if quantize in ("int8", "int4"):
        eight, head = (Kind.INT8, Kind.Q8) if ops.name == "triton" else (Kind.ROTATED, Kind.ROTATED)
        layers = eight if quantize == "int8" else Kind.Q4_K
        if ops.name == "reference":
            return RoundedScheme(layers, head, ops)
        return PackedScheme(_rounding(ops, layers), _rounding(ops, head), dtype, ops)
    if quantize == "fp8":
        if "fp8" not in features or not isinstance(ops, Fp8Ops):
            raise ConfigError("fp8 weights need a GPU of compute capability 8.9 or newer", param="quantize")
        return Fp8Scheme(ops, DenseScheme(ops))
    if ops.name == "reference" or (ops.name == "cpu" and dtype != torch.bfloat16):
        return DenseScheme(ops)
    dense = DenseScheme(ops) if ops.name == "triton" else PackedScheme(pack_dense, pack_dense, dtype, ops)
    if quantize == "none":
        return dense
    packed = PackedScheme(_keeping(ops), _keeping(ops), dtype, ops, dense)
    return KeptFp8Scheme(ops, packed) if "fp8" in features and isinstance(ops, Fp8Ops) else packed
