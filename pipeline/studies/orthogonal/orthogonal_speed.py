"""How fast orthogonal linear layers are, machine by machine: what `benchmarks.orthogonal` has left in
paper_outputs/benchmarks. It is run by hand and decides nothing; here a post's statements on speed are set beside it."""

import itertools
from dataclasses import replace

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from osa.constrained.orthogonal import MAPS as OUR_MAPS
from pipeline.lab import Lab
from pipeline.report.charts import legend, logarithmic, panels
from pipeline.report.looks import INK, PALETTE, STYLE
from pipeline.report.numbers import ABSENT, fixed, grouped, number
from pipeline.studies import Finding, Measure, Table, Tables
from pipeline.studies.paper.benchmarks import FOLDER, Benchmark
from pipeline.studies.paper.complexity import BOTH

place = 66

POST_TITLE = "“Orthogonal Linear Layers in PyTorch”"
DENSE, OURS, TORCH, POST = "dense", "ours", "torch", "the post’s steps"
LARGEST_ROTOR = 8  # n of multivectors, whose 2ⁿ components are multiplied by 2ⁿ
MAPS = (*OUR_MAPS, "rotors")
LEAST_SIZE = 16  # n of a layer; the benchmark has a smaller one for the rotors alone
TRAINING_TOKENS = 6400  # 128 images of 50
GOAL, GOAL_SIZES = 1.3, (64, 256)  # of ours over dense, and between which n
MUCH_SLOWER = 10.0  # what the post's “significantly” is taken to mean
HOLDS, FAILS_TO, OPEN = "holds", "does not hold", "is open, within the spread of the rounds"


def findings(settings: None, tables: Tables, lab: Lab) -> list[Finding]:
    found = [
        Benchmark.read(folder, "orthogonal") for folder in sorted(FOLDER.glob("*/")) if (folder / "orthogonal.csv").exists()
    ]
    return [finding for benchmark in found for finding in (speed(benchmark), needs(benchmark))]


def speed(benchmark: Benchmark) -> Finding:
    """Times over those of the dense layer, and what they say of the post's statements and of our goal."""
    table, on_gpu = benchmark.table, benchmark.facts["environment"]["device"] == "cuda"
    others = table[(table["code"] != DENSE) & (table["n"] >= LEAST_SIZE)]
    literal = others[(others["map"] == "givens") & (others["code"] == POST) & (others["tokens"] == TRAINING_TOKENS)]
    asked = {  # where the statement is weakest, and the ratio that it takes
        "No layer is as fast as a dense one": (others, 1.0),
        f"Givens rotations one by one are significantly slower, we say {MUCH_SLOWER:g} times": (literal, MUCH_SLOWER),
    }
    weakest = {what: (nearest_to_failing(of, limit), limit) for what, (of, limit) in asked.items()}
    sides, ours = {what: side(row, limit) for what, (row, limit) in weakest.items()}, goals(table)
    within = sum(measure.value <= GOAL for measure in ours)
    told = [f"{what}: it {answer} here" for what, answer in sides.items()]
    told += [f"{within} of our {len(ours)} layers are within our goal of {GOAL:g} times a dense one"]
    gpu = "" if on_gpu else " They are about GPUs, of which this machine has none: there they are not evaluated."
    return benchmark.finding(
        "Orthogonal linear layers against a dense one",
        f"Statements of the post {POST_TITLE}: no orthogonal layer is as fast as a dense one; Givens rotations are "
        "significantly slower; Cayley, exponential and Householder can be accelerated. The first two are judged where they "
        f"are nearest to failing, from n = {LEAST_SIZE} on. Our own goal is {GOAL:g} times a dense layer in training, at "
        f"{grouped(TRAINING_TOKENS)} tokens and the worst n from {GOAL_SIZES[0]} to {GOAL_SIZES[1]}.",
        measures=[
            *(over_dense(what, row, f"it {sides[what]} here") for what, (row, _) in weakest.items()),
            *ours,
        ],
        in_short=f"{'; '.join(told)}.",
        table=ratio_table(table),
        figure=draw(table),
        caption="Seconds of a layer, built and applied, forward and backward, over n.",
        remark="The post gives its own times in a picture alone. Its algorithms are written anew from its formulas, one "
        "step after the other, as its code in part cannot run (the list of the documents’ errors shows what); layers that "
        f"are ours or torch’s build W and multiply once.{gpu}",
    )


def nearest_to_failing(table: pd.DataFrame, limit: float) -> pd.Series:
    """The row that refutes a statement most, if one does, and otherwise the one whose range begins lowest."""
    refuting = table[table["p90_over_dense"] < limit]
    return (
        refuting.loc[refuting["p90_over_dense"].idxmin()] if len(refuting) else table.loc[table["p10_over_dense"].idxmin()]
    )


def side(row: pd.Series, limit: float) -> str:
    """Whether a ratio is above a limit, by the range of its rounds."""
    if row["p10_over_dense"] > limit:
        return HOLDS
    return FAILS_TO if row["p90_over_dense"] < limit else OPEN


def over_dense(what: str, row: pd.Series, note: str) -> Measure:
    of = f"{row['map'].capitalize()} ({row['code']}), n = {row['n']}, {grouped(row['tokens'])} tokens, {row['pass']}"
    ratio = {"value": row["seconds_over_dense"], "low": row["p10_over_dense"], "high": row["p90_over_dense"]}
    return Measure(f"{what}: time over dense", **ratio, note=f"{of}; {note}")


def goals(table: pd.DataFrame) -> list[Measure]:
    """Our own goal for each map: the worst ratio in training at the sizes of models."""
    chosen = (table["tokens"] == TRAINING_TOKENS) & table["n"].between(*GOAL_SIZES) & (table["pass"] == BOTH)
    measures = []
    for name, own in table[chosen & (table["code"] == OURS)].groupby("map", sort=False):
        worst = own.loc[own["seconds_over_dense"].idxmax()]
        met = "met" if worst["seconds_over_dense"] <= GOAL else "missed"
        measures.append(over_dense(f"{name.capitalize()}, ours, at its slowest", worst, f"our goal of {GOAL:g} is {met}"))
    return measures


def rows(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Every map and code there is, dense first."""
    there = set(table[["map", "code"]].itertuples(index=False, name=None))
    return [(DENSE, DENSE), *(pair for pair in itertools.product(MAPS, (OURS, TORCH, POST)) if pair in there)]


def title(pair: tuple[str, str]) -> str:
    return "Dense" if pair == (DENSE, DENSE) else f"{pair[0].capitalize()}, {pair[1]}"


def ratio_table(table: pd.DataFrame) -> Table:
    """Time over dense in training, a column for each n; of the dense layer itself milliseconds."""
    chosen = table[(table["tokens"] == TRAINING_TOKENS) & (table["pass"] == BOTH)].set_index(["map", "code", "n"])
    sizes = sorted(table["n"].unique())
    cells = [[f"{fixed(1000 * chosen.loc[(DENSE, DENSE, n), 'seconds'], 2)} ms" for n in sizes]]
    for pair in rows(table)[1:]:
        ratios = [chosen["seconds_over_dense"].get((*pair, n)) for n in sizes]
        cells.append([ABSENT if ratio is None else fixed(ratio, 2 if ratio < 10 else 0) for ratio in ratios])
    note = (
        f"Median over the rounds of the time over dense, forward and backward with {grouped(TRAINING_TOKENS)} tokens. "
        "A dash: left out, as it would take too long."
    )
    lines = [[title(pair), *of] for pair, of in zip(rows(table), cells, strict=True)]
    return Table(["Layer", *(f"n = {grouped(n)}" for n in sizes)], lines, note=note)


def needs(benchmark: Benchmark) -> Finding:
    """Parameters, memory and orthogonality, each layer at the largest size at which all but the rotors were measured."""
    table = benchmark.table[(benchmark.table["tokens"] == TRAINING_TOKENS) & (benchmark.table["pass"] == BOTH)]
    common = table[table["map"] != "rotors"].groupby("n")["code"].size()
    n = int(common[common == common.max()].index.max())
    own = table[table["n"] == n].set_index(["map", "code"])
    pairs = [pair for pair in rows(table) if pair in own.index]
    steps = {"givens": 1.5 * (n - 1) / n, "householder": 2.0}  # of 3 tokens n (n − 1) and 4 tokens n² operations
    lines, columns = [], ("parameters", "free", "peak_bytes", "multiply_adds", "orthogonality_error")
    for pair in pairs:
        stored, free, peak, operations, error = own.loc[pair, list(columns)]
        is_counted = pair[1] != POST or pair[0] not in steps
        share = operations / own.loc[(DENSE, DENSE), "multiply_adds"] if is_counted else steps[pair[0]]
        lines.append([title(pair), grouped(stored), grouped(free), fixed(peak / 2**20, 1), fixed(share, 2), number(error)])
    finding = benchmark.finding(
        "What orthogonal linear layers need",
        f"Parameters, memory, products and orthogonality in float32 at n = {n} with {grouped(TRAINING_TOKENS)} tokens, "
        "forward and backward.",
        measures=[Measure(f"{title(pair)}: ‖WᵀW − I‖₂", own.loc[pair, "orthogonality_error"]) for pair in pairs[1:]],
        table=Table(["Layer", "Parameters", "of them free", "Peak, MiB", "Products over dense", "‖WᵀW − I‖₂"], lines),
        remark="Products are those of matrices and of factorisations, as counted; of single rotations and reflections the "
        "operations that their formulas have.",
    )
    return replace(finding, id=f"orthogonal_needs-{benchmark.folder.name}")


@matplotlib.rc_context(STYLE)
def draw(table: pd.DataFrame) -> Figure:
    """Seconds over n, forward and backward: a panel for each number of tokens, a colour for each map."""
    colours = dict(zip(MAPS, (colour for colour in PALETTE if colour != INK), strict=False)) | {DENSE: INK}
    dashes = {OURS: "-", TORCH: (0, (5, 2)), POST: ":", DENSE: "-"}
    chosen = table[table["pass"] == BOTH]
    figure, axes = panels(chosen["tokens"].nunique(), 4.2, sharey=True)
    for panel, (tokens, own) in zip(axes, chosen.groupby("tokens"), strict=True):
        for name, code in rows(own):
            line = own[(own["map"] == name) & (own["code"] == code)]
            style = {"linewidth": 2.2 if code == DENSE else 1.3, "marker": "." if len(line) == 1 else ""}
            panel.plot(line["n"], line["seconds"], color=colours[name], linestyle=dashes[code], **style)
        logarithmic(panel, "y")
        panel.set_xscale("log", base=2)
        sizes = sorted(own["n"].unique())[1::2]
        panel.set(title=f"{grouped(tokens)} token" + "s" * (tokens > 1), xlabel="n", xticks=sizes, xticklabels=sizes)
    axes[0].set_ylabel("Seconds")
    maps = [Line2D([], [], color=colours[name], label=name.capitalize()) for name in (DENSE, *MAPS)]
    legend(
        figure, [*maps, *(Line2D([], [], color=INK, linestyle=dashes[code], label=code) for code in (OURS, TORCH, POST))], 5
    )
    return figure
