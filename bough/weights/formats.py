"""The tensor types of ggml: the layout of a block of each, and what decodes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bough.weights import blocks, codebooks
from bough.weights.blocks import BlockFormat, Blocks, Floats

Field = tuple[str, str] | tuple[str, str, int] | tuple[str, str, tuple[int, int]]


def _format(name: str, values: int, decode: Callable[[Blocks], Floats], *fields: Field) -> BlockFormat:
    return BlockFormat(name, values, np.dtype(list(fields)), decode)


#: ggml's type number -> format, for every type that can be loaded.
FORMATS: dict[int, BlockFormat] = {
    0: _format("F32", 1, blocks.plain, ("q", "<f4")),
    1: _format("F16", 1, blocks.plain, ("q", "<f2")),
    2: _format("Q4_0", 32, blocks.q4_0, ("d", "<f2"), ("q", "u1", 16)),
    3: _format("Q4_1", 32, blocks.q4_1, ("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)),
    6: _format("Q5_0", 32, blocks.q5_0, ("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
    7: _format("Q5_1", 32, blocks.q5_1, ("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
    8: _format("Q8_0", 32, blocks.q8_0, ("d", "<f2"), ("q", "i1", 32)),
    10: _format("Q2_K", 256, blocks.q2_k, ("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("dmin", "<f2")),
    11: _format("Q3_K", 256, blocks.q3_k, ("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("d", "<f2")),
    12: _format("Q4_K", 256, blocks.q4_k, ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)),
    13: _format(
        "Q5_K",
        256,
        blocks.q5_k,
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", 12),
        ("high", "u1", 32),
        ("q", "u1", 128),
    ),
    14: _format("Q6_K", 256, blocks.q6_k, ("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
    16: _format("IQ2_XXS", 256, codebooks.iq2_xxs, ("d", "<f2"), ("q", "<u4", (8, 2))),
    17: _format("IQ2_XS", 256, codebooks.iq2_xs, ("d", "<f2"), ("q", "<u2", 32), ("scales", "u1", 8)),
    18: _format("IQ3_XXS", 256, codebooks.iq3_xxs, ("d", "<f2"), ("q", "u1", 64), ("words", "<u4", 8)),
    19: _format("IQ1_S", 256, codebooks.iq1_s, ("d", "<f2"), ("q", "u1", 32), ("high", "<u2", 8)),
    20: _format("IQ4_NL", 32, codebooks.iq4_nl, ("d", "<f2"), ("q", "u1", 16)),
    21: _format(
        "IQ3_S",
        256,
        codebooks.iq3_s,
        ("d", "<f2"),
        ("q", "u1", 64),
        ("high", "u1", 8),
        ("signs", "u1", 32),
        ("scales", "u1", 4),
    ),
    22: _format(
        "IQ2_S",
        256,
        codebooks.iq2_s,
        ("d", "<f2"),
        ("q", "u1", 32),
        ("signs", "u1", 32),
        ("high", "u1", 8),
        ("scales", "u1", 8),
    ),
    23: _format("IQ4_XS", 256, codebooks.iq4_xs, ("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("q", "u1", 128)),
    29: _format("IQ1_M", 256, codebooks.iq1_m, ("q", "u1", 32), ("high", "u1", 16), ("scales", "<u2", 4)),
    30: _format("BF16", 1, blocks.bf16, ("q", "<u2")),
    34: _format("TQ1_0", 256, codebooks.tq1_0, ("q", "u1", 48), ("high", "u1", 4), ("d", "<f2")),
    35: _format("TQ2_0", 256, codebooks.tq2_0, ("q", "u1", 64), ("d", "<f2")),
    39: _format("MXFP4", 32, codebooks.mxfp4, ("e", "u1"), ("q", "u1", 16)),
    40: _format("NVFP4", 64, codebooks.nvfp4, ("d", "u1", 4), ("q", "u1", (4, 8))),
    41: _format("Q1_0", 128, blocks.q1_0, ("d", "<f2"), ("q", "u1", 16)),
}

#: Types that exist but cannot be loaded, for messages.
OTHER_TYPES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
}  # fmt: skip
