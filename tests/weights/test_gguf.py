"""A GGUF file of a model gives the same tensors and configuration as its Hugging Face folder."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bough.base.errors import ConfigError
from bough.weights.gguf import GgufFile
from bough.weights.loader import each_tensor, open_checkpoint

Write = Callable[..., Path]

SHARED_KEYS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rope_theta", "rope_scaling", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "attention_bias", "bos_token_id", "eos_token_id",
)  # fmt: skip


def test_tensors_and_config_equal_the_folder(llama_folder: Path, write_gguf: Write, tmp_path: Path) -> None:
    ours, folder = open_checkpoint(write_gguf(tmp_path / "m.gguf")), open_checkpoint(llama_folder)
    expected = load_file(llama_folder / "model.safetensors")
    assert sorted(ours.names()) == sorted(folder.names()) == sorted(expected)
    for name, tensor in each_tensor(ours):
        assert tensor.is_contiguous() and torch.equal(tensor, expected[name]), name
        assert torch.equal(folder.tensor(name), expected[name]), name
    assert {k: ours.config[k] for k in SHARED_KEYS} == {k: folder.config[k] for k in SHARED_KEYS}
    assert ours.config["rms_norm_eps"] == pytest.approx(folder.config["rms_norm_eps"])
    ours.close()
    folder.close()


def test_logits_of_the_restored_weights(llama_folder: Path, write_gguf: Write, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    ids = torch.arange(3, 23)[None]
    before = model(ids).logits
    model.load_state_dict(dict(each_tensor(open_checkpoint(write_gguf(tmp_path / "m.gguf")))))
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_block_formats_through_the_loader(llama_folder: Path, write_gguf: Write, tmp_path: Path, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", quantise=quantised))
    for name, weight in load_file(llama_folder / "model.safetensors").items():
        got = checkpoint.tensor(name)
        if weight.ndim == 2:
            blocks = gguf.quants.quantize(weight.numpy(), quantised)
            weight = torch.from_numpy(gguf.quants.dequantize(blocks, quantised).astype(np.float32))
        assert torch.equal(got, weight), name
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), weight.to(torch.bfloat16)), name


def test_tokenizer_and_special_ids(write_gguf: Write, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", lambda w: w.add_eot_token_id(5)))
    source = checkpoint.tokenizer_source
    assert isinstance(source, dict)
    assert source["tokenizer.ggml.model"] == "gpt2" and source["tokenizer.ggml.pre"] == "smollm"
    assert source["tokenizer.ggml.tokens"][3] == "t0" and source["tokenizer.ggml.merges"] == ["t 1", "t 2"]
    assert source["tokenizer.ggml.token_type"] == [3, 3, 3] + [1] * 61
    assert source["tokenizer.chat_template"] == "{{ messages }}"
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": None}


def test_tied_embeddings_show_by_absence(write_gguf: Write, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", leave_out=("lm_head.weight",)))
    assert checkpoint.config["tie_word_embeddings"] is True
    with pytest.raises(ConfigError, match="no parameter 'lm_head.weight'"):
        checkpoint.tensor("lm_head.weight")


def test_rope_scaling(write_gguf: Write, tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 2.5, 8.0], dtype=np.float32)
    llama3 = open_checkpoint(write_gguf(tmp_path / "a.gguf", lambda w: w.add_tensor("rope_freqs.weight", factors)))
    assert llama3.config["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.0, 2.5, 8.0]}
    assert "rope_freqs.weight" not in llama3.names()

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    assert open_checkpoint(write_gguf(tmp_path / "b.gguf", yarn)).config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_tensor("blk.0.ssm_a.weight", np.zeros(4, np.float32)), "no supported model has a tensor"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(4, np.float32)), "not positive and finite"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, np.float32)), "does not hold 4 factors"),
        (lambda w: w.add_key_length(0), "key_length is not one positive integer"),
        (lambda w: w.add_value_length(16), "different sizes"),
        (lambda w: w.add_uint16("split.count", 3), "llama-gguf-split --merge"),
        (lambda w: w.add_array("llama.expert_count", [0, 0, 1]), "expert_count is not one positive integer"),
        (
            lambda w: (
                w.add_array("llama.rope.scaling.factor", [1.0, 2.0])
                or w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            ),
            "scaling.factor is not a positive number",
        ),
        (lambda w: w.add_eot_token_id(64), "not the id of a token"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' is not supported"),
    ],
)
def test_what_cannot_be_served_says_why(
    write_gguf: Write, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", change))


def test_unknown_architecture_and_missing_keys(tmp_path: Path) -> None:
    for arch, message in (("mamba", "'mamba' is not supported"), ("llama", "no embedding matrix")):
        path = tmp_path / f"{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(path)


def _file(path: Path, pairs: bytes = b"", n_pairs: int = 0, table: bytes = b"", n: int = 0, data: bytes = b"") -> Path:
    content = b"GGUF" + struct.pack("<IQQ", 3, n, n_pairs) + pairs + table
    path.write_bytes(content + b"\0" * (-len(content) % 32) + data)
    return path


def _entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("table", "n", "data", "message"),
    [
        (_entry(b"a", (8,), 0, 0), 1, b"\0" * 31, "passes the end"),
        (_entry(b"a", (1 << 63, 1 << 63), 0, 0), 1, b"\0" * 64, "passes the end"),
        (_entry(b"a", (1 << 32, 1 << 32), 0, 0), 1, b"\0" * 64, "passes the end"),
        (_entry(b"a", (8,), 0, (1 << 64) - 32), 1, b"\0" * 64, "passes the end"),
        (_entry(b"a", (8,), 0, 1), 1, b"\0" * 64, "not aligned"),
        (_entry(b"a", (0,), 0, 0), 1, b"\0" * 64, "does not suit"),
        (_entry(b"a", (33,), 8, 0), 1, b"\0" * 64, "does not suit"),
        (_entry(b"a", (8,), 9, 0), 1, b"\0" * 64, "type Q8_1, which is not supported"),
        (_entry(b"a", (8,), 999, 0), 1, b"\0" * 64, "type 999"),
        (_entry(b"a", (1,) * 5, 0, 0), 1, b"\0" * 64, "5 dimensions"),
        (_entry(b"a", (8,), 0, 0) * 2, 2, b"\0" * 64, "appears twice"),
        (_entry(b"a", (16,), 0, 0) + _entry(b"b", (8,), 0, 32), 2, b"\0" * 64, "overlaps"),
        (b"", 1 << 62, b"", "announces"),
        (b"", 1 << 16, b"", "are left"),
    ],
)
def test_bad_tensor_tables(tmp_path: Path, table: bytes, n: int, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GgufFile(_file(tmp_path / "m.gguf", table=table, n=n, data=data))


@pytest.mark.parametrize(
    ("pairs", "n", "message"),
    [
        (_pair(b"k", 8, struct.pack("<Q", 1 << 40)), 1, "a string of"),
        (_pair(b"k", 8, struct.pack("<Q", 100) + b"short"), 1, "are left"),
        (_pair(b"k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), 1, "metadata key 'k'"),
        (_pair(b"k", 9, struct.pack("<IQ", 8, 1 << 62)), 1, "an array of"),
        (_pair(b"k", 9, struct.pack("<IQ", 8, 1 << 22)), 1, "ends within an array"),
        (_pair(b"k", 9, struct.pack("<IQQ", 8, 1, 1 << 63)), 1, "passes the end"),
        (_pair(b"k", 9, struct.pack("<IQ", 10, 1 << 22)), 1, "are left"),
        (_pair(b"k", 9, struct.pack("<IQ", 9, 1)), 1, "arrays of arrays"),
        (_pair(b"k", 77, b""), 1, "unknown value type 77"),
        (_pair(b"k", 4, b"\0" * 4) * 2, 2, "appears twice"),
        (_pair(b"k" * 2000, 4, b"\0" * 4), 1, "a string of 2000"),
        (_pair(b"general.alignment", 4, b"\0" * 4), 1, "alignment"),
        (_pair(b"general.alignment", 4, struct.pack("<I", 48)), 1, "alignment"),
    ],
)
def test_bad_metadata(tmp_path: Path, pairs: bytes, n: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GgufFile(_file(tmp_path / "m.gguf", pairs, n))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"GGU", "3 are left"),
        (b"PK\3\4" + b"\0" * 40, "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        GgufFile(path)


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint64("u64", 1 << 63)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("text", "é")
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("texts", ["a", "", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        found = file.metadata
        assert (found["u8"], found["i8"], found["u64"], found["f64"]) == (200, -3, 1 << 63, 0.1)
        assert found["bool"] is True and found["text"] == "é" and found["texts"] == ["a", "", "ü"]
        assert np.array_equal(np.asarray(found["floats"]), [0.5, 1.5])
