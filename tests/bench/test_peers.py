"""The comparison with other engines: floors, dialects, repeats, and one run with the real server."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import __main__ as command
from benchmarks.peers import engines, limits, report, rows
from benchmarks.peers import run as measuring
from benchmarks.peers.dialects import SeedlessClient, TransformersClient, joined
from benchmarks.peers.floors import WEIGHTS, Ask, Limits, Shape, floor, record, unique
from benchmarks.peers.home import ROOT, Home, Unavailable
from benchmarks.peers.models import SHAPE_1B, interleave_rows
from benchmarks.peers.process import Process, Usage, await_usage, descendants, free_port, usage
from benchmarks.peers.run import Cell, Plan, blocks, competes, run
from bough.bench.measures import Call
from bough.weights.gguf_model import restore_rows

from ..tiny import make_tiny_model

SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip

SHAPES = {"135m": Shape.of(SMALL), "1b": Shape.of({**SHAPE_1B, "vocab_size": 49152})}


@given(st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), max_size=8))
def test_unique_counts_every_prefix_once(prompts: list[tuple[int, ...]]) -> None:
    prefixes = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert unique(prompts) == (len(prefixes), sum(map(len, prefixes)))


def distinct(count: int, length: int, out: int, n: int = 1, shared: int = 0) -> list[Ask]:
    return [Ask((*range(shared), *(10**6 * (i + 1) + j for j in range(length - shared))), out, n, 0)
            for i in range(count)]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "bits", "asks", "concurrency", "seconds"),
    [
        ("135m", 16, distinct(1, 64, 128), 1, 0.45),
        ("135m", 16, distinct(32, 256, 64), 16, 2.47),
        ("135m", 16, distinct(48, 1560, 32, shared=1503), 16, 1.72),
        ("135m", 16, distinct(64, 894, 1, shared=815), 16, 1.55),
        ("135m", 16, distinct(4, 512, 48, n=16), 4, 1.32),
        ("1b", 16, distinct(1, 64, 128), 1, 3.55),
        ("1b", 16, distinct(16, 256, 64), 16, 10.6),
        ("1b", 16, distinct(24, 1560, 32, shared=1503), 16, 7.87),
        ("135m", 8, distinct(1, 64, 128), 1, 0.23),
        ("135m", 4, distinct(1, 64, 128), 1, 0.15),
        ("135m", 8, distinct(32, 256, 64), 16, 1.25),
        ("1b", 8, distinct(1, 64, 128), 1, 1.8),
    ],
)
def test_floors_are_those_the_goals_were_set_on(
    model: str, bits: int, asks: list[Ask], concurrency: int, seconds: float
) -> None:
    found = floor(asks, concurrency, SHAPES[model], WEIGHTS[bits], rows.GOAL_MACHINE)
    assert found == pytest.approx(seconds, rel=0.05)


def test_recorded_conversations_do_not_pay_twice_for_answers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    workload = rows.WORK["chat"]
    sizes = {"conversations": 3, "turns": 2, "system": 12, "user": 4, "out": 5, "pause": 0, "concurrency": 3}
    asks = record(folder, workload, sizes, "1")
    assert [a.own for a in asks] == [0, 0, 0, 5, 5, 5], "turn by turn, as servers see it"
    assert all(later.prompt[: len(first.prompt)] == first.prompt for first, later in zip(asks, asks[3:]))
    once, paused = (record(folder, workload, sizes | {"turns": 1, "pause": pause}, "1") for pause in (0, 0.01))
    assert {a.prompt for a in once} == {a.prompt for a in paused}, "pauses change when, not what"


def test_query_rows_survive_llama_cpps_order() -> None:
    weight = torch.arange(4 * 6 * 5.0).reshape(24, 5)
    assert torch.equal(restore_rows(interleave_rows(weight, 4), 4), weight)


def test_vllm_gets_no_seed() -> None:
    body = SeedlessClient("", "m", "").body({"prompt": "x"}, 3, {"seed": 7, "temperature": 0.7})
    assert "seed" not in body and body["temperature"] == 0.7 and body["ignore_eos"] is True


def test_transformers_gets_only_what_it_knows() -> None:
    body = TransformersClient("", "m", "").body({"prompt": "x"}, 3, {})
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream", "generation_config"}
    assert '"eos_token_id": -1' in body["generation_config"]


def test_parallel_requests_count_as_choices() -> None:
    parts = [Call(4, 1.0 + i, 5.0 + i, {0: [2.0 + i]}, {0: "ab"[i]}, {0: "length"}, 10, 4) for i in range(2)]
    call = joined(parts)
    assert (call.asked, call.start, call.end, call.n_prompt, call.n_generated) == (8, 1.0, 6.0, 10, 8)
    assert call.texts == {0: "a", 1: "b"} and call.stamps == {0: [2.0], 1: [3.0]} and call.error is None


def test_a_disturbed_first_repeat_writes_nobody_off() -> None:
    plan: Any = SimpleNamespace(behind=2.0, max_foreign=0.15)

    def after(seconds: float, foreign: float) -> Cell:
        cell = Cell(max_foreign=0.15)
        cell.repeats.append({"seconds": seconds, "foreign_cores": foreign})
        return cell

    fast, slow, disturbed = after(1.0, 0.0), after(3.0, 0.0), after(3.0, 0.9)
    assert measuring._hopeless(slow, [fast, slow], plan)
    assert not measuring._hopeless(disturbed, [fast, disturbed], plan)
    assert not measuring._hopeless(after(1.9, 0.0), [fast], plan)


def test_a_try_with_errors_counts_though_a_disturbed_one_had_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([{"foreign_cores": 0.5, "errors": 0}, {"foreign_cores": 0.9, "errors": 1}])
    monkeypatch.setattr(measuring, "await_usage", lambda *args: None)
    monkeypatch.setattr(measuring, "_once", lambda *args: (next(tries), None))
    one: Any = type("One", (), {"sizes": None})()  # row and contender
    field: Any = SimpleNamespace(running={one: SimpleNamespace(process=SimpleNamespace(pid=1))})
    plan: Any = SimpleNamespace(retries=1, quiet_wait=0.0, max_foreign=0.15)
    assert measuring._cleanest(one, one, field, plan, "seed")[0]["errors"] == 1


def test_boughs_alone_have_turns_in_bfloat16_beside_fewer_bits() -> None:
    every = [engines.bough("bough-old", ROOT), engines.PEERS["openvino"]]
    assert [f"{e.name} {f}" for e in every for f in e.formats if competes(e, f, rows.ROWS["135m/rag/int8"])] == [
        "bough-old bf16", "bough-old int8", "bough-old q8_0", "openvino int8",
    ]  # fmt: skip
    assert [f"{e.name} {f}" for e in every for f in e.formats if competes(e, f, rows.ROWS["135m/rag/bf16"])] == [
        "bough-old bf16", "openvino bf16",
    ]  # fmt: skip


def test_boughs_of_the_command_line(tmp_path: Path) -> None:
    arguments = command.build_parser().parse_args(["run", "--bough", f"bough-1={tmp_path} --depth 1", "--bough", "."])
    first, second = command.boughs(arguments)
    assert (first.name, second.name) == ("bough-1", "bough")
    launched = first.launch(settings(tmp_path), "135m", "bf16")
    assert launched.folder == tmp_path and launched.command[-2:] == ("--depth", "1")


def test_rows_by_pattern() -> None:
    assert [r.name for r in rows.select("1b/batch1/*")] == ["1b/batch1/bf16", "1b/batch1/int8", "1b/batch1/int4"]
    assert rows.ROWS["1b/rag/bf16"].sizes["requests"] == 24
    with pytest.raises(ValueError, match="nope"):
        rows.select("135m/rag/bf16,nope")


def test_waiting_for_a_server_ends_when_it_is_idle_or_too_late(tmp_path: Path) -> None:
    looks: list[float] = []

    def idle(now: Usage, before: Usage) -> bool:
        looks.append(now.cores(before))
        return looks[-1] < 0.1

    busy = Process([sys.executable, "-S", "-c", "while True: pass"], tmp_path / "busy")
    try:
        await_usage(busy.pid, 1.0, idle)
        assert len(looks) >= 2 and min(looks[1:]) >= 0.1, "it was given up"
    finally:
        busy.stop()
    looks.clear()
    waiting = Process(["sleep", "60"], tmp_path / "waiting")
    try:
        await_usage(waiting.pid, 60.0, idle)
        assert looks[-1] < 0.1 and len(looks) < 20
    finally:
        waiting.stop()


def test_processes_are_waited_for_watched_and_ended(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    process = Process(command, tmp_path / "log")
    try:
        process.wait_http(f"http://127.0.0.1:{port}/", 30.0)
        assert descendants(process.pid) == [process.pid]
        assert usage(process.pid).tree > 0
    finally:
        process.stop()
    assert process.popen.returncode is not None
    broken = Process([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")
    with pytest.raises(Unavailable, match="no such model"):
        broken.wait_http(f"http://127.0.0.1:{port}/", 30.0)
    broken.stop()


def settings(tmp_path: Path) -> engines.Settings:
    home = Home(tmp_path)
    make_tiny_model(home.models / "smollm2-135m", context_length=8192)
    return engines.Settings(home, 2, sys.executable)


def test_contenders_that_do_not_fit_together_take_turns(tmp_path: Path) -> None:
    found = [engines.Contender(e, "bf16") for e in (engines.bough("bough", ROOT), *engines.PEERS.values())][:4]
    split = list(blocks(found, settings(tmp_path), "135m", 5 << 29))
    assert [len(block) for block in split] == [2, 2] and [c for block in split for c in block] == found


@pytest.mark.slow
def test_a_run_with_the_server_and_a_peer_that_is_not_there(tmp_path: Path) -> None:
    plan = Plan(
        rows=rows.select("135m/batch1/bf16,135m/chat/bf16"),
        engines=[engines.bough("bough", ROOT), engines.PEERS["vllm"]],
        repeats=2,
        seed=1,
        cell_seconds=300.0,
        behind=4.0,
        minutes=30.0,
        max_foreign=99.0,
        retries=0,
        quiet_wait=0.0,
    )
    output = tmp_path / "result.json"
    found = run(plan, settings(tmp_path / "home"), output)
    assert "135m/vllm bf16" in found["skipped"] and output.exists()
    for row in found["rows"].values():
        ours = row["cells"]["bough bf16"]
        assert len(ours["repeats"]) == 2 and ours["median"]["errors"] == ours["median"]["short"] == 0
        assert row["floor_s"] > 0 and len(row["limits"]) == 3
    assert found["rows"]["135m/chat/bf16"]["cells"]["bough bf16"]["median"]["cached_tokens"] > 0
    assert "135m/chat/bf16" in report.markdown(found)


def test_the_limits_of_a_row_are_the_medians_of_those_that_were_measured() -> None:
    found = [Limits(60.0, 400.0, 900.0), Limits(33.0, 430.0, 880.0), Limits(40.0, 420.0, 800.0)]
    assert limits.middle(found) == Limits(40.0, 420.0, 880.0)
