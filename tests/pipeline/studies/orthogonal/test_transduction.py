"""The strings of the transduction tasks, and what is trained on them."""

import math

import pytest
import torch

from pipeline.studies.orthogonal import transduction
from pipeline.studies.orthogonal.transduction import Penalised, Settings, measure, summarise

MODELS = {name: {} for name in ("var_i", "none")} | {"var_iii": {"penalty": "VAR-III", "weight": 10.0}}
SMALL = Settings(reading="first", seeds=[0, 1], length=2, steps=100, models=MODELS)


def test_tasks_are_what_their_names_say():
    strings = torch.tensor([[3, 1, 2]])
    assert transduction.TASKS["reverse"](strings).tolist() == [[2, 1, 3]]
    assert transduction.TASKS["sort"](strings).tolist() == [[1, 2, 3]]


@pytest.mark.slow
def test_an_encoder_learns_and_a_penalty_reaches_it(lab):
    found = summarise(SMALL, measure(SMALL, lab), lab)
    rows = {(row["task"], row["penalty"]): row for row in found["rows"]}
    assert len(found["rows"]) == 2 * 3 and all(row["accuracy"].n == 2 for row in found["rows"])
    for task in transduction.TASKS:
        assert rows[task, None]["loss"].mean < 0.95 * math.log(10)
        assert rows[task, "VAR-III"]["loss"].mean != rows[task, None]["loss"].mean
        verdict = found["claim"][f"{task}_var_i_vs_{task}_none"]
        assert verdict.estimate == 0, "the same model twice"


@pytest.mark.slow
def test_a_training_is_the_same_again(lab):
    first, second = (transduction.fit(SMALL, "sort", Penalised(), 0, lab) for _ in range(2))
    assert first == pytest.approx(second, rel=0, abs=0)
