"""Response objects of the OpenAI endpoints, and what both of them count and collect.

Fields that are UNSET are left out of the JSON; None becomes null.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from bough import __version__
from bough.base.messages import Finish, Logprob
from bough.engine.generation import Chunk
from bough.server.errors import encode_json, finish_error
from bough.server.programs import granted
from bough.text.tokenizer import Tokenizer

FINGERPRINT = f"bough-{__version__}"
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class Message(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    matched_stop: int | str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    parse_error: str | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None | UnsetType = UNSET
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    parse_error: str | UnsetType = UNSET


PromptLogprobs = list[dict[str, dict[str, float | int | str]] | None]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None | UnsetType = UNSET
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Response(msgspec.Struct, kw_only=True):
    """Envelope of every answer and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    program: dict[str, Any] | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET

    def note(self, finish: Finish | None) -> None:
        """Add what of the request's constraint was not enforced, and what its program and lease were granted."""
        if finish is not None and finish.grant is not None:
            self.program = granted(finish.grant)
        if finish is not None and finish.warnings:
            known = [] if isinstance(self.warnings, UnsetType) else self.warnings
            self.warnings = list(dict.fromkeys([*known, *finish.warnings]))


def event(response: Response) -> bytes:
    return b"data: %b\n\n" % encode_json(response)


def check_finish(finish: Finish, usage: Usage | None = None) -> str:
    """The finish reason of a sequence that ended well. Raises what the other ends mean, an abort with its ``usage``."""
    if finish.kind not in ("stop", "length"):
        raise finish_error(finish, usage)
    return finish.kind


@dataclass(slots=True)
class Tally:
    """Usage of a request as its chunks arrive. A prompt counts once, however many sequences it has."""

    prompts: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    generated: dict[tuple[int, int], int] = field(default_factory=dict)
    reasoning: dict[int, int] = field(default_factory=dict)

    def add(self, prompt: int, chunk: Chunk) -> None:
        self.prompts[prompt] = chunk.n_prompt
        # Siblings find what the first one computed; what the request found is the smallest.
        self.cached[prompt] = min(chunk.n_cached, self.cached.get(prompt, chunk.n_cached))
        self.generated[prompt, chunk.index] = chunk.n_generated

    def usage(self) -> Usage:
        n_prompt, n_generated = sum(self.prompts.values()), sum(self.generated.values())
        return Usage(
            n_prompt,
            n_generated,
            n_prompt + n_generated,
            PromptDetails(sum(self.cached.values())),
            CompletionDetails(sum(self.reasoning.values())),
        )


class TokenNames:
    """How tokens are shown in logprobs: their text, or ``token_id:5`` where the client wants it so."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def length(self, token: int) -> int:
        """Characters of the token's own text, for offsets."""
        return len(self._tokenizer.token_text(token))

    def chat(self, entries: list[Logprob], most: int) -> ChatLogprobs:
        """``entries`` with at most ``most`` alternatives each, plus those asked for by id."""
        content = []
        for entry in entries:
            shown = dict(entry.top[:most]) | dict(entry.asked)
            top = [TopLogprob(self.text(t), finite(p), self._bytes(t)) for t, p in shown.items()]
            token = entry.token
            content.append(TokenLogprob(self.text(token), finite(entry.logprob), self._bytes(token), top))
        return ChatLogprobs(content)

    def prompt(self, n_prompt: int, entries: list[Logprob], most: int) -> PromptLogprobs:
        """vLLM's form: per prompt position, id -> logprob, rank and text; null for the first position."""
        shown: PromptLogprobs = [None] * (n_prompt - len(entries))
        for entry in entries:
            at: dict[str, dict[str, float | int | str]] = {}
            for rank, (token, logprob) in enumerate(entry.top[:most], 1):
                at[str(token)] = {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token)}
            at[str(entry.token)] = {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": self.text(entry.token),
            }
            shown.append(at)
        return shown

    def _bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
