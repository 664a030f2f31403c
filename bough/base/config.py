"""The configuration: frozen, nested by owner, resolved once into a new object.

Each part of the engine receives its own section and nothing else. The command line is generated from
these classes (:mod:`bough.base.cli`): a field is a flag, its ``help`` the flag's help. Defaults that
depend on the machine are None here and are filled in by :mod:`bough.engine.resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from bough.base.limits import DEFAULT_LIMITS, Limits


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help, **metadata})


PolicyName = Literal["lpm", "fcfs", "dfs", "priority", "random", "program"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which weights are served, and how they are held."""

    path: str | None = option(
        None,
        "a GGUF file, a Hugging Face folder or a hub id; without it the embedded default model",
        positional=True,
    )
    revision: str | None = option(None, "hub revision of the model")
    served_name: str | None = option(None, "name that clients use for the model")
    load_format: Literal["auto", "dummy"] = option(
        "auto", "dummy makes random weights of the config's shapes on the device, for measurements"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option("auto", "dtype of weights, compute and KV")
    quantize: Literal["auto", "none", "int8", "int4", "fp8"] = option(
        "auto", "bits of the weights: as the file holds them, the dtype's, or rounded while loading"
    )
    context_length: int | None = option(None, "longest sequence in tokens; the model's own by default")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVConfig:
    """The KV pool and the tree over it."""

    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"] = option(
        "auto", "what the KV pool holds: as computed, or rounded; int8 has one scale per token and head"
    )
    page_size: int = option(1, "tokens per KV page; 1 shares to the token")
    memory_share: float | None = option(None, "share of the free memory after loading that the KV pool takes")
    pool_tokens: int | None = option(None, "size of the KV pool in tokens, instead of a memory share")
    eviction: Literal["lru", "lfu", "fifo", "arc", "program"] = option("lru", "which cached leaf goes first")
    cache: Literal["radix", "none"] = option("radix", "prefix cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Who runs next and how much of it in one step."""

    policy: PolicyName = option("lpm", "order of the waiting requests")
    max_running: int | None = option(None, "most sequences in one step")
    step_tokens: int | None = option(
        None, "token budget of one step; longer prompts are cut into chunks, of at most four fifths where others wait"
    )
    mixed_tokens: int | None = option(
        None,
        "token budget of a step in which sequences generate, for each prompt that is to be computed; fewer keep them"
        " steadier, and the prompt takes longer (default, on a CPU: the larger a dense model, the fewer)",
    )
    depth: Literal[0, 1] | None = option(None, "steps launched ahead of the host: 0 synchronous, 1 overlapped")
    jump_forward: Literal["on", "off"] = option("on", "append tokens that a grammar forces without sampling them")
    grammar_backend: Literal["llguidance", "xgrammar"] = option(
        "llguidance", "library that constrains answers; xgrammar is an extra, for few schemas that are used long"
    )
    prefetch: Literal["on", "off"] = option(
        "on", "compute what programs say they will append while nothing else wants the device"
    )
    max_wait: float = option(5.0, "seconds after which a waiting request goes first, whatever the policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto is a GPU where there is one")
    graphs: Literal["on", "off"] = option("on", "replay captured decode steps on a GPU")
    attention: Literal["triton", "flashinfer"] = option(
        "triton", "on a GPU, the kernels of steps that are not captured: bough's own, or FlashInfer's"
    )
    threads: int | None = option(None, "compute threads; all cores by default")
    kernels: Literal["auto", "reference"] = option("auto", "compiled kernels where they exist, or plain torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters, which requests name as their model."""

    lora_dir: str | None = option(None, "folder of adapters (PEFT): each subfolder is one, under its own name")
    max_loras: int = option(8, "most adapters held at a time; the one used least recently makes room")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on")
    grace: float = option(30.0, "seconds that running streams get to finish after SIGTERM")
    request_timeout: float | None = option(None, "seconds after which a request ends with an error")
    stall_timeout: float = option(60.0, "seconds without a step, with work queued, until /readyz fails")
    tool_parser: str = option("auto", "how the model writes tool calls: a chat family, none, or by its template")
    reasoning_parser: str = option(
        "auto", "how the model marks its reasoning: a chat family, OPEN...CLOSE, none, or by its template"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "how much is logged")
    log_requests: Literal["off", "summary", "full"] = option(
        "summary", "log a line for each request; full adds its body, and so the prompts"
    )
    api_key: tuple[str, ...] = option((), "key that clients must send; may be repeated", secret=True)
    admin_api_key: str | None = option(None, "key for the routes that operate the server", secret=True)
    api_key_file: str | None = option(None, "TOML file of keys with tenants and scopes; read again when it changes")
    admin_socket: str | None = option(None, "path of a Unix socket for the routes that operate the server")
    tls_cert: str | None = option(None, "PEM file of the certificate chain; serves HTTPS")
    tls_key: str | None = option(None, "PEM file of the certificate's key")
    cors_origin: tuple[str, ...] = option((), "origin of web pages that may call the server; may be repeated; * is any")
    files: str | None = option(None, "folder of uploaded files and batches; below the user's cache by default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything. Sections are handed to their owners; nobody else holds the whole."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    device: DeviceConfig = DeviceConfig()
    lora: LoraConfig = LoraConfig()
    serve: ServeConfig = ServeConfig()
    limits: Limits = DEFAULT_LIMITS
