"""BERT and RoBERTa as GGUF files, which the gguf package writes, against the folders that they are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bough.base.errors import ConfigError
from bough.engine.engine import Engine
from bough.text.tokenizer import Tokenizer
from bough.weights.gguf import GgufFile
from bough.weights.gguf_model import config_of, describe, pooling_of
from bough.weights.loader import GgufCheckpoint
from tests.models.test_bert import FLAGS, PAIRS, TEXTS, cross_encoder, expected, make_tiny_bert
from tests.real import MINILM, fetched
from tests.text.conftest import varied_strings

Q8_0 = gguf.GGMLQuantizationType.Q8_0
STRINGS = varied_strings(700)
NAMED = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}


def write(
    folder: Path,
    path: Path,
    *,
    kind: str = "bert",
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    quantise: gguf.GGMLQuantizationType | None = None,
    labels: Iterable[str] = (),
    skip: int = 0,
) -> Path:
    """The model of ``folder`` as llama.cpp's converter writes it; ``skip``: first positions that no token has."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - skip)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels:
        writer.add_classifier_output_labels(list(labels))
    _vocabulary(writer, folder, config, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        stem, end = name.removeprefix("bert.").removeprefix("roberta.").rsplit(".", 1)
        if stem == "embeddings" or (stem == "pooler.dense" and kind == "bert"):
            continue
        theirs = names.get_name("classifier.out_proj" if stem == "classifier" else stem)
        assert theirs is not None, name
        stored = weight[skip:] if stem.endswith("position_embeddings") else weight
        if quantise is None or end != "weight" or theirs in ("position_embd", "token_types") or stored.ndim < 2:
            writer.add_tensor(f"{theirs}.{end}", stored)
        else:
            writer.add_tensor(f"{theirs}.{end}", gguf.quants.quantize(stored, quantise), raw_dtype=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(writer: Any, folder: Path, config: dict[str, Any], kind: str) -> None:
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    added = fast.get_added_tokens_decoder()
    tokens, types = [], []
    for i in range(config["vocab_size"]):
        token = fast.id_to_token(i)
        known = gguf.TokenType.USER_DEFINED if token and i in added else gguf.TokenType.NORMAL
        known = gguf.TokenType.CONTROL if token and i in added and added[i].special else known
        types.append(known if token else gguf.TokenType.UNUSED)
        token = token or f"[PAD{i}]"
        if kind == "bert" and types[-1] != gguf.TokenType.CONTROL:
            token = token[2:] if token.startswith("##") else f"▁{token}"
        tokens.append(token)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("jina-v2-en" if kind == "bert" else "roberta-bpe")
    writer.add_token_type_count(config.get("type_vocab_size", 1))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)


def tokenizers_of(folder: Path, path: Path) -> tuple[Tokenizer, Tokenizer]:
    """(of the file, of the folder)."""
    with GgufFile(path) as file:
        return Tokenizer.from_gguf(file.metadata), Tokenizer.from_folder(folder)


def tiny(folder: Path, **changes: Any) -> Path:
    folder = make_tiny_bert(folder, **changes)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED))
    return folder


@pytest.mark.parametrize(("eps", "pooling"), [(1e-12, "MEAN"), (1e-2, "CLS"), (1e-5, "LAST"), (1e-5, None)])
def test_embeddings_equal_transformers(eps: float, pooling: str | None, tmp_path: Path) -> None:
    folder = tiny(tmp_path, layer_norm_eps=eps, type_vocab_size=3)
    path = write(folder, tmp_path / "m.gguf", pooling=pooling and gguf.PoolingType[pooling])
    with Engine(str(path), **FLAGS) as engine:
        assert not engine.hello.model.causal and engine.hello.model.context_length == 96
        ids = [engine.tokenize(text) for text in TEXTS]
        found = engine.embed(TEXTS)
    for prompt, each in zip(ids, found, strict=True):
        hidden = expected(folder, prompt)
        vector = hidden[0] if pooling == "CLS" else hidden[-1] if pooling == "LAST" else hidden.mean(0)
        np.testing.assert_allclose(each.vector, vector, rtol=1e-4, atol=1e-4)


def test_a_file_of_8_bits(tmp_path: Path) -> None:
    folder = tiny(tmp_path, hidden_size=64, intermediate_size=96)
    path = write(folder, tmp_path / "m.gguf", quantise=Q8_0)
    assert GgufCheckpoint(path).blocks("encoder.layer.1.output.dense.weight") is not None
    for flags in (FLAGS, {**FLAGS, "dtype": "bfloat16"}):
        with Engine(str(path), **flags) as engine:
            found = [each.vector for each in engine.embed(TEXTS)]
            hidden = [expected(folder, engine.tokenize(text)).mean(0) for text in TEXTS]
        cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(found, hidden, strict=True)]
        assert min(cosines) > 0.995


@pytest.mark.parametrize(
    "options", [{}, {"lowercase": False}, {"strip_accents": False}], ids=["uncased", "cased", "accents"]
)
def test_ids_are_the_folders(options: dict[str, bool], tmp_path: Path) -> None:
    fast = Fast(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(**options)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], limit_alphabet=400,
        show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator([*varied_strings(300), *"ABCA", "## ##x ▁ x▁y"], trainer)
    fast.add_tokens(["<mark>"])
    fast.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    folder = tiny(tmp_path, vocab_size=fast.get_vocab_size() + 2)
    fast.decoder = decoders.WordPiece()
    fast.save(str(folder / "tokenizer.json"))
    path = write(folder, tmp_path / "m.gguf")
    ours, theirs = tokenizers_of(folder, path)
    if "strip_accents" in options:  # which only newer files tell
        with GgufFile(path) as file:
            ours = Tokenizer.from_gguf({**file.metadata, "tokenizer.ggml.normalizer.strip_accents": False})
    more = ["a [SEP] b", "x<mark>y", "Ⅷ ÀÉÎ 漢字kana", "y" * 101, "cats [unused1] ▁x"]
    for text in [*STRINGS, *more]:
        ids = theirs.encode(text, add_special=True)
        assert ours.encode(text, add_special=True) == ids, text
        assert ours.encode_plain(text) == theirs.encode_plain(text)
        assert ours.encode_pair(text, more[0]) == theirs.encode_pair(text, more[0])
        assert ours.decode(ids) == theirs.decode(ids)
    assert len({i for text in STRINGS for i in theirs.encode_plain(text)}) > 250


def test_old_files_name_fewer_tokens(tmp_path: Path) -> None:
    path = write(tiny(tmp_path), tmp_path / "m.gguf")
    with GgufFile(path) as file:
        full = dict(file.metadata)
    ids = Tokenizer.from_gguf(full).encode_pair("the cats", "xyz")
    assert ids == [2, 4, 5, 9, 3, 1, 3]
    named = {key for key in full if key.endswith("_token_id") or key.startswith("tokenizer.ggml.add_")}
    bare = {key: value for key, value in full.items() if key not in named}
    assert Tokenizer.from_gguf(bare).encode_pair("the cats", "xyz") == ids
    old = {**bare, "tokenizer.ggml.cls_token_id": 0}
    assert Tokenizer.from_gguf(old).encode("the", add_special=True) == [0, 4, 3]
    tokens = [token.replace("CLS", "X") for token in full["tokenizer.ggml.tokens"]]
    with pytest.raises(ConfigError, match=r"no \[CLS\]"):
        Tokenizer.from_gguf({**bare, "tokenizer.ggml.tokens": tokens})


def make_tiny_roberta(folder: Path, template: bool) -> Any:
    """A random RoBERTa with two labels and a byte-level vocabulary, as a folder and as transformers' model."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    fast.train_from_iterator(STRINGS[:100], trainer)
    if template:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    else:
        fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=fast.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=98, type_vocab_size=1, initializer_range=0.3,
        layer_norm_eps=1e-5,
    )  # fmt: skip
    model = RobertaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    fast.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


@pytest.mark.parametrize("labels", [(), ("bad", "good")])
def test_roberta_as_a_cross_encoder(labels: tuple[str, ...], tmp_path: Path) -> None:
    """Its files say bert, too; it has another vocabulary, one type, and no positions up to that of padding."""
    model = make_tiny_roberta(tmp_path, bool(labels))
    path = write(tmp_path, tmp_path / "m.gguf", kind="gpt2", pooling=gguf.PoolingType.RANK, labels=labels, skip=2)
    ours, theirs = tokenizers_of(tmp_path, path)
    ids = [theirs.encode_pair(*pair) for pair in PAIRS]
    assert [ours.encode_pair(*pair) for pair in PAIRS] == ids
    assert [ours.encode(text, add_special=True) for text in TEXTS] == [
        theirs.encode(text, add_special=True) for text in TEXTS
    ]
    with Engine(str(path), **FLAGS) as engine:
        assert engine.hello.model.labels == (labels or ("LABEL_0", "LABEL_1"))
        scores = np.stack([each.vector for each in engine.embed(ids, "classify")])
        means = np.stack([each.vector for each in engine.embed(ids)])
    with torch.no_grad():
        wanted = [model(torch.tensor([row]), output_hidden_states=True) for row in ids]
    np.testing.assert_allclose(scores, [out.logits[0] for out in wanted], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(means, [out.hidden_states[-1][0].mean(0) for out in wanted], rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "m")
    write(folder, tmp_path / "m.gguf", pooling=gguf.PoolingType.CLS)
    with GgufFile(tmp_path / "m.gguf") as file:
        meta, family = describe(file)
        for key, value, message in (("pooling_type", 9, "type 9"), ("attention.causal", True, "only what is before")):
            meta.values = {**file.metadata, f"bert.{key}": value}
            with pytest.raises(ConfigError, match=message):
                pooling_of(meta), config_of(file, meta, family)
    half = write(cross_encoder(tmp_path / "half", 1), tmp_path / "half.gguf", pooling=gguf.PoolingType.RANK)
    with pytest.raises(ConfigError, match="half of its classifier"):
        GgufCheckpoint(half)


@pytest.mark.slow
def test_minilm(tmp_path: Path) -> None:
    folder = fetched(MINILM)
    texts = ["A cat sits on the mat.", "A kitten is lying on a rug.", "Interest rates rose again.", *STRINGS[:40]]
    rows = []
    path, small = tmp_path / "m.gguf", tmp_path / "q.gguf"
    write(folder, path)
    write(folder, small, quantise=Q8_0)
    ours, theirs = tokenizers_of(folder, path)
    for text in STRINGS:
        assert ours.encode(text, add_special=True) == theirs.encode(text, add_special=True)
    for model in (folder, path, small):
        with Engine(str(model), **FLAGS) as engine:
            found = np.stack([each.vector for each in engine.embed(texts)])
        rows.append(found / np.linalg.norm(found, axis=1, keepdims=True))
    cosines = [found @ found.T for found in rows]
    np.testing.assert_allclose(cosines[1], cosines[0], atol=1e-6)
    np.testing.assert_allclose(cosines[2], cosines[0], atol=0.02)
