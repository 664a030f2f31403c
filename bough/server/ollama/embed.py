"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import time

from bough.server.errors import encode_json
from bough.server.ollama.answer import NANO
from bough.server.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from bough.server.ollama.translate import model_of
from bough.server.pooling.schema import PoolingRequest
from bough.server.pooling.vectors import unit, vectors
from bough.server.work import Call


async def embed(call: Call, body: OllamaEmbedRequest) -> bytes:
    """POST /api/embed: vectors of length 1."""
    request = PoolingRequest(model=model_of(call.service, body.model))
    request.truncate_prompt_tokens = None if body.truncate is False else -1
    prompts = [body.input] if isinstance(body.input, str) else body.input
    rows: list[list[float]] = []
    n_prompt = 0
    if prompts:
        found = await vectors(call, request, prompts, "embd-")
        rows, n_prompt = unit(found.rows, body.dimensions).tolist(), found.usage().prompt_tokens
    return encode_json(
        {
            "model": call.service.model_name,
            "embeddings": rows,
            "total_duration": int((time.perf_counter() - call.started) * NANO),
            "load_duration": 0,
            "prompt_eval_count": n_prompt,
        }
    )


async def embeddings_of_one(call: Call, body: OllamaEmbeddingsRequest) -> bytes:
    """POST /api/embeddings: one vector, as the model computed it."""
    request = PoolingRequest(model=model_of(call.service, body.model), truncate_prompt_tokens=-1)
    found = await vectors(call, request, [body.prompt], "embd-", param="prompt")
    return encode_json({"embedding": found.rows[0].tolist()})
