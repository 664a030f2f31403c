"""The chat families: how each writes tool calls, after the public chat templates of its models."""

from __future__ import annotations

from bough.text.tools.format import Arguments, CallId, Envelope, Family, Format, Name, Parameters, Serial
from bough.text.tools.values import GEMMA, GEMMA_4, PYTHON

_TAGGED_JSON = Format(
    opens="<tool_call>\n", call=(Envelope(),), closes="\n</tool_call>", separator="\n", between="\n"
)  # fmt: skip
_TAGGED_LIST = Format(
    opens="<tool_call>", brackets=("[", "]"), call=(Envelope(),), closes="</tool_call>", separator=", "
)  # fmt: skip
_XML = Parameters("<parameter=", ">\n", "\n</parameter>\n")
_KEYWORDS = (Name(), Arguments(PYTHON))

HERMES = Family(name="hermes", formats=(_TAGGED_JSON, _TAGGED_LIST), aliases=("qwen", "qwen25", "qwen3"),
                marks=(("<tool_call>",),))  # fmt: skip

QWEN3_CODER = Family(
    name="qwen3-coder",
    formats=(
        Format(
            opens="<tool_call>\n",
            call=("<function=", Name(), ">\n", _XML, "</function>"),
            closes="\n</tool_call>",
            separator="\n",
            between="\n",
        ),
        # Some checkpoints leave out the first tag.
        Format(opens="<function=", call=(Name(), ">\n", _XML, "</function>"), closes="\n</tool_call>", between="\n"),
        _TAGGED_JSON,
    ),
    aliases=("qwen3_coder", "qwen3_xml"),
    marks=(("<tool_call>", "<function="),),
)

LLAMA3_JSON = Family(
    name="llama3-json",
    formats=(
        Format(opens="", call=(Envelope("parameters"),), separator="; ", bare=True),
        Format(opens="<|python_tag|>", call=(Envelope("parameters"),), separator="; "),
        Format(opens="<function=", call=(Name(), ">", Arguments()), closes="</function>"),
    ),
    aliases=("llama3", "llama3_json", "llama4_json"),
    marks=(("<|python_tag|>",), ("<|start_header_id|>", "parameters"), ("<|header_start|>", '"parameters"')),
)

PYTHONIC = Family(
    name="pythonic",
    formats=(
        Format(opens="", brackets=("[", "]"), call=_KEYWORDS, separator=", ", bare=True),
        Format(opens="<|python_start|>", brackets=("[", "]"), call=_KEYWORDS, separator=", ", closes="<|python_end|>"),
    ),
    aliases=("llama4", "llama4_pythonic", "llama_pythonic"),
    marks=(("<|python_start|>",), ("<|start_header_id|>", "[func_name1("), ("<|header_start|>", "[func_name1(")),
)

MISTRAL = Family(
    name="mistral",
    formats=(
        Format(opens="[TOOL_CALLS]", brackets=("[", "]"), call=(Envelope(),), separator=", "),
        Format(opens="[TOOL_CALLS]", call=(Name(), CallId("[CALL_ID]"), "[ARGS]", Arguments())),
        Format(opens="[TOOL_CALLS]", call=(Envelope(),), separator=", "),
    ),
    marks=(("[TOOL_CALLS]",),),
    id_form="short",
)

MISTRAL_V11 = Family(
    name="mistral-v11",
    formats=(MISTRAL.formats[1], MISTRAL.formats[0], MISTRAL.formats[2]),
    marks=(("[TOOL_CALLS]", "[ARGS]"),),
    id_form="short",
)

_DEEPSEEK_OPENS, _DEEPSEEK_CLOSES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    formats=(
        Format(
            opens=_DEEPSEEK_OPENS,
            closes=_DEEPSEEK_CLOSES,
            call=(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", Name(), "\n```json\n", Arguments(),
                "\n```<｜tool▁call▁end｜>",
            ),
            separator="\n",
        ),
    ),
    aliases=("deepseekv3", "deepseek_v3", "deepseek-r1"),
    marks=(("<｜tool▁calls▁begin｜>", "```json"),),
)  # fmt: skip

DEEPSEEK_V31 = Family(
    name="deepseek-v3.1",
    formats=(
        Format(
            opens=_DEEPSEEK_OPENS,
            closes=_DEEPSEEK_CLOSES,
            call=("<｜tool▁call▁begin｜>", Name(), "<｜tool▁sep｜>", Arguments(), "<｜tool▁call▁end｜>"),
            separator="",
        ),
    ),
    aliases=("deepseekv31", "deepseek_v31"),
    marks=(("<｜tool▁calls▁begin｜>",),),
)

GLM = Family(
    name="glm-4.5",
    formats=(
        Format(
            opens="<tool_call>",
            call=(Name(), "\n", Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
            closes="</tool_call>",
            between="\n",
        ),
    ),
    aliases=("glm", "glm45", "glm47"),
    marks=(("<arg_key>",),),
)

KIMI_K2 = Family(
    name="kimi-k2",
    formats=(
        Format(
            opens="<|tool_calls_section_begin|>",
            call=(
                "<|tool_call_begin|>functions.", Name(), ":", Serial(), "<|tool_call_argument_begin|>", Arguments(),
                "<|tool_call_end|>",
            ),
            closes="<|tool_calls_section_end|>",
            separator="",
        ),
    ),
    aliases=("kimi", "kimi_k2"),
    marks=(("<|tool_calls_section_begin|>",),),
    id_form="functions.{name}:{index}",
)  # fmt: skip

GPT_OSS = Family(
    name="gpt-oss",
    answers="<|channel|>final<|message|>",
    # What comes before the name, and the forms that this takes, is brought to this one form by the channels' parser.
    formats=(
        Format(
            opens="<|channel|>commentary to=functions.",
            call=(Name(), " <|constrain|>json<|message|>", Arguments()),
            closes="<|call|>",
            between="<|start|>assistant",
        ),
    ),
    aliases=("gpt_oss", "harmony", "openai"),
    marks=(("<|channel|>", "<|message|>"),),
)

PHI_4 = Family(
    name="phi-4",
    formats=(
        Format(opens="<|tool_call|>", brackets=("[", "]"), call=(Envelope(),), separator=", ",
               closes="<|/tool_call|>"),
        Format(opens="functools", brackets=("[", "]"), call=(Envelope(),), separator=", "),
    ),
    aliases=("phi4", "phi4_mini_json"),
    marks=(("<|/tool_call|>",), ("<|/tool|>",)),
)  # fmt: skip

GEMMA_3 = Family(
    name="gemma-3",
    formats=(
        Format(opens="```tool_code\n", call=_KEYWORDS, separator="\n", closes="\n```"),
        Format(opens="", brackets=("[", "]"), call=_KEYWORDS, separator=", ", bare=True),
        Format(opens="```json\n", call=(Envelope("parameters"),), closes="\n```"),
        Format(opens="", call=(Envelope("parameters"),), bare=True),
    ),
    aliases=("gemma3", "gemma"),
    marks=(("<start_of_turn>",),),
)

FUNCTION_GEMMA = Family(
    name="functiongemma",
    formats=(
        Format(
            opens="<start_function_call>", call=("call:", Name(), Arguments(GEMMA)), closes="<end_function_call>"
        ),
    ),
    marks=(("<start_function_call>",),),
)  # fmt: skip

GEMMA4 = Family(
    name="gemma-4",
    formats=(Format(opens="<|tool_call>", call=("call:", Name(), Arguments(GEMMA_4)), closes="<tool_call|>"),),
    aliases=("gemma4",),
    marks=(("<|tool_call>",),),
)

GRANITE = Family(
    name="granite",
    formats=(
        Format(opens="<|tool_call|>", brackets=("[", "]"), call=(Envelope(),), separator=", "),
        _TAGGED_LIST,
        Format(opens="<function_call>", call=(Envelope(),), between="\n"),
    ),
    marks=(("<|start_of_role|>", "<|tool_call|>"), ("<|tool_call|>",)),
)

MINIMAX = Family(
    name="minimax-m2",
    formats=(
        Format(
            opens="<minimax:tool_call>\n",
            call=('<invoke name="', Name(), '">\n', Parameters('<parameter name="', '">', "</parameter>\n"),
                  "</invoke>"),
            closes="\n</minimax:tool_call>",
            separator="\n",
        ),
    ),
    aliases=("minimax", "minimax_m2"),
    marks=(("<minimax:tool_call>",),),
)  # fmt: skip

MINIMAX_M1 = Family(
    name="minimax-m1",
    formats=(Format(opens="<tool_calls>\n", call=(Envelope(),), separator="\n", closes="\n</tool_calls>"),),
    marks=(("<tool_calls>",),),
)

JSON = Family(
    name="json",
    formats=(
        Format(opens="", call=(Envelope(),), separator="\n", bare=True),
        Format(opens="", brackets=("[", "]"), call=(Envelope(),), separator=", ", bare=True),
        Format(opens="```json\n", call=(Envelope(),), separator="\n", closes="\n```"),
        _TAGGED_JSON,
    ),
)

FAMILIES = (
    GPT_OSS, KIMI_K2, MINIMAX, MINIMAX_M1, DEEPSEEK_V3, DEEPSEEK_V31, GLM, QWEN3_CODER, HERMES, MISTRAL_V11, MISTRAL,
    PYTHONIC, LLAMA3_JSON, PHI_4, GRANITE, FUNCTION_GEMMA, GEMMA4, GEMMA_3, JSON,
)  # fmt: skip
"""In the order in which a template is compared with their marks."""

BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def detect_family(template: str) -> Family:
    """The family whose marks are in the source of a chat template; plain JSON when there is none."""
    for family in FAMILIES:
        if any(all(mark in template for mark in marks) for marks in family.marks):
            return family
    return JSON
