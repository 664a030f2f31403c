"""Whatever fits the OpenAPI document, and much that does not quite, is answered or refused; nothing breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from .scripted import PATIENCE, Running

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    schemathesis = pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ERROR = {"message", "type", "param", "code"}
ANTHROPIC_ERROR = {"type", "message"}
LONG = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "ignore_eos",
    "n",
    "stop",
    "num_predict",
)


def checked(operation: Any, base_url: str) -> Callable[[], None]:
    @settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict):  # what takes long is tested elsewhere
            for body in (case.body, case.body.get("sampling_params"), case.body.get("options")):
                if isinstance(body, dict):
                    for name in LONG:
                        body.pop(name, None)
        answer = case.call(base_url=base_url, timeout=PATIENCE)
        assert answer.status_code < 500 and answer.status_code != 422, answer.text
        if answer.status_code >= 400:
            error = answer.json()["error"]
            if operation.path.startswith("/api/"):
                assert isinstance(error, str), answer.text
            else:
                assert set(error) == (ANTHROPIC_ERROR if "/messages" in operation.path else ERROR), answer.text

    return check


def test_no_input_breaks_an_endpoint(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    paths = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        paths.add(operation.path)
        checked(operation, server.url)()
    assert {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/files/{file_id}",
        "/v1/batches",
        "/v1/messages",
        "/v1/embeddings",
        "/api/chat",
    } <= paths
