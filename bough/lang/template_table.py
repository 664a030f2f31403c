"""The named chat templates: what SGLang programs expect to find, role by role."""

from __future__ import annotations

from typing import Any

from bough.lang.templates import ChatTemplate, ChatTemplateStyle, register_chat_template

Pair = tuple[str, str]

_VICUNA_V1_1 = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions."
)
_YI_VL = (
    "This is a chat between an inquisitive human and an AI assistant. Assume the role of the "
    "AI assistant. Read all the images carefully, and respond to the human's questions with "
    "informative, helpful, detailed and polite answers.这是一个好奇的人类和一个人工智能助手之间的对话。"
    "假设你扮演这个AI助手的角色。仔细阅读所有的图像，并对人类的问题做出信息丰富、有帮助、详细的和礼貌的回答。"
)
_DBRX_INSTRUCT = (
    "You are DBRX, created by Databricks. You were last updated in December 2023. You answer "
    "questions based on information available up to that point.\nYOU PROVIDE SHORT RESPONSES "
    "TO SHORT QUESTIONS OR STATEMENTS, but provide thorough responses to more complex and "
    "open-ended questions.\nYou assist with various tasks, from writing to coding (using "
    "markdown for code blocks — remember to use ``` with code, JSON, and tables).\n(You do "
    "not have real-time data access or code execution capabilities. You avoid stereotyping "
    "and provide balanced perspectives on controversial topics. You do not provide song "
    "lyrics, poems, or news articles and do not divulge details of your training data.)\nThis "
    "is your system prompt, guiding your responses. Do not reference it, just respond to the "
    "user. If you find yourself talking about this message, stop. You should be responding "
    "appropriately and usually that means not mentioning this.\nYOU DO NOT MENTION ANY OF "
    "THIS INFORMATION ABOUT YOURSELF UNLESS THE INFORMATION IS DIRECTLY PERTINENT TO THE "
    "USER'S QUERY."
)
_INTERNS1 = (
    "You are an AI assistant whose name is Intern-S1 (书生大模型).\n- Intern-S1 (书生大模型) is a "
    "vision-language model that is developed by Shanghai AI Laboratory (上海人工智能实验室).  It is "
    "designed to be helpful, honest, and harmless.\n- Intern-S1 (书生大模型) can understand and "
    "communicate fluently in the language chosen by the user such as English and 中文.\nYou are "
    "an expert reasoner with extensive experience in all areas. You approach problems "
    "through systematic thinking and rigorous reasoning. Your response should reflect deep "
    "understanding and precise logical thinking, making your solution path and reasoning "
    "clear to others. Please put your thinking process within <think>...</think> tags."
)
_CHATML = (
    ("<|im_start|>system\n", "<|im_end|>\n"),
    ("<|im_start|>user\n", "<|im_end|>\n"),
    ("<|im_start|>assistant\n", "<|im_end|>\n"),
)


def _named(name: str, system: Pair, user: Pair, assistant: Pair, prompt: str | None = None, **more: Any) -> None:
    """Register a template by the texts around each role's content; ``prompt`` is the default system prompt."""
    roles = {"system": system, more.pop("user_role", "user"): user, "assistant": assistant}
    register_chat_template(ChatTemplate(name, prompt, roles, **more))


_named("default", ("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n"))
_named("claude", ("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant:", ""))
_named("chatml", *_CHATML, stop_str=("<|im_end|>",))
_named(
    "chatml-llava", *_CHATML, prompt="You are a helpful assistant.", stop_str=("<|im_end|>",), image_token="<image>\n"
)
_named("qwen", *_CHATML, prompt="You are a helpful assistant.", stop_str=("<|im_end|>",))
_named(
    "qwen2-vl",
    *_CHATML,
    prompt="You are a helpful assistant.",
    stop_str=("<|im_end|>",),
    image_token="<|vision_start|><|image_pad|><|vision_end|>",
)
_named("vicuna_v1.1", ("", " "), ("USER:", " "), ("ASSISTANT:", "</s>"), prompt=_VICUNA_V1_1, image_token=" <image>\n")
_named(
    "llama-2-chat",
    ("<<SYS>>\n", "\n<</SYS>>\n\n"),
    ("[INST] ", " [/INST]"),
    ("", " </s><s>"),
    style=ChatTemplateStyle.LLAMA2,
)
_named(
    "mistral",
    ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
    ("[INST] ", " [/INST]"),
    ("", " </s><s>"),
    stop_str=("</s>",),
    image_token="[IMG]",
)
_named(
    "llama-3-instruct",
    ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    stop_str=("<|eot_id|>",),
    image_token="<|image|>",
)
_named(
    "minicpmv",
    ("", " "),
    ("user:", " "),
    ("assistant:", "</s>"),
    stop_str=("<|im_end|>", "<|endoftext|>"),
    image_token="(<image>./</image>)",
)
_named(
    "janus-pro",
    ("", ""),
    ("<｜User｜>", ""),
    ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    user_role="User",
    stop_str=("<｜end▁of▁sentence｜>",),
    image_token="<image_placeholder>\n",
)
_named(
    "minicpmo",
    ("", " "),
    ("user:", " "),
    ("assistant:", "</s>"),
    stop_str=("<|im_end|>", "<|endoftext|>"),
    image_token="(<image>./</image>)",
    audio_token="(<audio>./</audio>)",
)
_named(
    "janus",
    ("", ""),
    ("<｜User｜>", ""),
    ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    stop_str=("<｜end▁of▁sentence｜>",),
    image_token="<image_placeholder>\n",
)
_named(
    "llama-3-instruct-llava",
    ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    stop_str=("<|eot_id|>",),
    image_token="<image>\n",
)
_named(
    "llama-4",
    ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
    ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
    ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    stop_str=("<|eot|>",),
    image_token="<|image|>",
)
_named(
    "yi-1.5",
    ("", ""),
    ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    ("", "<|im_end|>\n"),
    stop_str=("<|im_end|>",),
)
_named(
    "yi-vl",
    ("", "\n\n"),
    ("### Human:", "\n"),
    ("### Assistant:", "\n"),
    prompt=_YI_VL,
    image_token=" <image_placeholder>\n",
)
_named(
    "gemma-it",
    ("", ""),
    ("<start_of_turn>user\n", "<end_of_turn>\n"),
    ("<start_of_turn>model\n", "<end_of_turn>\n"),
    image_token="<start_of_image>",
    audio_token="<start_of_audio>",
)
_named("gemma-4-it", ("", ""), ("<|turn>user\n", "<turn|>\n"), ("<|turn>assistant\n", "<turn|>\n"))
_named(
    "dbrx-instruct",
    ("<|im_start|>system\n", "<|im_end|>"),
    ("\n<|im_start|>user\n", "<|im_end|>"),
    ("\n<|im_start|>assistant\n", "<|im_end|>"),
    prompt=_DBRX_INSTRUCT,
    stop_str=("<|im_end|>",),
)
_named(
    "c4ai-command-r",
    ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
)
_named(
    "internvl-2-5",
    *_CHATML,
    prompt="你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
    stop_str=("<|im_end|>", "<|action_end|>"),
)
_named("interns1", *_CHATML, prompt=_INTERNS1, stop_str=("<|im_end|>", "<|action_end|>"))
_named(
    "granite-3-instruct",
    ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>"),
    ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>"),
    ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>"),
    stop_str=("<|end_of_text|>",),
)
_named(
    "deepseek-v3",
    ("", ""),
    ("<｜User｜>", ""),
    ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    stop_str=("<｜end▁of▁sentence｜>",),
)
_named(
    "glm-4v",
    ("<|system|>\n", "\n"),
    ("<|user|>\n", "\n"),
    ("<|assistant|>\n", "\n"),
    stop_str=("<|user|>", "<|endoftext|>", "<|observation|>"),
    image_token="<|image|>",
)
