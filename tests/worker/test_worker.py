"""The worker's life cycle: overlap, release and re-admission, retraction, zombies, failures of one row."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.params import SamplingParams
from bough.worker.forward_batch import ForwardBatch

Make = Callable[..., Any]
VOCAB = 97

SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.2, bad_words=((5, 6), (7,)), min_tokens=6,
    stop_token_ids=(11,), logit_bias={3: 1.0}, logprobs=2,
)  # fmt: skip


def ids_of(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def run_alone(driver: Any, ids: list[int], params: SamplingParams, seed: int, n: int) -> Any:
    seq = driver.add(0, ids, params, seed=seed)
    driver.run([seq], n)
    return seq


def test_overlap_changes_nothing(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    expected = [run_alone(make_driver(path), ids_of(i, 4 + i), SAMPLED, i, 12) for i in range(3)]
    driver = make_driver(path)
    seqs = [driver.add(i, ids_of(i, 4 + i), SAMPLED, seed=i) for i in range(3)]
    in_flight: list[Any] = []
    for _ in range(12):
        in_flight.append(driver.launch([(s, 0) for s in seqs]))
        if len(in_flight) > 1:
            driver.commit(in_flight.pop(0))
    driver.commit(in_flight.pop())
    for seq, alone in zip(seqs, expected):
        assert seq.ids == alone.ids and seq.logprobs == alone.logprobs


def test_a_zombie_harms_nobody_and_its_row_can_be_taken_at_once(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    expected = {i: run_alone(make_driver(path), ids_of(i, 5), SAMPLED, i, 8).ids for i in (1, 2)}
    driver = make_driver(path)
    ended, other = driver.add(0, ids_of(0, 6), SAMPLED), driver.add(1, ids_of(1, 5), SAMPLED, seed=1)
    first = driver.launch([(ended, 0), (other, 0)])
    # The host sees only now that `ended` is over; the next step is on its way already, with the zombie in it.
    zombie = driver.launch([(ended, 0), (other, 0)])
    driver.commit(first)
    driver.release(ended)
    successor = driver.add(0, ids_of(2, 5), SAMPLED, seed=2)
    third = driver.launch([(successor, 0), (other, 0)])
    driver.commit(zombie)
    driver.commit(third)
    driver.run([successor, other], 8)
    assert successor.ids == expected[2] and other.ids == expected[1]


def test_retraction_rebuilds_the_row(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    expected = run_alone(make_driver(path), ids_of(4, 7), SAMPLED, 4, 14)
    for kept in (0, 5, 9):
        driver = make_driver(path)
        seq = driver.add(2, ids_of(4, 7), SAMPLED, seed=4)
        driver.run([seq], 6)
        driver.release(seq)
        # Its KV stayed in the tree, wholly or partly; it comes back in another row.
        again = driver.add(5, seq.ids, SAMPLED, seed=4, n_prompt=7, shared=seq.locs[:kept], logprob_from=7)
        driver.run([again], 14, chunk=3)
        assert again.ids == expected.ids
        assert seq.logprobs + again.logprobs == expected.logprobs


def test_prompt_logprobs_do_not_depend_on_chunks_and_start_where_asked(tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama()
    params = SamplingParams(temperature=0.0, prompt_logprobs=3, logprob_token_ids=(1, 50))
    ids = ids_of(3, 90)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    reports = []
    for chunk in (0, 1, 13, 32, 90):
        driver = make_driver(path)
        seq = driver.add(0, ids, params)
        driver.run([seq], 2, chunk)
        reports.append(seq.prompt_logprobs)
        assert not seq.logprobs
    assert all(report == reports[0] for report in reports)
    assert len(reports[0]) == 89
    for position, entry in enumerate(reports[0], 1):
        row = expected[position - 1]
        assert entry.token == ids[position]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=1e-3)
        assert entry.rank == 1 + int((row > row[ids[position]]).sum())
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()
        assert [i for i, _ in entry.asked] == [1, 50]
    for start in (1, 2, 40, 89, 90):
        driver = make_driver(path)
        seq = driver.add(0, ids, params, logprob_from=start)
        driver.run([seq], 1, 13)
        assert seq.prompt_logprobs == reports[0][start - 1 :]


def test_a_step_may_sample_nothing(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    driver = make_driver(path)
    seq = driver.add(0, ids_of(0, 9), SAMPLED)
    result, _ = driver.launch([(seq, 4)])
    assert result.tokens.dtype == np.int32 and len(result.tokens) == 0 and result.counts.tolist() == [0]
    assert not result.failed and result.seconds > 0


def test_a_row_whose_parameters_break_the_sampler_fails_alone(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama()
    good = run_alone(make_driver(path), ids_of(1, 5), SAMPLED, 1, 4)
    # Ids that the validation would have refused: one breaks when it is applied, one when the row is added.
    broken = [
        SamplingParams(logit_bias={VOCAB + 900: 1.0}),
        SamplingParams(logprobs=1, logprob_token_ids=(VOCAB + 1,)),
        SamplingParams(allowed_token_ids=("x",)),  # type: ignore[arg-type]
        SamplingParams(prompt_logprobs=1, logprob_token_ids=(VOCAB + 1,)),
    ]
    driver = make_driver(path)
    seq = driver.add(0, ids_of(1, 5), SAMPLED, seed=1)
    bad = [driver.add(1 + i, ids_of(2, 6), params) for i, params in enumerate(broken)]
    driver.step((seq, 0), *[(b, 0) for b in bad])
    assert all(b.failed and not b.generated for b in bad) and not seq.failed
    for b in bad:
        driver.release(b)
    driver.run([seq], 4)
    assert seq.ids == good.ids and seq.logprobs == good.logprobs
    # The rows are clean again.
    after = driver.add(3, ids_of(1, 5), SAMPLED, seed=1)
    driver.run([after], 4)
    assert after.ids == good.ids


def test_an_exception_of_the_forward_is_raised_and_the_worker_goes_on(
    tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_llama()
    good = run_alone(make_driver(path), ids_of(1, 5), SAMPLED, 1, 4)
    driver = make_driver(path)
    lost = driver.add(0, ids_of(3, 4), SAMPLED)
    with monkeypatch.context() as patch:
        patch.setattr(driver.worker._runner, "forward", lambda *step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.launch([(lost, 0)])
    driver.release(lost)
    again = driver.add(0, ids_of(1, 5), SAMPLED, seed=1)
    driver.run([again], 4)
    assert again.ids == good.ids


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("chunk", [0, 7])
def test_states_that_only_logprobs_want_are_computed(
    tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Beside rows of whose prompts nobody wants anything, before and behind them."""
    path, _ = tiny_llama(hidden_size=64)  # heads that all layers are computed for at once
    from_plan, results = ForwardBatch.from_plan, []
    for everything in (True, False):
        if everything:
            monkeypatch.setattr(ForwardBatch, "from_plan", lambda plan, rows, whole: from_plan(plan, rows))
        driver = make_driver(path, dtype=torch.bfloat16, kernels="auto")
        others = [driver.add(row, ids_of(row, 30)) for row in (0, 2)]
        asked = driver.add(1, ids_of(1, 40), SamplingParams(temperature=0.0, prompt_logprobs=1))
        driver.run([others[0], asked, others[1]], 3, chunk)
        late = driver.add(3, ids_of(3, 50))
        driver.run([late, asked], 5, chunk)
        results.append([(seq.prompt_logprobs, seq.generated) for seq in (*others, asked, late)])
        monkeypatch.undo()
    assert results[0] == results[1] and len(results[0][2][0]) == 39
