"""Models of known shapes with random weights: a config, and a tokenizer of as many ids as the model has."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama; see the config of ``transformers`` for the words."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    @property
    def read_parameters(self) -> int:
        """Weights that one step reads: the layers, and the head."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden_size * self.intermediate_size) + self.head_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, n_new: int, length: int) -> float:
        """Of ``n_new`` tokens at the end of a sequence: the products with keys and values that they may see."""
        seen = n_new * (length - n_new) + n_new * (n_new + 1) / 2
        return 4.0 * self.layers * self.heads * self.head_dim * seen


LLAMA_8B = Shape("llama-3.1-8b", 128256, 4096, 14336, 32, 32, 8, 128)
LLAMA_1B = Shape("llama-3.2-1b", 128256, 2048, 8192, 16, 32, 8, 64, tied=True)
SMALL = Shape("small", 4096, 512, 1024, 4, 8, 2, 64)
"""For equivalence, in float32."""
TINY = Shape("tiny", 512, 64, 96, 2, 4, 2, 16)


def write(shape: Shape, folder: Path, context_length: int) -> Path:
    """The folder of a checkpoint without weights, for ``--load-format dummy``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": context_length, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu", "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": context_length,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tokenizer(n_ids: int) -> Tokenizer:
    """All bytes, and words that fill up the vocabulary. It encodes byte by byte; prompts are ids here anyway."""
    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = ("".join(word) for n in (2, 3, 4) for word in itertools.product(ascii_lowercase, repeat=n))
    tokens += itertools.islice(words, n_ids - len(tokens))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer
