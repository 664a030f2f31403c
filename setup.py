"""Compiles the CPU kernels when the package is installed; everything else is in pyproject.toml.

A failure never fails the installation: the kernels are then built at the first use, or plain torch takes over.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def builder() -> ModuleType:
    """What compiles the kernels, of this tree; it needs nothing of what is only about to be installed."""
    sys.path.insert(0, str(Path(__file__).parent))
    from bough.device.ops import build

    return build


class BuildKernels(build_ext):
    """Builds a plain shared library, which is loaded with ctypes and fits every version of Python."""

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # of what looks for a compiler before ours does
            print(f"bough: no compiled kernels: {error}")

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        try:
            print(f"bough: kernels for {', '.join(builder().compile_library(target))}")
        except Exception as error:
            print(f"bough: no compiled kernels: {error}")


setup(
    ext_modules=[Extension("bough.device.ops.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
