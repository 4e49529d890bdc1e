"""Figure 1, and figures as files and as parts of a page."""

import io
import re
from collections.abc import Iterable

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from pipeline.config.looks import STYLE, look_of, on_page
from pipeline.config.params import Params
from pipeline.report.numbers import scripted

PANELS = {"train_loss": "Train loss", "test_loss": "Test loss"}
# After a letter that is moved, an invisible one moves back; baseline-shift would, but not every browser knows it.
UP = '<tspan dy="-0.5em" font-size="70%">{}</tspan><tspan dy="0.35em">\u200b</tspan>'
DOWN = '<tspan dy="0.3em" font-size="70%">{}</tspan><tspan dy="-0.21em">\u200b</tspan>'


def figure_1(histories: pd.DataFrame, params: Params) -> Figure:
    """Draws each model that has a curve: a thin line for each seed and the median over seeds, on logarithmic axes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        for axes, curve in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
            drawn = dict(list(histories.groupby("variant")))
            for variant in filter(drawn.__contains__, params.run.variants):
                points, style = drawn[variant], look_of(variant, params.variants)
                wide = points.pivot(index="epoch", columns="seed", values=curve)  # a diverged seed ends early
                for seed in wide:
                    thin = {"color": style.colour, "alpha": 0.35, "linewidth": 0.5}
                    axes.plot(wide[seed].dropna(), gid=f"{curve}.{variant}.{seed}", **thin)
                median, label = wide.median(axis=1), params.label(variant)
                axes.plot(median, label=label, gid=f"{curve}.{variant}", **style.line())
            axes.set(title=PANELS[curve], xlabel="Epoch", yscale="log")
            axes.margins(x=0.02)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=4)
        return figure


def svg(figure: Figure, sources: Iterable[str] = ()) -> str:
    """The figure as SVG whose bytes depend on what it shows alone, with powers and indices in place; its metadata name the
    files that it was drawn from."""
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) | {"Source": ", ".join(sources) or None}
    text = _save(figure, "svg", metadata).decode()
    # matplotlib names clips and markers by digests of coordinates, whose last bits differ from one layout to the next
    places = {name: f"part{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\b[a-z][0-9a-f]{10}\b", text)))}
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", lambda found: places[found[0]], text)
    return re.sub(r"(?<=>)[^<>]+(?=</text>)", lambda found: scripted(found[0], UP, DOWN), text)


def png(figure: Figure) -> bytes:
    """The figure as PNG, at print resolution."""
    return _save(figure, "png", {"Software": None})


def _save(figure: Figure, kind: str, metadata: dict) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def inline(svg_text: str, name: str) -> str:
    """An <svg> element for a page: as wide as its place, in the page's colours, sharing no id with another figure."""
    element = svg_text[svg_text.index("<svg") :]
    element = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: on_page(found[0]), element)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    return re.sub(r' width="[^"]*" height="[^"]*"', "", element, count=1)
