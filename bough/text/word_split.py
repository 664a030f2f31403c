"""How byte-level vocabularies cut text into words before merging, by the names that GGUF files use.

A GGUF file carries only the name; the patterns are those of the models' own tokenizers. Several
patterns are applied one after the other, each cutting what the previous ones left.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from bough.base.errors import ConfigError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED % (_ENGLISH + '?', _ENGLISH + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_BY_STYLE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gpt-2", "mpt", "olmo", "jais", "phi-2", "jina-es", "jina-de", "roberta-bpe", "trillion", "granite-docling"),
     (_GPT2,)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    (("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), (_QWEN2,)),
    (("seed-coder",), (_SEED,)),
    (("tekken",), (_TEKKEN,)),
    (("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    (("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    (("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    (("falcon",), (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    (("default",), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)  # fmt: skip

STYLES: dict[str, tuple[str, ...]] = {name: patterns for names, patterns in _BY_STYLE for name in names}


def word_split(name: str, *, add_prefix_space: bool) -> pre_tokenizers.Sequence:
    """The splitter called ``name``, followed by the map from bytes to characters.

    Raises ConfigError on an unknown name: a wrong split gives valid ids and bad answers.
    """
    patterns = STYLES.get(name)
    if patterns is None:
        raise ConfigError(f"the GGUF pre-tokenizer {name!r} is not known; known: {', '.join(STYLES)}")
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)]
    )
