"""One figure for each finding of the theory stage. A method has the colour of the model that uses it."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from pipeline.figures import INK, LINE_WIDTH, PALETTE, STYLE, looks
from pipeline.params import Params
from pipeline.theory_findings import METHOD_LABELS, shown_state

COLOURS = {"qr": PALETTE[0], "newton_schulz": PALETTE[1], "exact": PALETTE[5]}
MARKERS = {"qr": "o", "newton_schulz": "s", "exact": "^"}
EXPECTED = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1}  # bounds and tolerances
RAMP = LinearSegmentedColormap.from_list("ramp", ["#002b5c", PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[4]])


def draw(params: Params, tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """Every figure, by the name of its finding."""
    makers = (theorem_2_1, theorem_2_2, theorem_3_1, theorem_4_1, theorem_4_2, theorems_4_3_4_4, trainability)
    with matplotlib.rc_context(STYLE):
        return {maker.__name__: maker(params, tables) for maker in makers}


def _panels(count: int, height: float = 3.6, **options) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def _legend(figure: Figure, handles: list, columns: int = 3) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3)


def _logarithmic(axes: Axes, *names: str, numticks: int = 6) -> None:
    for name in names:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(numticks=numticks))
        axis.set_minor_locator(NullLocator())


def _method_line(method: str, **options) -> Line2D:
    style = {"color": COLOURS[method], "marker": MARKERS[method], "markersize": 4, "linewidth": LINE_WIDTH}
    return Line2D([], [], label=METHOD_LABELS[method], **style | options)


def _expected_line(text: str) -> Line2D:
    return Line2D([], [], label=text, **EXPECTED)


def theorem_2_1(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """Error over ‖S‖₂ and over cond(M): a line per method and precision, the layers' heads as points, QR's tolerance."""
    table = tables["theorem_2_1"]
    figure, panels = _panels(2, 4.0, sharey=True)
    for axes, sweep, name in zip(panels, ("norm", "condition"), ("‖S‖₂", "cond(M)"), strict=True):
        gaussian = table[table["sweep"] == sweep]
        for (method, dtype), own in gaussian.groupby(["method", "dtype"]):
            line = own.groupby("value")["error"].median()
            dashes = "-" if dtype == "float64" else (0, (1.2, 1.2))
            axes.plot(line.index, line, color=COLOURS[method], linestyle=dashes, linewidth=LINE_WIDTH)
        allowed = gaussian[gaussian["method"] == "qr"].groupby(["dtype", "value"])["tolerance"].median()
        for dtype in ("float32", "float64"):
            axes.plot(allowed[dtype].index, allowed[dtype], **EXPECTED)
        layers = table[(table["sweep"] == "layer") & (table["state"] == shown_state(table))]
        for method, own in layers.groupby("method"):
            axes.plot(
                own[sweep],
                own["error"],
                linestyle="",
                marker=MARKERS[method],
                markersize=3,
                color=COLOURS[method],
                alpha=0.6,
            )
        _logarithmic(axes, "x", "y")
        axes.set(xlabel=name, title=f"Over {name}")
    panels[0].set_ylabel("‖A − exp(S)‖₂")
    precisions = [
        Line2D([], [], color=INK, linestyle="-", label="float64"),
        Line2D([], [], color=INK, linestyle=(0, (1.2, 1.2)), label="float32"),
    ]
    _legend(figure, [*map(_method_line, METHOD_LABELS), *precisions, _expected_line("rounding allowance of QR")])
    return figure


def theorem_2_2(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """Every eigenvalue through depth: orthogonal attention, softmax with skip, softmax."""
    spectra, summary = tables["theorem_2_2_spectra"], tables["theorem_2_2"]
    alpha = params.theory.theorem_2_2.alphas[-1]
    floor = 1e-17
    figure, panels = _panels(3, 3.7, sharey=True)
    for axes, stack, title in zip(
        panels,
        (f"exact, alpha {alpha:g}", "softmax, skip", "softmax"),
        ("Orthogonal", "Softmax + skip", "Softmax"),
        strict=True,
    ):
        own = spectra[spectra["stack"] == stack]
        wide = own.pivot(index="depth", columns="index", values="eigenvalue")
        relative = wide.div(wide[1], axis=0).clip(lower=floor / 1e3)
        for i in reversed(list(relative.columns)):
            colour = RAMP((i - 1) / max(1, len(relative.columns) - 1))
            axes.plot(relative.index, relative[i], color=colour, linewidth=1.1, solid_capstyle="round", zorder=100 - i)
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_yscale("log")
        axes.set_ylim(floor, 6)
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(_powers_of_two(relative.index.max())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())
        own = summary[(summary["stack"] == stack) & (summary["tokens"] == own["tokens"].iloc[0])]
        ranks = own[own["seed"] == own["seed"].iloc[0]].set_index("depth")["effective_rank"]
        axes.set(title=title, xlabel=f"Layers\neffective rank {ranks.iloc[0]:.2f} → {ranks.iloc[-1]:.2f}")
    panels[0].set_ylabel("Eigenvalues λᵢ/λ₁ of X Xᵀ")
    return figure


def _powers_of_two(last: int) -> list[int]:
    return [0, *(2**k for k in range(int(last).bit_length()) if k % 2 == 0 and 2**k <= last)]


def theorem_3_1(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """Error over the number of iterations, and every case against Eq. 10."""
    table, settings = tables["theorem_3_1"], params.theory.theorem_3_1
    figure, (left, right) = _panels(2, 4.0)
    gaussian = table[(table["source"] == "gaussian") & np.isclose(table["norm"], max(settings.norms), rtol=1e-3)]
    shades = [RAMP(i / max(1, len(settings.conditions) - 1)) for i in range(len(settings.conditions))]
    for condition, shade in zip(settings.conditions, shades, strict=True):
        for iteration, marker in (("newton_schulz", "s"), ("polar_express", "D")):
            own = gaussian[(gaussian["iteration"] == iteration) & (gaussian["condition"] == condition)]
            line = own.groupby("num_iterations")["error"].median().clip(lower=1e-16)
            fill = shade if iteration == "newton_schulz" else "#ffffff"
            left.plot(line.index, line, color=shade, marker=marker, markersize=3.5, markerfacecolor=fill, linewidth=1.2)
    bound = gaussian[gaussian["iteration"] == "newton_schulz"].groupby("num_iterations")["bound_11"].median()
    left.plot(bound.index, bound, **EXPECTED)
    left.set(title=f"Over iterations, ‖S‖₂ = {max(settings.norms):g}", xlabel="Iterations K", ylabel="‖YᵀY − I‖₂")
    _logarithmic(left, "y")
    left.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(2))
    points, ends = table[table["source"] == "gaussian"], (1e-16, 1e4)
    for iteration, colour in (("polar_express", PALETTE[3]), ("newton_schulz", COLOURS["newton_schulz"])):
        own = points[points["iteration"] == iteration]
        style = {"linestyle": "", "marker": ".", "markersize": 3.5, "color": colour, "alpha": 0.7}
        right.plot(own["bound_10"].clip(*ends), own["error"], **style)
    state = shown_state(table)
    layers = table[(table["state"] == state) & (table["iteration"] == "newton_schulz")]
    style = {"linestyle": "", "marker": "x", "markersize": 4, "color": PALETTE[4], "markeredgewidth": 0.9}
    right.plot(layers["bound_10"].clip(*ends), layers["error"], **style)
    right.plot(ends, ends, **EXPECTED)
    right.set(title="Against the bound", xlabel="Bound of Eq. 10", ylabel="‖YᵀY − I‖₂", ylim=(1e-17, 1e3))
    _logarithmic(right, "x", "y")
    handles = [Line2D([], [], color=s, label=f"cond(M) = {c:g}") for c, s in zip(settings.conditions, shades, strict=True)]
    handles += [
        Line2D([], [], color=COLOURS["newton_schulz"], marker="s", linestyle="", markersize=4, label="Newton–Schulz"),
        Line2D(
            [],
            [],
            color=PALETTE[3],
            marker="D",
            markerfacecolor="#ffffff",
            linestyle="",
            markersize=4,
            label="Polar Express",
        ),
        Line2D([], [], color=PALETTE[4], marker="x", linestyle="", markersize=4, label=f"{state} layers"),
        _expected_line("bounds (Eq. 11, Eq. 10)"),
    ]
    _legend(figure, handles, 4)
    return figure


def theorem_4_1(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """The relative difference of each case, and what rounding allows."""
    table = tables["theorem_4_1"]
    sizes = list(dict.fromkeys(zip(table["tokens"], table["embed_dim"], table["num_heads"], strict=True)))
    figure, (axes,) = _panels(1, 3.2)
    for i, size in enumerate(sizes):
        own = table[(table["tokens"] == size[0]) & (table["embed_dim"] == size[1]) & (table["num_heads"] == size[2])]
        for j, method in enumerate(METHOD_LABELS):
            points = own[own["method"] == method]["error"].clip(lower=1e-17)
            place = i + (j - 1) * 0.18
            axes.plot(
                [place] * len(points), points, linestyle="", marker=MARKERS[method], markersize=5, color=COLOURS[method]
            )
        axes.plot([i - 0.35, i + 0.35], [own["tolerance"].min()] * 2, **EXPECTED)
    axes.set_xticks(range(len(sizes)), [f"N = {n}, d = {d}, d_v = {d // h}" for n, d, h in sizes])
    axes.set(ylabel="‖J − J₁ − J₂‖_F / ‖J‖_F", title="Jacobian of one head")
    _logarithmic(axes, "y")
    handles = [_method_line(method, linestyle="") for method in METHOD_LABELS]
    _legend(figure, [*handles, _expected_line("what rounding allows")], 4)
    return figure


def theorem_4_2(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """Singular values of W̃ against their rank: initialisations on the left, the models' layers on the right."""
    table = tables["theorem_4_2"]
    table = table[(table["dtype"] == "float64") | table["source"].isin(list(params.variants))]
    figure, (left, right) = _panels(2, 3.6, sharey=True)
    for source, colour in (("Xavier", PALETTE[3]), ("Section 4", PALETTE[6])):
        _spectra(left, table[table["source"] == source], colour, 0.35)
    state = shown_state(table)
    styles = looks(list(params.variants))
    layers = table[table["state"] == state]
    handles = []
    for source, own in layers.groupby("source", sort=False):
        _spectra(right, own, styles[source].colour, 0.3)
        handles.append(Line2D([], [], color=styles[source].colour, label=params.label(source)))
    left.set(title="As initialised", ylabel="Singular values of W̃", xlabel="Rank, % of 2d_v")
    right.set(title=f"Models, {state}", xlabel="Rank, % of 2d_v")
    for axes in (left, right):
        axes.plot([0, 100], [1, 1], **EXPECTED)
        _logarithmic(axes, "y")
        axes.yaxis.set_major_formatter("{x:g}")
    first = [Line2D([], [], color=PALETTE[6], label="Section 4"), Line2D([], [], color=PALETTE[3], label="Xavier")]
    _legend(figure, [*first, _expected_line("Theorem 4.2"), *handles])
    return figure


def _spectra(axes: Axes, rows: pd.DataFrame, colour: str, alpha: float) -> None:
    for text in rows["singular_values"]:
        values = np.array([float(value) for value in text.split()])
        axes.plot(np.linspace(0, 100, len(values)), values.clip(1e-4), color=colour, alpha=alpha, linewidth=0.8)


def theorems_4_3_4_4(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """‖J₁‖₂ and κ(J) over α on Gaussian tokens, and κ(J) of the models' layers."""
    table, layers = tables["theorems_4_3_4_4"], tables["theorems_4_3_4_4_layers"]
    figure, (first, kappa, depth) = _panels(3, 3.7)
    sizes = ["tokens", "embed_dim", "num_heads"]
    size = table[sizes].iloc[0]
    own = table[(table[sizes] == size).all(axis=1)]
    for method, points in own.groupby("method", sort=False):
        line = points.groupby("alpha")[["first_norm", "excess"]].median()
        style = {"color": COLOURS[method], "marker": MARKERS[method], "markersize": 3.5, "linewidth": 1.2, "alpha": 0.85}
        first.plot(line.index, line["first_norm"], **style)
        kappa.plot(line.index, line["excess"], **style)
    reference = own[own["method"] == "exact"].groupby("alpha")[["constant", "bound_excess"]].median()
    first.plot(reference.index, reference["constant"] * reference.index, **EXPECTED)
    finite = reference["bound_excess"][np.isfinite(reference["bound_excess"])]
    kappa.plot(finite.index, finite, **EXPECTED)
    first.set(title="First term", xlabel="α", ylabel="‖J₁‖₂")
    kappa.set(title="Condition", xlabel="α", ylabel="κ(J) − 1")
    for axes in (first, kappa):
        _logarithmic(axes, "x", "y", numticks=5)
    _layer_conditions(depth, params, layers)
    handles = [*map(_method_line, METHOD_LABELS), _expected_line("bound")]
    handles += [
        Line2D(
            [], [], color=INK, marker="o", markerfacecolor="#ffffff", linestyle="", markersize=4, label="before training"
        ),
        Line2D([], [], color=INK, marker="o", linestyle="", markersize=4, label="after training"),
    ]
    _legend(figure, handles)
    return figure


def _layer_conditions(axes: Axes, params: Params, layers: pd.DataFrame) -> None:
    styles = looks(list(params.variants))
    for (source, state), own in layers.groupby(["source", "state"], sort=False):
        median = own.groupby("layer")["kappa"].median()
        method = params.variants[source].method
        fill = styles[source].colour if state == "trained" else "#ffffff"
        axes.plot(
            median.index, median, color=styles[source].colour, marker=MARKERS[method], markerfacecolor=fill,
            markersize=4, linewidth=0.9, linestyle="-" if state == "trained" else ":",
        )  # fmt: skip
    axes.set(title="The models", xlabel="Layer", ylabel="κ(J) of a head", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def trainability(params: Params, tables: dict[str, pd.DataFrame]) -> Figure:
    """Norm and condition of ∂logits/∂X₀, and the first block's gradient, over depth."""
    table, settings = tables["trainability"], params.theory.trainability
    styles = looks(list(params.variants))
    figure, panels = _panels(3, 3.7)
    titles = {
        "logits_frobenius": ("Logits’ Jacobian", "‖∂logits/∂X₀‖_F"),
        "logits_kappa": ("Its condition", "κ(∂logits/∂X₀)"),
        "first_gradient": ("First gradient", "‖∂loss/∂θ₁‖₂"),
    }
    for axes, (column, (title, name)) in zip(panels, titles.items(), strict=True):
        for model in settings.models:
            line = np.exp(table[table["model"] == model].groupby("depth")[column].apply(lambda v: np.log(v).mean()))
            look = styles[model]
            dashes = (0, look.dashes) if look.dashes else "-"
            axes.plot(line.index, line, color=look.colour, linestyle=dashes, marker="o", markersize=3, linewidth=LINE_WIDTH)
        _logarithmic(axes, "y")
        axes.set(title=title, xlabel="Depth", ylabel=name)
        axes.set_xticks(settings.depths)
    handles = [
        Line2D(
            [],
            [],
            color=styles[m].colour,
            linestyle=(0, styles[m].dashes) if styles[m].dashes else "-",
            label=params.label(m),
        )
        for m in settings.models
    ]
    _legend(figure, handles)
    return figure
