"""The native routes and the operator's, against the real server."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from .serving import Server, wait_for

GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_text_and_ids_are_the_same(served: Server) -> None:
    by_text = served.post("/generate", {"text": "the cat sat", "sampling_params": GREEDY}).json()
    ids = served.post("/tokenize", {"prompt": "the cat sat"}).json()["tokens"]
    by_ids = served.post("/generate", {"input_ids": ids, "sampling_params": GREEDY}).json()
    assert by_text["output_ids"] == by_ids["output_ids"] and by_text["text"] == by_ids["text"]
    assert len(by_text["output_ids"]) == 12
    assert by_text["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert by_ids["meta_info"]["prompt_tokens"] == len(ids)
    assert by_ids["meta_info"]["cached_tokens"] == len(ids) - 1


def test_batches_and_streams(served: Server) -> None:
    prompts = ["the cat", "the dog and the", "on the log on the mat"]
    alone = [served.post("/generate", {"text": p, "sampling_params": GREEDY}).json() for p in prompts]
    batch = served.post("/generate", {"text": prompts, "sampling_params": GREEDY}).json()
    assert [b["output_ids"] for b in batch] == [a["output_ids"] for a in alone]
    last: dict[int, dict[str, Any]] = {}
    for event in events(served.post("/generate", {"text": prompts, "sampling_params": GREEDY, "stream": True})):
        last[event["index"]] = event
    assert [last[i]["output_ids"] for i in range(3)] == [a["output_ids"] for a in alone]
    assert [last[i]["text"] for i in range(3)] == [a["text"] for a in alone]


def test_there_and_back(served: Server) -> None:
    text = "the cat sat on the mat, überall 猫 🐈"
    ids = served.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 32768
    assert served.post("/detokenize", {"tokens": ids["tokens"]}).json()["text"] == text


def test_flush_cache(served: Server) -> None:
    served.post("/generate", {"text": "something to remember", "sampling_params": GREEDY})
    assert served.quiet()["tree_tokens"] > 0
    assert served.post("/flush_cache", None).status_code == 200
    wait_for(lambda: served.stats()["tree_tokens"] == 0)
    assert served.quiet()["free_tokens"] == 65536
    again = served.post("/generate", {"text": "something to remember", "sampling_params": GREEDY}).json()
    assert again["meta_info"]["cached_tokens"] == 0


def test_abort_request(served: Server) -> None:
    aborted = served.quiet()["aborted"]
    answers: list[httpx.Response] = []
    body = {"text": "endless", "rid": "victim", "sampling_params": {**GREEDY, "max_new_tokens": 30000}}
    thread = threading.Thread(target=lambda: answers.append(served.post("/generate", body)))
    thread.start()
    wait_for(lambda: served.stats()["running"] == 1)
    assert served.post("/abort_request", {"rid": "victim"}).json() == {"aborted": 1}
    thread.join(60)
    assert not thread.is_alive()
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert served.quiet()["aborted"] == aborted + 1
    assert served.post("/abort_request", {"rid": "victim"}).json() == {"aborted": 0}


def test_metrics_move(served: Server) -> None:
    served.quiet()
    names = ("bough_time_to_first_token_seconds_count", "bough_cached_tokens_total", "bough_generated_tokens_total",
             "bough_prompt_tokens_total", "bough_finished_total", "bough_http_responses_total")  # fmt: skip
    before = {name: served.counter(name) for name in names}
    prompt = list(range(3, 103))
    for _ in range(2):
        served.tokens(prompt, 8)
    generated = before["bough_generated_tokens_total"]
    wait_for(lambda: served.counter("bough_generated_tokens_total") == generated + 16)
    moved = {name: served.counter(name) - before[name] for name in names}
    assert moved["bough_time_to_first_token_seconds_count"] == 2
    assert moved["bough_cached_tokens_total"] >= 99
    assert moved["bough_prompt_tokens_total"] == 200
    assert moved["bough_finished_total"] == 2
    assert moved["bough_http_responses_total"] >= 2
    assert served.counter("bough_ready") == 1


def test_server_info(served: Server) -> None:
    info = served.info()
    assert info["status"] == "ready" and info["problems"] == []
    assert info["max_total_num_tokens"] == 65536 == info["stats"]["pool_tokens"]
    assert info["model"]["context_length"] == 32768
    assert info["limits"]["n"] == 128


def test_what_is_refused(served: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert served.post("/v1/completions", {**body, "model": "another"}).status_code == 404
    assert served.get("/v1/nothing").status_code == 404
    assert served.get("/v1/completions").status_code == 405
    long = served.post("/generate", {"input_ids": [5] * 32768, "sampling_params": {"max_new_tokens": 1}})
    assert long.status_code == 400 and "32768" in long.json()["error"]["message"]
    beyond = served.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 32768}})
    assert beyond.status_code == 400


def test_rules_that_contradict_each_other_are_the_clients_fault(served: Server) -> None:
    """Which token is left to sample is known only at the sampler; the answer is a 400 all the same."""
    body = {"model": served.model, "prompt": "x", "allowed_token_ids": [0], "min_tokens": 1, "max_tokens": 2}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 400 and "no token" in answer.json()["error"]["message"]


def test_every_step_is_in_the_histograms(served: Server) -> None:
    served.post("/generate", {"text": "the cat", "sampling_params": {"max_new_tokens": 40, "temperature": 0}})

    def counted() -> bool:
        lines = httpx.get(served.url + "/metrics").text.splitlines()
        values = {name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name[:1] != "#"}
        return values["bough_device_seconds_count"] == values["bough_steps_total"] > 40

    wait_for(counted)
