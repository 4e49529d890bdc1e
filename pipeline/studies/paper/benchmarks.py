"""How fast is OSA on several machines? The scripts in pipeline/benchmarks timed OSA, and this study reads the timings.

The paper expects Newton–Schulz to be cheaper than a Householder QR under autograd, on hardware with fast matrix products.
Only timings of a literal implementation of the paper test this, since our method "qr" never differentiates a decomposition.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from pipeline.benchmarks.measurements import TRAINED, measured
from pipeline.core import files, provenance
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab


def summarise(settings: None, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Returns ratios of times on each machine, CPUs first."""
    steps = [*map(on_cpu, measured("step.json")), *map(on_gpu, measured("gpu_step.csv"))]
    attention = [ns_over_qr(path) for path in measured("attention.csv")]
    calls = [against_softmax(path) for path in measured("gpu_attention.csv")]
    return {"steps": steps, "attention": attention, "calls": calls}


def ns_over_qr(path: Path) -> dict[str, Any]:
    """Returns Newton–Schulz's time divided by QR's, for a literal implementation of the paper and for our methods."""
    table, facts = files.read_csv(path), files.read_json(path.with_suffix(".json"))
    is_paper_head = (table["tokens"] == 50) & (table["width"] == 16)
    own = table[is_paper_head & (table["pass"] == "forward and backward")]
    seconds = own.set_index("method")["seconds"]
    return {
        "machine": provenance.machine(facts["environment"]),
        "literal": float(seconds["literal_newton_schulz"] / seconds["literal_qr"]),
        "ours": float(seconds["newton_schulz"] / seconds["qr"]),
    }


def against_softmax(path: Path) -> dict[str, Any]:
    """Returns the time ratio of the fastest softmax to OSA (exact), for each number of heads, number of tokens and ‖S‖₂."""
    table = files.read_csv(path)
    whole, rows = table[(table["part"] == "all") & (table["how"] == "replay") & (table["work"] == "both")], []
    for (batch, heads, tokens), own in whole.groupby(["batch", "heads", "tokens"]):
        softmax = own.loc[own["method"].isin(["sdpa", "cudnn"]), "seconds"].min()
        exact = own[own["method"] == "exact"].set_index("norm")["seconds"]
        speeds = [{"norm": norm, "speed": float(softmax / seconds)} for norm, seconds in exact.items()]
        rows.append({"heads": int(batch * heads), "tokens": int(tokens), "speeds": speeds})
    return {
        "machine": provenance.short_name(gpu_of(table)),
        "width": 64,  # d_v in gpu_attention.csv
        "rows": sorted(rows, key=lambda row: (row["tokens"], -row["heads"])),
    }


def on_cpu(path: Path) -> dict[str, Any]:
    """Returns each OSA model's step time divided by ViT's, for trained weights if the file has them, else initial ones."""
    facts = files.read_json(path)
    weights = TRAINED if TRAINED in facts["ratios"] else next(iter(facts["ratios"]))
    return machine_rows(facts["environment"], facts["ratios"][weights]["over_vit"])


def on_gpu(path: Path) -> dict[str, Any]:
    """Returns each model's step time at initialisation, divided by ViT's."""
    table = files.read_csv(path).set_index("model")
    over_vit = table["seconds"] / table["seconds"]["vit"]
    return machine_rows(gpu_of(table), over_vit.to_dict())


def gpu_of(table: pd.DataFrame) -> dict[str, Any]:
    """Returns the GPU on which a table was measured, as a dict with the keys that `provenance.short_name` needs."""
    return {"device_name": table["device"].iloc[0], "num_threads": None}


def machine_rows(environment: dict, over_vit: dict[str, float]) -> dict[str, Any]:
    rows = [{"variant": name, "over_vit": ratio} for name, ratio in over_vit.items()]
    return {"environment": environment, "label": provenance.short_name(environment), "rows": rows}


STUDY = Study(summarise=summarise)
