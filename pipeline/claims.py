"""Whether each claim of the paper's Section 5 holds in our runs, by the rules under `claims` in params.yaml.

Models are compared seed by seed, so that both sides share their random numbers: one number per seed, which the claim
asks to be on one side of a limit. The claim is supported if the whole t-interval of their mean is on that side, not
supported if the whole interval is on the other side, and undecided in between. One seed alone decides nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pipeline.params import AccuracyClaim, AnyClaim, DropsClaim, SpeedClaim, StabilityClaim
from pipeline.summary import rounded, summarise

SUPPORTED, NOT_SUPPORTED, UNDECIDED, NOT_EVALUATED = "supported", "not supported", "undecided", "not evaluated"
VERDICTS = (SUPPORTED, NOT_SUPPORTED, UNDECIDED, NOT_EVALUATED)


@dataclass(frozen=True)
class Results:
    """Evaluate's tables `runs` and `histories`, and the confidence of the intervals."""

    runs: pd.DataFrame
    histories: pd.DataFrame
    confidence: float

    def seeds(self, variant: str, *status: str) -> list[int]:
        """The seeds of a variant with one of these statuses, or all that params.yaml lists."""
        rows = self.runs[self.runs["variant"] == variant]
        return list(rows["seed"] if not status else rows.loc[rows["status"].isin(status), "seed"])

    def accuracies(self, variant: str) -> dict[int, float]:
        """Test accuracy in per cent of each seed that finished."""
        rows = self.runs[(self.runs["variant"] == variant) & (self.runs["status"] == "finished")]
        return dict(zip(rows["seed"], 100 * rows["test_accuracy"], strict=True))

    def curves(self, variant: str, *status: str) -> dict[int, pd.DataFrame]:
        """The history of each seed with one of these statuses."""
        rows = self.histories[self.histories["variant"] == variant]
        return {seed: rows[rows["seed"] == seed] for seed in self.seeds(variant, *status)}


@dataclass(frozen=True)
class Measure:
    """One comparison of a claim: `value` over `n` seeds with its interval, which is to be above or below `limit`."""

    models: tuple[str, ...]
    value: float
    low: float
    high: float
    n: int
    unit: str
    side: str
    limit: float
    verdict: str
    note: str

    @property
    def favourable(self) -> bool:
        """Whether the value itself is on the claim's side of the limit."""
        return self.value > self.limit if self.side == "above" else self.value < self.limit


def judge(claim: AnyClaim, results: Results) -> tuple[str, list[Measure]]:
    """The verdict on a claim, and the measures that it rests on."""
    measures = JUDGES[type(claim)](claim, results)
    return combine([measure.verdict for measure in measures]), measures


def combine(verdicts: list[str]) -> str:
    """All must be supported for a claim about several models to be; one that is not supported is enough against it."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return NOT_SUPPORTED if NOT_SUPPORTED in verdicts else UNDECIDED


def judge_accuracy(claim: AccuracyClaim, results: Results) -> list[Measure]:
    """Test accuracy of the first minus that of the second, above −tolerance."""
    measures = []
    for pair in claim.compare:
        first, second = map(results.accuracies, pair)
        difference = {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}
        measures.append(compare(pair, difference, results, "points", above=0 - claim.tolerance_points))
    return measures


def judge_drops(claim: DropsClaim, results: Results) -> list[Measure]:
    """How much more test accuracy the second step of a chain of three models costs than the first, above 0."""
    first, second, third = map(results.accuracies, claim.models)
    seeds = first.keys() & second.keys() & third.keys()
    excess = {seed: (second[seed] - third[seed]) - (first[seed] - second[seed]) for seed in seeds}
    return [compare(claim.models, excess, results, "points", above=0)]


def judge_speed(claim: SpeedClaim, results: Results) -> list[Measure]:
    """Epochs of the first over epochs of the second, below the factor.

    Both are counted to the lowest train loss that the second has in the first part, `of_training`, of its training.
    """
    measures = []
    for pair in claim.compare:
        first, second = (results.curves(variant, "finished") for variant in pair)
        seeds = first.keys() & second.keys()
        ratio = {seed: epochs_ratio(first[seed], second[seed], claim.of_training) for seed in seeds}
        never = sum(not reached for _, reached in ratio.values())
        ratio = {seed: value for seed, (value, _) in ratio.items()}
        note = f"{never} of {len(seeds)} runs never got there and count with all their epochs" if never else ""
        measures.append(compare(pair, ratio, results, "× the epochs", note, below=claim.at_most_factor))
    return measures


def epochs_ratio(first: pd.DataFrame, second: pd.DataFrame, of_training: float) -> tuple[float, bool]:
    """See `judge_speed`; and whether the first gets there at all. If not, the ratio is a bound, above every factor."""
    part = second[second["epoch"] <= of_training * second["epoch"].iloc[-1]]
    lowest = part.loc[part["train_loss"].idxmin()]
    if lowest["epoch"] == 0:  # the second has learnt nothing: there is no loss to compare at
        return math.nan, True
    epoch = epochs_to_reach(first, lowest["train_loss"])
    reached = math.isfinite(epoch)
    return (epoch if reached else first["epoch"].iloc[-1]) / lowest["epoch"], reached


def epochs_to_reach(curve: pd.DataFrame, loss: float) -> float:
    """The epoch at which a curve first falls to `loss`, log-linear between its points; infinite if it never does."""
    epochs, losses = curve["epoch"].to_numpy(), curve["train_loss"].to_numpy()
    there = np.flatnonzero(losses <= loss)
    if len(there) == 0:
        return math.inf
    i = there[0]
    if i == 0:
        return float(epochs[0])
    way = math.log(losses[i - 1] / loss) / math.log(losses[i - 1] / losses[i])
    return float(epochs[i - 1] + way * (epochs[i] - epochs[i - 1]))


def compare(
    models: list[str], values: dict[int, float], results: Results, unit: str, note: str = "", **limit: float
) -> Measure:
    """The measure of one number per seed against a limit: `above=` or `below=`."""
    ((side, bound),) = limit.items()
    sign = 1 if side == "above" else -1
    listed = set().union(*map(results.seeds, models))
    used = [value for value in values.values() if math.isfinite(value)]
    s = summarise(used, results.confidence)
    verdict, reason = decide(sign * (s.mean - bound), s.n, s.high - s.mean)
    left_out = len(listed) - s.n
    omission = f"{left_out} of {len(listed)} seeds left out, diverged or missing" if s.n and left_out else ""
    note = "; ".join(filter(None, (reason, note, omission)))
    return Measure(tuple(models), *map(rounded, (s.mean, s.low, s.high)), s.n, unit, side, bound, verdict, note)


def decide(margin: float, n: int, half: float) -> tuple[str, str]:
    """Verdict and note for a mean that is `margin` on the claim's side of its limit, with an interval of ± `half`."""
    if n == 0:
        return NOT_EVALUATED, "no run"
    if n > 1 and abs(margin) > half:
        return (SUPPORTED if margin > 0 else NOT_SUPPORTED), ""
    side = "for" if margin > 0 else "against"
    return UNDECIDED, f"{'one seed' if n == 1 else 'the interval contains the limit'}; the value speaks {side} it"


def judge_stability(claim: StabilityClaim, results: Results) -> list[Measure]:
    """The largest rise of a train loss over the lowest one recorded before it, below a limit; no divergence."""
    measures = []
    for model in claim.models:
        curves = results.curves(model, "finished", "diverged").values()
        diverged = len(results.seeds(model, "diverged"))
        worst = max((largest_rise(curve["train_loss"].dropna().to_numpy()) for curve in curves), default=math.nan)
        finite = all(np.isfinite(curve[["train_loss", "test_loss"]]).all(axis=None) for curve in curves)
        verdict, note = SUPPORTED, ""
        if not curves:
            verdict, note = NOT_EVALUATED, "no run"
        elif diverged or not finite or worst > claim.at_most_rise:
            verdict, note = NOT_SUPPORTED, f"{diverged} of {len(curves)} runs diverged" if diverged else ""
        elif len(curves) < claim.at_least_runs:
            verdict, note = UNDECIDED, f"no fault in {len(curves)} of at least {claim.at_least_runs} runs"
        scale = (len(curves), "× the lowest loss before", "below", claim.at_most_rise)
        measures.append(Measure((model,), rounded(worst), math.nan, math.nan, *scale, verdict, note))
    return measures


def largest_rise(losses: np.ndarray) -> float:
    """max over t of loss[t] / min(loss[:t + 1]): 1 for a curve that never rises."""
    return float((losses / np.minimum.accumulate(losses)).max())


JUDGES = {
    AccuracyClaim: judge_accuracy,
    DropsClaim: judge_drops,
    SpeedClaim: judge_speed,
    StabilityClaim: judge_stability,
}
