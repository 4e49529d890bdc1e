"""What figures of studies have in common: panels side by side above one legend, logarithmic axes, labels at lines' ends."""

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from pipeline.drawing.looks import INK, PALETTE

EXPECTED = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1}  # bounds and tolerances
RAMP = LinearSegmentedColormap.from_list("ramp", ["#002b5c", PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[4]])


def panels(count: int, height: float = 3.6, rows: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page with `count` panels in this number of rows; options are those of `Figure.subplots`."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(rows, -(-count // rows), squeeze=False, **options).flat)


def legend(figure: Figure, handles: list, columns: int = 3) -> None:
    """One legend below all panels."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3)


def logarithmic(axes: Axes, *names: str, numticks: int = 6) -> None:
    """Makes the axes of these names, "x" or "y", logarithmic, with at most `numticks` labels and no small ticks."""
    for name in names:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(numticks=numticks))
        axis.set_minor_locator(NullLocator())


def label_ends(axes: Axes, gap: float = 0.075) -> None:
    """Writes each line's label beside its last point; labels of lines that end at one x keep `gap` of the axes' height from
    one another."""
    axes.get_figure().draw_without_rendering()  # which settles the limits
    to_axes = axes.transData + axes.transAxes.inverted()
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    ends = {line: to_axes.transform(line.get_xydata()[np.isfinite(line.get_ydata())][-1]) for line in lines}

    def column(line: Line2D) -> float:
        return round(ends[line][0], 3)

    for x, group in itertools.groupby(sorted(lines, key=lambda line: (column(line), ends[line][1])), key=column):
        group = list(group)
        heights = [ends[line][1] for line in group]
        for _, below in itertools.product(range(50), range(len(heights) - 1)):
            push = max(0.0, gap - (heights[below + 1] - heights[below])) / 2
            heights[below : below + 2] = heights[below] - push, heights[below + 1] + push
        for line, height in zip(group, heights, strict=True):
            options = {"va": "center", "fontsize": 8, "color": line.get_color(), "annotation_clip": False}
            options |= {"xycoords": "axes fraction", "xytext": (4, 0), "textcoords": "offset points"}
            axes.annotate(line.get_label(), (x, height), **options)


def ramp(count: int) -> list[tuple[float, ...]]:
    """`count` colours in an order, from dark to light."""
    return [RAMP(i / max(1, count - 1)) for i in range(count)]
