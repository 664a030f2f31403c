"""Several generations of one request as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import Chunk, GenerateOptions
from bough.server.metrics import Clock, Metrics

Piece = tuple[int, Chunk]
"""(index of the prompt, news of one of its sequences)."""


async def run_prompts(
    engine: AsyncEngine, metrics: Metrics, work: Sequence[tuple[Sequence[int], GenerateOptions]], started: float
) -> AsyncGenerator[Piece, None]:
    """Generate from every prompt at once; news in order of arrival. Closing it stops what is unfinished.

    Raises what any of the prompts raises before its first chunk, and stops the others then.
    """
    if len(work) == 1:
        prompt, options = work[0]
        clock = Clock(metrics, started)
        async with aclosing(engine.stream(prompt, options)) as chunks:
            async for chunk in chunks:
                clock.take(chunk)
                yield 0, chunk
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=len(work))
    tasks = [
        asyncio.create_task(_pump(i, engine.stream(prompt, options), Clock(metrics, started), queue))
        for i, (prompt, options) in enumerate(work)
    ]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, chunks: AsyncGenerator[Chunk, None], clock: Clock, queue: asyncio.Queue[Piece | BaseException | None]
) -> None:
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                clock.take(chunk)
                await queue.put((index, chunk))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
