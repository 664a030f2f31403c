"""Record what SGLang's own frontend does in the cases of ``programs.py``, ``branches.py`` and ``quirks.py``.

``python -m tests.lang.record FOLDER`` needs an unpacked wheel of SGLang in FOLDER; its engine is not imported.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from . import branches as branches  # add their cases to the others
from . import quirks as quirks
from .programs import CASES
from .stub import serving

RECORDED = Path(__file__).with_name("recorded.json")


class _Elsewhere(MetaPathFinder, Loader):
    """Modules of SGLang's engine that were not unpacked, and of a notebook: every name in them is a text."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(("sglang.", "IPython")):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = [str(self.folder / spec.name.replace(".", "/"))]
        module.__getattr__ = lambda name: "?"  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def sglang(folder: str) -> Any:
    """The frontend of SGLang in ``folder``, with what it takes from elsewhere replaced."""
    top = types.ModuleType("sglang")
    top.__path__ = [f"{folder}/sglang"]
    sys.modules["sglang"] = top
    sys.modules["pybase64"] = importlib.import_module("base64")
    sys.meta_path.append(_Elsewhere(folder))
    for name in ("sglang.lang.api", "sglang.lang.choices", "sglang.lang.backend.runtime_endpoint"):
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            vars(top).setdefault(key, value)
    return top


def observe(sgl: Any, name: str, model_path: str = "stub-model") -> dict[str, Any]:
    """What a case returns, and the requests that it made."""
    with serving(model_path) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        result = CASES[name](sgl, backend)
        return {"result": json.loads(json.dumps(result)), "requests": server.taken()}


MODELS = ("stub-model", "Qwen/Qwen2-7B-Instruct", "meta-llama/Llama-2-7b-chat")
EVERYWHERE = ("roles", "default_system", "images", "copied_role", "role_arguments")
"""Cases that are recorded for every model."""


def main() -> None:
    sgl = sglang(sys.argv[1])
    found: dict[str, Any] = {}
    for name in CASES:
        for model in MODELS if name in EVERYWHERE else MODELS[:1]:
            box: list[Any] = []
            thread = threading.Thread(target=lambda: box.append(observe(sgl, name, model)), daemon=True)  # noqa: B023
            thread.start()
            thread.join(20)
            found[f"{name}@{model}"] = box[0] if box else None
            print(name, model, "hangs or fails" if not box else box[0]["result"])
    RECORDED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()
    __import__("os")._exit(0)


if __name__ == "__main__":
    main()
