"""Packed linear layers: every kind on every instruction set against float64, and the packing against its inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bough.device.ops.cpu import CpuOps
from bough.device.ops.fixed import READERS as FIXED_READERS
from bough.device.ops.hadamard import BLOCK, transform
from bough.device.ops.packed import (
    FOUR_BITS,
    MOST_WHOLE,
    PAIRED,
    SUPER,
    Kind,
    PackedWeight,
    factors,
    pack_bf16,
    pack_groups,
    pack_int8,
    pack_rotated,
    quantise_inputs,
    unpack,
)  # fmt: skip
from bough.device.ops.pages import Arena
from bough.device.ops.quantise import quantise
from bough.device.ops.registry import Ops
from bough.device.ops.suited import for_tiles, pack_whole
from bough.device.quant.packed import PackedMethod, PackedTable, join
from tests.variants import kernels_of

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("poisoned", "two_threads")

WHOLE = (Kind.BF16, Kind.INT8, Kind.ROTATED)
"""Kinds without groups of inputs."""

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 31]


def has_kernel(ops: Ops, kind: Kind) -> bool:
    return kind != Kind.Q4_WHOLE or not isinstance(ops, CpuOps) or ops.library.isa() == "amx"


@pytest.fixture
def kind(ops: Ops, request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if not has_kernel(ops, found):
        pytest.skip(f"these kernels do not multiply {found.name}")
    return found


def random_weight(kind: Kind, n_out: int, n_in: int, group: int = 32, seed: int = 0) -> PackedWeight:
    """Any integers with any scales."""
    g = torch.Generator().manual_seed(seed)
    if kind == Kind.BF16:
        return pack_bf16(torch.randn(n_out, n_in, generator=g).bfloat16())
    if kind == Kind.Q4_WHOLE:
        return pack_whole(random_weight(Kind.Q4_MIN, n_out, n_in, group, seed))
    top = 64 if kind == Kind.Q6_K else 16 if kind in FOUR_BITS else 256
    if kind == Kind.ROTATED:
        q = torch.randint(0, top, (n_out, -(-n_in // BLOCK) * BLOCK), generator=g, dtype=torch.uint8)
        return pack_rotated(q, torch.rand(n_out, generator=g) / 100, n_in)
    q = torch.randint(0, top, (n_out, n_in), generator=g, dtype=torch.uint8)
    if kind == Kind.INT8:
        return pack_int8(q, torch.rand(n_out, generator=g) / 100)
    groups = -(-n_in // (256 if kind in SUPER else group))
    size = (n_out, groups, 2) if kind in PAIRED else (n_out, groups)
    scale = (torch.rand(size, generator=g) / 10).half()
    if kind == Kind.Q4_ZERO:
        scale[..., 1] = torch.randint(0, 16, size[:2], generator=g).half()
    sub = None
    if kind in SUPER:
        size = n_out, -(-n_in // 32), 2
        sub = torch.randint(0, 256, size, generator=g, dtype=torch.uint8)
    return pack_groups(kind, q, scale, sub, group)


def inputs_for(kind: Kind, n_in: int) -> int:
    """``n_in``, rounded up to what the kind can hold."""
    unit = 1 if kind in WHOLE else 32
    return -(-n_in // unit) * unit


def randn(n: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(weight: PackedWeight, bias: Tensor | None, x: Tensor, out: Tensor, values: Tensor | None = None) -> None:
    """Within the roundings of float32 sums, and one to the dtype of ``out``; ``values`` of the weight where known."""
    rounded = quantise_inputs(weight.kind, x).double()
    values = factors(weight).double() if values is None else values
    exact = rounded @ values.T
    # The kernels take the zero, or add the minimum, of many values at once: a sum may be the small difference of two.
    size = rounded.abs() @ values.abs().T + rounded.abs().sum(1, keepdim=True) * values.abs().amax() * 16
    if bias is not None:
        exact = exact + bias.double()
    unit = 2**-8 if out.dtype == torch.bfloat16 else 0
    bound = 1e-6 * size + 1e-6 + unit * exact.abs()
    assert out.isfinite().all()
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_rows_equals_float64(ops: Ops, kind: Kind, dtype: torch.dtype) -> None:
    for n_out, n_in in [(64, 64), (70, 37), (1, 1), (17, 96), (200, 288), (150, 2100)]:
        weight = random_weight(kind, n_out, inputs_for(kind, n_in))
        bias = randn(1, n_out)[0]
        apply, values = ops.packed_linear(weight, bias.clone()), factors(weight).double()
        for n in ROWS:
            x = randn(n, weight.n_in, dtype)
            out = apply(x)
            assert out.dtype == dtype
            check(weight, bias, x, out, values)
    assert apply(randn(0, weight.n_in, dtype)).shape == (0, n_out)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(list(Kind)), n_out=st.integers(1, 100), n_in=st.integers(1, 700), n=st.integers(1, 14),
    group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape_equals_float64(ops: Ops, kind: Kind, n_out: int, n_in: int, n: int, group: int, seed: int) -> None:
    assume(has_kernel(ops, kind))
    group = 32 if kind in SUPER or kind in WHOLE else group
    weight = random_weight(kind, n_out, inputs_for(kind, n_in), group, seed)
    x = randn(n, weight.n_in, seed=seed)
    out = ops.packed_linear(weight, None)(x)
    # What whole numbers lose of few inputs may be more: test_fixed.py compares any shape with what they stand for.
    if not (kind == Kind.BF16 and isinstance(ops, CpuOps) and ops.library.isa() in FIXED_READERS):
        check(weight, None, x, out)
    ids = torch.randint(0, n_out, (n,), dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        rows = ops.packed_rows(weight, ids, dtype)
        assert torch.equal(rows, unpack(weight)[ids].to(dtype)), "a value is rounded once"


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("n_out", "n_in"), [(1000, 512), (280, 2304), (2130, 2304)])
def test_bits_depend_on_the_row_alone(ops: Ops, kind: Kind, threads: int, n_out: int, n_in: int) -> None:
    weight, bias = random_weight(kind, n_out, n_in), randn(1, n_out)[0] if n_out > 2048 else None
    apply, x = ops.packed_linear(weight, bias), randn(40, n_in)
    whole = apply(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if not isinstance(ops, CpuOps):
            whole = apply(x)  # on some processors torch's sums depend on how many threads there are
        for begin, end in [(0, 1), (3, 5), (7, 14), (0, 40), (39, 40), (11, 29)]:
            assert torch.equal(apply(x[begin:end]), whole[begin:end])
        assert torch.equal(apply(x.flip(0)).flip(0), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
@pytest.mark.parametrize(("n_in", "group"), [(1312, 32), (2048, 32), (4096, 128), (5632, 256)])
def test_bits_of_many_rows_are_those_of_few(ops: Ops, kind: Kind, n_in: int, group: int) -> None:
    # Several passes, the last of which may be half a scale's, or begin within a group; rows that lie a page apart,
    # and in parts.
    weight = random_weight(kind, 70, n_in, 32 if kind in SUPER else group)
    apply, x = ops.packed_linear(weight, None), randn(790, n_in).bfloat16()
    few = torch.cat([apply(part) for part in x.split(11)])
    for n in (253, 256, 257, 300, 384, 391, 790):
        assert torch.equal(apply(x[:n]), few[:n])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([Kind.BF16, Kind.ROTATED]), n_out=st.integers(1, 150),
    n_in=st.one_of(st.integers(1, 300), st.integers(5600, 6000)),    # what stays in the first cache, and what does not
    n=st.integers(1, 27), threads=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_take_turns_by_the_processor_and_it_does_not_show(
    kind: Kind, n_out: int, n_in: int, n: int, threads: int, seed: int
) -> None:
    weight, x, bias = random_weight(kind, n_out, n_in, seed=seed), randn(n, n_in, seed=seed), randn(1, n_out)[0]
    torch.set_num_threads(threads)
    outs = []
    for isa in ("avx512bf16", "avx512bf16x2"):
        with kernels_of(isa) as library:
            outs.append(CpuOps(library, "under test").packed_linear(weight, bias)(x.bfloat16()))
    assert torch.equal(*outs) and outs[0].isfinite().all()


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
def test_only_the_own_columns_are_written(ops: Ops, kind: Kind) -> None:
    weight = random_weight(kind, 117, 256)  # panels that are read side by side, and the last one not full
    for n in (1, 7, 13, 25, 40):
        x, around = randn(n, 256), torch.full((n + 2, 150), torch.nan)
        inside = around[1 : n + 1, 20:137]
        assert ops.packed_linear(weight, None)(x, inside) is inside
        check(weight, None, x, inside)
        inside.fill_(torch.nan)
        assert around.isnan().all()


@pytest.mark.parametrize("kind", [k for k in Kind if k != Kind.BF16], ids=lambda k: k.name, indirect=True)
def test_the_largest_sums_do_not_overflow(ops: Ops, kind: Kind) -> None:
    """Rows of extremes: sums that saturate in 16 bits, or leave 32, would show."""
    weight = random_weight(kind, 16, 8192)
    x = torch.ones(2, 8192)
    x[1] = -1
    if kind == Kind.ROTATED:
        x.view(2, -1, BLOCK)[:, :, 1:] = 0  # the transform is 1 or -1 everywhere
    for word in (0, 0x3F3F3F3F if kind == Kind.Q6_K else -1):
        most = torch.full_like(weight.weight, word)
        everywhere = PackedWeight(kind, 16, 8192, most, weight.scale, weight.sub, weight.group)
        for n in (2, 40):
            check(everywhere, None, x.repeat(n // 2, 1), ops.packed_linear(everywhere, None)(x.repeat(n // 2, 1)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n_out", [16, 117, 270])
def test_pairs_of_inputs_of_any_size(ops: Ops, n_out: int, sign: int) -> None:
    """Row s has pairs of bytes that come to s: 16 bits hold 255 times 128, and not 255 times 129."""
    sums = torch.arange(255)
    pairs = torch.stack((sums // 2, sums - sums // 2), dim=1)
    bytes_of = sign * pairs.repeat(1, 2 * BLOCK).float()
    bytes_of[:, :2] = torch.tensor([127, -127])  # the step is 1
    x = transform(bytes_of) / BLOCK
    assert torch.equal(transform(x), bytes_of)
    weight = random_weight(Kind.ROTATED, n_out, x.shape[1])
    for largest in (False, True):
        if largest:
            weight.weight.fill_(-1)
        apply, values = ops.packed_linear(weight, None), factors(weight).double()
        for n in (1, 5, 255):
            check(weight, None, x, torch.cat([apply(rows) for rows in x.split(n)]), values)


@pytest.mark.parametrize("n_in", [1, 30, 64, 200])
def test_the_transform_is_hadamards(n_in: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix)
    x = randn(3, n_in)
    filled = torch.nn.functional.pad(x.double(), (0, -n_in % BLOCK)).view(3, -1, BLOCK)
    assert torch.allclose(transform(x).double(), (filled @ matrix).flatten(1), atol=1e-4)


def test_one_large_input_leaves_the_others_their_steps() -> None:
    x = randn(20, 256)
    x[:, 17] *= 100
    scale, others = x.abs().amax(1, keepdim=True) / 127, torch.arange(256) != 17
    plain = (x / scale).round() * scale - x
    found = transform(quantise_inputs(Kind.ROTATED, x)) / BLOCK - x
    assert found[:, others].norm() < 0.3 * plain[:, others].norm()


def test_inputs_whose_sums_could_overflow_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="inputs"):
        ops.quantise(Kind.ROTATED, torch.zeros(1, MOST_WHOLE + 1))


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
def test_what_is_not_finite_stays_in_its_row(ops: Ops, kind: Kind) -> None:
    weight = random_weight(kind, 50, 256)
    apply, x = ops.packed_linear(weight, None), randn(9, 256)
    clean = apply(x)
    # Three that are not numbers: rounding them as numbers would make infinity, -0 and 0 of the others.
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    for value in bits.view(torch.float32):
        broken = x.clone()
        broken[4, 77] = value
        out = apply(broken)
        assert not out[4].isfinite().any(), "a broken row has to show"
        others = torch.arange(9) != 4
        assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("kind", list(Kind), ids=lambda k: k.name, indirect=True)
def test_zeros_and_tiny_inputs(ops: Ops, kind: Kind) -> None:
    weight, bias = random_weight(kind, 20, 256), randn(1, 20)[0]
    x = torch.zeros(3, 256)
    x[1] = 1e-41
    x[2, 3] = 1e-30
    out = ops.packed_linear(weight, bias)(x)
    assert torch.allclose(out, bias.expand(3, -1), atol=1e-6)


def test_parts_of_several_kinds_stand_side_by_side(ops: Ops) -> None:
    kinds = [Kind.Q4_MIN, Kind.Q4_MIN, Kind.Q8, Kind.BF16, Kind.BF16, Kind.Q6_K]
    weights = [random_weight(k, n, 256, seed=i) for i, (k, n) in enumerate(zip(kinds, [32, 20, 7, 8, 16, 40]))]
    bias = randn(1, sum(w.n_out for w in weights))[0]
    method = PackedMethod(join(weights, Arena()), bias, ops)
    assert len(method.parts) == (0 if ops.name == "reference" else 5), "equal neighbours are one part"
    for n in (1, 9):
        x = randn(n, 256)
        out, first = method.apply(x), 0
        for weight in weights:
            check(weight, bias[first : first + weight.n_out], x, out[:, first : first + weight.n_out].contiguous())
            first += weight.n_out
        assert first == out.shape[1]


def test_an_embedding_and_its_head_share_one_weight(ops: Ops) -> None:
    weight = random_weight(Kind.Q8, 100, 64)
    table = PackedTable(weight, torch.bfloat16, ops)
    tokens = torch.tensor([0, 99, 16, 16], dtype=torch.int32)
    assert torch.equal(table.lookup(tokens), unpack(weight)[tokens].bfloat16())
    head = table.head(90)
    x = randn(3, 64, torch.bfloat16)
    assert torch.equal(head.apply(x), ops.packed_linear(weight, None)(x)[:, :90])
    if ops.name == "cpu":
        assert head.parts[0].weight == weight.weight.data_ptr()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([Kind.Q4, Kind.Q4_MIN, Kind.Q4_ZERO, Kind.Q4_K]), n_out=st.integers(1, 40),
    n_in=st.integers(1, 700), group=st.sampled_from([32, 64, 128]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_four_bits_of_whole_rows_are_the_nearest_of_eight(
    kind: Kind, n_out: int, n_in: int, group: int, seed: int
) -> None:
    weight = random_weight(kind, n_out, inputs_for(kind, n_in), 32 if kind in SUPER else group, seed)
    whole = for_tiles(weight, quantise)
    assert (whole.kind, whole.n_out, whole.n_in) == (Kind.Q4_WHOLE, n_out, weight.n_in)
    values, found = unpack(weight), unpack(whole)
    assert whole.scale is not None
    scale = whole.scale.flatten()[:n_out, None]
    # Half a step, and what the steps of 16 bits and their starts, both in 256ths of one, may be off.
    assert ((found - values).abs() <= scale * (0.5 + 8 / 256) + 1e-6).all()
    assert (found.abs() <= 127 * scale * (1 + 1e-6)).all()


def test_a_scale_that_is_not_finite_makes_its_outputs_so() -> None:
    weight = random_weight(Kind.Q4_MIN, 20, 128)
    assert weight.scale is not None
    weight.scale[0, 2, 1, 5] = torch.nan
    found = unpack(for_tiles(weight, quantise))
    assert found[5].isnan().all()
    assert found[torch.arange(20) != 5].isfinite().all()


@pytest.mark.parametrize("kind", [Kind.Q8, Kind.INT8, Kind.Q6_K], ids=lambda k: k.name)
def test_eight_bits_for_tiles_are_those_of_the_transform(kind: Kind) -> None:
    weight = random_weight(kind, 5000, 256)  # more than are rounded at a time
    found = for_tiles(weight, quantise)
    assert (found.kind, found.n_out, found.n_in) == (Kind.ROTATED, 5000, 256)
    assert torch.equal(unpack(found), unpack(quantise(Kind.ROTATED, unpack(weight))))
    assert (unpack(found) - unpack(weight)).norm() < 0.01 * unpack(weight).norm()


def test_what_suits_tiles_or_is_too_wide_for_them_stays() -> None:
    for kind in (Kind.BF16, Kind.ROTATED, Kind.Q4_WHOLE):
        weight = random_weight(kind, 16, 64)
        assert for_tiles(weight, quantise) is weight
    wide = random_weight(Kind.Q4, 1, MOST_WHOLE + 32)
    assert for_tiles(wide, quantise) is wide


def test_kernels_without_tiles_refuse_what_is_for_them(ops: Ops) -> None:
    weight = random_weight(Kind.Q4_WHOLE, 16, 64)
    if has_kernel(ops, weight.kind):
        assert ops.packed_linear(weight, None)(randn(2, 64)).isfinite().all()
    else:
        with pytest.raises(ValueError, match="AMX"):
            ops.packed_linear(weight, None)


def test_wrong_arguments_are_refused(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("torch itself refuses them")
    apply = ops.packed_linear(random_weight(Kind.Q8, 32, 64), None)
    with pytest.raises(ValueError, match="packed_linear"):
        apply(randn(3, 32))
    with pytest.raises(ValueError, match="packed_linear"):
        apply(randn(3, 64), torch.empty(3, 31))
    with pytest.raises(ValueError, match="contiguous"):
        apply(randn(64, 3).T)
    with pytest.raises(ValueError, match="packed_linear"):
        apply(randn(3, 64), torch.empty(3, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="int32"):
        ops.packed_rows(random_weight(Kind.Q8, 32, 64), torch.tensor([1]), torch.float32)


def test_scales_that_do_not_fit_are_refused() -> None:
    q, scale = torch.zeros(32, 512, dtype=torch.uint8), torch.ones(32, 2).half()
    sub = torch.zeros(32, 16, 2, dtype=torch.uint8)
    pack_groups(Kind.Q6_K, q, scale, sub)
    with pytest.raises(ValueError, match="Q6_K of 32 x 512 does not go with"):
        pack_groups(Kind.Q6_K, q, scale)
    with pytest.raises(ValueError, match="Q6_K of 32 x 256"):
        pack_groups(Kind.Q6_K, q[:, :256], scale, sub)
    with pytest.raises(ValueError, match="Q6_K of 32 x 480"):
        pack_groups(Kind.Q6_K, q[:, :480], scale, sub)
    with pytest.raises(ValueError, match=r"Q8 of 32 x 512 does not go with scales \[32, 2\]"):
        pack_groups(Kind.Q8, q, scale)
    for group in (16, 48, 96):
        with pytest.raises(ValueError, match=f"groups of {group} inputs"):
            pack_groups(Kind.Q8, q, torch.ones(32, -(-512 // group)).half(), group=group)


def test_an_arena_hands_out_what_does_not_overlap() -> None:
    arena, made = Arena(), []
    for i, shape in enumerate([(3, 5), (1,), (700_000, 16), (2, 2, 2), (9_000_000,), (0, 4)]):
        parts = [
            randn(*shape, seed=2 * i + j) if len(shape) == 2 else torch.full(shape, float(i + j)) for j in range(2)
        ]
        made.append((arena.join(parts), torch.cat(parts)))
    assert all(torch.equal(copy, whole) and copy.data_ptr() % 64 == 0 for copy, whole in made)
