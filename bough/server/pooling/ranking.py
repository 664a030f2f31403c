"""POST /v1/score and /v1/rerank: how well texts go together.

An embedding model compares the directions of two vectors. A classifier with a single label is a cross-encoder: it
reads both texts as one. A model that generates can be asked for the probabilities of given tokens behind both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import numpy as np

from bough.base.errors import InvalidRequest
from bough.base.messages import Namespace
from bough.base.params import PoolingParams, SamplingParams
from bough.base.validate import check_texts
from bough.engine.generation import GenerateOptions
from bough.server.answers import Tally, check_finish
from bough.server.errors import encode_json
from bough.server.merge import run_prompts
from bough.server.options import check_ids, encode_prompts, most_tokens, new_id, salt_of, sequence_rids, timeout_of
from bough.server.pooling.schema import UNSUPPORTED_PAIRS, Document, PairsRequest, RerankRequest, ScoreRequest
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
from bough.server.schema import refuse_unsupported
from bough.server.work import Call
from bough.text.memory import Bound

CLASSIFY = PoolingParams(kind="classify")


async def score(call: Call, body: ScoreRequest) -> bytes:
    """POST /v1/score."""
    refuse_unsupported(body, UNSUPPORTED_PAIRS)
    if body.label_token_ids is not None:
        refuse_unsupported(body, ("instruction", "max_tokens_per_query", "max_tokens_per_doc"))
        return await _label_scores(call, body)
    if body.temperature not in (None, 1.0):
        raise InvalidRequest("temperature is of label_token_ids; pairs of texts have none", param="temperature")
    left, left_name = _given(body, "text_1", "queries", "data_1", "query")
    right, right_name = _given(body, "text_2", "documents", "data_2", "items")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise InvalidRequest(f"{len(left)} texts cannot be paired with {len(right)}", param="text_1")
    found, scores = await _pair_scores(call, body, left, right, (left_name, right_name), body.instruction)
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
    refuse_unsupported(body, UNSUPPORTED_PAIRS)
    if not body.documents:
        raise InvalidRequest("documents is empty", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest("top_n must not be negative", param="top_n")
    texts = [_text(document, "documents") for document in body.documents]
    queries, names = [body.query] * len(texts), ("query", "documents")
    found, scores = await _pair_scores(call, body, queries, texts, names, body.instruct or body.instruction)
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
    call: Call, body: PairsRequest, left: list[str], right: list[str], names: tuple[str, str], instruction: str | None
) -> tuple[Vectors, list[float]]:
    """One number for each pair: the sigmoid of a cross-encoder's score, or the cosine of two embeddings.

    ``names`` are the fields of the two sides; an ``instruction`` stands before each text of the first.
    """
    n_chars = sum(map(len, (*left, *right))) + len(left) * len(instruction or "")
    check_texts(n_chars, call.service.limits, names[0])
    left = await _shortened(call, left, body.max_tokens_per_query, "max_tokens_per_query")
    right = await _shortened(call, right, body.max_tokens_per_doc, "max_tokens_per_doc")
    if instruction:
        left = [f"{instruction}\n{text}" for text in left]
    labels = call.service.hello.model.labels
    if len(labels) > 1:
        raise InvalidRequest(
            "this model has several labels; only models with one, and embedding models, score pairs", param="model"
        )
    if labels:
        most = longest(body, call.service.hello.model.context_length)
        special = body.add_special_tokens is not False
        pairs = [await call.engine.tokenize_pair(a, b, most, special) for a, b in zip(left, right)]
        found = await vectors(call, body, pairs, "score-", CLASSIFY, param=names[1])
        rows = found.rows if body.use_activation is False else probabilities(found.rows)
        return found, rows[:, 0].tolist()
    distinct = list(dict.fromkeys([*left, *right]))
    found = await vectors(call, body, distinct, "score-", param=names["" not in left])
    where, rows = {text: i for i, text in enumerate(distinct)}, unit(found.rows)
    first: Floats = rows[[where[text] for text in left]]
    return found, (first * rows[[where[text] for text in right]]).sum(1).tolist()


async def _shortened(call: Call, texts: list[str], most: int | None, param: str) -> list[str]:
    """``texts`` cut to their first ``most`` tokens; 0, as in vLLM, leaves them whole. Raises InvalidRequest."""
    if not most:
        return texts
    if most < 0:
        raise InvalidRequest(f"{param} must not be negative", param=param)
    cut = dict.fromkeys(texts, "")
    for text in cut:
        ids = await call.engine.tokenize(text, add_special=False, bound=Bound(most, "begin"))
        cut[text] = text if len(ids) <= most else call.engine.tokenizer.decode(ids[:most])
    return [cut[text] for text in texts]


def _given(body: ScoreRequest, *names: str) -> tuple[list[str], str]:
    """The texts of one side, and the one of its names under which they came."""
    for name in names:
        value = getattr(body, name)
        if value is not None:
            several = value if isinstance(value, list) else [value]
            if not several:
                raise InvalidRequest(f"{name} is empty", param=name)
            return [_text(text, name) for text in several], name
    raise InvalidRequest(f"{names[0]} is missing", param=names[0])


def _text(document: Document | list[int] | int, param: str) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must hold texts", param=param)
    return text


async def _label_scores(call: Call, body: ScoreRequest) -> bytes:
    """SGLang's scores: for each item the probabilities of ``label_token_ids``, or of its list of them, as the next."""
    service = call.service
    service.check_model(body.model)
    if body.query is None or not body.items or not body.label_token_ids:
        raise InvalidRequest("query, items and label_token_ids are needed together", param="label_token_ids")
    items = body.items if isinstance(body.items, list) else [body.items]
    labels, temperature = _labels(body, len(items), service.hello.model.vocab_size), _temperature(body)
    if len(items) > service.limits.batch_prompts:
        raise InvalidRequest(f"at most {service.limits.batch_prompts} items are allowed", param="items")
    query, *parts = await _encoded(call, [body.query, *items])
    prompts = [part + query if body.item_first else query + part for part in parts]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    name = new_id("score-")
    namespace = Namespace(adapter=service.adapter(body.model, body.lora_path), salt=salt_of(None, body.cache_salt))
    work = [
        (ids, GenerateOptions(
            params=msgspec.structs.replace(params, logprob_token_ids=labels[i]), rid=f"{name}-p{i}",
            namespace=namespace, priority=body.priority or 0, timeout=timeout_of(body.timeout, service),
        ))
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    service.admit(call.flight, sequence_rids([options for _, options in work]), most_tokens(service, work))
    tally, logprobs = Tally(), [np.zeros((1, len(ids)), np.float32) for ids in labels]
    async with aclosing(run_prompts(call.engine, service.metrics, work, call.started)) as pieces:
        async for i, chunk in pieces:
            tally.add(i, chunk)
            if chunk.finish is not None:
                check_finish(chunk.finish)
            if chunk.logprobs:
                logprobs[i][0] = [logprob for _, logprob in chunk.logprobs[0].asked]
    shared = [bool(body.apply_softmax) and len(ids) > 1 for ids in labels]
    scores = [probabilities(row / temperature) if among else np.exp(row) for row, among in zip(logprobs, shared)]
    n_prompt, n_cached = sum(tally.prompts.values()), sum(tally.cached.values())
    usage = PoolingUsage(n_prompt, n_prompt, CachedTokens(n_cached))
    shown = [row[0].tolist() for row in scores]
    return encode_json({"scores": shown, "model": service.model_name, "usage": usage, "object": "scoring"})


def _labels(body: ScoreRequest, n_items: int, vocab_size: int) -> list[tuple[int, ...]]:
    """The ids that are asked for behind each item. Raises InvalidRequest."""
    given = body.label_token_ids or []
    lists = [ids for ids in given if isinstance(ids, list)]
    if lists and (len(lists) != len(given) or len(lists) != n_items or not all(lists)):
        raise InvalidRequest(
            "label_token_ids must be ids, or one list of ids for each of the items", param="label_token_ids"
        )
    labels = lists or [[i for i in given if isinstance(i, int)]] * n_items
    for ids in labels:
        check_ids(ids, vocab_size, "label_token_ids")
    return [tuple(ids) for ids in labels]


def _temperature(body: ScoreRequest) -> float:
    """By which logprobs are divided before they become shares of one whole. Raises InvalidRequest."""
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0 < temperature < math.inf:
        raise InvalidRequest("temperature must be a positive number", param="temperature")
    if temperature != 1 and not body.apply_softmax:
        raise InvalidRequest("temperature needs apply_softmax, which compares the labels", param="temperature")
    return temperature


async def _encoded(call: Call, texts: Sequence[Document | list[int]]) -> list[list[int]]:
    """Ids of the query, with the special tokens of a beginning, and of the items."""
    prompts = [text if isinstance(text, list) else _text(text, "items") for text in texts]
    first = await encode_prompts(call.engine, call.service, prompts[:1], add_special=True, param="query")
    rest = await encode_prompts(call.engine, call.service, prompts[1:], add_special=False, param="items")
    return [prompt.ids for prompt in (*first, *rest)]
