"""BERT against transformers' own forward, and MiniLM as it is published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bough.base.errors import ConfigError, InvalidRequest
from bough.engine.engine import Engine
from bough.text.tokenizer import Tokenizer as BoughTokenizer
from tests.real import MINILM, fetched

FLAGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_running": 4}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "##s", "dog", "##gy", "a", "."]
TEXTS = ["the cat sat on the mat.", "a doggy", "", "cats " * 40, "THE dogs xyz"]


def make_tiny_bert(folder: Path, *, classifies: bool = False, **changes: Any) -> Path:
    """A random BERT with a WordPiece vocabulary, as a Hugging Face folder."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.3,
    }  # fmt: skip
    config = BertConfig(**{**sizes, **changes})
    model: Any = (BertForSequenceClassification if classifies else BertModel)(config)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    # A step of fewer tokens than a text has is widened.
    with Engine(str(folder), step_tokens=16, **FLAGS) as engine:
        yield engine


def expected(folder: Path, ids: list[int]) -> np.ndarray:
    """[T, D] last hidden states of transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    hidden: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].detach().numpy()
    return hidden


def test_equals_transformers(folder: Path, engine: Engine) -> None:
    ids = [engine.tokenize(text) for text in TEXTS]
    means, firsts = engine.embed(ids), engine.embed(TEXTS, "first")
    again = engine.embed(TEXTS[:1])[0]
    np.testing.assert_allclose(again.vector, means[0].vector, rtol=1e-5, atol=1e-6)
    for prompt, mean, first in zip(ids, means, firsts, strict=True):
        hidden = expected(folder, prompt)
        np.testing.assert_allclose(mean.vector, hidden.mean(0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(first.vector, hidden[0], rtol=1e-4, atol=1e-4)
        assert mean.n_cached == first.n_cached == 0


def test_more_texts_than_a_step_holds(folder: Path, engine: Engine) -> None:
    prompts = [[2, *([4 + n % 9] * (10 + n * 3 % 80)), 3] for n in range(40)]
    for prompt, found in zip(prompts, engine.embed(prompts), strict=True):
        np.testing.assert_allclose(found.vector, expected(folder, prompt).mean(0), rtol=1e-4, atol=1e-4)


def test_word_pieces(engine: Engine) -> None:
    ids = engine.tokenize("The cats.")
    assert [WORDS[i] for i in ids] == ["[CLS]", "the", "cat", "##s", ".", "[SEP]"]
    assert engine._engine.tokenizer.decode(ids) == "the cats ."


def test_refusals(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="embeds texts and generates none"):
        engine.generate("the cat")
    with pytest.raises(InvalidRequest, match="context length"):
        engine.embed([[4] * 97])
    with pytest.raises(InvalidRequest, match="no classification head"):
        engine.embed(["the cat"], "classify")
    with pytest.raises(ConfigError, match="gelu"):
        Engine(str(make_tiny_bert(tmp_path / "relu", hidden_act="relu")), **FLAGS)


PAIRS = [
    ("the cat sat", "on the mat."), ("a doggy", "a doggy"), ("", "the cat"), ("the cat", ""), ("", ""),
    ("cats " * 15, "the mat"), ("[SEP] the [CLS]", "a [SEP] mat"),
]  # fmt: skip


def pair_logits(folder: Path, pairs: list[tuple[str, str]], **options: Any) -> np.ndarray:
    """[N, labels] scores of transformers, which is told the types; special tokens in a text are ordinary text."""
    from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    found = fast(
        [a for a, _ in pairs], [b for _, b in pairs], return_tensors="pt", padding=True, split_special_tokens=True,
        return_token_type_ids=True, **options,
    )  # fmt: skip
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    logits: np.ndarray = model(**found).logits.detach().numpy()
    return logits


def cross_encoder(folder: Path, n_labels: int) -> Path:
    return make_tiny_bert(folder, classifies=True, id2label={i: f"label {i}" for i in range(n_labels)})


@pytest.mark.parametrize("n_labels", [1, 3])
def test_pairs_as_transformers_scores_them(tmp_path: Path, n_labels: int) -> None:
    folder = cross_encoder(tmp_path, n_labels)
    with Engine(str(folder), step_tokens=16, **FLAGS) as engine:
        tokenizer = engine._engine.tokenizer
        assert engine.hello.model.labels == tuple(f"label {i}" for i in range(n_labels))
        found = engine.embed([tokenizer.encode_pair(*pair) for pair in PAIRS], "classify")
        single = engine.embed(["the cat sat"], "classify")[0]
    vectors = np.stack([each.vector for each in found])
    np.testing.assert_allclose(vectors, pair_logits(folder, PAIRS), rtol=1e-4, atol=1e-4)
    # Which text is which matters, and a single text is no pair.
    assert np.ptp([each.vector[0] for each in found]) > 0.01
    assert np.abs(single.vector - found[0].vector).max() > 1e-3


def test_pairs_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path, 1)
    pairs = [("the cat " * n, "on a mat " * k) for n, k in ((0, 0), (1, 9), (9, 1), (7, 7), (3, 4), (9, 0))]
    with Engine(str(folder), **FLAGS) as engine:
        tokenizer = engine._engine.tokenizer
        for most in (3, 4, 9, 10, 21):
            ids = [tokenizer.encode_pair(*pair, most) for pair in pairs]
            assert max(map(len, ids)) <= most
            scores = np.stack([each.vector for each in engine.embed(ids, "classify")])
            wanted = pair_logits(folder, pairs, truncation="longest_first", max_length=most)
            np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-4)
        with pytest.raises(InvalidRequest, match="does not fit"):
            tokenizer.encode_pair("the", "cat", 2)


def test_texts_are_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = cross_encoder(tmp_path, 1)
    ours, theirs = BoughTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for side in ("right", "left"):
        for most in (2, 3, 4, 9, 40):
            theirs.truncation_side = side
            wanted = theirs("the cat sat on a mat " * 3, truncation=True, max_length=most)
            assert ours.encode_cut("the cat sat on a mat " * 3, most, left=side == "left") == wanted["input_ids"]
    with pytest.raises(InvalidRequest, match="does not fit"):
        ours.encode_cut("the cat", 1)
    assert ours.encode_cut("the cat", 1, add_special=False) == ours.encode("the", add_special=False)


def test_a_cross_encoder_behind_http(tmp_path: Path) -> None:
    from tests.e2e.serving import running

    folder = cross_encoder(tmp_path, 1)
    texts = [b for _, b in PAIRS[:3]]
    logits = pair_logits(folder, [("the cat", text) for text in texts])[:, 0]
    with running(str(folder), "--dtype", "float32", "--threads", "1") as server:
        scored = server.post("/v1/score", {"text_1": "the cat", "text_2": texts, "use_activation": False}).json()
        ranked = server.post("/v1/rerank", {"query": "the cat", "documents": texts}).json()["results"]
        cut = server.post("/v1/score", {"text_1": "the cat", "text_2": "cats " * 90, "truncate_prompt_tokens": -1})
        long = server.post("/v1/score", {"text_1": "the cat", "text_2": "cats " * 90})
    np.testing.assert_allclose([entry["score"] for entry in scored["data"]], logits, rtol=1e-4, atol=1e-4)
    assert [entry["index"] for entry in ranked] == np.argsort(-logits).tolist()
    sigmoid = 1 / (1 + np.exp(-np.sort(logits)[::-1]))
    np.testing.assert_allclose([entry["relevance_score"] for entry in ranked], sigmoid, rtol=1e-4)
    assert cut.status_code == 200 and cut.json()["usage"]["prompt_tokens"] == 96 and long.status_code == 400


@pytest.mark.slow
def test_minilm() -> None:
    folder = fetched(MINILM)
    texts = ["A cat sits on the mat.", "A kitten is lying on a rug.", "Interest rates rose again.", "hi " * 100]
    with Engine(str(folder), **FLAGS) as engine:
        ids = [engine.tokenize(text) for text in texts]
        rows = np.stack([e.vector for e in engine.embed(texts)])
    hidden = np.stack([expected(folder, prompt).mean(0) for prompt in ids])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ rows.T, hidden @ hidden.T, atol=1e-4)
    assert rows[0] @ rows[1] > 0.4 > 0.2 > abs(rows[0] @ rows[2])
