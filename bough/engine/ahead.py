"""What a program will append to an answer, as the ids that its next request is going to have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bough.base.plan import Ints
from bough.engine.generation import Chunk, GenerateOptions


class Following:
    """Collects an answer, and knows what follows it.

    A prompt that came as text is continued as text: prompt, answer as it was sent and what follows are tokenized as a
    whole, as they will be when the client sends them. A prompt of ids is continued by the ids of answer and text.
    """

    def __init__(self, prompt: str | Sequence[int] | Ints, options: GenerateOptions) -> None:
        assert options.program is not None
        self._prompt = prompt if options.prompt_text is None else options.prompt_text
        self._after = options.program.after
        self._text = ""
        self._tokens: list[int] = []

    def take(self, chunk: Chunk) -> bool:
        """Add ``chunk``; whether the answer ended well with it."""
        self._text += chunk.text
        self._tokens += chunk.tokens
        return chunk.finish is not None and chunk.finish.kind in ("stop", "length")

    async def ids(self, tokenize: Callable[[str, bool], Awaitable[list[int]]]) -> list[int]:
        """Prompt, answer and what follows. Raises InvalidRequest for bad Unicode."""
        after = self._after
        if isinstance(self._prompt, str) and isinstance(after, str):
            return await tokenize(self._prompt + self._text + after, True)
        prompt = await tokenize(self._prompt, True) if isinstance(self._prompt, str) else self._prompt
        tail = await tokenize(after, False) if isinstance(after, str) else after
        return [*map(int, prompt), *self._tokens, *tail]
