"""Runs of Table 2 that are trained once more, from made-up records."""

import pandas as pd
import pytest

from pipeline.core import files
from pipeline.runs import EXPECTED, Run
from pipeline.statistics import NOT_EVALUATED
from pipeline.studies import FAILS, PASSES
from pipeline.studies.paper import repeats
from pipeline.studies.paper.repeats import Settings, findings, measure

SETTINGS = Settings(variant="vit", seed=0)
ENDS = {"history": "csv", "metrics": "json"}


@pytest.fixture
def lab(lab):
    lab.study = "repeats"
    write(Run("vit", 0, "table_2"), accuracy=0.97)
    return lab


def write(run: Run, accuracy: float, weights: str = "a", code: str = "c0de", machine: str = "A CPU") -> None:
    """A finished run as its files tell of it."""
    files.write_text(run.folder / "history.csv", f"step,epoch,test_accuracy\n1,1,{accuracy}\n")
    files.write_json(run.folder / "metrics.json", {"diverged": False, "test_accuracy": accuracy})
    environment = {"device": "cpu", "device_name": machine, "num_threads": 1, "torch": "2.11.0"}
    digests = {f"{name}_sha256": files.sha256(run.folder / f"{name}.{end}") for name, end in ENDS.items()}
    made = dict.fromkeys(EXPECTED["record"]) | {"config": {}, "code_sha256": code, "environment": environment}
    made |= {"status": "finished", "variant": run.variant, "seed": run.seed, "study": run.study, "overrides": run.overrides}
    files.write_json(run.folder / "record.json", made | digests | {"weights_sha256": weights})


def found(lab) -> list:
    return findings(SETTINGS, measure(SETTINGS, lab), lab)


def test_each_is_trained_in_the_study_and_compared_with_table_2(lab):
    assert repeats.trainings(SETTINGS, lab) == [("vit", {}, 0)]
    write(lab.run("vit"), accuracy=0.97)
    (finding,) = found(lab)
    assert finding.verdict == PASSES and len(finding.measures) == 2 and finding.remark == "Trained twice on A CPU, 1 thread."


@pytest.mark.parametrize("other", [{"accuracy": 0.9701}, {"accuracy": 0.97, "weights": "b"}])
def test_another_bit_on_the_same_kind_of_machine_fails(lab, other):
    write(lab.run("vit"), **other)
    assert found(lab)[0].verdict == FAILS


def test_on_another_machine_the_accuracy_is_set_beside_one_more_seed(lab):
    of_table_2 = {"variant": "vit", "seed": [0, 1, 2], "status": "finished", "test_accuracy": [0.969, 0.970, 0.971]}
    lab.tables = {"runs": pd.DataFrame(of_table_2)}
    write(lab.run("vit"), accuracy=0.971, weights="b", machine="Another CPU")
    (elsewhere,) = found(lab)
    assert elsewhere.measures[0].value == pytest.approx(0.1) and " 1 of 1 is where " in elsewhere.in_short
    write(lab.run("vit"), accuracy=0.991, weights="b", machine="Another CPU")
    assert " 0 of 1 are where " in found(lab)[0].in_short


def test_what_other_studies_trained_by_the_same_recipe_elsewhere_is_told_beside_the_bits(lab):
    of_table_2 = {"variant": "vit", "seed": [0, 1, 2], "status": "finished", "test_accuracy": [0.969, 0.970, 0.971]}
    lab.tables = {"runs": pd.DataFrame(of_table_2)}
    write(lab.run("vit"), accuracy=0.97)
    elsewhere = {"accuracy": 0.968, "machine": "Another CPU"}
    write(Run("vit", 0, "penalties"), **elsewhere)
    write(Run("vit", 0, "keeping"), **elsewhere, code="other")
    write(Run("vit", 0, "left_open"), accuracy=0.97)  # on the machine of Table 2
    write(Run("vit", 0, "six_blocks", {"model": {"depth": 2}}), **elsewhere)
    write(Run("vit", 1, "penalties"), **elsewhere)  # of which Table 2 has no run here
    write(Run("vit", 0, "tries"), **elsewhere)
    bits, told = found(lab)
    assert bits.verdict == PASSES
    assert told.in_short == (
        "ViT, seed 0: 97.00% on A CPU, 1 thread, 96.80% on Another CPU, 1 thread. 1 of 1 is where one more seed is expected."
    )
    assert [cell for row in told.table.rows for cell in row][-1] == "96.50 to 97.50"


@pytest.mark.parametrize("again", [None, {"accuracy": 0.99, "code": "other"}])
def test_what_was_not_repeated_by_the_same_code_is_not_evaluated(lab, again):
    if again:
        write(lab.run("vit"), **again)
    (finding,) = found(lab)
    assert finding.verdict == NOT_EVALUATED
