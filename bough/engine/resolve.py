"""Fills in what the configuration leaves to the machine, and returns a new configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from bough.base.config import Config, ScheduleConfig
from bough.base.errors import ConfigError
from bough.device.platform.cpu import default_threads, features


class Defaults(NamedTuple):
    """What a kind of device is good for.

    Attributes:
        max_running: sequences in one step.
        step_tokens: tokens of one step, of each thread of a CPU. Two threads are bound by arithmetic from some hundred
            tokens on, so a larger budget would only make everybody wait longer for it: running streams, and whoever
            arrives; a smaller one lets more decode tokens ride along with prompts. Tiles (AMX) multiply so fast that
            weights have to be read for more of them, ``TILES_TOKENS``. A GPU needs thousands to be. A fifth is for the
            ends of prompts, see planner.py.
        memory_share: of what is free after loading. A CPU's memory is others', too.
    """

    max_running: int
    step_tokens: int
    memory_share: float


MOST_THREADS = 1024

MOST_DEFAULT_TOKENS = 1024

TILES_TOKENS = 160

TILES = {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
"""What the kernels that multiply in tiles need."""

SMALL_PARAMETERS = 350_000_000
"""Up to so many, a step of the default's tokens keeps whoever generates waiting for a moment only."""
LEAST_SHARE = 5
"""One in so many tokens of a step is few enough for a large model: with less, its weights are read for too little."""

DEFAULTS = {"cpu": Defaults(64, 80, 0.4), "cuda": Defaults(256, 8192, 0.9)}


def resolve(config: Config, device: Literal["cpu", "cuda"] = "cpu", root: Path = Path("/")) -> Config:
    """``config`` with the defaults for ``device``; raises ConfigError for values that cannot work.

    ``root`` is where /proc hangs.
    """
    kv, schedule, defaults = config.kv, config.schedule, DEFAULTS[device]
    share = defaults.memory_share if kv.memory_share is None else kv.memory_share
    if not 1 <= kv.page_size <= 1024:
        raise ConfigError(f"page size must be in [1, 1024], not {kv.page_size}", param="page_size")
    if not 0 < share <= 1:
        raise ConfigError(f"the memory share must be in (0, 1], not {share:g}", param="memory_share")
    if device == "cpu":
        for param, value in (
            ("dtype", config.model.dtype),
            ("quantize", config.model.quantize),
            ("kv_dtype", kv.kv_dtype),
        ):
            if value == "fp8" or (param == "dtype" and value == "float16"):
                raise ConfigError(f"{param} {value} needs a GPU", param=param)
        if config.device.attention == "flashinfer":
            raise ConfigError("attention by FlashInfer needs a GPU", param="attention")
    if not schedule.max_wait >= 0:
        raise ConfigError(f"the longest wait must not be negative, but is {schedule.max_wait:g}", param="max_wait")
    _at_least_one("context_length", config.model.context_length)
    threads = _at_least_one("threads", config.device.threads)
    if threads is not None and threads > MOST_THREADS:
        raise ConfigError(f"threads must be at most {MOST_THREADS}, not {threads}", param="threads")
    _at_least_one("max_loras", config.lora.max_loras)
    if config.lora.lora_dir is not None and not Path(config.lora.lora_dir).is_dir():
        raise ConfigError(f"{config.lora.lora_dir} is no folder of adapters", param="lora_dir")
    max_running = _at_least_one("max_running", schedule.max_running) or defaults.max_running
    step_tokens = _at_least_one("step_tokens", schedule.step_tokens)
    tiles = device == "cpu" and TILES <= set(features(root)) and config.model.dtype != "float32"
    if step_tokens is None:
        step_tokens = defaults.step_tokens
        if tiles:
            step_tokens = TILES_TOKENS
        if device == "cpu":
            step_tokens = min(step_tokens * (threads or default_threads(root)), MOST_DEFAULT_TOKENS)
        # Prompts get on when all rows run, too.
        step_tokens = max(step_tokens, 2 * max_running)
    # Who asks for steps of so many tokens gets them. Tiles have not been measured with fewer.
    given = device == "cuda" or tiles or schedule.step_tokens is not None
    mixed_tokens = _at_least_one("mixed_tokens", schedule.mixed_tokens) or (step_tokens if given else None)
    if step_tokens < max_running:
        raise ConfigError(
            f"a step of {step_tokens} tokens cannot hold {max_running} running requests", param="step_tokens"
        )
    if mixed_tokens is not None and mixed_tokens > step_tokens:
        raise ConfigError(
            f"mixed_tokens must be at most step_tokens, {step_tokens}, not {mixed_tokens}", param="mixed_tokens"
        )
    depth = _depth(device, threads, root) if schedule.depth is None else schedule.depth
    return replace(
        config,
        device=replace(config.device, device=device),
        kv=replace(kv, memory_share=share),
        schedule=replace(
            schedule, max_running=max_running, step_tokens=step_tokens, mixed_tokens=mixed_tokens, depth=depth
        ),
    )


def paced(schedule: ScheduleConfig, n_parameters: int, routed: bool) -> ScheduleConfig:
    """``schedule`` with the default for ``mixed_tokens`` that :func:`resolve` leaves to the model's size.

    Products of some fifty rows come as near to what a CPU can compute as those of some hundred, so that a prompt loses
    little by small steps. A large model's running streams then wait a fraction of a second for each of its steps, as a
    small one's do. Not if it is ``routed``: a step of a few tokens reads nearly all experts, however few these are.
    """
    step_tokens = schedule.step_tokens
    assert step_tokens is not None
    if schedule.mixed_tokens is not None:
        return schedule
    if routed or n_parameters <= SMALL_PARAMETERS:
        return replace(schedule, mixed_tokens=step_tokens)
    tokens = max(step_tokens * SMALL_PARAMETERS // n_parameters, step_tokens // LEAST_SHARE)
    return replace(schedule, mixed_tokens=tokens)


def _depth(device: Literal["cpu", "cuda"], threads: int | None, root: Path) -> Literal[0, 1]:
    """Whether the host works while the device computes: on a core that computes, it would take what it saves. Of four
    workloads on two cores that both compute, JSON is 20 % slower with it, a single stream 5 %, chat equal but for its
    first tokens (158 instead of 110 ms), and independent requests are 2 % faster (benchmarks/results/depth.json). With
    one of two to spare, independent requests are 4 % faster, the others equal within what repeats differed by
    (depth-spare.json)."""
    spare = threads is not None and threads < default_threads(root)
    return 1 if device == "cuda" or spare else 0


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
    return value
