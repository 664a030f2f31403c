"""Tensors of a device of their own, on a machine that has none: what would be mixed with the host's is found."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

Tensor = torch.Tensor

DEVICE = torch.device("meta")
"""What they say they are on."""

COPIES = {"_to_copy", "copy_"}
"""Ops from one device to another."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Ops whose second argument, the indices, may be the host's (``torch.Tensor.__getitem__``)."""


class Elsewhere(Tensor):
    """``held`` on :data:`DEVICE`. An op of such and others raises AssertionError, but for copies, indices and scalars,
    which devices take from the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        whole: Any = torch.Tensor  # whose stubs lack what subclasses are made with
        made: Elsewhere = whole._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        free = name in INDEXED and isinstance(args[0], Elsewhere)
        judged = (args[0], *args[2:]) if free else args
        given = [x for x in tree_flatten((judged, kwargs))[0] if isinstance(x, Tensor)]
        if name not in COPIES:
            strangers = [x for x in given if not isinstance(x, Elsewhere) and x.dim()]
            assert not strangers, f"{name} of tensors of two devices"
        known = {id(x.held): x for x in given if isinstance(x, Elsewhere)}

        def here(x: Any) -> Any:
            if isinstance(x, Elsewhere):
                return x.held
            return torch.device("cpu") if x == DEVICE else x

        def there(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else cls(x)

        out = func(*tree_map(here, args), **tree_map(here, kwargs))
        to_host = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        return out if to_host else tree_map(there, out)
