"""That the study judges by the rule itself, counts what it says, and fails a rule that errs too often."""

import pandas as pd
import pytest

from pipeline import statistics
from pipeline.statistics import SUPPORTED, UNDECIDED
from pipeline.studies import CHECK, FAILS, OBSERVATION, PASSES
from pipeline.studies.paper import verdicts
from pipeline.studies.paper.verdicts import LOOKS, NULLS, POWERS, SIZES, Settings


@pytest.fixture(scope="module")
def few() -> Settings:
    return Settings(repetitions=60)


def test_the_rule_passes(lab, few):
    rates = verdicts.measure(few, lab)["rates"]
    outcomes = rates[["supported", "not_supported", "undecided", "not_evaluated"]]
    assert outcomes.sum(axis=1).tolist() == pytest.approx([1] * len(rates))
    assert len(rates) == len(SIZES) * (len(NULLS) + len(LOOKS) + sum(len(effects) for _, _, effects in POWERS.values()))
    errors, looking, power = verdicts.findings(few, {"rates": rates}, lab)
    assert (errors.kind, errors.verdict, power.kind) == (CHECK, PASSES, OBSERVATION)
    assert len(errors.measures) == len(NULLS) and errors.measures[0].limit == pytest.approx(0.05 + 3 * 0.028137, rel=1e-3)
    assert len(power.figure.axes) == len(POWERS)
    assert len(power.table.rows) == len(rates) / len(SIZES) - len(NULLS) - len(LOOKS)
    assert looking.kind == OBSERVATION and len(looking.measures) == len(SIZES)
    of_ten = rates[(rates["scenario"] == "Two models of one spread") & (rates["n"] == 10)]["supported"]
    assert of_ten.is_monotonic_increasing and of_ten.iloc[-1] > 0.95, "the same numbers serve every effect"


@pytest.mark.parametrize("wrong, verdict", [(0.064, PASSES), (0.066, FAILS)])
def test_a_rate_of_errors_on_both_sides_of_its_limit(lab, wrong, verdict):
    """0.05 + 3 √(0.05 · 0.95 / 2000) is 0.0646."""
    rows = [
        dict(scenario=name, unit="points", effect=1.0, n=n, repetitions=2000, supported=0.0, not_supported=0.0)
        for name in (*NULLS, *LOOKS, *POWERS)
        for n in SIZES
    ]
    rows[len(SIZES) + SIZES.index(5)] |= {"supported": wrong / 2, "not_supported": wrong / 2}
    errors, *_ = verdicts.findings(Settings(repetitions=2000), {"rates": pd.DataFrame(rows)}, lab)
    assert errors.verdict == verdict and errors.measures[1].note == "n = 5, the worst"


@pytest.mark.parametrize(
    "name, broken",
    [
        ("Two models of like spread", {"LEVEL": 0.5}),
        ("A share of one half", {"LEVEL": 0.8}),
        ("17 choices, one run each, that change nothing", {"LEAST_RUNS": 1, "LEVEL": 0.8}),
        ("The drops of three models", {"LEVEL": 0.5}),
    ],
)
def test_it_is_the_rule_itself_that_judges(lab, monkeypatch, name, broken):
    for constant, value in broken.items():
        monkeypatch.setattr(statistics, constant, value)
    monkeypatch.setattr(verdicts, "NULLS", {name: NULLS[name]})
    monkeypatch.setattr(verdicts, "LOOKS", {})
    monkeypatch.setattr(verdicts, "POWERS", {})
    rates = verdicts.measure(Settings(repetitions=100), lab)["rates"]
    assert (rates["supported"] + rates["not_supported"]).max() > 0.15


def test_divergence_that_is_not_counted_would_mislead(lab):
    """The runs of the better half alone say more than there is, and the rule does not believe them."""
    experiment, _ = NULLS["Two models, the worst runs of one diverging"]
    better = [1.0, 1.1] * 60
    assert experiment(verdicts.drawing(better), 10, 0.0) == SUPPORTED
    assert experiment(verdicts.drawing([-2.0, *better]), 10, 0.0) == UNDECIDED, "the first of ten runs diverges"


def test_one_that_looks_after_each_seed_takes_the_first_verdict():
    """With the first three seeds A is above B by far, and with the fourth it is not known any more."""
    experiment, effect = LOOKS["Two models, until the rule decides"]
    runs = {verdicts.QR: [5, 5.1, 5.2, -9], verdicts.VIT: [0, 0.1, 0.2, 0]}
    drawn = lambda spread, n, mean=0.0: runs[spread][:n]  # noqa: E731
    assert experiment(drawn, 3, effect) == experiment(drawn, 4, effect) == SUPPORTED
    runs[verdicts.QR] = [5, -9, 5.2, 5.1]
    assert experiment(drawn, 3, effect) == experiment(drawn, 4, effect) == UNDECIDED


def test_looking_errs_more_often_than_the_rule(lab, monkeypatch):
    monkeypatch.setattr(verdicts, "NULLS", {})
    monkeypatch.setattr(verdicts, "POWERS", {})
    rates = verdicts.measure(Settings(repetitions=1000), lab)["rates"].set_index("n")
    wrong = rates["supported"] + rates["not_supported"]
    assert wrong[3] == pytest.approx(0.05, abs=0.021) and wrong[10] > 0.09, "0.021 is three standard errors"


def test_no_experiment_draws_more_than_there_is(lab):
    for experiment, effect in (NULLS | LOOKS).values():
        experiment(verdicts.drawing([0.1 * (i % 7) for i in range(verdicts.NUMBERS)]), max(SIZES), effect)
