"""The workloads against a server in this process that keeps what it was sent."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from bough.base.errors import ConfigError
from bough.bench import serve
from bough.bench.client import Client
from bough.bench.workloads import WORKLOADS, person_schema, valid
from bough.cli.main import build_parser

PERSON = '{"name":"Ada","age":36,"city":"London","is_student":false,"hobbies":["music"]}'


class Server:
    """Answers every choice with ``max_tokens`` one-word chunks and the usage that goes with them."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.fail = False
        self.now = self.most = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append({"path": request.path, **body})
        if self.fail and len(self.bodies) > 2:
            return web.json_response({"error": "busy"}, status=429)
        self.now += 1
        self.most = max(self.most, self.now)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        n, tokens = body.get("n", 1), body["max_tokens"]
        for _ in range(tokens):
            for i in range(n):
                await self.send(response, {"choices": [{"index": i, **self.text(request, body)}]})
        usage = {"prompt_tokens": 100, "completion_tokens": n * tokens, "prompt_tokens_details": {"cached_tokens": 40}}
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.now -= 1
        return response

    def text(self, request: web.Request, body: dict) -> dict:
        if "response_format" in body:
            # The whole object in the first chunk; later ones are blank space, which JSON allows.
            body["said"] = body.get("said", 0) + 1
            return {"delta": {"content": PERSON if body["said"] == 1 else " "}}
        return {"delta": {"content": "word "}} if "chat" in request.path else {"text": "word "}

    async def send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


SMALL = {
    "independent": {"requests": 5, "prompt": 9, "out": 3, "concurrency": 2},
    "batch1": {"prompt": 9, "out": 3},
    "chat": {"conversations": 2, "turns": 3, "system": 12, "user": 4, "out": 2, "concurrency": 2},
    "rag": {"requests": 4, "context": 30, "question": 5, "out": 2, "concurrency": 4},
    "bestof": {"prompts": 2, "prompt": 10, "n": 3, "out": 2, "concurrency": 2},
    "json": {"requests": 3, "out": 2, "concurrency": 3},
    "fewshot": {"requests": 4, "prefix": 250, "question": 6, "out": 1, "concurrency": 4},
}


async def bench(server: Server, *flags: str) -> dict:
    runner = web.AppRunner(server.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    arguments = parse(f"--base-url=http://127.0.0.1:{port}/v1", *flags)
    try:
        return await serve._run(serve._plan(arguments), arguments)
    finally:
        await runner.cleanup()


def parse(*flags: str) -> argparse.Namespace:
    return build_parser("bench").parse_args(["bench", "serve", *flags])


def flags(*names: str) -> list[str]:
    sizes = [f"--set={w}.{k}={v}" for w in names for k, v in SMALL[w].items()]
    return [f"--workloads={','.join(names)}", *sizes, "--repeats=2"]


def run(server: Server, *names: str) -> dict:
    import asyncio

    return asyncio.run(bench(server, *flags(*names)))


def test_every_workload_reports_what_the_server_did(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    result = run(server, *WORKLOADS)
    assert result["model"] == "toy" and result["errors"] == 0
    requests = {"independent": 5, "batch1": 1, "chat": 6, "rag": 4, "bestof": 2, "json": 3, "fewshot": 4}
    generated = {"independent": 15, "batch1": 3, "chat": 12, "rag": 8, "bestof": 12, "json": 6, "fewshot": 4}
    for name, workload in result["workloads"].items():
        median = workload["median"]
        assert median["requests"] == requests[name]
        assert median["generated_tokens"] == generated[name]
        assert median["prompt_tokens"] == 100 * requests[name] and median["cached_tokens"] == 40 * requests[name]
        assert median["short"] == median["errors"] == 0
        assert 0 < median["ttft_ms_p50"] <= median["e2e_ms_p50"]
    assert result["workloads"]["json"]["median"]["valid"] == 1.0
    shown = serve.summary(result)
    assert all(name in shown for name in WORKLOADS)


def test_requests_are_what_the_workload_says() -> None:
    server = Server()
    run(server, "chat", "rag", "bestof", "json")
    chat = [b for b in server.bodies if len(b.get("messages", [])) > 1]
    assert len({b["messages"][0]["content"] for b in chat[-12:]}) == 2, "one system message per repeat"
    assert Counter(len(b["messages"]) for b in chat[-12:]) == {2: 4, 4: 4, 6: 4}
    rag = [b["prompt"] for b in server.bodies if str(b.get("prompt")).startswith("Context:")][-8:]
    assert len({p.split("\n\n")[0] for p in rag}) == 2 and len(set(rag)) == 8
    bestof = [b for b in server.bodies if b.get("n") == 3]
    assert {b["temperature"] for b in bestof} == {0.7} and {b["seed"] for b in bestof} == {1, 2}
    wanted = [b for b in server.bodies if "response_format" in b]
    assert wanted and not any(b["ignore_eos"] for b in wanted)
    assert all(b["response_format"]["json_schema"]["schema"] == person_schema() for b in wanted)
    assert all(b["ignore_eos"] for b in bestof)


def test_text_depends_on_the_seed_alone() -> None:
    one, two = Server(), Server()
    run(one, "independent")
    run(two, "independent")
    prompts = [b["prompt"] for b in one.bodies if "prompt" in b]
    assert sorted(prompts) == sorted(b["prompt"] for b in two.bodies if "prompt" in b)
    assert len(set(prompts)) == len(prompts), "no repeat sends what another has sent"


def test_concurrency_is_kept() -> None:
    server = Server()
    run(server, "independent")
    assert 1 <= server.most <= 2


def test_failed_requests_are_counted_not_hidden() -> None:
    server = Server()
    server.fail = True
    result = run(server, "independent")
    assert result["errors"] == 1
    assert result["workloads"]["independent"]["median"]["errors"] == 5
    assert "HTTP 429" in result["workloads"]["independent"]["first_error"]


def test_openai_only_sends_no_other_fields() -> None:
    import asyncio

    server = Server()
    asyncio.run(bench(server, *flags("independent", "json"), "--openai-only"))
    assert not any("ignore_eos" in b for b in server.bodies)


def test_a_server_that_hangs_up_fails_the_call() -> None:
    import asyncio

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def ask() -> str | None:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return (await Client(f"http://127.0.0.1:{port}/v1", "m", "k").complete("x", 1)).error

    assert "disconnected" in (asyncio.run(ask()) or "")


def test_a_server_that_is_not_there() -> None:
    import asyncio

    async def ask() -> None:
        await Client("http://127.0.0.1:9/v1", "m", "k").models()

    with pytest.raises(ConfigError, match="does not answer"):
        asyncio.run(ask())


@pytest.mark.parametrize("bad", ["--workloads=nope", "--set=chat.nope=1", "--set=nope.n=1", "--set=chat.turns=many"])
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        serve._plan(parse(bad))


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "result.png"
    serve.plot({"label": "x", "workloads": {"rag": {"median": {"total_per_s": 3.0, "ttft_ms_p50": 4.0}}}}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (PERSON, True),
        (PERSON.replace("36", "121"), False),
        (PERSON.replace("London", "Rome"), False),
        (PERSON.replace("}", ',"more":1}'), False),
        (PERSON[:-1], False),
        ("\ud800", False),
    ],
)
def test_validity_is_the_schemas(text: str, good: bool) -> None:
    import jsonschema

    assert valid(text) is good
    try:
        jsonschema.validate(json.loads(text), person_schema())
        by_schema = True
    except (ValueError, jsonschema.ValidationError):
        by_schema = False
    assert by_schema is good
