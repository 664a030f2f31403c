"""What the configuration leaves to the machine and to the model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from bough.base.config import Config, DeviceConfig, KVConfig, ModelConfig, ScheduleConfig
from bough.base.errors import ConfigError
from bough.engine import build as building
from bough.engine import resolve as resolving
from bough.engine.resolve import paced, resolve

SMALL = ScheduleConfig(max_running=16)


@pytest.mark.parametrize(
    ("device", "threads", "asked", "depth"),
    [("cpu", None, None, 0), ("cpu", 3, None, 0), ("cpu", 2, None, 1), ("cpu", 2, 0, 0), ("cpu", None, 1, 1),
     ("cuda", None, None, 1), ("cuda", None, 0, 0)],
)  # fmt: skip
def test_the_host_works_beside_a_device_that_leaves_it_a_core(
    device: Literal["cpu", "cuda"], threads: int | None, asked: Literal[0, 1] | None, depth: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    config = Config(device=DeviceConfig(threads=threads), schedule=ScheduleConfig(depth=asked))
    assert resolve(config, device, tmp_path).schedule.depth == depth


@pytest.mark.parametrize(
    ("threads", "running", "asked", "tokens"),
    [(None, None, None, 240), (2, None, None, 160), (1, None, None, 128), (1, 8, None, 80), (2, 200, None, 400),
     (100, None, None, 1024), (100, 1024, None, 2048), (2, None, 70, 70)],
)  # fmt: skip
def test_a_step_of_a_cpu_takes_about_as_long_with_any_number_of_threads(
    threads: int | None, running: int | None, asked: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    schedule = ScheduleConfig(max_running=running, step_tokens=asked)
    config = Config(device=DeviceConfig(threads=threads), schedule=schedule)
    assert resolve(config, root=tmp_path).schedule.step_tokens == tokens


def test_a_step_is_longer_where_tiles_multiply(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nflags : avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8\n"
    )
    config = Config(device=DeviceConfig(threads=2))
    schedule = paced(resolve(config, root=tmp_path).schedule, 7_000_000_000, routed=False)
    assert schedule.step_tokens == schedule.mixed_tokens == 320
    single = replace(config, model=ModelConfig(dtype="float32"))
    assert resolve(single, root=tmp_path).schedule.step_tokens == 160


def test_what_needs_a_gpu_says_so() -> None:
    for config in (
        Config(model=ModelConfig(dtype="float16")),
        Config(model=ModelConfig(quantize="fp8")),
        Config(kv=KVConfig(kv_dtype="fp8")),
        Config(device=DeviceConfig(attention="flashinfer")),
    ):
        with pytest.raises(ConfigError, match="needs a GPU"):
            resolve(config, "cpu")
        assert resolve(config, "cuda").schedule.max_running == 256
    with pytest.raises(ConfigError, match="no CUDA device"):
        building.build(Config(device=DeviceConfig(device="cuda")))


@pytest.mark.parametrize(
    ("parameters", "routed", "asked", "tokens"),
    [
        pytest.param(135_000_000, False, SMALL, 160, id="small"),
        pytest.param(500_000_000, False, SMALL, 112, id="larger"),
        pytest.param(1_100_000_000, False, SMALL, 50, id="large"),
        pytest.param(7_000_000_000, False, SMALL, 32, id="so large that less would not be worth its weights"),
        pytest.param(7_000_000_000, True, SMALL, 160, id="experts"),
        pytest.param(7_000_000_000, False, replace(SMALL, step_tokens=96), 96, id="who asks for steps gets them"),
        pytest.param(
            7_000_000_000, False, replace(SMALL, step_tokens=96, mixed_tokens=70), 70, id="and for smaller ones"
        ),
        pytest.param(7_000_000_000, False, replace(SMALL, mixed_tokens=70), 70, id="or for those alone"),
    ],
)
def test_steps_in_which_rows_generate_are_smaller_the_larger_the_model(
    parameters: int, routed: bool, asked: ScheduleConfig, tokens: int, tmp_path: Path
) -> None:
    config = Config(device=DeviceConfig(threads=2), schedule=asked)
    assert paced(resolve(config, root=tmp_path).schedule, parameters, routed).mixed_tokens == tokens
    whole = resolve(config, "cuda", tmp_path).schedule
    assert paced(whole, parameters, routed).mixed_tokens == (asked.mixed_tokens or whole.step_tokens)


def test_a_step_is_not_smaller_than_what_it_may_mix(tmp_path: Path) -> None:
    for tokens in (0, 161):
        with pytest.raises(ConfigError) as refused:
            resolve(Config(device=DeviceConfig(threads=2), schedule=ScheduleConfig(mixed_tokens=tokens)), root=tmp_path)
        assert refused.value.param == "mixed_tokens"


@pytest.mark.parametrize(("kind", "share"), [("llama", 5), ("mixtral", 1)])
def test_an_engine_mixes_by_its_models_size(
    kind: str, share: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / kind)
    fields = {"model_type": kind, "num_local_experts": 4, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | fields))
    model = ModelConfig(path=str(folder), load_format="dummy")
    config = Config(model=model, kv=KVConfig(pool_tokens=512))
    for most, expected in ((10**9, 1), (1, share)):
        monkeypatch.setattr(resolving, "SMALL_PARAMETERS", most)
        core = building.build(config)
        schedule = core.hello.schedule
        core.close()
        assert schedule.step_tokens is not None and schedule.mixed_tokens == schedule.step_tokens // expected
