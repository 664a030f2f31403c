"""How the chat families mark what a model thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """One family's way to think aloud.

    Attributes:
        name: as in ``--reasoning-parser``.
        opens, closes: around the reasoning.
        assumed: an answer begins with reasoning even without ``opens``, unless the prompt says otherwise.
        ends_at_call: the beginning of a tool call ends the reasoning too.
        channels: the answer is a sequence of messages on channels; see :mod:`bough.text.reasoning.channels`.
        answers: what the answer itself begins with, where something may stand between ``closes`` and the answer.
        aliases: names of other servers for the same.
        marks: texts of which the chat template contains all, for one of the tuples.
    """

    name: str
    opens: str = "<think>"
    closes: str = "</think>"
    assumed: bool = False
    ends_at_call: bool = False
    channels: bool = False
    answers: str = ""
    aliases: tuple[str, ...] = ()
    marks: tuple[tuple[str, ...], ...] = ()

    def special(self, tokens: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the tokenizer's special ``tokens`` that the format is written with."""
        if self.channels:
            return tuple(token for token in tokens if token in CHANNEL_TOKENS)
        return tuple(token for token in tokens if token in self.opens or token in self.closes)


CHANNEL_TOKENS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip


FAMILIES = (
    ReasoningFormat(
        name="gpt-oss", opens="<|channel|>analysis<|message|>", closes="<|end|>", channels=True,
        answers="<|channel|>final<|message|>",
        aliases=("gpt_oss", "harmony", "openai"), marks=(("<|channel|>", "<|message|>"),),
    ),
    ReasoningFormat(
        name="magistral", opens="[THINK]", closes="[/THINK]", aliases=("mistral",), marks=(("[THINK]",),)
    ),
    ReasoningFormat(name="kimi", opens="◁think▷", closes="◁/think▷", marks=(("◁think▷",),)),
    ReasoningFormat(
        name="seed-oss", opens="<seed:think>", closes="</seed:think>", aliases=("seed_oss",),
        marks=(("<seed:think>",),),
    ),
    ReasoningFormat(
        name="gemma-4", opens="<|channel>thought", closes="<channel|>", aliases=("gemma4",), marks=(("<|channel>",),)
    ),
    ReasoningFormat(
        name="granite", opens="Here is my thought process:", closes="Here is my response:",
        marks=(("Here is my thought process:",),),
    ),
    ReasoningFormat(
        name="deepseek-r1", assumed=True, aliases=("deepseek_r1", "qwen3-thinking"),
        marks=(("<｜Assistant｜>", "think>"),),
    ),
    ReasoningFormat(
        name="kimi-k2", ends_at_call=True, aliases=("kimi_k2",), marks=(("<|tool_calls_section_begin|>", "think>"),)
    ),
    ReasoningFormat(name="glm-4.5", ends_at_call=True, aliases=("glm45",), marks=(("<arg_key>", "think>"),)),
    ReasoningFormat(
        name="minimax", assumed=True, aliases=("minimax_m2", "minimax-append-think"),
        marks=(("<minimax:tool_call>", "think>"),),
    ),
    ReasoningFormat(
        name="qwen3", aliases=("think", "deepseek-v3", "deepseek_v3", "step3"), marks=(("<think>",), ("</think>",))
    ),
)  # fmt: skip
"""In the order in which a template is compared with their marks."""

BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


_WORDS = ("think", "thinking", "thought", "thoughts", "reasoning", "reason", "reflection", "scratchpad")
_PAIRS = (
    ("<{}>", "</{}>"), ("[{}]", "[/{}]"), ("<|{}|>", "<|/{}|>"), ("<|start_{}|>", "<|end_{}|>"),
    ("<|begin_of_{}|>", "<|end_of_{}|>"), ("<|{}_start|>", "<|{}_end|>"), ("<|{}_begin|>", "<|{}_end|>"),
)  # fmt: skip
_TAGS = tuple(
    tuple(change(mark.format(word)) for mark in pair)
    for pair in _PAIRS for word in _WORDS for change in (str, str.upper)
)  # fmt: skip
"""Tags of models that are in no list; a template that has both of a pair writes or cuts out reasoning between them."""


def of_tags(opens: str, closes: str) -> ReasoningFormat:
    """The format of a model that thinks between two tags."""
    return ReasoningFormat(name=f"{opens}...{closes}", opens=opens, closes=closes)


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format whose marks are in the source of a chat template; None for a model that does not think."""
    for family in FAMILIES:
        if any(all(mark in template for mark in marks) for marks in family.marks):
            return family
    return next((of_tags(opens, closes) for opens, closes in _TAGS if opens in template and closes in template), None)
