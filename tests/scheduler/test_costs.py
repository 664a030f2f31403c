"""What is learnt of the costs of steps."""

from __future__ import annotations

from bough.scheduler.costs import Costs


def test_a_small_step_that_mixes_is_not_taken_for_one_that_decodes() -> None:
    costs = Costs()
    costs.step(0.1, n_tokens=14, n_rows=14)
    costs.step(0.25, n_tokens=50, n_rows=12)
    assert (costs.step_seconds, costs.token_seconds) == (0.1, 0.005)
    costs.step(0.3, n_tokens=50, n_rows=20)
    costs.step(0.1, n_tokens=20, n_rows=15)  # some of whose tokens a grammar forces
    assert (costs.step_seconds, costs.token_seconds) == (0.1, 0.005)
