"""Steps that are launched before the ones before them are finished."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.params import PoolingParams, SamplingParams
from bough.base.plan import RowInit
from bough.device.platform import copies
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch
from bough.worker.model_runner import ModelRunner
from bough.worker.pooling import Pooler
from bough.worker.worker import Launched
from tests.driving import Driver

Make = Callable[..., Any]

PLAIN = SamplingParams(temperature=0.7)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=1.0)
WORDS = SamplingParams(temperature=0.0, bad_words=((3,), (5, 6)), logprobs=2)


class Ahead(Driver):
    """Finishes a step only after ``depth`` later ones were launched, as an executor does."""

    depth = 1

    def run(self, seqs: Any, n: int, chunk: int = 0) -> None:
        flights: list[tuple[Launched, Any]] = []
        self.worker.sample = self.worker.launch
        while flights or any(s.pending + len(s.generated) < n for s in seqs):
            work = [(s, min(chunk or s.left, s.left)) for s in seqs if s.pending + len(s.generated) < n]
            if work:
                flights.append(self.launch(work))
            if len(flights) > self.depth or not work:
                launched, rows = flights.pop(0)
                self.commit((self.worker.finish(launched), rows))


def both(make_driver: Make, path: Any, use: Callable[[Driver], list[Any]], depth: int) -> None:
    """``use`` gives the same whether steps are finished at once or late."""
    expected = use(make_driver(path))
    driver = make_driver(path)
    driver.__class__, driver.depth = Ahead, depth
    for late, right in zip(use(driver), expected):
        assert late.ids == right.ids and not late.failed
        assert late.logprobs == right.logprobs


@pytest.mark.parametrize("depth", [1, 3])
def test_finishing_late_changes_nothing(tiny_llama: Make, make_driver: Make, depth: int) -> None:
    path, _ = tiny_llama()

    def use(driver: Driver) -> list[Any]:
        seqs = [driver.add(i, range(4 + i, 12 + 2 * i), p, seed=i) for i, p in enumerate((PLAIN, PENALISED, WORDS))]
        driver.run(seqs[:2], 3)
        driver.run(seqs, 12)
        return seqs

    both(make_driver, path, use, depth)


def test_the_time_of_the_host_is_not_the_time_of_the_device(
    tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_llama()
    now = [0.0]

    def takes(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def slower(*args: Any) -> Any:
            now[0] += seconds
            return real(*args)

        monkeypatch.setattr(owner, name, slower)

    monkeypatch.setattr(copies, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    driver = make_driver(path)
    takes(ForwardBatch, "of_decodes", 10.0)
    takes(ModelRunner, "compute", 2.0)
    takes(ModelRunner, "logits", 1.0)
    seq = driver.add(0, [4, 5, 6])
    found = []
    for _ in range(3):
        result, rows = driver.launch([(seq, 0)])
        driver.commit((result, rows))
        found.append((result.seconds, result.idle))
    assert found == [(3.0, 0.0), (3.0, 10.0), (3.0, 10.0)]


def test_a_row_that_was_given_away_keeps_nothing_of_the_one_before(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    alone = make_driver(path)
    expected = alone.add(0, [4, 5, 6], PENALISED)
    alone.run([expected], 6)
    assert expected.generated[1] != expected.generated[0]
    driver = make_driver(path)
    first = driver.add(0, [4, 5, 6], PENALISED)
    worker = driver.worker
    driver.step((first, 0))
    sample, worker.sample = worker.sample, worker.launch
    flight, _ = driver.launch([(first, 1)])
    worker.sample = sample
    driver.release(first)
    # Enters the row, and is launched, before what its last owner sampled has arrived: the token that it is about to
    # sample itself, and would not if that counted as its own.
    second = driver.add(0, [4, 5, 6], PENALISED)
    driver.step((second, 0))
    assert worker.finish(flight).counts.tolist() == [1]
    driver.run([second], 6)
    assert second.ids == expected.ids


def test_results_arrive_in_the_order_of_the_steps(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    driver = make_driver(path)
    seq = driver.add(0, [4, 5, 6], PLAIN, seed=3)
    worker = driver.worker
    worker.sample = worker.launch
    flights = [driver.launch([(seq, n)]) for n in (0, 1, 1)]
    last = worker.finish(flights[2][0])
    assert all(flight.finished for flight, _ in flights)
    assert worker.finish(flights[0][0]) is flights[0][0].result
    tokens = np.concatenate([flight.result.tokens for flight, _ in flights])
    again = make_driver(path)
    right = again.add(0, [4, 5, 6], PLAIN, seed=3)
    again.run([right], 3)
    assert right.generated == tokens.tolist() and last.seconds > 0


def test_a_row_whose_sampling_failed_has_a_token_that_can_be_looked_up() -> None:
    """The step that is launched ahead embeds what the rows have before anybody knows of the failure."""
    rows = DeviceRows(3, 8, torch.device("cpu"))
    rows.set_last(torch.tensor([2, 0]), torch.tensor([-1, 7]))
    assert rows.last_token.tolist() == [7, 0, 0, 0]


def test_the_first_hidden_state_outlives_its_step() -> None:
    """A captured step leaves what it computes where the one before did."""
    pooler, none = Pooler(), np.zeros(0, np.int32)
    ids = np.array([4, 5], np.int32)
    pooler.add(0, RowInit(0, none, ids, 2, SamplingParams(), 0, (), 2, PoolingParams(kind="first")))
    hidden = torch.tensor([[1.0, 2.0]])
    assert pooler.take(0, 0, hidden, lambda states: states) is None
    vector = pooler.take(0, 1, hidden.fill_(7.0), lambda states: states)
    assert vector is not None and vector.tolist() == [1.0, 2.0]
