"""Scoring all choices of a select in one batch of prompts, on engines that take token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod, Rows, decide


def scored_prompts(
    prompt: Sequence[int], with_choice: Sequence[Sequence[int]], method: ChoicesSamplingMethod
) -> tuple[list[list[int]], list[int]]:
    """(prompts as ids, first position of each to be scored).

    ``with_choice`` are the ids of the prompt with each choice. Where a choice changes how the end of the prompt is cut
    into tokens, all choices are scored from before that place, so that they stay comparable. Where ``method`` wants
    it, the scored tokens follow once more, without what is before them.
    """
    start = min([len(prompt), *(common_length(prompt, ids) for ids in with_choice)])
    start = max(0, min([start, *(len(ids) - 1 for ids in with_choice)]))
    prompts = [list(ids) for ids in with_choice]
    starts = [start] * len(prompts)
    if method.requires_unconditional_logprobs:
        prompts += [ids[start:] for ids in prompts]
        starts += [0] * len(starts)
    return prompts, starts


def rows_from(
    method: ChoicesSamplingMethod,
    choices: list[str],
    rows: list[Rows],
    output: list[Rows],
    usage: Sequence[dict[str, Any]] = (),
) -> ChoicesDecision:
    """The decision by the rows of :func:`scored_prompts`; ``usage`` is counted in its meta information."""
    n = len(choices)
    # The first token of all has no logprob, and none in favour of any choice.
    scored: list[Rows] = [[[row[0] or 0.0, *row[1:]] for row in r] for r in rows[:n]]
    alone = rows[n:] if method.requires_unconditional_logprobs else None
    means = [sum(row[0] for row in r) / len(r) for r in scored]
    decision = decide(method, choices, scored, output[:n], alone, means)
    assert decision.meta_info is not None
    for key in ("prompt_tokens", "cached_tokens"):
        decision.meta_info[key] = sum(int(u.get(key) or 0) for u in usage)
    return decision


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading elements are the same."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
