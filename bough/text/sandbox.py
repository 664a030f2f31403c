"""The Jinja environment of chat templates: sandboxed, immutable, and bounded in what it can compute.

Templates come from model files, so they are operated like untrusted code: no access to Python's
internals, no mutation of what they are given, and budgets on output, on ranges and on every string or list
that an operator, a joining or a call produces. A template over its budget fails with a TemplateError.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUTPUT_CHARS = 8 << 20
RANGE_ITEMS = 100_000
_LARGE_INT = 1 << 32
_PADDING = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson"))
_WIDTH = 1000
_WIDE = re.compile(r"(?:[%:] |[%:<>^=.+#-])\d{6,}|%[-+ #0\d.]*\*|:[^}]*\{")
"""A width of a million, or one that is taken from the arguments, in either way of formatting."""


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks answers for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedCode(CodeGenerator):
    """Sends ``a ~ b`` through the environment, as the sandbox does with the other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_bounded((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment with the functions that chat templates expect.

    Args:
        now: the clock behind ``strftime_now``.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _BoundedCode

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], auto_reload=False
        )
        self.concat = self.join_bounded  # type: ignore[method-assign]  # jinja2 looks it up there
        self.filters["tojson"] = _to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = _bounded_filter(name, function)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        del self.globals["lipsum"]

    def join_bounded(self, parts: Iterable[Any]) -> str:
        """Join texts; a TemplateError when they are too long together."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = len(left) if _sized(left) else None, len(right) if _sized(right) else None
        if operator == "*" and (sizes[0] is not None or sizes[1] is not None):
            _check((left if sizes[0] is None else sizes[0]) * (right if sizes[1] is None else sizes[1]))
        elif operator == "+" and sizes[0] is not None and sizes[1] is not None:
            _check(sizes[0] + sizes[1])
        elif operator == "**" and not (abs(left) <= _LARGE_INT and abs(right) <= 64):
            raise SecurityError("a power is too large")
        elif operator == "*" and max(abs(left), abs(right)) > 1 << 256:
            raise SecurityError("a product is too large")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("a format is too wide")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(obj.__name__, (owner, *args))
        result = super().call(context, obj, *args, **kwargs)
        if _sized(result):
            _check(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise SecurityError("a format is too wide")
        return wrapped


class RangeBudget:
    """``range`` of one rendering: all its ranges together have at most RANGE_ITEMS items."""

    def __init__(self) -> None:
        self._left = RANGE_ITEMS

    def __call__(self, *args: int) -> range:
        items = range(*args)
        # len() of a range overflows beyond the platform's integers; the last index does not.
        count = max(0, (items.stop - items.start + items.step - (1 if items.step > 0 else -1)) // items.step)
        if count > self._left:
            raise SecurityError(f"the template's ranges have more than {RANGE_ITEMS} items")
        self._left -= count
        return items


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the same bounds as a method; wraps() keeps what Jinja notes on its filters."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        _check_growth(name, [value for value in values if isinstance(value, str | list | tuple | int)])
        result = function(*args, **kwargs)
        if _sized(result):
            _check(len(result))
        return result

    return bounded


def _check_growth(name: str, values: Sequence[Any]) -> None:
    """Refuse calls, by method or by filter, whose result could be far larger than what they are given."""
    if name in _PADDING and any(isinstance(value, int) and value > _WIDTH for value in values):
        raise SecurityError("a text is too wide")
    if name == "replace" and len(values) >= 3 and all(isinstance(value, str) for value in values[:3]):
        text, old, new = values[:3]
        _check(len(text) + text.count(old) * len(new))
    if name == "join" and len(values) >= 2:
        sizes = [len(value) for value in values[:2] if _sized(value)]
        _check(math.prod(sizes))


def _sized(value: object) -> bool:
    return isinstance(value, str | list | tuple | bytes)


def _check(size: int) -> None:
    if size > OUTPUT_CHARS:
        raise SecurityError(f"the template makes more than {OUTPUT_CHARS} characters")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter.

    ``ensure_ascii`` is not honoured: an escaped mark could not be undone (see :mod:`bough.text.marking`), and
    models read either form.
    """
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
