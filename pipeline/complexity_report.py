"""What the complexity stage found: its findings, their tables and their figures, from its CSV tables alone."""

import math
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from pipeline import figures
from pipeline.figures import INK, PALETTE
from pipeline.findings import measure, verdict
from pipeline.params import Complexity, Orders

FORWARD, BOTH = "forward", "forward and backward"
TABLE_1 = ("qr", "newton_schulz", "newton_schulz_gram", "small", "exponential", "phi1", "application")
AS_WRITTEN = ("small_dense", "application_dense")
METHODS = ("osa_qr", "osa_ns", "osa_exact")
OTHERS = ("softmax", "softmax_dense", "exponential_dense")
ORDER_OF = {  # the entry of params.yaml's complexity.paper that speaks of a part
    "qr": "qr",
    "newton_schulz": "newton_schulz",
    "newton_schulz_gram": "newton_schulz",
    "small": "small",
    "small_dense": "small",
    "exponential": "exponential",
    "phi1": "exponential",
    "application": "application",
    "application_dense": "application",
    "osa_qr": "osa",
    "osa_ns": "osa",
    "osa_exact": "osa",
    "softmax": "softmax",
    "softmax_dense": "softmax",
    "exponential_dense": "naive",
}
JUDGED = ("tokens", "joint")  # degree in N, and total degree: what decides an order at 2d ≤ N
LABELS = {
    "qr": "Reduced QR of M",
    "newton_schulz": "Newton–Schulz, Eq. 9",
    "newton_schulz_gram": "Newton–Schulz, Gram form",
    "small": "[S]",
    "small_dense": "[S], S formed",
    "exponential": "exp[S]",
    "phi1": "exp[S] by φ₁",
    "application": "Eq. 6 on V",
    "application_dense": "Eq. 6 on V, A formed",
    "osa_qr": "OSA (QR)",
    "osa_ns": "OSA (NS)",
    "osa_exact": "OSA (exact)",
    "softmax": "softmax, fused",
    "softmax_dense": "softmax, N×N formed",
    "exponential_dense": "matrix_exp, N×N",
}
QUANTITIES = {"multiply_adds": "operations", "bytes": "memory"}
SWEEPS = {"tokens": "N", "widths": "d", "joint": "N and d"}
SOLID, DASHED = "-", (0, (5, 2))
LOOKS = {  # colour and line style; methods and softmax attention as in Figure 1. Of two lines that coincide both are seen
    "qr": (PALETTE[0], SOLID),
    "newton_schulz": (PALETTE[1], SOLID),
    "newton_schulz_gram": (PALETTE[1], DASHED),
    "small": (PALETTE[3], SOLID),
    "small_dense": (PALETTE[3], (0, (1.5, 4.5))),
    "exponential": (PALETTE[4], SOLID),
    "phi1": (PALETTE[4], DASHED),
    "application": (PALETTE[6], (0, (4, 4))),
    "application_dense": (PALETTE[6], (3, (1.5, 4.5))),
    "osa_qr": (PALETTE[0], SOLID),
    "osa_ns": (PALETTE[1], (0, (5, 2))),
    "osa_exact": (PALETTE[5], (0, (9, 2, 1, 2, 1, 2))),
    "softmax": (INK, (0, (10, 2))),
    "softmax_dense": (INK, (0, (1.5, 1.5))),
    "exponential_dense": (PALETTE[6], SOLID),
}

Tables = dict[str, pd.DataFrame]


def report(folder: Path, tables: Tables, config: Complexity, device_name: str) -> tuple[list[dict], dict[str, Figure]]:
    """The findings, and the figure of each by its name."""
    found = [
        components(folder, tables, config),
        linear_in_n(folder, tables, config),
        crossover(folder, tables, config, device_name),
    ]
    drawn = (components_figure(tables, config), operators_figure(tables), crossover_figure(tables))
    return found, {each["id"]: figure for each, figure in zip(found, drawn, strict=True)}


def components(folder: Path, tables: Tables, config: Complexity) -> dict:
    slopes, tolerance = tables["slopes"], config.tolerance
    measures = [excess(slopes, part, FORWARD, tolerance) for part in TABLE_1]
    return finding(
        "table_1_components",
        title="Each component costs what Table 1 says",
        place="Table 1, Appendix A",
        statement="; ".join(f"{LABELS[name]}: {in_words(config.paper[name])}" for name in TABLE_1 if name in config.paper),
        rule=(
            "In multiply–adds and in peak memory, no slope on log–log axes exceeds the entry's exponent by "
            f"{tolerance:g} or more, neither against N nor against N and d together, over the {config.fit_points} largest "
            "sizes; at 2d ≤ N these two exponents decide the order."
        ),
        measures=measures,
        remark=components_remark(tables, config),
        caption=(
            f"Multiply–adds of each component on one head: left against N at d = {config.tokens.width}, right against d at "
            f"N = {config.widths.tokens:,}. Dotted, Eq. 7 and Eq. 6 with the N×N matrices that stand in them. Dashed in "
            "black, powers."
        ),
        table=components_table(tables, config),
        sources=[f"{folder}/{name}.csv" for name in ("slopes", "counts", "exponential", "time_slopes")],
    )


def components_remark(tables: Tables, config: Complexity) -> str:
    formed = " and ".join(f"N^{number(slope(tables, part, 'tokens', 'multiply_adds'))}" for part in AS_WRITTEN)
    rows = tables["exponential"]
    rows = rows[rows["part"] == "exponential"]
    by_norm = rows[rows["width"] == config.tokens.width].sort_values("norm").iloc[[0, -1]]
    by_width = rows[rows["norm"] == config.norm].sort_values("width").iloc[[0, -1]]
    norms, widths = (" and ".join(map("{:g}".format, pair)) for pair in (by_norm["norm"], by_width["width"]))
    of_norm, of_width = (" and ".join(map("{:g}".format, ends["products"])) for ends in (by_norm, by_width))
    return (
        f"Eq. 7 and Eq. 6 as they are written form N×N matrices and grow with {formed}: their entries hold for products in "
        "the order that avoids those. The entry of exp[S] holds where ‖[S]‖₁ is held fixed, which the paper does not ask: "
        f"torch's matrix_exp squares about log₂‖[S]‖₁ times, so that it takes {of_norm} products at ‖S‖₂ = {norms}, and "
        f"{of_width} at d = {widths} where ‖S‖₂ = {config.norm:g}. At 2d ≤ N the d³ of an entry is of the order of its Nd². "
        f"Table 1 is about the forward pass; with the backward pass the largest excess is {largest_excess(tables, BOTH)}."
    )


def largest_excess(tables: Tables, direction: str) -> str:
    """The largest excess over all components of Table 1, and whose it is."""
    slopes = tables["slopes"]
    rows = slopes[slopes["part"].isin(TABLE_1) & (slopes["pass"] == direction) & slopes["sweep"].isin(JUDGED)]
    worst = rows.loc[rows["excess"].idxmax()]
    of = f"{QUANTITIES[worst['quantity']]} of {LABELS[worst['part']]} against {SWEEPS[worst['sweep']]}"
    return f"{worst['excess']:.3f} ({of})"


def components_table(tables: Tables, config: Complexity) -> dict:
    rows = []
    for part in (*TABLE_1, *AS_WRITTEN):
        order = config.paper[ORDER_OF[part]]
        measured = [slopes_cell(tables, part, FORWARD, quantity) for quantity in QUANTITIES]
        times = " / ".join(number(slope(tables, part, sweep, "seconds")) for sweep in ("tokens", "widths"))
        rows.append([LABELS[part], ordered(order.operations), measured[0], ordered(order.memory), measured[1], times])
    columns = ["Component", "Operations", "N / d / both", "Memory", "N / d / both", "Time: N / d"]
    return {"columns": columns, "align": "llrlrr", "rows": rows}


def linear_in_n(folder: Path, tables: Tables, config: Complexity) -> dict:
    slopes, tolerance = tables["slopes"], config.tolerance
    measures = [excess(slopes, part, direction, tolerance) for part in METHODS for direction in (FORWARD, BOTH)]
    for quantity in QUANTITIES:
        least = 2 - tolerance
        for direction in (FORWARD, BOTH):
            value = slope(tables, "softmax_dense", "tokens", quantity, direction)
            what = f"{LABELS['softmax_dense']}: slope of {QUANTITIES[quantity]} against N"
            measures.append(measure(what, value, "", "above", least, direction))
    for direction in (FORWARD, BOTH):
        value = slope(tables, "softmax", "tokens", "bytes", direction)
        measures.append(measure(f"{LABELS['softmax']}: slope of memory against N", value, "", note=direction))
    return finding(
        "linear_in_n",
        title="Linear in the number of tokens",
        place="Section 3.1",
        statement=f"OSA: {in_words(config.paper['osa'])}; softmax attention: {in_words(config.paper['softmax'])}",
        rule=(
            "In multiply–adds and in peak memory, forward alone and with backward, no slope of OSA exceeds the exponent by "
            f"{tolerance:g} or more, neither against N nor against N and d together, and each slope against N of softmax "
            f"attention with its N×N matrix is above {2 - tolerance:g}; over the {config.fit_points} largest sizes."
        ),
        measures=measures,
        remark=memory_remark(tables),
        caption=(
            f"One head at d = {config.tokens.width}, {BOTH}. Left, median time with quartiles; right, peak memory with the "
            "inputs. Dashed in black, the powers of Section 3.1."
        ),
        table=operators_table(tables, config),
        sources=[f"{folder}/{name}.csv" for name in ("slopes", "counts", "time_slopes", "times")],
    )


def memory_remark(tables: Tables) -> str:
    """That a fused softmax attention is linear in memory as well, with the numbers of the largest N."""
    table = tables["counts"]
    last = table[(table["sweep"] == "tokens") & (table["pass"] == BOTH)]
    n = last["tokens"].max()
    held = last[last["tokens"] == n].set_index("part")["bytes"] / 2**20
    exponent = slope(tables, "softmax", "tokens", "bytes", BOTH)
    return (
        "The quadratic memory is that of softmax attention which stores its N×N matrix. The fused kernel of torch does not: "
        f"its memory grows with N^{number(exponent)}, and at N = {n:,} it holds {held['softmax']:.3g} MiB {BOTH}, where "
        f"OSA (exact) holds {held['osa_exact']:.3g}."
    )


def operators_table(tables: Tables, config: Complexity) -> dict:
    rows = []
    for part in (*METHODS, *OTHERS):
        order = config.paper[ORDER_OF[part]]
        cells = [
            " / ".join(number(slope(tables, part, "tokens", quantity, direction)) for direction in (FORWARD, BOTH))
            for quantity in QUANTITIES
        ]
        rows.append(
            [LABELS[part], ordered(order.operations), cells[0], ordered(order.memory), cells[1], time_cell(tables, part)]
        )
    columns = ["Operator", "Operations", "forward / both", "Memory", "forward / both", "Time, both"]
    return {"columns": columns, "align": "llrlrr", "rows": rows}


def time_cell(tables: Tables, part: str) -> str:
    row = select(tables["time_slopes"], part, "tokens", BOTH).iloc[0]
    return f"{number(row['slope'])} ({number(row['low'])} to {number(row['high'])})"


def crossover(folder: Path, tables: Tables, config: Complexity, device_name: str) -> dict:
    measures = []
    for part in METHODS:
        for quantity, against in (("multiply_adds", "softmax"), ("bytes", "softmax_dense")):
            worst = crossings(tables, quantity, part, against).sort_values("ratio").iloc[-1]
            what = f"{LABELS[part]}: {QUANTITIES[quantity]} at N = {worst['largest']:,}, of {LABELS[against]}"
            measures.append(measure(what, worst["ratio"], "", "below", 1.0, worst["pass"]))
        for _, row in crossings(tables, "seconds", part, "softmax").iterrows():
            note = "; ".join(filter(None, (row["pass"], row["note"])))
            measures.append(
                measure(f"{LABELS[part]}: N from which faster than fused softmax", row["tokens"], "tokens", note=note)
            )
    return finding(
        "crossover",
        title="Where OSA overtakes softmax attention",
        place="Section 1",
        statement="OSA scales linearly with sequence length, in contrast to the quadratic scaling that SSA requires",
        rule=(
            "At the largest N measured every method of OSA takes fewer multiply–adds than softmax attention, and less "
            "memory than softmax attention with its N×N matrix, forward alone and with backward."
        ),
        measures=measures,
        remark=crossover_remark(tables, config, device_name),
        caption=(
            f"What fused softmax attention takes, in units of what OSA takes, on one head at d = {config.tokens.width}: "
            "time (lines with points) and multiply–adds (thin lines). Above the dashed line OSA takes less."
        ),
        table=crossover_table(tables),
        sources=[f"{folder}/{name}.csv" for name in ("crossover", "time_crossover", "times")],
    )


def crossover_remark(tables: Tables, config: Complexity, device_name: str) -> str:
    largest = crossings(tables, "bytes", "osa_exact", "softmax")["largest"].iloc[0]
    ratios = ", ".join(
        f"{LABELS[part]} {crossings(tables, 'bytes', part, 'softmax')['ratio'].max():.3g}" for part in METHODS
    )
    return (
        f"The times are of {device_name}; where they cross depends on it, where operations cross does not. Fused softmax "
        f"attention has no N×N memory to save: at N = {largest:,}, in the worse pass, the memory of OSA in units of its own "
        f"is {ratios}."
    )


def crossover_table(tables: Tables) -> dict:
    asked = (
        ("multiply_adds", "softmax"),
        ("seconds", "softmax"),
        ("seconds", "softmax_dense"),
        ("bytes", "softmax"),
        ("bytes", "softmax_dense"),
    )
    rows = []
    for part in METHODS:
        for direction in (FORWARD, BOTH):
            found = [crossings(tables, quantity, part, against) for quantity, against in asked]
            cells = [crossing_cell(table[table["pass"] == direction].iloc[0]) for table in found]
            rows.append([LABELS[part], direction, *cells])
    columns = [
        "N from which OSA takes less",
        "Pass",
        "Operations",
        "Time, fused",
        "Time, N×N",
        "Memory, fused",
        "Memory, N×N",
    ]
    return {"columns": columns, "align": "llrrrrr", "rows": rows}


def crossing_cell(row: pd.Series) -> str:
    if math.isnan(row["tokens"]):
        return "everywhere" if row["ratio"] < 1 else "nowhere"
    return f"{row['tokens']:,.0f}"


def crossings(tables: Tables, quantity: str, part: str, against: str) -> pd.DataFrame:
    table = tables["time_crossover" if quantity == "seconds" else "crossover"]
    return table[(table["quantity"] == quantity) & (table["part"] == part) & (table["against"] == against)]


def finding(name: str, *, measures: list[dict], **texts) -> dict:
    return {"id": name, "figure": f"{name}.svg", "measures": measures, "verdict": verdict(measures), **texts}


def excess(slopes: pd.DataFrame, part: str, direction: str, tolerance: float) -> dict:
    """By how much the steepest of a part's judged slopes exceeds its exponent."""
    rows = slopes[(slopes["part"] == part) & (slopes["pass"] == direction) & slopes["sweep"].isin(JUDGED)]
    worst = rows.loc[rows["excess"].idxmax()]
    note = (
        f"{QUANTITIES[worst['quantity']]} against {SWEEPS[worst['sweep']]}: {number(worst['slope'])} for {worst['paper']:g}"
    )
    name = LABELS[part] if direction == FORWARD else f"{LABELS[part]}, {direction}"
    return measure(f"{name}: largest excess of a slope", worst["excess"], "", "below", tolerance, note)


def select(table: pd.DataFrame, part: str, sweep: str, direction: str) -> pd.DataFrame:
    return table[(table["part"] == part) & (table["sweep"] == sweep) & (table["pass"] == direction)]


def slope(tables: Tables, part: str, sweep: str, quantity: str, direction: str = FORWARD) -> float:
    """A fitted slope; NaN where there were too few points."""
    rows = select(tables["time_slopes" if quantity == "seconds" else "slopes"], part, sweep, direction)
    rows = rows[rows["quantity"] == quantity]
    return rows["slope"].iloc[0] if len(rows) else math.nan


def slopes_cell(tables: Tables, part: str, direction: str, quantity: str) -> str:
    return " / ".join(number(slope(tables, part, sweep, quantity, direction)) for sweep in SWEEPS)


def number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def in_words(order: Orders) -> str:
    return f"{ordered(order.operations)} operations, {ordered(order.memory)} memory"


def ordered(order: str | None) -> str:
    """ "N d^2 + d^3" as O(Nd² + d³)."""
    if order is None:
        return "–"
    written = order.replace(" + ", "+").replace(" ", "").replace("^2", "²").replace("^3", "³").replace("+", " + ")
    return f"O({written})"


def components_figure(tables: Tables, config: Complexity) -> Figure:
    counts, parts = tables["counts"], (*TABLE_1, *AS_WRITTEN)
    guides = {
        "tokens": (("exponential", 1, 1 / 2), ("application_dense", 2, 3)),
        "widths": (("newton_schulz", 2, 3), ("exponential", 3, 1 / 3)),
    }
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        for axes, (sweep, powers) in zip(figure.subplots(1, 2, sharey=True), guides.items(), strict=True):
            size = "tokens" if sweep == "tokens" else "width"
            for part in parts:
                plot(axes, select(counts, part, sweep, FORWARD), size, "multiply_adds", part)
            for part, exponent, factor in powers:
                rows = select(counts, part, sweep, FORWARD)
                guide(axes, rows[size].to_numpy(), rows["multiply_adds"].iloc[-1] * factor, SWEEPS[sweep], exponent)
            fixed = f"d = {config.tokens.width}" if sweep == "tokens" else f"N = {config.widths.tokens:,}"
            label = "Tokens N" if sweep == "tokens" else "Head width d"
            finish(axes, counts.loc[counts["sweep"] == sweep, size].unique(), f"Against {SWEEPS[sweep]}, {fixed}", label)
        figure.axes[0].set_ylabel("Multiply–adds")
        legend(figure, 3)
        return figure


def operators_figure(tables: Tables) -> Figure:
    panels = {"seconds": ("times", 1e3, "Time", "Time (ms)"), "bytes": ("counts", 2**-20, "Peak memory", "Memory (MiB)")}
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        for axes, (quantity, (name, unit, title, label)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            table = tables[name][tables[name]["sweep"] == "tokens"]
            for part in (*METHODS, *OTHERS):
                rows = select(table, part, "tokens", BOTH)
                plot(axes, rows, "tokens", quantity, part, unit)
                if quantity == "seconds":
                    quartiles = (rows[f"{side}_quartile"] * unit for side in ("lower", "upper"))
                    axes.fill_between(rows["tokens"], *quartiles, color=LOOKS[part][0], alpha=0.15, linewidth=0)
            for part, exponent, factor in (("osa_exact", 1, 1 / 3), ("softmax_dense", 2, 3)):
                rows = select(table, part, "tokens", BOTH)
                guide(axes, rows["tokens"].to_numpy(), rows[quantity].iloc[-1] * unit * factor, "N", exponent)
            finish(axes, table["tokens"].unique(), title, "Tokens N")
            axes.set_ylabel(label)
        legend(figure, 3)
        return figure


def crossover_figure(tables: Tables) -> Figure:
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        for axes, direction in zip(figure.subplots(1, 2, sharey=True), (FORWARD, BOTH), strict=True):
            for name, quantity in (("counts", "multiply_adds"), ("times", "seconds")):
                softmax = select(tables[name], "softmax", "tokens", direction).set_index("tokens")[quantity]
                for part in METHODS:
                    values = select(tables[name], part, "tokens", direction).set_index("tokens")[quantity]
                    ratio = (softmax / values).rename("ratio").reset_index()
                    plot(axes, ratio, "tokens", "ratio", part, thin=quantity == "multiply_adds")
            axes.axhline(1, color=INK, linewidth=0.9, linestyle=DASHED)
            finish(axes, softmax.index, direction.capitalize(), "Tokens N")
        figure.axes[0].set_ylabel("Softmax attention / OSA")
        legend(figure, 3)
        return figure


def plot(axes: Axes, rows: pd.DataFrame, x: str, y: str, part: str, unit: float = 1, *, thin: bool = False) -> None:
    colour, dashes = LOOKS[part]
    style = {"linewidth": 0.8, "alpha": 0.7} if thin else {"linewidth": figures.LINE_WIDTH, "marker": "o", "markersize": 2.5}
    axes.plot(rows[x], rows[y] * unit, color=colour, linestyle=dashes, label=None if thin else LABELS[part], **style)


def guide(axes: Axes, sizes: np.ndarray, end: float, symbol: str, exponent: int) -> None:
    """A dashed line of slope `exponent` over the upper half of the sizes, which reaches `end` at the last, and its name."""
    sizes = sizes[len(sizes) // 2 :]
    values = end * (sizes / sizes[-1]) ** exponent
    axes.plot(sizes, values, color=INK, linewidth=0.9, linestyle=DASHED)
    name = symbol + {1: "", 2: "²", 3: "³"}[exponent]
    axes.annotate(name, (sizes[0], values[0]), xytext=(-4, 0), textcoords="offset points", ha="right", va="center")


def finish(axes: Axes, sizes, title: str, xlabel: str) -> None:
    axes.set(title=title, xlabel=xlabel, xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(sizes[len(sizes) % 2 == 0 :: 2]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())


def legend(figure: Figure, columns: int) -> None:
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=4)
