"""Text and messages of a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bough.lang import speculation

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


def fill(ex: StreamExecutor, value: Any, *, prefix: bool = False) -> None:
    """Append text; ``prefix`` is the template's and not the program's."""
    text = str(value)
    if not prefix and speculation.is_open(ex):
        ex.spec_format.append({"text": text, "stop": None, "name": None})
        return
    ex.speculated_text = ex.speculated_text[len(text) :] if ex.speculated_text.startswith(text) else ""
    ex.text_ += text


def begin_role(ex: StreamExecutor, role: str) -> None:
    assert ex.cur_role is None, "Nested roles are not allowed."
    default = ex.chat_template.default_system_prompt
    if not ex.messages_ and role != "system" and default:
        begin_role(ex, "system")
        fill(ex, default)
        end_role(ex, "system")
    ex.cur_role = role
    prefix, _ = ex.chat_template.get_prefix_and_suffix(role, ex.messages_)
    fill(ex, prefix, prefix=True)
    ex.cur_role_begin_pos = len(ex.text_)


def end_role(ex: StreamExecutor, role: str) -> None:
    ex.cur_role = None
    content: Any = ex.text_[ex.cur_role_begin_pos :].lstrip()
    _, suffix = ex.chat_template.get_prefix_and_suffix(role, ex.messages_)
    fill(ex, suffix)
    if ex.cur_images:
        content = [{"type": "text", "text": content}]
        for _, data in ex.cur_images:
            content.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
        ex.cur_images = []
    ex.messages_.append({"role": role, "content": content})
