"""Repeats of runs, stability and harder data, from made-up records and runs."""

import math
import subprocess

import pytest

from pipeline.config import params
from pipeline.core import provenance
from pipeline.core.files import ROOT
from pipeline.statistics.verdicts import NOT_TRAINED, REPRODUCED
from pipeline.studies.comparison import Settings
from pipeline.studies.paper import harder_data, repeats, stability
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.studies.paper.conftest import histories, runs

SETTINGS = repeats.Settings(reading="first", runs=[{"variant": "vit", "seed": 0}])
LITERAL = "osa_qr_literal"
NONE = {"repeated": 0, "same_bits": 0, "other_bits": [], "elsewhere": [], "replaced": []}


@pytest.fixture
def lab(paper_lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paper_lab.study = "repeats"
    paper_lab.tables = {"runs": runs({"vit": [96.9, 97.0, 97.1]})}
    write(Run("vit", 0, "table_2"), accuracy=0.97)
    return paper_lab


def write(run: Run, accuracy: float, weights: str = "a", numerics: int = 1, machine: str = "A CPU") -> None:
    """The files of a finished run."""
    config = params.resolve(params.load(ROOT / "params.yaml"), run.variant)
    environment = synthetic.record(config, run).environment.model_copy(update={"device_name": machine})
    curve = [dict.fromkeys(HISTORY_COLUMNS, 1) | {"test_accuracy": accuracy}]
    changes = {"numerics": numerics, "weights": 64 * weights, "environment": environment}
    synthetic.write_ended(run, config, curve, **changes)


def summarise(lab) -> dict:
    return repeats.summarise(SETTINGS, repeats.read(SETTINGS, lab), lab)


def test_a_repeat_has_the_same_bits_or_not(lab):
    write(lab.run("vit"), accuracy=0.97)
    assert summarise(lab) == NONE | {"repeated": 1, "same_bits": 1}
    for accuracy, weights in ((0.97, "b"), (0.98, "a")):
        write(lab.run("vit"), accuracy, weights)
        summary = summarise(lab)
        (row,) = summary["other_bits"]
        assert summary == NONE | {"repeated": 1, "other_bits": [row]}
        found = [row[key] for key in ("variant", "seed", "test_accuracy", "test_accuracy_there")]
        assert found == ["vit", 0, pytest.approx(100 * accuracy), pytest.approx(97)]


@pytest.mark.parametrize("accuracy, within", [(0.971, True), (0.991, False)])
def test_on_another_machine_it_is_compared_with_one_more_seed(lab, accuracy, within):
    write(Run("vit", 0, "penalties"), accuracy, weights="b", machine="Another CPU")
    (row,) = summarise(lab)["elsewhere"]
    assert row["within"] is within and row["difference"] == pytest.approx(100 * accuracy - 97)


def test_what_is_of_other_numerics_or_another_configuration_is_no_repeat(lab):
    write(lab.run("vit"), accuracy=0.97, numerics=2)
    write(Run("vit", 0, "tries"), accuracy=0.97, machine="Another CPU")
    write(Run("vit", 1, "penalties"), accuracy=0.97)  # not in Table 2
    assert summarise(lab) == NONE


def test_a_run_that_replaces_a_committed_one_stands_beside_it(lab, monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    write(Run("vit", 11), accuracy=0.96)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "runs"]):
        subprocess.run(["git", *command], check=True)
    write(Run("vit", 12), accuracy=0.95)  # a new run replaces none
    assert summarise(lab)["replaced"] == []
    write(Run("vit", 11), accuracy=0.98, weights="b")
    (row,) = summarise(lab)["replaced"]
    assert (row["variant"], row["seed"], row["same_weights"]) == ("vit", 11, False)
    assert [row[key] for key in ("test_accuracy", "test_accuracy_there", "difference")] == pytest.approx([98, 96, 2])


@pytest.mark.parametrize("stable, unstable, at_least", [(8, 0, 0.05 ** (1 / 8)), (3, 0, 0.05 ** (1 / 3)), (0, 2, 0.0)])
def test_a_count_of_stable_runs_with_its_lower_bound(paper_lab, stable, unstable, at_least):
    curves = [[2.0, 1.0, 1.5, 0.5]] * stable + [[2.0, 0.5, 1.5, 0.4]] * unstable
    tables = {"runs": runs({LITERAL: [97.0] * len(curves)}), "histories": histories({LITERAL: curves})}
    summary = stability.summarise(Settings(reading="first", runs={}), tables, paper_lab)
    assert (summary["runs"], summary["stable"]) == (stable + unstable, stable)
    assert summary["largest_rise"] == (3 if unstable else 1.5)
    assert summary["at_least"] == pytest.approx(at_least)


def test_a_run_that_diverges_is_not_stable(paper_lab):
    tables = {"runs": runs({LITERAL: [97.0, None]}), "histories": histories({LITERAL: [[2.0, 1.0], [2.0, 1.0]]})}
    assert stability.summarise(Settings(reading="first", runs={}), tables, paper_lab)["stable"] == 1
    assert stability.summarise(Settings(reading="first", runs={}), {}, paper_lab)["stable"] == 0


def test_a_larger_gap_on_harder_data(paper_lab):
    paper_lab.tables = {"runs": runs({"vit": [97.0, 97.1, 97.2], "vit_noskip": [95.0, 95.1, 95.2]})}
    models = "vit", "vit_noskip", "osa_qr"
    listed = Settings(reading="first", runs={f"{name}_cifar10": {"variant": name, "seeds": [0]} for name in models})
    assert harder_data.summarise(listed, {}, paper_lab)["verdict"].word == NOT_TRAINED
    accuracies = {"vit_cifar10": [60.0, 60.1, 60.2], "vit_noskip_cifar10": [50.0, 50.1, 50.2]}
    tables = {"runs": runs(accuracies | {"osa_qr_cifar10": [59.5, 59.6, 59.7]})}
    summary = harder_data.summarise(listed, tables, paper_lab)
    assert summary["verdict"].word == REPRODUCED and summary["verdict"].estimate == pytest.approx(8)
    assert summary["models"]["vit"]["harder"].mean == pytest.approx(60.1)
    gap = math.log(0.601 / 0.399) - math.log(0.501 / 0.499) - math.log(0.971 / 0.029) + math.log(0.951 / 0.049)
    assert summary["log_odds"].estimate == pytest.approx(gap, abs=1e-3) and summary["log_odds"].high < 0
    (matches,) = summary["osa_matches_vit"]
    assert matches["variant"] == "osa_qr" and matches["verdict"].word == REPRODUCED
    assert summary["models"]["vit"]["mnist"].mean == pytest.approx(97.1)
