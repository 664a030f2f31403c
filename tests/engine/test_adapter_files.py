"""The version of an adapter is that of the files that were read."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bough.base.errors import InvalidRequest
from bough.engine import adapters
from bough.engine.adapters import AdapterLoader, Loading, Read
from bough.weights.adapter import CONFIG, WEIGHTS, read_adapter


def write(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{at}.lora_A.weight": torch.full((2, 8), value), f"{at}.lora_B.weight": torch.ones(8, 2)}, folder / WEIGHTS
    )


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old weights under the new version would leave KV that the new weights take for their own."""
    write(tmp_path / "a", 1.0)
    nothing: Any = None  # no step: nothing is installed
    loader = AdapterLoader(nothing, tmp_path, 1)

    def read_and_replace(folder: Path) -> Any:
        found = read_adapter(folder)
        write(folder, 2.0)
        return found

    monkeypatch.setattr(adapters, "read_adapter", read_and_replace)
    loading = loader.load(0, "a", "a")
    loader.close()
    assert loading.done()
    with pytest.raises(InvalidRequest, match="changed while it was read"):
        loading.result()


def test_files_that_are_read_just_when_it_is_asked() -> None:
    """What was read behind the question is installed at the next one; it was taken for done, and refused."""

    class JustRead(Future[Read]):
        def done(self) -> bool:
            before = super().done()
            if not before:
                self.set_result(({}, "version"))
            return before

    installed: Future[None] = Future()
    installed.set_result(None)
    loading = Loading(JustRead(), lambda updates: installed)
    assert not loading.done()
    assert loading.done()
    assert loading.result() == "version"
