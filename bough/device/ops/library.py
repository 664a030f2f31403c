"""Loads the compiled kernels: finds or builds the shared library, checks it, and lends it torch's threads."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Collection
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bough.base.processors import flags
from bough.device.ops import build

log = logging.getLogger(__name__)

BEST = {"amx_int8": "amx", "avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni", "avx512f": "avx512",
        "avx_vnni": "avxvnni", "avx2": "avx2", "asimddp": "dotprod"}  # fmt: skip
"""Feature of a processor -> the kernels that use it; the first of those that it has are the best for it."""


class AttentionCall(ctypes.Structure):
    """``AttentionCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "page_table", "rows", "q_start", "seq_len")),
        *((name, c_void_p) for name in ("k_scale", "v_scale", "group_start", "group_rows", "group_tokens")),
        ("sinks", c_void_p),
        ("table_stride", c_int64),
        *((name, c_int) for name in ("n_rows", "n_heads", "n_kv_heads", "head_dim")),
        ("scale", c_float),
        *((name, c_int) for name in ("threads", "kv_dtype", "n_groups")),
        ("softcap", c_float),
        *((name, c_int) for name in ("window", "chunked")),
    )


class RopeCall(ctypes.Structure):
    """``RopeCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "cos_sin", "positions", "out_loc", "k", "v", "k_scale", "v_scale", "q")),
        *((name, c_void_p) for name in ("q_norm", "k_norm")),
        *((name, c_int) for name in ("n_tokens", "n_heads", "n_kv_heads", "head_dim", "rotary_dim", "threads")),
        *((name, c_int) for name in ("kv_dtype", "interleaved", "norm_wide")),
        ("norm_eps", c_float),
    )


class SampleCall(ctypes.Structure):
    """``SampleCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "best", "temperature", "top_k", "top_p", "least_z")),
        *((name, c_void_p) for name in ("seeds", "positions", "out")),
        *((name, c_int64) for name in ("n", "vocab")),
        ("threads", c_int),
    )


class LogprobCall(ctypes.Structure):
    """``LogprobCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "tokens", "asked", "chosen", "ranks", "top_ids", "top", "asked_out")),
        *((name, c_int64) for name in ("n", "vocab", "n_top", "n_asked")),
        ("threads", c_int),
    )


class PackedLinear(ctypes.Structure):
    """``PackedLinear`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "sub", "bias", "compact", "exponents")),
        *((name, c_int64) for name in ("n_in", "n_out")),
        *((name, c_int) for name in ("kind", "group")),
    )


class LinearParts(ctypes.Structure):
    """``LinearParts`` of csrc/common.h."""

    MOST = 3
    _fields_ = (("part", c_void_p * MOST), ("count", c_int64))


class LoraAdapter(ctypes.Structure):
    """``LoraAdapter`` of csrc/common.h."""

    _fields_ = (("a", PackedLinear), ("b", PackedLinear * LinearParts.MOST))


class LoraTable(ctypes.Structure):
    """``LoraTable`` of csrc/common.h."""

    _fields_ = (("adapters", c_void_p), ("n_parts", c_int64), ("sizes", c_int64 * LinearParts.MOST))


class LoraRun(ctypes.Structure):
    """``LoraRun`` of csrc/common.h."""

    MOST_ROWS = 48
    _fields_ = (("place", c_int64), ("first", c_int64), ("count", c_int64), ("step", c_int64))


class LoraRuns(ctypes.Structure):
    """``LoraRuns`` of csrc/common.h."""

    _fields_ = (("run", c_void_p), ("n_runs", c_int64), ("inner", c_void_p), ("inner_stride", c_int64))


class StackLayer(ctypes.Structure):
    """``StackLayer`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "attention_after", "mlp_norm", "mlp_after")),
        *((name, LinearParts) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
        *((name, c_void_p) for name in ("qkv_lora", "out_lora", "gate_up_lora", "down_lora")),
        *((name, c_void_p) for name in ("cos_sin", "q_norm", "k_norm", "sinks")),
        *((name, c_int) for name in ("rotary_dim", "window")),
    )


class StackCall(ctypes.Structure):
    """``StackCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "final_norm", "embedded", "hidden", "x", "act")),
        ("rope", RopeCall),
        ("attention", AttentionCall),
        *((name, c_int64) for name in ("n_layers", "hidden_size", "intermediate_size")),
        *((name, c_void_p) for name in ("window_table", "window_loc", "lora", "ends")),
        ("n_ends", c_int64),
        *((name, c_float) for name in ("eps", "residual_scale")),
        *((name, c_int) for name in ("threads", "norm_wide", "gelu")),
    )


class DecodeCall(ctypes.Structure):
    """``DecodeCall`` of csrc/common.h."""

    _fields_ = (
        ("stack", StackCall),
        *((name, c_void_p) for name in ("table", "head", "ids", "logits", "best", "chosen", "last")),
    )


class Expert(ctypes.Structure):
    """``Expert`` of csrc/common.h."""

    _fields_ = (("gate_up", LinearParts), ("down", LinearParts))


class ExpertsCall(ctypes.Structure):
    """``ExpertsCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("experts", "x", "ids", "weights", "out")),
        *((name, c_int64) for name in ("n_tokens", "top_k", "n_experts", "hidden_size", "inner_size")),
        *((name, c_float) for name in ("alpha", "limit")),
        ("threads", c_int),
    )


class LoraCall(ctypes.Structure):
    """``LoraCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "runs", "x", "out")),
        *((name, c_int64) for name in ("n_in", "n_out")),
        ("threads", c_int),
    )


class QuantiseCall(ctypes.Structure):
    """``QuantiseCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "words", "scale", "sub")),
        *((name, c_int64) for name in ("n_out", "n_in")),
        *((name, c_int) for name in ("kind", "threads")),
    )


class CompactCall(ctypes.Structure):
    """``CompactCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("words", "compact", "table", "strays", "too_many")),
        *((name, c_int64) for name in ("n_out", "n_in")),
        ("threads", c_int),
    )


class ExponentsCall(ctypes.Structure):
    """``ExponentsCall`` of csrc/common.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("words", "exponents")),
        *((name, c_int64) for name in ("n_out", "n_in")),
        ("threads", c_int),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "source": (c_char_p, ()),
    "set_region": (None, (c_void_p, c_void_p, c_void_p)),
    "isa": (c_char_p, ()),
    "isa_name": (c_char_p, (c_int,)),
    "set_isa": (c_int, (c_char_p,)),
    "rms_norm": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int)),
    "add_rms_norm": (None, (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int)),
    "silu_mul": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "gelu_mul": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "rope_kv_write": (None, (c_int, c_void_p)),
    "paged_attention": (None, (c_int, c_void_p)),
    "argmax": (None, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "apply_bitmask": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "masked_argmax": (None, (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "sample": (None, (c_int, c_void_p)),
    "logprobs": (None, (c_int, c_void_p)),
    "linear": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int)),
    "packed_linear": (None, (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "layer_stack": (None, (c_void_p,)),
    "decode": (c_int, (c_void_p,)),
    "packed_rows": (None, (c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int)),
    "experts": (None, (c_int, c_void_p)),
    "lora": (None, (c_void_p,)),
    "quantise": (None, (c_int, c_void_p)),
    "compact": (None, (c_void_p,)),
    "exponents": (None, (c_void_p,)),
}


class Library:
    """The loaded shared library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError for a file that is not a library of kernels."""
        self.path = path
        self._loaded = ctypes.CDLL(str(path))
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._loaded, f"bough_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def function(self, name: str) -> Callable[..., Any]:
        """The C function ``bough_<name>``; calling it releases the GIL."""
        return self._functions[name]

    def digest(self) -> str:
        """Digest of the sources that the library was built from."""
        return str(self._functions["source"]().decode())

    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._functions["isa"]().decode())

    def isas(self) -> list[str]:
        """The instruction sets that the library holds and this machine can run, worst first."""
        names: list[str] = []
        while (name := self._functions["isa_name"](len(names))) is not None:
            names.append(name.decode())
        return names

    def set_isa(self, name: str) -> None:
        """Use another instruction set from now on; ValueError if this machine cannot. For tests and measurements."""
        if not self._functions["set_isa"](name.encode()):
            raise ValueError(f"no kernels for {name!r}; there are {', '.join(self.isas())}")

    def lacks(self, features: Collection[str]) -> str | None:
        """What to do where it has not the best instruction set for a processor with these ``features``, in Linux's
        words; None where it has."""
        best = next((isa for feature, isa in BEST.items() if feature in features), None)
        if best is None or best in self.isas():
            return None
        return f"their compiler or this kernel does not know {best}: take newer ones, delete {self.path}"

    def share_threads(self) -> str | None:
        """Use the OpenMP runtime that torch has loaded; its path, or None if there is none and one thread must do.

        A second runtime in the process would bring a second pool of threads, which spin against the first.
        """
        path = openmp_runtime()
        if path is None:
            return None
        with contextlib.suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(path)
            entries = runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads
            self._functions["set_region"](*(ctypes.cast(entry, c_void_p) for entry in entries))
            return path
        return None


@dataclass(frozen=True, slots=True)
class Loading:
    """The library, or None with the ``reason`` why; ``openmp`` is the path of the runtime whose threads it uses."""

    library: Library | None
    reason: str
    openmp: str | None = None


@cache
def load() -> Loading:
    """The library from the package if it fits its sources, else from the cache folder, built if necessary.

    The one warning about missing kernels, or that there are better ones, is written here, once per process.
    """
    packaged = _open(build.PACKAGED) if build.is_whole(build.PACKAGED) else None
    if packaged is not None and packaged.digest() == build.source_digest():
        return _loaded(packaged, "built at installation")
    try:
        path = build.cached_library()
    except build.BuildError as error:
        return _without(str(error))
    library = _open(path)
    if library is None:
        return _without(f"{path} cannot be loaded; delete it")
    return _loaded(library, "built at first use")


def _without(reason: str) -> Loading:
    log.warning("no compiled kernels, plain torch is used instead and is many times slower: %s", reason)
    return Loading(None, reason)


def _loaded(library: Library, reason: str) -> Loading:
    if not library.isas():
        return _without("this processor lacks SSSE3")
    if (advice := library.lacks(flags())) is not None:
        log.warning("the kernels are those for %s, and slower than they could be: %s", library.isa(), advice)
    return Loading(library, reason, library.share_threads())


def openmp_runtime() -> str | None:
    """Path of the OpenMP runtime in this process, torch's own if there are several."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    found = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp5", "libomp"))]
    return min(found, key=lambda p: "torch" not in p, default=None)


def _open(path: Path) -> Library | None:
    try:
        return Library(path)
    except (OSError, AttributeError):
        return None
