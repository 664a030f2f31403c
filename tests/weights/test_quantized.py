"""Quantised folders: every method against its own formula, in the kernels, and in a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.base.errors import ConfigError
from bough.base.params import SamplingParams
from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import Kind, unpack
from bough.weights.loader import FolderCheckpoint, open_checkpoint
from tests.driving import make_driver
from tests.models.parity import ids_of

Tensor = torch.Tensor
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a weight by the ends of their names, and the values that they stand for, float32."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def words(q: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Integers as fields of int32 words along ``dim``; field i holds value ``order[i]`` of each word's."""
    if bits == 3:
        return three_bit_words(q, dim)
    n = 32 // bits
    moved = q.movedim(dim, -1).reshape(*q.movedim(dim, -1).shape[:-1], -1, n).long()
    fields = moved[..., list(order)] if order else moved
    total = (fields << (torch.arange(n) * bits)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().movedim(-1, dim).contiguous()


def three_bit_words(q: Tensor, dim: int) -> Tensor:
    """As AutoGPTQ spells it out: ten values, two bits of the eleventh; its last bit, ten, one bit; two bits, ten."""
    rows = []
    for block in q.movedim(dim, 0).long().split(32):
        first = sum(block[i] << (3 * i) for i in range(10)) | (block[10] & 3) << 30
        second = block[10] >> 2 | sum(block[11 + i] << (3 * i + 1) for i in range(10)) | (block[21] & 1) << 31
        third = block[21] >> 1 | sum(block[22 + i] << (3 * i + 2) for i in range(10))
        rows += [first, second, third]
    total = torch.stack(rows)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().movedim(0, dim).contiguous()


def rounded(w: Tensor, group: int, bits: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [N, K], float16 scale and integer zero [N, G]; the last group may be shorter."""
    n, k = w.shape
    grouped, top = torch.nn.functional.pad(w, (0, -k % group)).view(n, -1, group), (1 << bits) - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        scale = (grouped.abs().amax(2) / (top // 2)).half()
        zero = torch.full_like(low, top // 2 + 1)
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
    q = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return q.view(n, -1)[:, :k].to(torch.uint8).contiguous(), scale, zero


def values(q: Tensor, scale: Tensor, zero: Tensor, groups: Tensor | None = None) -> Tensor:
    groups = torch.arange(q.shape[1]) // (q.shape[1] // scale.shape[1]) if groups is None else groups
    return (q.float() - zero[:, groups]) * scale.float()[:, groups]


def awq(w: Tensor) -> Stored:
    q, scale, zero = rounded(w, 32, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(q.T, 4, 1, order), "qzeros": words(zero.T, 4, 1, order), "scales": scale.T.contiguous()}
    return tensors, values(q, scale, zero)


def gptq(bits: int, act_order: bool, symmetric: bool, lower: int = 1, size: int = 32) -> Callable[[Tensor], Stored]:
    """``size`` of groups; -1: all inputs."""

    def write(w: Tensor) -> Stored:
        n_in = w.shape[1]
        size_ = n_in if size < 0 else size
        order = torch.randperm(n_in, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(n_in)
        groups = torch.empty(n_in, dtype=torch.int32)
        groups[order] = (torch.arange(n_in) // size_).int()
        q, scale, zero = rounded(w[:, order].contiguous(), size_, bits, symmetric)
        back = torch.empty_like(q)
        back[:, order] = q
        tensors = {
            "qweight": words(back.T, bits, 0), "qzeros": words(zero.T - lower, bits, 1), "scales": scale.T.contiguous(),
            "g_idx": groups,
        }  # fmt: skip
        return tensors, values(back, scale, zero, groups.long())

    return write


def auto_round(size: int) -> Callable[[Tensor], Stored]:
    def write(w: Tensor) -> Stored:
        tensors, exact = gptq(4, False, True, size=size)(w)
        del tensors["g_idx"]
        return tensors, exact

    return write


def packed(bits: int, size: int) -> Callable[[Tensor], Stored]:
    """``size`` of groups; -1: all inputs."""

    def write(w: Tensor) -> Stored:
        size_ = w.shape[1] if size < 0 else size
        q, scale, zero = rounded(w, size_, bits, symmetric=True)
        tensors = {"weight_packed": words(q, bits, 1), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
        return tensors, values(q, scale, zero, torch.arange(w.shape[1]) // size_)

    return write


def w8a8(w: Tensor) -> Stored:
    scale = w.abs().amax(1, keepdim=True) / 127
    q = (w / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def w8a8_tensor(w: Tensor) -> Stored:
    scale = w.abs().amax().reshape(1) / 127
    q = (w / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale, "input_scale": torch.ones(1)}, q.float() * scale


def w8a8_zeros(w: Tensor) -> Stored:
    q, scale, zero = rounded(w, w.shape[1], 8)
    tensors = {"weight": (q.int() - 128).to(torch.int8), "weight_zero_point": (zero - 128).to(torch.int8)}
    return {**tensors, "weight_scale": scale}, values(q, scale, zero)


def nvfp4(w: Tensor) -> Stored:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((levels, -levels))
    divisor = torch.tensor([448.0 * 6 / w.abs().max()])
    scale = (w.view(len(w), -1, 16).abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn)
    spread = (scale.float() / divisor).repeat_interleave(16, 1)
    codes = ((w / spread)[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}
    return {**tensors, "weight_global_scale": divisor}, levels[codes.int()] * spread


def fp8(scales: str, block_name: str = "weight_scale_inv") -> Callable[[Tensor], Stored]:
    def write(w: Tensor) -> Stored:
        if scales == "block":
            rows, columns = (-(-n // 32) for n in w.shape)
            scale = torch.rand(rows, columns) + 0.5
            spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: len(w), : w.shape[1]]
        else:
            scale = torch.rand(()) + 0.5 if scales == "tensor" else torch.rand(len(w), 1) + 0.5
            spread = scale
        stored = (w / spread).to(torch.float8_e4m3fn)
        name = block_name if scales == "block" else "weight_scale"
        return {"weight": stored, name: scale}, stored.float() * spread

    return write


def asymmetric_w4(w: Tensor) -> Stored:
    """As llm-compressor writes it: zeros packed along the outputs, inputs in the order of their importance."""
    order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(2))
    groups = torch.empty(w.shape[1], dtype=torch.int32)
    groups[order] = (torch.arange(w.shape[1]) // 32).int()
    q, scale, zero = rounded(w[:, order].contiguous(), 32, 4)
    back = torch.empty_like(q)
    back[:, order] = q
    tensors = {
        "weight_packed": words(back, 4, 1), "weight_scale": scale, "weight_shape": torch.tensor(w.shape),
        "weight_zero_point": words(zero, 4, 0), "weight_g_idx": groups,
    }  # fmt: skip
    return tensors, values(back, scale, zero, groups.long())


def bnb_8(w: Tensor) -> Stored:
    scale = w.abs().amax(1)
    q = (w / scale[:, None] * 127).round().to(torch.int8)
    return {"weight": q, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}, q.float() * (
        scale[:, None] / 127
    )


def bnb_4(nested: bool) -> Callable[[Tensor], Stored]:
    """Any 16 levels do; scales of blocks of 64 once more rounded in blocks of 32, or not."""

    def write(w: Tensor) -> Stored:
        levels = torch.cat((torch.linspace(-1, 0, 9)[:-1], torch.linspace(0, 1, 8)))
        blocks = w.reshape(-1, 64)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
        tensors = {"weight.quant_map": levels, "weight.absmax": scale}
        if nested:
            table, mean = torch.linspace(-1, 1, 256), scale.mean()
            over = torch.stack([part.abs().amax() for part in (scale - mean).split(32)])
            spread = over.repeat_interleave(32)[: len(scale)]
            rounded_scale = ((scale - mean) / spread)[:, None].sub(table).abs().argmin(1)
            scale = table[rounded_scale] * spread + mean
            state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": float(mean)}
            tensors |= {
                "weight.absmax": rounded_scale.to(torch.uint8), "weight.nested_absmax": over,
                "weight.nested_quant_map": table,
            }  # fmt: skip
        index = (blocks / scale[:, None])[..., None].sub(levels).abs().argmin(2).flatten().to(torch.uint8)
        tensors["weight"] = (index[::2] << 4 | index[1::2])[:, None]
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return {**tensors, "weight.quant_state.bitsandbytes__nf4": told}, (
            levels[index.int()].view(-1, 64) * scale[:, None]
        ).view(w.shape)

    return write


def group(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"g": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True, **more}}}


METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored], Kind | None]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, Kind.Q4_ZERO),
    "gptq-4": ({"quant_method": "gptq", "bits": 4}, gptq(4, False, False), Kind.Q4_ZERO),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, gptq(8, False, True), Kind.Q8),
    "gptq-8-zeros": ({"quant_method": "gptq", "bits": 8}, gptq(8, False, False), None),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, True, False), None),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, False, False, 0), Kind.Q4_ZERO
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
         "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}},
        auto_round(32), Kind.Q4_ZERO,
    ),
    "auto-round-awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4}, awq, Kind.Q4_ZERO,
    ),
    "w4a16": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": group(4, "int")},
        packed(4, 32), Kind.Q4_ZERO,
    ),
    "w8a8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": group(8, "int")}, w8a8,
        Kind.INT8,
    ),
    "w4a16-asymmetric": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": group(4, "int", symmetric=False, actorder="group")},
        asymmetric_w4, None,
    ),
    "bitsandbytes-8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_8, Kind.INT8),
    "bitsandbytes-nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_4(False), None
    ),
    "bitsandbytes-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb_4(True), None
    ),
    "compressed-fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": group(8, "float")},
        fp8("channel"), None,
    ),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8("tensor"), None),
    "fp8-channel": ({"quant_method": "fp8"}, fp8("channel"), None),
    "compressed-fp8-block": (
        {"quant_method": "compressed-tensors", "format": "float-quantized",
         "config_groups": group(8, "float", strategy="block", block_structure=[32, 32])},
        fp8("block", "weight_scale"), None,
    ),
    "w8a8-tensor": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": group(8, "int")},
        w8a8_tensor, Kind.INT8,
    ),
    "w8a8-zeros": (
        {"quant_method": "compressed-tensors", "format": "int-quantized",
         "config_groups": group(8, "int", symmetric=False)},
        w8a8_zeros, None,
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": group(4, "float")},
        nvfp4, None,
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8("channel"), None),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("tensor"), None),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8("block"), None),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("plain"))


def quantised(plain: Path, folder: Path, name: str) -> tuple[Path, Path, dict[str, Tensor]]:
    """(a folder by the method, the same decoded, the decoded weights) of the model ``plain``."""
    settings, write, _ = METHODS[name]
    torch.manual_seed(0)
    weights = load_file(plain / "model.safetensors")
    stored, decoded, exact = {}, dict(weights), {}
    for key, weight in weights.items():
        stem = key.removesuffix(".weight")
        if not stem.endswith(LINEARS):
            stored[key] = weight
            continue
        tensors, exact[key] = write(weight.float())
        stored |= {f"{stem}.{end}": tensor for end, tensor in tensors.items()}
        decoded[key] = exact[key]
    for path, tensors in ((folder / "quantised", stored), (folder / "decoded", decoded)):
        shutil.copytree(plain, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = folder / "quantised" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": settings}))
    return folder / "quantised", folder / "decoded", exact


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_method(name: str, plain: Path, tmp_path: Path) -> None:
    path, _, exact = quantised(plain, tmp_path, name)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(load_file(plain / "model.safetensors"))
    for key, expected in exact.items():
        assert torch.equal(checkpoint.tensor(key), expected)
        packed = checkpoint.blocks(key)
        if isinstance(packed, HeldWeight):
            assert (
                name in ("compressed-fp8", "fp8-tensor", "fp8-channel", "fbgemm", "modelopt")
                and packed.scale is not None
            )
            assert torch.equal(packed.weight.float() * packed.scale, expected)
            continue
        assert (None if packed is None else packed.kind) == METHODS[name][2]
        if packed is not None:
            assert torch.allclose(unpack(packed), expected, rtol=1e-6, atol=1e-7)
    assert checkpoint.blocks("model.embed_tokens.weight") is None
    checkpoint.close()


GPTQ: dict[str, Any] = {"quant_method": "gptq"}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
ROUND: dict[str, Any] = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}


@pytest.mark.parametrize(
    ("settings", "write", "kind"),
    [
        *(({**GPTQ, "bits": 4}, gptq(4, False, sym, size=n), Kind.Q4_ZERO) for n in (64, 128, -1) for sym in (0, 1)),
        *(({**GPTQ, "bits": 8}, gptq(8, False, True, size=n), Kind.Q8) for n in (64, 128)),
        ({**GPTQ, "bits": 8}, gptq(8, False, True, size=-1), Kind.INT8),
        *(({**GPTQ, "bits": 4}, gptq(4, True, sym, size=128), None) for sym in (False, True)),
        *(({**GPTQ, "bits": bits}, gptq(bits, False, False, size=64), Kind.Q4_ZERO) for bits in (2, 3)),
        *(({**PACKED, "config_groups": group(4, "int")}, packed(4, n), Kind.Q4_ZERO) for n in (64, 128, -1)),
        *(({**PACKED, "config_groups": group(8, "int")}, packed(8, n), Kind.Q8) for n in (32, 128)),
        ({**PACKED, "config_groups": group(8, "int")}, packed(8, -1), Kind.INT8),
        # Of 256 inputs the last group is shorter.
        ({**GPTQ, "bits": 4}, gptq(4, False, True, size=96), None),
        ({**ROUND, "group_size": 96}, auto_round(96), None),
        ({**PACKED, "config_groups": group(4, "int", group_size=96)}, packed(4, 96), None),
        # Another layer's.
        ({**ROUND, "group_size": 96}, auto_round(64), Kind.Q4_ZERO),
    ],
)  # fmt: skip
def test_groups_of_any_usual_size(settings: Any, write: Callable[[Tensor], Stored], kind: Kind | None, plain: Path,
                                  tmp_path: Path) -> None:  # fmt: skip
    torch.manual_seed(0)
    tensors, expected = write(torch.randn(64, 256))
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # What else there may be: scales for a cache in 8 bits.
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    save_file({f"x.{end}": t for end, t in tensors.items()} | scales | {"y": torch.ones(300)},
              tmp_path / "model.safetensors")  # fmt: skip
    checkpoint = FolderCheckpoint(tmp_path)
    assert checkpoint.names() == ["x.weight", "y"]
    assert torch.equal(checkpoint.tensor("x.weight"), expected)
    held = checkpoint.blocks("x.weight")
    assert (None if held is None else held.kind) == kind
    if held is not None:
        assert torch.allclose(unpack(held), expected, rtol=1e-6, atol=1e-7)
    checkpoint.close()


def test_groups_that_do_not_fit_are_refused(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {**ROUND, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, _ = auto_round(96)(torch.randn(64, 256))
    save_file({f"x.{end}": t for end, t in tensors.items()} | {"y": torch.ones(300)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="256 inputs has no 3 groups of 64"):
        FolderCheckpoint(tmp_path).tensor("x.weight")


@pytest.mark.parametrize("name", METHODS)
def test_a_model_computes_with_them(name: str, plain: Path, tmp_path: Path) -> None:
    path, decoded, _ = quantised(plain, tmp_path, name)
    asked = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=tuple(range(64)))
    for dtype, kernels, tolerance in ((torch.float32, "reference", 0.0), (torch.bfloat16, "auto", 0.1)):
        rows = []
        for folder in (path, decoded):
            driver = make_driver(folder, dtype=dtype, kernels=kernels, context_length=128)
            seq = driver.add(0, ids_of(3, 30), asked)
            driver.run([seq], 2)
            rows.append(torch.tensor([[v for _, v in entry.asked] for entry in seq.prompt_logprobs]))
        assert (rows[0] - rows[1]).norm() <= tolerance * rows[1].norm()


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "hqq"}, {}, "awq", {"quant_method": "awq", "bits": 3}, {"quant_method": "gptq", "bits": 5},
     {"quant_method": "modelopt", "quant_algo": "NVFP4"},
     {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": group(4, "int"),
      "sparsity_config": {"format": "sparse-24-bitmask"}},
     {"quant_method": "awq", "version": "gemv"}, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
     {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"},
     {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
     {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq",
      "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
     {"quant_method": "fp8", "weight_block_size": [0, 1]}, {"quant_method": "fp8", "weight_block_size": 3},
     {"quant_method": "compressed-tensors", "format": "marlin-24"},
     {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
     {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": group(3, "int")}],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_refused(settings: Any, plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ConfigError, match=r"cannot be read|blocks|usable"):
        FolderCheckpoint(folder)


def damage(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same with each tensor missing, cut, flat, or of another dtype."""
    found = []
    for name, tensor in tensors.items():
        others = {k: v for k, v in tensors.items() if k != name}
        found += [
            others,
            {**others, name: tensor[:-1].contiguous()},
            {**others, name: tensor.flatten()},
        ]
        found.append({**others, name: torch.zeros(tensor.shape, dtype=torch.float64)})
    return found


@pytest.mark.parametrize("name", ["awq", "gptq-4", "gptq-act-order", "w4a16", "w4a16-asymmetric", "w8a8",
                                  "bitsandbytes-8", "bitsandbytes-nested", "fp8-channel", "fp8-block"])  # fmt: skip
def test_damaged_weights_are_errors_or_load(name: str, plain: Path, tmp_path: Path) -> None:
    """Never anything but ConfigError, and whatever loads has the shape that the config says."""
    settings, write, _ = METHODS[name]
    torch.manual_seed(0)
    tensors = {end: tensor for end, tensor in write(torch.randn(64, 96))[0].items() if end != "weight_format"}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    refused = 0
    for i, damaged in enumerate(damage(tensors)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            {f"x.{end}": tensor for end, tensor in damaged.items()} | {"y": torch.ones(300)},
            folder / "model.safetensors",
        )
        checkpoint = FolderCheckpoint(folder)
        try:
            shapes = {tuple(checkpoint.tensor("x.weight").shape)}
            packed = checkpoint.blocks("x.weight")
            if isinstance(packed, HeldWeight):
                shapes |= {tuple(packed.weight.shape)}
            elif packed:
                shapes |= {(packed.n_out, packed.n_in)}
            assert len(shapes) == 1
        except ConfigError:
            refused += 1
        checkpoint.close()
    assert refused >= len(damage(tensors)) // 2
