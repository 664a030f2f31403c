"""The buffer between an engine that never waits and a consumer that may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from bough.base.errors import DeadlineExceeded, EngineError
from bough.base.limits import Limits
from bough.base.messages import Finish, Output
from bough.engine.generation import joined


class OutputStream(AsyncIterator[Output]):
    """News of requests that were submitted together, in order of arrival; ends after each has finished.

    At most one unread Output is held per request: what arrives before it is read is merged into it, so a
    slow consumer sees fewer and larger outputs and loses nothing. A request that nobody reads for
    ``limits.stream_stall_seconds``, or with more than ``limits.stream_buffer_tokens`` unread tokens, is ended
    with a timeout. Closing the stream, or leaving it early, aborts what is unfinished.
    """

    def __init__(self, rids: list[str], limits: Limits, leave: Callable[[list[str]], None]) -> None:
        self.unfinished: dict[str, Output | None] = dict.fromkeys(rids)  # the last output of each
        self._limits = limits
        self._leave = leave
        self._unread: dict[str, Output] = {}
        self._read_at = 0.0  # when something was read last, or when the buffer last became non-empty
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        while not self._unread:
            if not self.unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._read_at = time.monotonic()
        return self._unread.pop(next(iter(self._unread)))

    async def aclose(self) -> None:
        """Abort what is unfinished; what is unread is dropped. Idempotent."""
        rids = list(self.unfinished)
        self.unfinished.clear()
        self._unread.clear()
        self._wake()
        if rids:
            self._leave(rids)

    def feed(self, output: Output, now: float) -> None:
        """Take news of one of the requests; after a terminal output it is no longer in ``unfinished``."""
        rid = output.rid
        last = self.unfinished[rid]
        if output.index != (0 if last is None else last.index + len(last.tokens)):
            message = f"output {output.index} of the engine is not the next one"
            output = self.terminal(rid, Finish("error", message=message, status=EngineError.status))
        if not self._unread:
            self._read_at = now
        earlier = self._unread.get(rid)
        self._unread[rid] = output if earlier is None else self._merge(earlier, output, now)
        if self._unread[rid].finish is None:
            self.unfinished[rid] = output
        else:
            del self.unfinished[rid]
        self._wake()

    def terminal(self, rid: str, finish: Finish) -> Output:
        """An empty last output of ``rid``, numbered to follow what has arrived."""
        last = self.unfinished[rid]
        if last is None:
            return Output(rid, 0, [], 0, 0, finish)
        return Output(rid, last.index + len(last.tokens), [], last.n_prompt, last.n_cached, finish)

    def _merge(self, first: Output, second: Output, now: float) -> Output:
        tokens = first.tokens + second.tokens
        finish = second.finish
        stalled = now - self._read_at > self._limits.stream_stall_seconds
        if finish is None and (stalled or len(tokens) > self._limits.stream_buffer_tokens):
            finish = Finish("timeout", message="the stream was not read in time", status=DeadlineExceeded.status)
        return Output(
            first.rid,
            first.index,
            tokens,
            second.n_prompt,
            second.n_cached,
            finish,
            joined(first.logprobs, second.logprobs),
            joined(first.prompt_logprobs, second.prompt_logprobs),
            second.pooled,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
