"""Reads the tool calls in an answer while its text arrives.

What is reported does not depend on how the text was cut into pieces. A call is reported as soon as its name and the
beginning of its arguments are there; from then on its arguments are passed on as they come. What looks like a call
and is none is content, exactly as it was written, together with the reason. Nothing is read twice, so the time is
linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from bough.text.events import CallArguments, CallStart, Content, Event, Trouble, merge_events
from bough.text.reader import Literals, Mismatch, Parse, Reader, Sink, literals
from bough.text.tools.format import Arguments, CallId, Envelope, Family, Format, Name, Parameters, Part, Serial
from bough.text.tools.values import Translator, is_object, json_text, json_value, quoted, text_value
from bough.text.trim import Trimmer

MAX_CALLS = 128
MAX_FAILURES = 32
"""Behind so many calls, or texts that look like calls and are none, everything is content."""

NAME = re.compile(r"[\w./-]*+")
"""What a function may be called."""

_DIGITS = re.compile(r"\d*+")
_ID = re.compile(r"[\w-]*+")


class ToolParser:
    """Parser of one answer.

    Args:
        family: how the model writes calls.
        tools: the functions that may be called, by name, with the JSON Schema of their parameters; None for any.
    """

    def __init__(self, family: Family, tools: Mapping[str, Mapping[str, Any]] | None) -> None:
        self._family = family
        self._tools = tools
        self._reader = Reader()
        self._events: list[Event] = []
        self._content = Trimmer(leading=False)
        self._calls = 0
        self._failures = 0
        self._call = _Call()
        self._running = self._run()

    def push(self, text: str) -> list[Event]:
        """Take a further piece of the answer; what became certain with it."""
        self._reader.push(text)
        next(self._running, None)
        return self._report()

    def finish(self) -> list[Event]:
        """The answer has ended; the rest of what it says."""
        self._reader.ended = True
        next(self._running, None)
        if held := self._content.release():
            self._events.append(Content(held))
        return self._report()

    def _report(self) -> list[Event]:
        events, self._events = self._events, []
        return merge_events(events)

    # Content and sections

    def _run(self) -> Parse:
        yield from self._bare_section()
        triggers = literals(*self._family.triggers)
        while self._calls < MAX_CALLS and self._failures < MAX_FAILURES:
            found = yield from self._reader.until(triggers, self._text)
            if found is None:
                return
            self._reader.mark()
            forms = [form for form in self._family.formats if form.trigger == found]
            yield from self._section(forms, found)
        yield from self._reader.until(Literals(()), self._text)

    def _bare_section(self) -> Parse:
        self._reader.mark()
        forms = [form for form in self._family.formats if form.bare]
        if forms:
            yield from self._reader.space()
            head = yield from self._reader.char()
            if any(form.begins_with(head) for form in forms if head):
                yield from self._section(forms, "")
                return
        self._text(self._reader.unmark())

    def _section(self, forms: Sequence[Format], opening: str) -> Parse:
        """A section behind ``opening``, in the first of ``forms`` that can go on like the text; recording is on."""
        self._call = _Call()
        before = self._calls
        try:
            yield from self._reader.space()
            head = yield from self._reader.char()
            form = next((form for form in forms if head and form.begins_with(head)), None)
            if form is None:
                raise Mismatch(f"{opening} is not followed by a call")
            yield from self._reader.literal(form.brackets[0])
            yield from self._read_call(form)
            while (yield from self._another(form)):
                yield from self._read_call(form)
            yield from self._closing(form)
            self._reader.unmark()
        except Mismatch as mismatch:
            self._fail(mismatch, opening if self._calls == before else "")

    def _another(self, form: Format) -> Generator[None, None, bool]:
        """Whether a further call of the section follows; takes what separates it."""
        if form.separator is None or self._calls >= MAX_CALLS:
            return False
        separator, end = form.separator.strip(), form.brackets[1]
        if not separator:
            yield from self._reader.space()
            head = yield from self._reader.char()
            return bool(head) and form.begins_with(head) and (yield from self._is_call(form))
        found = yield from self._reader.choice((separator, end) if end else (separator,))
        if found is None and end:
            raise Mismatch(f"expected {separator!r} or {end!r}", ended=self._reader.ended and self._reader.empty)
        return found == separator

    def _is_call(self, form: Format) -> Generator[None, None, bool]:
        """Whether a call, and not the end of the section, is next."""
        head, closes = form.call[0], form.closes.strip()
        if not isinstance(head, str) or not closes:
            return True
        first = head.split()[0]
        for size in range(1, min(len(first), len(closes)) + 1):
            ahead = yield from self._reader.ahead(size)
            if ahead != closes[:size]:
                return True
            if ahead != first[:size]:
                return False
        return False

    def _closing(self, form: Format) -> Parse:
        """The end of a section, which may be missing: some models stop before it."""
        closes = form.closes.strip()
        if closes and (yield from self._reader.choice((closes,))) is None and self._reader.ended:
            if closes.startswith((yield from self._reader.ahead(len(closes)))):
                self._reader.take_all()

    def _fail(self, mismatch: Mismatch, opening: str) -> None:
        """The section ends here, because of ``mismatch``; what was taken of it and is in no call is content."""
        raw = opening + self._reader.unmark()
        if self._call.complete and mismatch.ended:
            self._reader.take_all()
            return
        self._failures += 1
        self._events.append(Trouble(str(mismatch), self._call.index if self._call.started else None))
        self._text(raw)

    def _text(self, text: str) -> None:
        """Report content, without the white space next to calls."""
        if text := self._content.push(text):
            self._events.append(Content(text))

    # Calls

    def _read_call(self, form: Format) -> Parse:
        self._call = _Call()
        for part in form.call:
            yield from self._read_part(part)
        self._reader.mark()

    def _read_part(self, part: Part) -> Parse:
        reader, call = self._reader, self._call
        match part:
            case str():
                yield from reader.literal(part)
            case Name():
                yield from reader.space()
                call.name = yield from reader.run(NAME)
                self._check_name()
            case Serial():
                yield from reader.run(_DIGITS)
            case CallId(before):
                if (yield from reader.choice((before,))) is not None:
                    call.id = yield from reader.run(_ID)
            case Envelope():
                yield from self._envelope()
            case Parameters():
                yield from self._parameters(part)
            case Arguments(None):
                yield from self._arguments(self._argument_text)
                self._complete()
            case Arguments(notation):
                assert notation is not None
                yield from reader.literal(notation.bracket)
                yield from Translator(reader, notation, self._argument_text).arguments()
                self._complete()

    def _envelope(self) -> Parse:
        reader, call = self._reader, self._call
        early: list[str] = []
        yield from reader.literal("{")
        end: str | None = ","
        while end == ",":
            key = yield from json_text(reader)
            yield from reader.literal(":")
            if key in ("name", "function"):
                call.name = yield from json_text(reader)
                self._check_name()
            elif key in ("arguments", "parameters") and not call.started:
                early = []
                yield from self._arguments(self._argument_text if call.name else early.append)
                if call.started:
                    self._complete()
            elif key == "id":
                call.id = yield from json_text(reader)
            elif key == "type":
                yield from json_text(reader)
            else:
                raise Mismatch(f"a call has the key {key!r}")
            end = yield from reader.choice((",", "}"))
        if end is None:
            raise Mismatch("expected ',' or '}'", ended=reader.ended and reader.empty)
        if not call.started:
            self._check_name()
            self._argument_text("".join(early) if early else "{}")
            self._complete()

    def _arguments(self, sink: Sink) -> Parse:
        """A JSON object, or the JSON string of one, into ``sink``."""
        reader = self._reader
        yield from reader.space()
        head = yield from reader.char()
        if head == '"':
            sink((yield from json_text(reader)))
        elif head == "{":
            yield from json_value(reader, sink)
        else:
            raise Mismatch("the arguments are not an object")

    def _parameters(self, part: Parameters) -> Parse:
        reader, name = self._reader, self._call.name
        schema = (self._tools or {}).get(name, {})
        self._argument_text("{")
        first = True
        while (yield from reader.choice((part.before,))) is not None:
            key_end, *rest = part.between.split()
            key: list[str] = []
            if (yield from reader.until(literals(key_end), key.append)) is None:
                raise Mismatch("the text ended within the name of an argument")
            for literal in rest:
                yield from reader.literal(literal)
            if part.between.endswith("\n") and (yield from reader.char()) == "\n":
                reader.skip(1)
            argument = "".join(key).strip()
            self._argument_text(f'{"" if first else ", "}"{quoted(argument)}": ')
            yield from self._parameter(part, text_value(schema, argument))
            first = False
        self._argument_text("}")
        self._complete()

    def _parameter(self, part: Parameters, value: Any) -> Parse:
        """The text of one argument, up to its end."""
        end = part.after.strip()
        stops = literals("\n" + end, end) if part.after.startswith("\n") else literals(end)
        if value.is_string:
            self._argument_text('"')
            stop = yield from self._reader.until(stops, lambda text: self._argument_text(quoted(text)))
        else:
            parts: list[str] = []
            stop = yield from self._reader.until(stops, parts.append)
            self._argument_text(value.convert("".join(parts)) if stop else f'"{quoted("".join(parts))}')
        if stop is None:
            raise Mismatch("the text ended within an argument")
        if value.is_string:
            self._argument_text('"')

    # The call that is being read

    def _check_name(self) -> None:
        name, tools = self._call.name, self._tools
        if not name:
            raise Mismatch("the call has no name")
        if tools is not None and name not in tools:
            bare = name.removeprefix("functions.")
            if bare not in tools:
                raise Mismatch(f"{name[:128]!r} is not among the tools")
            self._call.name = bare

    def _start(self) -> None:
        """From here on this is a call, whatever follows."""
        call = self._call
        call.started = True
        call.index = self._calls
        self._calls += 1
        self._content.edge()
        self._events.append(CallStart(call.index, call.name, call.id))

    def _argument_text(self, text: str) -> None:
        """Report arguments, the first with their call; what is taken from here on is in neither yet."""
        if not self._call.started:
            self._start()
        self._call.text.append(text)
        self._events.append(CallArguments(self._call.index, text))
        self._reader.mark()

    def _complete(self) -> None:
        call = self._call
        call.complete = True
        if not is_object("".join(call.text)):
            self._events.append(Trouble("the arguments are not a valid JSON object", call.index))
        call.text = []
        self._reader.mark()


class _Call:
    """What is known of the call that is being read."""

    def __init__(self) -> None:
        self.name = ""
        self.id: str | None = None
        self.index = 0
        self.started = False
        self.complete = False
        self.text: list[str] = []
