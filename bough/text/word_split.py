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

_DEEPSEEK = (  # DeepSeek LLM and V2. Of letters with case some blocks, of late or rare ones, are left out.
    r"[\r\n]",
    "\\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u058f\u10c6-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua78f-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d8f\U00016e40-\U00016e7f\U0001d400-\U0001d7ff\U0001df00-\U0001dfff]]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_KIMI_UPPER, _KIMI_LOWER = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    rf"{_CASED % (_ENGLISH + '?', _ENGLISH + '?')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)

_BY_STYLE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gpt-2", "mpt", "olmo", "jais", "phi-2", "jina-es", "jina-de", "roberta-bpe", "trillion", "granite-docling",
      "a.x-4.0", "mellum", "gigachat"), (_GPT2,)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", _GPT2)),
    (("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4",
      "pixtral", "midm-2.0"), (_LLAMA3,)),
    (("minicpm5",), (r"\p{N}{1,3}", _LLAMA3)),
    (("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo", "f2llmv2"), (_QWEN2,)),
    (("seed-coder",), (_SEED,)),
    (("tekken",), (_TEKKEN,)),
    (("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_GPT4O,)),
    (("tiny_aya",), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    (("kimi-k2",), (_KIMI,)),
    (("youtu",), _YOUTU),
    (("deepseek-llm",), _DEEPSEEK),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    (("deepseek-coder",), (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    (("viking",), (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    (("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
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
