"""The doctor looks at this machine, and at ones that are worse off."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from bough.bench import machine
from bough.bench.machine import Cpu, Memory
from bough.cli import doctor
from bough.cli.main import main
from bough.device.ops import build, library


def test_it_reports_on_this_machine_and_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger(library.__name__).level
    assert main(["doctor"]) == 0
    assert logging.getLogger(library.__name__).level == level, "others want to be warned"
    out = capsys.readouterr().out
    for name in ("python", "cpu", "features", "memory", "torch", "kernels", "gpu", "default model"):
        assert name in out


def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {f["state"] for f in findings} <= {"ok", "note", "slow", "bad"}
    assert all(f["advice"] for f in findings if f["state"] != "ok"), "whatever is not fine says what to do"
    assert len({f["name"] for f in findings}) == len(findings)


@pytest.mark.parametrize(
    ("cpu", "states"),
    [
        (Cpu("x", ("avx2", "fma", "avx512f", "avx512_bf16"), 4, 8, None), ["ok", "ok"]),
        (Cpu("x", ("avx2", "fma", "avx512f"), 4, 8, 8.0), ["ok", "note"]),
        (Cpu("x", ("avx2", "fma"), 4, 8, 2.5), ["note", "note"]),
        (Cpu("x", (), 1, 1, None), ["ok", "slow"]),
    ],
)
def test_weak_processors_are_explained(monkeypatch: pytest.MonkeyPatch, cpu: Cpu, states: list[str]) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    findings = list(doctor._processor(cpu))
    assert [f.state for f in findings] == states
    assert all(bool(f.advice) == (f.state != "ok") for f in findings)
    if cpu.quota == 2.5:
        assert "uses 2" in findings[0].advice


def test_little_memory_is_explained() -> None:
    assert doctor._memory(Memory(8 << 30, 6 << 30, None)).state == "ok"
    assert doctor._memory(Memory(8 << 30, 1 << 30, 2 << 30)).state == "slow"


@pytest.mark.parametrize(("script", "advice"), [(None, "install a C++"), ("exit 1", "mend")])
def test_missing_kernels_are_explained(
    script: str | None, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    if script:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "none.so")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    found = doctor._kernels()
    assert found.state == "slow" and advice in found.advice


def test_every_build_of_the_kernels_is_the_best_one_somewhere() -> None:
    assert {*library.BEST.values()} == {isa for of_machine in build.VARIANTS.values() for isa in of_machine} - {
        "generic"
    }


def test_kernels_of_an_old_compiler_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load().library
    if loaded is None:
        pytest.skip("no compiled kernels")
    worse = Cpu("x", ("avx2", "fma"), 1, 1, None)
    monkeypatch.setattr(doctor.machine, "cpu", lambda: worse)
    assert doctor._kernels().state == "ok", "no better ones are possible"
    better = Cpu("x", ("avx2", "fma", "avx512f", "avx512_bf16"), 1, 1, None)
    monkeypatch.setattr(doctor.machine, "cpu", lambda: better)
    monkeypatch.setattr(library.Library, "isas", lambda self: ["generic", "avx2"])
    found = doctor._kernels()
    assert found.state == "slow" and str(loaded.path) in found.advice


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("avx2 fma avx_vnni", "avxvnni"), ("avx2 fma avx_vnni avx512f avx512_bf16", "avx512bf16"),
        ("avx512_bf16 amx_tile amx_bf16 amx_int8", "amx"),
        ("avx512_bf16 amx_tile amx_bf16", "avx512bf16"), ("asimd asimddp", "dotprod"),
    ],
)  # fmt: skip
def test_every_processor_is_told_which_kernels_it_lacks(
    flags: str, best: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if library.load().library is None:
        pytest.skip("no compiled kernels")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    here = machine.cpu(tmp_path)
    monkeypatch.setattr(doctor.machine, "cpu", lambda: here)
    monkeypatch.setattr(library.Library, "isas", lambda self: ["generic"])
    assert f"does not know {best}:" in doctor._kernels().advice
    assert any(best in variants for variants in build.VARIANTS.values())


def test_a_limit_of_openmp_that_slows_the_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.machine, "cpu", lambda: Cpu("x", ("avx2", "fma"), 2, 2, None))
    for limit, told in (("1", True), ("2", False), ("many", False)):
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        assert ("OMP_THREAD_LIMIT" in doctor._torch().advice) == told
