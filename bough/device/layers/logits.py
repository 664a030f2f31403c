"""The language-model head, and that of classifiers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.embedding import Embedding
from bough.device.ops.library import PackedLinear

Tensor = torch.Tensor


class LMHead:
    """Hidden states -> logits, for the positions that are asked, and only for ids that a tokenizer knows.

    Checkpoints pad their vocabulary to round numbers; a logit of a padding id has no meaning, so its row is
    left out of the weight.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        sizes: tuple[int, int, int],
        tied: Embedding | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        """``sizes`` is (vocabulary of the checkpoint, of the tokenizer, hidden size); ``tied`` shares its weight.

        Logits are multiplied by ``scale``, then bounded: ``softcap * tanh(logit / softcap)``, unless that is 0.
        """
        self._scale, self._softcap = scale, softcap
        vocab_size, n_ids, hidden_size = sizes
        shape = vocab_size, hidden_size
        adapters = context.adapters
        self._adapted = None if adapters is None else adapters.head(name, shape, n_ids)
        if tied:
            self._method = tied.table.head(n_ids)
        else:
            self._method = context.head(f"{name}.weight", shape, n_ids)

    @property
    def parts(self) -> Sequence[PackedLinear]:
        """See :class:`bough.device.quant.base.LinearMethod`."""
        return self._method.parts

    @property
    def packed(self) -> PackedLinear | None:
        """The weight, where a kernel that multiplies with it does all there is to do."""
        plain = self._adapted is None and self._scale == 1.0 and not self._softcap and len(self.parts) == 1
        return self.parts[0] if plain else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, n_ids]."""
        logits = self._method.apply(hidden)
        if self._adapted is not None:
            self._adapted(hidden, logits)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits


class ScoreHead:
    """Hidden states -> scores of a classifier's few labels, in float32 however other weights are held."""

    def __init__(self, context: LayerContext, name: str, n_labels: int, hidden_size: int) -> None:
        self._weight = context.parameter(f"{name}.weight", (n_labels, hidden_size)).float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, n_labels] float32."""
        return torch.nn.functional.linear(hidden.float(), self._weight)
