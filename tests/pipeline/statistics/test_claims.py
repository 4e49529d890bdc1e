"""Each kind of claim, on made-up runs: what it compares, and that failure counts as failure."""

import math

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.statistics.claims import (
    GUESS_LOSS,
    Accuracy,
    Declared,
    Loss,
    Results,
    epochs_to_reach,
    read_claim,
    read_claims,
    read_spreads,
    starts,
)
from pipeline.statistics.verdicts import CONTRADICTED, NOT_TESTABLE, NOT_TRAINED, OPEN_SAME, REPRODUCED

BASICS = {"sentence": "It is so.", "place": "Section 5"}


def runs(**accuracies: list[float | None]) -> Results:
    """Runs of each name with these accuracies; None diverged. Their last train loss is 1 − accuracy."""
    rows, histories = [], []
    for name, values in accuracies.items():
        for seed, value in enumerate(values):
            status = "diverged" if value is None else "finished"
            loss = None if value is None else 1 - value
            rows.append({"name": name, "seed": seed, "status": status, "test_accuracy": value, "train_loss": loss})
            losses = [2.0, 1.0, math.nan if value is None else loss]
            histories.append(
                pd.DataFrame({"epoch": [0, 1, 2], "train_loss": losses, "test_loss": losses}).assign(name=name, seed=seed)
            )
    return Results({"runs": pd.DataFrame(rows), "histories": pd.concat(histories)})


def claim(tmp_path, **fields):
    files.write_json(tmp_path / "claims.yaml", {"it": BASICS | fields})  # JSON is YAML
    return read_claims(tmp_path / "claims.yaml")["it"]


def test_spreads_are_declared_beside_the_claims(tmp_path):
    path = tmp_path / "claims.yaml"
    own = BASICS | {"kind": "loss", "compare": [["a", "b"]]}
    files.write_json(path, {"spreads": {"accuracy": {"a": 0.2}}, "it": own})
    assert list(read_claims(path)) == ["it"] and read_spreads(path).accuracy == {"a": 0.2}
    files.write_json(path, {"spreads": {"accuracy": {"a": 0.0}}, "it": own})
    with pytest.raises(UserError, match=r"spreads\.accuracy\.a .* not 0"):
        read_claims(path)
    files.write_json(path, {"spreads": {}, "It": own})
    with pytest.raises(UserError, match=r"must match .*'It'"):
        read_claims(path)


def test_a_claim_is_asked_for_by_its_kind(tmp_path):
    claim(tmp_path, kind="loss", compare=[["a", "b"]])
    path = tmp_path / "claims.yaml"
    assert read_claim(path, "it", Loss).compare == [["a", "b"]]
    for name, kind in (("it", Accuracy), ("other", Loss)):
        with pytest.raises(UserError, match=f"claims.yaml has no claim {name} of the kind {kind.__name__.lower()}"):
            read_claim(path, name, kind)


def test_accuracy_with_its_margin_and_the_papers_effect(tmp_path):
    accuracy = claim(tmp_path, kind="accuracy", compare=[["a", "b"], ["c", "b"]], margin_points=0.5)
    results = runs(a=[0.97, 0.971, 0.969], b=[0.97, 0.972, 0.974], c=[0.9, 0.91, 0.92])
    verdicts = accuracy.judge(results, Declared({"a": 97.0, "b": 97.0}, {"a": 1.0, "b": 1.0}))
    assert list(verdicts) == ["a_vs_b", "c_vs_b"]
    assert verdicts["a_vs_b"].estimate == pytest.approx(-0.2) and verdicts["a_vs_b"].limit == -0.5
    assert 0 < verdicts["a_vs_b"].power < 0.5 and verdicts["a_vs_b"].word == NOT_TESTABLE
    assert accuracy.judge(results, Declared({"a": 97.0, "b": 97.0}, {"a": 0.1, "b": 0.1}))["a_vs_b"].word == OPEN_SAME
    assert accuracy.judge(results)["a_vs_b"].word == OPEN_SAME
    assert math.isnan(verdicts["c_vs_b"].power) and verdicts["c_vs_b"].word == CONTRADICTED


def test_a_contrast_has_the_power_of_its_declared_spreads(tmp_path):
    drops = claim(tmp_path, kind="drops", models=["a", "b", "c"])
    results, paper = runs(a=[0.97, 0.972], b=[0.95, 0.953], c=[0.93, 0.934]), {"a": 97.0, "b": 95.0, "c": 80.0}
    few = drops.judge(results, Declared(paper, dict.fromkeys("abc", 30.0)))["drops"]
    assert few.power < 0.5 and few.word == NOT_TESTABLE
    assert drops.judge(results, Declared(paper, dict.fromkeys("abc", 0.3)))["drops"].power > 0.9


def test_a_diverged_run_is_as_good_as_a_guess(tmp_path):
    results = runs(a=[0.97, None], b=[0.5, 0.51])
    assert results.accuracies("a") == pytest.approx([97.0, 10.0])
    assert results.losses("a") == pytest.approx([0.03, GUESS_LOSS])
    assert results.counts("a") == {"finished": 1, "diverged": 1, "missing": 0}
    trains = claim(tmp_path, kind="trains", models=["a"]).judge(results)["a"]
    assert (trains.estimate, trains.n) == (0.5, 2)


def test_what_has_no_run_is_not_trained(tmp_path):
    for fields in ({"kind": "accuracy"}, {"kind": "loss"}, {"kind": "speed", "of_training": 0.5, "at_most_factor": 1.5}):
        assert claim(tmp_path, compare=[["a", "none"]], **fields).judge(runs(a=[0.9, 0.91]))["a_vs_none"].word == NOT_TRAINED


def test_trains_may_ask_for_failure(tmp_path):
    fails = claim(tmp_path, kind="trains", models=["a"], side="below")
    assert fails.judge(runs(a=[None] * 5))["a"].word == REPRODUCED
    assert fails.judge(runs(a=[0.9] * 5))["a"].word == CONTRADICTED


def curve(rate: float, seed: int = 0) -> pd.DataFrame:
    epochs = [0.0, 1.0, 2.0, 3.0, 4.0]
    return pd.DataFrame({"epoch": epochs, "train_loss": [2 * rate**e for e in epochs], "test_loss": 1.0, "seed": seed})


def curves(**rates: list[float]) -> Results:
    """Runs whose train loss is multiplied by these rates in each epoch."""
    histories = [curve(rate, seed).assign(name=name) for name, own in rates.items() for seed, rate in enumerate(own)]
    finished = [
        {"name": name, "seed": seed, "status": "finished"} for name, own in rates.items() for seed in range(len(own))
    ]
    return Results({"runs": pd.DataFrame(finished), "histories": pd.concat(histories)})


SPEED = {"kind": "speed", "compare": [["a", "b"]], "of_training": 0.5, "at_most_factor": 1.5}


def test_speed_is_the_ratio_of_epochs_to_a_loss(tmp_path):
    verdict = claim(tmp_path, **SPEED).judge(curves(a=[0.25, 0.26, 0.27], b=[0.5, 0.51, 0.52]))["a_vs_b"]
    assert verdict.estimate == pytest.approx(0.5, abs=0.02) and verdict.word == REPRODUCED


def test_a_run_that_never_gets_there_is_the_slowest(tmp_path):
    verdict = claim(tmp_path, **SPEED).judge(curves(a=[0.25, 0.26, 0.99], b=[0.5, 0.51, 0.52]))["a_vs_b"]
    assert verdict.estimate == pytest.approx(0.51, abs=0.02) and verdict.high == math.inf and verdict.word == OPEN_SAME


def test_the_target_loss_is_of_runs_that_start(tmp_path):
    speed, ours = claim(tmp_path, **SPEED), [0.25, 0.26, 0.27]
    alone, failing = (speed.judge(curves(a=ours, b=theirs))["a_vs_b"] for theirs in ([0.5, 0.5], [0.5, 0.5, 1.1]))
    assert alone.estimate == pytest.approx(math.log(0.5) / math.log(0.26), abs=0.02)
    assert 0 < failing.estimate < alone.estimate and failing.low == 0.0  # the second model's own failure counts too
    assert speed.judge(curves(a=ours, b=[1.1, 1.1]))["a_vs_b"].word == NOT_TRAINED


def test_a_run_starts_if_its_loss_has_left_a_guess_halfway():
    losses = {
        "late": [2.3, 2.3, 2.25, 1.0, 0.5],
        "early": [2.3, 2.3, 2.2, 2.3, 2.3],
        "blank": [2.3, 1.0, math.nan, 1.0, 1.0],
    }
    frames = {name: pd.DataFrame({"epoch": [0, 1, 2, 3, 4], "train_loss": own}) for name, own in losses.items()}
    assert {name: starts(own) for name, own in frames.items()} == {"late": False, "early": True, "blank": False}
    assert starts(frames["late"], guess_loss=math.log(20))  # twenty classes
    assert runs(a=[0.9, None]).starting("a") == [0]


def test_epochs_are_log_linear_between_points():
    assert epochs_to_reach(curve(0.25), 2 * 0.25**1.5) == pytest.approx(1.5)
    assert epochs_to_reach(curve(0.25), 1e-9) == math.inf


def test_measured_compares_what_was_seen_at_the_end(tmp_path):
    results, sizes = runs(a=[0.9, 0.91, 0.92], b=[0.9, 0.91, 0.92]), {"a": 1.0, "b": 2.0}
    seen = [(n, s, e, size * (1 + 0.01 * s) + 9 * (e == 0)) for n, size in sizes.items() for s in range(3) for e in (0, 1)]
    results.watched = pd.DataFrame(seen, columns=["name", "seed", "epoch", "size"])
    smaller = claim(tmp_path, kind="measured", compare=[["a", "b"]], columns=["size"], at_most_factor=0.9)
    verdict = smaller.judge(results)["a_vs_b_size"]
    assert verdict.estimate == pytest.approx(0.5) and verdict.word == REPRODUCED


@pytest.mark.parametrize(
    "fields, key",
    [
        ({"kind": "speed", "compare": [["a", "b"]], "of_training": 0.5, "at_most_factor": 2}, "at_most_factor"),
        ({"kind": "drops", "models": ["a", "b"]}, "models"),
        ({"kind": "guess"}, "kind"),
    ],
)
def test_a_claim_that_no_rule_can_judge_is_named(tmp_path, fields, key):
    with pytest.raises(UserError, match=key):
        claim(tmp_path, **fields)
