"""/generate, /tokenize, /detokenize and the information endpoints."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .scripted import CONTEXT, EOS, MODEL, Running, expected_text, make_tokenizer, script


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special=True)


def events(text: str) -> list[dict[str, Any]]:
    parts = text.strip().split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_single(http: httpx.Client, method: str) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "rid": f"one-{method}"}
    answer = http.request(method, "/generate", json=body).json()
    assert answer["text"] == expected_text(ids("hello"), 4)
    assert answer["output_ids"] == [script(ids("hello"), None, i) for i in range(4)]
    meta = answer["meta_info"]
    assert meta["id"] == f"one-{method}" and meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 4) and "cached_tokens" in meta


def test_natural_stop_and_default_length(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"input_ids": ids("hello")}).json()
    assert answer["text"] == expected_text(ids("hello"), 24)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": make_tokenizer().eos_ids[0]}


def test_batches(http: httpx.Client) -> None:
    body = {
        "text": ["hello", "you"], "sampling_params": [{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 3, "n": 2}],
        "rid": ["r0", "r1"],
    }  # fmt: skip
    answers = http.post("/generate", json=body).json()
    assert [a["text"] for a in answers] == [expected_text(ids("hello"), 2)] * 2 + [expected_text(ids("you"), 3)] * 2
    assert [a["meta_info"]["id"] for a in answers] == ["r0-0", "r0-1", "r1-0", "r1-1"]
    single = {"input_ids": [ids("a")], "sampling_params": {"max_new_tokens": 1}}
    assert len(http.post("/generate", json=single).json()) == 1


def test_stream_is_cumulative(http: httpx.Client) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 5}, "stream": True, "return_logprob": True}
    chunks = events(http.post("/generate", json=body).text)
    text, total = expected_text(ids("hello"), 5), 0
    for chunk in chunks:
        meta = chunk["meta_info"]
        assert chunk["text"] == text[: meta["completion_tokens"]]
        total += len(meta["output_token_logprobs"])
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == total
    assert chunks[-1]["text"] == text and chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])


def test_stream_of_a_batch_carries_the_index(http: httpx.Client) -> None:
    body = {"text": ["hello", "you"], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    last = {chunk["index"]: chunk["text"] for chunk in events(http.post("/generate", json=body).text)}
    assert last == {0: expected_text(ids("hello"), 3), 1: expected_text(ids("you"), 3)}


@pytest.mark.parametrize("start", [-1, 0, 2, 5])
def test_logprobs(http: httpx.Client, start: int) -> None:
    body = {
        "text": "hello", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "top_logprobs_num": 2,
        "logprob_start_len": start, "token_ids_logprob": [7, 8], "return_text_in_logprobs": True,
    }  # fmt: skip
    meta = http.post("/generate", json=body).json()["meta_info"]
    expected = [] if start < 0 else ids("hello")[start:]
    assert [row[1] for row in meta["input_token_logprobs"]] == expected
    assert [row[2] for row in meta["input_token_logprobs"]] == list("hello"[start:] if start >= 0 else "")
    assert [row[0] is None for row in meta["input_token_logprobs"]] == [start == 0] * (start == 0) + [False] * (
        len(expected) - (start == 0)
    )
    assert len(meta["input_top_logprobs"]) == len(meta["input_token_ids_logprobs"]) == len(expected)
    assert [row[1] for row in meta["output_token_logprobs"]] == [script(ids("hello"), None, i) for i in range(2)]
    assert all(len(row) == 2 for row in meta["output_top_logprobs"])
    assert [[t for _, t, _ in row] for row in meta["output_token_ids_logprobs"]] == [[7, 8]] * 2


def test_prefill_only(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 0}}).json()
    assert answer["text"] == "" and answer["meta_info"]["completion_tokens"] == 0
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "top_logprobs_num": 3}
    answer = http.post("/generate", json=body).json()
    assert answer["text"] == "" and answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert len(answer["meta_info"]["output_top_logprobs"][0]) == 3


def test_salts_do_not_collide(server: Running, http: httpx.Client) -> None:
    salts = set()
    for i, (extra, salt) in enumerate([("a", None), (None, "b"), ("a", "b"), ("ab", ""), ("a:b", "c"), ("a", "b:c")]):
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}, "extra_key": extra, "cache_salt": salt,
                "rid": f"salt{i}"}  # fmt: skip
        assert http.post("/generate", json=body).status_code == 200
        salts.add(next(r for r in server.client.seen if r.rid == f"salt{i}").namespace.salt)
    assert len(salts) == 6


@pytest.mark.parametrize(("body", "param"), [
    ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": []}, "text"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [99999]}, "input_ids"), ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
    ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
    ({"text": "a", "sampling_params": {"ebnf": ""}}, "ebnf"),
    ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "structural_tag"),
    ({"text": "a", "sampling_params": {"unknown_name": 1}}, "sampling_params"),
    ({"text": "a", "image_data": "x"}, "image_data"), ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"), ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    *(({"text": ["a", "b"], name: [value] * n}, name) for n in (1, 3) for name, value in (
        ("sampling_params", {}), ("return_logprob", True), ("logprob_start_len", 0), ("top_logprobs_num", 1),
        ("extra_key", "a"), ("cache_salt", "a"),
    )),
    *(({"text": "a", name: value}, name) for name, value in (
        ("return_entropy", True), ("return_sampling_mask", True), ("lora_id", "x"), ("modalities", ["image"]),
        ("mm_hashes", ["x"]), ("bootstrap_host", "h"), ("bootstrap_port", 1), ("bootstrap_room", 1),
        ("bootstrap_pair_key", "k"), ("sampling_logprobs_mode", "raw"), ("return_bytes", True),
        ("regex", "a"), ("json_schema", "{}"), ("structured_outputs", {"regex": "a"}), ("guided_choice", ["a"]),
    )),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 9}, "logprob_start"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [10**6]}, "logprob_token_ids"),
])  # fmt: skip
def test_refusals_name_the_field(http: httpx.Client, body: Any, param: str) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_prompt_ids_come_back(http: httpx.Client) -> None:
    body = {"text": ["ab", "c"], "sampling_params": [{"max_new_tokens": 1, "n": 2}] * 2, "modalities": ["text"]}
    answers = http.post("/generate", json=body | {"return_prompt_token_ids": True}).json()
    assert [answer["prompt_token_ids"] for answer in answers] == [ids("ab"), ids("ab"), ids("c"), ids("c")]
    assert "prompt_token_ids" not in http.post("/generate", json=body).json()[0]
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 1, "return_prompt_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids("ab") and "token_ids" not in choice
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "return_prompt_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] and "token_ids" not in answer["choices"][0]


def test_nothing_is_put_between_special_tokens(server: Running, http: httpx.Client) -> None:
    text = f"a{EOS} {EOS}{EOS}b"
    for spaces in (True, False, None):
        server.client.answer_next = text
        sampling = {"max_new_tokens": 30, "skip_special_tokens": False, "spaces_between_special_tokens": spaces,
                    "ignore_eos": True}  # fmt: skip
        answer = http.post("/generate", json={"text": "x", "sampling_params": sampling}).json()
        assert answer["text"].startswith(text)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == ids("hé") and answer["count"] == 3 and answer["max_model_len"] == CONTEXT
    assert len(answer["token_strs"]) == 3
    batch = http.post(path, json={"prompt": ["a", "bc"]}).json()
    assert batch["tokens"] == [ids("a"), ids("bc")] and batch["count"] == [1, 2]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_detokenize(http: httpx.Client, path: str) -> None:
    assert http.post(path, json={"tokens": ids("hé")}).json() == {"text": "hé", "prompt": "hé"}
    assert http.post(path, json={"tokens": [ids("a"), ids("b")]}).json()["text"] == ["a", "b"]
    assert http.post(path, json={"tokens": [10**9]}).status_code == 400


def test_models(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert card["id"] == MODEL and card["max_model_len"] == CONTEXT
    assert http.get(f"/v1/models/{MODEL}").json() == card
    missing = http.get("/v1/models/some/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_information(http: httpx.Client) -> None:
    for path in ("/get_model_info", "/model_info"):
        assert http.get(path).json()["model_path"] == "/models/scripted"
    for path in ("/server_info", "/get_server_info"):
        info = http.get(path).json()
        assert info["limits"]["body_bytes"] == 8 << 20 and info["status"] == "ready" and info["page_size"] == 1
    document = http.get("/openapi.json").json()
    assert "ChatRequest" in document["components"]["schemas"] and "/v1/chat/completions" in document["paths"]


def test_flush_cache(http: httpx.Client) -> None:
    for method in ("GET", "POST"):
        body = {"text": "flush me", "sampling_params": {"max_new_tokens": 1}}
        http.post("/generate", json=body)
        assert http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 7
        assert http.request(method, "/flush_cache").status_code == 200
        assert http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0


def test_metrics(http: httpx.Client) -> None:
    http.post("/generate", json={"text": "count me", "sampling_params": {"max_new_tokens": 3}})
    text = http.get("/metrics").text
    for name in (
        "bough_time_to_first_token_seconds_count", "bough_inter_token_latency_seconds_bucket", "bough_queue_length",
        "bough_request_duration_seconds_sum", "bough_running", "bough_cache_hit_rate", "bough_cached_tokens_total",
        "bough_prompt_tokens_total", "bough_generated_tokens_total", "bough_evicted_tokens_total",
        "bough_retracted_total", "bough_kv_used_share", "bough_step_seconds_bucket", "bough_device_seconds_bucket",
        "bough_aborted_total", "bough_rejected_total", "bough_ready 1.0",
        "bough_waits_total 3.0", "bough_waits_worth_total 2.0", "bough_waited_seconds_total 0.5",
        'bough_http_responses_total{path="/generate",status="200"}',
    ):  # fmt: skip
        assert f"\n{name}" in text, name
