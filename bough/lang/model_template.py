"""A model's own chat template as prefixes and suffixes of roles, learned from what it makes of a few conversations.

Programs write a conversation piece by piece, so they need the text before and after each message and not the whole.
A template that rewrites earlier messages, or refuses a probe, cannot be used so and is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bough.lang.templates import ChatTemplate, Message

Render = Callable[[list[dict[str, str]], bool], Awaitable[str | None]]
"""(messages, whether an answer is to begin) -> text, None where the template refuses."""

_MARKS = ("kibo", "zuma", "tavi", "nelu", "roga", "sipe")
"""Contents of the probes: words that no template contains."""


@dataclass
class ModelTemplate(ChatTemplate):
    """Prefixes that depend on what came before: of the first message, and of a user's after a system message.

    Attributes:
        first: role -> prefix of a message that is the first of its conversation.
        after_system: prefix of a user's message that follows the system's.
    """

    first: dict[str, str] = field(default_factory=dict)
    after_system: str = ""

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Message]) -> tuple[str, str]:
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if not hist_messages and role in self.first:
            return self.first[role], suffix
        if role == "user" and len(hist_messages) == 1 and hist_messages[0]["role"] == "system":
            return self.after_system, suffix
        return prefix, suffix


async def model_template(render: Render) -> ModelTemplate | None:
    """What ``render`` does, role by role; None where it cannot be told so."""
    s, u, a, u2, a2, u3 = _MARKS
    roles = {s: "system", u: "user", a: "assistant", u2: "user", a2: "assistant", u3: "user"}

    async def probe(*marks: str, answer: bool = False) -> list[str] | None:
        text = await render([{"role": roles[m], "content": m} for m in marks], answer)
        if text is None:
            return None
        pieces = []
        for mark in marks:
            piece, found, text = text.partition(mark)
            if not found:
                return None
            pieces.append(piece)
        return [*pieces, text]

    plain = await probe(u, a, u2, a2, u3)
    opened = await probe(u, answer=True)
    longer = await probe(u, a, u2, answer=True)
    system = await probe(s, u, a, u2)
    if plain is None or opened is None or longer is None:
        return None
    first_user, after_user, between, _, again, end = plain
    # Behind a user's message: its suffix, and the beginning of an answer, where one is asked for.
    user_suffix = end
    if not opened[1].startswith(user_suffix) or not after_user.startswith(user_suffix):
        return None
    assistant_prefix = opened[1][len(user_suffix) :]
    if after_user != user_suffix + assistant_prefix or longer[3] != opened[1] or between != again:
        return None
    closed = await probe(u, a)
    if closed is None or not between.startswith(closed[2]):
        return None
    assistant_suffix = closed[2]
    user_prefix = between[len(assistant_suffix) :]
    template = ModelTemplate(
        name="model",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "user": (user_prefix, user_suffix),
            "assistant": (assistant_prefix, assistant_suffix),
        },
        stop_str=(),
        first={"user": first_user},
        after_system=user_prefix,
    )
    if system is not None:
        await _learn_system(template, system, probe)
    return template


async def _learn_system(
    template: ModelTemplate, system: list[str], probe: Callable[..., Awaitable[list[str] | None]]
) -> None:
    """Add what surrounds a system message, where the template has one."""
    alone = await probe(_MARKS[0])
    user_prefix = template.role_prefix_and_suffix["user"][0]
    if alone is not None and system[1].startswith(alone[1]):
        suffix = alone[1]
    elif user_prefix and system[1].endswith(user_prefix):
        suffix = system[1].removesuffix(user_prefix)
    else:
        suffix = ""
    template.role_prefix_and_suffix["system"] = (system[0], suffix)
    template.first["system"] = system[0]
    template.after_system = system[1][len(suffix) :]


def without_lead(ids: list[int], with_special: Sequence[int], without: Sequence[int]) -> list[int]:
    """``ids`` without the special tokens that every prompt gets in front anyway."""
    lead = list(with_special[: max(0, len(with_special) - len(without))])
    return ids[len(lead) :] if lead and ids[: len(lead)] == lead else ids
