"""Nothing that ships can turn bytes from outside into code: no pickle in any of its dresses, no eval, no exec."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .source import Module, imports, modules

MODULES = ("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "marshal", "shelve", "joblib",
           "multiprocessing", "copyreg", "jsonpickle", "yaml")  # fmt: skip
"""Never imported, not even by name through importlib."""

TARGETS = ("concurrent.futures.ProcessPoolExecutor", "torch.multiprocessing", "jinja2.Environment", "jinja2.Template")

NAMES = ("eval", "exec", "compile", "__import__")
"""Builtins that are never called."""

ATTRIBUTES = ("recv_pyobj", "send_pyobj", "ProcessPoolExecutor")

DOTTED = ("torch.load", "torch.save", "torch.package", "torch.hub", "yaml.load", "os.system", "os.popen",
          "torch.multiprocessing", "jinja2.Environment", "jinja2.Template", "builtins.eval")  # fmt: skip

TRUE_KEYWORDS = ("allow_pickle", "trust_remote_code", "shell")

TEXT = re.compile(
    r"""["'](?:pickle|_pickle|dill|cloudpickle|marshal|shelve|joblib|multiprocessing|eval|exec)["']"""
    r"""|\b(?:recv_pyobj|send_pyobj)\b|\btorch\.load\(|allow_pickle\s*=\s*True|trust_remote_code\s*=\s*True"""
)
"""What the syntax tree cannot see: names in strings, for importlib or getattr."""


def offences(module: Module) -> Iterator[str]:
    for item in imports(module):
        if item.target.split(".")[0] in MODULES or item.target.startswith(TARGETS):
            yield f"line {item.line}: imports {item.target}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in NAMES:
                yield f"line {node.lineno}: calls {node.func.id}"
            for keyword in node.keywords:
                if keyword.arg in TRUE_KEYWORDS and not is_false(keyword.value):
                    yield f"line {node.lineno}: {keyword.arg} is not False"
        if isinstance(node, ast.Attribute) and (node.attr in ATTRIBUTES or ast.unparse(node) in DOTTED):
            yield f"line {node.lineno}: uses {ast.unparse(node)}"
    for number, line in enumerate(module.text.splitlines(), 1):
        if found := TEXT.search(line):
            yield f"line {number}: {found.group()}"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_module_uses_nothing_banned(module: Module) -> None:
    assert not list(offences(module))


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill.source",
        "from multiprocessing import Queue",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch\ntorch.load('x')",
        "import torch.multiprocessing as mp",
        "socket.recv_pyobj()",
        "eval('1')",
        "exec('1')",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "importlib.import_module('pickle')",
        "getattr(builtins, 'eval')('1')",
        "subprocess.run('ls', shell=True)",
        "from jinja2 import Environment",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_the_lint_sees(code: str, tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert list(offences(Module("bough.module", path, ast.parse(code))))
