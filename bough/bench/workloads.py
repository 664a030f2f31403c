"""The workloads of ``bough bench serve``: what is sent, how large it is, and how much of it at once.

Text depends only on (seed, workload, repeat), never on the server, and every repeat has its own: what a
repeat finds in a prefix cache was put there by the same repeat.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from bough.bench.client import Client
from bough.bench.measures import Call
from bough.bench.text import words

Sizes = dict[str, float]
Job = Callable[[], Awaitable[list[Call]]]
Run = Callable[[Client, Sizes, random.Random], Awaitable[list[Call]]]


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        title: what it stands for.
        run: sends it, returns its calls in order.
        sizes: counts and lengths in tokens; each can be changed from the command line.
        warm: the sizes of the small copy that is sent first and not measured.
    """

    title: str
    run: Run
    sizes: Sizes
    warm: Sizes


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """What the ``json`` workload asks for; the schema is derived from it and answers are checked against it."""

    name: Annotated[str, msgspec.Meta(min_length=2, max_length=20)]
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    city: Literal["London", "Paris", "Tokyo", "New York", "Cairo"]
    is_student: bool
    hobbies: Annotated[
        list[Literal["reading", "music", "sport", "cooking", "travel"]], msgspec.Meta(min_length=1, max_length=3)
    ]


def person_schema() -> dict[str, object]:
    """JSON Schema of :class:`Person`, without references and annotations."""
    _, components = msgspec.json.schema_components([Person])
    return {key: value for key, value in components["Person"].items() if key not in ("title", "description")}


def valid(text: str) -> bool:
    """Whether ``text`` is JSON of a :class:`Person`."""
    try:
        msgspec.json.decode(text, type=Person)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True


async def gather(jobs: Sequence[Job], concurrency: float) -> list[Call]:
    """Run the jobs, at most ``concurrency`` at once, started in order; their calls in the jobs' order."""
    results: list[list[Call]] = [[] for _ in jobs]
    waiting = iter(enumerate(jobs))

    async def worker() -> None:
        for i, job in waiting:
            results[i] = await job()

    await asyncio.gather(*(worker() for _ in range(min(int(concurrency), len(jobs)))))
    return [call for calls in results for call in calls]


def _completions(client: Client, prompts: Sequence[str], tokens: float) -> list[Job]:
    def job(prompt: str) -> Job:
        async def send() -> list[Call]:
            return [await client.complete(prompt, int(tokens))]

        return send

    return [job(prompt) for prompt in prompts]


def _pauses(s: Sizes, rng: random.Random, n: int) -> list[float]:
    """``n`` times of ``pause`` seconds on average, exponential, as between arrivals that know nothing of each other."""
    return [s["pause"] * rng.expovariate(1.0) for _ in range(n)]


async def independent(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """Prompts that share nothing."""
    prompts = [words(rng, int(s["prompt"])) for _ in range(int(s["requests"]))]
    return await gather(_completions(client, prompts, s["out"]), s["concurrency"])


async def chat(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """Conversations with one system message; each turn sends everything before it again, behind a pause."""
    system = "You are a helpful assistant. " + words(rng, int(s["system"]) - 6)
    users = [[words(rng, int(s["user"])) for _ in range(int(s["turns"]))] for _ in range(int(s["conversations"]))]
    pauses = [_pauses(s, rng, len(turns)) for turns in users]

    def job(turns: Sequence[str], pauses: Sequence[float]) -> Job:
        async def converse() -> list[Call]:
            messages = [{"role": "system", "content": system}]
            calls = []
            for text, pause in zip(turns, pauses, strict=True):
                await asyncio.sleep(pause)
                messages.append({"role": "user", "content": text})
                call = await client.chat(list(messages), int(s["out"]))
                calls.append(call)
                messages.append({"role": "assistant", "content": call.texts.get(0, "")})
            return calls

        return converse

    return await gather([job(*conversation) for conversation in zip(users, pauses, strict=True)], s["concurrency"])


async def rag(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """Many questions of one document."""
    context = f"Context: {words(rng, int(s['context']))}\n\nQuestion:"
    prompts = [f"{context} {words(rng, int(s['question']))}?\nAnswer:" for _ in range(int(s["requests"]))]
    return await gather(_completions(client, prompts, s["out"]), s["concurrency"])


async def bestof(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """A few prompts, each sampled ``n`` times."""
    prompts = [words(rng, int(s["prompt"])) for _ in range(int(s["prompts"]))]

    def job(prompt: str, seed: int) -> Job:
        async def send() -> list[Call]:
            return [
                await client.complete(prompt, int(s["out"]), n=int(s["n"]), temperature=s["temperature"], seed=seed)
            ]

        return send

    return await gather([job(prompt, i + 1) for i, prompt in enumerate(prompts)], s["concurrency"])


async def json(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """Objects under a JSON schema, each asked for behind a pause; answers may end before the limit."""
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": person_schema()},
    }
    ask = "Describe a person as a JSON object with name, age, city, is_student and hobbies. Hints: {}."
    contents = [ask.format(words(rng, 12)) for _ in range(int(s["requests"]))]

    def job(content: str, pause: float) -> Job:
        async def send() -> list[Call]:
            await asyncio.sleep(pause)
            message = {"role": "user", "content": content}
            return [await client.chat([message], int(s["out"]), response_format=wanted, ignore_eos=False)]

        return send

    asked = zip(contents, _pauses(s, rng, len(contents)), strict=True)
    return await gather([job(content, pause) for content, pause in asked], s["concurrency"])


async def fewshot(client: Client, s: Sizes, rng: random.Random) -> list[Call]:
    """Multiple choice after five solved examples that all questions share; one token is generated."""

    def question(length: int, answer: str) -> str:
        choices = "\n".join(f"{letter}. {words(rng, 4)}" for letter in "ABCD")
        return f"Question: {words(rng, length)}?\n{choices}\nAnswer:{answer}"

    # An example costs its question and about 33 tokens of choices and labels.
    length = max(8, int(s["prefix"]) // 5 - 33)
    examples = "\n\n".join(question(length, " " + rng.choice("ABCD")) for _ in range(5))
    prompts = [f"{examples}\n\n{question(int(s['question']), '')}" for _ in range(int(s["requests"]))]
    return await gather(_completions(client, prompts, s["out"]), s["concurrency"])


WORKLOADS = {
    "independent": Workload(
        "prompts that share nothing",
        independent,
        {"requests": 32, "prompt": 256, "out": 64, "concurrency": 16},
        {"requests": 4, "out": 8, "concurrency": 4},
    ),
    "batch1": Workload(
        "a single stream", independent, {"requests": 1, "prompt": 64, "out": 128, "concurrency": 1}, {"out": 16}
    ),
    "chat": Workload(
        "conversations of many turns",
        chat,
        {"conversations": 8, "turns": 6, "system": 200, "user": 50, "out": 48, "pause": 0, "concurrency": 8},
        {"conversations": 2, "turns": 2, "out": 8},
    ),
    "rag": Workload(
        "many questions of one document",
        rag,
        {"requests": 48, "context": 1500, "question": 50, "out": 32, "concurrency": 16},
        {"requests": 4, "out": 8, "concurrency": 4},
    ),
    "bestof": Workload(
        "many samples of one prompt",
        bestof,
        {"prompts": 4, "prompt": 512, "n": 16, "out": 48, "temperature": 0.7, "concurrency": 4},
        {"prompts": 1, "out": 8},
    ),
    "json": Workload(
        "objects under a JSON schema",
        json,
        {"requests": 24, "out": 96, "pause": 0, "concurrency": 8},
        {"requests": 2, "concurrency": 2},
    ),
    "fewshot": Workload(
        "multiple choice after shared examples",
        fewshot,
        {"requests": 64, "prefix": 800, "question": 40, "out": 1, "concurrency": 16},
        {"requests": 8, "concurrency": 8},
    ),
}
"""Name -> workload, in the order in which they are run."""
