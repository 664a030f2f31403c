"""POST /v1/embeddings, /v1/classify, /encode and /classify."""

from __future__ import annotations

import time
from typing import Any

from bough.base.errors import InvalidRequest
from bough.base.params import PoolingParams
from bough.server.chat import render
from bough.server.errors import encode_json
from bough.server.options import split_prompt
from bough.server.pooling.schema import UNSUPPORTED_EMBEDDINGS, ClassifyRequest, EmbeddingsRequest, EncodeRequest
from bough.server.pooling.vectors import Vectors, as_base64, bounded, cut, probabilities, unit, vectors
from bough.server.schema import TokenizeRequest, refuse_unsupported
from bough.server.work import Call

CLASSIFY = PoolingParams(kind="classify")


async def embeddings(call: Call, body: EmbeddingsRequest) -> bytes:
    """POST /v1/embeddings: one vector of length 1 per text."""
    refuse_unsupported(body, UNSUPPORTED_EMBEDDINGS)
    found = await vectors(call, body, await _texts(call, body), "embd-")
    plain = body.use_activation is False or body.normalize is False
    rows = cut(found.rows, body.dimensions) if plain else unit(found.rows, body.dimensions)
    dtype = (">" if body.endianness == "big" else "<") + ("f2" if body.embed_dtype == "float16" else "f4")
    shown: list[Any] = [as_base64(row, dtype) for row in rows] if body.encoding_format == "base64" else rows.tolist()
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
    return _listed(call, found, data)


async def _texts(call: Call, body: EmbeddingsRequest) -> list[str | list[int]]:
    """The texts of ``input``, or the one conversation of vLLM's ``messages``."""
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("exactly one of input and messages must be given", param="input")
    if body.input is not None:
        return split_prompt(body.input, call.service.limits, "input")
    chat = TokenizeRequest(
        messages=body.messages, add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
    bound = bounded(body, call.service.hello.model.context_length)
    return [await render(call.engine, call.service, chat, bound)]


async def classify(call: Call, body: ClassifyRequest) -> bytes:
    """POST /v1/classify: the probabilities of the model's labels."""
    if body.input is None:
        raise InvalidRequest("input is missing", param="input")
    prompts = split_prompt(body.input, call.service.limits, "input")
    found = await vectors(call, body, prompts, "classify-", CLASSIFY)
    rows = found.rows if body.use_activation is False else probabilities(found.rows)
    labels = call.service.hello.model.labels
    data = [
        {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in enumerate(rows)
    ]
    return _listed(call, found, data)


async def classify_native(call: Call, body: ClassifyRequest) -> bytes:
    """POST /classify: as /v1/classify, or with SGLang's fields the scores as they are."""
    if body.input is not None:
        return await classify(call, body)
    found, single = await _native(call, body, body.text, body.input_ids, CLASSIFY)
    return _native_answer(found, found.rows.tolist(), single)


async def encode(call: Call, body: EncodeRequest) -> bytes:
    """POST /encode: SGLang's way to ask for embeddings."""
    found, single = await _native(call, body, body.text, body.input_ids, None)
    return _native_answer(found, unit(found.rows, body.dimensions).tolist(), single)


async def _native(
    call: Call,
    body: ClassifyRequest | EncodeRequest,
    text: str | list[str] | None,
    input_ids: list[int | list[int]] | None,
    pooling: PoolingParams | None,
) -> tuple[Vectors, bool]:
    """(vectors, whether a single text was given and not a list)."""
    if (text is None) == (input_ids is None):
        raise InvalidRequest("exactly one of text and input_ids must be given", param="text")
    param = "text" if text is not None else "input_ids"
    prompts = split_prompt(text if text is not None else input_ids or [], call.service.limits, param)
    single = isinstance(text, str) or (input_ids is not None and isinstance(input_ids[0], int))
    return await vectors(call, body, prompts, "embd-", pooling, param=param), single


def _native_answer(found: Vectors, rows: list[list[float]], single: bool) -> bytes:
    answers = [
        {
            "embedding": row,
            "meta_info": {
                "id": found.response_id, "prompt_tokens": e.n_prompt, "cached_tokens": e.n_cached,
                "finish_reason": {"type": "stop"},
            },
        }
        for row, e in zip(rows, found.embeddings)
    ]  # fmt: skip
    return encode_json(answers[0] if single else answers)


def _listed(call: Call, found: Vectors, data: list[Any]) -> bytes:
    return encode_json(
        {
            "id": found.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": call.service.model_name,
            "data": data,
            "usage": found.usage(),
        }
    )
