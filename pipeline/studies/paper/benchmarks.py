"""How fast the code is, machine by machine: what the scripts of benchmarks/ have left in paper_outputs/benchmarks.

They are run by hand, and what they time decides nothing. Here is what they and their tables call things, and what is made of
the tables.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pipeline.core import files, record
from pipeline.lab import Lab
from pipeline.report.charts import legend, logarithmic
from pipeline.report.looks import METHOD_LABELS, PALETTE, STYLE, look
from pipeline.report.numbers import ABSENT, fixed, grouped, number, per_cent, span
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest
from pipeline.studies.deep.signals import SHAPED, label_of
from pipeline.studies.paper.complexity import BOTH, FORWARD

place = 47

FOLDER = Path("paper_outputs/benchmarks")
KERNELS, CODE = FOLDER / "kernels.csv", "osa/kernels.py"
Label = Callable[[str], str]


def findings(settings: None, tables: Tables, lab: Lab) -> list[Finding]:
    kinds = {"targets": targets, "step": step, "depth": deep_step, "profile": profile}
    kinds |= {"attention": attention, "attention_bfloat16": attention}
    measured = [
        make(Benchmark.read(folder, name), partial(label_of, lab=lab))
        for folder, (name, make) in itertools.product(sorted(FOLDER.glob("*/")), kinds.items())
        if (folder / f"{name}.json").exists()
    ]
    return [*measured, *([compiled(files.read_csv(KERNELS))] if KERNELS.exists() else [])]


@dataclass(frozen=True)
class Benchmark:
    """What one script has left of one machine: name.csv and name.json in the machine's folder."""

    folder: Path
    name: str
    table: pd.DataFrame
    facts: dict

    @classmethod
    def read(cls, folder: Path, name: str) -> "Benchmark":
        return cls(folder, name, files.read_csv(folder / f"{name}.csv"), files.read_json(folder / f"{name}.json"))

    def finding(self, title: str, statement: str, **what) -> Finding:
        environment = self.facts["environment"]
        versions = f"PyTorch {environment['torch']}, {environment['platform']}."
        return Finding(
            id=f"{self.name}-{self.folder.name}",
            title=f"{title}: {record.machine(environment)}",
            place="not in the paper",
            kind=OBSERVATION,
            statement=statement,
            remark=" ".join(filter(None, (what.pop("remark", ""), versions))),
            sources=[str(self.folder / f"{self.name}.{kind}") for kind in ("csv", "json")],
            **what,
        )


# What is aimed at on a GPU

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """A number that has to be on one side of `must`, and better on that side of `goal`; times and ratios are medians."""

    key: str
    what: str
    side: str
    must: float
    goal: float

    def row(self, value: float) -> dict:
        reached = [value >= limit if self.side == "at least" else value <= limit for limit in (self.must, self.goal)]
        verdict = NOT_MEASURED if math.isnan(value) else ("missed", "must is met", "goal is met")[sum(reached)]
        return asdict(self) | {"measured": files.rounded(value), "verdict": verdict}


LEAST, MOST = "at least", "at most"
TARGETS = (
    Target("graph", "ViT: eager step over graphed step", LEAST, 5, 8),
    Target("exact", "OSA (exact): step over ViT's", MOST, 1.25, 1.05),
    Target("ns", "OSA (NS): step over ViT's", MOST, 1.5, 1.2),
    Target("qr", "OSA (QR): step over ViT's", MOST, 1.5, 1.2),
    Target("epochs", "Ten epochs of the slowest model without capture, seconds", MOST, 5, 3),
    Target("all", "All models of the paper: straightforward step over ours", LEAST, 10, 30),
    *(
        Target(f"literal, {each}", f"Literal QR and matrix_exp over exact, heads of one step, {each}", LEAST, 100, 300)
        for each in (FORWARD, BOTH)
    ),
    Target("crossover", "N from which exact is faster than the best SDPA, bfloat16, d_v = 64, forward", MOST, 1024, 512),
    *(
        Target(f"sdpa, {tokens}", f"Best SDPA over exact at N = {tokens}, bfloat16, d_v = 64, forward", LEAST, must, goal)
        for tokens, must, goal in ((4096, 3, 5), (16384, 10, 20), (65536, 40, 100))
    ),
    Target("orthogonality", "‖AᵀA − I‖₂ of exact in float32 at ‖S‖₂ = 8", MOST, 1e-5, 1e-6),
)


def targets(benchmark: Benchmark, label: Label) -> Finding:
    """Each target, and what was measured."""
    table, signs = benchmark.table, {LEAST: "≥", MOST: "≤"}
    rows = [
        [
            row.what,
            *(f"{signs[row.side]} {number(limit)}" for limit in (row.must, row.goal)),
            number(row.measured),
            row.verdict,
        ]
        for row in table.itertuples()
    ]
    return benchmark.finding(
        "Targets on a GPU",
        "How fast and how exact this code is to be on one GPU, beside what was measured.",
        measures=[Measure(row.what, row.measured, note=row.verdict) for row in table.itertuples()],
        table=Table(["Target", "Must", "Goal", "Measured", ""], rows, "lrrrl"),
        remark="This was a rehearsal, at a size that says nothing." if benchmark.facts["options"]["rehearse"] else "",
    )


# The kernels as compiled for GPUs, on any machine


def compiled(table: pd.DataFrame) -> Finding:
    """What each kernel takes of a multiprocessor: a row for each method and direction."""
    rows, architectures = [], sorted(table["architecture"].unique())
    for (method, kernel), of_kernel in table.groupby(["method", "kernel"], sort=False):
        cells = [METHOD_LABELS.get(method, "φ₁ alone"), kernel]
        for architecture in architectures:
            own = of_kernel[of_kernel["architecture"] == architecture]
            cells += [extremes(own["registers"]), extremes(own["shared_bytes"] / 1024), extremes(own["programs"])]
        rows.append(cells)
    columns = itertools.product(architectures, ("registers", "shared, KiB", "programs"))
    is_stale = set(table["code_sha256"]) != {files.sha256(files.ROOT / CODE)}
    return Finding(
        id="kernels",
        title="No kernel runs out of registers",
        place="not in the paper",
        kind=CHECK,
        statement=f"Every kernel of {CODE}, compiled for each architecture, width and type that it is made for.",
        measures=[
            largest("Bytes that a thread spills", table["spilled_bytes"], 1),
            Measure("Programs whose shared memory fits", table["programs_by_memory"].min(), side="above", limit=1.5),
        ],
        rule="Nothing is spilled, and a multiprocessor has the shared memory of two programs, always.",
        table=Table(
            ["Method", "Kernel", *(f"{architecture}: {what}" for architecture, what in columns)],
            rows,
            "ll" + "r" * 3 * len(architectures),
            note="Registers of a thread, shared memory of a program, and programs of a multiprocessor, which registers and "
            f"threads limit before shared memory does, over {len(table)} kernels with query, key and value "
            f"{extremes(table['width'])} wide.",
        ),
        in_short=f"{len(table)} kernels; {(table['spilled_bytes'] > 0).sum()} spill.",
        remark=f"Compiled by Triton {', '.join(table['triton'].unique())}."
        + (" The kernels have changed since." if is_stale else ""),
        sources=[str(KERNELS)],
    )


def extremes(values: pd.Series) -> str:
    """The least and the largest, or the one that there is, if any."""
    return " to ".join(dict.fromkeys(number(value) for value in (values.min(), values.max())))


# A training step

OURS, EAGER, COMPILED, THEIRS = "ours", "ours, eager", "ours, compiled", "straightforward"
INITIALISED, TRAINED = "initialised", "trained"
OSA_MODELS, ALL_MODELS = "the paper's OSA models", "all models of the paper"


def step(benchmark: Benchmark, label: Label) -> Finding:
    named = {"over_vit": "a step in units of ViT's", "straightforward_over_ours": "straightforward over ours"}
    return benchmark.finding(
        "Training step",
        "A whole training step of each model, against ViT's and against a plain script for the same model, which writes the "
        "equations down as they stand (`pipeline/benchmarks/straightforward.py`).",
        measures=[
            Measure(f"{label(model)}: {words}", ratio, note=f"{weights} weights")
            for weights, of in benchmark.facts["ratios"].items()
            for kind, words in named.items()
            for model, ratio in of[kind].items()
        ],
        table=step_table(benchmark, label),
        in_short=step_sentence(benchmark.facts["ratios"], label),
        models=tuple(benchmark.table["model"].unique()),
    )


def step_sentence(ratios: dict, label: Label) -> str:
    """The step in one sentence, with trained weights where they were there."""
    weights, of = list(ratios.items())[-1]
    models = ", ".join(f"{label(name)} {fixed(ratio, 2)}" for name, ratio in of["over_vit"].items())
    text = f"With {weights} weights, a training step takes in multiples of ViT's: {models}."
    if {ALL_MODELS, OSA_MODELS} <= of["straightforward_over_ours"].keys():
        times, for_osa = (fixed(of["straightforward_over_ours"][models], 2) for models in (ALL_MODELS, OSA_MODELS))
        text += (
            f" A plain script, whose steps are those of the equations, takes {times} times as long for the paper’s models "
            f"together, and {for_osa} times for its OSA models."
        )
    return text


def step_table(benchmark: Benchmark, label: Label) -> Table:
    """A row for each model and kind of weights: milliseconds of each code, their spread and rate, and the ratios."""
    table, ratios, rows = benchmark.table, benchmark.facts["ratios"], []
    peak = benchmark.facts.get("peak", {}).get("tflops", math.nan)  # neither it nor the rates are in older files
    table = table.assign(share=table.get("tflops", math.nan) / peak)
    ms = table.set_index(["model", "weights", "code"])[["seconds", "p10", "p90", "share"]].to_dict("index")
    codes, models = list(table["code"].unique()), list(table["model"].unique())
    for model, (weights, of) in itertools.product([*models, OSA_MODELS, ALL_MODELS], ratios.items()):
        cells = [spread(ms.get((model, weights, code))) for code in codes]
        cells += [multiple(of[kind].get(model)) for kind in ("over_vit", "straightforward_over_ours")]
        if any(cell != ABSENT for cell in cells):
            name = label(model) if model in models else model[0].upper() + model[1:]
            rows.append(([name, weights, *cells], model if model in models else None))
    columns = [
        "Model",
        "Weights",
        *(f"{code[0].upper()}{code[1:]}, ms" for code in codes),
        "Over ViT",
        "Straightforward over ours",
    ]
    note = (
        f"One step of {benchmark.facts['batch_size']} images, forward, backward, clipping and AdamW: median, and below it "
        "10 to 90 per cent of the samples. All are measured in turns. "
    )
    if math.isnan(peak):
        note += "What share of the machine's peak a step reaches was not measured."
    else:
        note += (
            f"Last, the products' operations per second as a share of {fixed(1000 * peak, 0)} GFLOP/s, the best rate of a "
            "product of large matrices in the same rounds."
        )
    return Table(columns, [row for row, _ in rows], "ll" + "r" * (len(columns) - 2), note, [model for _, model in rows])


def spread(of: dict[str, float] | None) -> str:
    """The median above the range of the samples and, where it was measured, the share of the machine's peak."""
    if of is None:
        return ABSENT
    ms = {name: fixed(1000 * of[name], 1) for name in ("seconds", "p10", "p90")}
    share = "" if math.isnan(of["share"]) else f"\n{per_cent(round(of['share'], 2))} of peak"
    return f"{ms['seconds']}\n{ms['p10']} to {ms['p90']}{share}"


COMPARED = ("osa_shaped", "osa_exact", "espa", "uspa", "vskipinit", "softmax_shaped")  # in the sentence on deep models


def deep_step(benchmark: Benchmark, label: Label) -> Finding:
    table, facts = benchmark.table.sort_values("over_vit"), benchmark.facts
    rows = [
        [label(row.model), *(fixed(value, 2) for value in (row.seconds, row.over_vit)), f"{row.low:.2f} to {row.high:.2f}"]
        for row in table.itertuples()
    ]
    costs = {row.model: f"{label(row.model)} {fixed(row.over_vit, 2)}" for row in table.itertuples()}
    told = ", ".join(costs[model] for model in COMPARED if model in costs)
    return benchmark.finding(
        f"Training step at {facts['depth']} blocks",
        f"A whole training step of each model of {facts['depth']} blocks that the study depth trains, in units of ViT's.",
        measures=[
            Measure(f"{label(row.model)}: a step in units of ViT's", row.over_vit, low=row.low, high=row.high)
            for row in table.itertuples()
        ],
        table=Table(
            ["Model", "Seconds", "Over ViT", "10 to 90 per cent"],
            rows,
            "lrrr",
            note=f"One step of {facts['batch_size']} images from the initial weights: medians of {facts['rounds']} rounds, "
            "in each of which every model has its turn; a ratio is that of one round.",
        ),
        in_short=told and f"With {facts['depth']} blocks as initialised a step takes in multiples of ViT's: {told}.",
        models=tuple(model for model in table["model"] if model not in SHAPED),
    )


# Its parts

LINEAR, ON_TOKENS, SOFTMAX = "linear layers", "functions and sums of tokens", "softmax attention"
PROJECTIONS, PRODUCTS, SUMS = "tokens × small matrices", "products of small matrices", "sums and copies of small matrices"
BASIS, OPTIMIZER, BETWEEN = "QR decomposition", "clipping and AdamW", "between operators"
PARTS = (LINEAR, ON_TOKENS, OPTIMIZER, BETWEEN, SOFTMAX, PROJECTIONS, BASIS, PRODUCTS, SUMS)  # first what all models do


def profile(benchmark: Benchmark, label: Label) -> Finding:
    """Where the time goes: a row for each part of the step, a column for each model, rates as shares of the best."""
    whole = 1000 * benchmark.table.groupby("model", sort=False)["seconds"].sum()
    peak, rows = benchmark.facts["peak"]["tflops"], []
    for part, of_part in benchmark.table.groupby("part", sort=False):
        cells = []
        for row in of_part.set_index("model").loc[whole.index].itertuples():
            rate = "" if math.isnan(row.tflops) else f"\n{per_cent(round(row.tflops / peak, 2))} of peak"
            cells.append(fixed(1000 * row.seconds, 1) + rate if row.seconds else ABSENT)
        rows.append([part[0].upper() + part[1:], *cells])
    rows.append(["Whole step", *(fixed(ms, 1) for ms in whole)])
    note = (
        f"Milliseconds of a step with {benchmark.facts['weights']} weights under the profiler, on a machine that need not "
        "have been as idle as for the benchmark of the step: compare shares, not times. Peak: "
        f"{fixed(1000 * peak, 0)} GFLOP/s, the best rate at which this machine was seen to multiply matrices."
    )
    return benchmark.finding(
        "Profile of the training step",
        "Where the time of a training step goes, by torch's profiler.",
        in_short=f"A step takes {span(whole)} ms under the profiler, by model.",
        measures=[Measure(f"{label(model)}: a step under the profiler", ms, "ms") for model, ms in whole.items()],
        table=Table(["Part", *map(label, whole.index)], rows, note=note),
        models=tuple(whole.index),
    )


# Attention alone

SDPA = "sdpa"  # torch's own choice of a backend; sdpa_flash, sdpa_math and so on are each by itself
BEST = "best SDPA"
NAMES = METHOD_LABELS | {
    "literal_qr": METHOD_LABELS["qr_literal"],
    "literal_newton_schulz": "literal Newton–Schulz",
    "matrix_exp": "matrix_exp, N×N",
    BEST: "softmax, best SDPA",
}


def attention(benchmark: Benchmark, label: Label) -> Finding:
    ratios = sorted(benchmark.facts["ratios"], key=lambda ratio: ratio["tokens"])
    names = list(dict.fromkeys(key for ratio in ratios for key in ratio if " / " in key))
    last = {(name, ratio["width"], ratio["pass"]): ratio for ratio in ratios for name in names if name in ratio}
    measures = [
        Measure(f"Time of {in_words(name)}", of[name], note=f"N = {grouped(of['tokens'])}, d_v = {width}, {direction}")
        for (name, width, direction), of in sorted(last.items())
    ]
    dtype = benchmark.facts["options"]["dtype"]
    return benchmark.finding(
        f"Attention alone, in {dtype}",
        "One attention call of one head, by every method and by what else one would call.",
        measures=measures,
        in_short=against_softmax(benchmark.table),
        figure=draw_attention(benchmark.table),
        caption=f"Seconds of one attention call of one head against the number of tokens, in {dtype}.",
        remark="The ratios are those at the largest N at which both were measured.",
    )


def against_softmax(table: pd.DataFrame) -> str:
    """The time of our method over that of the best softmax attention, at the fewest and the most tokens that both have."""
    width = table["width"].max()
    own = with_best(table).query("`pass` == @BOTH and width == @width")
    seconds = own.pivot(index="tokens", columns="method", values="seconds").reindex(columns=["exact", BEST])
    ratio = (seconds["exact"] / seconds[BEST]).dropna()
    if ratio.empty:
        return ""
    few, many = (f"{number(ratio[tokens])} at N = {grouped(tokens)}" for tokens in (ratio.index[0], ratio.index[-1]))
    return f"Time of {NAMES['exact']} / {NAMES[BEST]}: {few}, {many} (d_v = {width}, {BOTH})."


def with_best(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the fastest of torch's backends at each point in place of all of them."""
    softmax = table["method"].str.startswith(SDPA)
    fastest = table[softmax].sort_values("seconds").groupby(["width", "pass", "tokens"], as_index=False).first()
    return pd.concat([table[~softmax], fastest.assign(method=BEST)], ignore_index=True)


def draw_attention(table: pd.DataFrame) -> Figure:
    """Seconds against N, a panel for each pass and width."""
    lines = {
        "exact": look("exact").line(),
        "polar_express": look("exact").line(color=PALETTE[3]),
        "newton_schulz": look("newton_schulz").line(),
        "qr": look("qr").line(),
        "literal_newton_schulz": look("newton_schulz").line(linestyle=":"),
        "literal_qr": look("qr_literal").line(),
        "matrix_exp": look("qr").line(color=PALETTE[4]),
        BEST: look("softmax").line(),
    }
    table, widths = with_best(table), list(table["width"].unique())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 6), layout="constrained")
        grid = figure.subplots(2, len(widths), sharex=True, sharey=True, squeeze=False)
        for (i, direction), (j, width) in itertools.product(enumerate((FORWARD, BOTH)), enumerate(widths)):
            axes = grid[i, j]
            for method, line in lines.items():
                rows = table[(table["method"] == method) & (table["pass"] == direction) & (table["width"] == width)]
                axes.plot(rows["tokens"], rows["seconds"], label=NAMES[method], **line)
            words = {"xlabel": "Tokens N" if i else "", "ylabel": "" if j else "Seconds"}
            axes.set(title=f"{direction.capitalize()}, d_v = {width}", **words)
            logarithmic(axes, "x", "y", numticks=9)
        legend(figure, grid[0, 0].get_legend_handles_labels()[0])
        return figure


def in_words(ratio: str) -> str:
    """e.g. literal QR / exact."""
    return " / ".join(NAMES[name] for name in ratio.split(" / "))


def multiple(ratio: float | None) -> str:
    return ABSENT if ratio is None else fixed(ratio, 2 if ratio < 10 else 1)
