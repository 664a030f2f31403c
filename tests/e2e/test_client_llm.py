"""The command-line tool ``llm``, with the server as one of its extra OpenAI models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .serving import Server

pytest.importorskip("llm")


def test_prompt_and_conversation(served: Server, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([
        {"model_id": "tiny", "model_name": "tiny", "api_base": f"{served.url}/v1", "can_stream": True},
    ]))  # fmt: skip
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def llm(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "llm",
            *arguments,
            "-m",
            "tiny",
            "-o",
            "max_tokens",
            "12",
            "-o",
            "temperature",
            "0",
        ]
        return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout.decode()

    whole = llm("prompt", "the cat", "--system", "the dog", "--no-stream")
    assert whole.strip()
    assert llm("prompt", "the cat", "--system", "the dog") == whole
