"""The vocabulary that the backends are tested with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bough.grammar.base import Vocabulary
from bough.text.tokenizer import Tokenizer

PADDING = 75
"""Ids with a logit that the tokenizer does not know, as models with padded vocabularies have them."""

NEEDS_XGRAMMAR = pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs pip install 'bough[xgrammar]'")


@pytest.fixture(scope="package")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="package")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    special = {tokenizer.token_text(token): token for token in tokenizer.special_ids}
    size = tokenizer.vocab_size + PADDING
    return Vocabulary(tokenizer.to_json(), size, (0, 2), special, tokenizer.vocab_size, tokenizer.token_bytes)
