"""What OSA costs on the machines that were at hand: training steps and attention, as pipeline/benchmarks has timed them.

The scripts are run by hand; what they time decides nothing.
"""

from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pipeline.benchmarks.results import BEST, FOLDER, TRAINED, with_best
from pipeline.core import files
from pipeline.lab import Lab
from pipeline.report import charts
from pipeline.report.looks import METHOD_LABELS, STYLE, look
from pipeline.studies import Study, Tables

WIDTH, PASS = 16, "forward and backward"  # of the attention that is shown: the paper's heads
KERNELS = FOLDER / "kernels.csv"


def summarise(settings: None, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Step times over ViT's on each machine, the number of tokens from which attention is faster than softmax, and what the
    CUDA kernels take of a multiprocessor."""
    steps = [step(path) for path in sorted(FOLDER.glob("*/step.json"))]
    attentions = [attention(path) for path in sorted(FOLDER.glob("*/attention.json"))]
    return {"steps": steps, "attention": attentions, "kernels": kernels()}


def step(path: Path) -> dict[str, Any]:
    """One machine's step of each model over ViT's, and that of a plain script over ours; with trained weights if there."""
    facts = files.read_json(path)
    ratios = facts["ratios"]
    weights = TRAINED if TRAINED in ratios else next(iter(ratios))
    over_vit, plain = ratios[weights]["over_vit"], ratios[weights]["straightforward_over_ours"]
    rows = [{"variant": name, "over_vit": ratio, "plain_over_ours": plain.get(name)} for name, ratio in over_vit.items()]
    return {"environment": facts["environment"], "weights": weights, "rows": rows}


def attention(path: Path) -> dict[str, Any]:
    """One machine's attention beside the fastest softmax: from how many tokens on each method is faster, and by how much at
    the longest sequence that softmax was timed at."""
    seconds = by_tokens(path)
    both = seconds.dropna(subset=[BEST])
    rows = {
        method: {
            "faster_from": int(faster.index[0]) if len(faster := both[both[method] < both[BEST]]) else None,
            "ratio_at_longest": float(both[BEST].iloc[-1] / both[method].iloc[-1]),
        }
        for method in ("exact", "qr", "newton_schulz")
    }
    return {"environment": files.read_json(path)["environment"], "longest": int(both.index[-1]), "methods": rows}


def by_tokens(path: Path) -> pd.DataFrame:
    """Seconds of each method, a row for each number of tokens."""
    table = with_best(files.read_csv(path.with_suffix(".csv")))
    table = table[(table["width"] == WIDTH) & (table["pass"] == PASS)]
    return table.pivot(index="tokens", columns="method", values="seconds")


def kernels() -> dict[str, Any]:
    """The CUDA kernels as compiled ahead of time: how many, and how many bytes they spill."""
    if not KERNELS.exists():
        return {}
    table = files.read_csv(KERNELS)
    return {"compiled": len(table), "spilled_bytes": int(table["spilled_bytes"].max())}


@matplotlib.rc_context(STYLE)
def draw(settings: None, tables: Tables, lab: Lab) -> Figure | None:
    """Seconds of attention against the number of tokens, on the first machine."""
    paths = sorted(FOLDER.glob("*/attention.json"))
    if not paths:
        return None
    seconds = by_tokens(paths[0])
    figure, (axes,) = charts.panels(1, height=3.2)
    for method, style in {"exact": "exact", "qr": "qr", "newton_schulz": "newton_schulz", BEST: "softmax"}.items():
        line = seconds[method].dropna()
        axes.plot(line.index, line, label=METHOD_LABELS.get(style, style), **look(style).line())
    charts.logarithmic(axes, "x", "y")
    axes.set(xlabel="Tokens", ylabel="Seconds, forward and backward")
    axes.legend()
    return figure


STUDY = Study(summarise=summarise, figures={"benchmarks": draw})
