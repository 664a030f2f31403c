"""Weights are packed and held where they lie: a device without memory shows what would be mixed with the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.device.layers.latent import LatentForm, LatentLora
from bough.device.ops.lora import Update
from bough.device.ops.packed import Kind
from bough.device.ops.triton import linear
from bough.device.ops.triton.linear import packed_linear
from bough.device.ops.triton.ops import TritonOps
from bough.device.quant.base import Blocks, Held
from bough.device.quant.blocks import PACKERS
from bough.device.quant.scheme import resolve_scheme

NOWHERE = torch.device("meta")

BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34, "IQ4_NL": 18, "Q3_K": 110, "Q4_K": 144, "Q6_K": 210}
"""Of a block of 32 values, and of one of 256 in the formats that end in K."""


@pytest.mark.parametrize("name", BYTES)
def test_blocks_of_files(name: str) -> None:
    row = 512 // (256 if name.endswith("K") else 32) * BYTES[name]
    weight = PACKERS[name](Blocks(name, torch.empty(32, row, dtype=torch.uint8, device=NOWHERE), 512))
    assert weight is not None
    held = [t for t in (weight.weight, weight.scale, weight.sub) if t is not None]
    if weight.kind != Kind.Q8:  # whose values are looked at
        found = packed_linear(weight, None, NOWHERE).stored
        assert found is not None and found.scale is not None and found.offset is not None
        held += [found.weight, found.scale, found.offset]
    assert all(t.device == NOWHERE for t in held)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "fp8"])
def test_what_is_rounded_while_loading(monkeypatch: pytest.MonkeyPatch, quantize: Any) -> None:
    monkeypatch.setattr(linear, "codes_of", lambda data: None)  # it looks at values
    scheme = resolve_scheme(quantize, TritonOps(NOWHERE, "under test"), torch.bfloat16, ("fp8",))

    def held(n_out: int) -> Held:
        return Held(torch.empty(n_out, 96, dtype=torch.bfloat16, device=NOWHERE))

    scheme.linear([held(64), held(33)], torch.empty(97, dtype=torch.bfloat16, device=NOWHERE))
    scheme.table([held(32), held(32)], True).head(40)
    scheme.head([held(32), held(32)], 40)


def test_updates_of_latents_are_moved_to_the_model() -> None:
    form = LatentForm(
        hidden_size=16, n_heads=2, latent_size=8, rotary_size=4, nope_size=6, value_size=5, query_latent_size=0,
        bias=False, interleaved=True, scale=1.0,
    )  # fmt: skip
    lora = LatentLora(form, torch.bfloat16, NOWHERE)
    lora.set(0, Update([torch.randn(3, 8)], [torch.randn(22, 3)]))
    assert all(part.device == NOWHERE for part in lora._places[0])
