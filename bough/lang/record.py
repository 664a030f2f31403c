"""Backends that write down what a model said, and that say it again without a model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.lang.backends import as_backend
from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.errors import BackendError
from bough.lang.params import SglSamplingParams
from bough.lang.state import merge_meta_info
from bough.lang.templates import ChatTemplate, ChatTemplateStyle

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


def key_of(kind: str, s: StreamExecutor, asked: Any) -> str:
    """The same for the same question to the same text."""
    images = [data for _, data in s.images_]
    adapter = [] if s.lora_path is None else [s.lora_path]
    said = json.dumps([kind, s.text_, images, asked, *adapter], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def _asked(params: SglSamplingParams) -> dict[str, Any]:
    asked = dataclasses.asdict(params)
    del asked["value_schema"]  # the regular expression says the same
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}


def _line(entry: dict[str, Any]) -> bytes:
    """One line of a recording. What UTF-8 has no bytes for, lone surrogates, is escaped as in all JSON texts."""
    return (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _decoded(path: Path) -> list[Any]:
    """The head of a recording and its entries."""
    first, *lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    found, needed = [], {"template", "is_chat_model", "model"}
    for number, line in enumerate([first, *lines], 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: it is cut, or no line of a recording: {error}") from error
        if not isinstance(entry, dict) or not needed <= entry.keys():
            raise ValueError(f"{path}, line {number}: it is no line of a recording")
        found.append(entry)
        needed = {"key", "result"}
    return found


class _Recorder(AsyncBackend):
    def __init__(self, path: Path, backend: Any) -> None:
        super().__init__()
        self._inner = as_backend(backend)
        self._lock = threading.Lock()
        self.loop = self._inner.loop
        self.is_chat_model = self._inner.is_chat_model
        self.knows_programs = self._inner.knows_programs
        self.keeps_budgets = self._inner.keeps_budgets
        self.keeps_leases = self._inner.keeps_leases
        self.takes_adapters = self._inner.takes_adapters
        self.chat_template = self._inner.get_chat_template()
        self._path = path
        template = dataclasses.asdict(self.chat_template) | {"style": self.chat_template.style.name}
        head = {
            "template": template, "is_chat_model": self.is_chat_model, "model": self._inner.get_model_name(),
            "keeps_budgets": self.keeps_budgets,
        }  # fmt: skip
        path.write_bytes(_line(head))

    def get_model_name(self) -> str:
        return self._inner.get_model_name()

    def get_server_info(self) -> Any:
        return self._inner.get_server_info()

    def flush_cache(self) -> None:
        self._inner.flush_cache()

    def cache_prefix(self, prefix_str: str) -> None:
        self._inner.cache_prefix(prefix_str)

    def _write(self, kind: str, key: str, prompt: str, result: Any, **more: Any) -> None:
        line = _line({"kind": kind, "key": key, "prompt": prompt[-200:], "result": result, **more})
        with self._lock, self._path.open("ab") as file:
            file.write(line)

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        key, prompt = key_of("generate", s, _asked(sampling_params)), s.text_
        texts, meta = await self._inner.agenerate(s, sampling_params)
        self._write("generate", key, prompt, [texts, meta])
        return texts, meta

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        key, prompt, pieces = key_of("generate", s, _asked(sampling_params)), s.text_, []
        async for text, meta in self._inner.agenerate_stream(s, sampling_params):
            pieces.append([text, meta])
            yield text, meta
        whole = "".join(text for text, _ in pieces)
        metas = [meta for _, meta in pieces if meta]
        merged = functools.reduce(merge_meta_info, metas) if metas else {}
        self._write("generate", key, prompt, [whole, merged], pieces=pieces)

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        key = key_of("select", s, [choices, temperature, type(choices_method).__name__])
        decision = await self._inner.aselect(s, choices, temperature, choices_method)
        self._write("select", key, s.text_, [decision.decision, decision.meta_info])
        return decision

    async def acommit_lazy_operations(self, s: StreamExecutor) -> dict[str, Any] | None:
        return await self._inner.acommit_lazy_operations(s)

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        self._inner.end_program(s)


class _Replayer(AsyncBackend):
    knows_programs = True
    takes_adapters = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        head, *entries = _decoded(path)
        self.keeps_budgets = head.get("keeps_budgets", True)
        template = head["template"]
        known = {f.name for f in dataclasses.fields(ChatTemplate)}
        pairs = {role: (pair[0], pair[1]) for role, pair in template["role_prefix_and_suffix"].items()}
        changed = {"role_prefix_and_suffix": pairs, "style": ChatTemplateStyle[template["style"]]}
        if "first" in template:
            from bough.lang.model_template import ModelTemplate

            self.chat_template = ModelTemplate(**{**template, **changed})
        else:
            self.chat_template = ChatTemplate(**{**{k: template[k] for k in known}, **changed})
        self.is_chat_model = head["is_chat_model"]
        self._name = head["model"]
        self._said: dict[str, deque[dict[str, Any]]] = {}
        for entry in entries:
            self._said.setdefault(entry["key"], deque()).append(entry)

    def get_model_name(self) -> str:
        return str(self._name)

    def _take(self, key: str, s: StreamExecutor) -> dict[str, Any]:
        said = self._said.get(key)
        if not said:
            raise BackendError(f"the recording has no answer to this call behind {s.text_[-200:]!r}", 400)
        return dict(said.popleft())

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        texts, meta = self._take(key_of("generate", s, _asked(sampling_params)), s)["result"]
        return texts, meta

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        entry = self._take(key_of("generate", s, _asked(sampling_params)), s)
        texts, meta = entry["result"]
        whole = [(texts[0], meta[0]) if isinstance(texts, list) else (texts, meta)]
        for piece, news in entry.get("pieces", whole):
            yield piece, news

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        entry = self._take(key_of("select", s, [choices, temperature, type(choices_method).__name__]), s)
        decision, meta = entry["result"]
        return ChoicesDecision(decision, meta)


def record(path: str | Path, backend: Any = None) -> AsyncBackend:
    """``backend``, by default the one that was set, with everything that it says written to a file, line by line."""
    from bough.lang.config import global_config

    return _Recorder(Path(path), backend or global_config.default_backend)


def replay(path: str | Path) -> AsyncBackend:
    """A backend that says what the file of a recording says, to the same calls; equal calls get their answers in order.

    A stream says what was recorded without one in one piece, and the other way round a call gets the whole of a stream.
    A call that was not recorded, or not as often, fails with a BackendError. Raises ValueError, which names the line,
    for a file that is no recording, or was cut.
    """
    return _Replayer(Path(path))
