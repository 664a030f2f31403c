"""``import sglang as sgl``, answered by bough.

``bough.compat.sglang.install()`` makes ``sglang`` and its modules importable in this process, and
``python -m bough.compat.sglang script.py`` runs an unchanged script that imports them.
"""

from __future__ import annotations

from bough.compat.sglang.modules import install as install

__all__ = ["install"]
