"""The least time a workload can take: the machine's limits, and the work that no engine can avoid.

All weights and the attended KV are read once per decode step at the read bandwidth, or the step's products
run at the matrix rate if that takes longer; prompts are computed at the matrix rate, attention included.
Every distinct prefix is computed once and read once per step, whoever shares it; nothing else costs anything.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.bench.client import Client
from bough.bench.measures import Call
from bough.bench.text import words
from bough.bench.workloads import Sizes, Workload
from bough.text.chat_template import ChatTemplate, sources_from_folder
from bough.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates of the machine: reading memory (10^9 bytes/s), products of bfloat16 and int8 (10^9 op/s).

    Attributes:
        others_gflop_s: of products of bfloat16 or floats by others than bough; 0 where it was not measured.
    """

    read_gb_s: float
    bf16_gflop_s: float
    int8_gop_s: float
    others_gflop_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes per parameter of the layers and of the embedding (the output layer too), and whether products are int8."""

    layer_bytes: float
    head_bytes: float
    int8: bool


WEIGHTS = {16: Weights(2.0, 2.0, False), 8: Weights(1.0, 1.0, True), 4: Weights(0.5625, 1.0, True)}
"""Bits -> weights; 4 bits with a 16-bit scale for each 32 values, and an output layer of 8 bits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cost of a Llama depends on."""

    layer_parameters: int
    head_parameters: int
    kv_bytes: int
    pair_flop: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From a Hugging Face configuration; ``kv_bytes`` per token in 16 bits, ``pair_flop`` per query and key."""
        hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        per_layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
        return cls(layers * per_layer, config["vocab_size"] * hidden, 4 * layers * kv, 4 * layers * q)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload: prompt ids, tokens per choice, choices, and prompt tokens that it had generated."""

    prompt: tuple[int, ...]
    out: int
    n: int
    own: int


class Recorder(Client):
    """Takes the place of a server's client and keeps what a workload asks, in the order in which it is sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", "", "")
        self.asks: list[Ask] = []
        self._tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate(sources_from_folder(folder), self._tokenizer)
        self._rng = random.Random(0)

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> Call:
        """Keep the request."""
        return await self._keep(self._tokenizer.encode(prompt, add_special=True), tokens, fields, 0)

    async def chat(self, messages: list[dict[str, str]], tokens: int, **fields: Any) -> Call:
        """Keep the request; its last answer was generated in the turn before."""
        ids = self._tokenizer.encode_chat(self._template.render(messages))
        answered = any(m["role"] == "assistant" for m in messages)
        return await self._keep(ids, tokens, fields, tokens if answered else 0)

    async def _keep(self, ids: list[int], tokens: int, fields: dict[str, Any], own: int) -> Call:
        self.asks.append(Ask(tuple(ids), tokens, int(fields.get("n", 1)), own))
        # As with a server, whatever may be sent beside this is sent before the answer comes.
        await asyncio.sleep(0)
        return Call(asked=tokens, start=0.0, texts={0: words(self._rng, tokens)})


def record(folder: Path, workload: Workload, sizes: Sizes, seed: str) -> list[Ask]:
    """The requests of a workload on a model."""
    recorder = Recorder(folder)

    async def send() -> None:
        await workload.run(recorder, sizes, random.Random(seed))

    asyncio.run(send())
    return recorder.asks


def unique(prompts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Distinct prefixes of all prompts together, and the sum of their lengths.

    A prefix of length d is one token to compute, with d keys to attend to.
    """
    count = pairs = 0
    before: tuple[int, ...] = ()
    for prompt in sorted(prompts):
        shared = 0
        for a, b in zip(before, prompt):
            if a != b:
                break
            shared += 1
        count += len(prompt) - shared
        pairs += (len(prompt) * (len(prompt) + 1) - shared * (shared + 1)) // 2
        before = prompt
    return count, pairs


def floor(asks: Sequence[Ask], concurrency: int, shape: Shape, weights: Weights, limits: Limits) -> float:
    """Seconds that the requests take at least, ``concurrency`` of them at a time."""
    rate = (limits.int8_gop_s if weights.int8 else limits.bf16_gflop_s) * 1e9
    matrix = limits.bf16_gflop_s * 1e9
    count, pairs = unique([a.prompt for a in asks])
    new = (count - sum(a.own for a in asks)) / count
    seconds = new * (count * 2 * shape.layer_parameters / rate + pairs * shape.pair_flop / matrix)
    stored = shape.layer_parameters * weights.layer_bytes + shape.head_parameters * weights.head_bytes
    parameters = shape.layer_parameters + shape.head_parameters
    for start in range(0, len(asks), concurrency):
        wave = asks[start : start + concurrency]
        rows, steps = sum(a.n for a in wave), max(a.out for a in wave) - 1
        tokens = unique([a.prompt for a in wave])[0] + rows * steps / 2
        read = (stored + tokens * shape.kv_bytes) / (limits.read_gb_s * 1e9)
        seconds += steps * max(read, rows * 2 * parameters / rate)
    return seconds


def shape_of(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face folder."""
    return Shape.of(json.loads((folder / "config.json").read_text()))
