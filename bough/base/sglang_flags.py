"""SGLang's keywords of an engine and of a server, as what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "model_path": "path",
    "mem_fraction_static": "memory_share",
    "max_total_tokens": "pool_tokens",
    "max_running_requests": "max_running",
    "chunked_prefill_size": "step_tokens",
    "schedule_policy": "policy",
    "served_model_name": "served_name",
    "max_loras_per_batch": "max_loras",
}
_SWITCHES = {"disable_radix_cache": ("cache", "none"), "disable_cuda_graph": ("graphs", "off"),
             "disable_overlap_schedule": ("depth", 0)}  # fmt: skip
_SINGLE = ("tp_size", "dp_size", "pp_size", "ep_size", "nnodes")
"""One engine is one of each."""
_IDLE = {
    "tokenizer_path": "the tokenizer is the model's own",
    "random_seed": "requests take a seed each",
    "skip_tokenizer_init": "prompts may be ids, and answers have them",
    "quantization": "the weights are read as the file holds them, or rounded by `quantize`",
    "kv_cache_dtype": "the option is `kv_dtype`",
}


def translated(flags: Mapping[str, Any]) -> dict[str, Any]:
    """``flags`` without SGLang's names.

    Values that ask for what is so anyway are dropped; ``trust_remote_code`` is, since no code of a model is ever run.
    Raises TypeError for what means nothing here, with the reason, and for an option that is named in both ways.
    """
    found: dict[str, Any] = {}
    model = flags.get("model_path", flags.get("path"))
    for name, value in flags.items():
        new = _NAMES.get(name, name)
        if name in _SWITCHES:
            if not value:
                continue
            new, value = _SWITCHES[name]
        elif name == "trust_remote_code" or (name in _SINGLE and value in (1, None)):
            continue
        elif name in _SINGLE:
            raise TypeError(f"{name!r}: one engine is one worker, of one device")
        elif name in _IDLE:
            if value in (None, False) or (name == "tokenizer_path" and value == model):
                continue
            raise TypeError(f"{name!r} is not an option of the engine: {_IDLE[name]}")
        if new in found:
            raise TypeError(f"{new!r} is given twice")
        found[new] = value
    return found
