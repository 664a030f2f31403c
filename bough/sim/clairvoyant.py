"""What a cache that knows the future would have hit, under the very admissions of a replay.

Belady's rule on a prefix tree: when room is needed, the token whose next use is farthest goes, the deepest of equals. A
token is never used without those before it, so that one is always a leaf's, and the rule needs no tree (Belady 1966, A
study of replacement algorithms for a virtual-storage computer).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from bough.sim.programs import Entry

NEVER = 1 << 60


def clairvoyant_hits(entries: Sequence[Entry], log: Sequence[tuple[bool, int]], n_tokens: int) -> int:
    """Prompt tokens that a cache of ``n_tokens`` finds when requests enter and leave in the order of ``log``.

    What a request uses stays while it runs; its answer enters the cache when it ends, which costs the clairvoyant
    less room than the real cache. As there, the last token of a prompt is always computed.
    """
    return _Clairvoyant(entries, log, n_tokens).run()


class _Clairvoyant:
    def __init__(self, entries: Sequence[Entry], log: Sequence[tuple[bool, int]], n_tokens: int) -> None:
        self._entries = entries
        self._log = log
        self._room = n_tokens
        self._uses: dict[int, list[tuple[int, int]]] = {}
        """Token -> places in the log that want it, the next one last, and what they are as a reason to keep it."""
        self._pins: Counter[int] = Counter()
        self._cached: set[int] = set()
        self._farthest: list[tuple[int, int, int]] = []
        self._depth: dict[int, int] = {}
        for place in range(len(log) - 1, -1, -1):
            admitted, number = log[place]
            if admitted:
                *found, last = entries[number].ids.tolist()
                for token in found:
                    self._uses.setdefault(token, []).append((place, place))
                self._uses.setdefault(last, []).append((place, NEVER))  # it is computed wherever it is

    def run(self) -> int:
        hits = 0
        for place, (admitted, number) in enumerate(self._log):
            entry = self._entries[number]
            prompt = entry.ids.tolist()
            if admitted:
                hits += self._hit(prompt)
                for token in prompt:
                    uses = self._uses[token]
                    while uses and uses[-1][0] <= place:
                        uses.pop()
                    self._pins[token] += 1
                self._enter(prompt, 0)
            else:
                self._enter(entry.answer.tolist(), len(prompt))
                for token in prompt:
                    self._pins[token] -= 1
                    if not self._pins[token]:
                        del self._pins[token]
                        self._offer(token)
        return hits

    def _hit(self, prompt: list[int]) -> int:
        n = 0
        while n < len(prompt) - 1 and prompt[n] in self._cached:
            n += 1
        return n

    def _enter(self, tokens: list[int], start: int) -> None:
        for depth, token in enumerate(tokens, start):
            if token not in self._cached:
                self._cached.add(token)
                self._depth[token] = depth
                self._offer(token)
        while len(self._cached) > self._room and self._farthest:
            entry = heapq.heappop(self._farthest)
            token = entry[-1]
            if token in self._cached and token not in self._pins and entry == self._entry(token):
                self._cached.discard(token)

    def _offer(self, token: int) -> None:
        if token in self._cached and token not in self._pins:
            heapq.heappush(self._farthest, self._entry(token))

    def _entry(self, token: int) -> tuple[int, int, int]:
        uses = self._uses.get(token)
        return -(uses[-1][1] if uses else NEVER), -self._depth[token], token
