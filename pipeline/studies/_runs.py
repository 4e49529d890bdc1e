"""What the trainings of a study have left in files, as tables."""

from collections.abc import Iterable

import pandas as pd

from pipeline.core import files, record
from pipeline.core.params import Overrides, RunConfig
from pipeline.lab import Lab
from pipeline.runs import FOLDER, WEIGHTS, Run, same_config
from pipeline.studies import Tables
from pipeline.training.loop import COLUMNS

IDENTITY, MEASURED = ["run", "variant", "seed"], ["train_loss", "test_loss", "test_accuracy"]
MADE = ["codes", "device", "git_dirty", "started_at", "seconds", "images_per_second"]
Request = tuple[str, Overrides, int]  # of a training: variant, what is replaced of its configuration, seed


def collect_runs(trainings: Iterable[Request], lab: Lab) -> Tables:
    """As `runs` a row each, as `histories` the points of those that are there, and as `watched` what the study saw of them,
    if it did."""
    for folder in (FOLDER, WEIGHTS):  # of which DVC expects something even where nothing is trained
        (folder / lab.study).mkdir(parents=True, exist_ok=True)
    rows, found = [], {"history": [], "watched": []}
    for variant, overrides, seed in trainings:
        run = lab.run(variant, overrides, seed)
        identity = {"run": run.name, "variant": variant, "seed": seed}
        what = told(run, lab.config(variant, overrides))
        rows.append(identity | what)
        for name, tables in found.items():
            if what["status"] != "missing" and (path := run.folder / f"{name}.csv").exists():
                table = run.points() if name == "history" else files.read_csv(path)
                tables += [table.assign(**identity)] if len(table) else []  # nothing is seen of what diverges at step 0
    no_history = pd.DataFrame(columns=[*IDENTITY, *COLUMNS])
    tables = {"runs": pd.DataFrame(rows, columns=[*IDENTITY, "status", *MEASURED, *MADE])}
    tables["histories"] = pd.concat(found["history"] or [no_history])[no_history.columns]
    return tables | ({"watched": pd.concat(found["watched"])} if found["watched"] else {})


def told(run: Run, config: RunConfig) -> dict:
    """What a run's files say: finished, diverged, or missing, also where the run is of another configuration.

    `codes` are the digests of all codes that are known to give its numbers.
    """
    made = run.record_if_there()
    if not (made and same_config(made["config"], config)):
        return {"status": "missing"}
    metrics = run.read("metrics")
    row = {"codes": " ".join(sorted(record.made_by(made)))}
    row |= {key: made["environment"][key] for key in ("device", "git_dirty")}
    row |= {key: made[key] for key in ("started_at", "seconds", "images_per_second")}
    if metrics["diverged"]:
        return row | {"status": "diverged"}
    return row | {"status": "finished"} | {key: metrics[key] for key in MEASURED}


def of_other_code(runs: pd.DataFrame) -> str:
    """A remark on the runs that today's code is not known to give, where there are some."""
    there = runs[runs["status"] != "missing"]
    today = {device: record.code_sha256(device) for device in set(there["device"])}
    other = sum(today[device] not in codes.split() for device, codes in zip(there["device"], there["codes"], strict=True))
    return f"{other} of {len(there)} runs are of other code than is here." if other else ""
