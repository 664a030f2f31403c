"""Checks the table by which sentencepiece normalises text.

The table is a double-array trie (Aoki 1989, as Darts-clone lays it out) of byte strings and, behind it, their
replacements, each ended by a zero byte. The library that applies it follows its indices without looking, and ends the
process where one leads outside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.base.errors import ConfigError

Units = npt.NDArray[np.int64]

_BLOCK = 256
_AT_ONCE = 256
_LABELS = np.arange(1, _BLOCK, dtype=np.int64)  # no byte string contains a zero


def check_charsmap(data: bytes) -> None:
    """Raises ConfigError unless every text can be looked up in the table ``data``."""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 0 < size <= len(data) - 4:
        raise _broken("its size is not that of a trie")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    replacements = data[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError:
        raise _broken("its replacements are not UTF-8") from None
    at = _values(units)
    first = np.frombuffer(replacements + b"\0", np.uint8)[np.minimum(at, len(replacements))]
    if (at > len(replacements)).any() or (first & 0xC0 == 0x80).any():
        raise _broken("a replacement does not begin where it should")


def _values(units: Units) -> Units:
    """What the trie has as values of byte strings. Each state is visited once, also where a damaged trie has loops."""
    seen = np.zeros(len(units), dtype=bool)
    values = [np.zeros(0, dtype=np.int64)]
    waiting = _targets(units, np.zeros(1, dtype=np.int64))
    while len(waiting):
        states, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
        seen[states] = True
        children = states[:, None] ^ _LABELS
        # The highest bit is set in values, which have no label.
        children = children[units[children] & 0x800000FF == _LABELS]
        targets = _targets(units, children)
        values.append(units[targets[units[children] >> 8 & 1 == 1]] & 0x7FFFFFFF)
        waiting = np.concatenate([waiting, np.unique(targets[~seen[targets]])])
    return np.concatenate(values)


def _targets(units: Units, at: Units) -> Units:
    """Where the units ``at`` lead to; from there the next byte chooses in a block."""
    found = units[at]
    targets: Units = at ^ (found >> 10 << ((found & 1 << 9) >> 6))
    if (targets | _BLOCK - 1 >= len(units)).any():
        raise _broken("its trie leads outside of it")
    return targets


def _broken(why: str) -> ConfigError:
    return ConfigError(f"the vocabulary's table of normalised characters is damaged: {why}")
