"""Adapters through the real server: by name, loaded and unloaded, and never from outside their folder."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import bough as sgl
from bough.lang.backends.base import BaseBackend
from tests.lora import write_adapter, write_merged

from .serving import TINY, Server, running

PROMPT = "the cat sat on the"


@pytest.fixture(scope="module")
def folder(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters, one elsewhere behind a link, one that fits no model, and one outside."""
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("red", "green", "blue")):
        write_adapter(root / "loras" / name, long_model, seed=i + 1, rank=4 << i)
    write_adapter(root / "outside", long_model, seed=9)
    (root / "loras" / "link").symlink_to(root / "outside")
    broken = shutil.copytree(root / "outside", root / "loras" / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"garbage!" * 4)
    return root / "loras"


@pytest.fixture(scope="module")
def adapted(long_model: Path, folder: Path) -> Iterator[Server]:
    flags = ("--lora-dir", str(folder), "--max-loras", "2", "--dtype", "float32")
    with running(str(long_model), "--served-name", "tiny", *TINY, *flags) as server:
        yield server


def text(server: Server, model: str, n: int = 24, prompt: str = PROMPT) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def models(server: Server) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def test_a_name_is_a_model(adapted: Server, folder: Path, long_model: Path, tmp_path: Path) -> None:
    texts = {name: text(adapted, name) for name in ("tiny", "red", "green", "blue", "red")}
    assert len(set(texts.values())) == 4
    merged = write_merged(tmp_path / "merged", long_model, folder / "green")
    with running(str(merged), *TINY, "--served-name", "green", "--dtype", "float32") as server:
        assert text(server, "green") == texts["green"]
    native = {"text": PROMPT, "lora_path": "red", "sampling_params": {
        "max_new_tokens": 24, "temperature": 0, "ignore_eos": True}}  # fmt: skip
    assert adapted.post("/generate", native).json()["text"] == texts["red"]
    both = {**native, "text": [PROMPT, PROMPT], "lora_path": ["blue", None]}
    assert [a["text"] for a in adapted.post("/generate", both).json()] == [texts["blue"], texts["tiny"]]
    chat = openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="-").chat.completions
    answer = chat.create(model="tiny:red", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.model == "red"
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for path, body in (
        ("/v1/messages", {"model": "red", **hello}),
        ("/v1/responses", {"model": "red", "input": "hi", "max_output_tokens": 4}),
        ("/api/chat", {"model": "red:latest", **hello, "stream": False, "options": {"num_predict": 4}}),
    ):
        assert adapted.post(path, body).json()["model"] == "red", path


def test_more_adapters_than_places_at_once(adapted: Server) -> None:
    """Two places and three adapters, all asked for together: everybody gets the own text."""
    alone = {name: text(adapted, name) for name in ("tiny", "red", "green", "blue")}
    names = ["red", "green", "blue", "tiny"] * 4
    found: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append((name, text(adapted, name)))) for name in names
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((name, alone[name]) for name in names)
    adapted.quiet()


def test_load_and_unload(adapted: Server, folder: Path) -> None:
    def post(path: str, **body: object) -> httpx.Response:
        return adapted.post(path, body)

    for name in models(adapted)[1:]:
        assert post("/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert models(adapted) == ["tiny"]
    assert post("/v1/load_lora_adapter", lora_name="mine", lora_path="red").status_code == 200
    assert models(adapted) == ["tiny", "mine"]
    card = adapted.get("/v1/models/mine").json()
    assert card["parent"] == "tiny" and card["root"] == "red"
    mine = text(adapted, "mine")
    again = post("/load_lora_adapter", lora_name="mine", lora_path=str(folder / "green"))
    assert again.status_code == 400 and "already" in again.text
    answer = post("/unload_lora_adapter", lora_name="mine").json()
    assert answer["success"] and answer["loaded_adapters"] == {}
    gone = post("/v1/completions", model="mine", prompt="a", max_tokens=1)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    assert post("/v1/unload_lora_adapter", lora_name="mine").status_code == 404
    answer = post("/load_lora_adapter", lora_name="mine", lora_path=str(folder / "green"), pinned=True).json()
    assert answer == {"success": True, "error_message": "", "loaded_adapters": {"mine": str(folder / "green")}}
    assert text(adapted, "mine") != mine and text(adapted, "red") == mine
    assert text(adapted, "blue") and "mine" in models(adapted), "pinned"
    assert post("/unload_lora_adapter", lora_name="mine").status_code == 200


@pytest.mark.parametrize(
    "path", ["../outside", "link", "/", "", ".", "..", "red/../../outside", "OUTSIDE", "/etc", "a\0b", "x" * 5000]
)
def test_nothing_outside_the_folder_can_be_named(adapted: Server, folder: Path, path: str) -> None:
    path = str(folder.parent / "outside") if path == "OUTSIDE" else path
    answer = adapted.post("/v1/load_lora_adapter", {"lora_name": "sneaky", "lora_path": path})
    assert answer.status_code == 404, answer.text
    for body in ({"model": path or "..", "prompt": "a"}, {"model": "tiny", "lora_path": path or "..", "prompt": "a"}):
        assert adapted.post("/v1/completions", {**body, "max_tokens": 1}).status_code in (400, 404)
    assert "sneaky" not in models(adapted)


def test_what_does_not_work_hurts_nobody(adapted: Server) -> None:
    before = text(adapted, "red")
    answer = adapted.post("/v1/completions", {"model": "broken", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 400 and "safetensors" in answer.text
    answer = adapted.post("/load_lora_adapter", {"lora_name": "broken"})
    assert answer.status_code == 400 and "safetensors" in answer.text
    assert adapted.post("/load_lora_adapter", {"lora_name": "a/b", "lora_path": "red"}).status_code == 400
    assert adapted.post("/load_lora_adapter", {"lora_name": "tiny", "lora_path": "red"}).status_code == 400
    assert text(adapted, "red") == before
    adapted.quiet()


def test_without_a_folder_there_are_none(served: Server) -> None:
    answer = served.post("/v1/completions", {"model": "red", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 404 and "does not exist" in answer.text
    answer = served.post("/generate", {"text": "a", "lora_path": "red"})
    assert answer.status_code == 400 and "--lora-dir" in answer.text
    assert served.post("/load_lora_adapter", {"lora_name": "red"}).status_code == 404


def test_the_language_chooses_adapters_by_gen(adapted: Server, folder: Path, long_model: Path) -> None:
    """The same answers through the engine, the server and the OpenAI client, as the adapters give alone."""
    alone = {name: text(adapted, name, 8) for name in ("tiny", "red", "green")}

    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT
        forks = s.fork(3)
        for fork, name in zip(forks, (None, "red", "green")):
            fork += sgl.gen("text", max_tokens=8, ignore_eos=True, lora_path=name)
        s["texts"] = [fork["text"] for fork in forks]

    @sgl.function
    def choice(s: Any, name: str | None) -> None:
        s += PROMPT + sgl.select("word", [" mat", " log", " dog"], lora_path=name)

    flags = {"lora_dir": str(folder), "max_loras": 2, "dtype": "float32", "pool_tokens": 8192, "threads": 1}
    endpoint = sgl.RuntimeEndpoint(adapted.url)
    remote = sgl.OpenAI("tiny", is_chat_model=False, base_url=f"{adapted.url}/v1", api_key="-")
    with sgl.Engine(str(long_model), **flags) as engine:
        scores = []
        for backend in (engine, endpoint, remote):
            state = program.run(backend=backend, temperature=0)
            assert state["texts"] == [alone["tiny"], alone["red"], alone["green"]], backend
        for name in (None, "red"):
            metas = [choice.run(name, backend=b).get_meta_info("word") for b in (engine, endpoint)]
            found = [meta["normalized_prompt_logprobs"] for meta in metas]
            assert found[0] == pytest.approx(found[1], abs=1e-4)
            scores.append(found[0])
        assert scores[0] != pytest.approx(scores[1], abs=1e-4)
        with pytest.raises(sgl.ProgramError, match="gen"):
            unknown.run(backend=engine)["x"]
    with pytest.raises(sgl.ProgramError, match="takes no adapters"):
        unknown.run(backend=_Plain())["x"]
    endpoint.shutdown()
    remote.shutdown()


@sgl.function
def unknown(s: Any) -> None:
    s += "x" + sgl.gen("x", max_tokens=1, lora_path="nowhere")


class _Plain(BaseBackend):
    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        return "x", {}
