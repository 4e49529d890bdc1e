"""Section 5: whether each of its claims holds in our runs, by the rules beside the sentences in pipeline/paper.yaml.

It measures nothing of its own: it reads what the stage `tables` gathered of Table 2's runs.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field, model_validator
from scipy.stats import gmean

from pipeline.core import params
from pipeline.core.params import Fraction, Name, NonNegativeFloat, Paper, PositiveFloat, Section
from pipeline.lab import Lab
from pipeline.report.numbers import number, plural
from pipeline.statistics import (
    LEAST_RUNS,
    NOT_EVALUATED,
    UNDECIDED,
    Judgement,
    judge,
    judge_share,
    runs_needed,
    seeds_needed,
)
from pipeline.studies import CLAIM, OBSERVATION, Finding, Measure, Table, Tables

place = 0
OURS = "our own"  # the place of a sentence that no document has
SOURCES = ["paper_outputs/tables/runs.csv", "paper_outputs/tables/histories.csv"]
NO_RUNS = pd.DataFrame(columns=["variant", "seed", "status", "test_accuracy"])
NO_HISTORIES = pd.DataFrame(columns=["variant", "seed", "epoch", "train_loss", "test_loss"])


def account(statuses: pd.Series) -> str:
    """How many runs finished, and how many did not: n = 3, 1 diverged, 1 missing."""
    count = statuses.value_counts()
    others = [f", {count[status]} {status}" for status in ("diverged", "missing") if status in count]
    return f"n = {count.get('finished', 0)}{''.join(others)}"


def is_trained(statuses: pd.Series) -> bool:
    """Whether any run is there, diverged or not."""
    return bool((statuses != "missing").any())


def known(statuses: pd.Series) -> str:
    """`account` without its n, or not evaluated where there is no run at all."""
    return account(statuses).removeprefix("n = ") if is_trained(statuses) else NOT_EVALUATED


def progress(statuses: Sequence[pd.Series], things: str) -> str:
    """Of how many things a run is there: 3 of 11 choices trained so far, 1 of which diverged."""
    there = [each for each in statuses if is_trained(each)]
    lost = sum((each != "finished").all() for each in there)
    diverged = f", {lost} of which diverged" if lost else ""
    return f"{len(there) or 'None'} of {len(statuses)} {things} trained so far{diverged}"


class Results:
    """Runs as the rules ask for them: those of Table 2, or others with the same two tables."""

    def __init__(self, lab: Lab, tables: Tables | None = None, label: Callable[[str], str] | None = None) -> None:
        self.label, tables = label or lab.label, lab.tables if tables is None else tables
        self.runs, self.histories = tables.get("runs", NO_RUNS), tables.get("histories", NO_HISTORIES)

    def rows(self, model: str, status: str) -> pd.DataFrame:
        """The runs of a model with this status."""
        return self.runs[(self.runs["variant"] == model) & (self.runs["status"] == status)]

    def accuracies(self, model: str) -> list[float]:
        """Test accuracy in per cent of each run that finished."""
        return (100 * self.rows(model, "finished")["test_accuracy"].dropna()).tolist()

    def curves(self, model: str) -> dict[int, pd.DataFrame]:
        """The history of each run that finished, by its seed."""
        of_model = self.histories[self.histories["variant"] == model]
        return {seed: of_model[of_model["seed"] == seed] for seed in self.rows(model, "finished")["seed"]}

    def diverged(self, models: Sequence[str]) -> list[int]:
        """How many runs of each of these models did."""
        return [len(self.rows(model, "diverged")) for model in models]

    def statuses(self, model: str) -> pd.Series:
        """What became of each run of a model: finished, diverged or missing."""
        return self.runs.loc[self.runs["variant"] == model, "status"]

    def account(self, models: Sequence[str]) -> str:
        """`account` of each model: ViT n = 3, 1 missing."""
        return "; ".join(f"{self.label(model)} {account(self.statuses(model))}" for model in models)


def of_recipe(lab: Lab) -> Tables:
    """The tables of Table 2's runs, but for models to which params.yaml gives other settings than the paper's recipe: with
    them the runs of studies have nothing to be compared."""
    same = [name for name in lab.params.variants if params.resolve(lab.params, name) == lab.config(name)]
    return {name: table[table["variant"].isin(same)] for name, table in lab.tables.items() if "variant" in table}


class Contrast(NamedTuple):
    """Σ weight · mean accuracy of a model, in points, is to be above `limit`."""

    what: str
    models: Sequence[str]
    weights: Sequence[float]
    limit: float


class Claim(Section):
    """A sentence of the paper and what it is taken to mean. Every kind adds its models and thresholds, and judges itself."""

    title: str
    sentence: str
    place: str
    definition: str
    how: ClassVar[str] = "Judged by Welch's interval of the difference over seeds."

    @model_validator(mode="after")
    def _definition_formats(self):
        try:
            self.rule()
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"definition cannot be filled in ({error}); in braces stands a key beside it") from None
        return self

    def rule(self) -> str:
        """The definition with the values of its keys in place, and how it is judged."""
        return f"{self.definition.format(**self.model_dump())} {self.how}"

    def contrasts(self, label: Callable[[str], str]) -> list[Contrast]:
        """The comparisons of accuracies that it makes, if any."""
        return []

    def measures(self, results: Results) -> list[Measure]:
        """Each contrast as the rule judges it."""
        contrasts = self.contrasts(results.label)
        return [measure_contrast(contrast, results, len(contrasts)) for contrast in contrasts]


class Comparison(Claim):
    """About pairs of models, of which the first is to do better."""

    compare: Annotated[list[Annotated[list[Name], Field(min_length=2, max_length=2)]], Field(min_length=1)]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self.compare)))


class AccuracyClaim(Comparison):
    """The first model is more accurate than the second, or by no more than the tolerance less."""

    kind: Literal["accuracy"]
    tolerance_points: NonNegativeFloat

    def rule(self) -> str:
        strict = " All of it has to be above 0, so that of equal models it is undecided." * (self.tolerance_points == 0)
        return super().rule() + strict

    def contrasts(self, label: Callable[[str], str]) -> list[Contrast]:
        return [Contrast(" − ".join(map(label, pair)), pair, (1, -1), 0.0 - self.tolerance_points) for pair in self.compare]


class DropsClaim(Claim):
    """Along a chain of three models, the second step costs more accuracy than the first."""

    kind: Literal["drops"]
    models: Annotated[list[Name], Field(min_length=3, max_length=3)]

    def contrasts(self, label: Callable[[str], str]) -> list[Contrast]:
        first, second, third = map(label, self.models)
        return [Contrast(f"({second} − {third}) − ({first} − {second})", self.models, (-1, 2, -1), 0.0)]


class SpeedClaim(Comparison):
    """The first model reaches a train loss of the second's in less than a factor times its epochs."""

    kind: Literal["speed"]
    of_training: Fraction
    at_most_factor: PositiveFloat
    how = (
        "The loss is the geometric mean over the second model's runs. Judged by Welch's interval of the difference of mean "
        "log epochs; where a run of the first model never gets there, by the share of seeds that are fast enough."
    )

    @model_validator(mode="after")
    def _factor_fits(self):
        if self.at_most_factor * self.of_training >= 1:
            raise ValueError("at_most_factor × of_training must be below 1, or training ends before it is exceeded")
        return self

    def measures(self, results: Results) -> list[Measure]:
        return [self.measure(pair, results) for pair in self.compare]

    def measure(self, pair: list[str], results: Results) -> Measure:
        """The ratio of the epochs of one pair, or the share of seeds."""
        curves = [results.curves(model) for model in pair]
        loss = target_loss(curves[1].values(), self.of_training)
        first, second = (pd.Series({s: epochs_to_reach(c, loss) for s, c in each.items()}, dtype=float) for each in curves)
        what, account = " / ".join(map(results.label, pair)), results.account(pair)
        rule = {"family": len(self.compare), "diverged": results.diverged(pair)}
        if why := no_comparison(loss, first, second):
            is_there = all(len(own) or lost for own, lost in zip((first, second), rule["diverged"], strict=True))
            n, verdict = min(len(first), len(second)), UNDECIDED if is_there else NOT_EVALUATED
            judged = Judgement(math.nan, math.nan, math.nan, n, verdict, why)
        elif never := int(np.isinf(first).sum()):
            fast = (first / second).dropna() < self.at_most_factor  # of the seeds that both have
            account += f"; {never} of {len(first)} runs never get there"
            diverged = sum(rule["diverged"])
            return measure_share(f"{what}: fast enough", fast, 0.5, account, family=rule["family"], diverged=diverged)
        else:
            logs = [np.log(epochs).tolist() for epochs in (first, second)]
            judged = judge_means(logs, (1, -1), limit=math.log(self.at_most_factor), side="below", **rule)
            judged = as_ratio(judged)
        scale = {"unit": "× the epochs", "side": "below", "limit": self.at_most_factor}
        return Measure(what, **judged.as_measure(account), **scale)


class StabilityClaim(Claim):
    """More than a share of the runs neither diverge nor rise far above their lowest loss."""

    kind: Literal["stability"]
    models: Annotated[list[Name], Field(min_length=1)]
    at_most_rise: Annotated[float, Field(gt=1)]
    share: Fraction
    how = "Judged by Clopper and Pearson's interval of the share; a run that diverges counts against it."

    def measures(self, results: Results) -> list[Measure]:
        return [self.measure(model, results) for model in self.models]

    def measure(self, model: str, results: Results) -> Measure:
        """The share of one model's runs."""
        rises, account = [largest_rise(curve) for curve in results.curves(model).values()], results.account([model])
        if rises:
            account += f"; largest rise {number(max(rises))} × the lowest loss before"
        stable = [rise <= self.at_most_rise for rise in rises] + [False] * sum(results.diverged([model]))
        what = f"{results.label(model)}: share of stable runs"
        return measure_share(what, stable, self.share, account, family=len(self.models), diverged=0)  # which are counted


class Claims(Section):
    """The section `claims` of pipeline/paper.yaml."""

    claims: dict[Name, Annotated[AccuracyClaim | SpeedClaim | DropsClaim | StabilityClaim, Field(discriminator="kind")]]


def read_claims(paper: Paper) -> dict[str, Claim]:
    """The paper's claims by their names. Raises UserError where paper.yaml has something else than a rule needs."""
    return params.validate(Claims, {"claims": paper.claims}, "pipeline/paper.yaml").claims


def findings(settings: None, tables: Tables, lab: Lab) -> list[Finding]:
    claims = {name: claim for name, claim in read_claims(lab.paper).items() if not isinstance(claim, StabilityClaim)}
    seeds = Results(lab).runs["seed"].unique().tolist()
    by_seeds = {n: judge_all(claims, of_seeds(seeds[:n], lab)) for n in range(LEAST_RUNS, len(seeds))}
    found = judge_all(claims, Results(lab))
    return [*found, with_fewer_seeds(found, by_seeds, len(seeds))] if by_seeds and found else found


def judge_all(claims: dict[str, Claim], results: Results) -> list[Finding]:
    return [judged_claim(name, claim, claim.measures(results), sources=SOURCES) for name, claim in claims.items()]


def of_seeds(seeds: Sequence[int], lab: Lab) -> Results:
    """Table 2's runs with these seeds."""
    return Results(lab, {name: table[table["seed"].isin(seeds)] for name, table in lab.tables.items() if "seed" in table})


def with_fewer_seeds(found: list[Finding], by_seeds: dict[int, list[Finding]], n: int) -> Finding:
    """How the claims came out before the last seeds were there, by how many were."""
    rows, told, changed = [], [], Counter()
    for now, *before in zip(found, *by_seeds.values(), strict=True):
        verdicts = dict(zip(by_seeds, (each.verdict for each in before), strict=True))
        others = [f"{verdict} with the first {k}" for k, verdict in verdicts.items() if verdict != now.verdict]
        changed.update(k for k, verdict in verdicts.items() if verdict != now.verdict)
        told += [f"“{now.title}”, {', '.join(others)}"] if others else []
        rows.append([now.title, *verdicts.values(), now.verdict])
    count = f"{len(told)} of {plural(len(found), 'claim')}" if told else "no claim"
    in_short = f"With fewer than the {n} seeds {count} came out otherwise{': ' if told else ''}{'; '.join(told)}."
    return Finding(
        id="section_5_seeds",
        title="The verdicts with fewer seeds",
        place=OURS,
        kind=OBSERVATION,
        statement="How each claim comes out with the first seeds alone. Where seeds are listed after a look at verdicts, "
        "the rule errs more often than it says (What looking after every seed does); when each was, git’s history of "
        "`params.yaml` tells.",
        in_short=in_short,
        measures=[Measure(f"Claims that come out otherwise with the first {k} seeds", changed[k]) for k in by_seeds],
        table=Table(["Claim", *(f"First {k} seeds" for k in by_seeds), f"All {n}"], rows, "l" * (len(by_seeds) + 2)),
        limitation=in_short if told else "",
        sources=SOURCES,
    )


def judged_claim(name: str, claim: Claim, measures: list[Measure], **others) -> Finding:
    """A claim with what its rule was given to judge, and other fields of the finding."""
    fields = {"statement": claim.sentence if claim.place == OURS else f"“{claim.sentence}”", "models": tuple(claim.models)}
    return Finding(
        id=name,
        title=claim.title,
        place=claim.place,
        kind=CLAIM,
        measures=measures,
        rule=claim.rule(),
        **(fields | others),
    )


def judge_means(samples: list[list[float]], weights: Sequence[float], *, diverged: Sequence[int], **asked) -> Judgement:
    """`judge`, with a note on how many seeds would decide what is undecided: none where a run diverged, or too few runs
    are there to know a spread from."""
    judged = judge(samples, weights, diverged=diverged, **asked)
    if any(diverged) or judged.n < LEAST_RUNS:
        return judged
    return with_outlook(judged, seeds_needed(samples, weights, **asked))


def as_ratio(judged: Judgement) -> Judgement:
    """What was judged of logarithms, as a ratio."""
    return replace(judged, **{end: math.exp(getattr(judged, end)) for end in ("value", "low", "high")})


def with_outlook(judged: Judgement, needed: int | None) -> Judgement:
    """With a note on how many seeds would decide what is undecided, where more would."""
    if judged.verdict != UNDECIDED or needed is None or needed <= judged.n:
        return judged
    return replace(judged, note=f"{judged.note}; about {needed} seeds would decide it")


def measure_contrast(contrast: Contrast, results: Results, family: int) -> Measure:
    """A combination of mean accuracies against its limit."""
    samples = [results.accuracies(model) for model in contrast.models]
    asked = {"side": "above", "limit": contrast.limit}
    diverged = results.diverged(contrast.models)
    judged = judge_means(samples, contrast.weights, family=family, diverged=diverged, **asked)
    return Measure(contrast.what, **judged.as_measure(results.account(contrast.models)), unit="points", **asked)


def measure_share(
    what: str, successes: Sequence[bool], limit: float, account: str, *, family: int, diverged: int
) -> Measure:
    """The share of runs that succeed against its limit."""
    n = len(successes)
    judged = judge_share(sum(successes), n, limit=limit, family=family, diverged=diverged)
    if n and not diverged:
        judged = with_outlook(judged, runs_needed(judged.value, limit=limit, family=family))
    return Measure(what, **judged.as_measure(account), unit="of the runs", side="above", limit=limit)


def target_loss(curves: Iterable[pd.DataFrame], of_training: float) -> float:
    """The geometric mean of the lowest train loss of each run in the first part of its training; NaN where there is none."""
    lowest = [curve.loc[curve["epoch"] <= of_training * curve["epoch"].max(), "train_loss"].min() for curve in curves]
    return float(gmean(lowest)) if lowest else math.nan


def epochs_to_reach(curve: pd.DataFrame, loss: float) -> float:
    """The epoch at which a curve first falls to `loss`, log-linear between its points; infinite if it never does."""
    curve = curve.dropna(subset=["train_loss"])
    epochs, losses = curve["epoch"].to_numpy(), curve["train_loss"].to_numpy()
    there = np.flatnonzero(losses <= loss)
    if len(there) == 0:
        return math.inf
    ends = slice(max(there[0] - 1, 0), there[0] + 1)
    return float(np.interp(-math.log(loss), -np.log(losses[ends]), epochs[ends]))


def no_comparison(loss: float, first: pd.Series, second: pd.Series) -> str:
    """Why the epochs of two models' runs cannot be compared, if so."""
    if first.empty or second.empty:
        return "no run finished"
    if not loss > 0:
        return "the second model has no train loss to compare at"
    if 0 in (*first, *second):
        return "a run is at the second model's loss before any training"
    if never := np.isinf(second).sum():
        return f"{never} of {len(second)} runs of the second model never come down to their own mean"
    return ""


def largest_rise(curve: pd.DataFrame) -> float:
    """max over t of loss[t] / min(loss[:t + 1]): 1 for a curve that never rises, infinite where a loss is not finite."""
    if not np.isfinite(curve[["train_loss", "test_loss"]].to_numpy(dtype=float)).all():
        return math.inf
    losses = curve["train_loss"].to_numpy()
    return float((losses / np.minimum.accumulate(losses)).max())
