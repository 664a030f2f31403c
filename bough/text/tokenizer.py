"""Text to token ids and back, for every vocabulary that bough serves.

:class:`Tokenizer` wraps a ``tokenizers.Tokenizer``, read from a Hugging Face folder or built from the
metadata of a GGUF file. It is immutable and safe to use from many threads; encoding releases the
interpreter lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from bough.base.errors import ConfigError, InvalidRequest
from bough.base.plan import Ints
from bough.text.decoding import BYTE_OF_CHAR, read_decode_rule
from bough.text.gguf_vocab import build_from_gguf
from bough.text.hf_vocab import read_folder
from bough.text.marking import MarkedText
from bough.text.vocabulary import Vocabulary

WORD_TOKENS = 16
"""Tokens between two ends of words that :meth:`Tokenizer.encode_words` tells, at least."""
SHRINKS = 4
"""More than what a text can lose by composing its characters (Unicode's NFC): the bytes of Hangul shrink to a third."""

_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


class Tokenizer:
    """Encodes text to ids and decodes ids to text or to bytes.

    Attributes:
        vocab_size: number of ids; one more than the largest.
        eos_ids: ids that end a sequence, the model's main one first.
        bos_id: id that begins one, or None.
        bos_token, eos_token: their texts for the chat template, "" where there is none.
        special_ids: ids of control tokens; ``skip_special`` drops them.
        special_tokens: their texts.
        rule: how tokens spell bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        full = vocabulary.tokenizer
        parts = _parts(full)
        self._full = full
        self.rule = read_decode_rule(parts["decoder"])
        self._added = full.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in sorted(self._added.items()) if token.special}
        self.special_ids = frozenset(special)
        self.special_tokens = tuple(special.values())
        self.vocab_size = 1 + max(full.get_vocab_size(with_added_tokens=True) - 1, *self._added, 0)
        self.eos_ids = vocabulary.eos_ids
        self.bos_id = vocabulary.bos_id
        self.bos_token = "" if self.bos_id is None else full.id_to_token(self.bos_id) or ""
        self.eos_token = full.id_to_token(self.eos_ids[0]) or "" if self.eos_ids else ""
        # An unknown token stands for ordinary text, so it neither cuts a prompt nor betrays an attack.
        self._structure = self.special_ids - {vocabulary.unknown_id}
        self._plain = self._variant(parts)
        self._inner = self._variant(_without_prefix(parts, inner=True))
        self._bare = self._variant(_without_prefix(parts, inner=False))
        self._finder, self._found_ids = self._make_finder(parts)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and its companions from ``folder``; raises ConfigError when it cannot be served."""
        return cls(read_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the ``tokenizer.ggml.*`` entries of a GGUF file; raises ConfigError on unknown kinds."""
        return cls(build_from_gguf(metadata))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of ``text``, in which the texts of special tokens act as such.

        With ``add_special`` the model's own frame is added, such as a token that begins a sequence.
        Raises InvalidRequest for text that is not valid Unicode.
        """
        return _encode(self._full, text, add_special)

    def encode_cut(self, text: str, most: int, *, left: bool = False, add_special: bool = True) -> list[int]:
        """As :meth:`encode`; the text loses its end, or with ``left`` its beginning, until the whole, the frame
        included, has at most ``most`` ids. Raises InvalidRequest also where the frame alone has more.
        """
        return self.cut(_encode(self._full, text, False), most, left=left, add_special=add_special)

    def cut(self, ids: list[int], most: int, *, left: bool, add_special: bool) -> list[int]:
        """What :meth:`encode_cut` makes of a text whose ids without a frame are, or end or begin with, ``ids``."""
        room = self.room(most, add_special=add_special)
        kept = ids[max(len(ids) - room, 0) :] if left else ids[:room]
        return self.framed(kept) if add_special else kept

    def room(self, most: int, *, pair: bool = False, add_special: bool = True) -> int:
        """Ids of a text, or of a pair, that with their frame are ``most``. Raises InvalidRequest where it has more."""
        room = most - (self._full.num_special_tokens_to_add(is_pair=pair) if add_special else 0)
        if room < 0:
            raise InvalidRequest(f"{'a pair of texts' if pair else 'a text'} does not fit into {most} tokens")
        return room

    def framed(self, *texts: list[int]) -> list[int]:
        """The ids of a text, or of a pair, in the frame that :meth:`encode` or :meth:`encode_pair` adds."""
        ids: list[int] = []
        for token_id, text in self._frames[len(texts) - 1]:
            ids += [token_id] if text is None else texts[text]
        return ids

    @cached_property
    def _frames(self) -> list[list[tuple[int, int | None]]]:
        """What surrounds a text, and a pair: ids of special tokens, and in the places of the texts their numbers."""
        tried = (_encoding(self._plain, text) for text in ("a", *self._full.get_vocab()))
        sample = next(encoding for encoding in tried if encoding.ids)
        sample.truncate(1)
        frames = []
        for second in (None, sample):
            whole, places = self._full.post_process(sample, second), count()
            frames.append(
                [(i, None if special else next(places)) for i, special in zip(whole.ids, whole.special_tokens_mask)]
            )
        return frames

    def encode_words(self, text: str, *, plain: bool = False) -> tuple[Ints, Ints, Ints]:
        """Ids of ``text`` without a frame, and some places where a word ends: the number of ids and of characters
        before each.

        Words are what the vocabulary cuts a text into before it looks for tokens. The texts of special tokens act as
        such unless ``plain``.
        """
        encoding = _encoding(self._plain if plain else self._full, text)
        ids: list[int] = encoding.ids
        index: list[int] = []
        ends: list[int] = []
        i = WORD_TOKENS
        while i < len(ids):
            start, end = encoding.token_to_chars(i - 1) or (0, 0)
            following, _ = encoding.token_to_chars(i) or (0, 0)
            words = encoding.token_to_word(i - 1), encoding.token_to_word(i)
            apart = None not in words and words[0] != words[1]
            # Some offsets leave out white space; a single space is the following word's.
            if apart and start < end and text[end:following] in ("", " "):
                index.append(i)
                ends.append(end)
                i += WORD_TOKENS - 1
            i += 1
        return np.array(ids, np.int32), np.array(index, np.int32), np.array(ends, np.int32)

    def least_ids(self, text: str) -> int:
        """A number of ids that ``text`` has at least, told from its bytes; 0 where the vocabulary may drop any text."""
        if self._reach is None:
            return 0
        longest, dropped = self._reach
        return -(-len(text.encode("utf-8", "surrogatepass").translate(None, dropped)) // longest)

    @cached_property
    def _reach(self) -> tuple[int, bytes] | None:
        """How many bytes of a text one id stands for at most, and the bytes that have no id and vanish."""
        parts = _parts(self._full)
        strips = any(token.lstrip or token.rstrip for token in self._added.values())
        if (
            not isinstance(self._full.model, models.BPE)
            or strips
            or not _keeps([parts["normalizer"], parts["pre_tokenizer"]])
        ):
            return None
        dropped = b""
        if self.rule.byte_level:
            dropped = bytes(byte for char, byte in BYTE_OF_CHAR.items() if self._full.token_to_id(char) is None)
        elif any(self._full.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256)):
            return None
        shrinks = 1 if self.rule.byte_level and parts["normalizer"] is None else SHRINKS
        return shrinks * max(map(len, map(self.token_bytes, range(self.vocab_size)))), dropped

    def encode_pair(self, first: str, second: str, most: int | None = None, *, add_special: bool = True) -> list[int]:
        """Ids of two texts in the frame that the model has for a pair; the texts of special tokens are ordinary text.

        The longer text loses its end until the whole has at most ``most`` ids. Raises InvalidRequest for text that is
        not valid Unicode, or where the frame alone has more.
        """
        room = None if most is None else self.room(most, pair=True, add_special=add_special)
        a, b = (_encoding(self._plain, text) for text in (first, second))
        if room is not None:
            for part, length in zip((a, b), longest_first(len(a.ids), len(b.ids), room)):
                part.truncate(length)
        ids: list[int] = self._full.post_process(a, b, add_special_tokens=add_special).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text``, in which the texts of special tokens are ordinary text."""
        return self._encode_plain(self._plain, text)

    def encode_bare(self, text: str) -> list[int]:
        """As :meth:`encode_plain`, and without the space that some vocabularies put before a text."""
        return self._encode_plain(self._bare, text)

    def encode_chat(self, prompt: MarkedText) -> list[int]:
        """Ids of a rendered chat prompt, in which only the template's own special tokens act.

        Where the client wrote none, this is ``encode(prompt.text, add_special=False)``.
        """
        if not prompt.has_marks:
            return _encode(self._full, prompt.marked, False)
        encoding = _encoding(self._finder, prompt.marked)
        ids: list[int] = []
        done = 0
        for found, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token_id = self._found_ids[found]
            # A span that does not read as the token got there by normalisation, so it is not the template's.
            if prompt.marked[start:end].strip() != self._added[token_id].content.strip():
                continue
            if token_id not in self._structure:
                continue
            ids += self._between(prompt, done, start)
            ids.append(token_id)
            done = end
        return ids + self._between(prompt, done, len(prompt.marked))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; malformed UTF-8 becomes U+FFFD and ids outside the vocabulary nothing."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        text = b"".join([self.token_bytes(token) for token in ids if token not in skipped]).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.rule.strip_left) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that ``token_id`` contributes to a text; empty outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._full.id_to_token(token_id) if token_id >= 0 else None
            data = b"" if token is None else self.rule.token_bytes(token, added=token_id in self._added)
            if token is not None:
                self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """The text of one token, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The whole tokenizer, in the format of tokenizer.json."""
        return str(self._full.to_str())

    def token_id(self, token: str) -> int | None:
        """Id of the vocabulary entry ``token``, or None."""
        found: int | None = self._full.token_to_id(token)
        return found

    def _between(self, prompt: MarkedText, start: int, end: int) -> list[int]:
        if start == end:
            return []
        return self._encode_plain(self._plain if start == 0 else self._inner, prompt.restore(prompt.marked[start:end]))

    def _encode_plain(self, variant: tokenizers.Tokenizer, text: str) -> list[int]:
        ids = _encode(variant, text, False)
        if self._structure.isdisjoint(ids):
            return ids
        # Some vocabularies can merge their way to a control token; spell that one out instead.
        spelled: list[int] = []
        for token_id in ids:
            spelled += self._spell(token_id) if token_id in self._structure else [token_id]
        return spelled

    def _spell(self, token_id: int) -> list[int]:
        """Ids of the characters of a control token's text, none of which is a control token."""
        ids: list[int | None] = []
        for char in self._added[token_id].content:
            if self.rule.byte_level:
                names = [_CHAR_OF_BYTE[byte] for byte in char.encode()]
            elif self._full.token_to_id(char) is not None:
                names = [char]
            else:
                names = [f"<0x{byte:02X}>" for byte in char.encode()]
            ids += [self._full.token_to_id(name) for name in names]
        known = [token for token in ids if token is not None and token not in self._structure]
        if len(known) < len(ids):
            raise InvalidRequest("the text of a special token cannot be encoded as ordinary text")
        return known

    def _make_finder(self, parts: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, list[int]]:
        """A tokenizer without a vocabulary, which finds nothing but added tokens; their ids in its order."""
        finder = tokenizers.Tokenizer.from_str(json.dumps({**parts, "pre_tokenizer": None, "model": _EMPTY_MODEL}))
        ids = sorted(self._added)
        finder.add_tokens([self._added[token_id] for token_id in ids])
        return finder, ids

    def _variant(self, parts: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """The same vocabulary (shared, not copied) with special tokens off and other text preparation."""
        shell = tokenizers.Tokenizer.from_str(json.dumps({**parts, "model": _EMPTY_MODEL}))
        variant = tokenizers.Tokenizer(self._full.model)
        if shell.normalizer is not None:
            variant.normalizer = shell.normalizer
        if shell.pre_tokenizer is not None:
            variant.pre_tokenizer = shell.pre_tokenizer
        variant.add_tokens([token for _, token in sorted(self._added.items())])
        variant.encode_special_tokens = True
        if any(variant.token_to_id(token.content) != token_id for token_id, token in self._added.items()):
            raise ConfigError("the tokenizer's added tokens have ids that do not follow its vocabulary")
        return variant


_EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


def _parts(full: tokenizers.Tokenizer) -> dict[str, Any]:
    """The description of ``full`` as in a tokenizer.json, without vocabulary, added tokens and frame."""
    shell = tokenizers.Tokenizer(models.BPE())
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (part := getattr(full, name)) is not None:
            setattr(shell, name, part)
    parts: dict[str, Any] = json.loads(shell.to_str())
    return parts


_KEEPING = {"NFC", "Prepend", "Split", "ByteLevel", "Digits", "Metaspace", "Punctuation"}
"""Kinds of normalisers and of ways of cutting that leave out nothing of a text unless they say so."""


def _keeps(steps: Iterable[Any]) -> bool:
    """Whether no step of a text's preparation leaves out any of it."""
    for step in steps:
        match step:
            case None:
                continue
            case {"type": "Sequence", **rest}:
                inner: Any = rest.get("normalizers") or rest.get("pretokenizers") or ()
                if not _keeps(inner):
                    return False
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return False
            case {"type": kind, **rest}:
                if kind not in _KEEPING or rest.get("behavior") == "Removed":
                    return False
    return True


def _without_prefix(parts: Mapping[str, Any], *, inner: bool) -> dict[str, Any]:
    """``parts`` without the space before the text: for text ``inner`` to a prompt where only its beginning
    gets one, or everywhere."""

    def change(node: Any) -> Any:
        if isinstance(node, list):
            return [changed for changed in map(change, node) if changed is not None]
        if not isinstance(node, dict):
            return node
        if node.get("type") == "Metaspace" and (not inner or node.get("prepend_scheme") == "first"):
            return {**node, "prepend_scheme": "never"}
        if node.get("type") == "Prepend" and not inner:
            return None
        if node.get("type") == "ByteLevel" and not inner:
            return {**node, "add_prefix_space": False}
        return {key: change(value) for key, value in node.items()}

    return {**parts, "normalizer": change(parts["normalizer"]), "pre_tokenizer": change(parts["pre_tokenizer"])}


def longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """What is left of two lengths when the longer one is cut first, until they come to at most ``room``."""
    if a + b <= room:
        return a, b
    least = min(a, b, room // 2)
    return (least, room - least) if a <= b else (room - least, least)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    # The batch call releases the interpreter lock, which the single one does not; "fast" leaves out offsets.
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequest("the text is not valid Unicode") from None
    return ids


def _encoding(tokenizer: tokenizers.Tokenizer, text: str, add_special: bool = False) -> tokenizers.Encoding:
    try:
        return tokenizer.encode_batch([text], add_special_tokens=add_special)[0]
    except (TypeError, UnicodeEncodeError):
        raise InvalidRequest("the text is not valid Unicode") from None
