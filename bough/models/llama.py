"""Llama (Touvron et al. 2023) and everything of its shape: ``model_type`` llama.

Pre-norm transformer with rotary positions, grouped-query attention and a gated SiLU feed-forward layer; biases on
projections, tied or separate head. One layer is nine ops:

    x = add_norm(x, residual); qkv; rotate and write KV; attend; out
    x = add_norm(x, residual); gate_up; silu_mul; down
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.decoder import Decoder


class Llama(Decoder):
    """A :class:`bough.models.base.Model`: what :class:`bough.models.decoder.Decoder` is."""

    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}
