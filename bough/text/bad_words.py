"""Bad words: from strings to the token sequences that the sampler must not complete."""

from __future__ import annotations

from collections.abc import Iterable

from bough.base.errors import InvalidRequest
from bough.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of ``words``, each at the beginning of a text or line and behind a space.

    The same word in other company (inside a longer word, or cut differently by the model) is not covered.
    Raises InvalidRequest for a word that is empty or only space.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not bare:
            raise InvalidRequest("a bad word is empty", param="bad_words")
        for variant in (bare, " " + bare):
            found[tuple(tokenizer.encode_bare(variant))] = None
    return tuple(found)
