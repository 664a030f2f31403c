"""Tool calls as load: questions of the Berkeley Function-Calling Leaderboard to real models."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from bough.bench.schemas import BFCL_FILES, plain_schema
from tests.real import QWEN, fetched

from .serving import ROOT, running

QUESTIONS = ROOT.parent / "shared/data/quality/bfcl_v4_subset.tar.xz"
EACH = 12
"""Questions of each file."""

Question = dict[str, Any]


def questions() -> list[Question]:
    """Some of each file, with what the leaderboard accepts as answers under ``accepted``."""
    if not QUESTIONS.exists():
        pytest.skip(f"the questions are not at {QUESTIONS}")
    found: dict[str, Question] = {}
    answers: dict[str, Any] = {}
    with tarfile.open(QUESTIONS) as archive:
        for member in archive:
            name = Path(member.name)
            if name.name in BFCL_FILES and (file := archive.extractfile(member)):
                lines = [json.loads(line) for line in file if line.strip()]
                if name.parent.name == "data":
                    found |= {line["id"]: line for line in lines[:: len(lines) // EACH][:EACH]}
                else:
                    answers |= {line["id"]: line["ground_truth"] for line in lines}
    assert len(found) == EACH * len(BFCL_FILES)
    return [{**question, "accepted": answers[key]} for key, question in found.items()]


def spelled(name: str) -> str:
    """As OpenAI's names are: without dots."""
    return name.replace(".", "_")


def schemas_of(question: Question) -> dict[str, dict[str, Any]]:
    """Name of each function -> schema of its arguments."""
    return {spelled(f["name"]): plain_schema(f["parameters"], closed=True) for f in question["function"]}


async def ask(client: openai.AsyncOpenAI, question: Question, stream: bool) -> tuple[str, Any]:
    """(finish reason, calls) of an answer that has to be a call."""
    schemas = schemas_of(question)
    tools: Any = [
        {"type": "function", "function": {
            "name": spelled(f["name"]), "description": f["description"], "parameters": schemas[spelled(f["name"])],
            "strict": True,
        }}
        for f in question["function"]
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "model": "m", "messages": question["question"][0], "tools": tools, "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 160, "temperature": 0,
    }  # fmt: skip
    if not stream:
        choice = (await client.chat.completions.create(**fields)).choices[0]
    else:
        try:
            async with client.chat.completions.stream(**fields) as events:
                choice = (await events.get_final_completion()).choices[0]
        except openai.LengthFinishReasonError:
            return "length", None
    return choice.finish_reason, choice.message.tool_calls


def accepts(accepted: list[dict[str, Any]], call: Any) -> bool:
    """Whether the leaderboard takes ``call``: the function, and of each argument one of the values that it lists."""
    [(name, values)] = accepted[0].items()
    given = json.loads(call.function.arguments)
    return (
        spelled(name) == call.function.name
        and set(given) <= set(values)
        and all(given[key] in options if key in given else "" in options for key, options in values.items())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, complete, functions, calls",
    [("SmolLM2", 0.5, 0.0, 0.0), ("Qwen2.5-Coder", 0.9, 0.9, 0.4)],
    ids=["SmolLM2", "Qwen2.5-Coder"],
)
@pytest.mark.usefixtures("default_model")
def test_required_calls_keep_to_their_schemas(model: str, complete: float, functions: float, calls: float) -> None:
    """All that end keep to a schema; of all questions at least these shares end, in the right function, accepted."""
    path = [str(fetched(QWEN))] if model == "Qwen2.5-Coder" else []
    asked = questions()

    async def main(url: str) -> list[tuple[str, Any]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=900) as client:
            return await asyncio.gather(*(ask(client, q, i % 2 == 1) for i, q in enumerate(asked)))

    with running(*path, "--served-name", "m", "--pool-tokens", "65536") as server:
        answers = asyncio.run(main(server.url))
        server.quiet()
    assert {reason for reason, _ in answers} <= {"tool_calls", "length"}
    ended = [(question, found) for question, (reason, found) in zip(asked, answers) if reason == "tool_calls"]
    right = accepted = 0
    for question, found in ended:
        [call] = found
        jsonschema.validate(json.loads(call.function.arguments), schemas_of(question)[call.function.name])
        right += spelled(next(iter(question["accepted"][0]))) == call.function.name
        accepted += accepts(question["accepted"], call)
    print(f"{model}: of {len(asked)} questions {len(ended)} end, {right} in the right function, {accepted} accepted")
    assert len(ended) >= complete * len(asked)
    assert right >= functions * len(asked) and accepted >= calls * len(asked)
