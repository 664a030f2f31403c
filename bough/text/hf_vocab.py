"""Reads the tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from bough.base.errors import ConfigError
from bough.text.gguf_vocab import build_from_gguf
from bough.text.rank_file import is_rank_file, rank_metadata
from bough.text.spm_file import spm_metadata
from bough.text.vocabulary import Vocabulary

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> Vocabulary:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json.

    Without a tokenizer.json the vocabulary is sentencepiece's ``.model`` or a tiktoken file. End-of-sequence ids
    come from generation_config.json, config.json and the tokenizer's ``eos_token``, in this order. Raises ConfigError
    when the vocabulary is missing or broken.
    """
    config = read_json(folder / "tokenizer_config.json")
    found = _vocabulary(folder, config)
    tokenizer = found.tokenizer
    names = {**read_json(folder / "special_tokens_map.json"), **config}
    try:
        _add_missing(tokenizer, names)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}: the tokens that its configs add are not described as tokens are") from error
    ids = {name: _id_of(tokenizer, names.get(name)) for name in _NAMED}
    eos: dict[int, None] = {}
    for file in ("generation_config.json", "config.json"):
        eos.update(dict.fromkeys(_ids_in(read_json(folder / file).get("eos_token_id"), folder / file)))
    if ids["eos_token"] is not None:
        eos[ids["eos_token"]] = None
    bos, unknown = ids["bos_token"], ids["unk_token"]
    return Vocabulary(
        tokenizer,
        tuple(eos) or found.eos_ids,
        found.bos_id if bos is None else bos,
        found.unknown_id if unknown is None else unknown,
    )


def _vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """What the folder's vocabulary file tells."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a valid tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return Vocabulary(tokenizer, (), None, None)
    files = [file for pattern in ("tokenizer.model", "*.model", "*.tiktoken") for file in sorted(folder.glob(pattern))]
    if not files:
        raise ConfigError(f"{folder} has no tokenizer.json, nor a sentencepiece or tiktoken file")
    if is_rank_file(files[0]):
        return build_from_gguf(rank_metadata(files[0]))
    frame = {f"tokenizer.ggml.{key}": bool(config[key]) for key in ("add_bos_token", "add_eos_token") if key in config}
    return build_from_gguf({**spm_metadata(files[0]), **frame})


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one when there is no such file; ConfigError when it is broken."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _add_missing(tokenizer: tokenizers.Tokenizer, names: Mapping[str, Any]) -> None:
    """Add the tokens that only the companion files declare, as the model's own tokenizer class would."""
    known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    for content, declared in _declared(names):
        if content not in known or (declared.special and not known[content]):
            tokenizer.add_tokens([declared])
            known[content] = declared.special


def _declared(names: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    decoder = names.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
            yield (
                entry["content"],
                AddedToken(
                    entry["content"],
                    single_word=entry.get("single_word", False),
                    lstrip=entry.get("lstrip", False),
                    rstrip=entry.get("rstrip", False),
                    normalized=entry.get("normalized", True),
                    special=entry.get("special", False),
                ),
            )
    extra = names.get("additional_special_tokens") or names.get("extra_special_tokens") or []
    values = [names.get(name) for name in _NAMED]
    values += list(extra.values()) if isinstance(extra, dict) else list(extra)
    for value in values:
        if content := _content(value):
            yield content, AddedToken(content, normalized=False, special=True)


def _content(value: object) -> str | None:
    """The text of a token that may be given as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _id_of(tokenizer: tokenizers.Tokenizer, value: object) -> int | None:
    content = _content(value)
    found: int | None = None if content is None else tokenizer.token_to_id(content)
    return found


def _ids_in(value: object, path: Path) -> list[int]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    ids = [item for item in values if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) != len(values):
        raise ConfigError(f"{path}: eos_token_id must be an integer or a list of them")
    return ids
