"""What `benchmarks` has measured, machine by machine, as the report shows it. Nothing of it decides a verdict."""

import math
from pathlib import Path

import pandas as pd

from pipeline import figures, files
from pipeline.report_text import ABSENT, Table, fixed, grouped
from pipeline.results import Inputs

FOLDER = Path("paper_outputs/benchmarks")
CAPTIONS = {
    "step": "Milliseconds of a training step: median, and 10 to 90 per cent of the samples.",
    "profile": "Where the milliseconds of a training step go, by torch's profiler.",
    "attention": "Seconds of one attention call of one head against the number of tokens, in float32.",
    "attention_bfloat16": "Seconds of one attention call of one head against the number of tokens, in bfloat16.",
}
COLUMNS = ["Model", "Weights", "Ours, ms", "Over ViT", "Straightforward, ms", "Over ours"]


def machines(inputs: Inputs) -> list[dict]:
    """For each machine that a benchmark was run on: what it is, the tables, and the figures for a page."""
    return [machine(inputs, folder) for folder in sorted(FOLDER.glob("*/"))]


def machine(inputs: Inputs, folder: Path) -> dict:
    facts = {name: files.read_json(folder / f"{name}.json") for name in CAPTIONS if (folder / f"{name}.json").exists()}
    tables = {
        "step": step_table,
        "profile": profile_table,
        "attention": attention_table,
        "attention_bfloat16": attention_table,
    }
    environment = next(iter(facts.values()))["environment"]
    threads = environment["num_threads"]
    return {
        "anchor": folder.name,
        "title": f"{environment['device_name']}, {threads} {'thread' if threads == 1 else 'threads'}",
        "versions": f"PyTorch {environment['torch']}, {environment['platform']}",
        "sentence": sentence(inputs, facts["step"]["ratios"]) if "step" in facts else "",
        "parts": [
            {
                "table": tables[name](inputs, folder / f"{name}.csv", facts[name]),
                "path": folder / f"{name}.svg",
                "drawing": figures.inline((folder / f"{name}.svg").read_text(), f"{folder.name}-{name}", CAPTIONS[name]),
                "caption": CAPTIONS[name],
            }
            for name in facts
        ],
    }


def sentence(inputs: Inputs, ratios: dict) -> str:
    """The step in one sentence, with trained weights where they were there."""
    weights, of = list(ratios.items())[-1]
    models = [f"{inputs.label(name)} {fixed(ratio, 2)}" for name, ratio in of["over_vit"].items()]
    text = f"With {weights} weights, a training step takes in multiples of ViT's: {', '.join(models)}."
    whole = of["straightforward_over_ours"].get("all models of the paper")
    return (
        f"{text} Straightforward code takes {fixed(whole, 2)} times as long for all models of the paper." if whole else text
    )


def step_table(inputs: Inputs, path: Path, facts: dict) -> Table:
    table, rows = pd.read_csv(path), []
    steps = table.pivot(index=["model", "weights"], columns="code", values="seconds")
    for model in table["model"].unique():
        for weights, of in facts["ratios"].items():
            if (model, weights) in steps.index:
                ms = 1000 * steps.loc[(model, weights)]
                ratio = of["over_vit"].get(model), of["straightforward_over_ours"].get(model)
                ours, theirs = ms["ours"], ms.get("straightforward", math.nan)
                cells = [inputs.label(model), weights, fixed(ours, 1), number(ratio[0]), fixed(theirs, 1), number(ratio[1])]
                rows.append((model, cells))
    for weights, of in facts["ratios"].items():
        for name in ("the paper's OSA models", "all models of the paper"):
            if name in of["straightforward_over_ours"]:
                ratio = number(of["straightforward_over_ours"][name])
                rows.append((None, [name[0].upper() + name[1:], weights, ABSENT, ABSENT, ABSENT, ratio]))
    note = f"One step of {facts['batch_size']} images, forward, backward, clipping and AdamW; all measured in turns."
    return Table("Training step", "llrrrr", COLUMNS, rows, str(path), note)


def profile_table(inputs: Inputs, path: Path, facts: dict) -> Table:
    """A row for each part of the step, a column for each model; a product's rate as a share of the machine's best."""
    table, peak = pd.read_csv(path), facts["peak"]["tflops"]
    models, rows = list(table["model"].unique()), []
    for part, of_part in table.groupby("part", sort=False):
        cells = []
        for row in of_part.set_index("model").loc[models].itertuples():
            rate = "" if math.isnan(row.tflops) else f"\n{fixed(100 * row.tflops / peak, 0)}% of peak"
            cells.append(fixed(1000 * row.seconds, 1) + rate if row.seconds else ABSENT)
        rows.append((None, [part[0].upper() + part[1:], *cells]))
    rows.append(
        (None, ["Whole step", *(fixed(1000 * total, 1) for total in table.groupby("model")["seconds"].sum()[models])])
    )
    columns = ["Part", *map(inputs.label, models)]
    note = (
        f"Milliseconds of a step with {facts['weights']} weights. Peak: {fixed(1000 * peak, 0)} GFLOP/s, the best rate at "
        "which this machine was seen to multiply matrices. Measured apart from the steps above and with the profiler's own "
        "time, so that the parts tell more than the sums."
    )
    return Table("Profile of the training step", "l" + "r" * len(models), columns, rows, str(path), note)


def attention_table(inputs: Inputs, path: Path, facts: dict) -> Table:
    names = list(dict.fromkeys(key for ratio in facts["ratios"] for key in ratio if " / " in key))
    sizes = sorted({ratio["tokens"] for ratio in facts["ratios"]})
    shown, rows = {*sizes[::3], sizes[-1]}, []
    ratios = (ratio for ratio in facts["ratios"] if ratio["tokens"] in shown)
    for ratio in sorted(ratios, key=lambda each: (each["width"], each["pass"], each["tokens"])):
        identity = [grouped(ratio["tokens"]), str(ratio["width"]), ratio["pass"]]
        rows.append((None, [*identity, *(number(ratio.get(name)) for name in names)]))
    note = "Ratios of times, at every third size; what takes too long or too much memory is absent."
    columns = ["Tokens N", "d_v", "Pass", *(name.replace("literal_", "literal ").replace("_", "-") for name in names)]
    title = f"Attention alone, in {facts['options']['dtype']}"
    return Table(title, "rll" + "r" * len(names), columns, rows, str(path.with_suffix(".json")), note)


def number(ratio: float | None) -> str:
    return ABSENT if ratio is None else fixed(ratio, 2) if ratio < 10 else fixed(ratio, 1)
