"""Steps of decodes, which are computed in one go, beside those of the separate ops: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.params import SamplingParams
from bough.device.ops.decode import MOST_ROWS, Decoded
from bough.device.ops.library import load
from bough.models.decoder import Decoder
from bough.worker.forward_batch import ForwardBatch
from bough.worker.worker import Worker
from tests.driving import Driver, Sequence_

Make = Callable[..., Any]

TOLD = SamplingParams(temperature=0.0, logprobs=3)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9)
PLAIN = SamplingParams(temperature=0.0)

pytestmark = pytest.mark.skipif(load().library is None, reason="there are no kernels")


def drive(driver: Driver, seed: int, share: bool) -> list[Sequence_]:
    """Sequences come and go: batches of all sizes, rows in any order, prompts between, which need more room."""
    g = np.random.default_rng(seed)
    driver.share = share
    first = driver.add(0, g.integers(3, 90, 40).tolist(), TOLD)
    driver.step((first, 0))
    seqs = [first]
    for row in range(1, MOST_ROWS + 2):
        driver.step(*((seq, 0) for seq in g.permutation(np.array(seqs, object)).tolist()))  # 1, 2, ... decodes
        params = (TOLD, PLAIN, DRAWN)[row % 3]
        shared = first.locs[:30] if share else ()
        ids = first.ids[:30] if share else g.integers(3, 90, 5).tolist()
        new = driver.add(row, [*ids, *g.integers(3, 90, 3 * row).tolist()], params, seed=row, shared=shared)
        driver.step((new, 0), *((seq, 0) for seq in seqs[:2]))
        seqs.append(new)
    for n in (MOST_ROWS + 1, MOST_ROWS, 3, 1, MOST_ROWS, 1):
        driver.step(*((seq, 0) for seq in seqs[:n]))
    plain = [seq for seq in seqs if seq.init.params is PLAIN]
    for some in (plain, plain[:1], [*plain[1:], seqs[2]], plain, [*plain, first], plain[2:]):
        driver.step(*((seq, 0) for seq in some))
    return seqs


@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize(("quantize", "kv_dtype"), [("none", "auto"), ("int8", "int8"), ("int4", "float16")])
def test_the_same_bits_as_op_by_op(
    quantize: str, kv_dtype: str, share: bool, tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_llama(hidden_size=64, intermediate_size=96)
    options = {"dtype": torch.bfloat16, "kernels": "auto", "quantize": quantize, "kv_dtype": kv_dtype, "n_rows": 20}
    taken: list[int] = []
    grouped: list[bool] = []
    decode = Decoder.decode

    def watched(self: Decoder, tokens: Any, last: Any, k: Any, v: Any) -> Decoded | None:
        decoded = decode(self, tokens, last, k, v)
        if decoded is not None:
            taken.append(len(tokens))
            assert self._steps is not None and self._stack is not None
            call, groups = self._steps._prepared[len(tokens)].stack, self._attention.batch.groups
            assert call.x == self._stack.room[3].data_ptr()  # not what was there before a prompt needed more
            assert call.attention.n_groups == (0 if groups is None else len(groups.tokens))
            grouped.append(groups is not None)
        return decoded

    decide, decided = Worker._decided, [0]

    def noted(self: Worker, handle: Any, decoded: Decoded) -> Any:
        launched = decide(self, handle, decoded)
        decided[0] += launched is not None
        return launched

    monkeypatch.setattr(Decoder, "decode", watched)
    monkeypatch.setattr(Worker, "_decided", noted)
    driver, other_driver = make_driver(path, **options), make_driver(path, **options)
    at_once = drive(driver, 1, share)
    assert set(taken) == set(range(1, MOST_ROWS + 1)) and any(grouped) == share
    assert decided[0] == 4
    monkeypatch.setattr(Decoder, "decode", lambda *arguments: None)
    apart = drive(other_driver, 1, share)
    assert (driver.worker._known == other_driver.worker._known).all()  # else every later step looks for news
    for one, other in zip(at_once, apart, strict=True):
        assert one.ids == other.ids and one.logprobs == other.logprobs and not one.failed


def test_a_batch_that_is_made_anew_is_described_anew(
    tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for models with windows, whose steps have a batch each."""
    path, _ = tiny_llama(hidden_size=64, intermediate_size=96)
    kept = drive(make_driver(path, dtype=torch.bfloat16, kernels="auto", n_rows=20), 2, True)
    monkeypatch.setattr(ForwardBatch, "of_decodes", lambda plan, rows: None)
    anew = drive(make_driver(path, dtype=torch.bfloat16, kernels="auto", n_rows=20), 2, True)
    assert [seq.ids for seq in anew] == [seq.ids for seq in kept]


def test_groups_that_come_and_go_are_described_anew(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama(hidden_size=64, intermediate_size=96)
    driver = make_driver(path, dtype=torch.bfloat16, kernels="auto")
    model = driver.worker._runner._model
    first = driver.add(0, range(5, 25), PLAIN)
    driver.step((first, 0))
    second = driver.add(1, first.ids[:20] + [7], PLAIN, shared=first.locs[:16])
    driver.step((second, 0))
    told = []
    for driver.share in (True, False, True):
        driver.step((first, 0), (second, 0))
        told.append(model._steps._prepared[2].stack.attention.n_groups)
    assert told == [1, 0, 1]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), TOLD, DRAWN], ids=["plain", "told", "drawn"])
def test_what_a_step_said_stays(params: SamplingParams, tiny_llama: Make, make_driver: Make) -> None:
    """The memory of logits and ids is used again; results that were not taken yet are none of it."""
    path, _ = tiny_llama(hidden_size=64, intermediate_size=96)
    driver = make_driver(path, dtype=torch.bfloat16, kernels="auto")
    seq = driver.add(0, [5, 6, 7], params)
    driver.step((seq, 0))
    driver.worker.sample = driver.worker.launch
    flights = [driver.launch([(seq, 0)]) for _ in range(4)]
    for launched, rows in flights:
        driver.commit((driver.worker.finish(launched), rows))
    alone = make_driver(path, dtype=torch.bfloat16, kernels="auto")
    other = alone.add(0, [5, 6, 7], params)
    alone.run([other], 5)
    assert seq.ids == other.ids and len(seq.ids) == 8 and seq.logprobs == other.logprobs


def test_a_row_whose_logits_are_no_numbers_fails_alone(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama(hidden_size=64, intermediate_size=96)
    driver, alone = (make_driver(path, dtype=torch.bfloat16, kernels="auto") for _ in range(2))
    seqs = [driver.add(row, [5, 6, 7 + row], PLAIN) for row in range(3)]
    other = alone.add(2, [5, 6, 9], PLAIN)
    driver.step(*((seq, 0) for seq in seqs))
    with torch.inference_mode():
        for cells in driver.worker._runner._pool.v:
            cells[seqs[1].locs[0]] = torch.nan
    driver.step(*((seq, 0) for seq in seqs))
    assert [seq.failed is not None for seq in seqs] == [False, True, False]
    assert "not finite" in str(seqs[1].failed) and len(seqs[1].generated) == 1
    driver.step((seqs[0], 0), (seqs[2], 0))
    alone.run([other], 3)
    assert seqs[2].ids == other.ids
