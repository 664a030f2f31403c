"""Mixtures of experts: routing against transformers, and the op against one expert after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError
from bough.device.layers.moe import Expert, Routing, route
from bough.device.ops.experts import Clamp, ExpertParts, FusedExperts
from bough.device.ops.packed import Kind
from bough.device.ops.registry import Ops
from bough.device.quant.packed import PackedMethod
from tests.device.test_packed import inputs_for, randn, random_weight

Tensor = torch.Tensor

CLAMP = Clamp(1.702, 7.0)


pytestmark = pytest.mark.usefixtures("poisoned", "two_threads")


class Case:
    """Random experts of one kind or more, with their fused op and what it should compute."""

    def __init__(
        self, ops: Ops, kinds: tuple[Kind, Kind, Kind], n_experts: int, dim: int, inner: int, clamp: Clamp | None = None
    ) -> None:
        dim, inner = (max(inputs_for(kind, n) for kind in kinds) for n in (dim, inner))
        self.dim, self.ops, self.clamp = dim, ops, clamp
        self.experts = []
        for e in range(n_experts):
            gate, up = (random_weight(kind, inner, dim, seed=3 * e + i) for i, kind in enumerate(kinds[:2]))
            down = random_weight(kinds[2], dim, inner, seed=3 * e + 2)
            self.experts.append(
                Expert(
                    PackedMethod([gate, up], randn(1, 2 * inner, seed=e)[0], ops),
                    PackedMethod([down], randn(1, dim, seed=e)[0], ops),
                )
            )
        parts = [ExpertParts(e.gate_up.parts, e.down.parts) for e in self.experts]
        fused = ops.experts(parts, (dim, inner), clamp)
        assert isinstance(fused, FusedExperts)
        self.fused = fused

    def twin(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Token after token, expert after expert; inputs of packed weights are rounded alike in both dtypes."""
        activation = self.clamp or self.ops.silu_mul
        out = []
        for t in range(len(x)):
            total = torch.zeros(1, self.dim)
            for e, weight in zip(ids[t].tolist(), weights[t].tolist()):
                inner = activation(self.experts[e].gate_up.apply(x[t : t + 1]))
                total = total.double().add(self.experts[e].down.apply(inner.float()).double(), alpha=weight).float()
            out.append(total.to(x.dtype))
        return torch.cat(out) if out else x


def choice(n: int, n_experts: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(n, n_experts, generator=g).topk(k).indices.int()
    return ids, torch.rand(n, k, generator=g)


def skip_reference(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("the reference computes one expert after another")


SAME = [(kind, kind, kind) for kind in (Kind.BF16, Kind.INT8, Kind.Q8, Kind.Q4_MIN, Kind.Q4_K, Kind.Q6_K, Kind.ROTATED)]
MIXED = [(Kind.BF16, Kind.INT8, Kind.Q4_MIN), (Kind.Q4_K, Kind.Q4_K, Kind.Q6_K)]


@pytest.mark.parametrize("kinds", SAME + MIXED, ids=lambda kinds: "-".join(k.name for k in kinds))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_op_equals_one_expert_after_another(ops: Ops, kinds: tuple[Kind, Kind, Kind], dtype: torch.dtype) -> None:
    skip_reference(ops)
    for clamp, (n, n_experts, k, dim, inner) in [
        (None, (1, 4, 2, 64, 96)), (CLAMP, (7, 4, 2, 36, 48)), (None, (60, 3, 3, 70, 80)), (CLAMP, (110, 2, 1, 34, 18)),
    ]:  # fmt: skip
        if inner % 16 and kinds[0] == kinds[1]:
            inner = 32
        case = Case(ops, kinds, n_experts, dim, inner, clamp)
        x, (ids, weights) = randn(n, case.dim, dtype), choice(n, n_experts, k)
        out, twin = case.fused(x, ids, weights), case.twin(x, ids, weights)
        # Sums that differ in their last bit may be rounded to neighbours: a step of bfloat16.
        bound = 1e-5 * twin.abs().max() + (2**-7 if dtype == torch.bfloat16 else 1e-6) * twin.abs()
        assert out.dtype == dtype and out.isfinite().all()
        assert ((out.float() - twin.float()).abs() <= bound).all()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(0, 70), n_experts=st.integers(1, 9), k=st.integers(1, 9), dim=st.integers(1, 80),
    inner=st.integers(1, 8), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(ops: Ops, n: int, n_experts: int, k: int, dim: int, inner: int, seed: int) -> None:
    skip_reference(ops)
    case = Case(ops, (Kind.BF16, Kind.BF16, Kind.BF16), n_experts, dim, 16 * inner)
    x, (ids, weights) = randn(n, dim, seed=seed), choice(n, n_experts, min(k, n_experts), seed)
    found, expected = case.fused(x, ids, weights), case.twin(x, ids, weights)
    # Terms of a few hundred may cancel.
    assert torch.allclose(found, expected, 1e-5, 1e-4 + 1e-6 * float(expected.abs().amax() if n else 0))


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.ROTATED, Kind.Q4_K], ids=lambda k: k.name)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_depend_on_the_token_alone(ops: Ops, kind: Kind, threads: int) -> None:
    skip_reference(ops)
    case = Case(ops, (kind, kind, kind), 5, 128, 96)
    x, (ids, weights) = randn(130, 128, torch.bfloat16), choice(130, 5, 2)
    whole = case.fused(x, ids, weights)
    torch.set_num_threads(threads)
    for begin, end in [(0, 1), (3, 5), (60, 130), (129, 130), (0, 130)]:
        assert torch.equal(case.fused(x[begin:end], ids[begin:end], weights[begin:end]), whole[begin:end])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
    assert torch.equal(case.fused(x[order], ids[order], weights[order]), whole[order])


def test_what_is_not_finite_stays_in_its_token(ops: Ops) -> None:
    skip_reference(ops)
    for clamp in (None, CLAMP):
        case = Case(ops, (Kind.BF16, Kind.BF16, Kind.BF16), 3, 64, 64, clamp)
        x, (ids, weights) = randn(9, 64), choice(9, 3, 2)
        clean = case.fused(x, ids, weights)
        x[4, 7] = torch.nan
        broken = case.fused(x, ids, weights)
        others = torch.arange(9) != 4
        assert broken[4].isnan().all() and torch.equal(broken[others], clean[others])


def test_wrong_arguments_are_refused(ops: Ops) -> None:
    skip_reference(ops)
    case = Case(ops, (Kind.BF16, Kind.BF16, Kind.BF16), 3, 32, 32)
    x, (ids, weights) = randn(4, 32), choice(4, 3, 2)
    for wrong in [(x[:, :31], ids, weights), (x, ids.long(), weights), (x, ids + 2, weights), (x, ids, weights[:3]),
                  (x.half(), ids, weights), (x, -ids - 1, weights)]:  # fmt: skip
        with pytest.raises(ValueError, match="experts cannot take"):
            case.fused(*wrong)
    odd = [random_weight(Kind.BF16, n, 40) for n in (80, 40)]
    joined = [ExpertParts(PackedMethod([odd[0]], None, ops).parts, PackedMethod([odd[1]], None, ops).parts)]
    assert ops.experts(joined, (40, 40), None) is None, "gates and values in one weight, and no panel between them"
    assert ops.experts([ExpertParts((), ())], (32, 32), None) is None


def routers() -> Iterator[Any]:
    """(name, a router of transformers, ours)."""
    from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    yield (
        MixtralTopKRouter(MixtralConfig(hidden_size=64, num_local_experts=8, num_experts_per_tok=2)),
        Routing(n_experts=8, top_k=2, normalise=True),
    )
    for normalise in (False, True):
        config = Qwen3MoeConfig(hidden_size=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalise)
        yield Qwen3MoeTopKRouter(config), Routing(n_experts=16, top_k=4, normalise=normalise)
    config = GptOssConfig(hidden_size=64, num_local_experts=8, num_experts_per_tok=3)
    yield GptOssTopKRouter(config), Routing(n_experts=8, top_k=3, scores="chosen")
    options: dict[str, Any] = {"hidden_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4}
    options |= {"topk_group": 2, "routed_scaling_factor": 2.5}
    config = DeepseekV2Config(**options, topk_method="group_limited_greedy")
    yield DeepseekV2TopkRouter(config), Routing(n_experts=16, top_k=4, scale=2.5, n_groups=4, top_groups=2)
    config = DeepseekV3Config(**options)
    yield (
        DeepseekV3TopkRouter(config),
        Routing(n_experts=16, top_k=4, scores="sigmoid", normalise=True, scale=2.5, n_groups=4, top_groups=2,
                pair_groups=True),
    )  # fmt: skip


@pytest.mark.parametrize("case", range(6))
def test_routing_equals_transformers(case: int) -> None:
    router, routing = list(routers())[case]
    torch.manual_seed(case)
    with torch.no_grad():
        for value in router.parameters():
            torch.nn.init.normal_(value)
        correction = getattr(router, "e_score_correction_bias", None)
        if correction is not None:
            torch.nn.init.normal_(correction)
        logits, expected, chosen = router(torch.randn(50, 64))
        weights, ids = route(logits, routing, correction)[::-1]
        dense = torch.zeros(50, routing.n_experts)
        assert torch.allclose(
            dense.scatter(1, ids.long(), weights), dense.scatter(1, chosen, expected), rtol=1e-5, atol=1e-7
        )
        one = route(logits[:1], routing, correction)
        assert torch.equal(one[0], ids[:1]) and torch.equal(one[1], weights[:1])


@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_k": 9}, {"n_groups": 3}, {"n_groups": 4, "top_groups": 5},
              {"n_groups": 4, "top_groups": 1, "top_k": 3}, {"n_groups": 8, "top_groups": 8, "pair_groups": True}],
)  # fmt: skip
def test_numbers_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="experts"):
        Routing(**{"n_experts": 8, "top_k": 2, **wrong}).check()
