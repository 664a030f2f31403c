"""The client of ``bough bench serve`` in the dialects of servers that do not take every field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bough.bench.client import Client
from bough.bench.measures import Call


class SeedlessClient(Client):
    """For vLLM on a CPU, whose engine ends at a sampled request with a seed."""

    def body(self, prompt: dict[str, Any], tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        return super().body(prompt, tokens, {k: v for k, v in fields.items() if k != "seed"})


class SingleChoiceClient(Client):
    """For servers without ``n``: it becomes as many requests at once, counted as one of ``n`` choices."""

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> Call:
        n, seed = int(fields.pop("n", 1)), int(fields.pop("seed", 0))
        if n == 1:
            return await super().complete(prompt, tokens, **fields)
        send = super().complete
        return joined(await asyncio.gather(*(send(prompt, tokens, seed=seed * 1000 + i, **fields) for i in range(n))))


class TransformersClient(SingleChoiceClient):
    """For ``transformers serve``, which refuses fields it does not know and takes generation settings as text."""

    def body(self, prompt: dict[str, Any], tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        body = super().body(prompt, tokens, fields)
        temperature = body["temperature"]
        settings = {"max_new_tokens": tokens, "do_sample": temperature > 0}
        if temperature > 0:
            settings["temperature"] = temperature
        if body.get("ignore_eos"):
            settings["eos_token_id"] = -1
        known = ("model", "prompt", "messages", "max_tokens", "temperature", "stream", "response_format")
        return {k: v for k, v in body.items() if k in known} | {"generation_config": json.dumps(settings)}


def joined(parts: list[Call]) -> Call:
    """Calls of one choice each as one call; the prompt counts once, as servers with ``n`` count it."""
    call = Call(sum(p.asked for p in parts), min(p.start for p in parts), max(p.end for p in parts))
    for i, part in enumerate(parts):
        call.texts[i] = part.texts.get(0, "")
        call.finish[i] = part.finish.get(0, "")
        if 0 in part.stamps:
            call.stamps[i] = part.stamps[0]
        call.n_generated += part.n_generated
        call.n_prompt = part.n_prompt
        if part.n_cached is not None:
            call.n_cached = (call.n_cached or 0) + part.n_cached
        call.error = call.error or part.error
    return call


DIALECTS: dict[str, type[Client]] = {
    "standard": Client,
    "no-seed": SeedlessClient,
    "no-n": SingleChoiceClient,
    "transformers": TransformersClient,
}
"""Name -> client."""
