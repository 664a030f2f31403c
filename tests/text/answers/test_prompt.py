"""Tools and past calls in prompts: in the form that each template takes, in words where it knows of none."""

from __future__ import annotations

from typing import Any

import pytest

from bough.text.chat_template import ChatTemplate, sources_from_gguf
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.formats import AnswerFormat
from bough.text.reasoning.families import BY_NAME as REASONING
from bough.text.tokenizer import Tokenizer
from bough.text.tools.families import BY_NAME, JSON
from bough.text.tools.prompt import tell_tools, write_history

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]

_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[%s]{% endfor %}{% endif %}{% endfor %}"
)
ENCODES = _CALLS.replace("%s", "{{ c.function.name }}:{{ c.function.arguments | tojson }}")
WRITES = _CALLS.replace("%s", "{{ c['function']['name'] + ':' + c['function']['arguments'] }}")
PRINTS = _CALLS.replace("%s", "{{ c.function.name }}:{{ c.function.arguments }}")
EITHER = _CALLS.replace(
    "%s",
    "{{ c.function.name }}:{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
LOOPS = _CALLS.replace(
    "%s",
    "{{ c.function.name }}:{% for k, v in c.function.arguments.items() %}"
    "{{ '{' }}{{ k | tojson }}: {{ v | tojson }}{{ '}' }}{% endfor %}",
)


@pytest.mark.parametrize("source", [ENCODES, WRITES, PRINTS, EITHER, LOOPS])
def test_past_arguments_come_as_the_template_takes_them(source: str, smollm: Tokenizer) -> None:
    template = ChatTemplate({"default": source}, smollm)
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
        prompt = template.render([TALK[0], {**TALK[1], "tool_calls": [call]}])
        assert prompt.text == '[get_weather:{"city": "Köln"}]'


def test_the_default_model_is_told_of_tools_in_words(smollm: Tokenizer, smollm_metadata: dict[str, Any]) -> None:
    template = ChatTemplate(sources_from_gguf(smollm_metadata), smollm)
    assert not template.reads_tools
    told = tell_tools(write_history(TALK, JSON), [TOOL], JSON)
    text = template.render(told).text
    assert '{"name": "function_name", "arguments": {"argument": "value"}}' in text
    assert '{"name": "get_weather", "parameters": {"type": "object"}}' in text
    assert '<|im_start|>assistant\n{"name": "get_weather", "arguments": {"city": "Köln"}}<|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text


def test_a_system_message_is_kept_and_results_are_joined() -> None:
    talk = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TALK, TALK[2]]
    told = tell_tools(write_history(talk, BY_NAME["hermes"]), [TOOL], BY_NAME["hermes"])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\nYou can call functions.")
    assert told[2]["content"] == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert told[3]["content"].count("<tool_response>") == 2


def test_special_tokens_that_formats_are_written_with_stay_in_the_text(all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds["byte-level"]
    form = AnswerFormat(BY_NAME["mistral"], REASONING["qwen3"])
    assert form.kept(tokenizer) == frozenset()
    tag = tokenizer.token_id("[INST]")
    assert tag is not None and tag in tokenizer.special_ids
    text = IncrementalDetokenizer(tokenizer, keep=frozenset((tag,)))
    ids = tokenizer.encode("a[INST]b<|im_end|>", add_special=False)
    assert text.push(ids) + text.flush() == "a[INST]b"
