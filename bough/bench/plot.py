"""Pictures of results. matplotlib is imported here and nowhere else, when a picture is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bough.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'bough[bench]'") from None
    figure = Figure(figsize=(6.0 * panels, 4.0), layout="constrained")
    return figure, [figure.add_subplot(1, panels, i + 1) for i in range(panels)]


def bars(panels: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draw panel title -> (bar label -> value) to ``path``, whose suffix decides the format."""
    figure, axes = _figure(len(panels))
    for axis, (name, values) in zip(axes, panels.items()):
        drawn = axis.bar(list(values), list(values.values()), color="#3a7d44")
        axis.bar_label(drawn, fmt="%.4g", fontsize=8)
        axis.set_title(name)
        axis.tick_params(axis="x", rotation=30)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str, path: Path
) -> None:
    """Draw label -> (xs, ys) on logarithmic axes to ``path``, whose suffix decides the format."""
    figure, (axis,) = _figure(1)
    for label, (xs, ys) in series.items():
        axis.plot(xs, ys, marker="o", label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title)
    axis.legend()
    figure.savefig(path, dpi=120)
