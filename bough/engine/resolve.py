"""Fills in what the configuration leaves to the machine, and returns a new configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bough.base.config import Config
from bough.base.errors import ConfigError

CPU_MAX_RUNNING = 64
CPU_STEP_TOKENS = 128


def resolve(config: Config) -> Config:
    """``config`` with the scheduler's defaults for a CPU; raises ConfigError for values that cannot work.

    A step on a CPU is bound by arithmetic from some hundred tokens on, so a larger budget would only make everybody wait
    longer for it: running streams, and whoever arrives. A smaller one lets more decode tokens ride along with prompts.
    """
    kv, schedule = config.kv, config.schedule
    if not 1 <= kv.page_size <= 1024:
        raise ConfigError(f"page size must be in [1, 1024], not {kv.page_size}", param="page_size")
    if not 0 < kv.memory_share <= 1:
        raise ConfigError(f"the memory share must be in (0, 1], not {kv.memory_share:g}", param="memory_share")
    if not schedule.max_wait >= 0:
        raise ConfigError(f"the longest wait must not be negative, but is {schedule.max_wait:g}", param="max_wait")
    _at_least_one("context_length", config.model.context_length)
    _at_least_one("threads", config.device.threads)
    _at_least_one("max_loras", config.lora.max_loras)
    if config.lora.lora_dir is not None and not Path(config.lora.lora_dir).is_dir():
        raise ConfigError(f"{config.lora.lora_dir} is no folder of adapters", param="lora_dir")
    max_running = _at_least_one("max_running", schedule.max_running) or CPU_MAX_RUNNING
    step_tokens = _at_least_one("step_tokens", schedule.step_tokens) or max(CPU_STEP_TOKENS, 2 * max_running)
    if step_tokens < max_running:
        raise ConfigError(
            f"a step of {step_tokens} tokens cannot hold {max_running} running requests", param="step_tokens"
        )
    depth = 1 if schedule.depth is None else schedule.depth
    return replace(config, schedule=replace(schedule, max_running=max_running, step_tokens=step_tokens, depth=depth))


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}", param=name)
    return value
