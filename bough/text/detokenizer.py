"""Text of a growing sequence of token ids, in linear time and without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from bough.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes generated ids as they come, as a continuation of the prompt.

    The concatenation of all that ``push`` and ``flush`` return is the text of the generated ids after
    the prompt, however they were cut into calls. A character whose bytes the prompt began and the
    generation finishes belongs to the generation. State is at most three bytes.

    Args:
        tokenizer: of the model.
        skip_special: special tokens contribute no text,
        keep: except for these.
        prompt_tail: the last ids of the prompt; eight are enough.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - keep if skip_special else frozenset[int]()
        self._unfinished = b""  # the first bytes of a character
        self._strip = tokenizer.rule.strip_left
        self.push(prompt_tail)

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with ``ids``; bytes of an unfinished character are held back."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(token) for token in ids if token not in skipped])
        return self._decode(data, final=False) if data else ""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._unfinished + data
        text, n = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[n:]
        return self._begin(text) if self._strip else text

    def _begin(self, text: str) -> str:
        """Drop the space that some vocabularies put before a text; only at its very beginning."""
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
