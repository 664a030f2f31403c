"""The workloads of ``bough bench serve``, by ids and without HTTP: what the engine and the device make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.play import Ask, random_ids
from benchmarks.gpu.shapes import Shape
from bough.base.constraint import Constraint
from bough.base.params import SamplingParams
from bough.base.plan import Ints
from bough.bench.workloads import person_schema

Sizes = dict[str, int]
Workload = Callable[[np.random.Generator, int, Sizes], list[Ask]]

SIZES: dict[str, Sizes] = {
    "independent": {"requests": 256, "prompt": 512, "out": 128},
    "chat": {"conversations": 32, "turns": 6, "system": 400, "user": 100, "out": 64},
    "rag": {"requests": 64, "context": 6000, "question": 50, "out": 32},
    "bestof": {"prompts": 16, "n": 16, "prompt": 1536, "out": 64},
    "json": {"requests": 64, "prompt": 64, "out": 96},
}

TINY: dict[str, Sizes] = {
    "independent": {"requests": 3, "prompt": 9, "out": 3},
    "chat": {"conversations": 2, "turns": 2, "system": 8, "user": 4, "out": 3},
    "rag": {"requests": 3, "context": 24, "question": 3, "out": 2},
    "bestof": {"prompts": 1, "n": 3, "prompt": 12, "out": 3},
    "json": {"requests": 2, "prompt": 5, "out": 4},
}


def independent(rng: np.random.Generator, vocab_size: int, s: Sizes) -> list[Ask]:
    """Prompts that share nothing."""
    return [Ask(random_ids(rng, s["prompt"], vocab_size), s["out"]) for _ in range(s["requests"])]


def chat(rng: np.random.Generator, vocab_size: int, s: Sizes) -> list[Ask]:
    """Conversations with one system message; each turn sends everything before it again."""
    system = random_ids(rng, s["system"], vocab_size)

    def turn(before: Ints, left: int) -> Ask:
        prompt = np.concatenate((before, random_ids(rng, s["user"], vocab_size)))

        def then(tokens: list[int]) -> Ask | None:
            return turn(np.concatenate((prompt, np.array(tokens, np.int32))), left - 1) if left > 1 else None

        return Ask(prompt, s["out"], then=then)

    return [turn(system, s["turns"]) for _ in range(s["conversations"])]


def rag(rng: np.random.Generator, vocab_size: int, s: Sizes) -> list[Ask]:
    """Many questions of one document."""
    context = random_ids(rng, s["context"], vocab_size)
    questions = [random_ids(rng, s["question"], vocab_size) for _ in range(s["requests"])]
    return [Ask(np.concatenate((context, question)), s["out"]) for question in questions]


def bestof(rng: np.random.Generator, vocab_size: int, s: Sizes) -> list[Ask]:
    """A few prompts, each sampled ``n`` times."""
    prompts = [random_ids(rng, s["prompt"], vocab_size) for _ in range(s["prompts"])]
    drawn = [SamplingParams(temperature=0.7, top_p=0.9, seed=i, ignore_eos=True) for i in range(s["n"])]
    return [Ask(prompt, s["out"], params) for prompt in prompts for params in drawn]


def objects(rng: np.random.Generator, vocab_size: int, s: Sizes) -> list[Ask]:
    """Objects under a JSON schema; answers may end before the limit."""
    schema = Constraint(kind="json_schema", text=json.dumps(person_schema()))
    params = SamplingParams(temperature=0.0)
    return [Ask(random_ids(rng, s["prompt"], vocab_size), s["out"], params, schema) for _ in range(s["requests"])]


WORKLOADS: dict[str, Workload] = {
    "independent": independent, "chat": chat, "rag": rag, "bestof": bestof, "json": objects,
}  # fmt: skip

WORTH: dict[str, tuple[str, ...]] = {
    "independent": ("no overlap", "no radix"),
    "chat": ("no radix",),
    "rag": ("no cascade", "no radix"),
    "bestof": ("no cascade", "no radix"),
    "json": ("no jump",),
}
"""Workload -> the features that it shows the worth of."""


def asks(name: str, vocab_size: int, tiny: bool, seed: int) -> list[Ask]:
    """The requests of a workload; another seed, other prompts."""
    sizes = (TINY if tiny else SIZES)[name]
    return WORKLOADS[name](np.random.default_rng(seed), vocab_size, sizes)


def most_cells(shape: Shape) -> int:
    """What the requests of the largest workload need, all at once and sharing nothing: less would slow down a run
    without the tree by more than the tree's absence."""
    return max(
        sum(len(ask.prompt) + ask.n_out + 1 for ask in asks(name, shape.vocab_size, False, 0)) for name in WORKLOADS
    )


def summary(figures: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """``figures`` without a feature, and how many times as fast the engine is with it."""
    return figures | {"worth": round(figures["seconds"] / whole["seconds"], 3)}
