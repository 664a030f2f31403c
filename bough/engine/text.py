"""Between text and ids: the model's tokenizer and template, and the text of one growing sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bough.base.errors import (
    BoughError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from bough.base.messages import Finish, Output
from bough.engine.generation import Chunk, GenerateOptions
from bough.text.chat_template import ChatTemplate, sources_from_folder, sources_from_gguf
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopTrimmer
from bough.text.tokenizer import Tokenizer

PROMPT_TAIL = 8
"""Last prompt ids that the text of a sequence is a continuation of."""

_BY_STATUS: dict[int, type[BoughError]] = {
    400: InvalidRequest, 404: NotFound, 408: DeadlineExceeded, 429: Overloaded, 503: Unavailable,
}  # fmt: skip


def load_text(source: Path | Mapping[str, Any]) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and, where it has one, the chat template of a model.

    ``source`` is a folder, a GGUF file or the metadata of one. Raises ConfigError when it cannot be served.
    """
    if isinstance(source, Path) and source.is_dir():
        tokenizer, templates = Tokenizer.from_folder(source), sources_from_folder(source)
    else:
        metadata = _metadata(source) if isinstance(source, Path) else source
        tokenizer, templates = Tokenizer.from_gguf(metadata), sources_from_gguf(metadata)
    template = ChatTemplate(templates, tokenizer)
    return tokenizer, template if template.exists else None


def _metadata(path: Path) -> Mapping[str, Any]:
    from bough.weights.gguf import GgufFile

    with GgufFile(path) as file:
        return file.metadata


def error_of(finish: Finish) -> BoughError:
    """The exception that says the same as a ``finish`` of kind abort, timeout or error."""
    message = finish.message or f"the request ended with: {finish.kind}"
    if finish.kind == "timeout":
        return DeadlineExceeded(message)
    if finish.kind == "abort":
        return EngineError(message, code="aborted")
    error = _BY_STATUS.get(finish.status, EngineError)(message)
    error.param, error.code = finish.param, finish.code or error.code
    if error.status == 404 and error.param == "model":
        error.code = "model_not_found"
    return error


class SequenceText:
    """Turns the outputs of one sequence into chunks: decoded, with stop strings held back and cut off."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], options: GenerateOptions) -> None:
        self._index = index
        self._include_stop = options.include_stop
        self._n_generated = 0
        self._trimmer = StopTrimmer(options.params.stop, include=options.include_stop)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special=options.skip_special_tokens,
            keep=options.keep_special,
            prompt_tail=prompt[-PROMPT_TAIL:],
        )

    def take(self, output: Output) -> Chunk:
        """The chunk that corresponds to ``output``."""
        self._n_generated += len(output.tokens)
        return Chunk(
            self._index, self._text(output.tokens, output.finish), output.tokens, output.n_prompt, output.n_cached,
            self._n_generated, output.finish, output.logprobs, output.prompt_logprobs,
        )  # fmt: skip

    def _text(self, tokens: list[int], finish: Finish | None) -> str:
        push, trimmer = self._detokenizer.push, self._trimmer
        if finish is None:
            return trimmer.push(push(tokens))
        if finish.kind != "stop":
            return trimmer.push(push(tokens)) + trimmer.finish(self._detokenizer.flush(), None)
        # The last token is the one that ended the sequence: its text completes a match, or it is itself the stop.
        text = trimmer.push(push(tokens[:-1]))
        if isinstance(finish.matched, str):
            return text + trimmer.finish(push(tokens[-1:]), finish.matched)
        ending = push(tokens[-1:]) if self._include_stop else ""
        return text + trimmer.finish(ending + self._detokenizer.flush(), None)
