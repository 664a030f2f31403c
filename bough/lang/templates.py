"""Chat templates as pairs of prefix and suffix per role, and the registry of those that SGLang names.

The texts themselves are in :mod:`bough.lang.template_table`. A model's own template is used where a backend can
render it, see :mod:`bough.lang.model_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

Message = Mapping[str, Any]


class ChatTemplateStyle(Enum):
    PLAIN = auto()
    LLAMA2 = auto()
    """The first system message stands inside the first user message."""


@dataclass
class ChatTemplate:
    """How messages become text.

    Attributes:
        default_system_prompt: begins a conversation that has no system message.
        role_prefix_and_suffix: role -> texts around its content; an unknown role has none.
        stop_str: texts that end an answer, besides those that are asked for.
        image_token, audio_token: stand in the text for media.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: dict[str, tuple[str, str]]
    stop_str: Sequence[str] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = field(default=ChatTemplateStyle.PLAIN)

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Message]) -> tuple[str, str]:
        """The texts around a message of ``role`` that comes after ``hist_messages``."""
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                opening, _ = self.role_prefix_and_suffix.get("user", ("", ""))
                return opening + prefix, suffix
            if role == "user" and len(hist_messages) == 1 and hist_messages[0]["content"] is not None:
                return "", suffix
        return prefix, suffix

    def get_prompt(self, messages: Sequence[Message]) -> str:
        """The whole conversation; the content None of a system message stands for the default."""
        prompt = ""
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(role, messages[:i])
            prompt += f"{prefix}{content}{suffix}"
        return prompt


chat_template_registry: dict[str, ChatTemplate] = {}
matching_function_registry: list[Callable[[str], str | None]] = []


def register_chat_template(template: ChatTemplate) -> None:
    """Make ``template`` known by its name."""
    chat_template_registry[template.name] = template


def register_chat_template_matching_function(func: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Let ``func`` name the template for a model's path; the first function that names one is obeyed."""
    matching_function_registry.append(func)
    return func


def get_chat_template(name: str) -> ChatTemplate:
    """The template of that name; KeyError where there is none."""
    return chat_template_registry[name]


def get_chat_template_by_model_path(model_path: str) -> ChatTemplate:
    """The template that fits the name of a model; ``default`` where none is known."""
    for name_for in matching_function_registry:
        name = name_for(model_path)
        if name is not None:
            return get_chat_template(name)
    return get_chat_template("default")


_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (r"deepseek-(v3|r1)", r"base", "deepseek-v3"),
    (r"orion", "", "claude"),
    (r"janus", "", "janus-pro"),
    (r"(?=.*dbrx)(?=.*instruct)", "", "dbrx-instruct"),
    (r"vicuna|llava-v1\.5|llava-next-video-7b", "", "vicuna_v1.1"),
    (r"llama-2.*chat|codellama.*instruct", "", "llama-2-chat"),
    (r"pixtral|(mistral|mixtral).*instruct", "", "mistral"),
    (r"llama-3.*instruct", "", "llama-3-instruct"),
    (r"tinyllama", "", "chatml"),
    (r"qwen.*vl", "", "qwen2-vl"),
    (r"glm[-_]?4(\.\d+)?v", "", "glm-4v"),
    (r"qwen.*(chat|instruct)", r"llava", "qwen"),
    (r"llava-v1\.6-34b|llava-v1\.6-yi-34b|llava-next-video-34b|llava-onevision-qwen2", "", "chatml-llava"),
    (r"yi-vl", r"llava", "yi-vl"),
    (r"yi-1\.5.*chat", "", "yi-1.5"),
    (r"gemma-4.*it", "", "gemma-4-it"),
    (r"(gemma.*it)|(gemma-3)", "", "gemma-it"),
    (r"minicpm-v", "", "minicpmv"),
    (r"minicpm-o", "", "minicpmo"),
    (r"c4ai-command-r", "", "c4ai-command-r"),
    (r"granite.*instruct", "", "granite-3-instruct"),
    (r"internvl2_5", "", "internvl-2-5"),
    (r"intern-?s1", "", "interns1"),
)
"""(in the model's path, not in it, template), in SGLang's order."""


@register_chat_template_matching_function
def _known_model(model_path: str) -> str | None:
    for wanted, unwanted, name in _PATTERNS:
        if re.search(wanted, model_path, re.IGNORECASE):
            if not (unwanted and re.search(unwanted, model_path, re.IGNORECASE)):
                return name
    return None
