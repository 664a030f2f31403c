"""The named chat templates: what SGLang programs expect to find, role by role."""

from __future__ import annotations

from bough.lang.templates import ChatTemplate, ChatTemplateStyle, register_chat_template

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

register_chat_template(
    ChatTemplate(
        name="default",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("SYSTEM:", "\n"),
            "user": ("USER:", "\n"),
            "assistant": ("ASSISTANT:", "\n"),
        },
    )
)
register_chat_template(
    ChatTemplate(
        name="claude",
        default_system_prompt=None,
        role_prefix_and_suffix={"system": ("", ""), "user": ("\n\nHuman: ", ""), "assistant": ("\n\nAssistant:", "")},
    )
)
register_chat_template(
    ChatTemplate(
        name="chatml",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=("<|im_end|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="chatml-llava",
        default_system_prompt="You are a helpful assistant.",
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=("<|im_end|>",),
        image_token="<image>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="qwen",
        default_system_prompt="You are a helpful assistant.",
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=("<|im_end|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="qwen2-vl",
        default_system_prompt="You are a helpful assistant.",
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=("<|im_end|>",),
        image_token="<|vision_start|><|image_pad|><|vision_end|>",
    )
)
register_chat_template(
    ChatTemplate(
        name="vicuna_v1.1",
        default_system_prompt=_VICUNA_V1_1,
        role_prefix_and_suffix={"system": ("", " "), "user": ("USER:", " "), "assistant": ("ASSISTANT:", "</s>")},
        image_token=" <image>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="llama-2-chat",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<<SYS>>\n", "\n<</SYS>>\n\n"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        style=ChatTemplateStyle.LLAMA2,
    )
)
register_chat_template(
    ChatTemplate(
        name="mistral",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        stop_str=("</s>",),
        image_token="[IMG]",
    )
)
register_chat_template(
    ChatTemplate(
        name="llama-3-instruct",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
            "user": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
            "assistant": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        },
        stop_str=("<|eot_id|>",),
        image_token="<|image|>",
    )
)
register_chat_template(
    ChatTemplate(
        name="minicpmv",
        default_system_prompt=None,
        role_prefix_and_suffix={"system": ("", " "), "user": ("user:", " "), "assistant": ("assistant:", "</s>")},
        stop_str=(
            "<|im_end|>",
            "<|endoftext|>",
        ),
        image_token="(<image>./</image>)",
    )
)
register_chat_template(
    ChatTemplate(
        name="janus-pro",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "User": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        stop_str=("<｜end▁of▁sentence｜>",),
        image_token="<image_placeholder>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="minicpmo",
        default_system_prompt=None,
        role_prefix_and_suffix={"system": ("", " "), "user": ("user:", " "), "assistant": ("assistant:", "</s>")},
        stop_str=(
            "<|im_end|>",
            "<|endoftext|>",
        ),
        image_token="(<image>./</image>)",
        audio_token="(<audio>./</audio>)",
    )
)
register_chat_template(
    ChatTemplate(
        name="janus",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        stop_str=("<｜end▁of▁sentence｜>",),
        image_token="<image_placeholder>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="llama-3-instruct-llava",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
            "user": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
            "assistant": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        },
        stop_str=("<|eot_id|>",),
        image_token="<image>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="llama-4",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
            "user": ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
            "assistant": ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
        },
        stop_str=("<|eot|>",),
        image_token="<|image|>",
    )
)
register_chat_template(
    ChatTemplate(
        name="yi-1.5",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "user": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            "assistant": ("", "<|im_end|>\n"),
        },
        stop_str=("<|im_end|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="yi-vl",
        default_system_prompt=_YI_VL,
        role_prefix_and_suffix={
            "system": ("", "\n\n"),
            "user": ("### Human:", "\n"),
            "assistant": ("### Assistant:", "\n"),
        },
        image_token=" <image_placeholder>\n",
    )
)
register_chat_template(
    ChatTemplate(
        name="gemma-it",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
        image_token="<start_of_image>",
        audio_token="<start_of_audio>",
    )
)
register_chat_template(
    ChatTemplate(
        name="gemma-4-it",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "user": ("<|turn>user\n", "<turn|>\n"),
            "assistant": ("<|turn>assistant\n", "<turn|>\n"),
        },
    )
)
register_chat_template(
    ChatTemplate(
        name="dbrx-instruct",
        default_system_prompt=_DBRX_INSTRUCT,
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>"),
            "user": ("\n<|im_start|>user\n", "<|im_end|>"),
            "assistant": ("\n<|im_start|>assistant\n", "<|im_end|>"),
        },
        stop_str=("<|im_end|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="c4ai-command-r",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            "user": ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            "assistant": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        },
    )
)
register_chat_template(
    ChatTemplate(
        name="internvl-2-5",
        default_system_prompt="你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=(
            "<|im_end|>",
            "<|action_end|>",
        ),
    )
)
register_chat_template(
    ChatTemplate(
        name="interns1",
        default_system_prompt=_INTERNS1,
        role_prefix_and_suffix={
            "system": ("<|im_start|>system\n", "<|im_end|>\n"),
            "user": ("<|im_start|>user\n", "<|im_end|>\n"),
            "assistant": ("<|im_start|>assistant\n", "<|im_end|>\n"),
        },
        stop_str=(
            "<|im_end|>",
            "<|action_end|>",
        ),
    )
)
register_chat_template(
    ChatTemplate(
        name="granite-3-instruct",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>"),
            "user": ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>"),
            "assistant": ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>"),
        },
        stop_str=("<|end_of_text|>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="deepseek-v3",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        stop_str=("<｜end▁of▁sentence｜>",),
    )
)
register_chat_template(
    ChatTemplate(
        name="glm-4v",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<|system|>\n", "\n"),
            "user": ("<|user|>\n", "\n"),
            "assistant": ("<|assistant|>\n", "\n"),
        },
        stop_str=(
            "<|user|>",
            "<|endoftext|>",
            "<|observation|>",
        ),
        image_token="<|image|>",
    )
)
