"""Judges claims about trained models by the rules in the claims.yaml files of pipeline/studies.

A claim refers to runs of Table 2 by variant, and to runs of a study by their names in the study's settings. The first
comparison of a claim is the primary one.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import ConfigDict, Field, model_validator
from scipy.stats import gmean

from pipeline.config import reading
from pipeline.config.params import Fraction, Name, NonNegativeFloat, PositiveFloat, Section
from pipeline.core.errors import UserError
from pipeline.statistics.verdicts import (
    MARGIN_OF_A_START,
    Verdict,
    judge,
    judge_contrast,
    judge_ratio,
    judge_share,
    judge_within,
    power_of_contrast,
    power_of_ranks,
)

GUESS_LOSS, GUESS_ACCURACY = math.log(10), 10.0  # loss (nats) and accuracy (%) of uniform guessing among ten classes
CONTRAST_WEIGHTS = {"drops": (-1, 2, -1), "gap": (1, -1, -1, 1)}  # kind of contrast → weights of mean accuracies
TRAINS = 0.5  # a run succeeds if its last train loss is below this fraction of GUESS_LOSS


class Results:
    """The training runs and their curves, by name.

    Args:
        tables: tables by name, as `tables_of` in pipeline/results/runs.py returns them. The column `variant` stands in for a
            missing column `name`.
        guess_loss: loss (nats) of a model that gives all classes the same probability.
    """

    def __init__(self, *tables: Mapping[str, pd.DataFrame], guess_loss: float = GUESS_LOSS) -> None:
        self.runs, self.histories, self.watched = (_concat_named(tables, key) for key in ("runs", "histories", "watched"))
        self.guess_loss = guess_loss

    def runs_of(self, name: str, status: str | None = None) -> pd.DataFrame:
        """Returns the existing runs called `name`. If `status` is given, returns only the runs with this status."""
        runs = self.runs[(self.runs["name"] == name) & (self.runs["status"] != "missing")]
        return runs if status is None else runs[runs["status"] == status]

    def counts(self, name: str) -> dict[str, int]:
        statuses = self.runs.loc[self.runs["name"] == name, "status"]
        return {status: int((statuses == status).sum()) for status in ("finished", "diverged", "missing")}

    def accuracies(self, name: str) -> list[float]:
        """Returns the test accuracy of each run, in per cent. A diverged run gets GUESS_ACCURACY."""
        runs = self.runs_of(name)
        return (100 * runs["test_accuracy"]).where(runs["status"] == "finished", GUESS_ACCURACY).astype(float).tolist()

    def losses(self, name: str) -> list[float]:
        """Returns the last train loss of each run. A diverged run gets GUESS_LOSS."""
        runs = self.runs_of(name)
        return runs["train_loss"].where(runs["status"] == "finished", GUESS_LOSS).astype(float).tolist()

    def curves(self, name: str) -> list[pd.DataFrame]:
        """Returns the history of each run, in order of seeds. A diverged run's history ends early."""
        own = self.histories[self.histories["name"] == name]
        return [curve for _, curve in own.groupby("seed")]

    def starting(self, name: str) -> list[int]:
        """Returns the seeds of the finished runs that have started to learn (see `starts`)."""
        return [int(curve["seed"].iloc[0]) for curve in self.curves_of_starting(name)]

    def accuracies_of_starting(self, name: str) -> list[float]:
        """Returns the test accuracies of the runs that start to learn, in per cent."""
        runs, seeds = self.runs_of(name), self.starting(name)
        return (100 * runs.loc[runs["seed"].isin(seeds), "test_accuracy"]).astype(float).tolist()

    def curves_of_starting(self, name: str) -> list[pd.DataFrame]:
        finished = set(self.runs_of(name, "finished")["seed"])
        curves = (curve for curve in self.curves(name) if curve["seed"].iloc[0] in finished)
        return [curve for curve in curves if starts(curve, self.guess_loss)]

    def last_watched(self, name: str, column: str) -> list[float]:
        """Returns the last value of a column of watched.csv for each finished run, averaged over layers."""
        own = self.watched[self.watched["name"] == name]
        finished = set(self.runs_of(name, "finished")["seed"])
        return [
            float(each.loc[each["epoch"] == each["epoch"].max(), column].mean())
            for seed, each in own.groupby("seed")
            if seed in finished
        ]


def _concat_named(tables: Sequence[Mapping[str, pd.DataFrame]], key: str) -> pd.DataFrame:
    parts = [table[key] for table in tables if key in table and len(table[key])]
    named = [part if "name" in part else part.assign(name=part["variant"]) for part in parts]
    columns = ["name", "seed", "status", "test_accuracy", "train_loss", "epoch"]
    return pd.concat(named) if named else pd.DataFrame(columns=columns)


@dataclass(frozen=True)
class Declared:
    """The numbers that determine a test's power: the paper's accuracies and our standard deviations, by model.

    We estimate the standard deviations from earlier runs, and declare them before we start the runs that test the claims.
    """

    accuracies: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)

    def effect(self, models: Sequence[str], weights: Sequence[float]) -> float:
        """Returns the paper's Σ wᵢ · accuracyᵢ, or NaN if at least one accuracy is missing from the paper."""
        if not set(models) <= self.accuracies.keys():
            return math.nan
        return sum(weight * self.accuracies[model] for weight, model in zip(weights, models, strict=True))

    def knows(self, models: Sequence[str]) -> bool:
        return set(models) <= self.accuracies.keys() & self.spreads.keys()


NOTHING = Declared()


class Claim(Section):
    """A sentence, its place in the paper, and the rule that judges the sentence.

    If we predict the verdict, `expected` and `why` state the prediction, written before the runs that test the claim.
    """

    sentence: str
    place: str
    expected: str | None = None
    why: str | None = None

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        """Returns a verdict for each comparison, the primary comparison first."""
        raise NotImplementedError


Sought = TypeVar("Sought", bound=Claim)


class Comparison(Claim):
    """A claim that compares the first and the second model of each pair."""

    compare: Annotated[list[Annotated[list[Name], Field(min_length=2, max_length=2)]], Field(min_length=1)]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self.compare)))

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        return {f"{first}_vs_{second}": self.verdict(first, second, results, declared) for first, second in self.compare}

    def verdict(self, first: str, second: str, results: Results, declared: Declared) -> Verdict:
        raise NotImplementedError


class Accuracy(Comparison):
    """The claim that the first model's test accuracy is above the second model's minus a margin (percentage points)."""

    kind: Literal["accuracy"]
    margin_points: NonNegativeFloat = 0.0

    def verdict(self, first: str, second: str, results: Results, declared: Declared) -> Verdict:
        ours, theirs = results.accuracies(first), results.accuracies(second)
        limit, power = -self.margin_points + 0.0, math.nan
        if declared.knows([first, second]) and ours and theirs:
            distance = declared.effect([first, second], (1, -1)) - limit
            power = power_of_ranks(distance, (declared.spreads[first], declared.spreads[second]), len(ours), len(theirs))
        return judge(ours, theirs, limit=limit, power=power)


class Within(Comparison):
    """The claim that the two models' test accuracies differ by less than a margin (percentage points)."""

    kind: Literal["within"]
    margin_points: PositiveFloat

    def verdict(self, first: str, second: str, results: Results, declared: Declared) -> Verdict:
        return judge_within(results.accuracies(first), results.accuracies(second), margin=self.margin_points)


class Loss(Comparison):
    """The claim that the first model's last train loss is below the second model's last train loss."""

    kind: Literal["loss"]

    def verdict(self, first: str, second: str, results: Results, declared: Declared) -> Verdict:
        return judge(results.losses(first), results.losses(second), side="below")


class Speed(Comparison):
    """The claim that the first model reaches a target train loss in fewer than `at_most_factor` × the second's epochs.

    `target_loss` computes the target from the second model's runs that start to learn. A run that never reaches the target
    takes infinitely many epochs.
    """

    kind: Literal["speed"]
    of_training: Fraction
    at_most_factor: PositiveFloat

    @model_validator(mode="after")
    def _factor_fits(self):
        if (product := self.at_most_factor * self.of_training) >= 1:
            why = "otherwise training ends before the factor can be exceeded"
            raise ValueError(f"at_most_factor × of_training must be below 1, not {product:g}; {why}")
        return self

    def verdict(self, first: str, second: str, results: Results, declared: Declared) -> Verdict:
        loss = target_loss(results.curves_of_starting(second), self.of_training)
        ours = [epochs_to_reach(curve, loss) for curve in results.curves(first)]
        theirs = [epochs_to_reach(curve, loss) for curve in results.curves(second)]
        return judge_ratio(ours, [] if math.isnan(loss) else theirs, self.at_most_factor)


class Contrast(Claim):
    """The claim that a contrast of mean test accuracies is above 0.

    drops   three models: accuracy falls more from the second to the third model than from the first to the second
    gap     four models: the first model is ahead of the second by more than the third model is ahead of the fourth
    """

    kind: Literal["drops", "gap"]
    models: list[Name]

    @model_validator(mode="after")
    def _models_fit(self):
        if len(self.models) != len(CONTRAST_WEIGHTS[self.kind]):
            expected = f"{len(CONTRAST_WEIGHTS[self.kind])} entries for {self.kind}"
            raise ValueError(f"models must have {expected}, not {len(self.models)}")
        return self

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        weights, samples, power = CONTRAST_WEIGHTS[self.kind], [results.accuracies(model) for model in self.models], math.nan
        if declared.knows(self.models) and min(map(len, samples)) > 1:
            spreads = [declared.spreads[model] for model in self.models]
            effect = declared.effect(self.models, weights)
            power = power_of_contrast(effect, weights, spreads, [len(sample) for sample in samples])
        return {self.kind: judge_contrast(samples, weights, power=power)}


class Stability(Claim):
    """The claim that more than `share` of a model's runs are stable: finished, with `largest_rise` ≤ `at_most_rise`."""

    kind: Literal["stability"]
    models: Annotated[list[Name], Field(min_length=1)]
    at_most_rise: Annotated[float, Field(gt=1)]
    share: Fraction

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        return {model: self.verdict(model, results) for model in self.models}

    def verdict(self, model: str, results: Results) -> Verdict:
        finished = set(results.runs_of(model, "finished")["seed"])
        stable = [
            curve["seed"].iloc[0] in finished and largest_rise(curve) <= self.at_most_rise for curve in results.curves(model)
        ]
        return judge_share(sum(stable), len(results.runs_of(model)), limit=self.share)


class Trains(Claim):
    """The claim that each model's share of successful runs (see `trains`) is above or below `share`, according to `side`."""

    kind: Literal["trains"]
    models: Annotated[list[Name], Field(min_length=1)]
    side: Literal["above", "below"] = "above"
    share: Fraction = 0.5

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        return {model: self.verdict(results.losses(model)) for model in self.models}

    def verdict(self, losses: list[float]) -> Verdict:
        return judge_share(sum(map(trains, losses)), len(losses), limit=self.share, side=self.side)


class Measured(Comparison):
    """The claim that the first model's last values are below `at_most_factor` × the second's in `columns` of watched.csv."""

    kind: Literal["measured"]
    columns: Annotated[list[str], Field(min_length=1)]
    at_most_factor: PositiveFloat

    def judge(self, results: Results, declared: Declared = NOTHING) -> dict[str, Verdict]:
        verdicts = {}
        for (first, second), column in itertools.product(self.compare, self.columns):
            ours, theirs = results.last_watched(first, column), results.last_watched(second, column)
            verdicts[f"{first}_vs_{second}_{column}"] = judge_ratio(ours, theirs, self.at_most_factor)
        return verdicts


AnyClaim = Annotated[
    Accuracy | Within | Loss | Speed | Contrast | Stability | Trains | Measured, Field(discriminator="kind")
]


class Spreads(Section):
    """Each model's standard deviations over earlier runs, fixed before we start the runs that test the claims."""

    accuracy: dict[Name, PositiveFloat] = Field(default_factory=dict)  # std of the test accuracy (percentage points)
    log_epochs: dict[Name, PositiveFloat] = Field(default_factory=dict)  # std of log(epochs until target loss is reached)


class ClaimsFile(Section):
    """The content of a claims.yaml. Every key except `spreads` is the name of a claim."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Name, AnyClaim]

    spreads: Spreads = Field(default_factory=Spreads)


def read_claims(path: str | Path) -> dict[str, AnyClaim]:
    """Reads the claims of a claims.yaml, by name. Raises UserError if an entry does not fit its kind of claim."""
    return dict(_read(path).__pydantic_extra__)


def read_claim(path: str | Path, name: str, kind: type[Sought]) -> Sought:
    """Reads one claim. Raises UserError if no claim has this name and kind."""
    claim = read_claims(path).get(name)
    if not isinstance(claim, kind):
        raise UserError(f"{path} has no claim {name} of the kind {kind.__name__.lower()}: run `git checkout {path}`.")
    return claim


def read_spreads(path: str | Path) -> Spreads:
    """Reads the spreads of a claims.yaml. Raises UserError as `read_claims` does."""
    return _read(path).spreads


def _read(path: str | Path) -> ClaimsFile:
    path = reading.in_repository(path)
    return reading.validate(ClaimsFile, reading.read_yaml(path), str(path))


def trains(loss: float) -> bool:
    """Returns whether a run's last train loss is below `TRAINS` times `GUESS_LOSS`."""
    return loss < TRAINS * GUESS_LOSS


def starts(curve: pd.DataFrame, guess_loss: float = GUESS_LOSS) -> bool:
    """Returns whether a run starts to learn.

    The train loss at the first point in the second half of training must be at least MARGIN_OF_A_START below `guess_loss`,
    the loss of uniform guessing.
    """
    late = curve.loc[curve["epoch"] >= curve["epoch"].max() / 2, "train_loss"]
    return len(late) > 0 and bool(late.iloc[0] <= guess_loss - MARGIN_OF_A_START)


def target_loss(curves: Iterable[pd.DataFrame], of_training: float) -> float:
    """Returns the geometric mean, over runs, of each run's lowest train loss in the first part of training.

    The first part is the fraction `of_training` of the epochs. Without runs, the mean is NaN.
    """
    lowest = []
    for curve in curves:
        epochs, losses = _points(curve)
        lowest.append(np.fmin.reduce(losses[epochs <= of_training * epochs.max()], initial=math.nan))  # fmin ignores NaN
    return float(gmean(lowest)) if lowest else math.nan


def epochs_to_reach(curve: pd.DataFrame, loss: float) -> float:
    """Returns the epoch at which a curve first falls to `loss`, interpolated log-linearly, or infinity if it never does."""
    epochs, losses = _points(curve)
    known = ~np.isnan(losses)
    epochs, losses = epochs[known], losses[known]
    there = np.flatnonzero(losses <= loss)
    if len(there) == 0:
        return math.inf
    ends = slice(max(there[0] - 1, 0), there[0] + 1)
    return float(np.interp(-math.log(loss), -np.log(losses[ends]), epochs[ends]))


def _points(curve: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns epochs and train losses as NumPy arrays, because simulations call this function often and pandas is slow."""
    return curve["epoch"].to_numpy(float), curve["train_loss"].to_numpy(float)


def largest_rise(curve: pd.DataFrame) -> float:
    """Returns the maximum over t of loss[t] / min(loss[:t + 1]), or infinity if any loss is not finite."""
    if not np.isfinite(curve[["train_loss", "test_loss"]].to_numpy(dtype=float)).all():
        return math.inf
    losses = curve["train_loss"].to_numpy()
    return float((losses / np.minimum.accumulate(losses)).max())
