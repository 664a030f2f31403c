"""Endpoints that describe the server and its model, and those that operate it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bough import __version__
from bough.base.config import Config
from bough.base.errors import InvalidRequest, Unavailable
from bough.base.validate import check_texts
from bough.server.chat import render
from bough.server.errors import Forbidden, ModelNotFound, encode_json
from bough.server.options import begun, check_ids
from bough.server.schema import AbortRequest, DetokenizeRequest, TokenizeRequest
from bough.server.service import Service
from bough.server.work import Call

Endpoint = Callable[[Request], Awaitable[Response]]
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


PROGRAM_PROTOCOL = 1
"""Says to clients that requests may carry the envelope of a program."""

FLUSH_PAUSE = 0.05
"""Seconds between two attempts to empty the cache."""


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 3600:
        raise InvalidRequest("timeout must be a number of seconds in [0, 3600]", param="timeout")
    return seconds


def as_json(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


class Info:
    """Handlers without a body. Readiness and health are answered from memory alone."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def health(self, request: Request) -> Response:
        """200 whenever this process answers at all."""
        return as_json({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 when a request could be served now: the engine makes progress and nothing is shutting down."""
        problems = self.service.problems()
        if problems:
            headers = {"retry-after": "1"}
            body = encode_json({"status": "unready", "problems": problems})
            return Response(body, 503, headers, media_type="application/json")
        return as_json({"status": "ready", "problems": []})

    async def models(self, request: Request) -> Response:
        adapters = await self._adapters()
        cards = [self._card(), *(self._adapter_card(name, path) for name, path in adapters.items())]
        return as_json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name == self.service.model_name:
            return as_json(self._card())
        adapters = await self._adapters()
        if name not in adapters:
            raise ModelNotFound(f"the model {name[:256]!r} does not exist", param="model")
        return as_json(self._adapter_card(name, adapters[name]))

    async def _adapters(self) -> dict[str, str]:
        """Names and folders of the adapters that are loaded."""
        service = self.service
        if service.config.lora.lora_dir is None or service.engine is None:
            return {}
        reply = await service.engine.client.control("list_adapters")
        return {name: str(path) for name, path in reply.info.items()}

    def _adapter_card(self, name: str, path: str) -> dict[str, Any]:
        return {**self._card(), "id": name, "root": path, "parent": self.service.model_name}

    def _card(self) -> dict[str, Any]:
        service, model = self.service, self.service.hello.model
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "bough",
            "root": model.path,
            "parent": None,
            "max_model_len": model.context_length,
        }

    async def model_info(self, request: Request) -> Response:
        model = self.service.hello.model
        return as_json(
            {
                "model_path": model.path,
                "tokenizer_path": model.path,
                "served_model_name": self.service.model_name,
                "is_generation": model.generates,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": model.architecture,
                "architectures": [model.architecture],
                "vocab_size": model.vocab_size,
                "context_length": model.context_length,
                "dtype": model.dtype,
                "n_parameters": model.n_parameters,
                "program_protocol": PROGRAM_PROTOCOL,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """Version, configuration, limits, model, and the engine's last heartbeat."""
        service = self.service
        engine = service.engine
        hello = engine.client.hello if engine is not None else None
        stats = engine.client.stats if engine is not None else None
        config = _shown(service.config)
        if hello is not None:
            config["schedule"] = msgspec.to_builtins(hello.schedule)
        limits = config.pop("limits")
        return as_json(
            {
                "version": __version__,
                "status": "ready" if not service.problems() else "unready",
                "problems": service.problems(),
                "uptime_seconds": time.monotonic() - service.started,
                "requests_in_flight": service.in_flight,
                "config": config,
                "limits": limits,
                "model": None if hello is None else msgspec.to_builtins(hello.model),
                "max_total_num_tokens": None if hello is None else hello.pool_tokens,
                "page_size": None if hello is None else hello.page_size,
                "kv_cache": []
                if hello is None
                else [{**msgspec.to_builtins(k), "bytes": k.bytes} for k in hello.cache],
                "stats": None if stats is None else msgspec.to_builtins(stats),
            }
        )

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.render(), media_type=PROMETHEUS)

    async def flush_cache(self, request: Request) -> Response:
        """Drop from the cache what no running sequence uses; 400 where that is not all of it.

        ``?timeout=`` waits that many seconds for the running sequences to end. As in SGLang, except that what
        nobody uses is dropped in any case.
        """
        if self.service.engine is None:
            raise Unavailable("the model is still loading", retry_after=2.0)
        deadline = time.monotonic() + _seconds(request.query_params.get("timeout", "0"))
        while True:
            reply = await self.service.engine.client.control("flush_cache")
            kept = reply.info.get("kept")
            if not kept:
                return Response("Cache flushed.\n", media_type="text/plain")
            if time.monotonic() >= deadline:
                raise InvalidRequest(f"running sequences use {kept} tokens of the cache", code="cache_in_use")
            await asyncio.sleep(FLUSH_PAUSE)


def _shown(config: Config) -> dict[str, Any]:
    """The configuration without what is secret."""
    shown: dict[str, Any] = msgspec.to_builtins(config)
    for section in dataclasses.fields(config):
        for f in dataclasses.fields(getattr(config, section.name)):
            if f.metadata.get("secret"):
                del shown[section.name][f.name]
    return shown


async def tokenize(call: Call, body: TokenizeRequest) -> bytes:
    """Ids of a prompt, of several, or of messages; in the fields that clients of SGLang and vLLM read."""
    service, engine = call.service, call.engine
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is needed, and not both", param="prompt")
    tokens: list[int] | list[list[int]]
    if body.messages is not None:
        tokens = await render(engine, service, body)
    else:
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        if len(given) > service.limits.batch_prompts:
            raise InvalidRequest(f"at most {service.limits.batch_prompts} prompts are allowed", param="prompt")
        if body.prefix is not None:
            given = begun(service, call.principal.tenant, body.prefix, given, "prompt")
        check_texts(sum(map(len, given)), service.limits, "prompt")
        lists = [await engine.tokenize(text, body.add_special_tokens is not False) for text in given]
        tokens = lists if isinstance(body.prompt, list) else lists[0]
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": [len(t) if isinstance(t, list) else 1 for t in tokens]
        if isinstance(body.prompt, list)
        else len(tokens),
        "max_model_len": service.hello.model.context_length,
    }
    if body.return_token_strs:
        answer["token_strs"] = [
            engine.tokenizer.token_text(t) if isinstance(t, int) else [engine.tokenizer.token_text(i) for i in t]
            for t in tokens
        ]
    return encode_json(answer)


async def detokenize(call: Call, body: DetokenizeRequest) -> bytes:
    """The text of ids, or of each of several lists of ids."""
    service, engine = call.service, call.engine
    service.check_model(body.model)
    vocab_size = service.hello.model.vocab_size
    flat = [t for t in body.tokens if isinstance(t, int)]
    lists = [t for t in body.tokens if isinstance(t, list)]
    if flat and lists:
        raise InvalidRequest("tokens must be a list of ids or a list of such lists", param="tokens")
    for ids in (flat, *lists):
        check_ids(ids, vocab_size, "tokens")
    skip = body.skip_special_tokens is not False
    text: str | list[str] = (
        [engine.tokenizer.decode(ids, skip_special=skip) for ids in lists]
        if lists
        else engine.tokenizer.decode(flat, skip_special=skip)
    )
    return encode_json({"text": text, "prompt": text})


async def abort_request(call: Call, body: AbortRequest) -> bytes:
    """Stop one request of the same tenant with all its sequences; operators may stop all. Unknown ids are ignored."""
    if body.abort_all:
        if "admin" not in call.principal.scopes:
            raise Forbidden("abort_all needs a key with the scope admin")
        return encode_json({"aborted": call.service.abort_all()})
    if not body.rid:
        raise InvalidRequest("rid or abort_all is needed", param="rid")
    return encode_json({"aborted": call.service.abort(body.rid, call.principal.tenant)})
