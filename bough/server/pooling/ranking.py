"""POST /v1/score and /v1/rerank: how well texts go together.

An embedding model compares the directions of two vectors. A classifier with a single label is a cross-encoder: it
reads both texts as one. A model that generates can be asked for the probabilities of given tokens behind both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np

from bough.base.errors import InvalidRequest
from bough.base.messages import Namespace
from bough.base.params import PoolingParams, SamplingParams
from bough.engine.generation import GenerateOptions
from bough.server.answers import Tally, check_finish
from bough.server.errors import encode_json
from bough.server.merge import run_prompts
from bough.server.options import check_ids, encode_prompts, most_tokens, new_id, salt_of, sequence_rids, timeout_of
from bough.server.pooling.schema import Document, PoolingRequest, RerankRequest, ScoreRequest
from bough.server.pooling.vectors import (
    CachedTokens,
    Floats,
    PoolingUsage,
    Vectors,
    longest,
    probabilities,
    unit,
    vectors,
)
from bough.server.work import Call

CLASSIFY = PoolingParams(kind="classify")


async def score(call: Call, body: ScoreRequest) -> bytes:
    """POST /v1/score."""
    if body.label_token_ids is not None:
        return await _label_scores(call, body)
    left = _given(body, "text_1", "queries", "data_1", "query")
    right = _given(body, "text_2", "documents", "data_2", "items")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequest(f"{len(left)} texts cannot be paired with {len(right)}", param="text_1")
    found, scores = await _pair_scores(call, body, left, right, body.use_activation)
    return encode_json(
        {
            "id": found.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": call.service.model_name,
            "data": [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)],
            "usage": found.usage(),
        }
    )


async def rerank(call: Call, body: RerankRequest) -> bytes:
    """POST /v1/rerank: the documents, the best first."""
    if not body.documents:
        raise InvalidRequest("documents is empty", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n must not be negative", param="top_n")
    texts = [_text(document, "documents") for document in body.documents]
    query = f"{body.instruct}\n{body.query}" if body.instruct else body.query
    found, scores = await _pair_scores(call, body, [query] * len(texts), texts, body.use_activation)
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    results = []
    for i in order[: body.top_n or None]:
        result: dict[str, object] = {"index": i, "relevance_score": scores[i]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[i]}
        results.append(result)
    model = call.service.model_name
    return encode_json({"id": found.response_id, "model": model, "results": results, "usage": found.usage()})


async def _pair_scores(
    call: Call, body: PoolingRequest, left: list[str], right: list[str], activation: bool | None
) -> tuple[Vectors, list[float]]:
    """One number for each pair: the sigmoid of a cross-encoder's score, or the cosine of two embeddings."""
    labels = call.service.hello.model.labels
    if len(labels) > 1:
        raise InvalidRequest(
            "this model has several labels; only models with one, and embedding models, score pairs", param="model"
        )
    if labels:
        most = longest(body, call.service.hello.model.context_length)
        special = body.add_special_tokens is not False
        pairs = [await call.engine.tokenize_pair(a, b, most, special) for a, b in zip(left, right)]
        found = await vectors(call, body, pairs, "score-", CLASSIFY, param="text_2")
        rows = found.rows if activation is False else probabilities(found.rows)
        return found, rows[:, 0].tolist()
    distinct = list(dict.fromkeys([*left, *right]))
    found = await vectors(call, body, distinct, "score-", param="text_1")
    where, rows = {text: i for i, text in enumerate(distinct)}, unit(found.rows)
    first: Floats = rows[[where[text] for text in left]]
    return found, (first * rows[[where[text] for text in right]]).sum(1).tolist()


def _given(body: ScoreRequest, *names: str) -> list[str]:
    """The texts of one side, under whichever of its names."""
    for name in names:
        value = getattr(body, name)
        if value is not None:
            several = value if isinstance(value, list) else [value]
            if not several:
                raise InvalidRequest(f"{name} is empty", param=name)
            return [_text(text, name) for text in several]
    raise InvalidRequest(f"{names[0]} is missing", param=names[0])


def _text(document: Document | list[int] | int, param: str) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must hold texts", param=param)
    return text


async def _label_scores(call: Call, body: ScoreRequest) -> bytes:
    """SGLang's scores: for each item the probabilities of ``label_token_ids`` as the next token."""
    service, labels = call.service, body.label_token_ids or []
    service.check_model(body.model)
    check_ids(labels, service.hello.model.vocab_size, "label_token_ids")
    if body.query is None or not body.items or not labels:
        raise InvalidRequest("query, items and label_token_ids are needed together", param="label_token_ids")
    items = body.items if isinstance(body.items, list) else [body.items]
    if len(items) > service.limits.batch_prompts:
        raise InvalidRequest(f"at most {service.limits.batch_prompts} items are allowed", param="items")
    query, *parts = await _encoded(call, [body.query, *items])
    prompts = [part + query if body.item_first else query + part for part in parts]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(labels))
    name = new_id("score-")
    namespace = Namespace(adapter=service.adapter(body.model, body.lora_path), salt=salt_of(None, body.cache_salt))
    work = [
        (ids, GenerateOptions(
            params=params, rid=f"{name}-p{i}",
            namespace=namespace, priority=body.priority or 0, timeout=timeout_of(body.timeout, service),
        ))
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    service.admit(call.flight, sequence_rids([options for _, options in work]), most_tokens(service, work))
    tally, scores = Tally(), np.zeros((len(prompts), len(labels)), np.float32)
    async with aclosing(run_prompts(call.engine, service.metrics, work, call.started)) as pieces:
        async for i, chunk in pieces:
            tally.add(i, chunk)
            if chunk.finish is not None:
                check_finish(chunk.finish)
            if chunk.logprobs:
                scores[i] = [logprob for _, logprob in chunk.logprobs[0].asked]
    scores = probabilities(scores) if body.apply_softmax and len(labels) > 1 else np.exp(scores)
    n_prompt, n_cached = sum(tally.prompts.values()), sum(tally.cached.values())
    usage = PoolingUsage(n_prompt, n_prompt, CachedTokens(n_cached))
    return encode_json(
        {"scores": scores.tolist(), "model": service.model_name, "usage": usage, "object": "scoring"}
    )  # fmt: skip


async def _encoded(call: Call, texts: Sequence[Document | list[int]]) -> list[list[int]]:
    """Ids of the query, with the special tokens of a beginning, and of the items."""
    prompts = [text if isinstance(text, list) else _text(text, "items") for text in texts]
    first = await encode_prompts(call.engine, call.service, prompts[:1], add_special=True, param="query")
    rest = await encode_prompts(call.engine, call.service, prompts[1:], add_special=False, param="items")
    return [prompt.ids for prompt in (*first, *rest)]
