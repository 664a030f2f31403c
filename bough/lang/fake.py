"""A backend without a model, for tests of programs."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.params import SglSamplingParams, apply_dtype
from bough.lang.templates import get_chat_template

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

Reply = str | Sequence[str] | Callable[[str], str] | Exception
Rules = Mapping[str, Reply] | Sequence[tuple[str | re.Pattern[str], Reply]]

_SAMPLES = ("0", "1.0", "true", "True", '""', "text")


@dataclass(frozen=True, slots=True)
class FakeCall:
    """A call as the backend got it."""

    kind: str
    prompt: str
    params: SglSamplingParams | None = None
    choices: tuple[str, ...] = ()
    lora_path: str | None = None


class FakeBackend(AsyncBackend):
    """Answers by rules, always the same.

    Args:
        rules: regular expression -> reply. The rule whose match ends last in the prompt is obeyed, the first of equals.
            A reply is a text; texts that are given one after the other, the last again and again; a function of the
            prompt; or an exception to raise.
        default: reply where no rule matches. A constrained generation then gets the simplest text that fits.
        chat_template: name of one of the named templates.
        is_chat_model: pretend to take messages only.

    Stop texts and ``max_tokens`` are obeyed; a token is a word with the blanks before it. Prompt tokens that an earlier
    prompt began with count as cached.

    Attributes:
        calls: what was asked, in order.
    """

    knows_programs = True
    takes_adapters = True

    def __init__(
        self,
        rules: Rules = (),
        *,
        default: str = "ok",
        chat_template: str = "default",
        is_chat_model: bool = False,
    ) -> None:
        super().__init__()
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        self._rules = [(re.compile(pattern), reply) for pattern, reply in pairs]
        self._given = [0] * len(self._rules)
        self._default = default
        self._prompts: dict[str, Any] = {}  # word -> those that have followed it, likewise
        self.is_chat_model = is_chat_model
        self.chat_template = get_chat_template(chat_template)
        self.calls: list[FakeCall] = []

    def get_model_name(self) -> str:
        return "fake"

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        self.calls.append(FakeCall("generate", s.text_, sampling_params, lora_path=s.lora_path))
        apply_dtype(sampling_params)
        found = [self._answer(s.text_, sampling_params) for _ in range(sampling_params.n)]
        texts, metas = [text for text, _ in found], [meta for _, meta in found]
        for meta in metas[1:]:
            meta["cached_tokens"] = meta["prompt_tokens"]
        return (texts[0], metas[0]) if len(texts) == 1 else (texts, metas)

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        self.calls.append(FakeCall("stream", s.text_, sampling_params, lora_path=s.lora_path))
        apply_dtype(sampling_params)
        text, meta = self._answer(s.text_, sampling_params)
        words = _words(text)
        for i, word in enumerate(words):
            last = i == len(words) - 1
            yield word, meta if last else {**meta, "finish_reason": None, "completion_tokens": i + 1}

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        self.calls.append(FakeCall("select", s.text_, choices=tuple(choices), lora_path=s.lora_path))
        reply = self._reply(s.text_)
        chosen = next((c for c in choices if reply is not None and c.strip() == reply.strip()), choices[0])
        return ChoicesDecision(chosen, self._usage(s.text_))

    def _reply(self, prompt: str) -> str | None:
        """What the rules say; None where none does."""
        best, end = -1, -1
        for i, (pattern, _) in enumerate(self._rules):
            for match in pattern.finditer(prompt):
                if match.end() > end:
                    best, end = i, match.end()
        if best < 0:
            return None
        reply = self._rules[best][1]
        self._given[best] += 1
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            return reply
        return reply(prompt) if callable(reply) else reply[min(self._given[best], len(reply)) - 1]

    def _answer(self, prompt: str, params: SglSamplingParams) -> tuple[str, dict[str, Any]]:
        reply = self._reply(prompt)
        text = reply if reply is not None else self._fitting(params)
        reason: dict[str, Any] = {"type": "stop", "matched": None}
        for stop in [params.stop] if isinstance(params.stop, str) else params.stop or ():
            if stop in text:
                text, reason = text[: text.index(stop)], {"type": "stop", "matched": stop}
        words = _words(text)
        if len(words) > params.max_new_tokens:
            words = words[: params.max_new_tokens]
            reason = {"type": "length", "length": len(words)}
        meta = self._usage(prompt) | {"completion_tokens": len(words), "finish_reason": reason}
        return "".join(words), meta

    def _usage(self, prompt: str) -> dict[str, Any]:
        words = _words(prompt)
        node, cached = self._prompts, 0
        for word in words:
            cached += word in node
            node = node.setdefault(word, {})
        return {"prompt_tokens": len(words), "cached_tokens": cached}

    def _fitting(self, params: SglSamplingParams) -> str:
        """The default, or the simplest text that the constraint allows."""
        if params.json_schema is not None:
            schema = json.loads(params.json_schema)
            return json.dumps(_instance(schema, schema.get("$defs", {})), ensure_ascii=False)
        if params.regex is not None:
            parts = params.regex.strip("()").split("|")
            candidates = [self._default, *_SAMPLES, *(re.sub(r"\\(.)", r"\1", part) for part in parts)]
            return next((c for c in candidates if re.fullmatch(params.regex, c)), self._default)
        return self._default


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def _instance(schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """The simplest value of a schema."""
    if "$ref" in schema:
        return _instance(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _instance(schema[key][-1], definitions)
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _instance(properties[name], definitions) for name in schema.get("required", properties)}
        case "array":
            first = [_instance(item, definitions) for item in schema.get("prefixItems", ())]
            more = int(schema.get("minItems", 0)) - len(first)
            return first + [_instance(schema.get("items", {}), definitions) for _ in range(more)]
        case "string":
            return "text"
        case "boolean":
            return False
        case "null":
            return None
    return schema.get("minimum", 0)
