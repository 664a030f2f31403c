"""Which chat family a model belongs to: how it writes tool calls, and how it marks its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.base.errors import ConfigError
from bough.text.reasoning import families as reasoning_families
from bough.text.reasoning.families import ReasoningFormat, detect_reasoning
from bough.text.tokenizer import Tokenizer
from bough.text.tools import families as tool_families
from bough.text.tools.families import detect_family
from bough.text.tools.format import Family


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers; None for what it does not have, or what is not to be looked for."""

    tools: Family | None
    reasoning: ReasoningFormat | None

    def thinking(self, prompt: str) -> bool | None:
        """Whether ``prompt`` (its end is enough) leaves the reasoning open; None when it says nothing."""
        end = prompt.rstrip()
        if self.reasoning is None or self.reasoning.channels:
            return None
        return True if end.endswith(self.reasoning.opens) else False if end.endswith(self.reasoning.closes) else None

    def kept(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens without whose text the answers could not be read."""
        tokens: Sequence[str] = ()
        if self.tools is not None:
            tokens = self.tools.special(tokenizer.special_tokens)
        if self.reasoning is not None:
            tokens = (*tokens, *self.reasoning.special(tokenizer.special_tokens))
        if self.tools is tool_families.GPT_OSS:
            tokens = (*tokens, *reasoning_families.CHANNEL_TOKENS)
        ids = (tokenizer.token_id(token) for token in tokens)
        return frozenset(token for token in ids if token is not None)


def find_tools(name: str, template: str) -> Family | None:
    """The family called ``name``: ``none``, or ``auto`` for that of ``template``. Raises ConfigError for others."""
    if name in ("auto", "none"):
        return detect_family(template) if name == "auto" else None
    if (family := tool_families.BY_NAME.get(name)) is None:
        raise ConfigError(
            f"unknown tool parser {name!r}; known: auto, none, {', '.join(sorted(tool_families.BY_NAME))}"
        )
    return family


def find_reasoning(name: str, template: str) -> ReasoningFormat | None:
    """As :func:`find_tools`, for reasoning; ``OPEN...CLOSE`` for what is between any two tags."""
    if name in ("auto", "none"):
        return detect_reasoning(template) if name == "auto" else None
    opens, dots, closes = (part.strip() for part in name.partition("..."))
    if dots and opens and closes:
        return reasoning_families.of_tags(opens, closes)
    if (family := reasoning_families.BY_NAME.get(name)) is None:
        known = ", ".join(sorted(reasoning_families.BY_NAME))
        raise ConfigError(f"unknown reasoning parser {name!r}; known: auto, none, OPEN...CLOSE, {known}")
    return family
