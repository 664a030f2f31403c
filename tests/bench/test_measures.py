"""Percentiles and figures against numpy and against a hand-made run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.bench.client import take
from bough.bench.measures import Call, measure, medians, percentile, table


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 100),
)
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.percentile(values, q), rel=1e-9, abs=1e-6)


def call(start: float, stamps: list[float], n_cached: int | None = None) -> Call:
    return Call(
        asked=len(stamps),
        start=start,
        end=stamps[-1] + 0.5,
        stamps={0: stamps},
        n_prompt=10,
        n_generated=len(stamps),
        n_cached=n_cached,
    )


def test_figures_of_a_run() -> None:
    figures = measure([call(0.0, [1.0, 2.0, 4.0], 4), call(1.0, [1.5, 2.5], 6), Call(asked=2, start=0.0, error="no")])
    assert figures["requests"] == 3 and figures["errors"] == 1
    assert figures["seconds"] == 4.5
    assert figures["prompt_tokens"] == 20 and figures["generated_tokens"] == 5 and figures["cached_tokens"] == 10
    assert figures["generated_per_s"] == round(5 / 4.5, 2) and figures["total_per_s"] == round(25 / 4.5, 2)
    assert figures["ttft_ms_p50"] == 750.0
    assert figures["itl_ms_p50"] == 1000.0 and figures["itl_ms_max"] == 2000.0  # gaps 1, 2, 1
    assert figures["tpot_ms_p50"] == 1250.0  # (4 - 1) / 2 and (2.5 - 1.5) / 1
    assert figures["e2e_ms_p50"] == 3250.0  # 4.5 and 2
    assert figures["short"] == 0


def test_a_run_of_nothing_but_errors_has_no_speed() -> None:
    assert measure([Call(asked=1, start=0.0, error="no")]) == {"requests": 1, "errors": 1}


def test_single_chunks_have_no_gaps() -> None:
    figures = measure([call(0.0, [1.0])])
    assert not any(name.startswith(("itl", "tpot", "cached")) for name in figures)


def test_medians_are_taken_per_figure() -> None:
    assert medians([{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0}]) == {"a": 2.0, "b": 5.0}


def test_events_of_both_apis_are_understood() -> None:
    got = Call(asked=4, start=0.0)
    take(got, {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": ""}]}, 1.0)
    take(got, {"choices": [{"index": 1, "delta": {"content": "b"}}, {"index": 0, "delta": {}}]}, 2.0)
    take(got, {"choices": [{"index": 0, "text": "c", "finish_reason": "stop"}], "usage": None}, 3.0)
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    take(got, {"choices": [], "usage": usage}, 4.0)
    assert got.texts == {0: "ac", 1: "b"} and got.stamps == {0: [1.0, 3.0], 1: [2.0]} and got.first == 1.0
    assert got.finish == {0: "stop"}
    assert (got.n_prompt, got.n_generated, got.n_cached) == (7, 3, 5)


def test_an_error_event_fails_the_call() -> None:
    got = Call(asked=1, start=0.0)
    take(got, {"error": {"message": "broken"}}, 1.0)
    assert got.error is not None and "broken" in got.error


def test_table_is_markdown_with_blanks() -> None:
    lines = table({"x": {"a": 1.0}, "longer": {"a": 20.5, "b": 3}}, ["a", "b"], "w").splitlines()
    assert lines[0] == "| w      |    a | b |"
    assert lines[2] == "| x      |    1 |   |"
    assert len({len(line) for line in lines}) == 1
