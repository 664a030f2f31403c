"""How one of several continuations is chosen by the logprobs that the model gives their tokens.

A row is (logprob or None, token id, text or None), as servers report it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Sequence[Any]
Rows = list[Row]


@dataclass
class ChoicesDecision:
    """The chosen text, and the figures that it was chosen by."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesSamplingMethod(ABC):
    """A rule by which ``select`` decides."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the logprobs of the choices without a prompt are needed as well."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[Rows],
        output_token_logprobs: list[Rows],
        unconditional_token_logprobs: list[Rows] | None = None,
    ) -> ChoicesDecision: ...


class _Scored(ChoicesSamplingMethod):
    """A rule that looks at logprobs only."""

    @abstractmethod
    def choose(self, means: list[float], rows: list[Rows], alone: list[Rows] | None) -> tuple[int, dict[str, Any]]:
        """(number of the choice, further figures)."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[Rows],
        output_token_logprobs: list[Rows],
        unconditional_token_logprobs: list[Rows] | None = None,
    ) -> ChoicesDecision:
        best, more = self.choose(normalized_prompt_logprobs, input_token_logprobs, unconditional_token_logprobs)
        meta = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
            **more,
        }
        return ChoicesDecision(choices[best], meta)


class TokenLengthNormalized(_Scored):
    """The largest mean logprob per token."""

    def choose(self, means: list[float], rows: list[Rows], alone: list[Rows] | None) -> tuple[int, dict[str, Any]]:
        return int(np.argmax(means)), {}


class GreedyTokenSelection(_Scored):
    """What greedy decoding among the choices would take, token by token.

    A choice that ends while another goes on is continued with its own mean logprob.
    """

    def choose(self, means: list[float], rows: list[Rows], alone: list[Rows] | None) -> tuple[int, dict[str, Any]]:
        matrix = self._matrix(rows)
        left = np.arange(len(rows))
        for column in range(matrix.shape[1]):
            values = matrix[left, column]
            left = left[values == values.max()]
            if len(left) == 1:
                break
        return int(left[0]), {"greedy_logprob_matrix": matrix.tolist()}

    def _matrix(self, rows: list[Rows]) -> NDArray[np.float64]:
        """[choices, longest choice] logprobs."""
        matrix = np.zeros((len(rows), max(len(r) for r in rows)))
        for line, row in zip(matrix, rows):
            values = [token[0] for token in row]
            line[:] = np.mean(values)
            line[: len(values)] = values
        return matrix


class UnconditionalLikelihoodNormalized(_Scored):
    """The largest mean gain of a token's logprob over its logprob without the prompt."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def choose(self, means: list[float], rows: list[Rows], alone: list[Rows] | None) -> tuple[int, dict[str, Any]]:
        if alone is None:
            raise ValueError("Unconditional token logprobs are required for this method.")
        gains = [_mean_gain(given, without) for given, without in zip(rows, alone)]
        return int(np.argmax(gains)), {
            "unconditional_token_logprobs": alone,
            "normalized_unconditional_prompt_logprobs": gains,
        }


def _mean_gain(given: Rows, alone: Rows) -> float:
    # Nothing comes before the first token of a text alone, so its logprob is not known and counts as 0.
    first, *rest = (token[0] for token in alone)
    return float(np.mean(np.array([token[0] for token in given]) - np.array([first or 0.0, *rest])))


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def mean_logprob(rows: Rows) -> float:
    """Of the rows whose logprob is known."""
    values = [row[0] for row in rows if row[0]]
    return float(sum(values) / len(values))


def decide(
    method: ChoicesSamplingMethod,
    choices: list[str],
    rows: list[Rows],
    output: list[Rows],
    alone: list[Rows] | None,
    normalized: list[float] | None = None,
) -> ChoicesDecision:
    """What ``method`` says; ``normalized`` are the means of ``rows`` unless given."""
    return method(
        choices=choices,
        normalized_prompt_logprobs=[mean_logprob(r) for r in rows] if normalized is None else normalized,
        input_token_logprobs=rows,
        output_token_logprobs=output,
        unconditional_token_logprobs=alone,
    )
