"""What OSA costs on the machines that were at hand, as pipeline/benchmarks has timed it.

The scripts are run by hand; what they time decides nothing.
"""

from pathlib import Path
from typing import Any

from pipeline.benchmarks.results import FOLDER, TRAINED
from pipeline.core import files
from pipeline.lab import Lab
from pipeline.studies import Study, Tables

KERNELS = FOLDER / "kernels.csv"


def summarise(settings: None, tables: Tables, lab: Lab) -> dict[str, Any]:
    """Step times over ViT's on each machine, and what the CUDA kernels take of a multiprocessor."""
    return {"steps": [step(path) for path in sorted(FOLDER.glob("*/step.json"))], "kernels": kernels()}


def step(path: Path) -> dict[str, Any]:
    """One machine's step of each model over ViT's, with trained weights if there.

    `ns_over_qr` is what Section 3 expects to be below one: Newton–Schulz "tends to be more efficient than QR"."""
    facts = files.read_json(path)
    weights = TRAINED if TRAINED in facts["ratios"] else next(iter(facts["ratios"]))
    over_vit = facts["ratios"][weights]["over_vit"]
    rows = [{"variant": name, "over_vit": ratio} for name, ratio in over_vit.items()]
    newton_schulz = over_vit["osa_ns"] / over_vit["osa_qr"] if {"osa_ns", "osa_qr"} <= over_vit.keys() else None
    return {"environment": facts["environment"], "rows": rows, "ns_over_qr": newton_schulz}


def kernels() -> dict[str, int]:
    """The CUDA kernels as compiled ahead of time: how many, and how many bytes the worst of them spills."""
    if not KERNELS.exists():
        return {}
    table = files.read_csv(KERNELS)
    return {"compiled": len(table), "spilled_bytes": int(table["spilled_bytes"].max())}


STUDY = Study(summarise=summarise)
