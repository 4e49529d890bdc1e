"""What the figures of studies have in common: panels side by side above one legend, logarithmic axes, lines of methods."""

import itertools
import textwrap

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from pipeline.report.looks import INK, METHOD_LABELS, PALETTE, STYLE, look

MARKERS = {"qr": "o", "newton_schulz": "s", "exact": "^", "softmax": "v", "qr_literal": "P", "polar_express": "D"}
EXPECTED = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1}  # bounds and tolerances
RAMP = LinearSegmentedColormap.from_list("ramp", ["#002b5c", PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[4]])


def panels(count: int, height: float = 3.6, rows: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page with `count` panels in a row, or in so many; options are those of `Figure.subplots`."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(rows, -(-count // rows), squeeze=False, **options).flat)


@matplotlib.rc_context(STYLE)
def pictures(table: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """Matrices in grey, 1 black and 0 or less white: a column for each `row` of the table that has a label, from the least
    `depth` to the largest. The table's other columns are those of the matrices."""
    depths = list(dict.fromkeys(table["depth"]))
    figure = Figure(figsize=(7.2, 1.05 * len(depths) + 0.6), layout="constrained")
    grid = figure.subplots(len(depths), len(labels), squeeze=False)
    for (i, depth), (j, row) in itertools.product(enumerate(depths), enumerate(labels)):
        own = table[(table["row"] == row) & (table["depth"] == depth)].drop(columns=["row", "depth"])
        grid[i, j].imshow(own, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        grid[i, j].grid(visible=False)
        grid[i, j].set(xticks=[], yticks=[])
        grid[0, j].set_title(textwrap.fill(labels[row], 14), fontsize=7.5)
        grid[i, 0].set_ylabel(f"{depth} blocks" if depth > 1 else "1 block")
    return figure


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


def ramp(count: int) -> list[tuple[float, ...]]:
    """`count` colours in an order, from dark to light."""
    return [RAMP(i / max(1, count - 1)) for i in range(count)]


def method_style(method: str, **changes) -> dict:
    """The colour and marker of a method of attention, as arguments of matplotlib's plot; its lines are solid."""
    return {"color": look(method).colour, "linestyle": "-", "marker": MARKERS.get(method, "X"), "markersize": 4} | changes


def method_line(method: str, **changes) -> Line2D:
    """A method's entry in a legend."""
    return Line2D([], [], label=METHOD_LABELS.get(method, method), **method_style(method, **changes))


def expected_line(text: str) -> Line2D:
    """The entry in a legend of a bound or a tolerance."""
    return Line2D([], [], label=text, **EXPECTED)


def fills(filled: str, hollow: str) -> list[Line2D]:
    """The entries in a legend of what filled and hollow points stand for."""
    style = {"color": INK, "linestyle": "", "marker": "o", "markersize": 4}
    return [Line2D([], [], label=filled, **style), Line2D([], [], label=hollow, markerfacecolor="#ffffff", **style)]
