"""A grid of values, trained next to Table 2's results; honest about one seed."""

import math
from pathlib import Path

import pytest

import osa.models
from pipeline.config import params
from pipeline.core.errors import UserError
from pipeline.tools import fan_out, jobs, tries
from pipeline.training import HISTORY_COLUMNS
from pipeline.training.run import Run
from tests.pipeline import synthetic
from tests.pipeline.synthetic import ROOT
from tests.pipeline.trainings import run_main, write_data, write_params

COMMITTED = {
    "osa_qr": [97.0, 97.2, 96.9],
    "vit": [97.1, 97.3, 97.2],
    "vit_noskip": [94.0, 95.0, 96.0],
    "osa_ns": [96.0, 96.2, 96.1],
    "osa_exact": [96.5, 96.4, 96.5],
    "vit_noskip_nonorm": [79.0, 80.0, 78.0],
}
TRIED = {
    "osa_qr": [95.0, 95.3, 95.1],
    "vit_noskip": [94.5, 95.5, 95.2],
    "osa_ns": [96.0, 96.2, None],
    "osa_new": [50.0, 60.0, 70.0],
}


def write(results, rate=3e-4, study="table_2"):
    """The files of made-up runs; None is a run that diverged."""
    for variant, accuracies in results.items():
        for seed, accuracy in enumerate(accuracies):
            changes = {"train": {"learning_rate": rate if variant == "osa_qr" else 3e-4}, "init": {"head": "xavier"}}
            known = "osa_qr" if variant == "osa_new" else variant
            config = params.resolve(params.load(ROOT / "params.yaml"), known, changes)
            end = {"test_loss": math.nan} if accuracy is None else {"test_accuracy": accuracy / 100}
            curve = [dict.fromkeys(HISTORY_COLUMNS, 1) | end]
            synthetic.write_ended(Run(variant, seed, study), config, curve, Path())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Results of Table 2, and a model that has none."""
    monkeypatch.chdir(tmp_path)
    write(COMMITTED)
    write_params(run={"variants": list(COMMITTED), "seeds": [0, 1, 2]}, variants={"osa_new": osa.models.MODELS["osa_exact"]})
    return tmp_path


def rows(text):
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def test_tried_beside_table_2(monkeypatch, capsys):
    write(TRIED, rate=1e-3, study="tries")
    monkeypatch.setattr(tries, "source_digest", lambda source: "")
    monkeypatch.setattr(tries, "missing", lambda jobs: [])
    tries.main([*TRIED, "--seeds", "0,1,2"])
    text = capsys.readouterr().out
    shown = rows(text)
    assert "osa_qr: train.learning_rate 0.0003 → 0.001" in text and text.count("→") == 1
    assert shown["osa_qr"] == ["97.03 ± 0.15 (3)", "95.13 ± 0.15 (3)", "-1.90", "-2.20 to -1.60", "lower"]
    assert shown["vit_noskip"][4] == "no difference shown"
    assert shown["osa_ns"][1:3] == ["96.10 ± 0.14 (2), 1 diverged", "-0.10"], "a run that diverged is as good as a guess"
    assert shown["osa_new"] == ["not run", "60.00 ± 10.00 (3)"]
    tries.main(["vit_noskip"])
    assert rows(capsys.readouterr().out)["vit_noskip"][1:] == ["94.50 (1)", "-0.50", "too few seeds to tell"]


def test_its_data_are_looked_for_before_any_training(monkeypatch, capsys):
    monkeypatch.setattr(fan_out, "train_all", lambda *_: pytest.fail("a training began"))
    jobs.source_digest.cache_clear()
    with pytest.raises(SystemExit):
        tries.main(["vit", "--set", "model.depth=1,2"])
    assert "`python -m pipeline fetch mnist`" in capsys.readouterr().err
    write_data()
    jobs.source_digest.cache_clear()
    for settings in (["data.source=kmnist"], ["data.source=mnist,kmnist"], ["data.source=folder", "data.path=mine"]):
        with pytest.raises(SystemExit):
            tries.main(["vit", *(part for each in settings for part in ("--set", each))])
        assert f"fetch {'folder' if 'data.path=mine' in settings else 'kmnist'}`" in capsys.readouterr().err
    Path("data/mnist").rename("data/kmnist")  # no run needs the other

    def train_all(jobs, *_, **__):
        raise UserError(f"{len(jobs)} trainings begin.")

    monkeypatch.setattr(fan_out, "train_all", train_all)
    with pytest.raises(SystemExit):
        tries.main(["vit", "--set", "data.source=kmnist"])
    assert "1 trainings begin" in capsys.readouterr().err


@pytest.mark.slow
def test_a_grid_is_trained_once_stands_beside_its_model_and_leaves_no_weights(monkeypatch, capsys):
    write_data()
    jobs.source_digest.cache_clear()
    trainings = []

    def here(jobs, at_a_time):
        for run, _ in jobs:
            trainings.append(str(run))
            run_main(monkeypatch, *fan_out.command(run)[3:])
            yield [run]

    monkeypatch.setattr(fan_out, "train_here", here)
    monkeypatch.setattr(fan_out, "recorded", list)  # the made-up ones are not whole
    arguments = ["vit", "osa_new", "--set", "model.depth=1,2", "--set", "train.betas=[0.9,0.95]", "--set", "train.epochs=1"]
    write_params(run={"variants": list(COMMITTED), "seeds": [0]}, variants={"osa_new": osa.models.MODELS["osa_exact"]})
    for _ in range(2):
        tries.main([*arguments, "--seeds", "0,3"])
    assert len(trainings) == len({*trainings}) == 8
    shown = rows(capsys.readouterr().out)
    assert {f"{model} model.depth={depth}" for model in ("vit", "osa_new") for depth in (1, 2)} <= shown.keys()
    assert shown["vit model.depth=2"][0].startswith("97.10 (1)")
    assert shown["vit model.depth=2"][-1] == "too few seeds to tell"
    assert shown["osa_new model.depth=1"][0] == "not run"
    assert not list(Path("paper_outputs/weights").glob("*/*/*"))
    tries.main(["osa_new"])  # as params.yaml has it
    assert trainings[8:] == ["tries/osa_new/0"] and Run("osa_new", 0).record() is None


def test_what_cannot_be_tried_is_one_sentence(folder, capsys):
    def error(*arguments):
        with pytest.raises(SystemExit):
            tries.main([*arguments])
        text = capsys.readouterr().err
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    assert "model.dept" in error("vit", "--set", "model.depth=1", "--set", "model.dept=2,3")
    assert "osa_old" in error("osa_old")
    (folder / "params.yaml").write_text("run: [", encoding="utf-8")
    assert "params.yaml" in error("vit")
