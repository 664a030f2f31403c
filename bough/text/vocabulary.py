"""A built tokenizer and the facts that it does not hold itself."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A built tokenizer and the facts that it does not hold itself.

    Attributes:
        tokenizer: ready to encode.
        eos_ids: ids that end a sequence, the model's main one first.
        bos_id: id that begins one, or None.
        unknown_id: id that stands for text outside the vocabulary, or None.
    """

    tokenizer: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None
    unknown_id: int | None
