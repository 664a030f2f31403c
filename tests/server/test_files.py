"""/v1/files and /v1/batches as the openai client sees them, on disk and through restarts."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bough.base.limits import Limits
from bough.server.files.batch import answered, read_places

from .scripted import EOS, MODEL, expected_text, make_tokenizer, running_server, wait_for

CHAT = "/v1/chat/completions"


def text_of(content: str, n: int = 24) -> str:
    prompt = f"<|user|>{content}{EOS}<|assistant|>"
    return expected_text(make_tokenizer().encode(prompt, add_special=False), n)


def lines(*bodies: dict[str, Any], url: str = CHAT) -> bytes:
    made = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return "\n".join(json.dumps(line) for line in made).encode()


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def made(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_files(client: openai.OpenAI, http: httpx.Client) -> None:
    data = b"\x00{}\n" * 1000
    file = client.files.create(file=("naïve ../../name.jsonl", data), purpose="user_data")
    assert (file.bytes, file.purpose, file.status, file.expires_at) == (4000, "user_data", "processed", None)
    assert file.filename == "naïve ../../name.jsonl"
    assert client.files.retrieve(file.id) == file
    answer = client.files.with_raw_response.content(file.id)
    assert answer.content == data and answer.headers["x-content-type-options"] == "nosniff"
    short = client.files.create(
        file=("b.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600
    assert [f.id for f in client.files.list()][:2] == [short.id, file.id]
    assert [f.id for f in client.files.list(purpose="user_data", limit=1, order="asc")] == [file.id]
    for one in (file, short):
        assert client.files.delete(one.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(one.id)
    assert not list(client.files.list())


@pytest.mark.parametrize("name", ["../lock", "..%2flock", "file-..", "file-" + "0" * 32, "file-" + "G" * 32, "%00"])
def test_names_are_not_paths(http: httpx.Client, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
        assert http.get(path).status_code == 404


@pytest.mark.parametrize(("form", "param"), [
    ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "file"),
    ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x"}}, "purpose"),
    ({"data": {"purpose": "batch", "expires_after[seconds]": "5"}, "files": {"file": b"x"}}, "expires_after"),
    ({"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}}, None),
    ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, None),
])  # fmt: skip
def test_bad_forms(http: httpx.Client, form: Any, param: str | None) -> None:
    answer = http.post("/v1/files", **form)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_bounds_of_files() -> None:
    limits = Limits(file_bytes=1000, files_bytes=1500, files=3)
    with running_server(limits=limits) as server, httpx.Client(base_url=server.url) as http:

        def upload(size: int) -> httpx.Response:
            return http.post("/v1/files", data={"purpose": "user_data"}, files={"file": b"x" * size})

        assert http.post("/v1/files", json={}).status_code == 415
        assert upload(200_000).status_code == 413
        first = upload(900)
        assert first.status_code == 200
        assert upload(900).status_code == 413
        assert upload(1).status_code == upload(1).status_code == 200
        full = upload(1)
        assert full.status_code == 400 and full.json()["error"]["code"] == "too_many_files"
        http.delete(f"/v1/files/{first.json()['id']}")
        assert upload(1).status_code == 200


def test_batch(client: openai.OpenAI) -> None:
    data = lines(chat("a"), chat("b", temperature=9), chat("c", max_tokens=3), chat("d", stream=True), {"nonsense": 1})
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"of": "mine"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert batch.status in ("validating", "in_progress", "completed") and batch.metadata == {"of": "mine"}
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    counts = done.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (5, 2, 3)
    assert done.output_file_id is not None and done.error_file_id is not None
    answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert set(by_id) == {"r0", "r2"} and all(r["status_code"] == 200 for r in by_id.values())
    assert by_id["r0"]["body"]["choices"][0]["message"]["content"] == text_of("a")
    assert by_id["r2"]["body"]["choices"][0]["message"]["content"] == text_of("c", 3)
    errors = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
    wrong = {error["custom_id"]: error["response"]["body"]["error"]["param"] for error in errors}
    assert wrong == {"r1": "temperature", "r3": "stream", "r4": None}
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.expires_at == output.created_at + 7200
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    with pytest.raises(openai.BadRequestError, match="status 'completed'"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
def test_batches_of_other_endpoints(client: openai.OpenAI, url: Any) -> None:
    body = {"prompt": "a"} if url == "/v1/completions" else {"input": "a"}
    file = client.files.create(file=lines(body, {**body, "model": "other"}, url=url), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None and (done.request_counts.completed, done.request_counts.failed) == (1, 1)


@pytest.mark.parametrize(("data", "code", "line"), [
    (b"", "empty_file", None), (b"\n\nnot json", "invalid_json_line", 3),
    (lines(chat("a")) * 2, "invalid_json_line", 1),
    (lines(chat("a")) + b"\n" + lines(chat("b")), "duplicate_custom_id", 2),
    (lines(chat("a"), url="/v1/completions"), "mismatched_url", 1),
    (lines(chat("a")).replace(b"POST", b"GET"), "invalid_method", 1),
])  # fmt: skip
def test_bad_input(client: openai.OpenAI, data: bytes, code: str, line: int | None) -> None:
    file = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "failed")
    errors = client.batches.retrieve(batch.id).errors
    assert errors is not None and errors.data is not None
    assert (errors.data[0].code, errors.data[0].line) == (code, line)


def test_refusals(http: httpx.Client, client: openai.OpenAI) -> None:
    file = client.files.create(file=b"x", purpose="user_data").id
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/files"}, "endpoint"), ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id"), ({}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"), ({"output_expires_after": {"seconds": 5}}, "output_expires_after"),
    ):  # fmt: skip
        answer = http.post("/v1/batches", json={**good, **change})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    for path in ("/v1/batches/none", "/v1/batches/none/cancel"):
        assert http.request("POST" if "cancel" in path else "GET", path).status_code == 404


def test_the_places_of_a_long_file_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(lines(*[chat("a")] * 20))
    places, errors = read_places(path, CHAT, Limits(batch_requests=10))
    assert len(places) == 10 and [error.code for error in errors] == ["too_many_requests"]
    assert read_places(path, CHAT, Limits(body_bytes=50))[1][0].code == "line_too_long"


def test_a_line_that_was_cut_off_is_answered_again(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_bytes(b'{"custom_id":"a"}\n{"custom_id":"b"}')
    assert answered(path) == {"a"} and path.read_bytes() == b'{"custom_id":"a"}\n'


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    limits = Limits(batch_running=2)
    bodies = [chat(f"number {i}") for i in range(12)]
    with (
        running_server(step_seconds=0.01, files=str(tmp_path / "f"), limits=limits) as first,
        made(first.url) as client,
    ):
        file = client.files.create(file=lines(*bodies), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)  # type: ignore[union-attr]
        assert all(s.request.priority == -limits.priority_abs for s in list(first.client.running.values()))
        with running_server(files=str(tmp_path / "f")) as rival:
            refused = httpx.get(f"{rival.url}/v1/files")
            assert refused.status_code == 503 and "--files" in refused.json()["error"]["message"]
        first.run(first.service.drain(0.0))
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o700
    with running_server(files=str(tmp_path / "f")) as second, made(second.url) as client:
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None and done.error_file_id is None
        answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
        assert len(answers) == 12 and texts == {f"r{i}": text_of(f"number {i}") for i in range(12)}
        assert len(second.client.seen) < 12
        assert {f.id for f in client.files.list()} == {file.id, done.output_file_id}


def test_cancelling_a_batch() -> None:
    with running_server(step_seconds=0.01, limits=Limits(batch_running=2)) as server, made(server.url) as client:
        file = client.files.create(file=lines(*[chat(f"{i}") for i in range(40)]), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)  # type: ignore[union-attr]
        assert client.batches.cancel(batch.id).status == "cancelling"
        wait_for(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        done = client.batches.retrieve(batch.id)
        assert done.request_counts is not None and done.output_file_id is not None
        answers = client.files.content(done.output_file_id).text.splitlines()
        assert 1 <= len(answers) == done.request_counts.completed < 40


def test_a_batch_that_could_not_be_saved_is_none() -> None:
    with running_server(limits=Limits(batches=1)) as server, made(server.url) as client:
        file = client.files.create(file=lines(chat("hello")), purpose="batch")
        [folder] = Path(server.service.config.serve.files).glob("t-*")
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.touch()  # so that nothing can be written into it
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        assert httpx.post(f"{server.url}/v1/batches", json=asked).status_code == 500
        assert not list(client.batches.list())
        folder.unlink()
        aside.rename(folder)
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert [each.id for each in client.batches.list()] == [batch.id]


def test_a_batch_whose_input_is_deleted_fails() -> None:
    with running_server(step_seconds=0.01, limits=Limits(batch_running=2)) as server, made(server.url) as client:
        file = client.files.create(file=lines(*[chat(f"{i}") for i in range(40)]), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)  # type: ignore[union-attr]
        client.files.delete(file.id)
        wait_for(lambda: client.batches.retrieve(batch.id).status == "failed")
        errors = client.batches.retrieve(batch.id).errors
        assert errors is not None and errors.data is not None and errors.data[0].code == "file_error"
        # What was answered before stays.
        done = client.batches.retrieve(batch.id)
        assert done.request_counts is not None and done.output_file_id is not None
        answers = client.files.content(done.output_file_id).text.splitlines()
        assert 1 <= len(answers) == done.request_counts.completed < 40


def test_a_batch_waits_for_an_engine_that_is_away() -> None:
    with running_server(step_seconds=0.01) as server, made(server.url) as client:
        file = client.files.create(file=lines(*[chat(f"{i}") for i in range(3)]), purpose="batch")
        server.call(server.client.die)
        batch_body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        assert httpx.post(f"{server.url}/v1/batches", json=batch_body).status_code == 503
        server.call(server.client.revive)
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        server.call(server.client.die)
        server.call(server.client.revive)
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 10.0)
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None and counts.completed == 3


def test_the_oldest_batches_that_are_over_are_forgotten() -> None:
    with running_server(limits=Limits(batches_over=2)) as server, made(server.url) as client:
        file = client.files.create(file=b"{bad\n", purpose="batch")
        ids = []
        for _ in range(5):
            ids.append(client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
            wait_for(lambda: client.batches.retrieve(ids[-1]).status == "failed")
        assert {batch.id for batch in client.batches.list()} == set(ids[2:])
