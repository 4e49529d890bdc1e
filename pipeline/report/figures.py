"""Draws Figure 1, saves figures as files, and inlines figures in pages."""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import matplotlib.style
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from pipeline.config.looks import STYLE, look_of, on_page
from pipeline.config.params import Params
from pipeline.core import files
from pipeline.report.numbers import scripted

PANELS = {"train_loss": "Train loss", "test_loss": "Test loss"}
# A zero-width space moves the text after a superscript or subscript back to the baseline. Not every browser supports the
# attribute baseline-shift.
UP = '<tspan dy="-0.5em" font-size="70%">{}</tspan><tspan dy="0.35em">\u200b</tspan>'
DOWN = '<tspan dy="0.3em" font-size="70%">{}</tspan><tspan dy="-0.21em">\u200b</tspan>'
CACHE = Path(".checkpoints/figures")
RESULTS = ("runs", "studies", "benchmarks", "evaluations")  # folders of measured results
LIBRARIES = ("matplotlib", "numpy", "pandas", "scipy", "torch")
NARROW_INCHES = 3.6, 2.8  # width of a figure for phones, and maximum height of a panel
INVISIBLE = re.compile(  # parts of matplotlib's SVG that a page does not need
    r"<metadata>.*?</metadata>|<!--.*?-->|<defs/>| id=\"(?:line2d|text|patch|[xy]tick|matplotlib\.axis)_\d+\"|\n\s*(?=<)"
    r"|font-family: [^;]*; (?=text-anchor)| transform=\"rotate\(-0 [^\"]*\"",
    re.DOTALL,
)


def style():
    """Returns a context manager for drawing and saving. It applies STYLE and ignores the user's matplotlibrc."""
    return matplotlib.style.context(["default", STYLE])


def figure_1(histories: pd.DataFrame, params: Params) -> Figure:
    """Draws Figure 1: for each model, a thin line per seed and a thick line for the median."""
    with style():
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        for axes, curve in zip(figure.subplots(1, 2, sharey=True), PANELS, strict=True):
            drawn = dict(list(histories.groupby("variant")))
            for variant in filter(drawn.__contains__, params.run.variants):
                points, look = drawn[variant], look_of(variant, params.variants)
                wide = points.pivot(index="epoch", columns="seed", values=curve)  # columns of diverged runs end with NaN
                for seed in wide:
                    thin = {"color": look.colour, "alpha": 0.35, "linewidth": 0.5}
                    axes.plot(wide[seed].dropna(), gid=f"{curve}.{variant}.{seed}", **thin)
                median, label = wide.median(axis=1), params.label(variant)
                axes.plot(median, label=label, gid=f"{curve}.{variant}", **look.line())
            axes.set(title=PANELS[curve], xlabel="Epoch", yscale="log")
            axes.margins(x=0.02)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=4)
        return figure


def for_narrow(figure: Figure) -> Figure:
    """Rearranges a figure in place for a narrow screen: stacks its panels and narrows its legend."""
    panels, height = figure.axes, figure.get_figheight()
    if len(panels) > 1:
        height = min(height, NARROW_INCHES[1]) * len(panels)
        grid = figure.add_gridspec(len(panels), 1)
        for i, axes in enumerate(panels):
            axes.set_subplotspec(grid[i])
            axes.tick_params(labelleft=True)  # a shared y-axis hides the labels of all panels but the first
    figure.set_size_inches(NARROW_INCHES[0], height)
    for legend in list(figure.legends):
        handles = [each for each in legend.legend_handles if each is not None]
        labels = [each.get_text() for each in legend.get_texts()]
        legend.remove()
        with style():
            figure.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=3)
    return figure


def svg(figure: Figure, sources: Iterable[str] = ()) -> str:
    """Returns a figure as SVG, with the sources as metadata. Equal figures give equal bytes."""
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) | {"Source": ", ".join(sources) or None}
    text = _save(figure, "svg", metadata).decode()
    # The ids of clip paths and markers are digests of coordinates, whose last bits vary. We replace these ids with numbers.
    places = {name: f"part{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\b[a-z][0-9a-f]{10}\b", text)))}
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", lambda found: places[found[0]], text)
    text = re.sub(r'(?<= d=")[^"]*', lambda found: relative(found[0]), text)
    return re.sub(r"(?<=>)[^<>]+(?=</text>)", lambda found: scripted(found[0], UP, DOWN), text)


def cached(place: str, made_of: str, draw: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Returns the files of a figure: from the cache if `made_of`, a digest of the inputs, is unchanged, else from `draw`."""
    path = CACHE / f"{place}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the file is absent or damaged
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["made_of"], found["sha256"]) == (made_of, files.json_digest(found["files"])):
            return found["files"]
    drawn = draw()
    files.write_json(path, {"made_of": made_of, "sha256": files.json_digest(drawn), "files": drawn})
    return drawn


def inputs() -> str:
    """Returns a digest of everything that figures depend on."""
    paths = [Path("params.yaml"), *sorted(Path("paper_outputs/tables").glob("*.csv"))]
    for folder in ("osa", "pipeline"):
        paths += sorted([*(files.ROOT / folder).rglob("*.py"), *(files.ROOT / folder).rglob("*.yaml")])
    for folder in RESULTS:
        paths += sorted(Path("paper_outputs", folder).rglob("*.json"))  # these files contain digests of the tables
    versions = {name: version(name) for name in LIBRARIES}
    return files.json_digest([{str(path): files.sha256(path) for path in paths}, versions])


def png(figure: Figure) -> bytes:
    return _save(figure, "png", {"Software": None})


def _save(figure: Figure, kind: str, metadata: dict) -> bytes:
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def relative(path: str) -> str:
    """Shortens an SVG path of straight lines: writes relative steps, rounded to 0.1 point. Returns other paths unchanged."""
    if not re.fullmatch(r"M( -?[\d.]+){2}(\s+L( -?[\d.]+){2})+\s*", path):
        return path
    points = [(round(10 * float(x)), round(10 * float(y))) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]
    x, y = points[0]
    steps = [f"{(x2 - x1) / 10:g} {(y2 - y1) / 10:g}" for (x1, y1), (x2, y2) in itertools.pairwise(points)]
    return f"M{x / 10:g} {y / 10:g}l{' '.join(steps)}".replace(" -", "-")


def inline(svg_text: str, name: str, kind: str) -> str:
    """Returns an <svg> element for a page, with the CSS class `kind`, the page's colours, and ids prefixed by `name`."""
    element = INVISIBLE.sub("", svg_text[svg_text.index("<svg") :])
    element = re.sub(r'( [xy]="-?\d+\.\d\d)\d+', r"\1", element)
    element = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: on_page(found[0]), element)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    return re.sub(r' width="[^"]*" height="[^"]*"', f' class="{kind}"', element, count=1)
