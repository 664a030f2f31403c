"""Request bodies of the pooling endpoints, as clients of OpenAI, vLLM, SGLang, Cohere and Jina send them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bough.server.schema import Prompt

Document = str | dict[str, Any]
"""A text, or an object with it in ``text``."""


class UnsupportedPooling(msgspec.Struct, kw_only=True):
    """Fields that are refused unless they are absent, null, false or empty."""

    lora_id: Any = None
    embed_overrides: Any = None
    embed_override_token_id: Any = None
    query_embed_overrides: Any = None
    item_embed_overrides: Any = None
    positional_embed_overrides: Any = None
    return_pooled_hidden_states: Any = None
    late_chunking_params: Any = None
    return_token_logprobs: Any = None
    score_extraction_token: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None


class PoolingRequest(UnsupportedPooling, kw_only=True):
    """What all of them have in common."""

    model: str | None = None
    user: str | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    lora_path: str | None = None


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    """POST /v1/embeddings."""

    input: Prompt | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    padding: Literal["do_not_pad"] | None = None


class ClassifyRequest(PoolingRequest, kw_only=True):
    """POST /v1/classify, and /classify with either ``input`` or SGLang's fields."""

    input: Prompt | None = None
    use_activation: bool | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None


class EncodeRequest(PoolingRequest, kw_only=True):
    """POST /encode, SGLang's."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    dimensions: int | None = None


class PairsRequest(PoolingRequest, kw_only=True):
    """What scores and ranks have in common. An instruction stands before each query, on a line of its own."""

    use_activation: bool | None = None
    instruction: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    chat_template_kwargs: Any = None


class ScoreRequest(PairsRequest, kw_only=True):
    """POST /v1/score: two sides under vLLM's names, or SGLang's probabilities of tokens behind query and item."""

    text_1: Document | list[Document] | None = None
    text_2: Document | list[Document] | None = None
    queries: Document | list[Document] | None = None
    documents: Document | list[Document] | None = None
    data_1: Document | list[Document] | None = None
    data_2: Document | list[Document] | None = None
    query: str | list[int] | None = None
    items: Document | list[Document | list[int]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    apply_softmax: bool | None = None
    temperature: float | None = None
    item_first: bool | None = None


class RerankRequest(PairsRequest, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[Document]
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None


UNSUPPORTED_POOLING = UnsupportedPooling.__struct_fields__
UNSUPPORTED_EMBEDDINGS = (*UNSUPPORTED_POOLING, "chat_template")
UNSUPPORTED_PAIRS = (*UNSUPPORTED_POOLING, "chat_template_kwargs")
