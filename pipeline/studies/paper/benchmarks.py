"""What OSA costs on the machines that were at hand, as pipeline/benchmarks has timed it.

The scripts are run by hand. What they time decides one sentence of the paper: that Newton–Schulz is cheaper than QR.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.benchmarks.results import TRAINED, measured
from pipeline.core import files
from pipeline.lab import Lab
from pipeline.studies import Study, Tables
from pipeline.verdicts import judge_contrast


def summarise(settings: None, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Step times over ViT's on each machine, CPUs first; by the logs of their ratios, whether NS is faster than QR."""
    cpus, gpus = map(measured, ("step.json", "gpu_step.csv"))
    steps = [*map(on_cpu, cpus), *map(on_gpu, gpus)]
    ratios = [step["ns_over_qr"] for step in steps if step["ns_over_qr"]]
    return {"steps": steps, "ns_below_qr": judge_contrast([np.log(ratios).tolist()], (1,), side="below")}


def on_cpu(path: Path) -> dict[str, Any]:
    """One machine's step of each model over ViT's, with trained weights if there."""
    facts = files.read_json(path)
    weights = TRAINED if TRAINED in facts["ratios"] else next(iter(facts["ratios"]))
    return machine(facts["environment"], facts["ratios"][weights]["over_vit"])


def on_gpu(path: Path) -> dict[str, Any]:
    """The same of what `make gpu STEP=step` leaves: replays of CUDA graphs, with weights as initialised."""
    table = files.read_csv(path).set_index("model")
    over_vit = table["seconds"] / table["seconds"]["vit"]
    return machine({"device_name": table["device"].iloc[0], "num_threads": None}, over_vit.to_dict())


def machine(environment: dict, over_vit: dict[str, float]) -> dict[str, Any]:
    """`ns_over_qr` is what Section 3 expects to be below one: Newton–Schulz "tends to be more efficient than QR"."""
    rows = [{"variant": name, "over_vit": ratio} for name, ratio in over_vit.items()]
    newton_schulz = over_vit["osa_ns"] / over_vit["osa_qr"] if {"osa_ns", "osa_qr"} <= over_vit.keys() else None
    return {"environment": environment, "rows": rows, "ns_over_qr": newton_schulz}


STUDY = Study(summarise=summarise)
