"""Reasoning and answer of a text that a reasoning model wrote, as ``separate_reasoning`` tells them apart."""

from __future__ import annotations

_THINK = ("<think>", "</think>", False)
_ALWAYS = ("<think>", "</think>", True)

TAGS: dict[str, tuple[str, str, bool]] = {
    "deepseek-r1": _ALWAYS,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>", False),
    "kimi": ("◁think▷", "◁/think▷", False),
    "kimi_k2": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _ALWAYS,
    "minimax": _ALWAYS,
    "nano_v3": _THINK,
    "interns1": _THINK,
    "step3": _ALWAYS,
}
"""Model type -> (opening tag, closing tag, whether the text begins with reasoning although no tag opens it)."""


def split_reasoning(text: str, model_type: str | None) -> tuple[str, str]:
    """(reasoning, answer). Raises ValueError for a model type that is not known."""
    if not model_type:
        raise ValueError("Model type must be specified")
    if model_type.lower() not in TAGS:
        raise ValueError(f"Unsupported model type: {model_type}")
    opening, closing, always = TAGS[model_type.lower()]
    if not always and opening not in text:
        return "", text
    reasoning, closed, answer = text.replace(opening, "").strip().partition(closing)
    return reasoning, answer.strip() if closed else ""
