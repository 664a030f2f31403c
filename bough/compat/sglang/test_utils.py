"""``sglang.test.test_utils``: what benchmarks and tests of programs use of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import unittest
from collections.abc import Callable
from typing import Any

from bough.compat.sglang.utils import http_request, kill_process_tree, wait_for_server
from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.backends.openai import OpenAI
from bough.lang.config import global_config

DEFAULT_URL_FOR_TEST = "http://127.0.0.1:21000"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 600
DEFAULT_MODEL_NAME_FOR_TEST = ""
DEFAULT_SMALL_MODEL_NAME_FOR_TEST = ""
"""Empty names: bough's embedded model."""


class CustomTestCase(unittest.TestCase):
    """A test case."""


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of SGLang's benchmarks of programs, and the command line read by them."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", type=str, default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", type=str, default="srt")
    parser.add_argument("--device", type=str, default="auto", choices=["auto", "cuda", "rocm", "cpu"])
    parser.add_argument("--result-file", type=str, default="result.jsonl")
    parser.add_argument("--raw-result-file", type=str)
    return parser.parse_args()


def add_common_other_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of SGLang's benchmarks that call a server without programs."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", type=str, default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--backend", type=str, required=True)
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--model-path", type=str, default="meta-llama/Llama-2-7b-chat-hf")
    parser.add_argument("--result-file", type=str, default="result.jsonl")
    parser.add_argument("--raw-result-file", type=str)
    args = parser.parse_args()
    if args.port is None:
        args.port = {"vllm": 21000, "lightllm": 22000, "srt-raw": 30000}.get(args.backend, 23000)
    return args


def select_sglang_backend(args: argparse.Namespace) -> Any:
    """The backend that ``--backend`` names: ``srt``, ``srt-no-parallel`` or a model of OpenAI."""
    if args.backend.startswith("srt"):
        if args.backend == "srt-no-parallel":
            global_config.enable_parallel_encoding = False
        host = args.host if args.host.startswith("http") else f"http://{args.host}"
        return RuntimeEndpoint(f"{host}:{args.port}")
    if args.backend.startswith("gpt-"):
        return OpenAI(args.backend)
    raise ValueError(f"Invalid backend: {args.backend}")


def get_call_generate(args: argparse.Namespace) -> Callable[..., str]:
    """``call(prompt, temperature, max_tokens, stop=None)`` -> text, by a server's /generate."""
    url = _generate_url(args)

    def call(prompt: str, temperature: float, max_tokens: int, stop: Any = None) -> str:
        params = {"temperature": temperature, "max_new_tokens": max_tokens, "stop": stop}
        answer = http_request(url, json={"text": prompt, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])

    return call


def get_call_select(args: argparse.Namespace) -> Callable[[str, list[str]], int]:
    """``call(context, choices)`` -> index of the likeliest, by a server's /generate."""
    url = _generate_url(args)

    def call(context: str, choices: list[str]) -> int:
        body = {
            "text": [context + choice for choice in choices], "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }  # fmt: skip
        answers = http_request(url, json=body).json()
        scores = []
        for one in answers:
            rows = [row[0] for row in one["meta_info"]["input_token_logprobs"] if row[0] is not None]
            scores.append(sum(rows) / len(rows))
        return scores.index(max(scores))

    return call


def _generate_url(args: argparse.Namespace) -> str:
    host = args.host if args.host.startswith("http") else f"http://{args.host}"
    return f"{host}:{args.port}/generate"


def dump_bench_raw_result(path: str | None, states: list[Any], preds: list[Any], labels: list[Any]) -> None:
    """Write one JSON line for each state: its text, what was read from it and what was right."""
    if not path:
        return
    with open(path, "w") as file:
        for i, state in enumerate(states):
            text = state if isinstance(state, str) else state.text()
            row = {"prompt_id": i, "prompt": text, "output": preds[i], "correct": bool(preds[i] == labels[i])}
            file.write(json.dumps(row, default=str) + "\n")


def popen_launch_server(
    model: str, base_url: str, timeout: float, api_key: str | None = None, other_args: Any = (), **_: Any
) -> subprocess.Popen[str]:
    """Start a server at ``base_url`` and wait until it is ready."""
    host, _colon, port = base_url.rpartition("/")[2].partition(":")
    command = [sys.executable, "-m", "bough.cli.main", "serve", *([model] if model else [])]
    command += ["--host", host, "--port", port, *(["--api-key", api_key] if api_key else []), *map(str, other_args)]
    process = subprocess.Popen(command, text=True)
    try:
        wait_for_server(base_url, timeout, process)
    except BaseException:
        kill_process_tree(process.pid)
        raise
    return process
