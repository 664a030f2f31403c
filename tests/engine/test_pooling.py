"""Vectors of hidden states against transformers' own forward, whatever chunking, cache and company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.errors import ConfigError, InvalidRequest
from bough.base.params import Pooling
from bough.engine.engine import Engine
from tests.tiny import make_tiny_model

FLAGS: dict[str, Any] = {"dtype": "float32", "pool_tokens": 4096, "threads": 1}
PROMPTS = [[7], [5, 9, 30], list(range(20, 90)), [4] * 100, [*range(20, 60), 3, 8, 11], list(range(3, 259))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("pooled"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), max_running=4, step_tokens=32, **FLAGS) as engine:
        yield engine


def expected(folder: Path, ids: list[int], kind: Pooling) -> np.ndarray:
    from transformers import AutoModel

    hidden = AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).last_hidden_state[0].detach()
    vector: np.ndarray = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0)}[kind].numpy()
    return vector


@pytest.mark.parametrize("kind", ["last", "mean", "first"])
def test_equals_transformers(folder: Path, engine: Engine, kind: Pooling) -> None:
    found = engine.embed(PROMPTS, kind)
    for prompt, embedding in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(embedding.vector, expected(folder, prompt, kind), rtol=1e-4, atol=1e-4)
        assert embedding.n_prompt == len(prompt) and embedding.vector.dtype == np.float32


def test_the_last_token_uses_the_cache_and_a_mean_does_not(engine: Engine) -> None:
    prompt = list(range(100, 180))
    (first,) = engine.embed([prompt], "last")
    (again,) = engine.embed([prompt], "last")
    assert first.n_cached == 0 and again.n_cached == len(prompt) - 1
    np.testing.assert_allclose(first.vector, again.vector, rtol=1e-4, atol=1e-5)
    (mean,) = engine.embed([prompt], "mean")
    assert mean.n_cached == 0
    # What a pooled request has computed serves others.
    assert engine.generate([*prompt, 5], max_tokens=1).n_cached >= len(prompt) - 1


def test_beside_sequences_that_generate(engine: Engine) -> None:
    prompt = list(range(30, 130))
    (alone,) = engine.embed([prompt], "mean")
    stream = engine.stream([6, 7, 8], max_tokens=60, ignore_eos=True, temperature=0.0)
    next(stream)
    beside = engine.embed([prompt, [9, 9], prompt[::-1]], "mean")[0]
    text = [token for chunk in stream for token in chunk.tokens]
    assert len(text) >= 1
    np.testing.assert_allclose(alone.vector, beside.vector, rtol=1e-5, atol=1e-6)


def test_text_and_default(folder: Path, engine: Engine) -> None:
    (embedding,) = engine.embed(["the cat"])
    np.testing.assert_allclose(
        embedding.vector, expected(folder, engine.tokenize("the cat"), "last"), rtol=1e-4, atol=1e-4
    )


def test_refusals(engine: Engine) -> None:
    assert len(engine.embed([[5] * 256])) == 1  # the whole context: nothing is generated
    wrong: list[tuple[list[int], Pooling, str]] = [
        ([5] * 257, "last", "context length"),
        ([], "last", "empty"),
        ([1 << 20], "mean", "vocabulary"),
        ([5], "classify", "no classification head"),
    ]
    for prompt, kind, reason in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            engine.embed([prompt], kind)


def test_pool_under_pressure(folder: Path) -> None:
    """Rows give their cells back and begin again: a mean starts anew then."""
    prompts = [[n, *range(20, 140)] for n in range(3, 15)]
    with Engine(str(folder), max_running=8, step_tokens=16, **{**FLAGS, "pool_tokens": 300}) as engine:
        found = engine.embed(prompts, "mean")
    for prompt, embedding in zip(prompts, found, strict=True):
        np.testing.assert_allclose(embedding.vector, expected(folder, prompt, "mean"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("labels", [None, ["bad", "good", "odd"], ["relevant"]])
def test_classifier(tmp_path: Path, labels: list[str] | None) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = make_tiny_model(tmp_path / "base")
    config = LlamaConfig.from_pretrained(folder, pad_token_id=0)
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: i for i, name in enumerate(labels)}
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    with Engine(str(folder), **FLAGS) as engine:
        assert list(engine.hello.model.labels) == (labels or ["LABEL_0", "LABEL_1"])
        for prompt, found in zip(PROMPTS, engine.embed(PROMPTS, "classify"), strict=True):
            logits = model(torch.tensor([prompt])).logits[0].detach().numpy()
            np.testing.assert_allclose(found.vector, logits, rtol=1e-4, atol=1e-4)
        with pytest.raises(InvalidRequest, match="generates none"):
            engine.generate([5, 6])


@pytest.mark.parametrize(("modes", "kind"), [
    ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
    ({"pooling_mode_lasttoken": True}, "last"),
    ({"pooling_mode_cls_token": True}, "first"),
    ({"pooling_mode_max_tokens": True}, None),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
])  # fmt: skip
def test_pooling_of_sentence_transformers(tmp_path: Path, modes: dict[str, bool], kind: str | None) -> None:
    from bough.weights.loader import open_checkpoint

    folder = make_tiny_model(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    if kind is None:
        with pytest.raises(ConfigError, match="1_Pooling"):
            open_checkpoint(folder)
    else:
        checkpoint = open_checkpoint(folder)
        assert checkpoint.pooling == kind
        checkpoint.close()
