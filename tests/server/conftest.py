"""One server for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from .scripted import PATIENCE, Running, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def hermes() -> Iterator[Running]:
    with running_server(tool_parser="hermes", reasoning_parser="qwen3") as running:
        yield running
