"""Ollama's routes that describe the server and its model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bough.base.errors import InvalidRequest
from bough.server.errors import encode_json
from bough.server.info import as_json
from bough.server.ollama.schema import OllamaShowRequest
from bough.server.ollama.translate import model_of
from bough.server.service import Service
from bough.server.work import Call

API_VERSION = "0.12.6"
"""The version of Ollama whose API these routes speak; clients refuse to talk to much older ones."""
_BYTES = {"bfloat16": 2, "float32": 4}


class About:
    """Handlers without a body, and that of /api/show."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def running(self, request: Request) -> Response:
        """GET and HEAD of the root, by which clients see that there is a server."""
        return Response("Ollama is running", media_type="text/plain")

    async def version(self, request: Request) -> Response:
        return as_json({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        """The models that can be used."""
        return as_json({"models": [self._model() | {"modified_at": self._created()}]})

    async def ps(self, request: Request) -> Response:
        """The models that are loaded."""
        model = self.service.hello.model
        loaded = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": model.context_length}
        return as_json({"models": [self._model() | loaded]})

    async def show(self, call: Call, body: OllamaShowRequest) -> bytes:
        """POST /api/show."""
        service, model = call.service, call.service.hello.model
        name = body.model or body.name
        if not name:
            raise InvalidRequest("model is required", param="model")
        service.check_model(model_of(service, name))
        template = call.engine.template
        facts = {
            "general.architecture": model.architecture,
            "general.parameter_count": model.n_parameters,
            f"{model.architecture}.context_length": model.context_length,
            f"{model.architecture}.vocab_size": model.vocab_size,
        }
        return encode_json(
            {
                "modelfile": f"FROM {service.model_name}\n",
                "parameters": "",
                "template": "" if template is None else template.source,
                "modified_at": self._created(),
                "details": self._details(),
                "model_info": facts,
                "capabilities": self._capabilities(),
            }
        )

    def _capabilities(self) -> list[str]:
        form, generates = self.service.form, self.service.hello.model.generates
        able = {
            "completion": generates, "tools": generates and form.tools is not None,
            "thinking": generates and form.reasoning is not None, "embedding": True,
        }  # fmt: skip
        return [name for name, has in able.items() if has]

    def _model(self) -> dict[str, Any]:
        name, model = self.service.model_name, self.service.hello.model
        return {
            "name": name,
            "model": name,
            "size": model.n_parameters * _BYTES[model.dtype],
            "digest": hashlib.sha256(msgspec.json.encode(model)).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        model = self.service.hello.model
        millions = model.n_parameters / 1e6
        return {
            "parent_model": "",
            "format": "gguf" if model.path.endswith(".gguf") else "safetensors",
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.2f}M",
            "quantization_level": model.dtype.upper(),
        }

    def _created(self) -> str:
        return datetime.fromtimestamp(self.service.created, UTC).isoformat().replace("+00:00", "Z")
