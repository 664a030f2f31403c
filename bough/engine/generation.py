"""Text-level nouns of the engine room: what callers ask for and what they are given back."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from bough.base.constraint import Constraint, Reasoning
from bough.base.messages import Finish, Logprob, Namespace
from bough.base.params import SamplingParams
from bough.base.program import Lease, Program


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Everything about one generation that is not its prompt.

    Attributes:
        params: the sampler's part.
        n: how many sequences to generate from the prompt; sequence i uses seed + i where a seed is given.
        include_stop: keep the stop string or regex match that ended the text (a stop token's text too).
        skip_special_tokens: leave special tokens out of the text,
        keep_special: except for these ids, which whoever reads the text needs.
        namespace: part of the cache key.
        priority, timeout: as in :class:`bough.base.messages.Request`.
        rid: the client's id for the request; sequences get ``rid`` or ``rid-i``.
        interval: tokens of a sequence that are put together into one chunk, after its first one.
        prompt_text: the text of a prompt that is given as ids; what is computed ahead of ``program.after`` has its ids.
        constraint, reasoning, program, lease, unseen: as in :class:`bough.base.messages.Request`; n sequences of a
            program are a fork of it.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    include_stop: bool = False
    skip_special_tokens: bool = True
    keep_special: frozenset[int] = frozenset()
    namespace: Namespace = Namespace()
    priority: int = 0
    timeout: float | None = None
    rid: str | None = None
    interval: int = 1
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    program: Program | None = None
    lease: Lease | None = None
    unseen: bool = False
    prompt_text: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """News of one sequence.

    ``text`` is the newly stable text: complete UTF-8, and never the beginning of a stop string that may
    still complete. The texts of a sequence's chunks, concatenated, are its text. Exactly one chunk, the
    last one, carries ``finish``.

    Attributes:
        index: which of the n sequences.
        text: newly stable text.
        tokens: newly generated ids (their text may come with a later chunk).
        logprobs: one per token where asked.
        prompt_logprobs: newly computed ones where asked.
        n_prompt, n_cached, n_generated: running usage of the sequence.
        finish: how it ended.
    """

    index: int
    text: str
    tokens: list[int]
    n_prompt: int
    n_cached: int
    n_generated: int
    finish: Finish | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None

    def then(self, later: Chunk) -> Chunk:
        """This chunk and the next one of the same sequence as one."""
        return msgspec.structs.replace(
            later,
            text=self.text + later.text,
            tokens=self.tokens + later.tokens,
            logprobs=joined(self.logprobs, later.logprobs),
            prompt_logprobs=joined(self.prompt_logprobs, later.prompt_logprobs),
        )


@dataclass(frozen=True, slots=True)
class Embedding:
    """What became of one prompt in place of text.

    Attributes:
        vector: [D] hidden states, or [labels] scores, float32 as the model computed them (not normalised).
        n_prompt, n_cached: as in :class:`Generation`.
    """

    vector: NDArray[np.float32]
    n_prompt: int
    n_cached: int


def tenant_rid(tenant: str, rid: str) -> str:
    """The id under which a tenant's request is known to the engine: no tenant can name another's."""
    return f"{tenant}\x1f{rid}" if tenant else rid


def joined(first: list[Logprob] | None, second: list[Logprob] | None) -> list[Logprob] | None:
    """One list of two, either of which may not have been asked for."""
    return second if first is None else first if second is None else first + second


@dataclass(slots=True)
class Generation:
    """A finished sequence."""

    index: int
    text: str
    tokens: list[int]
    n_prompt: int
    n_cached: int
    finish: Finish
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
