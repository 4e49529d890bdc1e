"""Figure 1, and the look of a model: the same colour and the same dashes wherever it is drawn."""

import html
import io
import itertools
import re
from dataclasses import dataclass

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# Okabe and Ito (2008): colours that colour-blind readers tell apart. Their black is the text's colour, light or dark.
INK, GRID = "#1a1a1a", "#d0d0cf"
PALETTE = ("#0072b2", "#56b4e9", INK, "#e69f00", "#d55e00", "#009e73", "#cc79a7")
DASHES = ((), (5, 2), (10, 2), (5, 2, 1, 2), (1.5, 1.5), (9, 2, 1, 2, 1, 2))  # by 7 colours: 42 looks
ON_PAGE = {INK: "currentColor", GRID: "var(--rule)", "#ffffff": "none"}  # what follows the page's light or dark scheme
LINE_WIDTH = 1.6
PANELS = {"train_loss": "Train loss", "test_loss": "Test loss"}
STYLE = {
    "svg.hashsalt": "figure_1",  # element names that do not change from run to run
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True)
class Look:
    """How a model is drawn; dashes in units of the line width, none for a solid line."""

    colour: str
    dashes: tuple[float, ...]

    @property
    def on_page(self) -> str:
        """The colour as a page writes it."""
        return ON_PAGE.get(self.colour, self.colour)


def looks(variants: list[str]) -> dict[str, Look]:
    """One for every variant, by its place among all variants of params.yaml, so that it keeps it whatever is run."""
    pairs = zip(itertools.cycle(PALETTE), itertools.cycle(DASHES), strict=False)
    return {variant: Look(*pair) for variant, pair in zip(variants, pairs, strict=False)}


def figure_1(curves: pd.DataFrame, labels: dict[str, str], styles: dict[str, Look]) -> Figure:
    """Both panels side by side above one legend. `curves` is the table of that name, `labels` the models in order."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        for axes, curve in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
            _draw(axes, curves, curve, labels, styles)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, handlelength=4)
        return figure


def panel(curves: pd.DataFrame, curve: str, labels: dict[str, str], styles: dict[str, Look]) -> Figure:
    """One panel alone, for a page that places panels and legend itself."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.9, 3.1), layout="constrained")
        _draw(figure.subplots(), curves, curve, labels, styles)
        return figure


def _draw(axes: Axes, curves: pd.DataFrame, curve: str, labels: dict[str, str], styles: dict[str, Look]) -> None:
    """Mean over seeds, and the range of the seeds as a band, on a logarithmic axis."""
    for variant, label in labels.items():
        points = curves[(curves["variant"] == variant) & (curves["curve"] == curve)]
        look = styles[variant]
        style = {"color": look.colour, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": LINE_WIDTH}
        axes.plot(points["epoch"], points["mean"], label=label, **style)
        if (points["n"] > 1).any():
            axes.fill_between(points["epoch"], points["min"], points["max"], color=look.colour, alpha=0.15, linewidth=0)
    axes.set(title=PANELS[curve], xlabel="Epoch", yscale="log")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def svg(figure: Figure) -> str:
    """The figure as SVG whose bytes depend on what it shows alone."""
    return _save(figure, "svg", dict.fromkeys(("Creator", "Date", "Format", "Type"))).decode()


def png(figure: Figure) -> bytes:
    """The figure as PNG, at print resolution."""
    return _save(figure, "png", {"Software": None})


def _save(figure: Figure, kind: str, metadata: dict) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def inline(svg_text: str, name: str, description: str) -> str:
    """An <svg> element for a page: as wide as its place, in the page's colours, sharing no id with another figure."""
    element = svg_text[svg_text.index("<svg") :]
    for drawn, on_page in ON_PAGE.items():
        element = element.replace(drawn, on_page)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    label = f'role="img" aria-label="{html.escape(description)}"'
    return re.sub(r'width="[^"]*" height="[^"]*"', label, element, count=1)
