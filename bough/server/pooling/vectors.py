"""From texts to vectors, for all pooling endpoints, and the arithmetic on them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from bough.base.errors import InvalidRequest
from bough.base.messages import Namespace
from bough.base.params import PoolingParams
from bough.engine.generation import Embedding, GenerateOptions
from bough.server.options import encode_prompts, request_rids, salt_of, timeout_of
from bough.server.pooling.schema import UNSUPPORTED_POOLING, PoolingRequest
from bough.server.schema import refuse_unsupported
from bough.server.work import Call
from bough.text.memory import Bound

Floats = NDArray[np.float32]


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@dataclass(frozen=True, slots=True)
class Vectors:
    """``rows`` [N, D], not normalised, in the order of the prompts; ``response_id`` names the answer."""

    response_id: str
    rows: Floats
    embeddings: list[Embedding]

    def usage(self) -> PoolingUsage:
        n_prompt = sum(e.n_prompt for e in self.embeddings)
        return PoolingUsage(n_prompt, n_prompt, CachedTokens(sum(e.n_cached for e in self.embeddings)))


async def vectors(
    call: Call,
    body: PoolingRequest,
    prompts: Sequence[str | list[int]],
    prefix: str,
    pooling: PoolingParams | None = None,
    *,
    param: str = "input",
) -> Vectors:
    """The vectors of ``prompts``; ``prefix`` begins the answer's id. Raises what is wrong with the request."""
    service = call.service
    refuse_unsupported(body, UNSUPPORTED_POOLING)
    service.check_model(body.model)
    if len(prompts) > service.limits.batch_prompts:
        raise InvalidRequest(f"at most {service.limits.batch_prompts} texts are allowed in one request", param=param)
    special = body.add_special_tokens is not False
    bound = bounded(body, service.hello.model.context_length)
    given = list(prompts) if bound.keep == "whole" else [await _cut(call, each, bound, special) for each in prompts]
    encoded = await encode_prompts(call.engine, service, given, add_special=special, param=param, bound=bound)
    ids = [found.ids for found in encoded]
    rid = body.rid[0] if isinstance(body.rid, list) and body.rid else body.rid
    response_id, _ = request_rids(rid if isinstance(rid, str) else None, body.request_id, prefix, 1)
    names = [response_id] if len(ids) == 1 else [f"{response_id}-p{i}" for i in range(len(ids))]
    service.admit(call.flight, names, sum(map(len, ids)))
    options = GenerateOptions(
        namespace=Namespace(adapter=service.adapter(body.model, body.lora_path), salt=salt_of(None, body.cache_salt)),
        priority=body.priority or 0,
        timeout=timeout_of(body.timeout, service),
        rid=response_id,
    )
    found = await call.engine.embed(ids, pooling, options)
    return Vectors(response_id, np.stack([e.vector for e in found]), found)


def longest(body: PoolingRequest, context_length: int) -> int | None:
    """To how many ids a text is cut; None where it stays whole. Raises InvalidRequest."""
    length = body.truncate_prompt_tokens
    if length == -1:
        return context_length
    if length is not None and length < 1:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    return length


def bounded(body: PoolingRequest, context_length: int) -> Bound:
    """What is kept of a text. Raises InvalidRequest."""
    length = longest(body, context_length)
    if length is None:
        return Bound(context_length)
    return Bound(length, "end" if body.truncation_side == "left" else "begin")


async def _cut(call: Call, prompt: str | list[int], bound: Bound, special: bool) -> str | list[int]:
    """The ids of a text ``prompt``, which is cut within the model's frame: a vector may be of that."""
    if not isinstance(prompt, str):
        return prompt
    return await call.engine.tokenize_cut(prompt, bound.most, bound.keep == "end", special)


def cut(rows: Floats, dimensions: int | None) -> Floats:
    """``rows`` [N, D] cut to ``dimensions`` (Matryoshka embeddings, Kusupati et al. 2022)."""
    if dimensions is not None:
        if not 1 <= dimensions <= rows.shape[1]:
            raise InvalidRequest(f"dimensions must be in [1, {rows.shape[1]}], not {dimensions}", param="dimensions")
        rows = rows[:, :dimensions]
    return rows


def unit(rows: Floats, dimensions: int | None = None) -> Floats:
    """``rows`` [N, D] cut to ``dimensions``, then of length 1."""
    rows = cut(rows, dimensions)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def probabilities(scores: Floats) -> Floats:
    """[N, labels] scores -> probabilities: of a single label the sigmoid, of several the softmax."""
    if scores.shape[1] == 1:
        return np.asarray(0.5 * (1 + np.tanh(0.5 * scores)), np.float32)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def as_base64(row: Floats, dtype: str = "<f4") -> str:
    """By default little-endian float32, as OpenAI's client asks for it."""
    return base64.b64encode(row.astype(dtype).tobytes()).decode()
