"""Texts of programs that stay on the server, so that a later request sends only what it adds to one.

Branches of a fork, and turns that go on from one another, share most of their text. A client that names the call after
which its text goes on sends the rest; the text of one program is kept as a tree of such rests.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from bough.base.errors import InvalidRequest, NotFound
from bough.base.shares import Shares
from bough.server.schema import Prefix

ENTRY_BYTES = 400
"""What keeping a text takes beside its characters."""
CHAIN = 32
"""Rests that one text is made of at most; a longer chain is written out."""


class UnknownText(NotFound):
    """A text that the server never kept, or no longer; the client sends the whole (HTTP 404)."""

    code = "unknown_text"


@dataclass(slots=True, eq=False)
class _Text:
    """The first ``upto`` characters of ``base``, then ``rest``."""

    base: _Text | None
    upto: int
    rest: str
    chain: int
    n_bytes: int = 0
    used: int = 1
    """Names and texts that rest on it."""
    id: str = field(default_factory=partial(secrets.token_hex, 8))
    """No other text has it, on no other server either."""

    def __len__(self) -> int:
        return self.upto + len(self.rest)

    def read(self, upto: int) -> str:
        parts: list[str] = []
        text: _Text | None = self
        while text is not None:
            parts.append(text.rest[: max(0, upto - text.upto)])
            upto, text = min(upto, text.upto), text.base
        return "".join(reversed(parts))


@dataclass(slots=True)
class _Texts:
    """Those of one program, by the names of its calls."""

    by_node: dict[str, _Text] = field(default_factory=dict)
    n_bytes: int = 0

    def name(self, node: str, text: _Text) -> None:
        """``text`` is that of ``node`` from now on; what nothing rests on any more is gone."""
        if text.base is not None:
            text.base.used += 1
        self.n_bytes += text.n_bytes
        gone = self.by_node.pop(node, None)
        self.by_node[node] = text
        while gone is not None:
            gone.used -= 1
            if gone.used:
                return
            self.n_bytes -= gone.n_bytes
            gone = gone.base


class Kept(NamedTuple):
    """How many characters are kept, and the name of just these; 0 and none where there was no room."""

    chars: int
    id: str


class ProgramTexts:
    """The texts of all programs of all tenants, at most ``most`` bytes.

    Whole programs go: of the tenant with most bytes, the one that is longest unused first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._programs: dict[tuple[str, str], _Texts] = {}
        self._shares: Shares[str] = Shares()

    def find(self, tenant: str, prefix: Prefix) -> str:
        """The text that ``prefix`` names. Raises UnknownText, or InvalidRequest where it is shorter than that."""
        text = self._find(tenant, prefix)
        return text.read(len(text) if prefix.chars is None else prefix.chars)

    def _find(self, tenant: str, prefix: Prefix) -> _Text:
        known = self._programs.get((tenant, prefix.program))
        text = None if known is None else known.by_node.get(prefix.node)
        if known is None or text is None or prefix.id not in (None, text.id):
            raise UnknownText(f"the text of the call {prefix.node[:256]!r} is not kept", param="prefix")
        if prefix.chars is not None and not 0 <= prefix.chars <= len(text):
            raise InvalidRequest(f"the text of {prefix.node[:256]!r} has {len(text)} characters", param="prefix.chars")
        self._shares.put(tenant, prefix.program, known.n_bytes)
        return text

    def keep(self, tenant: str, program: str, node: str, prefix: Prefix | None, rest: str) -> Kept:
        """Keep what ``prefix`` names, and ``rest`` behind it, as the text of ``node``."""
        text = _Text(None, 0, rest, 0)
        if prefix is not None:
            try:
                base = self._find(tenant, prefix)
            except UnknownText:
                return Kept(0, "")  # it went while the request ran
            upto = len(base) if prefix.chars is None else prefix.chars
            # Programs go one by one, so no text may rest on that of another program.
            whole = base.chain == CHAIN or prefix.program != program
            text = _Text(None, 0, base.read(upto) + rest, 0) if whole else _Text(base, upto, rest, base.chain + 1)
        known = self._programs.setdefault((tenant, program), _Texts())
        text.n_bytes = sum(map(sys.getsizeof, (text.rest, node, program))) + ENTRY_BYTES
        known.name(node, text)
        self._shares.put(tenant, program, known.n_bytes)
        while self._shares.size > self._most:
            self.forget(*self._shares.oldest())
        return Kept(len(text), text.id) if (tenant, program) in self._programs else Kept(0, "")

    def forget(self, tenant: str, program: str) -> None:
        """The program has ended. Idempotent."""
        self._programs.pop((tenant, program), None)
        self._shares.pop(tenant, program)
