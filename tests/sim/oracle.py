"""What a request must be answered, computed from its tokens alone: no cache, no batch, no scheduler."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from bough.base.messages import Namespace, Request
from bough.sim.device import logprob, mix, next_token

VOCAB = 97
CONTEXT = 96
EOS = (0, 3)

NAMESPACES = (
    Namespace(),
    Namespace(salt="a"),
    Namespace(tenant="a"),
    Namespace(adapter="a"),
    Namespace(salt="b"),
    Namespace(tenant="a", salt="a"),
    Namespace(model="v2"),
    Namespace(adapter="a", salt="a"),
)
"""The seed of every request says modulo eight which of them it is in, so that the device knows it too."""


def root_of(seed: int, adapter: str = "") -> int:
    """The state before the first token; each namespace has its own, and each adapter in it."""
    root = mix(0x5EED, seed % len(NAMESPACES))
    return root if adapter in ("", "a") else mix(root, zlib.crc32(adapter.encode()))


def text_of(token: int) -> str:
    """A tiny tokenizer: one or two letters per token, few enough that they recur."""
    return "abcde"[token % 5] + ("xyz"[token % 3] if token % 4 == 0 else "")


class Letters:
    """A detokenizer over :func:`text_of`."""

    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(map(text_of, ids))


@dataclass(frozen=True, slots=True)
class Automaton:
    """A language over token ids: from each state a few ids lead on, often one alone, and sometimes the end."""

    seed: int

    def allowed(self, state: int) -> list[int]:
        draw = mix(mix(self.seed, 77), state)
        if draw % 16 == 0:
            return list(EOS)
        count = (1, 1, 1, 2, 5, 40)[draw // 16 % 6]
        ids = {mix(draw, i) % VOCAB for i in range(count)} - set(EOS) or {5}
        return sorted(ids | set(EOS) if draw // 128 % 4 == 0 and count > 1 else ids)

    def after(self, state: int, token: int) -> int:
        return mix(mix(self.seed, state), token) % 24


class Rules:
    """What a constrained request may say next, told from all it said so far. Slow, and has no state to get wrong."""

    def __init__(self, request: Request) -> None:
        self._reasoning = request.reasoning
        self._automaton: Automaton | None = None
        if request.constraint is not None:
            self._automaton = Automaton(int(request.constraint.text.split()[0]))

    def allowed(self, said: list[int]) -> list[int] | None:
        """The ids that may follow; None: any."""
        begin = 0
        if self._reasoning is not None:
            tag, budget = list(self._reasoning.end), self._reasoning.budget
            ends = [n for n in range(len(tag), len(said) + 1) if said[n - len(tag) : n] == tag]
            if not ends:
                begun = max(n for n in range(len(tag)) if said[len(said) - n :] == tag[:n])
                if budget is not None and len(said) >= budget:
                    return [tag[begun]]
                return None if self._automaton is None else sorted(set(range(VOCAB)) - set(EOS))
            begin = ends[0]
        if self._automaton is None:
            return None
        state = 0
        for token in said[begin:]:
            state = self._automaton.after(state, token)
        allowed = self._automaton.allowed(state)
        return allowed[:1] if allowed == list(EOS) else allowed


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole answer of a request that nothing cuts short.

    ``kind`` is "refused" where the request's own rules leave nothing to say.
    ``logprobs`` and ``prompt_logprobs`` are (token, logprob) pairs.
    """

    tokens: list[int]
    kind: Literal["stop", "length", "refused"]
    matched: int | str | None
    logprobs: list[tuple[int, float]]
    prompt_logprobs: list[tuple[int, float]]


def expect(request: Request, seed: int, most: int = CONTEXT) -> Expected:
    """The answer to ``request``; ``most`` bounds prompt and answer where it asks for no length."""
    params, prompt = request.params, request.prompt.tolist()
    state = root_of(seed, request.namespace.adapter)
    prompt_logprobs: list[tuple[int, float]] = []
    for position, token in enumerate(prompt):
        if position and params.prompt_logprobs is not None and position >= params.logprob_start:
            prompt_logprobs.append((token, logprob(state, token)))
        state = mix(state, token)
    n = most - len(prompt) if params.max_tokens is None else params.max_tokens
    draws = 0 if params.temperature == 0 else seed
    ignores = params.ignore_eos and request.constraint is None
    ends = params.stop_token_ids if ignores else (*EOS, *params.stop_token_ids)
    rules = Rules(request)
    tokens: list[int] = []
    logprobs: list[tuple[int, float]] = []
    text = ""
    while len(tokens) < n:
        allowed = rules.allowed(tokens)
        if allowed is not None and len(tokens) < params.min_tokens:
            allowed = [token for token in allowed if token not in ends]
        if allowed == []:
            return Expected(tokens, "refused", None, logprobs, prompt_logprobs)
        token = next_token(state, draws, len(prompt) + len(tokens), VOCAB, allowed)
        if params.logprobs is not None:
            logprobs.append((token, logprob(state, token)))
        state = mix(state, token)
        tokens.append(token)
        old, text = len(text), text + text_of(token)
        if len(tokens) < params.min_tokens:
            continue
        if token in ends:
            matched = token if token in params.stop_token_ids else None
            return Expected(tokens, "stop", matched, logprobs, prompt_logprobs)
        if (found := _stop_string(text, old, params.stop)) is not None:
            return Expected(tokens, "stop", found, logprobs, prompt_logprobs)
    return Expected(tokens, "length", None, logprobs, prompt_logprobs)


def _stop_string(text: str, old: int, stop: tuple[str, ...]) -> str | None:
    """The stop string that ends beyond ``old``: the one that begins first, then the one given first."""
    begins = [
        (begin, i)
        for i, string in enumerate(stop)
        for begin in range(len(text) - len(string) + 1)
        if text.startswith(string, begin) and begin + len(string) > old
    ]
    return stop[min(begins)[1]] if begins else None
