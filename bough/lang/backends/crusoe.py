"""Crusoe's managed inference, which speaks OpenAI's API."""

from __future__ import annotations

import os
from typing import Any

from bough.lang.backends.openai import OpenAI
from bough.lang.templates import ChatTemplate

CRUSOE_BASE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"


class Crusoe(OpenAI):
    """``api_key`` is taken from CRUSOE_API_KEY where it is not given; ValueError where neither is there."""

    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        chat_template: ChatTemplate | None = None,
        **kwargs: Any,
    ) -> None:
        key = api_key or os.environ.get("CRUSOE_API_KEY")
        if not key:
            raise ValueError("Crusoe API key required. Pass api_key= or set CRUSOE_API_KEY.")
        super().__init__(
            model_name, chat_template=chat_template, api_key=key, base_url=base_url or CRUSOE_BASE_URL, **kwargs
        )
