"""What studies share whose runs take too long to be trained by a stage: `measure` gathers the runs that are there.

`python -m pipeline.tools.fan_out --only` trains them. A run that is missing, or of another configuration than is asked for now, is
a cell that is not evaluated.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field

from pipeline.core import params
from pipeline.core.params import Name, Paper, PositiveInt, Section
from pipeline.lab import Lab
from pipeline.report.numbers import number
from pipeline.statistics import LEAST_RUNS, NOT_SUPPORTED, UNDECIDED
from pipeline.studies import Finding, Measure, Tables
from pipeline.studies._runs import Request, collect_runs
from pipeline.studies.paper.section_5 import AccuracyClaim, Claim, Comparison, Results, SpeedClaim, judge_means, judged_claim
from pipeline.training.loop import COLUMNS

GUESSING = math.log(10)  # the cross-entropy of ten digits that are as likely as one another
TRAINS, DOES_NOT = 0.5, 0.9  # of it: a train loss below the one or above the other
RUN = ["run", "status", "train_loss", "test_accuracy", "epochs", "learning_rate", "seconds_per_step", "codes", "device"]
Wanted = dict[tuple[str, int, int], Request]  # by what a reader knows it as: model, size and seed


def gather(wanted: Wanted, lab: Lab, size: str = "depth") -> Tables:
    """`collect_runs`, by what a reader knows each run as; with its epochs, rate and seconds a step."""
    columns, trains = ["variant", size, "seed"], [lab.config(*request[:2]).train for request in wanted.values()]
    tables, cells = collect_runs(wanted.values(), lab), pd.DataFrame(list(wanted), columns=columns)
    table = cells.join(tables["runs"].drop(columns=["variant", "seed"]))
    for name in ("epochs", "learning_rate", "batch_size"):
        table[name] = [getattr(train, name) for train in trains]
    table["seconds_per_step"] = table["batch_size"] / pd.to_numeric(table["images_per_second"])
    histories = tables["histories"].drop(columns="variant").merge(table[["run", *columns]], on=["run", "seed"])
    return {"runs": table[[*columns, *RUN]], "histories": histories[[*columns, *COLUMNS]]}


def results_at(depth: int, tables: Tables, lab: Lab, label: Callable[[str], str]) -> Results:
    """The runs of one depth as the rules of Section 5 ask for them."""
    return Results(lab, {name: own[own["depth"] == depth] for name, own in tables.items()}, label)


def of_devices(runs: pd.DataFrame) -> str:
    """A remark on seconds a step, where the runs are of several devices."""
    devices = sorted(set(runs["device"].dropna()))
    return f"Seconds a step are of {' and '.join(devices)}, and not to be compared." if len(devices) > 1 else ""


def outcome(rows: pd.DataFrame) -> str:
    """Of the runs of one cell: trains, does not, or undecided, by each one's last train loss; diverged, it does not."""
    there = rows[rows["status"] != "missing"]
    if there.empty:
        return "not evaluated"
    shares = there["train_loss"].where(there["status"] == "finished", math.inf) / GUESSING
    return "trains" if (shares <= TRAINS).all() else "does not" if (shares >= DOES_NOT).all() else "undecided"


# Claims of He et al. 2023, and four of ours, in pipeline/paper.yaml


class AtDepth(Section):
    """What every claim about deep models has besides."""

    depth: PositiveInt


class SpeedAtDepth(AtDepth, SpeedClaim):
    """`SpeedClaim` of models of one depth."""


class AccuracyAtDepth(AtDepth, AccuracyClaim):
    """`AccuracyClaim` of models of one depth."""


class LossAtDepth(AtDepth, Comparison):
    """The first model's last train loss is below the second's."""

    kind: Literal["loss"]

    def measures(self, results: Results) -> list[Measure]:
        return [measure_loss(pair, (1, -1), 0.0, "below", results, len(self.compare)) for pair in self.compare]


class TrainsAtDepth(AtDepth, Claim):
    """Every one of the models trains, or none does."""

    kind: Literal["trains"]
    models: Annotated[list[Name], Field(min_length=1)]
    trains: bool
    how = (
        f"A model trains if its last recorded train loss is below {TRAINS:g} × ln 10, and does not if it is above "
        f"{DOES_NOT:g} × ln 10; what lies between is undecided. Judged by the t-interval of the mean over seeds; a run that "
        "diverges leaves it undecided."
    )

    def measures(self, results: Results) -> list[Measure]:
        limits, side = ((TRAINS, DOES_NOT), "below") if self.trains else ((DOES_NOT, TRAINS), "above")
        asked = {"side": side, "results": results, "family": len(self.models)}
        measures = []
        for model in self.models:
            found, beyond = (measure_loss([model], (1,), limit * GUESSING, **asked) for limit in limits)
            if found.verdict == NOT_SUPPORTED and beyond.verdict != NOT_SUPPORTED:
                found = replace(found, verdict=UNDECIDED, note=f"{found.note}; between training and not")
            measures.append(found)
        return measures


def measure_loss(
    models: Sequence[str], weights: Sequence[float], limit: float, side: str, results: Results, family: int
) -> Measure:
    """A combination of mean last train losses against its limit. Of two runs the t-interval reaches below any loss, and is
    not told; what the two of one model are is, as they may be opposites."""
    samples = [results.rows(model, "finished")["train_loss"].dropna().tolist() for model in models]
    asked = {"limit": limit, "side": side, "family": family, "diverged": results.diverged(models)}
    judged = judge_means(samples, weights, **asked)
    if judged.n < LEAST_RUNS:
        judged = replace(judged, low=math.nan, high=math.nan)
    what = f"{' − '.join(map(results.label, models))}: last train loss"
    if len(models) == 1 and 1 < len(samples[0]) < LEAST_RUNS:
        what += f", the mean of {' and '.join(map(number, samples[0]))},"
    return Measure(what, **judged.as_measure(results.account(models)), side=side, limit=limit)


AnyClaim = Annotated[SpeedAtDepth | AccuracyAtDepth | LossAtDepth | TrainsAtDepth, Field(discriminator="kind")]


class Claims(Section):
    """The section `deep_claims` of pipeline/paper.yaml."""

    deep_claims: dict[Name, AnyClaim]


def read_claims(paper: Paper) -> dict[str, AnyClaim]:
    """The claims about deep models by their names. Raises UserError where one is not as its rule needs it."""
    return params.validate(Claims, {"deep_claims": paper.deep_claims}, "pipeline/paper.yaml").deep_claims


def judged_claims(depths: Iterable[int], tables: Tables, lab: Lab, label: Callable[[str], str], **fields) -> list[Finding]:
    """The claims about models of these depths."""
    return [
        judged_claim(name, claim, claim.measures(results_at(claim.depth, tables, lab, label)), **fields)
        for name, claim in read_claims(lab.paper).items()
        if claim.depth in depths
    ]
