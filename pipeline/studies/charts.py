"""Common parts of figures."""

import itertools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pipeline.config.looks import INK, LINE_WIDTH, PALETTE

# The style of a line that marks a bound or a tolerance
EXPECTED: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1}
RAMP = LinearSegmentedColormap.from_list("ramp", ["#002b5c", PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[4]])


def panels(count: int, height: float = 3.6, **options) -> tuple[Figure, list[Axes]]:
    """Creates a page-wide figure with `count` panels side by side; `options` go to `Figure.subplots`."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options).flat)


def legend(figure: Figure, handles: list, columns: int = 3) -> None:
    """Draws one legend below all panels."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3)


def logarithmic(axes: Axes, *names: str, numticks: int = 6) -> None:
    """Makes the named axes ("x", "y") logarithmic, with at most `numticks` labels and no minor ticks."""
    for name in names:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(numticks=numticks))
        axis.set_minor_locator(NullLocator())


def draw_interval(axes: Axes, low: float, high: float, y: float, colour: str, within: tuple[float, float]) -> None:
    """Draws a line from `low` to `high` at height y. An arrowhead marks each end that lies outside the range `within`."""
    left, right = max(low, within[0]), min(high, within[1])
    axes.plot([left, right], [y, y], color=colour, linewidth=LINE_WIDTH)
    for end, is_cut, arrow in ((left, low < left, "<"), (right, high > right, ">")):
        if is_cut:
            axes.plot(end, y, arrow, color=colour, markersize=6)


def label_ends(axes: Axes, gap: float = 0.075) -> None:
    """Labels each line at its last point.

    Labels that overlap in x move apart in y until their distance is at least `gap` times the height of the axes.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the axes' limits
    to_axes, labels = axes.transData + axes.transAxes.inverted(), []
    for line in (line for line in axes.lines if not str(line.get_label()).startswith("_")):
        x, y = (np.asarray(values, float) for values in line.get_data())
        end = to_axes.transform((x[np.isfinite(y)][-1], y[np.isfinite(y)][-1]))
        options: dict[str, Any] = {"va": "center", "fontsize": 8, "color": line.get_color(), "annotation_clip": False}
        options |= {"xycoords": "axes fraction", "xytext": (4, 0), "textcoords": "offset points"}
        labels.append(axes.annotate(str(line.get_label()), (end[0], end[1]), **options))
    spans = {label: label.get_window_extent().intervalx for label in labels}
    labels.sort(key=lambda label: label.xy[1])
    for _, (below, above) in itertools.product(range(50), itertools.combinations(labels, 2)):
        if max(spans[below][0], spans[above][0]) < min(spans[below][1], spans[above][1]):
            push = max(0.0, gap - (above.xy[1] - below.xy[1])) / 2
            below.xy, above.xy = (below.xy[0], below.xy[1] - push), (above.xy[0], above.xy[1] + push)


def ramp(count: int) -> list[tuple[float, ...]]:
    """Returns `count` colours from dark to light."""
    return [RAMP(i / max(1, count - 1)) for i in range(count)]
