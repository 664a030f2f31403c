"""Patterns of white space between the tokens of JSON: what clients write, read by its meaning and written anew."""

from __future__ import annotations

import re

JSON_SPACE = " \t\n\r"
"""All that JSON allows."""

_ANCHORS = re.compile(r"\A(?:\^|\\A)?(.*?)(?:\$|\\[zZ])?\Z", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d{1,3})\}|\{(\d{0,3}),(\d{0,3})\})[?+]?")
_OPENING = re.compile(r"\((?:\?:|\?P?<\w+>)?")
_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]\\])+)\]", re.DOTALL)
_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\})")
_SPELLED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", " ": " "}
_MEMBER = re.compile(rf"{_CODE.pattern}|\\(.)|([^\\])", re.DOTALL)
_OTHERS = frozenset(map(chr, range(256)))
"""Characters that stand for all others: a class that has any of them besides white space is none of white space."""


def written_whitespace(pattern: str) -> str:
    """A regular expression for what ``pattern`` matches as a whole, of classes, groups, ``|`` and counts alone.

    The classes hold what of Unicode's white space JSON allows. Raises ValueError with the reason for a pattern that may
    match anything else, and for one that is malformed. Its meaning is that of ECMA 262 and of Rust where they agree.
    """
    reader = _Reader(_ANCHORS.sub(r"\1", pattern))
    written = reader.alternatives()
    if reader.rest:
        raise ValueError(f"a {reader.rest[0]} stands alone")
    return written


class _Reader:
    def __init__(self, text: str) -> None:
        self.rest = text

    def alternatives(self) -> str:
        parts = [self._sequence()]
        while self.rest.startswith("|"):
            self.rest = self.rest[1:]
            parts.append(self._sequence())
        return "|".join(parts)

    def _sequence(self) -> str:
        parts = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self._atom() + self._quantifier())
        return "".join(parts)

    def _atom(self) -> str:
        if opening := _OPENING.match(self.rest):
            self.rest = self.rest[opening.end() :]
            inner = self.alternatives()
            if not self.rest.startswith(")"):
                raise ValueError("a group is not closed")
            self.rest = self.rest[1:]
            return f"(?:{inner})"
        found = _CLASS.match(self.rest) or _MEMBER.match(self.rest)
        if found is None:
            raise ValueError("a class or an escape is not complete")
        self.rest = self.rest[found.end() :]
        if found.re is _CLASS:
            return _class(_members(found[2]), bool(found[1]), found[0])
        if found[0] in list("^$.*+?{[]}"):
            raise ValueError(f"{found[0]} is no white space, or not in its place")
        return _class(_members(found[0]), False, found[0])

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self.rest)
        if found is None:
            return ""
        self.rest = self.rest[found.end() :]
        sign, times, least, most = found.groups()
        if sign is not None:
            return str(sign)
        if times is not None:
            return f"{{{times}}}"
        if not least and not most:
            raise ValueError(f"{found[0]} counts nothing")
        if most and int(least or 0) > int(most):
            raise ValueError(f"{found[0]} counts backwards")
        return f"{{{least or 0},{most}}}"


def _members(text: str) -> frozenset[str]:
    """The characters of a class, or of an escape, among those of ``_OTHERS`` and as they are written."""
    members: set[str] = set()
    found = list(_MEMBER.finditer(text))
    i = 0
    while i < len(found):
        first = _character(found[i])
        if isinstance(first, str) and i + 2 < len(found) and found[i + 1][0] == "-":
            last = _character(found[i + 2])
            if isinstance(last, str):
                if last < first:
                    raise ValueError(f"{first}-{last} is no range")
                members |= {char for char in (*_OTHERS, first, last) if first <= char <= last}
                i += 3
                continue
        members |= {first} if isinstance(first, str) else first
        i += 1
    return frozenset(members)


def _character(member: re.Match[str]) -> str | frozenset[str]:
    """The character that one member of a class is, or the characters that its name stands for."""
    code, letter, plain = member[1] or member[2] or member[3], member[4], member[5]
    if code is not None:
        number = int(code, 16)
        if number > 0x10FFFF:
            raise ValueError(f"{member[0]} is no character")
        return chr(number)
    if plain is not None:
        return str(plain)
    if letter in "sS":
        return frozenset(char for char in _OTHERS if char.isspace() == (letter == "s"))
    if letter in _SPELLED:
        return _SPELLED[letter]
    raise ValueError(f"{member[0]} is no white space")


def _class(members: frozenset[str], negated: bool, text: str) -> str:
    members = _OTHERS - members if negated else members
    if other := next((char for char in sorted(members) if not char.isspace()), None):
        raise ValueError(f"{text} matches {other!r}")
    allowed = [char for char in JSON_SPACE if char in members]
    if not allowed:
        raise ValueError(f"JSON does not allow the white space {text}")
    return f"[{''.join(allowed)}]".replace("\t", r"\t").replace("\n", r"\n").replace("\r", r"\r")
