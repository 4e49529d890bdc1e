"""What the studies that train models of their own have in common: their runs by name, and the rules of pipeline/paper.yaml,
written with what was expected before the first run, that judge them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from pipeline.core import params
from pipeline.core.params import Name, NonNegativeFloat, Section
from pipeline.lab import Lab
from pipeline.report.numbers import mean_std
from pipeline.statistics import (
    LEAST_RUNS,
    NOT_EVALUATED,
    NOT_SUPPORTED,
    SUPPORTED,
    UNDECIDED,
    judge,
    judge_within,
    summarise,
)
from pipeline.studies import Finding, Measure, Tables
from pipeline.studies._runs import Request, collect_runs, of_other_code
from pipeline.studies.paper.section_5 import (
    SOURCES,
    AccuracyClaim,
    Comparison,
    Results,
    SpeedClaim,
    as_ratio,
    epochs_to_reach,
    is_trained,
    judged_claim,
    of_recipe,
    target_loss,
)

OF_TRAINING = 0.5  # whose lowest loss is what the speed of convergence is compared at


class NamedRequest(NamedTuple):
    """Of a training of a variant with other options, by the name that rules and figures have for it."""

    name: str
    variant: str
    options: dict[str, Any]
    seed: int

    @property
    def request(self) -> Request:
        return self.variant, {"variant": self.options} if self.options else {}, self.seed


def collect(wanted: Sequence[NamedRequest], lab: Lab) -> Tables:
    """What the trainings left as `collect_runs` has it, and what `watch` saw; `variant` is the name."""
    tables = collect_runs([named.request for named in wanted], lab)
    names = {lab.run(*named.request).name: named.name for named in wanted}
    return {key: table.assign(variant=table["run"].map(names)) for key, table in tables.items()}


class TrainedResults(Results):
    """Table 2's runs and a study's own. `groups` name several, which for each seed count as one run, their mean."""

    def __init__(self, tables: Tables, lab: Lab, labels: Mapping[str, str], groups: Mapping[str, Sequence[str]]) -> None:
        super().__init__(lab, of_recipe(lab))
        self.label = lambda name: labels.get(name) or lab.label(name)
        self.remark = of_other_code(tables["runs"])
        own, self.watched = tables["runs"], tables.get("watched", pd.DataFrame(columns=["variant", "seed", "epoch"]))
        finished = set(own.loc[own["status"] == "finished", ["variant", "seed"]].itertuples(index=False, name=None))
        ends = at_end(self.watched)  # of a run that diverged, where it was last seen
        self.ended = ends.loc[[key in finished for key in zip(ends["variant"], ends["seed"], strict=True)]]
        means = self.ended.groupby(["variant", "seed"]).mean(numeric_only=True).add_prefix("watched_")
        own = own.join(means, on=["variant", "seed"])
        grouped = [mean_of_each_seed(own[own["variant"].isin(names)], group) for group, names in groups.items()]
        self.runs = together(self.runs, own, *grouped)
        self.histories = together(self.histories, tables.get("histories", self.histories[:0]))

    def values(self, model: str, column: str) -> list[float]:
        """What was seen at the end of each run that finished, on average over its layers."""
        rows = self.rows(model, "finished")
        return rows.get(f"watched_{column}", pd.Series(dtype=float)).dropna().tolist()

    def target(self, model: str) -> float:
        """The loss that a model's runs come to in the first half of training; NaN where there is none."""
        return target_loss(self.curves(model).values(), OF_TRAINING)

    def epochs(self, model: str, loss: float) -> float:
        """The median epoch at which a model's runs come to a loss, ∞ if most never do; NaN without runs or a loss."""
        epochs = [epochs_to_reach(curve, loss) for curve in self.curves(model).values()]
        return float(np.median(epochs)) if epochs and loss > 0 else math.nan

    def is_trained(self, model: str) -> bool:
        """Whether any of a model's runs is there, diverged or not."""
        return is_trained(self.statuses(model))

    def cells(self, model: str) -> list[str]:
        """Test accuracy in per cent, and of how many runs, for a table."""
        found, lost = summarise(self.accuracies(model)), sum(self.diverged([model]))
        return [mean_std(found.mean, found.std, 2), f"{found.n}, {lost} diverged" if lost else str(found.n)]


def left_out(labels: Sequence[str]) -> str:
    """The end of a table's note: the models that have no row, as none of their runs is there."""
    return f" {NOT_EVALUATED.capitalize()}: {'; '.join(labels)}." if labels else ""


def mean_of_each_seed(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """One row for each seed, as its runs are no independent samples: their mean if all finished, else what happened."""
    means = runs[runs["status"] == "finished"].groupby("seed").mean(numeric_only=True)
    there = runs.groupby("seed")["status"].agg(
        lambda each: next(s for s in ("diverged", "missing", "finished") if s in set(each))
    )
    return means.reindex(there.index).assign(variant=group, status=there).reset_index()


def together(*tables: pd.DataFrame) -> pd.DataFrame:
    """Tables below one another; one without rows would make text of another's numbers."""
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


def at_end(watched: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last point of each run."""
    return watched[watched["epoch"] == watched.groupby(["variant", "seed"])["epoch"].transform("max")]


class WithinClaim(Comparison):
    """The first model's accuracy differs from the second's by no more than a margin."""

    kind: Literal["within"]
    margin_points: NonNegativeFloat
    how = "Judged by Welch's interval of the difference over seeds."

    def measures(self, results: TrainedResults) -> list[Measure]:
        measures = []
        for pair in self.compare:
            asked = {"margin": self.margin_points, "family": len(self.compare), "diverged": results.diverged(pair)}
            samples = [results.accuracies(model) for model in pair]  # a group's are means, and spread less
            judged = judge_within(samples, (1, -1), equal_spread=False, **asked)
            fields = judged.as_measure(results.account(pair))
            measures.append(Measure(" − ".join(map(results.label, pair)), **fields, unit="points"))
        return measures


class MeasuredClaim(Comparison):
    """Of the first model of a pair, what its column has is less than a factor times what it is of the second."""

    kind: Literal["measured"]
    columns: Annotated[list[str], Field(min_length=1)]  # of what is watched: each of every pair
    at_most_factor: Annotated[float, Field(gt=0)]
    how = "Judged by Welch's interval of the difference of mean logarithms over seeds."

    def measures(self, results: TrainedResults) -> list[Measure]:
        measures, scale = [], {"side": "below", "limit": self.at_most_factor}
        for pair, column in itertools.product(self.compare, self.columns):
            logs = [np.log(results.values(model, column)).tolist() for model in pair]
            asked = {"limit": math.log(self.at_most_factor), "side": "below"}
            asked["family"] = len(self.compare) * len(self.columns)
            judged = as_ratio(judge(logs, (1, -1), diverged=results.diverged(pair), **asked))
            fields = judged.as_measure(results.account(pair)) | scale
            what = f"{' / '.join(map(results.label, pair))}: {results.label(column)}"
            measures.append(Measure(what, **fields, unit="× as much"))
        return measures


class Prediction(Section):
    """A rule, and what it was expected to say before the first run that it judges."""

    expected: Literal[SUPPORTED, NOT_SUPPORTED, UNDECIDED]
    why: str
    rule: Annotated[AccuracyClaim | SpeedClaim | WithinClaim | MeasuredClaim, Field(discriminator="kind")]


class Predictions(Section):
    predictions: dict[Name, dict[Name, Prediction]]


def predictions(lab: Lab, study: str) -> dict[str, Prediction]:
    """Those of a study. Raises UserError where paper.yaml has something else than a rule needs."""
    read = params.validate(Predictions, {"predictions": lab.paper.predictions}, "pipeline/paper.yaml")
    return read.predictions.get(study, {})


def judged(study: str, results: TrainedResults, lab: Lab, reach: Mapping[str, str]) -> list[Finding]:
    """A claim for each prediction of a study, with what its rule leaves out of the sentence that it judges, if anything."""
    return [finding(name, each, results, reach.get(name, "")) for name, each in predictions(lab, study).items()]


def finding(name: str, prediction: Prediction, results: TrainedResults, reach: str = "") -> Finding:
    rule = prediction.rule
    models = tuple(name for name in rule.models if name in set(results.runs["variant"]))
    found = judged_claim(name, rule, rule.measures(results), statement=rule.sentence, sources=SOURCES, models=models)
    is_decisive = all(measure.n >= LEAST_RUNS for measure in found.measures) and not any(results.diverged(rule.models))
    is_so = found.verdict == prediction.expected and (found.verdict != UNDECIDED or is_decisive)
    is_open = found.verdict in (UNDECIDED, NOT_EVALUATED)
    came = "It came out so" if is_so else "It is still open" if is_open else "It came out otherwise"
    told = f"Expected before the first run: {prediction.expected}. {prediction.why} {came}. {reach}"
    return replace(found, remark=told.strip())
