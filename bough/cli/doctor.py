"""``bough doctor``: what this machine offers, why something is slower than it could be, and what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bough import __version__
from bough.bench import machine

GIB = 1 << 30

REQUIRED = (
    "numpy", "aiohttp", "msgspec", "fastapi", "uvicorn", "uvloop", "httptools", "tokenizers",
    "huggingface_hub", "google-re2", "llguidance", "jinja2", "prometheus_client", "python-multipart", "tqdm",
)  # fmt: skip
"""Runtime dependencies besides torch, which has a finding of its own."""

OPTIONAL = {
    "matplotlib": "no `bough bench --plot` (pip install matplotlib)",
}
"""Optional package -> what is not there without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. ``state``: ok; note: works, with less than there could be; slow: costs speed; bad: will not work."""

    name: str
    state: Literal["ok", "note", "slow", "bad"]
    value: str
    advice: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Only how the findings are written."""
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Look at everything, write it down; always 0."""
    findings = list(examine())
    if arguments.json:
        json.dump([dataclasses.asdict(f) for f in findings], sys.stdout, indent=1)
        print()
        return 0
    width = max(len(f.name) for f in findings)
    for f in findings:
        print(f"{f.state:<4}  {f.name:<{width}}  {f.value}")
        if f.advice:
            print(f"{'':<4}  {'':<{width}}  -> {f.advice}")
    worse = sum(f.state != "ok" for f in findings)
    print(f"\n{len(findings) - worse} of {len(findings)} findings are fine" + (", see the arrows" if worse else ""))
    return 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    revision = machine.revision()
    yield Finding("bough", "ok", __version__ + (f" (revision {revision})" if revision else ""))
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield from _processor(machine.cpu())
    yield _memory(machine.memory())
    torch = _torch()
    yield torch
    if torch.state != "bad":
        yield _kernels()
    yield _gpu(torch.state != "bad")
    yield from _packages()
    yield _files()
    yield _model()


def _processor(cpu: machine.Cpu) -> Iterator[Finding]:
    quota = f", control group quota {cpu.quota:g} CPUs" if cpu.quota is not None else ""
    usable = f"{cpu.model}: {cpu.cores} cores, {cpu.threads} threads usable{quota}"
    if cpu.quota is not None and cpu.quota < cpu.cores:
        threads = max(1, int(cpu.quota))
        yield Finding("cpu", "note", usable, f"threads beyond the quota would be put to sleep: bough uses {threads}")
    else:
        yield Finding("cpu", "ok", usable)
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding("features", "note", platform.machine(), "the compiled kernels use vectors of 4 floats")
        return
    has = set(cpu.features)
    value = " ".join(cpu.features) or "none of " + " ".join(machine.FEATURES)
    if not {"avx2", "fma"} <= has:
        yield Finding("features", "slow", value, "no AVX2 and FMA: vectors of 4 floats, and no fused arithmetic")
    elif "avx512f" not in has:
        yield Finding("features", "note", value, "no AVX-512: vectors of 8 floats instead of 16")
    elif not {"avx512_bf16", "amx_bf16"} & has:
        yield Finding("features", "note", value, "no bfloat16 arithmetic: integers or floats take longer")
    else:
        yield Finding("features", "ok", value)


def _memory(memory: machine.Memory) -> Finding:
    limit = f", control group limit {memory.limit / GIB:.1f} GiB" if memory.limit is not None else ""
    value = f"{memory.total / GIB:.1f} GiB, {memory.usable / GIB:.1f} GiB usable now{limit}"
    if memory.usable < 2 * GIB:
        return Finding("memory", "slow", value, "little room for the KV pool: fewer requests at once, less reuse")
    return Finding("memory", "ok", value)


def _torch() -> Finding:
    found = machine.package("torch")
    if found is None:
        return Finding("torch", "bad", "not installed", "pip install torch")
    import torch

    value = f"{torch.__version__}, {torch.get_num_threads()} threads"
    cores = machine.cpu().cores
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    if limit.isdecimal() and int(limit) < cores:
        advice = f"OMP_THREAD_LIMIT={limit} in the environment keeps torch and the kernels to as many threads"
        return Finding("torch", "slow", value, advice)
    named = next((v for v in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if v in os.environ), None)
    if named and torch.get_num_threads() < cores:
        return Finding("torch", "note", value, f"{named} is set in the environment and keeps cores idle elsewhere")
    return Finding("torch", "ok", value)


def _kernels() -> Finding:
    # Imported late: it builds on torch, whose absence has a finding of its own.
    from bough.device.ops import build, library

    logger = logging.getLogger(library.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it would log is what the finding says
    try:
        loading = library.load()
    finally:
        logger.setLevel(level)
    if loading.library is None:
        fix = "mend that; the next start then builds them"
        try:
            build.find_compiler()
        except build.BuildError:
            fix = "install a C++ compiler (Debian: apt-get install g++); the next start then builds them"
        return Finding("kernels", "slow", f"none, plain torch is used: {loading.reason}", fix)
    value = f"{loading.library.isa()}, {loading.reason}"
    if loading.openmp is None:
        advice = "torch's OpenMP runtime was not found, so the kernels run on one thread: reinstall torch"
        return Finding("kernels", "slow", value, advice)
    if (better := loading.library.lacks(machine.cpu().features)) is not None:
        return Finding("kernels", "slow", value, better)
    return Finding("kernels", "ok", f"{value}, threads of {loading.openmp}")


def _gpu(has_torch: bool) -> Finding:
    driver = machine.gpu()
    if driver is None or not has_torch:
        return Finding("gpu", "ok", "none; bough computes on the CPU")
    import torch

    from bough.device.platform.cuda import device_of, lacks_compiler, why_not

    if device_of("auto") == "cuda":
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found = machine.package("flashinfer-python")
        other = f"FlashInfer {found} for --attention flashinfer" if found else "no FlashInfer, which nothing needs"
        value = f"{name}, compute capability {major}.{minor}, {memory}, {driver}; {other}"
        if lacks_compiler():
            return Finding("gpu", "bad", value, "Triton needs a C compiler and Python's headers: gcc and python3-dev")
        return Finding("gpu", "ok", value)
    if not torch.cuda.is_available():
        return Finding("gpu", "slow", driver, f"{why_not()}: install a torch that is built for this driver's CUDA")
    if machine.package("triton") is None:
        return Finding("gpu", "slow", driver, "its kernels need Triton: pip install 'bough[cuda]'")
    return Finding("gpu", "note", driver, "older than compute capability 8.0; bough computes on the CPU")


def _packages() -> Iterator[Finding]:
    missing = [name for name in REQUIRED if machine.package(name) is None]
    if missing:
        yield Finding("packages", "bad", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", f"all {len(REQUIRED)} that bough needs")
    absent = [name for name in OPTIONAL if machine.package(name) is None]
    value = ", ".join(f"{name} {machine.package(name)}" for name in OPTIONAL if name not in absent) or "none"
    uses = "; ".join(f"without {name}: {OPTIONAL[name]}" for name in absent)
    yield Finding("optional packages", "note" if absent else "ok", value, uses)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return Finding("open files", "note", f"{soft} (hard limit {hard})", "each client takes one: ulimit -n 65536")
    return Finding("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))


def _model() -> Finding:
    from bough.weights.embedded import DEFAULT, FILE

    if DEFAULT.present:
        return Finding("default model", "ok", str(DEFAULT.folder / FILE.name))
    size = f"{DEFAULT.wheel_bytes / 1e6:.0f} MB"
    return Finding("default model", "ok", f"not on this machine; the first use fetches {size} with pip")
