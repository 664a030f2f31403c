"""Token ids to bytes: the exact bytes behind each token, whatever kind of vocabulary it comes from.

Decoding works on bytes: the bytes of the tokens are joined and read as UTF-8, each maximal malformed
part becoming one U+FFFD. That is what the byte-level decoders of the ``tokenizers`` library do. For vocabularies
with byte fallback the library replaces a whole run of byte tokens when any part of it is malformed, a
rule that no stream can follow; on valid UTF-8 the two agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.base.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's reversible map between bytes and printable characters, as character -> byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table.update({chr(256 + k): byte for k, byte in enumerate(hidden)})
    return table


BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """How the tokens of a vocabulary spell bytes.

    Attributes:
        byte_level: each character of a token stands for one byte (GPT-2's alphabet).
        byte_fallback: a token ``<0xAB>`` is that byte.
        replace: (from, to) applied to the text of a token.
        strip_left: number of spaces removed at the very beginning of a text.
        continues: what a token that continues a word begins with; all others begin with a space (WordPiece).
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0
    continues: str | None = None

    def token_bytes(self, token: str, *, added: bool) -> bytes:
        """Bytes of ``token``; the text of an ``added`` token of a byte-level vocabulary is taken literally."""
        if self.byte_level:
            if not added and all(char in BYTE_OF_CHAR for char in token):
                return bytes(BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        if self.continues is not None:
            token = token[len(self.continues) :] if token.startswith(self.continues) else f" {token}"
        for old, new in self.replace:
            token = token.replace(old, new)
        return token.encode()


def read_decode_rule(decoder: Mapping[str, Any] | None) -> DecodeRule:
    """The rule described by the ``decoder`` entry of a tokenizer.json; raises ConfigError on other kinds."""
    byte_level = byte_fallback = False
    replace: list[tuple[str, str]] = []
    strip_left = 0
    continues: str | None = None
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_left = start
            case {"type": "Metaspace", "replacement": str(old), **rest}:
                replace.append((old, " "))
                strip_left = 0 if rest.get("prepend_scheme") == "never" else 1
            case {"type": "WordPiece", "prefix": str(prefix)}:
                continues, strip_left = prefix, 1
            case _:
                raise ConfigError(f"the tokenizer's decoder {step.get('type')!r} is not supported")
    return DecodeRule(byte_level, byte_fallback, tuple(replace), strip_left, continues)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ConfigError("the tokenizer has no decoder")
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", ()) for step in _steps(part)]
    return [decoder]
