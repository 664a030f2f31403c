"""instructor against the real server: typed answers by tools, by JSON and by JSON Schema, whole and in parts."""

from __future__ import annotations

import asyncio
import warnings
from enum import Enum
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from .serving import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    instructor = pytest.importorskip("instructor")

pytestmark = [pytest.mark.filterwarnings("ignore")]


class Mood(Enum):
    GLAD = "glad"
    SAD = "sad"


class Cat(BaseModel):
    mood: Mood
    lives: bool
    colours: tuple[Mood, Mood]


class Facts(BaseModel):
    furry: bool
    tale: Annotated[str, Field(max_length=100)]
    lives: bool


ASK: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "temperature": 0, "max_tokens": 200,
    "max_retries": 0,
}  # fmt: skip
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]


@pytest.mark.parametrize("mode", MODES)
def test_typed_answers(served: Server, mode: str) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        cat, completion = client.chat.completions.create_with_completion(response_model=Cat, **ASK)
    assert isinstance(cat, Cat) and completion.usage.completion_tokens > 5


def test_parts_of_an_answer(served: Server) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        parts = list(client.chat.completions.create_partial(response_model=Facts, **ASK))
    assert len(parts) > 1 and parts[0].lives is None and isinstance(parts[-1].lives, bool)


def test_the_asynchronous_side(served: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
            cats = await asyncio.gather(*(client.chat.completions.create(response_model=Cat, **ASK) for _ in range(3)))
        assert len({cat.model_dump_json() for cat in cats}) == 1

    asyncio.run(main())
