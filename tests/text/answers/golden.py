# ruff: noqa: E501
"""Answers with tool calls, as the public chat templates and model cards of each family show them."""

from __future__ import annotations

from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "note": {"type": ["string", "null"]},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"get_weather": WEATHER, "get_time": TIME}

PARIS: Calls = [("get_weather", {"city": "Paris", "days": 2})]
TWO: Calls = [*PARIS, ("get_time", {})]

_DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

GOLDEN: list[tuple[str, str, str, Calls]] = [
    # (family, answer, content, calls)
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "", PARIS),
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
     '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', "Let me see.", TWO),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}\n</tool_call>', "", PARIS),
    ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "get_time"}]'
     "</tool_call>", "", TWO),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>',
     "", PARIS),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}', "", PARIS),
    ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>", "", TWO),
    ("qwen3-coder", "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
     "</function>\n</tool_call>", "", PARIS),
    ("llama3-json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", PARIS),
    ("llama3-json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
     '{"name": "get_time", "parameters": {}}', "", TWO),
    ("llama3-json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", PARIS),
    ("llama3-json", '<function=get_weather>{"city": "Paris", "days": 2}</function>', "", PARIS),
    ("pythonic", "[get_weather(city='Paris', days=2), get_time()]", "", TWO),
    ("pythonic", '<|python_start|>[get_weather(city="Paris", days=2)]<|python_end|>', "", PARIS),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
     '{"name": "get_time", "arguments": {}}]', "", TWO),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather", "id": "a1B2c3D4e"}]', "",
     PARIS),
    ("mistral-v11", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]get_time[ARGS]{}', "", TWO),
    ("mistral-v11", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris", "days": 2}', "", PARIS),
    ("deepseek-v3", f'{_DS[0]}{_DS[1]}function{_DS[2]}get_weather\n```json\n{{"city": "Paris", "days": 2}}\n```{_DS[3]}\n'
     f"{_DS[1]}function{_DS[2]}get_time\n```json\n{{}}\n```{_DS[3]}{_DS[4]}", "", TWO),
    ("deepseek-v3.1", f'I look.\n\n{_DS[0]}{_DS[1]}get_weather{_DS[2]}{{"city": "Paris", "days": 2}}{_DS[3]}'
     f"{_DS[1]}get_time{_DS[2]}{{}}{_DS[3]}{_DS[4]}", "I look.", TWO),
    ("glm-4.5", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>", "", TWO),
    ("glm-4.5", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
     "<arg_value>2</arg_value></tool_call>", "", PARIS),
    ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
     "<|tool_call_end|><|tool_calls_section_end|>", "", TWO),
    ("gpt-oss", "<|channel|>analysis<|message|>Weather first.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>', "", PARIS),
    ("gpt-oss", "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
     '{"city":"Paris","days":2}', "", PARIS),
    ("gpt-oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.get_weather<|message|>{"city": "Paris", "days": 2}<|call|>', "I look.", PARIS),
    ("phi-4", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]<|/tool_call|>', "", PARIS),
    ("phi-4", 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "get_time", '
     '"arguments": {}}]', "", TWO),
    ("gemma-3", '```tool_code\nget_weather(city="Paris", days=2)\nget_time()\n```', "", TWO),
    ("gemma-3", '[get_weather(city="Paris", days=2)]', "", PARIS),
    ("gemma-3", '```json\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}\n```', "", PARIS),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>"
     "<start_function_call>call:get_time{}<end_function_call>", "", TWO),
    ("gemma-4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>', "", PARIS),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]', "", PARIS),
    ("granite", '<function_call> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}', "", PARIS),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
     '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>', "", TWO),
    ("minimax-m1", '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
     '{"name": "get_time", "arguments": {}}\n</tool_calls>', "", TWO),
    ("json", '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n{"name": "get_time"}', "", TWO),
    ("json", '```json\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n```', "", PARIS),
]  # fmt: skip

NO_CALLS: list[tuple[str, str]] = [
    # (family, an answer that only looks like a call)
    ("hermes", '<tool_call>\n{"name": "rm_rf", "arguments": {}}\n</tool_call>'),
    ("hermes", "The tag <tool_call> opens a call."),
    ("hermes", '<tool_call>{"name": "get_weather", "argum'),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    ("llama3-json", '{"answer": 42, "name": "get_weather"}'),
    ("llama3-json", '{"name": 3}'),
    ("pythonic", "[1] Weather is\n[2] hard."),
    ("pythonic", "[get_weather]"),
    ("mistral", "[TOOL_CALLS]"),
    ("qwen3-coder", "<function=delete>\n<parameter=x>\n1\n</parameter>\n</function>"),
    ("glm-4.5", "<tool_call>unknown\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("json", '{"result": [1, 2, 3]}'),
    ("json", "[1, 2, 3]"),
    ("json", "Just text, with { braces } in it."),
    ("gemma-3", "```json\n{\"a\": 1}\n```"),
    ("gpt-oss", "Plain text."),
]  # fmt: skip
