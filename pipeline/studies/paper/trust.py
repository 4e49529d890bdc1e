"""What the pipeline survives: the trials that `python -m pipeline.benchmarks.trust` has counted in paper_outputs/trust."""

import math
from pathlib import Path
from typing import NamedTuple

from pipeline.core import files, record
from pipeline.lab import Lab
from pipeline.report.numbers import grouped
from pipeline.studies import CHECK, Finding, Measure, Table, Tables

FOLDER = Path("paper_outputs/trust")


class Kind(NamedTuple):
    """What a campaign tries, what has to come of it, and how often it is tried."""

    fault: str
    survived: str
    trials: int


SAME = "the same bits as undisturbed"
CAMPAIGNS = {
    "kills": Kind("A training killed at a random moment, and begun again", SAME, 200),
    "twice": Kind("The same run trained two or three times at once", SAME, 30),
    "flips": Kind("One bit inverted in a checkpoint, the weights, the history or the metrics", "noticed, and not used", 100),
    "disk": Kind("A disk full, a folder read-only, a file in a folder's place", f"one sentence; once mended, {SAME}", 40),
    "mutations": Kind("params.yaml changed at random", "taken as it stands, or refused in one sentence", 500),
    "mirrors": Kind("A mirror that lies, hangs or breaks off", "the right files from the next one, or one sentence", 90),
    "tracking": Kind("MLflow dead, slow or failing during a training", f"{SAME}, and a warning", 20),
}


def findings(settings: None, tables: Tables, lab: Lab) -> list[Finding]:
    counted = {name: files.read_json(path) for name in CAMPAIGNS if (path := FOLDER / f"{name}.json").exists()}
    if not counted:
        return []
    measures, rows = [], []
    for name, kind in CAMPAIGNS.items():
        of = counted.get(name, {"trials": 0, "survived": 0, "ends": {}})
        lost, account = of["trials"] - of["survived"], f"{grouped(of['survived'])} of {grouped(of['trials'])}"
        told = {"side": "below", "limit": 1, "note": f"{account} survived" if of["trials"] else "not tried"}
        measures.append(Measure(f"{kind.fault}: not survived", lost if of["trials"] else math.nan, "trials", **told))
        rows.append([kind.fault, account, kind.survived, "; ".join(f"{n} × {end}" for end, n in of["ends"].items())])
    in_short = "; ".join(f"{row[0]}: {row[1]}" for row in rows)
    return [
        Finding(
            id="trust",
            title="What injected faults do to a training",
            place="not in the paper",
            kind=CHECK,
            statement="After each of these faults in a training, its files or what it needs, results are right, or it "
            "ends with one sentence that says what to do.",
            rule="Every trial has to be survived as its row says. A traceback is not.",
            measures=measures,
            table=Table(["Fault", "Survived", "That is", "How it went"], rows, "lrll"),
            remark=provenance(list(counted.values())),
            sources=[str(FOLDER / f"{name}.json") for name in counted],
            in_short=f"Survived: {in_short}.",
        )
    ]


def provenance(counted: list[dict]) -> str:
    """By what it was counted, and where."""
    where = {f"{record.machine(each['environment'])}, PyTorch {each['environment']['torch']}" for each in counted}
    commits = dict.fromkeys(str(each["environment"]["git_commit"])[:10] for each in counted)
    made = (
        f"Counted by `python -m pipeline.benchmarks.trust` on {' and '.join(sorted(where))}, at commit {', '.join(commits)}."
    )
    return f"{made} Faults are drawn from a seed; their moments are the machine's."
