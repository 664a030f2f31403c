"""The measurement of a GPU, on shapes of nothing and without one: every part of it runs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import checks, kernels, serving, steps
from benchmarks.gpu import main as gpu
from benchmarks.gpu.clock import Budget
from benchmarks.gpu.shapes import LLAMA_8B
from bough.device.attention.triton import TritonAttention
from bough.worker.graphs import DecodeGraphs


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("gpu") / "gpu.json"
    assert gpu.main(["--tiny", "--device", "cpu", "--minutes", "60", "--output", str(output)]) == 0
    assert output.with_suffix(".md").read_text().count("## ") == 6
    return json.loads(output.read_text())


@pytest.mark.slow
def test_every_section_runs(result: dict) -> None:
    assert not result["left_out"] and not result["failed"]
    assert list(result["sections"]) == ["limits", "checks", "tiny", "kernels", "tiny, tied", "other options"]
    assert all(result["sections"].values())
    for row in itertools.chain.from_iterable(result["sections"].values()):
        assert row.get("errors", 0) == 0 and row.get("ok", True), row


@pytest.mark.slow
def test_the_figures_are_of_what_was_asked_for(result: dict) -> None:
    rows = {row["name"]: row for row in result["sections"]["tiny"]}
    assert rows["rag"]["cached_tokens"] > 0 == rows["rag, no radix"]["cached_tokens"]
    assert rows["chat"]["cached_tokens"] > 0 and rows["bestof"]["cached_tokens"] > 0
    assert {"json, no jump", "decode, 3 rows from 12", "prefill, 20 tokens"} <= rows.keys()
    names = {row["name"].partition(",")[0] for row in result["sections"]["kernels"]}
    assert {
        "experts",
        "latent attention",
        "linear int4 (W4A16)",
        "add_rms_norm",
        "sample top-p",
        "silu_mul to int8",
    } <= names


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "method"), [(TritonAttention, "forward"), (DecodeGraphs, "forward")])
def test_a_mistake_where_only_a_gpu_goes_is_found_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: type, method: str
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(broken, method, fails)
    asked = ["--tiny", "--device", "cpu", "--only", "other options", "--output", str(tmp_path / "gpu.json")]
    assert gpu.main(asked) == 1


def test_a_run_without_time_says_what_it_left_out(tmp_path: Path) -> None:
    run = gpu.Run("cpu", True, 60, tmp_path / "gpu.json")
    rows = ({"name": str(i)} for i in itertools.count())
    run.budget = Budget(0.0)
    run.section("endless", rows)

    def fails():
        yield {"name": "first"}
        raise RuntimeError("planted\nwith more")

    run.budget = Budget(60.0)
    run.section("broken", fails())
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["sections"] == {"endless": [], "broken": [{"name": "first"}]}
    assert saved["left_out"] == ["endless: after 0 rows the time was over"]
    assert saved["failed"] == ["broken: RuntimeError: planted"] == run.wrong()


def test_a_kernel_that_fails_is_written_down_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    found = [kernels.Case("bad", fails, 1.0), kernels.Case("good", lambda: None, 1.0)]
    monkeypatch.setattr(kernels, "cases", lambda world: iter(found))
    run = gpu.Run("cpu", True, 60, tmp_path / "gpu.json")
    run.section("kernels", gpu.single_kernels(run))
    assert [row["name"] for row in run.result["sections"]["kernels"]] == ["good"]
    assert run.wrong() == ["bad: RuntimeError: planted"]


def test_a_row_that_fails_is_written_down_and_the_section_goes_on(tmp_path: Path) -> None:
    run = gpu.Run("cpu", True, 60, tmp_path / "gpu.json")
    said = iter(("planted", "CUDA error: an illegal memory access was encountered"))

    def fails() -> gpu.Row:
        raise RuntimeError(next(said))

    def rows() -> Iterator[gpu.Row]:
        yield from run.row("bad", fails)
        yield from run.row("good", lambda: {"share": 0.5}, goal=0.6)
        yield from run.row("lost", fails)
        yield from run.row("never", dict)

    run.section("some", rows())
    assert run.result["sections"]["some"] == [{"name": "good", "share": 0.5, "goal": 0.6}]
    assert [line.partition(":")[0] for line in run.wrong()] == ["bad", "lost", "some"]


def test_a_section_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "--device", "cpu", "--only", "kernels", "cheques", "--output", str(tmp_path / "gpu.json")])
    assert "no section cheques" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_every_workload_fits_beside_the_weights_of_the_largest_model() -> None:
    """Without the tree, and in the 78 GiB that an H100 of 80 GB has."""
    cells = serving.most_cells(LLAMA_8B)
    assert cells >= 256 * (gpu.CONTEXT + steps.ANSWER)
    weights = 2 * (LLAMA_8B.read_parameters + LLAMA_8B.head_parameters)
    assert cells * LLAMA_8B.kv_bytes + weights < 0.9 * (78 << 30)


def test_the_shape_is_the_one_that_is_meant() -> None:
    assert round(LLAMA_8B.read_parameters / 1e9, 2) == 7.50
    assert LLAMA_8B.kv_bytes == 128 << 10
    assert round(2 * (LLAMA_8B.read_parameters - LLAMA_8B.head_parameters) / 1e9, 1) == 14.0


def test_the_tests_of_kernels_load_on_a_bare_machine() -> None:
    plugins = ["-p", "xdist", "-p", "tests.bench.bare"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugins, *checks.TESTS, *checks.LENIENT],
        cwd=checks.ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_sampling.py::test_argmax" in done.stdout


@pytest.mark.slow
def test_the_script_by_itself(tmp_path: Path) -> None:
    output, script = tmp_path / "gpu.json", Path(gpu.__file__).with_name("run")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = ["--tiny", "--device", "cpu", "--minutes", "60", "--only", "kernels", "--output", str(output)]
    subprocess.run([sys.executable, script, *asked], capture_output=True, env=environment, check=True)
    saved = json.loads(output.read_text())
    assert saved["sections"]["kernels"] and not saved["left_out"]
