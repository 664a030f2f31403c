"""The engines: in which formats each takes its weights, how it is started, and what its API calls things."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.home import ROOT, Home, Unavailable

KV_TOKENS = 65_536
"""Room in every engine's KV cache."""

KV_GIB = 2
"""The same where an engine wants bytes: at most 32 KiB a token."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a contender is started.

    Attributes:
        command: with ``{port}`` where the port goes.
        environment: added to this process's.
        health: path that answers 200 when it is ready; None for a pipeline that talks over its pipes.
        seconds: how long starting may take.
        folder: where it is started; Python finds modules there before all others.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = "/health"
    seconds: float = 60.0
    folder: Path = ROOT


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides: threads of every engine, and the interpreter that runs bough."""

    home: Home
    threads: int
    bough_python: str


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine.

    Attributes:
        name: as in tables.
        formats: weights it can serve.
        launch: (settings, model, format) -> how it is started; Unavailable if it is not set up.
        version: (settings) -> its version, as it says itself.
        dialect: which fields its API takes, see :mod:`benchmarks.peers.dialects`.
    """

    name: str
    formats: tuple[str, ...]
    launch: Callable[[Settings, str, str], Launch]
    version: Callable[[Settings], str]
    dialect: str = "standard"


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with weights of one format."""

    engine: Engine
    format: str

    @property
    def name(self) -> str:
        return f"{self.engine.name} {self.format}"


def _file(path: Path, step: str) -> str:
    if not path.exists():
        raise Unavailable(f"{path.name} is missing: `python -m benchmarks.peers setup {step}`")
    return str(path)


# -- bough


def bough_launch(tree: Path, flags: Sequence[str], settings: Settings, model: str, kind: str) -> Launch:
    """Any tree of bough; int8 and int4 are quantised at load, GGUF files are served as they are."""
    command = [settings.bough_python, "-m", "bough.cli.main", "serve"]
    if kind in ("bf16", "int8", "int4"):
        command.append(_file(models.folder(settings.home, model), "models"))
    else:
        command.append(_file(models.gguf_path(settings.home, model, kind), "models"))
    if kind in ("int8", "int4"):
        if "--quantize" not in _help(tree, settings):
            raise Unavailable("this bough has no --quantize")
        command += ["--quantize", kind]
    command += ["--port", "{port}", "--served-name", "m", "--pool-tokens", str(KV_TOKENS)]
    command += ["--threads", str(settings.threads), "--context-length", "8192", "--log-level", "warning"]
    command += flags
    # The processes of a server do not look for modules where they were started.
    return Launch(tuple(command), {"PYTHONPATH": str(tree)}, "/readyz", 180.0, tree)


def _help(tree: Path, settings: Settings) -> str:
    command = [settings.bough_python, "-m", "bough.cli.main", "serve", "--help"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout


def _bough_version(tree: Path, settings: Settings) -> str:
    from bough.bench.machine import revision_of

    return revision_of(tree) or "unknown revision"


def bough(name: str, tree: Path, flags: Sequence[str] = ()) -> Engine:
    """The bough whose source is in ``tree``, served with these flags, too."""
    formats = ("bf16", "int8", "int4", "q8_0", "q4_1", "q4_0")
    return Engine(name, formats, partial(bough_launch, tree, flags), partial(_bough_version, tree))


# -- peers


def _packaged(environment: str, package: str, settings: Settings) -> str:
    found = settings.home.version(environment, package)
    if found is None:
        raise Unavailable(f"not set up: `python -m benchmarks.peers setup {environment}`")
    return f"{package} {found}"


def _vllm(settings: Settings, model: str, kind: str) -> Launch:
    command = (
        _file(settings.home.python("vllm"), "vllm"),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", _file(models.folder(settings.home, model), "models"), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16"),
        *("--max-model-len", "8192", "--max-num-seqs", "64"),
    )
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(command, environment, seconds=600.0)


def _llama_server(environment: str, flags: tuple[str, ...], settings: Settings, model: str, kind: str) -> Launch:
    folder = settings.home.environment(environment)
    tool = _file(folder / "build" / "bin" / "llama-server", environment)
    file = _file(models.gguf_path(settings.home, model, kind), "models")
    command = (tool, "-m", file, "--host", "127.0.0.1", "--port", "{port}", "-c", str(KV_TOKENS), *flags)
    # It writes a log where it is started.
    return Launch((*command, "--threads", str(settings.threads)), seconds=180.0, folder=folder)


def _llama_version(environment: str, package: str, settings: Settings) -> str:
    tool = settings.home.environment(environment) / "build" / "bin" / "llama-server"
    said = subprocess.run([_file(tool, environment), "--version"], capture_output=True, text=True)
    first = next((line for line in (said.stderr + said.stdout).splitlines() if line.startswith("version")), "version ?")
    return f"{first.partition(':')[2].strip()} (source of {package})"


def _openvino(settings: Settings, model: str, kind: str) -> Launch:
    stored = "fp16" if kind == "bf16" else kind
    command = (
        _file(settings.home.python("openvino"), "openvino"),
        *("-m", "benchmarks.peers.openvino_pipeline"),
        _file(models.openvino_path(settings.home, model, stored), "openvino"),
        *("--cache-gib", str(KV_GIB), "--threads", str(settings.threads)),
    )
    return Launch(command, health=None, seconds=180.0)


def _transformers(settings: Settings, model: str, kind: str) -> Launch:
    command = (
        _file(settings.home.environment("transformers") / "bin" / "transformers", "transformers"),
        *("serve", _file(models.folder(settings.home, model), "models"), "--host", "127.0.0.1", "--port", "{port}"),
        *("--device", "cpu", "--dtype", "bfloat16", "--continuous-batching"),
    )
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    return Launch(command, environment, seconds=180.0)


def _sglang(settings: Settings, model: str, kind: str) -> Launch:
    command = (
        _file(settings.home.python("sglang"), "sglang"),
        *("-m", "sglang.launch_server", "--device", "cpu", "--attention-backend", "torch_native"),
        *("--model-path", _file(models.folder(settings.home, model), "models"), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16", "--context-length", "8192"),
        *("--max-total-tokens", str(KV_TOKENS)),
    )
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
    }
    return Launch(command, environment, seconds=600.0)


GGUF_FORMATS = ("bf16", "q8_0", "q4_1", "q4_0")

PEERS = {
    "vllm": Engine("vllm", ("bf16",), _vllm, partial(_packaged, "vllm", "vllm-cpu"), "no-seed"),
    "llamacpp": Engine(
        "llamacpp",
        GGUF_FORMATS,
        partial(_llama_server, "llamacpp", ("--parallel", "16", "--no-kv-unified")),
        partial(_llama_version, "llamacpp", "llama-cpp-python 0.3.36"),
    ),
    "ik": Engine(
        "ik",
        GGUF_FORMATS,
        partial(_llama_server, "ik", ("--parallel", "16", "-fa", "off", "-rtr", "-cram", "0")),
        partial(_llama_version, "ik", "ik-llama-cpp-python 0.1.5"),
        "no-n",
    ),
    "openvino": Engine(
        "openvino", ("bf16", "int8", "int4"), _openvino, partial(_packaged, "openvino", "openvino-genai")
    ),
    "sglang": Engine("sglang", ("bf16",), _sglang, partial(_packaged, "sglang", "sglang")),
    "transformers": Engine(
        "transformers", ("bf16",), _transformers, partial(_packaged, "transformers", "transformers"), "transformers"
    ),
}
"""Name -> peer."""

DEFAULT_PEERS = ("vllm", "llamacpp", "ik", "openvino")
"""Those with kernels for this kind of machine."""
