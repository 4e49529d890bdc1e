"""Footnote 6: whether ViT and ViT (no skip) differ by more on harder data than on MNIST.

Both are trained by the paper's recipe on each of the data sets that is there, as `python -m pipeline.fetch kmnist` puts it
there; the study downloads none. MNIST's runs are those of Table 2.
"""

import math
from typing import Annotated

import pandas as pd
from pydantic import Field

from pipeline.core import params
from pipeline.core.params import Name, Overrides, Paper, Section, Seeds
from pipeline.lab import Lab
from pipeline.report.numbers import ABSENT, fixed, interval, signed
from pipeline.statistics import summarise
from pipeline.studies import Finding, Measure, Table, Tables
from pipeline.studies.paper.left_open import Choice, collect
from pipeline.studies.paper.section_5 import Claim, Results, account, judge_means, judged_claim, of_recipe
from pipeline.training import data

place = 10
MNIST = "mnist"
NAMES = {MNIST: "MNIST", "fashion_mnist": "Fashion-MNIST", "kmnist": "KMNIST", "cifar10": "CIFAR-10"}


class Settings(Section):
    seeds: Seeds


class GapClaim(Claim):
    """The first model is ahead of the second by more on each of these data sets than on MNIST."""

    models: Annotated[list[Name], Field(min_length=2, max_length=2)]
    data: Annotated[list[Name], Field(min_length=1)]
    how = "Judged by Welch's interval of the difference of the two differences over seeds."


def read_claim(paper: Paper) -> GapClaim:
    """The claim and its rule. Raises UserError where paper.yaml has something else."""
    return params.validate(GapClaim, paper.footnote_6, "pipeline/paper.yaml: footnote_6")


def choices(paper: Paper) -> list[Choice]:
    """Both models on every data set."""
    claim = read_claim(paper)
    return [Choice(model, "data.source", source) for source in claim.data for model in claim.models]


def trainings(settings: Settings, lab: Lab) -> list[tuple[str, Overrides, int]]:
    there = [choice for choice in choices(lab.paper) if data.folder(choice.value).exists()]
    return [(choice.variant, choice.overrides, seed) for choice in there for seed in settings.seeds]


def measure(settings: Settings, lab: Lab) -> Tables:
    return {"runs": collect([(choice, seed) for choice in choices(lab.paper) for seed in settings.seeds], lab)}


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    claim, table_2 = read_claim(lab.paper), Results(lab, of_recipe(lab)).runs
    if lab.params.data.source != MNIST:
        table_2 = table_2[:0]
    table_2 = table_2.assign(value=MNIST, test_accuracy=100 * table_2["test_accuracy"])
    found = pd.concat([each[["value", "variant", "status", "test_accuracy"]] for each in (table_2, tables["runs"])])
    of = {source: samples(found[found["value"] == source], claim.models) for source in (MNIST, *claim.data)}
    measures = [gap(source, found, of, claim) for source in claim.data]
    return [
        judged_claim(
            "harder_data",
            claim,
            measures,
            table=accuracies(of, measures, list(map(lab.label, claim.models))),
            remark="A data set is judged where it is: fetch it, as with `python -m pipeline.fetch kmnist`, and `dvc repro`.",
            sources=["paper_outputs/tables/runs.csv"],
        )
    ]


def samples(found: pd.DataFrame, models: list[str]) -> list[list[float]]:
    """Test accuracies in per cent of each model's finished runs."""
    finished = found[found["status"] == "finished"]
    return [finished.loc[finished["variant"] == model, "test_accuracy"].dropna().tolist() for model in models]


def gap(source: str, found: pd.DataFrame, of: dict[str, list[list[float]]], claim: GapClaim) -> Measure:
    """By how much more the models differ on a data set than on MNIST."""
    ours = found[found["value"].isin([source, MNIST]) & found["variant"].isin(claim.models)]
    asked = {"side": "above", "limit": 0.0}
    lost = [
        int(((ours["value"] == name) & (ours["variant"] == model) & (ours["status"] == "diverged")).sum())
        for name in (source, MNIST)
        for model in claim.models
    ]
    judged = judge_means(of[source] + of[MNIST], (1, -1, -1, 1), diverged=lost, family=len(claim.data), **asked)
    counted = [
        f"{NAMES.get(name, name)} {account(ours.loc[ours['value'] == name, 'status'])} of both models"
        for name in (source, MNIST)
    ]
    what = f"{NAMES.get(source, source)}: difference beyond MNIST's"
    return Measure(what, **judged.as_measure("; ".join(counted)), unit="points", **asked)


def accuracies(of: dict[str, list[list[float]]], measures: list[Measure], labels: list[str]) -> Table:
    """Mean accuracies of both models on each data set, and how they differ."""
    rows = []
    for (source, both), each in zip(of.items(), [None, *measures], strict=True):
        first, second = (summarise(sample).mean for sample in both)
        is_there = each is not None and not math.isnan(each.value)
        beyond = f"{signed(each.value, 2)}\n{interval(each.low, each.high, 2)}" if is_there else ABSENT
        rows.append([NAMES.get(source, source), fixed(first, 2), fixed(second, 2), signed(first - second, 2), beyond])
    note = "Mean test accuracies in per cent, differences in points, and the 95% interval of the last column."
    return Table(["Data", *labels, "Difference", "Beyond MNIST's"], rows, note=note)
