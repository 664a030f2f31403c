"""Constraints that are made to be expensive: refused or served, and nobody else's tokens wait for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import Server

Fields = dict[str, Any]

ROUNDS = 3
COPIES = 4
"""Of a bomb, sent side by side; no two are the same, so that each is compiled."""
MOST_SECONDS = 0.05
"""So much longer than without the bomb may the longest wait for a token be."""
ANSWER_SECONDS = 12.0
"""Of all bombs that are sent together: large constraints are compiled one at a time, the slowest in two seconds."""


def schema(value: Any) -> Fields:
    return {"structured_outputs": {"json": value}}


def regex(text: str) -> Fields:
    return {"structured_outputs": {"regex": text}}


def nested_one_of(n: int, depth: int, serial: int) -> Any:
    if not depth:
        return {"const": f"leaf {serial}"}
    parts = [nested_one_of(n, depth - 1, serial * n + i) for i in range(n)]
    return {"anyOf": [{"type": "object", "properties": {f"p{serial}": part}, "required": []} for part in parts]}


def deep(n: int) -> Any:
    value: Any = {}
    for _ in range(n):
        value = {"items": value}
    return value


def wide(n: int, **more: Any) -> Any:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(n)}, **more}


def repeated(form: Any, depth: int) -> Any:
    for _ in range(depth):
        form = {"type": "repeat", "min": 1000, "max": 1000, "content": form}
    return form


BOMBS: dict[str, Callable[[int], Fields]] = {
    "any of many objects": lambda i: schema(nested_one_of(4, 5, i + 1)),
    "any of many more objects": lambda i: schema(nested_one_of(6, 4, i + 1)),
    "large enum": lambda i: schema({"enum": [f"value {i} {n}" for n in range(9_000)]}),
    "too large enum": lambda i: schema({"enum": [f"{i}{n}" for n in range(100_000)]}),
    "many properties": lambda i: schema(wide(1_000, title=str(i))),
    "too many properties": lambda i: schema(wide(10_000, title=str(i))),
    "many bounds": lambda i: schema({"properties": {
        f"o{k}": {"properties": {f"p{i}{n}": {"type": "integer", "minimum": n} for n in range(900)}} for k in range(4)
    }}),
    "long white space": lambda i: {"structured_outputs": {
        "json": {"title": str(i), "type": "array"}, "whitespace_pattern": "|".join(" " * n for n in range(1, 1_000))
    }},
    "much white space": lambda i: {"structured_outputs": {
        "json": {"title": str(i), "type": "array"}, "whitespace_pattern": r"((\s{1,999}){1,999}){1,999}"
    }},
    "deep nesting": lambda i: schema({"title": str(i), "items": deep(30)}),
    "references in a circle": lambda i: schema(
        {"title": str(i), "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "references that grow": lambda i: schema(
        {"$ref": "#/$defs/d0", "$defs": {
            **{f"d{n}": {"anyOf": [{"items": {"$ref": f"#/$defs/d{n + 1}"}},
                                   {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}}]} for n in range(40)},
            "d40": {"const": i}}}
    ),
    "long strings": lambda i: schema({"type": "string", "pattern": f"^[a-z{i}]{{1,10000}}$"}),
    "long arrays": lambda i: schema({"type": "array", "items": {"const": i}, "minItems": 10_000}),
    "many patterns": lambda i: schema(
        {"type": "object", "patternProperties": {f"^.*{i}{n}.*a.{{9}}$": {"type": "string"} for n in range(200)}}
    ),
    "many remainders": lambda i: schema({"type": "integer", "multipleOf": 1234567 + 2 * i}),
    "least integers": lambda i: schema({"title": str(i), "enum": [-(2**63), -1e30]}),
    "repeated repetitions": lambda i: regex(f"((a{{1,100}}){{1,100}}){{1,{100 + i}}}"),
    "star of stars": lambda i: regex(f"(a+)+{i}"),
    "ambiguous star": lambda i: regex(f"(a|a|ab)*{i}"),
    "many wildcards": lambda i: regex(f"(.*a){{25}}.*{i}"),
    "state explosion": lambda i: regex(f"(.*a.{{{20 + i}}}|.*b.{{30}})"),
    "parentheses": lambda i: regex("(" * (60_000 + i) + "a" + ")" * (60_000 + i)),
    "alternatives": lambda i: regex("|".join(f"w{i}{n}" for n in range(20_000))),
    "classes": lambda i: regex(f"(\\p{{L}}\\w[^a{i}]){{1,1000}}"),
    "left recursion": lambda i: {"structured_outputs": {"grammar": f'start: start start | start "x{i}" | "y"'}},
    "empty recursion": lambda i: {"structured_outputs": {"grammar": f'start: a* "{i}"\na: b* | a a\nb: a* | "c" | ""'}},
    "references in a row": lambda i: schema(
        {"title": str(i), "$ref": "#/$defs/d0", "$defs": {
            **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(4_000)}, "d4000": {"const": 1}}}
    ),
    "many rules": lambda i: {"structured_outputs": {"grammar": "\n".join(
        ["start: r0", *(f'r{n}: r{n + 1} r{n + 1} | "{i}"' for n in range(3_000)), 'r3000: "z"']
    )}},
    "many tags": lambda i: {"structured_outputs": {"structural_tag": {
        "structures": [{"begin": f"<{i}f{n}>", "schema": wide(5), "end": "</f>"} for n in range(1_000)],
        "triggers": ["<"],
    }}},
    "repeated formats": lambda i: {"structured_outputs": {"structural_tag": {
        "format": repeated({"type": "regex", "pattern": f"[a-z{i}]{{1,100}}"}, 3)
    }}},
    "excluded texts": lambda i: {"structured_outputs": {"structural_tag": {
        "format": {"type": "any_text", "max_chars": 100_000, "excludes": [f"word {i} {n}" for n in range(250)]}
    }}},
}  # fmt: skip


class Victim:
    """A plain stream; how long its reader waited for each token."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        self.gaps: list[float] = []
        self._over = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Victim:
        self._thread.start()
        assert self._begun.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        body = {"prompt": "the cat", "max_tokens": 30_000, "ignore_eos": True, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=30) as response:
            last = 0.0
            for n, _ in enumerate(response.iter_raw()):
                now = time.perf_counter()
                if n > 20:
                    self.gaps.append(now - last)
                    self._begun.set()
                last = now
                if self._over.is_set():
                    return


SENDER = """
import concurrent.futures, json, sys, urllib.error, urllib.request

def post(path):
    request = urllib.request.Request(sys.argv[1], open(path, "rb").read(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

with concurrent.futures.ThreadPoolExecutor(8) as threads:
    print(json.dumps(list(threads.map(post, sys.argv[2:]))))
"""


def write(folder: Path, fields: list[Fields]) -> list[Path]:
    """The bodies of requests, as files: made before anything is measured, for making them holds up this process."""
    paths = [folder / f"{i}.json" for i in range(len(fields))]
    for path, each in zip(paths, fields):
        path.write_text(json.dumps({"prompt": "the", "max_tokens": 12, **each}))
    gc.collect()
    return paths


def send(server: Server, paths: list[Path]) -> list[tuple[int, str]]:
    """Status and text of the answers to requests sent side by side, by a process of its own: it must not delay ours."""
    command = [sys.executable, "-c", SENDER, f"{server.url}/v1/completions", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [(status, text) for status, text in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def serials() -> Iterator[int]:
    return itertools.count(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_nobody_waits_for_a_bomb(served: Server, serials: Iterator[int], tmp_path: Path, name: str) -> None:
    engine, more = served.children["engine"], []
    for _ in range(ROUNDS):
        harmless = write(tmp_path, [{"seed": 1}] * COPIES)
        with Victim(served) as calm:
            send(served, harmless)
        bombs = write(tmp_path, [BOMBS[name](next(serials)) for _ in range(COPIES)])
        with Victim(served) as victim:
            start = time.perf_counter()
            answers = send(served, bombs)
            seconds = time.perf_counter() - start
        more.append(max(victim.gaps) - max(calm.gaps))
        statuses = [status for status, _ in answers]
        print(f"{name}: {statuses} in {seconds:.2f} s, waits {max(victim.gaps):.3f} s, calm {max(calm.gaps):.3f} s")
        assert set(statuses) <= {200, 400}, answers
        assert seconds < ANSWER_SECONDS
    assert served.children["engine"] == engine
    assert statistics.median(more) <= MOST_SECONDS, more


@pytest.mark.slow
def test_compiles_whose_clients_are_gone_are_in_nobodys_way(served: Server, serials: Iterator[int]) -> None:
    """Each takes a tenth of a second or more: begun all, they would keep the threads busy for long."""

    def give_up(fields: Fields) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            served.post("/v1/completions", {"prompt": "the", "max_tokens": 12, **fields}, timeout=1.0)

    bombs = [BOMBS["any of many more objects"](next(serials)) for _ in range(40)]
    with concurrent.futures.ThreadPoolExecutor(len(bombs)) as threads:
        list(threads.map(give_up, bombs))
    start = time.perf_counter()
    answer = served.post("/v1/completions", {"prompt": "the", "max_tokens": 12, **schema({"type": "integer"})})
    seconds = time.perf_counter() - start
    print(f"a small schema behind {len(bombs)} that were given up: {seconds:.2f} s")
    assert answer.status_code == 200 and seconds < ANSWER_SECONDS
