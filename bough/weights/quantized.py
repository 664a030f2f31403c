"""Folders whose weights are quantised: AWQ, GPTQ, AutoRound, compressed-tensors, FP8, bitsandbytes, MXFP4.

``quantization_config`` of the config names the method. A weight ``X.weight`` is then a few tensors under other names,
read either as integers with scales, for the methods that a kernel multiplies with, or decoded. Shapes: N outputs, K
inputs, G groups of inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.ops.experts import INPUTS, HeldWeight
from bough.device.ops.packed import DOUBLED_FP4, Kind, PackedWeight, pack_groups, pack_int8

Tensor = torch.Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word of AWQ holds output 0, 1, ... of its eight (Lin et al. 2023)."""

GROUPS = (32, 64, 128)
"""Inputs of a group that the kernels know."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight ``(q - zero) * scale``, where the groups of inputs have scales.

    Attributes:
        q: uint8 [N, K].
        scale, zero: float32 [N, G].
        group_of: int64 [K] the group of each input, where that is not the inputs in order.
        bits: 4 or 8.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor
    group_of: Tensor | None
    bits: int

    def dense(self) -> Tensor:
        """float32 [N, K]."""
        n_in, n_groups = self.q.shape[1], self.scale.shape[1]
        groups = self.group_of
        if groups is None:
            groups = torch.arange(n_in) // -(-n_in // n_groups)
        return (self.q.float() - self.zero[:, groups]) * self.scale[:, groups]

    def packed(self) -> PackedWeight | None:
        """For the kernels, with the values unchanged; None where none takes them."""
        n_in, n_groups = self.q.shape[1], self.scale.shape[1]
        group, rest = divmod(n_in, n_groups)
        if self.group_of is None and self.bits == 8 and n_groups == 1 and bool((self.zero == 128).all()):
            return pack_int8(self.q, self.scale[:, 0].contiguous())
        half, zero = self.scale.half(), self.zero
        if self.group_of is not None or rest or n_in % 32 or not torch.equal(half.float(), self.scale):
            return None
        if group not in GROUPS:
            # Larger groups are several that agree.
            times, rest = divmod(group, max(GROUPS))
            if rest:
                return None
            group, half, zero = max(GROUPS), half.repeat_interleave(times, 1), zero.repeat_interleave(times, 1)
        if self.bits == 4:
            return pack_groups(Kind.Q4_ZERO, self.q, torch.stack((half, zero.half()), dim=2), group=group)
        return pack_groups(Kind.Q8, self.q, half, group=group) if bool((zero == 128).all()) else None


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> uint8, the fields of a word, lowest first, side by side along ``dim`` (of two).

    Fields of 3 bits pass from one word to the next one; 32 of them are in three.
    """
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ConfigError(f"packed integers are {words.dtype} {list(words.shape)} and not int32 matrices")
    words = words if dim == 1 else words.T
    if bits == 3:
        if words.shape[1] % 3:
            raise ConfigError(f"{words.shape[1]} words hold no whole number of 3-bit integers")
        single = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        fields = (single.reshape(len(words), -1, 3) << torch.arange(3, dtype=torch.int32)).sum(-1)
    else:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        fields = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)
    found = fields.to(torch.uint8)
    return found if dim == 1 else found.T.contiguous()


Get = Callable[[str], Tensor]
"""Reads one of the tensors of a weight by the end of its name, as it is stored; ConfigError if it is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a method stores ``X.weight``.

    Attributes:
        name: for people.
        mark: the end of the name of the tensor by which a quantised weight is known.
        others: ends of the names of those that come with it.
        integers: reads it as integers; None where it is none.
        floats: reads it as 8-bit floats with scales; None where it is none, or a kernel takes no such scales.
        dense: reads it decoded, float32 [N, K].
    """

    name: str
    mark: str
    others: tuple[str, ...]
    dense: Callable[[Get], Tensor]
    integers: Callable[[Get], Integers] | None = None
    floats: Callable[[Get], HeldWeight | None] | None = None


def method_of(config: Mapping[str, Any]) -> Method | None:
    """The method that a model's config names; None for weights that are not quantised.

    Raises ConfigError for one that cannot be read.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError("the model's config has no usable 'quantization_config'")
    name = settings.get("quant_method")
    maker = METHODS.get(str(name))
    if maker is None:
        raise ConfigError(f"weights quantised by {name!r} cannot be read; known: {', '.join(METHODS)}")
    return maker(settings)


def _setting(settings: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    value = settings.get(name, default)
    if value not in allowed:
        shown = " or ".join(map(repr, allowed))
        raise ConfigError(f"quantised weights with {name} {value!r} cannot be read; {shown} can")
    return value


def _of_integers(name: str, mark: str, others: tuple[str, ...], read: Callable[[Get], Integers]) -> Method:
    return Method(name=name, mark=mark, others=others, integers=read, dense=lambda get: read(get).dense())


def _awq(settings: Mapping[str, Any]) -> Method:
    """AWQ (Lin et al. 2023): 4 bits, inputs by outputs."""
    _setting(settings, "bits", (4,), 4)
    _setting(settings, "version", ("gemm", "GEMM"), "gemm")

    def in_order(words: Tensor) -> Tensor:
        fields = unpacked(words, 4, 1).view(len(words), -1, 8)
        return fields[:, :, AWQ_ORDER].flatten(1)

    def read(get: Get) -> Integers:
        q, zero, scale = in_order(get("qweight")), in_order(get("qzeros")), get("scales").float()
        q, scale, zero = q.mT.contiguous(), scale.mT.contiguous(), zero.mT.float().contiguous()
        return _checked(Integers(q, scale, zero, _groups_in_order(settings.get("group_size"), q, scale), 4))

    return _of_integers("AWQ", "qweight", ("qzeros", "scales"), read)


def _gptq(settings: Mapping[str, Any]) -> Method:
    """GPTQ (Frantar et al. 2022): inputs by outputs, in the first form with zeros that are one too low."""
    bits = _setting(settings, "bits", (2, 3, 4, 8))
    lower = _setting(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    return _inputs_by_outputs("GPTQ", bits, lower, lambda get, q, scale: _groups_of(get("g_idx"), q, scale))


def _auto_round(settings: Mapping[str, Any]) -> Method:
    """AutoRound (Cheng et al. 2023): packed like AWQ, or like GPTQ with the groups of inputs in order."""
    packing = _setting(settings, "packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    bits = _setting(settings, "bits", (2, 3, 4, 8))
    layers = settings.get("extra_config") or {}
    for layer in layers.values() if isinstance(layers, Mapping) else ():
        _setting(layer if isinstance(layer, Mapping) else {}, "bits", (bits, 16, 32), bits)
    if packing.endswith("awq"):
        return _awq(settings)
    size = settings.get("group_size")
    return _inputs_by_outputs("AutoRound", bits, True, lambda get, q, scale: _groups_in_order(size, q, scale))


def _inputs_by_outputs(
    name: str, bits: int, lower: bool, groups: Callable[[Get, Tensor, Tensor], Tensor | None]
) -> Method:
    """``lower``: zeros are one too low; ``groups``: the group of each input, of weights [N, K] and scales [N, G]."""

    def read(get: Get) -> Integers:
        q = unpacked(get("qweight"), bits, 0).mT.contiguous()
        zero = (unpacked(get("qzeros"), bits, 1).float() + lower).mT.contiguous()
        scale = get("scales").float().mT.contiguous()
        return _checked(Integers(q, scale, zero, groups(get, q, scale), max(bits, 4)))

    return _of_integers(f"{name}, {bits} bits", "qweight", ("qzeros", "scales", "g_idx"), read)


def _compressed(settings: Mapping[str, Any]) -> Method:
    """compressed-tensors: integers of 4 or 8 bits in words or bytes, or 8-bit floats, with scales by groups."""
    forms = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"
    form = _setting(settings, "format", forms)
    sparse = settings.get("sparsity_config")
    _setting(sparse if isinstance(sparse, Mapping) else {}, "format", ("dense",), "dense")
    groups = settings.get("config_groups")
    found = [
        weights
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(weights := group.get("weights") if isinstance(group, Mapping) else None, Mapping)
    ]
    if form == "nvfp4-pack-quantized":
        beside = "weight_scale", "weight_global_scale", "input_global_scale"
        return Method(name="NVFP4", mark="weight_packed", others=beside, dense=_nvfp4)
    kinds = {(weights.get("num_bits"), weights.get("type", "int")) for weights in found}
    if len(kinds) != 1 or not kinds <= {(4, "int"), (8, "int"), (8, "float")}:
        raise ConfigError(f"weights of the kinds {sorted(map(str, kinds))} cannot be read; one kind of 4 or 8 bits can")
    bits, kind = int(found[0]["num_bits"]), found[0].get("type", "int")
    if kind == "float":
        block = _block(found[0].get("block_structure") if found[0].get("strategy") == "block" else None)
        return _of_fp8("weight_scale", ("input_scale",), block)
    shifted = any(weights.get("symmetric") is False for weights in found)
    ordered = any(weights.get("actorder") == "group" for weights in found)
    size = found[0].get("group_size")

    def integers(get: Get, q: Tensor, zero: Tensor | None, held: int) -> Integers:
        scale = get("weight_scale").float()
        zero = torch.full_like(scale, 1 << (held - 1)) if zero is None else zero.float()
        if scale.numel() == 1:  # of the whole weight
            scale, zero = scale.expand(len(q), 1), zero.expand(len(q), 1)
        groups = _groups_of(get("weight_g_idx"), q, scale) if ordered else _groups_in_order(size, q, scale)
        return _checked(Integers(q, scale, zero, groups, held))

    def read_words(get: Get) -> Integers:
        n_out, n_in = get("weight_shape").tolist()
        q = unpacked(get("weight_packed"), bits, 1)[:n_out, :n_in].contiguous()
        zero = unpacked(get("weight_zero_point"), bits, 0)[:n_out].contiguous() if shifted else None
        return integers(get, q, zero, bits)

    def read_bytes(get: Get) -> Integers:
        zero = get("weight_zero_point").to(torch.int16) + 128 if shifted else None
        return integers(get, (get("weight").to(torch.int16) + 128).to(torch.uint8), zero, 8)

    name = f"compressed-tensors, {bits} bits"
    others = (
        "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"
    )  # fmt: skip
    if form == "pack-quantized":
        return _of_integers(name, "weight_packed", others, read_words)
    return _of_integers(name, "weight_scale", others, read_bytes)


def _groups_of(given: Tensor, q: Tensor, scale: Tensor) -> Tensor | None:
    """The group of each input of ``q`` [N, K]; None where that is the inputs in order."""
    groups, n_in, n_groups = given.long(), q.shape[1], scale.shape[1]
    if groups.shape != (n_in,) or int(groups.min()) < 0 or int(groups.max()) >= n_groups:
        raise ConfigError("the groups of a weight do not fit its inputs")
    in_order = torch.equal(groups, torch.arange(n_in) // -(-n_in // n_groups))
    return None if in_order else groups


def _groups_in_order(size: Any, q: Tensor, scale: Tensor) -> Tensor | None:
    """The group of each input of ``q`` [N, K] in groups of ``size``, the last of which may be shorter; None where all
    are equally long, as they have to be where the size is that of other weights or is not told."""
    n_in, n_groups = q.shape[1], scale.shape[1]
    if type(size) is int and size > 0 and n_groups == -(-n_in // size):
        return torch.arange(n_in) // size if n_in % size else None
    if n_in % n_groups:
        raise ConfigError(f"a weight of {n_in} inputs has no {n_groups} groups of {size or 'one size'}")
    return None


def _bitsandbytes(settings: Mapping[str, Any]) -> Method:
    """bitsandbytes: 8 bits with a scale for each output (Dettmers et al. 2022a), or 4 bits that stand for 16 levels,
    in blocks with a scale each, which may be rounded once more (Dettmers et al. 2023)."""
    if settings.get("load_in_8bit"):

        def read(get: Get) -> Integers:
            scale = get("SCB").float()[:, None] / 127
            q = (get("weight").to(torch.int16) + 128).to(torch.uint8)
            return _checked(Integers(q, scale, torch.full_like(scale, 128), None, 8))

        return _of_integers("bitsandbytes, 8 bits", "SCB", ("weight_format",), read)
    levels = _setting(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    mark = f"weight.quant_state.bitsandbytes__{levels}"
    others = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    return Method(
        name=f"bitsandbytes, {levels}",
        mark=mark,
        others=tuple(f"weight.{end}" for end in others),
        dense=lambda get: _four_bit_levels(get, mark),
    )


def _four_bit_levels(get: Get, mark: str) -> Tensor:
    """Values in blocks of the flat weight, two in a byte, the first one in its high half."""
    state = json.loads(bytes(get(mark).tolist()))
    n_out, n_in = state["shape"]
    packed, size = get("weight").flatten(), state["blocksize"]
    if min(n_out, n_in, size) < 1 or n_out * n_in != 2 * len(packed):
        raise ConfigError(f"{2 * len(packed)} values are no weight {[n_out, n_in]} in blocks of {size}")
    scale = get("weight.absmax")
    if scale.dtype == torch.uint8:
        scale = get("weight.nested_quant_map")[scale.int()] * _spread(
            get("weight.nested_absmax"), state["nested_blocksize"], len(scale)
        )
        scale = scale + state["nested_offset"]
    values = get("weight.quant_map")[torch.stack((packed >> 4, packed & 15), dim=1).flatten().int()]
    return (values.float() * _spread(scale.float(), size, 2 * len(packed))).view(n_out, n_in)


def _spread(scales: Tensor, size: int, n_values: int) -> Tensor:
    """The scale of each of ``n_values`` values in blocks of ``size``."""
    if size < 1 or len(scales) != -(-n_values // size):
        raise ConfigError(f"{len(scales)} scales do not fit {n_values} values in blocks of {size}")
    return scales[torch.arange(n_values) // size]


def _fp8_folder(settings: Mapping[str, Any]) -> Method:
    """8-bit floats with scales of the whole weight, of outputs, or of blocks (DeepSeek-AI 2024)."""
    block = _block(settings.get("weight_block_size"))
    mark = "weight_scale" if block is None else "weight_scale_inv"
    return _of_fp8(mark, ("input_scale", "activation_scale", "input_scale_ub"), block)


def _block(given: Any) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None where there are none, ConfigError for what are no such numbers."""
    if given is None:
        return None
    if not (isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
        raise ConfigError(f"blocks of {given!r} are no blocks of a weight")
    return given[0], given[1]


def _modelopt(settings: Mapping[str, Any]) -> Method:
    """NVIDIA's Model Optimizer: 8-bit floats with a scale of the whole weight."""
    _setting(settings, "quant_algo", ("FP8",))
    return _fp8_folder({})


def _of_fp8(mark: str, others: tuple[str, ...], block: tuple[int, int] | None) -> Method:
    def read(get: Get) -> tuple[Tensor, Tensor]:
        """The weight and float32 scales: [N, 1], or those of the blocks."""
        weight, scale = get("weight"), get(mark).float()
        n_out, n_in = weight.shape
        if block is None:
            if scale.numel() not in (1, n_out):
                raise ConfigError(f"{scale.numel()} scales do not fit a weight of {n_out} outputs")
            return weight, scale.reshape(-1, 1).expand(n_out, 1)
        if scale.shape != (-(-n_out // block[0]), -(-n_in // block[1])):
            raise ConfigError(
                f"scales {list(scale.shape)} do not fit a weight {list(weight.shape)} in blocks of {block}"
            )
        return weight, scale.repeat_interleave(block[0], 0)[:n_out]

    def dense(get: Get) -> Tensor:
        weight, scale = read(get)
        spread = scale if block is None else scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
        return weight.float() * spread

    def floats(get: Get) -> HeldWeight | None:
        weight, scale = read(get)
        if weight.dtype != torch.float8_e4m3fn or (block is not None and block[1] % INPUTS):
            return None
        return HeldWeight(weight, scale=scale.contiguous(), group=0 if block is None else block[1])

    return Method(name="FP8", mark=mark, others=others, dense=dense, floats=floats)


def _nvfp4(get: Get) -> Tensor:
    """4-bit floats of which 16 inputs share an 8-bit float as a scale, and all of them a divisor of the scales."""
    packed, scale, divisor = get("weight_packed"), get("weight_scale").float(), get("weight_global_scale").float()
    n_out, n_in = len(packed), 2 * packed.shape[1]
    if packed.dtype != torch.uint8 or scale.shape != (n_out, n_in // 16) or divisor.numel() != 1 or n_in % 16:
        raise ConfigError(f"scales {list(scale.shape)} do not fit an NVFP4 weight {[n_out, n_in]}")
    codes = torch.stack((packed & 15, packed >> 4), dim=2).view(n_out, -1, 16)
    values = torch.tensor(DOUBLED_FP4, dtype=torch.float32)[codes.int()] / 2
    return (values * (scale / divisor)[..., None]).view(n_out, n_in)


def _checked(integers: Integers) -> Integers:
    n_out, n_in = integers.q.shape
    rows, n_groups = integers.scale.shape
    if rows != n_out or integers.zero.shape != integers.scale.shape or not 1 <= n_groups <= n_in:
        raise ConfigError(
            f"scales {list(integers.scale.shape)} and zeros {list(integers.zero.shape)} do not fit a weight "
            f"{list(integers.q.shape)}"
        )
    return integers


def _mxfp4(settings: Mapping[str, Any]) -> None:
    """MXFP4 of stacked experts, which the model reads itself."""


METHODS: dict[str, Callable[[Mapping[str, Any]], Method | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8_folder,
    "fbgemm_fp8": _fp8_folder,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
"""``quant_method`` of a config -> what reads it."""

KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of the names of scales for a rounded KV cache. A pool in fewer bits has scales of its own, by token."""
