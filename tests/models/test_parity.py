"""Every architecture against transformers: any plan, any company, from the cache and after a retraction."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.device.layers import moe
from bough.device.layers.moe import Routing, route
from bough.device.ops.cpu import CpuOps
from bough.device.ops.library import load
from bough.models.config import ConfigReader
from bough.models.registry import MODELS
from tests.driving import GREEDY, Driver, Sequence_, make_driver
from tests.models.parity import CASES, COMMON, EACH, WHOLE, check, distance, ids_of, make_checkpoint

Made = Callable[[str], tuple[Path, Any]]

ELSEWHERE = {"bert": "test_bert.py"}
"""Models that do not generate have tests of their own."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """name of a case -> (folder, transformers' model), made once."""
    known: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = folder, make_checkpoint(CASES[name], folder)
        return known[name]

    return make


def test_every_architecture_has_a_case() -> None:
    assert set(MODELS.names()) == {case.model_type for case in CASES.values()} | set(ELSEWHERE)


def model_of(driver: Driver) -> Any:
    return driver.worker._runner._model


def ragged(driver: Driver, seqs: list[Sequence_], n: int, rng: random.Random) -> None:
    """Random rows with random numbers of tokens until each sequence has ``n``."""
    while waiting := [s for s in seqs if len(s.generated) < n]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        driver.step(*[(s, rng.randint(1, s.left)) for s in chosen])


@pytest.mark.parametrize(("kernels", "page_size"), [("reference", 1), ("auto", 16)])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, kernels: str, page_size: int, made: Made) -> None:
    path, model = made(name)
    driver = make_driver(path, kernels=kernels, page_size=page_size)
    whole = driver.add(0, ids_of(1, 60), WHOLE)
    driver.step((whole, 0))
    others = [driver.add(row, ids_of(row, n), WHOLE) for row, n in ((1, 1), (2, 50), (3, 17), (4, 2))]
    ragged(driver, [whole, *others], 3, random.Random(page_size))
    hit = driver.add(5, [*whole.ids[:48], *ids_of(6, 9)], WHOLE, shared=whole.locs[:48], logprob_from=49)
    ragged(driver, [hit, others[1]], 4, random.Random(7))
    # Taken away, and back with the part of its KV that was still there.
    old = others[1]
    driver.release(old)
    back = driver.add(2, old.ids, WHOLE, n_prompt=50, shared=old.locs[:16], logprob_from=50)
    driver.run([back, hit, whole], 6, chunk=5)
    for seq in (whole, *others, hit, back):
        check(seq, model)
    assert len(whole.prompt_logprobs) == 59 and len(back.generated) == 6


@pytest.mark.parametrize("name", EACH)
def test_greedy_tokens_equal_those_of_transformers(name: str, made: Made) -> None:
    path, model = made(name)
    driver = make_driver(path, kernels="auto")
    seqs = [driver.add(row, ids_of(20 + row, 5 + 9 * row), GREEDY) for row in range(3)]
    driver.run(seqs, 64, chunk=4)
    for seq in seqs:
        # Each token is the best after those before it: what transformers would have generated one by one.
        check(seq, model, tolerance=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_a_config_may_leave_out_what_transformers_assumes(name: str, made: Made, tmp_path: Path) -> None:
    from transformers import AutoConfig

    """What is not as in the architecture's own config class has to be in a model's config; nothing else does."""
    path, model = made(name)
    config = json.loads((path / "config.json").read_text())
    assumed = AutoConfig.for_model(config["model_type"]).to_dict()
    told = {key: value for key, value in config.items() if key == "model_type" or value != assumed.get(key)}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    driver = make_driver(tmp_path, kernels="reference")
    seq = driver.add(0, ids_of(1, 30), WHOLE)
    driver.run([seq], 1)
    check(seq, model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize(("n_layers", "border"), [(5, 2), (4, 4), (3, 0)])
def test_windows_are_where_transformers_has_them(name: str, n_layers: int, border: int) -> None:
    from transformers import AutoConfig

    """Configs of transformers 4 do not list their layers' kinds."""
    options = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": border}
    told = {**COMMON, **options, "num_hidden_layers": n_layers, "head_dim": 16}
    kinds = AutoConfig.for_model(name, **told).layer_types
    model: Any = MODELS.get(name)
    assert model.read(ConfigReader(told)).windows == tuple(9 if kind == "sliding_attention" else 0 for kind in kinds)


STACKED = (
    "ernie4_5", "gemma2", "gemma3", "gemma3_text", "glm4", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3",
)  # fmt: skip
"""Models whose layers are all one call."""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model_type in STACKED])
def test_all_layers_in_one_call_give_the_same_bits(name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = made(name)
    if load().library is None:
        pytest.skip("there are no kernels")

    def outcome(stacked: bool) -> list[Any]:
        driver = make_driver(path, kernels="auto", dtype=torch.bfloat16)
        assert (model_of(driver)._stack is not None) == stacked
        seqs = [driver.add(row, ids_of(row, n), WHOLE) for row, n in enumerate((50, 3, 20))]
        driver.run(seqs, 5, chunk=9)
        return [(seq.ids, seq.logprobs, seq.prompt_logprobs) for seq in seqs]

    found = outcome(True)
    monkeypatch.setattr(CpuOps, "layer_stack", lambda *arguments: None)
    assert outcome(False) == found


class SameExperts:
    """Lets a second run use the experts that the first one chose, with weights of its own.

    Of random experts that score nearly alike a rounding chooses, which would hide all other differences.
    """

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.second = False

    def __call__(self, logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None) -> Any:
        if not self.second:
            ids, weights = route(logits, routing, correction)
            self.ids.append(ids)
            return ids, weights
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, self.ids.pop(0).long(), True)
        if routing.scores not in ("softmax", "sigmoid"):
            return route(logits.masked_fill(~chosen, -torch.inf), routing)
        return route(logits, routing, chosen * 100.0 + (0.0 if correction is None else correction))


@pytest.mark.parametrize("name", EACH)
def test_bfloat16_stays_near_float32(name: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = made(name)
    experts = SameExperts()
    monkeypatch.setattr(moe, "route", experts)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, CASES[name].bfloat16)):
        driver = make_driver(path, kernels="auto", dtype=dtype)
        seq = driver.add(0, ids_of(2, 40), WHOLE)
        driver.run([seq], 1)
        assert distance(seq, model) < bound
        experts.second = True
    assert not experts.ids
    if load().library is not None:
        assert (model_of(driver)._stack is not None) == (CASES[name].model_type in STACKED)
