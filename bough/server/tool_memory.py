"""The tools of earlier requests, and what they make of an answer: the turns of an agent bring the same ones along."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, TypeVar

from bough.base.constraint import Constraint
from bough.base.limits import Limits
from bough.server.errors import encode_json
from bough.server.schema import ChatRequest, TokenizeRequest
from bough.server.tools import ToolUse, tool_use
from bough.text.formats import AnswerFormat
from bough.text.reasoning.families import ReasoningFormat
from bough.text.tokenizer import Tokenizer

T = TypeVar("T")

MOST = 16 << 20
"""Bytes that are remembered of either; what was used longest ago is forgotten first."""
OBJECTS = 12
"""Bytes of Python's objects for one of the JSON that they are read from, about."""


class Memo(Generic[T]):
    """Values by what they are made of, within ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._room = most
        self._known: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def recall(self, key: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value of ``key``, which ``make`` makes where it is not known; what that raises is not remembered."""
        if (found := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return found[0]
        value = make()
        self._known[key] = value, size(value)
        self._room -= self._known[key][1]
        while self._room < 0:
            _, (_, freed) = self._known.popitem(last=False)
            self._room += freed
        return value


class ToolMemory:
    """What :mod:`bough.server.tools` finds out about a request's tools, found out once. Belongs to one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._uses: Memo[ToolUse] = Memo(MOST)
        self._constraints: Memo[Constraint | None] = Memo(MOST)

    def use(self, body: ChatRequest | TokenizeRequest) -> ToolUse:
        """See :func:`bough.server.tools.tool_use`."""
        said: tuple[object, ...] = (body.tools,)
        if isinstance(body, ChatRequest):
            said = (body.tools, body.tool_choice, body.functions, body.function_call, body.parallel_tool_calls)
        if not any(said):
            return tool_use(body, self._limits)
        text = encode_json((type(body).__name__, *said))
        key = hashlib.sha256(text).digest()
        return self._uses.recall(
            key, lambda: replace(tool_use(body, self._limits), key=key), lambda use: OBJECTS * len(text)
        )

    def constraint(
        self,
        use: ToolUse,
        form: AnswerFormat,
        tokenizer: Tokenizer,
        thinking: ReasoningFormat | None,
        asked: Constraint | None,
    ) -> Constraint | None:
        """See :meth:`bough.server.tools.ToolUse.constraint`; ``form`` and ``tokenizer`` are always the same.

        What is not changed is ``asked`` itself.
        """
        if not use.schemas:
            return asked
        made = self._constraints.recall(
            (use.key, thinking is None, asked),
            lambda: use.constraint(form, tokenizer, thinking, asked),
            lambda made: 1024 + sum(4 * len(each.text) for each in (made, asked) if each is not None),
        )
        return asked if made == asked else made
