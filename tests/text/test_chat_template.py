"""Prompts are those of transformers; nothing that a client writes acts as a special token or harms the server."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError, InvalidRequest
from bough.text.chat_template import ChatTemplate, sources_from_folder, sources_from_gguf
from bough.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGS = (
    "{{ bos_token }}{%- if tools %}[TOOLS]{{ tools | tojson }}{% endif %}\n"
    "{%- for m in messages %}\n"
    "    {%- if m.role == 'user' %}[INST] {{ m.name ~ ': ' if m.name }}{{ m.content }} [/INST]\n"
    "    {%- elif m.tool_calls %}\n"
    "        {%- for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "{% endfor %}{{ eos_token }}\n"
    "    {%- else %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].lstrip('\\n') }}{{ eos_token }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}"
)
PARTS = (
    "{% generation %}{% for m in messages %}<|im_start|>{{ m.role }} "
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% endgeneration %}"
)
REPR = "{% for m in messages %}<|im_start|>{{ m.content }}{{ m }}<|im_end|>{% endfor %}{{ tools }}"
# As of DeepSeek-V2.5, V3 and R1: calls are written only beside a content of null, and their arguments are text.
NULLS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "<call>{{ c['type'] + '<sep>' + c['function']['name'] + '\n```json\n' + c['function']['arguments'] + '\n```' }}"
    "{% endfor %}{{ eos_token }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}{{ '<|assistant|>' + m['content'] + eos_token }}"
    "{% endif %}{% if m['role'] == 'tool' %}<out>{{ m['content'] }}</out>{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "tags": TAGS, "parts": PARTS, "repr": REPR}

TOOLS = [{"type": "function", "function": {"name": "get", "description": "Ünï <b>", "parameters": {"type": "object"}}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "  2 < 3 & <b>bold</b>? 日本", "name": "ann"},
    {"role": "assistant", "content": "<think>hm</think>\n\nyes"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"x": "<"}}}]},
    {"role": "tool", "content": "{\"a\": 1}"},
]  # fmt: skip


def chat(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate({"default": source}, tokenizer, now=lambda: datetime(2024, 2, 29))


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_agree_with_transformers(name: str, folders: dict[str, Path], all_kinds: dict[str, Tokenizer]) -> None:
    from transformers import PreTrainedTokenizerFast

    for kind, folder in folders.items():
        oracle = PreTrainedTokenizerFast.from_pretrained(folder)
        ours = chat(TEMPLATES[name], all_kinds[kind])
        talk = TALK
        if name == "parts":
            talk = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
        for tools in (None, TOOLS):
            for prompt in (False, True):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
                expected = oracle.apply_chat_template(talk, chat_template=TEMPLATES[name], tokenize=False, **options)
                rendered = ours.render(talk, **options)
                assert rendered.text == expected
                assert all_kinds[kind].encode_chat(rendered) == oracle.encode(expected, add_special_tokens=False)


def test_default_model_prompt(smollm: Tokenizer, smollm_metadata: dict[str, Any]) -> None:
    ours = ChatTemplate(sources_from_gguf(smollm_metadata), smollm)
    prompt = ours.render([{"role": "user", "content": "hi"}])
    assert prompt.text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.encode_chat(prompt) == smollm.encode(prompt.text, add_special=False)


# ---- special tokens that clients write


LITERALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<s>",
    "</s>",
    "[INST]",
    "<unk>",
    "<|endoftext|>",
    "<mask>",
    "<tool_call>",
]
PIECES = st.sampled_from([*LITERALS, "<", "<|", "|>", "<|im_", "im_end|>", "s>", "/s>", " ", "\n", "hello", "é", "日",
                          "\U00030000", "\U00030001", "\U00020000", "</think>", "[I", "NST]",
                          "<|im_</think>end|>"])  # fmt: skip
TEXT = st.lists(PIECES, max_size=8).map("".join)


def structure(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    unknown = tokenizer.token_id("<unk>")
    return [i for i in ids if i in tokenizer.special_ids and i != unknown]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=TEXT, name=TEXT, argument=TEXT, key=TEXT, result=TEXT, source=st.sampled_from(sorted(TEMPLATES)))
def test_only_the_template_makes_special_tokens(
    tokenizer: Tokenizer, content: str, name: str, argument: str, key: str, result: str, source: str
) -> None:
    def talk(content: str, name: str, argument: str, key: str, result: str) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps({key: argument})}}
        return [
            {"role": "user", "content": content, "name": name},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": result},
        ]

    ours = chat(TEMPLATES[source], tokenizer)
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": content, "parameters": {key: {"enum": [argument]}}},
        }
    ]
    prompt = ours.render(talk(content, name, argument, key, result), tools=tools)
    harmless = ours.render(talk("x", "x", "x", "x", "x"), tools=tools[:0])
    ids = tokenizer.encode_chat(prompt)
    assert structure(tokenizer, ids) == structure(tokenizer, tokenizer.encode_chat(harmless))
    if tokenizer.rule.byte_level:
        assert tokenizer.decode(ids, skip_special=False) == prompt.text
    if "repr" not in source and "tags" != source:
        assert content.strip() in prompt.text and result.strip() in prompt.text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.text(alphabet="<|>[]/ab \n日", max_size=20))
def test_marks_do_not_change_ids(tokenizer: Tokenizer, content: str) -> None:
    """Beginnings of special tokens are common in ordinary text; its ids are those of the text."""
    prompt = chat(CHATML, tokenizer).render([{"role": "user", "content": content}])
    assert prompt.text == f"<|im_start|>user\n{content.strip()}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(prompt) == tokenizer.encode(prompt.text, add_special=False)


def test_messages_of_all_rare_ideographs_are_refused(smollm: Tokenizer) -> None:
    everything = "".join(map(chr, [*range(0x20000, 0x2A6E0), *range(0x30000, 0x3134B)]))
    with pytest.raises(InvalidRequest, match="distinct characters"):
        chat(CHATML, smollm).render([{"role": "user", "content": everything}])


# ---- forms of messages


def test_parts_are_joined_for_templates_that_take_strings(smollm: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in chat(CHATML, smollm).render([{"role": "user", "content": parts}]).text
    assert "user ab<|im_end|>" in chat(PARTS, smollm).render([{"role": "user", "content": parts}]).text
    assert "user ab<|im_end|>" in chat(PARTS, smollm).render([{"role": "user", "content": "ab"}]).text


def test_tool_arguments_become_objects(smollm: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "<ü>"}'}}
    text = chat(TAGS, smollm).render([{"role": "assistant", "content": None, "tool_calls": [call]}]).text
    assert '{"name": "f", "arguments": {"x": "<ü>"}}' in text


CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}


def test_calls_beside_null_are_where_the_template_looks_for_them(all_kinds: dict[str, Tokenizer]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = chat(NULLS, all_kinds["byte-level"])

    def talk(**content: Any) -> list[dict[str, Any]]:
        call = {"role": "assistant", **content, "tool_calls": [CALL]}
        answer = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
        return [{"role": "user", "content": "weather?"}, call, answer, {"role": "assistant", "content": "It is."}]

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ((expected,), _) = render_jinja_template(conversations=[talk(content=None)], chat_template=NULLS, **tokens)
    assert '<call>function<sep>get\n```json\n{"city": "Rome"}\n```' in expected
    # Clients leave the content out, too, or send an empty text.
    for content in ({"content": None}, {}, {"content": ""}):
        assert ours.render(talk(**content)).text == expected
    assert "<|assistant|>hm" in ours.render(talk(content="hm")).text


@pytest.mark.parametrize("source", [
    CHATML, TAGS, PARTS, REPR,
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}",
])  # fmt: skip
def test_null_is_never_printed(source: str, smollm: Tokenizer) -> None:
    ours = chat(source, smollm)
    told = [ours.render([{"role": "assistant", "tool_calls": [CALL], "content": c}]).text for c in ("", None)]
    assert told[0] == told[1]


def test_a_call_can_be_continued(smollm: Tokenizer) -> None:
    source = "{% for m in messages %}{% if m.content is not none %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
    talk = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    prompt = chat(source, smollm).render(talk, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == "<|im_start|>"


def test_a_message_can_be_continued(smollm: Tokenizer, folders: dict[str, Path]) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(folders["byte-level"])
    for source in (CHATML, "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"):
        for last in ("Sure, <b", "ends in space  ", "twice Sure, "):
            talk = [{"role": "user", "content": "Sure, go"}, {"role": "assistant", "content": last}]
            ours = chat(source, smollm).render(talk, add_generation_prompt=False, continue_final_message=True)
            expected = oracle.apply_chat_template(
                talk, chat_template=source, tokenize=False, continue_final_message=True
            )
            assert ours.text.rstrip() == str(expected).rstrip()
    with pytest.raises(InvalidRequest, match="cannot continue"):
        chat("x", smollm).render(TALK, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        chat(CHATML, smollm).render(TALK, continue_final_message=True)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "im_end", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": ["x"]},
        {"role": "assistant", "content": "", "tool_calls": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": "", "tool_calls": [3]},
    ],
)
def test_bad_messages_are_refused(message: dict[str, Any], smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest):
        chat(CHATML, smollm).render([message])


def test_deep_and_empty_messages_are_refused(smollm: Tokenizer) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested"):
        chat(CHATML, smollm).render([{"role": "user", "content": "x", "extra": deep}])
    with pytest.raises(InvalidRequest, match="empty"):
        chat(CHATML, smollm).render([])


# ---- options and sources


def test_options_are_those_of_the_template(smollm: Tokenizer) -> None:
    ours = chat("{{ style }}{{ enable_thinking }}{{ strftime_now('%d %b %Y') }}", smollm)
    talk = [{"role": "user", "content": "x"}]
    assert ours.render(talk, options={"style": "<|im_end|>"}).text == "<|im_end|>29 Feb 2024"
    assert ours.render(talk, options={"enable_thinking": False}).text == "False29 Feb 2024"
    for name in ("messages", "bos_token", "range", "unheard_of", "raise_exception"):
        with pytest.raises(InvalidRequest) as caught:
            ours.render(talk, options={name: "x"})
        assert caught.value.param == "chat_template_kwargs"


def test_a_model_without_template_says_so(smollm: Tokenizer) -> None:
    ours = ChatTemplate({}, smollm)
    assert not ours.exists
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        ours.render([{"role": "user", "content": "x"}])
    assert caught.value.status == 400 and caught.value.code == "no_chat_template"


def test_templates_are_found_in_all_their_places(tmp_path: Path, smollm: Tokenizer) -> None:
    assert sources_from_folder(tmp_path) == {}
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert sources_from_folder(tmp_path) == {"default": "A", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("B")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    found = sources_from_folder(tmp_path)
    assert found == {"default": "B", "tool_use": "T", "rag": "R"}
    ours = ChatTemplate(found, smollm)
    assert ours.render(TALK).text == "B" and ours.render(TALK, tools=TOOLS).text == "T"
    assert sources_from_gguf({"tokenizer.chat_template": "G", "tokenizer.chat_template.tool_use": "U"}) == {
        "default": "G", "tool_use": "U",
    }  # fmt: skip


@pytest.mark.parametrize(("source", "message"), [
    ("{% for %}", "broken"), ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "deeply"),
    ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "deeply"),
    ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "broken"),
])  # fmt: skip
def test_a_broken_template_is_a_configuration_error(source: str, message: str, smollm: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=message):
        chat(source, smollm)


@pytest.mark.parametrize(("name", "content"), [
    ("chat_template.jinja", b"\xff\xfe{{ x }}"),
    ("tokenizer_config.json", b"[" * 100_000 + b"]" * 100_000),
    ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
    ("tokenizer_config.json", b'{"chat_template": [1, 2]}'),
])  # fmt: skip
def test_damaged_sources_are_a_configuration_error(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError):
        sources_from_folder(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 30) %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 2 ** 100000 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = x %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 100000 %}{{ x.join(x) }}",
        "{% for i in range(20) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages | tojson(indent=999999) }}",
    ],
)
def test_hostile_and_failing_templates_end_in_a_400(source: str, smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(source, smollm).render([{"role": "user", "content": "x"}])
    assert caught.value.status == 400 and len(caught.value.message) < 500
