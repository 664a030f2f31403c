"""Mixtures of experts made of SmolLM2's feed-forward layers, which must write SmolLM2's own text."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.params import SamplingParams
from bough.device.layers.context import LayerContext
from bough.weights.loader import Checkpoint, open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from tests.driving import GREEDY, Driver, device_parts
from tests.worker.test_smollm2 import GOLDEN, PROMPTS

Tensor = torch.Tensor

NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Mixture:
    """A dense checkpoint as a Mixtral: its feed-forward layers cut into ``n`` experts, or ``n`` times the same."""

    def __init__(self, dense: Checkpoint, n: int, top_k: int, cut: bool) -> None:
        self._dense, self._n, self._cut = dense, n, cut
        self._whole = lru_cache(3)(dense.tensor)
        inner = dense.config["intermediate_size"] // (n if cut else 1)
        self.config = {
            **dense.config, "model_type": "mixtral", "num_local_experts": n, "num_experts_per_tok": top_k,
            "intermediate_size": inner,
        }  # fmt: skip

    def names(self) -> list[str]:
        names = [name for name in self._dense.names() if ".mlp." not in name]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}.block_sparse_moe"
            names.append(f"{layer}.gate.weight")
            names += [f"{layer}.experts.{e}.{w}.weight" for e in range(self._n) for w in NAMES]
        return names

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> Tensor:
        if "block_sparse_moe" not in name:
            return self._dense.tensor(name, dtype)
        layer, _, rest = name.partition(".block_sparse_moe.")
        if rest == "gate.weight":
            router = torch.randn(self._n, self.config["hidden_size"], generator=torch.Generator().manual_seed(1))
            # Experts that all are used have to weigh the same.
            return (router * (0 if self._cut else 0.05)).to(dtype or torch.float32)
        _, e, w, _ = rest.split(".")
        whole = self._whole(f"{layer}.mlp.{NAMES[w]}.weight", dtype)
        if not self._cut:
            return whole
        part = whole.chunk(self._n, dim=int(w == "w2"))[int(e)]
        return part.contiguous() * (self._n if w == "w2" else 1)  # a weight of 1 / n, undone by a power of two

    def blocks(self, name: str, rows: slice | None = None) -> None:
        return None

    def shape(self, name: str) -> None:
        return None


def driver_of(config: dict[str, Any], source: Any, dtype: torch.dtype) -> Driver:
    built = build_worker(
        config, LayerContext(source, *device_parts("auto", dtype, "none")),
        WorkerSizes(n_ids=1 << 20, context_length=64, n_rows=4), KVConfig(pool_tokens=512), lambda: 1 << 40,
    )  # fmt: skip
    return Driver(built.worker, built.pool_tokens)


KINDS = pytest.mark.parametrize(("n", "top_k", "cut"), [(8, 8, True), (4, 2, False)], ids=["cut", "identical"])


@pytest.mark.slow
@KINDS
def test_it_writes_the_same_text(default_model: Path, n: int, top_k: int, cut: bool) -> None:
    checkpoint = open_checkpoint(default_model)
    mixture = Mixture(checkpoint, n, top_k, cut)
    driver = driver_of(mixture.config, mixture, torch.float32)
    checkpoint.close()
    seqs = [driver.add(row, ids, GREEDY) for row, ids in enumerate(PROMPTS)]
    driver.run(seqs, 16)
    assert [seq.generated for seq in seqs] == GOLDEN


@pytest.mark.slow
@KINDS
def test_the_fused_op_thinks_the_same_of_the_text(default_model: Path, n: int, top_k: int, cut: bool) -> None:
    """In bfloat16, where sums are rounded elsewhere: the probabilities of the dense model's tokens hardly move."""
    checkpoint = open_checkpoint(default_model)
    mixture, found = Mixture(checkpoint, n, top_k, cut), []
    forced = SamplingParams(temperature=0.0, prompt_logprobs=0)
    for config, source in ((checkpoint.config, checkpoint), (mixture.config, mixture)):
        driver = driver_of(config, source, torch.bfloat16)
        seqs = [driver.add(row, a + b, forced) for row, (a, b) in enumerate(zip(PROMPTS, GOLDEN))]
        driver.run(seqs, 1, chunk=11)
        found.append(torch.tensor([entry.logprob for seq in seqs for entry in seq.prompt_logprobs]))
    checkpoint.close()
    assert (found[0] - found[1]).abs().mean() < 0.05 and (found[0] - found[1]).abs().max() < 0.4
