"""The executor of devices that compute by themselves, on one that does not; and weights that nobody trained."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from bough.base.config import Config, DeviceConfig, KVConfig, LoraConfig, ModelConfig, ScheduleConfig
from bough.base.errors import ConfigError, DeviceLost
from bough.base.messages import Namespace, Outputs, Request
from bough.base.params import SamplingParams
from bough.device.platform.cpu import CpuPlatform
from bough.device.platform.cuda import lost
from bough.engine import build as building
from bough.engine.executor import StreamExecutor
from tests.engine.test_equivalence import NUMBERS, engine, run, workload
from tests.lora import write_adapter


def ask(rid: str, ids: list[int]) -> Request:
    return Request(rid=rid, ids=np.array(ids, "<i4").tobytes(), params=SamplingParams(max_tokens=5, ignore_eos=True))


def test_launching_ahead_changes_no_answer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(tiny_model, {}, {}, NUMBERS["float32"])
    expected, _ = run(core, workload(), together=True)
    core.close()
    monkeypatch.setattr(building, "LocalExecutor", StreamExecutor)
    for kv in ({}, {"pool_tokens": 300}):
        core = engine(tiny_model, kv, {"depth": 1}, NUMBERS["float32"])
        assert isinstance(core.executor, StreamExecutor)
        found, _ = run(core, workload(), together=True)
        core.close()
        assert found == expected


def test_a_forward_that_cannot_be_launched_ends_what_fails_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "LocalExecutor", StreamExecutor)
    core = engine(tiny_model, {}, {"depth": 1}, NUMBERS["float32"])
    runner = core.executor.built.worker._runner
    forward = runner.forward

    def fails(plan, *step):
        if any(123 in init.ids for init in plan.admitted):
            raise RuntimeError("planted")
        return forward(plan, *step)

    monkeypatch.setattr(runner, "forward", fails)
    for rid, ids in (("good", [5, 6, 7]), ("bad", [5, 123])):
        core.scheduler.receive(ask(rid, ids))
    ends = {}
    while not core.scheduler.idle:
        core.scheduler.step()
        for message in core.scheduler.outbox:
            assert isinstance(message, Outputs)
            ends |= {o.rid: o.finish.kind for o in message.items if o.finish is not None}
        core.scheduler.outbox.clear()
    core.close()
    assert ends == {"good": "length", "bad": "error"}


def test_adapters_are_installed_by_the_thread_that_launches(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the files does not touch what a forward may be using."""
    monkeypatch.setattr(building, "LocalExecutor", StreamExecutor)
    write_adapter(tmp_path / "red", tiny_model)
    core = building.build(Config(
        model=ModelConfig(path=str(tiny_model), dtype="float32", context_length=128), kv=KVConfig(pool_tokens=512),
        lora=LoraConfig(lora_dir=str(tmp_path)),
    ))  # fmt: skip
    pool = core.executor.built.worker.adapters
    assert pool is not None
    install, installers = pool.install, []

    def seen(place, modules):
        installers.append(threading.get_ident())
        install(place, modules)

    monkeypatch.setattr(pool, "install", seen)
    for name in ("red", ""):
        core.scheduler.receive(msgspec.structs.replace(ask(f"r{name}", [5, 6, 7]), namespace=Namespace(adapter=name)))
    answers: dict[str, list[int]] = {"r": [], "rred": []}
    while not core.scheduler.idle:
        core.scheduler.step()
        for message in core.scheduler.outbox:
            assert isinstance(message, Outputs)
            for output in message.items:
                answers[output.rid] += output.tokens
        core.scheduler.outbox.clear()
    core.close()
    assert installers == [threading.get_ident()]
    assert len(answers["r"]) == len(answers["rred"]) == 5 and answers["r"] != answers["rred"]


@pytest.mark.parametrize("where", ["forward", "finish"])
@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered\nCompile with",
                                  "Triton Error [CUDA]: unspecified launch failure"])  # fmt: skip
def test_a_device_that_is_lost_ends_the_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, where: str, text: str
) -> None:
    monkeypatch.setattr(building, "LocalExecutor", StreamExecutor)
    core = engine(tiny_model, {}, {"depth": 1}, NUMBERS["float32"])

    def fails(*arguments):
        raise RuntimeError(text)

    core.scheduler.receive(ask("r", [5, 6, 7]))
    core.scheduler.step()
    monkeypatch.setattr(core.executor.built.worker, where, fails)
    with pytest.raises(DeviceLost, match=text.splitlines()[0].partition(": ")[2]):
        for _ in range(4):
            core.scheduler.step()
    core.close()


def test_memory_that_cannot_be_had_is_no_lost_device() -> None:
    assert not lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not lost(RuntimeError("CUDA error: out of memory")) and not lost(ValueError("planted"))


def test_random_weights_of_a_config(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())

    def config(load_format: str, path: Path) -> Config:
        model = ModelConfig(path=str(path), load_format=load_format, dtype="float32")
        return Config(
            model=model,
            kv=KVConfig(pool_tokens=512),
            schedule=ScheduleConfig(max_running=4),
            device=DeviceConfig(kernels="reference"),
        )

    with pytest.raises(ConfigError):
        building.build(config("auto", tmp_path))
    core, real = building.build(config("dummy", tmp_path)), building.build(config("auto", tiny_model))
    assert core.hello.model.n_parameters == real.hello.model.n_parameters
    core.scheduler.receive(ask("r", [5, 6]))
    while not core.scheduler.idle:
        core.scheduler.step()
    assert core.scheduler.stats().generated_tokens == 5
    core.close()
    real.close()


def test_cells_that_the_gpu_does_not_know_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands for a GPU before compute capability 8.9."""
    monkeypatch.setattr(building, "CudaPlatform", CpuPlatform)
    config = Config(
        model=ModelConfig(path=str(tiny_model)), kv=KVConfig(kv_dtype="fp8"), device=DeviceConfig(device="cuda")
    )
    with pytest.raises(ConfigError, match="8.9"):
        building.build(config)


def test_more_threads_than_processors_are_warned_of(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    config = Config(
        model=ModelConfig(path=str(tiny_model)), kv=KVConfig(pool_tokens=512), device=DeviceConfig(threads=threads)
    )
    for processors, warned in ((threads, 0), (threads - 1, 1)):
        monkeypatch.setattr(building, "usable_processors", lambda n=processors: n)
        caplog.clear()
        building.build(config).close()
        assert len([record for record in caplog.records if "processors" in record.message]) == warned
