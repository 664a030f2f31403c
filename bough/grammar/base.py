"""What a grammar backend is to the rest of the engine, and the table of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.base.constraint import Constraint
from bough.base.plan import Ints
from bough.base.registry import Registry

WORD = 32
"""Ids per word of a mask."""


class Matcher(Protocol):
    """How far one answer has come in its language."""

    @property
    def free(self) -> bool:
        """Every id may be sampled now, so no mask is needed."""
        ...

    @property
    def ended(self) -> bool:
        """The answer is complete, and nothing but the end of the sequence can follow."""
        ...

    def accept(self, token: int) -> bool:
        """Move over ``token``, which may be an end-of-sequence id; False, and no move, if it cannot come now."""
        ...

    def forced(self, most: int) -> list[int]:
        """At most ``most`` ids that must follow, without the end of the sequence; does not move.

        Only ids that are the sole ones allowed in their place: taking them changes no distribution.
        """
        ...

    def error(self) -> str | None:
        """Why the matcher cannot go on; None as long as it can. Its masks mean nothing then."""
        ...


class Template(Protocol):
    """A compiled constraint, from which any number of matchers are made."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the constraint is not enforced; empty for a strict one."""
        ...

    @property
    def bytes(self) -> int:
        """Estimate of the memory that it holds."""
        ...

    def matcher(self) -> Matcher:
        """A new matcher at the beginning; cheap."""
        ...


class Backend(Protocol):
    """A grammar library. ``compile`` is called on threads of a pool, ``fill`` on the engine's."""

    def compile(self, constraint: Constraint) -> Template:
        """Raises InvalidRequest for a constraint that is malformed, too expensive or not supported."""
        ...

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        """Write the mask of each matcher into its row of ``bits`` [N, ceil(V / 32)] int32, without Python's lock.

        A failure of one matcher is told by its ``error`` afterwards.
        """
        ...

    def close(self) -> None:
        """End what runs outside this process, if anything does."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a backend has to know of the model's tokenizer.

    Attributes:
        json: description of the tokenizer in the format of Hugging Face's tokenizer.json.
        size: ids with a logit; the tokenizer may know fewer.
        eos_ids: ids that end a sequence.
        special: texts and ids of the special tokens.
        n_tokens: ids that the tokenizer knows.
        token_bytes: the bytes that an id of it adds to a text.
    """

    json: str
    size: int
    eos_ids: tuple[int, ...]
    special: Mapping[str, int]
    n_tokens: int
    token_bytes: Callable[[int], bytes]


BackendFactory = Callable[[Vocabulary], Backend]
BACKENDS: Registry[BackendFactory] = Registry("grammar backend")
BACKENDS.add("llguidance", "bough.grammar.llguidance:LLGuidance")
BACKENDS.add("xgrammar", "bough.grammar.xgrammar:XGrammar")
