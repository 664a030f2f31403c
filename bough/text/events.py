"""What the parsers of answers report: the parts that a text consists of, in order, as they become certain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A further piece of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A further piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls the tool ``name``; ``id`` is the model's own, where its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a call could not be read. Its text is the content around this event, or the arguments of ``index``."""

    reason: str
    index: int | None = None


Event = Content | Reasoning | CallStart | CallArguments | Trouble


def merge_events(events: list[Event]) -> list[Event]:
    """``events`` with neighbouring pieces of one kind joined."""
    if len(events) < 2:
        return events
    runs: list[tuple[Event, list[str]]] = []
    for event in events:
        text = "" if isinstance(event, CallStart | Trouble) else event.text
        if runs and not isinstance(event, CallStart | Trouble) and _continues(runs[-1][0], event):
            runs[-1][1].append(text)
        else:
            runs.append((event, [text]))
    return [_with_text(event, "".join(texts)) for event, texts in runs]


def _continues(last: Event, event: Event) -> bool:
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return last.index == event.index
    return type(last) is type(event)


def _with_text(event: Event, text: str) -> Event:
    match event:
        case Content():
            return Content(text)
        case Reasoning():
            return Reasoning(text)
        case CallArguments(index):
            return CallArguments(index, text)
        case _:
            return event
