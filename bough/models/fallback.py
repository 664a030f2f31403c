"""Any causal language model of ``transformers``, on this engine's KV: for architectures without a file here.

Its layers run as ``transformers`` computes them; only attention is ours, through the interface that transformers has
for that. So it is slower than a model file, and computes the same. Code from model folders is never run.

Shapes: T new tokens, D hidden size; H query heads, KH key-value heads, D_h numbers each.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from bough.base.errors import ConfigError
from bough.device.attention.base import AttentionBackend
from bough.device.layers.context import LayerContext
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring
from bough.models.base import CacheSpec, KVShape
from bough.models.decoder import FULL, SLIDING

Tensor = torch.Tensor

log = logging.getLogger(__name__)

NAME = "bough"
"""Of our attention, in transformers' table."""

KNOWN = frozenset(("sliding_window", "softcap", "s_aux", "position_ids", "cache_position", "dropout", "is_causal",
                   "use_cache", "return_dict", "output_attentions", "output_hidden_states", "cu_seq_lens_q",
                   "cu_seq_lens_k", "max_length_q", "max_length_k"))  # fmt: skip
"""Arguments of an attention whose meaning is computed, or that mean nothing here."""


class PooledAttention:
    """What transformers' attention layers write to and read from, while one forward runs."""

    def __init__(self, backend: AttentionBackend, specs: Sequence[CacheSpec]) -> None:
        self.backend = backend
        self._specs = specs
        self.k: Sequence[Cells] = ()
        self.v: Sequence[Cells] = ()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [1, H, T, D_h], k and v [1, KH, T, D_h], rotated already -> [1, T, H, D_h]."""
        heads = Heads(q.shape[1], k.shape[1], q.shape[3])
        qkv = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (q, k, v)], dim=1)
        no_rotation = torch.zeros(1, 0, device=q.device).expand(self.backend.batch.page_table.shape[1], 0)
        window = self._specs[layer].window
        written = self.backend.write(qkv, no_rotation, self.k[layer], self.v[layer], heads, window)
        return self.backend.forward(written, self.k[layer], self.v[layer], replace(scoring, window=window))[None]


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers, for modules that :class:`TransformersModel` prepared."""
    attention: Any = module
    unknown = [name for name, given in kwargs.items() if given is not None and name not in KNOWN | {"scaling"}]
    if attention_mask is not None or unknown:
        raise ConfigError(f"this model's attention uses {unknown or 'a mask'}, which is not supported")
    if not getattr(attention, "is_causal", True):
        raise ConfigError("attention in both directions is not supported without a model file")
    scale = kwargs.get("scaling")
    scoring = Scoring(
        query.shape[3] ** -0.5 if scale is None else float(scale),
        float(kwargs.get("softcap") or 0.0),
        int(kwargs.get("sliding_window") or 0),
        kwargs.get("s_aux"),
    )
    return attention.pooled(attention.layer_idx, query, key, value, scoring), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class TransformersModel:
    """A :class:`bough.models.base.Model`."""

    causal = True
    labels: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        model_type = str(config["model_type"])
        log.warning("%s models run through transformers, which is slower than a model file of bough", model_type)
        if context.adapters is not None:
            raise ConfigError(f"adapters of {model_type} models are not supported: there is no model file")
        self._model = _built(config, context)
        context.capturable = False  # transformers' code may ask the device for numbers
        for module in self._model.modules():
            _freeze_rotary(module, n_positions, context.device)
        self._base = self._model.base_model
        self._n_positions = n_positions
        self._attending = [module for module in self._base.modules() if hasattr(module, "layer_idx")]
        text = self._model.config.get_text_config()
        self.vocab_size = min(n_ids, int(text.vocab_size))
        self._hidden = _Given()
        _check_sequential(self._base)
        try:
            specs = self._probed(text, context.device)
        except ConfigError:
            raise
        except Exception as error:  # whatever the model's code raises
            raise ConfigError(
                f"{model_type} models do not run as transformers {transformers.__version__} has them, with attention "
                f"of others: {type(error).__name__}: {error}"
            ) from error
        self.kv_shape = KVShape(specs, context.dtype)
        self._pooled = PooledAttention(context.attention, specs)
        self._use(self._pooled)

    def _use(self, attention: Any) -> None:
        for module in self._attending:
            module.pooled = attention

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[T] and [T] -> [T, D]."""
        out = self._base(input_ids=tokens[None].long(), position_ids=positions[None].long(), use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _probed(self, text: Any, device: torch.device) -> tuple[CacheSpec, ...]:
        """What each layer keeps, found by running one token through the model, its head included."""
        kinds = getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers
        probe = _Probe()
        self._use(probe)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        hidden = self._run(zero, zero)
        # What is left of the model makes logits of hidden states, with the scales and bounds that are its own.
        setattr(self._model, self._model.base_model_prefix, self._hidden)
        self.logits(hidden)
        specs = [probe.specs.get(i) for i in range(len(kinds))]
        found = []
        for kind, spec in zip(kinds, specs):
            if spec is None:
                raise ConfigError("layers that do not attend through transformers' interface need a model file")
            if kind not in (FULL, SLIDING) or (kind == SLIDING) > bool(spec.window):
                raise ConfigError(f"layers of the kind {kind!r} are not supported without a model file")
            found.append(spec if spec.window < self._n_positions else replace(spec, window=0))
        return tuple(found)

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        self._pooled.k, self._pooled.v = k, v
        return self._run(tokens, self._pooled.backend.batch.positions)

    def decode(self, tokens: Tensor, last: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        self._hidden.states = hidden[None]
        logits: Tensor = self._model(input_ids=torch.zeros(1, len(hidden), dtype=torch.long)).logits[0]
        return logits[:, : self.vocab_size]

    def scores(self, hidden: Tensor) -> Tensor:
        raise TypeError("a model without a classification head gives no scores")


def _check_sequential(base: torch.nn.Module) -> None:
    """ConfigError for layers that count positions themselves, or that remember more of a sequence than its KV."""
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ConfigError("a model that cannot be told positions is not supported without a model file")
    if any(isinstance(module, torch.nn.Conv1d) for module in base.modules()):
        raise ConfigError("layers that keep a state are not supported without a model file")


def _freeze_rotary(module: Any, n_positions: int, device: torch.device) -> None:
    """Let the frequencies of a rotary embedding be those of the context that is served.

    Those of the types dynamic and longrope follow the largest position of a call in transformers, so that what a key is
    would depend on the company that it was computed in. ConfigError where there is more to it.
    """
    kind = getattr(module, "rope_type", None)
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    if not kinds & {"dynamic", "longrope"}:
        return
    ends, x = torch.tensor([[0, n_positions - 1]], device=device), torch.zeros(1, 2, 1, device=device)
    if isinstance(kind, str):
        whole = module(x, ends)
        module.rope_type = "default"
        if all(torch.equal(a[:, :1], b) for a, b in zip(whole, module(x[:, :1], ends[:, :1]))):
            return
    raise ConfigError(f"rotary embeddings of the type {kind!r} are not supported without a model file")


class _Given(torch.nn.Module):
    """In the place of a model's layers: what they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)

    @property
    def decoder(self) -> _Given:
        """For heads that ask a part of the model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _States(last_hidden_state=self.states)


class _States(BaseModelOutputWithPastAndCrossAttentions):
    """What heads of mixtures of experts ask for, too."""

    router_logits = None


class _Probe:
    """Stands in for :class:`PooledAttention` and writes down the shapes of keys and values."""

    def __init__(self) -> None:
        self.specs: dict[int, CacheSpec] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        if layer in self.specs:
            raise ConfigError("layers that attend more than once are not supported without a model file")
        if k.shape != v.shape or q.shape[3] != k.shape[3]:
            raise ConfigError("keys and values of different sizes are not supported without a model file")
        self.specs[layer] = CacheSpec(k.shape[1], k.shape[3], v.shape[3], scoring.window)
        return q.transpose(1, 2)


class _Stored:
    """A parameter that is read when transformers takes it."""

    def __init__(self, context: LayerContext, name: str) -> None:
        self._context, self._name = context, name

    def __getitem__(self, whole: object) -> Tensor:
        return self._context.stored(self._name)


def _built(config: Mapping[str, Any], context: LayerContext) -> Any:
    """The model, loaded as transformers loads it: names and shapes of checkpoints may be others than of its modules.

    ConfigError if transformers cannot build it, or parameters do not fit.
    """
    own = {"quantization_config"} | ({"rope_scaling"} if config.get("rope_scaling") is None else set())
    plain = {key: value for key, value in config.items() if key not in own}
    try:
        read = AutoConfig.for_model(**plain)
        made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(read)]
        model, found = made.from_pretrained(
            None, config=read, state_dict={name: _Stored(context, name) for name in context.names()},
            dtype=context.dtype, attn_implementation=NAME, output_loading_info=True,
        )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever the files of its models raise
        raise ConfigError(
            f"transformers {transformers.__version__} cannot build a model of the type {config['model_type']!r} with "
            f"attention of others: {type(error).__name__}: {error}"
        ) from error
    unread = [name for name in found["unexpected_keys"] if not name.endswith("inv_freq")]
    for names, what in ((found["missing_keys"], "lacks"), (unread, "has, of no known use,")):
        if names:
            raise ConfigError(f"the checkpoint {what} {len(names)} parameters, such as {', '.join(sorted(names)[:3])}")
    model.to(context.device)
    context.n_parameters += sum(parameter.numel() for parameter in model.parameters())
    sizes = read.get_text_config().to_dict()
    context.routed |= any("experts" in name and isinstance(n, int) and n > 1 for name, n in sizes.items())
    return model
