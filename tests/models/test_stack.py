"""All layers in one call give the same bits as op after op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.cpu import CpuOps
from bough.device.ops.groups import SharedGroups
from bough.device.ops.library import Library, load
from bough.device.ops.packed import Kind, PackedWeight, pack_bf16
from bough.device.ops.quantise import quantise
from bough.device.ops.registry import Ops
from bough.device.quant.base import Parameter, Scheme
from bough.device.quant.packed import PackedScheme, pack_dense
from bough.device.quant.scheme import resolve_scheme
from bough.models.decoder import Decoder
from bough.models.gemma2 import Gemma2
from bough.models.glm4 import Glm4
from bough.models.llama import Llama
from bough.models.qwen3 import Qwen3
from tests.device.test_packed import inputs_for, random_weight
from tests.variants import ISAS, kernels_of

Tensor = torch.Tensor
CELLS = 1800

GROUPED = Kind.Q8, Kind.Q4, Kind.Q4_MIN, Kind.Q4_ZERO

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BIASED = {Qwen3: (*QKV, "self_attn.o_proj"), Glm4: QKV, Gemma2: (*QKV, "self_attn.o_proj")}
"""The linears to which attention's bias belongs; all of a Llama whose feed-forward layer has one too."""


class Layered(CpuOps):
    """The slow twin: no op for all layers, no second forms of weights."""

    def __init__(self, library: Library) -> None:
        super().__init__(library, "the twin", spare=lambda: 0)

    def layer_stack(self, *arguments: object) -> None:
        return None


class Random:
    """A checkpoint of random parameters of whatever shape the config implies."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> list[str]:
        return list(self._shapes)

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> Tensor:
        g = torch.Generator().manual_seed(sum(name.encode()))
        values = torch.randn(self._shapes[name], generator=g)
        return (1 + values / 8 if "norm" in name else values / 8).to(dtype or torch.float32)

    def blocks(self, name: str, rows: slice | None = None) -> None:
        return None

    def shape(self, name: str) -> None:
        return None


def alternate(parameter: Parameter) -> PackedWeight:
    """Keys and values as bfloat16 and the rest in 8 bits, so that a layer has parts of two kinds."""
    weight = parameter.dense()
    if len(weight) in (32, 192):
        return pack_bf16(weight)
    return quantise(Kind.ROTATED, weight)


def bf16(ops: Ops) -> Scheme:
    return PackedScheme(pack_dense, pack_dense, torch.bfloat16, ops)


def parts(ops: Ops) -> Scheme:
    return PackedScheme(alternate, pack_dense, torch.bfloat16, ops)


KINDS = Kind.Q8, Kind.Q4_K, Kind.INT8, Kind.Q4, Kind.BF16, Kind.Q4_MIN, Kind.Q6_K, Kind.Q4_ZERO


def kinds(ops: Ops) -> Scheme:
    """Each linear layer of another kind, with groups of another size, as far as its inputs allow."""
    turns, sizes = cycle(KINDS), cycle((32, 64, 128))

    def pack(parameter: Parameter) -> PackedWeight:
        n_out, n_in = parameter.dense().shape
        kind = next(kind for kind in turns if inputs_for(kind, n_in) == n_in)
        return random_weight(kind, n_out, n_in, next(sizes) if kind in GROUPED else 32)

    return PackedScheme(pack, pack_dense, torch.bfloat16, ops)


def config_of(heads: tuple[int, int, int], hidden: int, inner: int, bias: bool) -> dict[str, Any]:
    return {
        "vocab_size": 300, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 3,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2], "rope_theta": 10000.0,
        "rope_scaling": None, "max_position_embeddings": 512, "tie_word_embeddings": True, "attention_bias": bias,
        "mlp_bias": bias,
    }  # fmt: skip


def shapes_of(c: dict[str, Any], model: type[Decoder] = Llama) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{n}_layernorm.weight": (hidden,) for n in model.norms if n is not None}
        if model is Qwen3:
            shapes |= {f"{layer}.self_attn.{n}_norm.weight": (dim,) for n in "qk"}
        linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        linears = {f"self_attn.{n}": s for n, s in linears.items()}
        linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if c["attention_bias"] and (model is Llama or name in BIASED[model]):
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    return shapes


def caches_of(cells: Tensor, quantized: bool) -> list[Cells]:
    """[N, KH, D] of each layer, or int8 with scales."""
    if not quantized:
        return list(cells)
    caches = [QuantizedCells(torch.empty_like(c, dtype=torch.int8), c.new_empty(c.shape[:2]).float()) for c in cells]
    for cache, values in zip(caches, cells):
        cache.write(torch.arange(CELLS), values)
    return list(caches)


def group_of(n: int, shared: int) -> SharedGroups:
    """All of ``n`` sequences, which share so many cells."""
    return SharedGroups(torch.tensor([0, n]).int(), torch.arange(n).int(), torch.tensor([shared]).int())


Step = tuple[list[int], list[int], int]
"""Lengths of sequences, how many of their tokens are new, and how many of their first tokens they share."""

Forward = Callable[..., tuple[Tensor, list[Tensor]]]
"""A step, the tokens whose hidden states are wanted, if not all, and groups with prefixes of their own, if not one
of all -> hidden states and caches after it."""


def model_of(
    ops: Ops, config: dict[str, Any], scheme: Callable[[Ops], Scheme], architecture: type[Decoder] = Llama
) -> Forward:
    """Steps of a model over random earlier KV."""
    attention = PagedAttention(ops)
    source = Random(shapes_of(config, architecture))
    context = LayerContext(source, ops, scheme(ops), attention, torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode():
        model = architecture(config, context, 300, 600)
    assert (model._stack is None) == isinstance(ops, Layered)

    @torch.inference_mode()
    def forward(
        step: Step, ends: list[int] | None = None, groups: SharedGroups | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        lengths, new, shared = step
        g = torch.Generator().manual_seed(4)
        shape = (config["num_hidden_layers"], 2, CELLS, config["num_key_value_heads"], config["head_dim"])
        cells = torch.randn(shape, generator=g).bfloat16()
        k, v = (caches_of(cells[:, i].clone(), scheme is parts) for i in range(2))
        order = torch.randperm(CELLS, generator=g).int()
        table = torch.zeros(len(lengths) + 2, max(lengths), dtype=torch.int32)
        positions, out_loc, used = [], [], shared
        for row, (length, n) in enumerate(zip(lengths, new)):
            table[row + 1, :length] = order[used : used + length]
            table[row + 1, : min(shared, length - n)] = order[: min(shared, length - n)]
            used += length
            positions += range(length - n, length)
            out_loc += table[row + 1, length - n : length].tolist()
        for i in range(len(groups.tokens) if groups else 0):
            members, n = groups.rows[groups.start[i] : groups.start[i + 1]] + 1, int(groups.tokens[i])
            table[members, :n] = table[members[0], :n].clone()
        batch = AttentionBatch(
            page_table=table,
            rows=torch.arange(1, len(lengths) + 1).int(),
            q_start=torch.tensor([0, *new]).cumsum(0).int(),
            seq_len=torch.tensor(lengths).int(),
            positions=torch.tensor(positions).int(),
            out_loc=torch.tensor(out_loc).int(),
            groups=groups or (group_of(len(lengths), shared) if shared > 256 else None),
            ends=None if ends is None else torch.tensor(ends).int(),
        )
        attention.plan(batch)
        tokens = torch.randint(0, 300, (sum(new),), generator=g).int()
        hidden = model.forward(tokens, k, v)
        parts_of = [[c.data, c.scale] if isinstance(c, QuantizedCells) else [c] for c in (*k, *v)]
        return hidden, [tensor for tensors in parts_of for tensor in tensors]

    return forward


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_of(request.param):
        yield request.param


MODELS = [
    config_of((9, 3, 64), 576, 1536, False),
    config_of((4, 2, 16), 64, 96, True),
    config_of((4, 1, 32), 72, 100, True),
    config_of((1, 1, 16), 16, 32, False),  # layers of one panel
    config_of((4, 2, 32), 2048, 1000, True),  # inputs of which two rows are few
]
STEPS: list[Step] = [
    ([1], [1], 0), ([300], [1], 5), ([7, 130, 1, 64], [1, 1, 1, 1], 5), ([20, 9], [3, 1], 2),
    ([30, 20, 9], [5, 3, 1], 2), ([100], [64], 5), ([530, 540], [1, 2], 520), ([20, 9], [1, 1], 2),
    ([190, 53, 10], [130, 50, 1], 3),
]  # fmt: skip


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("scheme", [bf16, parts, kinds])
@pytest.mark.parametrize("config", MODELS, ids=["9/3x64", "4/2x16", "4/1x32", "1/1x16", "4/2x32"])
def test_one_call_equals_op_after_op(isa: str, config: dict[str, Any], scheme: Callable[[Ops], Scheme]) -> None:
    library = load().library
    assert library is not None
    forward = model_of(CpuOps(library, "under test"), config, scheme)
    forward_twin = model_of(Layered(library), config, scheme)
    for i, step in enumerate(STEPS):
        torch.set_num_threads(i % 3 + 1)
        (hidden, caches), (twin, twin_caches) = forward(step), forward_twin(step)
        assert torch.equal(hidden, twin) and hidden.isfinite().all()
        assert all(torch.equal(a, b) for a, b in zip(caches, twin_caches, strict=True))


@st.composite
def models(draw: st.DrawFn) -> tuple[type[Decoder], dict[str, Any]]:
    """One of the forms of attention and feed-forward layer that the op knows, in any size."""
    n_kv_heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32, 48]))
    heads = n_kv_heads * draw(st.integers(1, 4)), n_kv_heads, dim
    config = config_of(heads, draw(st.integers(1, 150)), draw(st.integers(1, 200)), draw(st.booleans()))
    architecture = draw(st.sampled_from([Llama, Qwen3, Glm4, Gemma2]))
    config["mlp_bias"] = config["attention_bias"] and architecture is Llama
    config |= {"query_pre_attn_scalar": dim, "sliding_window": draw(st.sampled_from([1, 7, 100]))}
    return architecture, config


@st.composite
def steps(draw: st.DrawFn) -> Step:
    shared = draw(st.sampled_from([0, 5, 260, 300]))
    new = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 17, 40]), min_size=1, max_size=3))
    return [shared + n + draw(st.sampled_from([0, 1, 15, 130])) for n in new], new, shared


@pytest.mark.usefixtures("poisoned", "two_threads")
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=models(),
    step=steps(),
    scheme=st.sampled_from([bf16, parts, kinds]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_any_model_in_one_call_equals_op_after_op(
    isa: str,
    model: tuple[type[Decoder], dict[str, Any]],
    step: Step,
    scheme: Callable[[Ops], Scheme],
    threads: int,
    data: st.DataObject,
) -> None:
    library, (architecture, config) = load().library, model
    assert library is not None
    wanted = data.draw(st.none() | st.sets(st.integers(0, sum(step[1]) - 1)), "ends")
    ends = None if wanted is None else sorted(wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hidden, caches = model_of(CpuOps(library, "under test"), config, scheme, architecture)(step, ends)
        twin, twin_caches = model_of(Layered(library), config, scheme, architecture)(step)
    finally:
        torch.set_num_threads(before)
    if ends is not None:
        hidden, twin = hidden[ends], twin[ends]
    assert torch.equal(hidden, twin) and hidden.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(caches, twin_caches, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ends", [[], [0], [128], [5, 129, 180], [129, 179, 180]], ids=str)
def test_states_that_nobody_wants_are_not_computed(isa: str, ends: list[int]) -> None:
    library = load().library
    assert library is not None
    forward, step = model_of(CpuOps(library, "under test"), MODELS[0], bf16), STEPS[-1]
    hidden, caches = forward(step, ends)
    whole, whole_caches = forward(step)
    assert torch.equal(hidden[ends], whole[ends])
    others = [i for i in range(len(hidden)) if i >= len(ends) and i not in ends]
    assert hidden[others].isnan().all(), "a state that nobody wants was written"
    assert all(torch.equal(a, b) for a, b in zip(caches, whole_caches, strict=True))


@pytest.mark.usefixtures("poisoned")
def test_wanted_tokens_share_what_their_rows_share(isa: str) -> None:
    """Rows of two groups and of none; of one nothing is wanted, of two two tokens."""
    library = load().library
    assert library is not None
    new, ends = [1, 40, 17, 1, 2], [7, 40, 45, 57, 58, 60]
    step = [260 + n + 10 * row for row, n in enumerate(new)], new, 0
    groups = SharedGroups(*(torch.tensor(of).int() for of in ([0, 2, 4], [2, 0, 4, 3], [260, 256])))
    hidden, _ = model_of(CpuOps(library, "under test"), MODELS[0], bf16)(step, ends, groups)
    twin, _ = model_of(Layered(library), MODELS[0], bf16)(step, None, groups)
    assert torch.equal(hidden[ends], twin[ends]) and hidden[ends].isfinite().all()


def test_the_op_is_left_out_where_it_does_not_fit() -> None:
    library = load().library
    if library is None:
        pytest.skip("there are no kernels")
    ops = CpuOps(library, "under test")

    def stack_of(dtype: torch.dtype, dim: int, inner: int) -> object:
        config = config_of((4, 2, dim), 64, inner, False)
        source = Random(shapes_of(config))
        context = LayerContext(
            source, ops, resolve_scheme("none", ops, dtype), PagedAttention(ops), dtype, torch.device("cpu")
        )
        return Llama(config, context, 300, 512)._stack

    assert stack_of(torch.bfloat16, 16, 96) is not None
    assert stack_of(torch.float32, 16, 96) is None
    assert stack_of(torch.bfloat16, 24, 96) is None
