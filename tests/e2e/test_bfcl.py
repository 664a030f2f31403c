"""Tool calls as load: questions of the Berkeley Function-Calling Leaderboard to the model that comes along."""

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

from .serving import ROOT, running

QUESTIONS = ROOT.parent / "shared/data/quality/bfcl_v4_subset.tar.xz"
EACH = 12
"""Questions of each file."""


def questions() -> list[dict[str, Any]]:
    found = []
    with tarfile.open(QUESTIONS) as archive:
        for member in archive:
            name = Path(member.name)
            if name.name in BFCL_FILES and name.parent.name == "data" and (file := archive.extractfile(member)):
                lines = [json.loads(line) for line in file if line.strip()]
                found += lines[:: len(lines) // EACH][:EACH]
    return found


def tools_of(question: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> schema of the arguments. Names with dots are written as OpenAI's are."""
    return {f["name"].replace(".", "_"): plain_schema(f["parameters"], closed=True) for f in question["function"]}


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_required_calls_keep_to_their_schemas() -> None:
    if not QUESTIONS.exists():
        pytest.skip(f"the questions are not at {QUESTIONS}")
    asked = questions()
    assert len(asked) == EACH * len(BFCL_FILES)

    async def ask(client: openai.AsyncOpenAI, question: dict[str, Any], stream: bool) -> tuple[str, Any]:
        tools: Any = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
            for name, schema in tools_of(question).items()
        ]
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

    async def main(url: str) -> list[tuple[str, Any]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            return await asyncio.gather(*(ask(client, q, i % 2 == 1) for i, q in enumerate(asked)))

    with running("--served-name", "m", "--pool-tokens", "65536") as server:
        answers = asyncio.run(main(server.url))
        server.quiet()
    complete = [(tools_of(q), calls) for q, (reason, calls) in zip(asked, answers) if reason == "tool_calls"]
    assert {reason for reason, _ in answers} <= {"tool_calls", "length"} and len(complete) > len(asked) // 2
    for tools, calls in complete:
        [call] = calls
        jsonschema.validate(json.loads(call.function.arguments), tools[call.function.name])
