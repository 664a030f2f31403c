"""How many tokens a step takes."""

from __future__ import annotations

import pytest

from .world import World, request


@pytest.mark.parametrize(("streams", "beside"), [(0, 64), (1, 47), (12, 36), (16, 32), (40, 16), (60, 4)])
def test_beside_streams_a_step_takes_three_quarters(streams: int, beside: int) -> None:
    """Yet never less than a quarter of a step for prompts, as long as that is there."""
    world = World(cells=32_768, max_running=64, step_tokens=64)
    world.submit(*(request(f"stream {i}", [7, i], max_tokens=400, ignore_eos=True) for i in range(streams)))
    while any(not reader.tokens for reader in world.readers.values()):
        world.step()
    world.submit(request("prompt", range(1, 90), max_tokens=1))
    before = world.scheduler.stats().computed_tokens
    world.step()
    assert world.scheduler.stats().computed_tokens - before == streams + beside
