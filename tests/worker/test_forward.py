"""Whole forwards against transformers: every kind of plan, every kind of Llama."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.errors import ConfigError
from bough.base.params import SamplingParams
from tests.models.parity import VOCAB, WHOLE, check, ids_of, reference

Make = Callable[..., Any]

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "all-kv-heads": {"num_key_value_heads": 4},
    "three-to-one": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 20},
    "one-layer": {"num_hidden_layers": 1},
    "eps": {"rms_norm_eps": 0.1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 500.0,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_chunks_and_decode_equal_transformers(name: str, tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama(**VARIANTS[name])
    for chunk in (0, 7):
        driver = make_driver(path)
        seq = driver.add(3, ids_of(1, 40), WHOLE)
        driver.run([seq], 5, chunk)
        assert len(seq.prompt_logprobs) == 39 and len(seq.logprobs) == 5
        check(seq, model)


@pytest.mark.parametrize("page_size", [1, 16])
def test_ragged_mixed_batches_equal_transformers(page_size: int, tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama(**VARIANTS["three-to-one"])
    driver = make_driver(path, page_size=page_size)
    rng = random.Random(page_size)
    seqs = [driver.add(row, ids_of(row, n), WHOLE) for row, n in enumerate((1, 50, 16, 17, 33, 2))]
    while any(len(s.generated) < 4 for s in seqs):
        waiting = [s for s in seqs if len(s.generated) < 4]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        driver.step(*[(s, rng.randint(1, s.left)) for s in chosen])
    for seq in seqs:
        check(seq, model)


def test_shared_cells_are_read_within_the_very_step_that_writes_them(tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama()
    driver = make_driver(path)
    stem = ids_of(5, 24)
    first = driver.add(0, stem + ids_of(6, 3), WHOLE)
    driver.launch([(first, 10)])
    # The sibling shares 20 cells; 10 of them are written by the step that admits it.
    locs = [driver.pages[-1 - i] for i in range(10)]
    sibling = driver.add(1, stem[:20] + ids_of(7, 4), WHOLE, shared=first.locs + locs, logprob_from=21)
    driver.step((first, 0), (sibling, 0))
    assert first.locs[10:20] == locs
    third = driver.add(2, stem + ids_of(8, 1), WHOLE, shared=first.locs[:24], logprob_from=25)
    driver.step((third, 0), (sibling, 0), (first, 0))
    for seq in (first, sibling, third):
        check(seq, model)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_telling_who_shares_a_prefix_changes_no_bit(
    kernels: str, kv_dtype: str, tiny_llama: Make, make_driver: Make
) -> None:
    path, _ = tiny_llama(**VARIANTS["three-to-one"], head_dim=32, max_position_embeddings=512)
    stem = ids_of(1, 300)

    def outcome(share: bool, chunk: int) -> list[Any]:
        driver = make_driver(path, kernels=kernels, kv_dtype=kv_dtype)
        first = driver.add(0, [*stem, 5], WHOLE, logprob_from=290)
        driver.step((first, 0))
        assert len(first.locs) == 301
        driver.share = share
        others = [
            driver.add(row, [*stem[: 300 - 7 * row], *ids_of(row, 3 * row)], WHOLE, logprob_from=310,
                       shared=first.locs[: 300 - 7 * row])
            for row in range(1, 7)
        ]  # fmt: skip
        driver.run([first, *others], 6, chunk)
        return [(seq.ids, seq.logprobs, seq.prompt_logprobs) for seq in (first, *others)]

    expected = outcome(False, 0)
    assert outcome(True, 0) == expected
    assert outcome(True, 2) == expected


@pytest.mark.parametrize(
    ("kv_dtype", "bound"), [("float32", 1e-4), ("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 3e-2)]
)
def test_every_dtype_of_the_pool_stays_near_transformers(
    kv_dtype: str, bound: float, tiny_llama: Make, make_driver: Make
) -> None:
    path, model = tiny_llama(hidden_size=128, initializer_range=0.1)
    for kernels in ("reference", "auto"):
        driver = make_driver(path, kernels=kernels, kv_dtype=kv_dtype, page_size=4)
        seq = driver.add(0, ids_of(2, 40), WHOLE)
        driver.run([seq], 3, chunk=9)
        expected = reference(model, seq.ids)
        for position, entry in enumerate([*seq.prompt_logprobs, *seq.logprobs], 1):
            got = torch.tensor([value for _, value in entry.asked])
            assert (got - expected[position - 1]).norm() <= bound * expected[position - 1].norm()


def test_greedy_tokens_equal_those_of_transformers(tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama(**VARIANTS["tied"])
    driver = make_driver(path)
    seqs = [driver.add(row, ids_of(20 + row, 5 + 3 * row)) for row in range(3)]
    driver.run(seqs, 64, chunk=4)
    for seq in seqs:
        prompt = torch.tensor([seq.ids[: seq.n_prompt]])
        expected = model.generate(prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert seq.ids == expected[0].tolist()


def test_float32_is_bit_exact_whatever_the_chunks_and_the_company(tiny_llama: Make, make_driver: Make) -> None:
    path, _ = tiny_llama(**VARIANTS["biases"])
    params = SamplingParams(temperature=1.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=tuple(range(VOCAB)))

    def outcome(company: int, chunk: int, page_size: int) -> tuple[list[int], list[Any]]:
        driver = make_driver(path, page_size=page_size)
        others = [driver.add(row, ids_of(30 + row, 3 * row + 2), params, seed=row) for row in range(company)]
        seq = driver.add(company, ids_of(9, 37), params, seed=99)
        driver.run([*others, seq], 12, chunk)
        return seq.ids, [*seq.prompt_logprobs, *seq.logprobs]

    alone = outcome(0, 0, 1)
    for company, chunk, page_size in ((0, 1, 1), (0, 16, 16), (3, 0, 1), (7, 5, 4), (15, 64, 1)):
        assert outcome(company, chunk, page_size) == alone


def test_bfloat16_stays_near_float32(tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama(hidden_size=128, initializer_range=0.1)
    for kernels in ("reference", "auto"):
        driver = make_driver(path, dtype=torch.bfloat16, kernels=kernels)
        seq = driver.add(0, ids_of(2, 40), WHOLE)
        driver.run([seq], 3)
        expected = reference(model, seq.ids)
        for position, entry in enumerate([*seq.prompt_logprobs, *seq.logprobs], 1):
            got = torch.tensor([value for _, value in entry.asked])
            error = (got - expected[position - 1]).norm() / expected[position - 1].norm()
            # Two layers of 8-bit mantissas; one rounding is 4e-3.
            assert error < 2e-2


def test_fast_kernels_stay_near_the_reference(tiny_llama: Make, make_driver: Make) -> None:
    path, model = tiny_llama()
    driver = make_driver(path, kernels="auto")
    seqs = [driver.add(row, ids_of(row, 9 * row + 1), WHOLE) for row in range(4)]
    driver.run(seqs, 6, chunk=11)
    for seq in seqs:
        check(seq, model)


def test_padding_ids_have_no_logit(tiny_llama: Make, make_driver: Make) -> None:
    for options in ({}, {"tie_word_embeddings": True}):
        path, model = tiny_llama(**options)
        driver = make_driver(path, n_ids=60)
        ids = ids_of(1, 10)
        seq = driver.add(0, ids, SamplingParams(temperature=0.0, logprobs=0))
        driver.run([seq], 1)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1, :60]
        assert seq.generated == [int(expected.argmax())]
        assert seq.logprobs[0].logprob == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-4)


def test_unusable_configs_and_checkpoints_are_refused(tiny_llama: Make, make_driver: Make, tmp_path: Path) -> None:
    import json
    import shutil

    path, _ = tiny_llama()
    changes: list[dict[str, Any]] = [
        {"model_type": "unknown"}, {"model_type": None}, {"hidden_act": "gelu"}, {"hidden_size": 0},
        {"num_key_value_heads": 3}, {"head_dim": 13}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3},
        {"intermediate_size": 81}, {"attention_bias": True}, {"vocab_size": "97"},
    ]  # fmt: skip
    config = json.loads((path / "config.json").read_text())
    for i, change in enumerate(changes):
        folder = shutil.copytree(path, tmp_path / str(i))
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError):
            make_driver(folder)
