"""The channels of gpt-oss: an answer is a sequence of messages, each with a channel and perhaps a recipient.

What is on the channel ``analysis`` is reasoning, what is for a function is a tool call, the rest is the answer; where
that has to be in a language, as JSON, it is what is on the channel ``final`` alone. Where header and recipient of a
call stand differs from call to call; here they are brought into the one form that the tool parser reads
(https://github.com/openai/harmony describes the format).
"""

from __future__ import annotations

import re

from bough.text.events import Content, Event, Reasoning
from bough.text.reader import Parse, Sink, literals
from bough.text.reasoning.splitter import Splitter

_HEADERS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"\bto=([\w./-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_STRING_MARK = re.compile(r'(?s:\\.?)|"')
_NOBODY = frozenset(("assistant", "user", "all"))


class ChannelSplitter(Splitter):
    """Splitter of one answer; calls come out as content in the form of the family ``gpt-oss``.

    Args:
        final_only: only what is on the channel ``final`` is the answer, and all else reasoning.
        calls: but for calls.
        started: False where the prompt ends within the answer.
    """

    def __init__(self, *, final_only: bool = False, calls: bool = True, started: bool | None = None) -> None:
        self._final_only = final_only
        self._calls = calls or not final_only
        self._started = started
        self._last: type[Event] | None = None
        self._in_string = self._escaped = False
        super().__init__()

    def _run(self) -> Parse:
        bodies = literals(*_HEADERS, *_ENDS)
        outside: Sink = self._on_reasoning if self._final_only else self._on_content
        sink = self._on_content if self._started is False else outside
        while True:
            found = yield from self._reader.until(bodies, sink)
            if found is None:
                return
            if sink == self._on_call and self._in_string:
                self._on_call(found)  # an argument speaks of it
            elif found in _HEADERS:
                header = [found]
                end = yield from self._reader.until(literals("<|message|>", *_ENDS), header.append)
                if end != "<|message|>":
                    outside("".join((*header, end or "")))
                    continue
                sink = self._message("".join(header))
            else:
                if sink == self._on_call:
                    self._events.append(Content("<|call|>"))
                elif sink == self._on_reasoning:
                    self._count(found)
                sink = outside

    def _message(self, header: str) -> Sink:
        """What takes the body of the message behind ``header``."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if self._calls and recipient is not None and recipient[1] not in _NOBODY:
            function = recipient[1].removeprefix("functions.")
            self._last = None
            self._in_string = self._escaped = False
            self._events.append(Content(f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>"))
            return self._on_call
        name = None if channel is None else channel[1]
        if name == "analysis" or (self._final_only and name != "final"):
            self._count(header + "<|message|>")
            self._separate(Reasoning)
            return self._on_reasoning
        self._separate(Content)
        return self._on_content

    def _separate(self, kind: type[Reasoning] | type[Content]) -> None:
        """Messages of one kind that follow each other are lines of one text."""
        if self._last is kind:
            self._events.append(kind("\n"))
        self._last = kind

    def _on_reasoning(self, text: str) -> None:
        self._count(text)
        self._events.append(Reasoning(text))

    def _on_content(self, text: str) -> None:
        self._events.append(Content(text))

    def _on_call(self, text: str) -> None:
        """Pass on the JSON of a call's arguments, and see whether it ends within a string."""
        self._events.append(Content(text))
        start, self._escaped = int(self._escaped), False
        for mark in _STRING_MARK.finditer(text, start):
            self._in_string ^= mark[0] == '"'
            self._escaped = mark[0] == "\\"
