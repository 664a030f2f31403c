"""Adapters in a model: equal to merged weights, and rows that do not notice each other's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.base.params import SamplingParams
from bough.base.plan import NO_ADAPTER
from bough.device.layers.context import LayerContext
from bough.device.lora.pool import AdapterPool
from bough.device.lora.updates import ExpertStack, LowRank, StackedLowRank
from bough.device.ops.cpu import CpuOps
from bough.device.ops.library import load
from bough.device.ops.reference import ReferenceOps
from bough.weights.adapter import read_adapter
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from tests.driving import Driver, device_parts
from tests.lora import TARGETS, write_adapter, write_merged, write_stacked_adapter
from tests.models.parity import CASES, make_checkpoint

Make = Callable[..., Any]

WHOLE = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=tuple(range(97)))


class OpByOp(CpuOps):
    """The slow twin of the op for all layers."""

    def layer_stack(self, *arguments: object) -> None:
        return None


@pytest.fixture
def make_adapted() -> Make:
    """(path, folders of adapters) -> a driver whose worker has them at the places 0, 1, ..."""

    def make(path: Path, adapters: list[Path], kernels: str = "reference", dtype: Any = torch.float32) -> Any:
        parts = device_parts("auto" if kernels == "twin" else kernels, dtype)
        if kernels == "twin":
            library = load().library
            if library is None:
                pytest.skip("there are no kernels")
            ops = OpByOp(library, "the twin")
            parts = (ops, type(parts[1])(*_scheme_parts(dtype, ops)), type(parts[2])(ops), *parts[3:])
        pool = AdapterPool(parts[0], dtype, len(adapters))
        checkpoint = open_checkpoint(path)
        built = build_worker(
            checkpoint.config, LayerContext(checkpoint, *parts, pool),
            WorkerSizes(n_ids=1 << 20, context_length=128, n_rows=16), KVConfig(pool_tokens=2048), lambda: 1 << 40,
        )  # fmt: skip
        for place, folder in enumerate(adapters):
            pool.install(place, read_adapter(folder))
        return Driver(built.worker, built.pool_tokens)

    return make


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """name of a case of tests/models -> its folder, made once."""

    @lru_cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(CASES[name], folder)
        return folder

    return make


def _scheme_parts(dtype: torch.dtype, ops: Any) -> tuple[Any, ...]:
    from bough.device.quant.packed import pack_dense

    return pack_dense, pack_dense, dtype, ops


def add(driver: Any, row: int, ids: list[int], place: int) -> Any:
    seq = driver.add(row, ids, WHOLE)
    seq.init = replace(seq.init, adapter=place)
    return seq


def rows_of(seq: Any) -> torch.Tensor:
    entries = [*seq.prompt_logprobs, *seq.logprobs]
    return torch.tensor([[value for _, value in entry.asked] for entry in entries])


PROMPTS = [[(7 * i * j + 3) % 97 for j in range(1, 9 + 5 * i)] for i in range(1, 4)]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(
    ("targets", "rank"), [*(((t,), 4) for t in TARGETS), (TARGETS, 1), (TARGETS, 16), (TARGETS, 256)],
    ids=lambda v: v if isinstance(v, int) else v[0] if len(v) == 1 else "all",
)  # fmt: skip
def test_an_adapter_equals_merged_weights(
    targets: tuple[str, ...], rank: int, kernels: str, tiny_llama: Make, make_driver: Make, make_adapted: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    path, _ = tiny_llama()
    check_merged(path, targets, rank, kernels, make_driver, make_adapted, tmp_path)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe", ("experts.0.gate_proj", "experts.3.down_proj", "q_proj")),
        ("mixtral", ("w1", "w2", "w3")),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "down_proj")),
        ("deepseek_v3", ("kv_b_proj",)),
        ("deepseek_v2", ("kv_b_proj", "mlp.gate")),
        ("qwen2_moe", ("mlp.gate", "shared_expert_gate", "shared_expert.up_proj")),
        ("gpt_oss", ("router", "q_proj")),
    ],
    ids=str,
)
def test_an_adapter_of_experts_and_latents_equals_merged_weights(
    name: str, targets: tuple[str, ...], kernels: str, checkpoints: Make, make_driver: Make, make_adapted: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    check_merged(checkpoints(name), targets, 8, kernels, make_driver, make_adapted, tmp_path)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(
    ("name", "targets", "swapped"),
    [
        ("gpt_oss", ("gate_up_proj", "down_proj"), False),
        ("llama4_text", ("gate_up_proj",), True),
        ("llama4_text", ("gate_up_proj", "down_proj"), True),
        ("llama4_text", ("gate_up_proj", "down_proj"), False),
        ("olmoe", ("gate_up_proj", "down_proj"), False),
        ("olmoe", ("gate_up_proj", "down_proj"), True),
        ("olmoe", ("down_proj",), False),
        ("qwen3_moe", ("gate_up_proj",), False),
        ("mixtral", ("gate_up_proj", "down_proj"), False),
    ],
    ids=str,
)
def test_an_adapter_of_stacked_experts_equals_merged_weights(
    name: str, targets: tuple[str, ...], swapped: bool, kernels: str, checkpoints: Make, make_driver: Make,
    make_adapted: Make, tmp_path: Path,
) -> None:  # fmt: skip
    path = checkpoints(name)
    adapter = write_stacked_adapter(tmp_path / "a", path, 4, targets, swapped)
    merged = write_merged(tmp_path / "merged", path, adapter, swapped)
    compare_merged(path, adapter, merged, kernels, make_driver, make_adapted)


@pytest.mark.parametrize(
    ("name", "targets", "stored", "given"),
    [
        ("gemma3", ("mlp.gate_proj", "mlp.down_proj"), "language_model.model.", "model.language_model."),
        ("llama", ("q_proj",), "model.", "language_model.model."),
        ("mixtral", ("block_sparse_moe.gate", "experts.1.w2"), "block_sparse_moe", "mlp"),
    ],
)
def test_layers_have_the_names_of_all_versions_of_transformers(
    name: str, targets: tuple[str, ...], stored: str, given: str, checkpoints: Make, make_adapted: Make, tmp_path: Path
) -> None:
    path = checkpoints(name)
    folders = [write_adapter(tmp_path / folder, path, targets) for folder in "ab"]
    file, prefix = folders[1] / "adapter_model.safetensors", "base_model.model."
    tensors = {key.removeprefix(prefix): tensor for key, tensor in load_file(file).items()}
    assert all(stored in key for key in tensors)
    save_file({prefix + key.replace(stored, given): tensor for key, tensor in tensors.items()}, file)
    driver = make_adapted(path, folders)
    same, renamed, base = (add(driver, row, PROMPTS[0], place) for row, place in enumerate((0, 1, NO_ADAPTER)))
    driver.run([same, renamed, base], 4)
    assert torch.equal(rows_of(same), rows_of(renamed))
    assert (rows_of(same) - rows_of(base)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_parameters_of_experts_have_ranks_and_alphas_of_their_own(
    name: str, checkpoints: Make, make_driver: Make, make_adapted: Make, tmp_path: Path
) -> None:
    """As PEFT writes what was asked of gates, values and the way down apart: gates and values get twice the rank."""
    path, patterns = checkpoints(name), [{r".*\.gate_up_proj": 6}, {r".*\.gate_up_proj": 32, r".*\.down_proj": 5}]
    adapter = write_stacked_adapter(tmp_path / "a", path, 3, rank_pattern=patterns[0], alpha_pattern=patterns[1])
    compare_merged(path, adapter, write_merged(tmp_path / "m", path, adapter), "reference", make_driver, make_adapted)


def test_what_an_adapter_does_to_images_is_left_out(
    checkpoints: Make, make_driver: Make, make_adapted: Make, tmp_path: Path
) -> None:
    path = checkpoints("gemma3")
    adapter = write_adapter(tmp_path / "a", path, ("q_proj",))
    assert any("vision_tower" in name for name in read_adapter(adapter))
    compare_merged(path, adapter, write_merged(tmp_path / "m", path, adapter), "reference", make_driver, make_adapted)
    with pytest.raises(ConfigError, match="rank 0"):
        make_adapted(path, [write_adapter(tmp_path / "b", path, ("mlp.fc1",))])


def test_an_adapter_changes_no_projection_twice() -> None:
    pool = AdapterPool(ReferenceOps("the test"), torch.float32, 1)
    pool.stack(ExpertStack("experts", 2, ("gate", "up", "down"), 6, 3, alternating=False))
    for e in range(2):
        pool.layer([(f"experts.{e}.gate", 3), (f"experts.{e}.up", 3)], 6)
        pool.layer([(f"experts.{e}.down", 6)], 3)
    down, one = (
        StackedLowRank(torch.ones(4, 3), torch.ones(6, 4), (1.0, 1.0), False),
        LowRank(torch.ones(2, 3), torch.ones(6, 2), 1.0),
    )
    for beside, part in (("experts.base_layer", down), ("experts.1.down", one)):
        with pytest.raises(ConfigError, match="twice"):
            pool.install(0, {"experts": down, beside: part})
    pool.install(0, {"experts": down})


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", ["llama", "cohere2", "gemma2"])
@pytest.mark.parametrize("targets", [("lm_head",), (*TARGETS, "lm_head")], ids=len)
def test_an_adapter_of_the_head_equals_merged_weights(
    name: str, targets: tuple[str, ...], kernels: str, checkpoints: Make, make_driver: Make, make_adapted: Make,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = untied(checkpoints(name), tmp_path / "untied")
    check_merged(path, targets, 8, kernels, make_driver, make_adapted, tmp_path)


def untied(path: Path, folder: Path) -> Path:
    """The model at ``path`` with a head of its own, of the same weights where it had none."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def test_an_adapter_changes_a_head_that_is_the_embedding_too(
    checkpoints: Make, make_adapted: Make, tmp_path: Path
) -> None:
    tied = checkpoints("granite")
    apart = untied(tied, tmp_path / "untied")
    adapter = write_adapter(tmp_path / "a", apart, ("lm_head",), 8)
    found = []
    for path in (tied, apart):
        driver = make_adapted(path, [adapter], "auto")
        seqs = [add(driver, i, ids, NO_ADAPTER if i == 1 else 0) for i, ids in enumerate(PROMPTS)]
        driver.run(seqs, 4, chunk=6)
        found.append([(seq.ids, rows_of(seq)) for seq in seqs])
    for (ids, rows), (others, expected) in zip(*found):
        assert ids == others
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_has_the_outputs_of_the_whole_head() -> None:
    pool = AdapterPool(ReferenceOps("the test"), torch.float32, 2)
    head = pool.head("lm_head", (10, 4), 6)
    a, b, x = torch.randn(3, 4), torch.randn(10, 3), torch.randn(3, 4)
    with pytest.raises(ConfigError, match="shapes"):
        pool.install(0, {"lm_head": LowRank(a, b[:8], 2.0)})
    pool.install(0, {"lm_head": LowRank(a, b, 2.0)})
    pool.plan_head([NO_ADAPTER, 0, 1])
    found = head(x, torch.zeros(3, 6))
    torch.testing.assert_close(found[1], 2.0 * (b @ a @ x[1])[:6])
    assert not found[0].any() and not found[2].any()


def check_merged(
    path: Path, targets: tuple[str, ...], rank: int, kernels: str, make_driver: Make, make_adapted: Make, tmp_path: Path
) -> None:
    """The model at ``path`` with a random adapter equals one with the adapter's updates in its weights."""
    adapter = write_adapter(tmp_path / "a", path, targets, rank, seed=rank)
    compare_merged(path, adapter, write_merged(tmp_path / "merged", path, adapter), kernels, make_driver, make_adapted)


def compare_merged(path: Path, adapter: Path, into: Path, kernels: str, make_driver: Make, make_adapted: Make) -> None:
    merged = make_driver(into, kernels=kernels, context_length=128)
    adapted = make_adapted(path, [adapter], kernels)
    plain = make_driver(path, kernels=kernels, context_length=128)
    expected = [merged.add(i, ids, WHOLE) for i, ids in enumerate(PROMPTS)]
    found = [add(adapted, i, ids, 0) for i, ids in enumerate(PROMPTS)]
    base = [plain.add(i, ids, WHOLE) for i, ids in enumerate(PROMPTS)]
    for driver, seqs in ((merged, expected), (adapted, found), (plain, base)):
        driver.run(seqs, 4, chunk=6)
    for a, b, c in zip(expected, found, base):
        assert a.ids == b.ids
        assert (rows_of(a) - rows_of(b)).abs().max() <= 1e-4 * rows_of(a).abs().max()
        assert (rows_of(a)[: len(PROMPTS[0])] - rows_of(c)[: len(PROMPTS[0])]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("reference", torch.float32), ("auto", torch.float32), ("auto", torch.bfloat16)], ids=str
)
def test_16_rows_over_8_adapters_equal_separate_runs(
    kernels: str, dtype: torch.dtype, tiny_llama: Make, make_adapted: Make, tmp_path: Path
) -> None:
    path, _ = tiny_llama(hidden_size=64)
    check_company(path, kernels, dtype, make_adapted, tmp_path)


@pytest.mark.parametrize(("kernels", "dtype"), [("auto", torch.float32), ("auto", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_rows_with_adapted_experts_equal_separate_runs(
    name: str, kernels: str, dtype: torch.dtype, checkpoints: Make, make_adapted: Make, tmp_path: Path
) -> None:
    check_company(checkpoints(name), kernels, dtype, make_adapted, tmp_path, (*TARGETS, "kv_b_proj", "mlp.gate"))


def check_company(
    path: Path, kernels: str, dtype: torch.dtype, make_adapted: Make, tmp_path: Path, targets: tuple[str, ...] = TARGETS
) -> None:
    """16 rows over 8 adapters, and without any, give the bits that each gives alone."""
    chosen = [(*targets[i % 3 :], *(["lm_head"] if i % 2 else [])) for i in range(8)]
    folders = [write_adapter(tmp_path / str(i), path, chosen[i], 4 << i % 5, seed=i) for i in range(8)]
    places = [NO_ADAPTER if i in (3, 11) else (5 * i) % 8 for i in range(16)]
    prompts = [[(11 * i * j + i) % 97 for j in range(1, 4 + i)] for i in range(16)]
    driver = make_adapted(path, folders, kernels, dtype)
    together = [add(driver, i, ids, place) for i, (ids, place) in enumerate(zip(prompts, places))]
    driver.run(together, 6, chunk=5)
    for seq in together:
        driver.release(seq)
    for seq, ids, place in zip(together, prompts, places):
        alone = add(driver, 0, ids, place)
        driver.run([alone], 6)
        driver.release(alone)
        assert alone.ids == seq.ids and torch.equal(rows_of(alone), rows_of(seq))


def test_one_call_for_all_layers_gives_the_same_bits(tiny_llama: Make, make_adapted: Make, tmp_path: Path) -> None:
    for case, options in enumerate([{}, {"intermediate_size": 80, "hidden_size": 64, "attention_bias": True}]):
        path, _ = tiny_llama(**options)
        folders = [write_adapter(tmp_path / f"{case}-{i}", path, TARGETS[i:], 8 << i, seed=i) for i in range(3)]
        found = []
        for kernels in ("auto", "twin"):
            driver = make_adapted(path, folders, kernels, torch.bfloat16)
            seqs = [add(driver, i, ids, i - 1) for i, ids in enumerate([*PROMPTS, PROMPTS[0]])]
            driver.run(seqs, 8, chunk=7)
            found.append(seqs)
        for a, b in zip(*found):
            assert a.ids == b.ids and torch.equal(rows_of(a), rows_of(b))
