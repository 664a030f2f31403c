"""Embeddings, scores, ranks and classes over HTTP; the vectors are those of the scripted engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from .scripted import MODEL, PATIENCE, Running, make_tokenizer, pooled_vector, running_server

TEXTS = ["the cat sat", "the dog", "日本"]


@pytest.fixture(scope="module")
def classifier() -> Iterator[httpx.Client]:
    with running_server(labels=("bad", "good", "odd")) as running:
        with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
            yield client


@pytest.fixture(scope="module")
def encoder() -> Iterator[httpx.Client]:
    with running_server(labels=("relevant",)) as running:
        with httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
            yield client


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special=False)


def unit(text: str, n: int = 16) -> np.ndarray:
    vector = pooled_vector(ids(text), 16)[:n]
    return np.asarray(vector / np.linalg.norm(vector))


def test_openai_client(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)  # base64 on the wire
    assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.object == "list"
    for text, entry in zip(TEXTS, answer.data, strict=True):
        np.testing.assert_allclose(entry.embedding, unit(text), rtol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids(text)) for text in TEXTS)
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([e.embedding for e in floats.data], [e.embedding for e in answer.data], rtol=1e-6)
    (one,) = client.embeddings.create(model=MODEL, input=ids(TEXTS[0]), dimensions=4).data
    np.testing.assert_allclose(one.embedding, unit(TEXTS[0], 4), rtol=1e-6)
    several = client.embeddings.create(model=MODEL, input=[ids(text) for text in TEXTS]).data
    assert [e.embedding for e in several] == [e.embedding for e in answer.data]


def test_asynchronous_client(server: Running) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.embeddings.create(model=MODEL, input=text) for text in TEXTS * 3))
        assert len({tuple(answer.data[0].embedding) for answer in answers}) == 3

    asyncio.run(main())


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    body = {"input": "the cat", "encoding_format": "base64"}
    raw = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), unit("the cat"), rtol=1e-6)


def test_how_vectors_are_written(server: Running, http: httpx.Client) -> None:
    plain = pooled_vector(ids("the cat"), 16)
    for name in ("use_activation", "normalize"):
        answer = http.post("/v1/embeddings", json={"input": "the cat", name: False, "dimensions": 8}).json()
        assert answer["data"][0]["embedding"] == plain[:8].tolist()
    for dtype, endianness, code in (
        ("float16", None, "<f2"), ("float16", "big", ">f2"), ("float32", "big", ">f4"), (None, "little", "<f4"),
    ):  # fmt: skip
        fields = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
        raw = http.post("/v1/embeddings", json={"input": "the cat", **fields}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), code), unit("the cat"), rtol=1e-3)
    http.post("/v1/embeddings", json={"messages": [{"role": "user", "content": "the cat"}]})
    assert make_tokenizer().decode(server.client.seen[-1].prompt.tolist(), skip_special=False) == "<|user|>the cat"


@pytest.mark.parametrize(("path", "change", "param"), [
    ("embeddings", {"input": []}, "input"), ("embeddings", {"input": ["a", 1]}, "input"),
    ("rerank", {"query": "", "documents": ["b"]}, "query"), ("rerank", {"query": "a", "documents": [""]}, "documents"),
    ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("score", {"data_1": "a", "data_2": ""}, "data_2"), ("score", {"data_1": "", "data_2": "b"}, "data_1"),
    ("score", {"text_1": "a", "text_2": "b", "temperature": 2}, "temperature"),
    ("score", {"text_1": "a", "text_2": "b", "return_token_logprobs": True}, "return_token_logprobs"),
    ("score", {"text_1": "a", "text_2": "b", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
])  # fmt: skip
def test_refusals_name_the_field(http: httpx.Client, path: str, change: Any, param: str) -> None:
    answer = http.post(f"/v1/{path}", json=change)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(("change", "named"), [
    ({"input": []}, "empty"), ({"input": ""}, "empty"), ({"input": [[]]}, "empty"), ({"input": ["a", 3]}, "ids"),
    ({"input": [1 << 30]}, "vocabulary"), ({"input": "x" * 5000}, "context length"), ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 17}, "dimensions"), ({"encoding_format": "int8"}, "encoding_format"), ({"lora_path": "x"}, "lora"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"timeout": -1}, "timeout"),
    ({"embed_dtype": "fp8_e4m3"}, "embed_dtype"), ({"embed_overrides": [[[1.0]]]}, "embed_overrides"),
    ({"messages": [{"role": "user", "content": "x"}]}, "exactly one"), ({"padding": "max_length"}, "padding"),
    ({"late_chunking_params": {"a": 1}}, "late_chunking_params"), ({"input": None}, "exactly one"),
])  # fmt: skip
def test_refusals(http: httpx.Client, change: dict[str, Any], named: str) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", **change})
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_truncation(server: Running, http: httpx.Client) -> None:
    for side, kept in (("right", "xa"), ("left", "ay")):
        body = {"input": "xay", "truncate_prompt_tokens": 2, "truncation_side": side}
        assert http.post("/v1/embeddings", json=body).json()["usage"]["prompt_tokens"] == 2
        assert server.client.seen[-1].prompt.tolist() == ids(kept)
    assert http.post("/v1/embeddings", json={"input": "x" * 5000, "truncate_prompt_tokens": -1}).status_code == 200


def test_encode(http: httpx.Client) -> None:
    one = http.post("/encode", json={"text": "the cat"}).json()
    np.testing.assert_allclose(one["embedding"], unit("the cat"), rtol=1e-6)
    assert one["meta_info"]["prompt_tokens"] == 7
    several = http.post("/encode", json={"input_ids": [ids("the cat"), ids("a")]}).json()
    assert several[0]["embedding"] == one["embedding"] and len(several) == 2
    assert http.post("/encode", json={"text": "a", "input_ids": [1]}).status_code == 400
    assert http.post("/encode", json={"text": "a", "image_data": "x"}).status_code == 400


def test_scores_are_cosines(http: httpx.Client) -> None:
    expected = [float(unit("the cat sat") @ unit(text)) for text in TEXTS]
    for one, many in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("query", "items")):
        data = http.post("/v1/score", json={one: "the cat sat", many: TEXTS}).json()["data"]
        assert [d["index"] for d in data] == [0, 1, 2]
        np.testing.assert_allclose([d["score"] for d in data], expected, rtol=1e-5)
    pairs = http.post("/score", json={"text_1": TEXTS, "text_2": [{"text": text} for text in TEXTS]}).json()["data"]
    np.testing.assert_allclose([d["score"] for d in pairs], 1.0, rtol=1e-5)
    assert http.post("/v1/score", json={"text_1": TEXTS[:2], "text_2": TEXTS}).status_code == 400
    assert http.post("/v1/score", json={"text_1": TEXTS}).status_code == 400


def test_scores_of_tokens(http: httpx.Client) -> None:
    body: dict[str, Any] = {"query": "is it?", "items": ["a", "bb"], "label_token_ids": [65, 66]}
    plain = http.post("/v1/score", json=body).json()
    assert plain["object"] == "scoring" and np.shape(plain["scores"]) == (2, 2)
    np.testing.assert_allclose(plain["scores"], np.exp(-3.0), rtol=1e-5)  # as the scripted engine says of any id
    assert plain["usage"]["prompt_tokens"] == 2 * 6 + 3
    shared = http.post("/v1/score", json={**body, "apply_softmax": True, "item_first": True}).json()
    np.testing.assert_allclose(shared["scores"], 0.5, rtol=1e-5)
    each = http.post("/v1/score", json={**body, "label_token_ids": [[65, 66], [67]], "apply_softmax": True}).json()
    assert each["scores"] == [pytest.approx([0.5, 0.5]), pytest.approx([np.exp(-3.0)])]
    for change in ({"label_token_ids": [[65]]}, {"label_token_ids": [65, [66]]}, {"label_token_ids": [[65], []]},
                   {"temperature": 0, "apply_softmax": True}, {"temperature": 2}, {"max_tokens_per_doc": 1},
                   {"score_extraction_token": "x"}, {"item_embed_overrides": [[[1.0]]]}):  # fmt: skip
        assert http.post("/v1/score", json={**body, **change}).status_code == 400, change
    assert http.post("/v1/score", json={**body, "items": []}).status_code == 400
    assert http.post("/v1/score", json={**body, "label_token_ids": [1 << 40]}).status_code == 400


def test_rerank(http: httpx.Client) -> None:
    body: dict[str, Any] = {"query": "the cat sat", "documents": ["日本", {"text": "the cat"}, "the cat sat"]}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        results = http.post(path, json=body).json()["results"]
        assert [r["index"] for r in results] == [2, 1, 0] and results[0]["relevance_score"] == pytest.approx(1)
        assert results[0]["document"] == {"text": "the cat sat"}
    (best,) = http.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert best["index"] == 2 and "document" not in best
    for name in ("instruct", "instruction"):
        told = http.post("/v1/rerank", json={**body, name: "find"}).json()["results"]
        asked = http.post("/v1/rerank", json={**body, "query": "find\nthe cat sat"}).json()["results"]
        assert told == asked != results
    short = http.post("/v1/rerank", json={**body, "max_tokens_per_query": 7, "max_tokens_per_doc": 7}).json()["results"]
    assert [r["relevance_score"] for r in short][:2] == [pytest.approx(1)] * 2  # "the cat" is what is left of both
    for change in ({"documents": []}, {"top_n": -1}, {"documents": [{"x": 1}]}, {"query": 3}):
        assert http.post("/v1/rerank", json={**body, **change}).status_code == 400


def test_cross_encoder(encoder: httpx.Client) -> None:
    body = {"query": "the cat", "documents": ["sat", "sat on the mat"]}
    results = encoder.post("/v1/rerank", json=body).json()["results"]
    assert [r["index"] for r in results] == [1, 0]
    raw = encoder.post("/v1/score", json={"text_1": "the cat", "text_2": "sat", "use_activation": False}).json()
    assert raw["data"][0]["score"] == len(ids("the catsat"))  # both texts were read as one


def test_classify(classifier: httpx.Client) -> None:
    answer = classifier.post("/v1/classify", json={"input": TEXTS}).json()
    scores = np.stack([pooled_vector(ids(text), 3) for text in TEXTS])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True)
    for i, entry in enumerate(answer["data"]):
        np.testing.assert_allclose(entry["probs"], expected[i], rtol=1e-5)
        assert entry["label"] == ("bad", "good", "odd")[int(expected[i].argmax())] and entry["num_classes"] == 3
    native = classifier.post("/classify", json={"text": TEXTS[0]}).json()
    assert native["embedding"] == scores[0].tolist()
    assert classifier.post("/classify", json={"input": TEXTS[0]}).json()["data"][0]["label"]


def test_models_without_the_task(http: httpx.Client, classifier: httpx.Client) -> None:
    no_head = http.post("/v1/classify", json={"input": "a"})
    assert no_head.status_code == 400 and "no classification head" in no_head.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert "generates none" in classifier.post("/v1/chat/completions", json=chat).json()["error"]["message"]
    assert classifier.post("/v1/score", json={"text_1": "a", "text_2": "b"}).status_code == 400


def test_accounting(server: Running, http: httpx.Client) -> None:
    body = {"input": TEXTS, "rid": "mine", "cache_salt": "s", "priority": 3}
    assert http.post("/v1/embeddings", json=body).json()["id"] == "mine"
    assert [r.rid for r in server.client.seen[-3:]] == ["mine-p0", "mine-p1", "mine-p2"]
    assert {(r.namespace.salt, r.priority) for r in server.client.seen[-3:]} == {("s", 3)}
    assert server.service.sequences == 0
