"""A study measures into files, is judged from them alone, and trains what it needs once."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from pipeline import lab, runs, sources, studies, study
from pipeline.core import files, params, record
from pipeline.core.errors import UserError
from pipeline.lab import Lab
from pipeline.training import data, loop
from pipeline.training.loop import Training
from tests.pipeline.small_study import NAME, TEXT, forget, small_study
from tests.pipeline.trainings import write_data, write_params

FOLDER = Path("paper_outputs/studies", NAME)
TRAINS = """
def trainings(settings: Settings, lab: Lab):
    return [("vit", {"train": {"epochs": 1}}, seed) for seed in settings.seeds]


def measure(settings: Settings, lab: Lab) -> Tables:
    from pipeline.studies._runs import collect_runs

    return collect_runs(trainings(settings, lab), lab)
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A working directory with parameters, data and the small study."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(study, "make_deterministic", lambda: None)
    with small_study(tmp_path / "code") as code:
        write_params(**{NAME: {"seeds": [0, 1]}})
        write_data()
        yield code


def bench() -> Lab:
    return Lab(NAME, params.load(), params.load_paper())


# the stage


def test_it_writes_tables_and_what_made_them():
    study.main([NAME])
    norms = pd.read_csv(FOLDER / "norms.csv")
    assert norms["seed"].tolist() == [0, 1] and norms["norm"].tolist() == pytest.approx([3**0.5] * 2, rel=1e-5)
    made_by = json.loads((FOLDER / "record.json").read_text())
    assert made_by.keys() == {"source_sha256", "settings", "environment"}
    assert made_by["source_sha256"] == sources.digest(NAME)
    assert made_by["settings"] == {"seeds": [0, 1]}
    assert made_by["environment"] == record.describe_environment(record.default_device())


def test_a_table_that_is_measured_no_more_is_removed(project):
    FOLDER.mkdir(parents=True)
    (FOLDER / "other.csv").write_text("a\n1\n")
    study.main([NAME])
    assert {path.name for path in FOLDER.iterdir()} == {"norms.csv", "record.json"}


def test_findings_come_from_the_files_alone(project):
    study.main([NAME])
    files.write_csv(FOLDER / "norms.csv", pd.DataFrame({"seed": [0], "norm": [7.25]}))
    (finding,) = study.findings(NAME, bench())
    assert [measure.value for measure in finding.measures] == [7.25]


def test_findings_of_what_is_measured_elsewhere_get_no_settings_and_no_tables(project, monkeypatch):
    def findings(settings, tables, lab):
        assert (settings, tables) == (None, {})
        return ["found"]

    at, module = bench(), studies.module(NAME)
    for part in ("Settings", "measure"):
        monkeypatch.delattr(module, part)
    monkeypatch.setattr(module, "findings", findings)
    assert study.findings(NAME, at) == ["found"]
    assert studies.measuring() == []


def test_a_study_that_is_not_measured_yet_is_named_with_the_remedy():
    with pytest.raises(UserError, match=rf"^{FOLDER} has no table: run `dvc repro {NAME}`\.$"):
        study.findings(NAME, bench())


def test_an_unknown_study_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        study.main(["theorem_9"])
    assert f"invalid choice: 'theorem_9' (choose from '{NAME}')" in capsys.readouterr().err


# trainings


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """Grows by one with each training that runs."""
    begun, run = [], Training.run

    def spy(self, *arguments, **options):
        begun.append(self.config.train.epochs)
        return run(self, *arguments, **options)

    monkeypatch.setattr(Training, "run", spy)
    return begun


def test_a_study_trains_once(project, counted, capsys):
    """And again only where the run that is there would come out otherwise."""
    path = project / f"pipeline/studies/{NAME}.py"
    path.write_text(TEXT.replace("\ndef norm(", TRAINS + "\ndef norm("))
    forget()
    study.main([NAME, "--collect"])
    assert counted == [] and pd.read_csv(FOLDER / "runs.csv")["status"].tolist() == ["missing"] * 2
    assert pd.read_csv(FOLDER / "histories.csv").empty
    for _ in range(2):
        study.main([NAME, "--no-tracking"])
        assert counted == [1, 1]
        assert "warning" not in capsys.readouterr().err
    made = [files.read_json(path) for path in sorted(Path("runs", NAME).glob("*/*/record.json"))]
    assert [(each["name"], each["seed"], each["study"]) for each in made] == [
        ("vit+train.epochs=1", 0, NAME),
        ("vit+train.epochs=1", 1, NAME),
    ]
    expected = [
        run.read("metrics")["test_loss"] for run in (bench().run("vit", {"train": {"epochs": 1}}, s) for s in (0, 1))
    ]
    table, histories = pd.read_csv(FOLDER / "runs.csv"), pd.read_csv(FOLDER / "histories.csv")
    assert table["test_loss"].tolist() == pytest.approx(expected, rel=1e-5)
    assert table["status"].tolist() == ["finished"] * 2 and set(table["codes"]) == {record.code_sha256()}
    assert histories.groupby("seed")["test_loss"].last().tolist() == pytest.approx(expected, rel=1e-5)
    bench().run("vit", {"train": {"epochs": 1}}, 1).weights.unlink()
    study.main([NAME, "--collect"])
    lost = f"warning: the weights of 1 of 2 runs of {NAME} are not here, and dvc.lock forgets them: `dvc pull {NAME}` first"
    assert lost in capsys.readouterr().err and counted == [1, 1]


def quickly(variant="vit", seed=0, **overrides) -> runs.Run:
    at = bench()
    at.is_tracked = False
    return at.train(variant, {"train": {"epochs": 1}, **overrides}, seed)


def test_a_training_is_known_by_its_variant_seed_configuration_data_and_code(counted, monkeypatch):
    quickly()
    quickly()
    assert len(counted) == 1
    for number, train in enumerate(
        (
            lambda: quickly("vit_noskip"),
            lambda: quickly(seed=1),
            lambda: quickly(init={"head": "zeros"}),
            lambda: (write_data(seed=4), quickly()),
            lambda: (other_code(monkeypatch), quickly()),
        ),
        2,
    ):
        train()
        assert len(counted) == number
        train()
        assert len(counted) == number


def other_code(monkeypatch) -> None:
    """As a process that begins after an edit."""
    monkeypatch.setattr(record, "code_sha256", lambda *_: "0" * 64)
    record.imported_code_sha256.cache_clear()


def test_an_edit_while_a_study_trains_is_not_taken_for_the_code_that_trained(monkeypatch):
    """The process has imported what was there before, and goes on with it."""
    before = quickly().read("record")["code_sha256"]
    monkeypatch.setattr(record, "code_sha256", lambda *_: "0" * 64)
    made = quickly(seed=1).read("record")
    assert made["code_sha256"] == before and not record.is_of_today(made)


def test_a_run_without_its_weights_is_trained_again(counted):
    run = quickly()
    before = run.weights.read_bytes()
    run.weights.unlink()
    assert quickly().weights.read_bytes() == before and len(counted) == 2


def test_a_training_follows_the_recipe_and_not_what_one_edits(counted):
    run = quickly()
    write_params(train={"learning_rate": 0.5}, **{NAME: {"seeds": [0, 1]}})
    quickly()
    assert len(counted) == 1
    made = run.read("record")["config"]
    assert made["train"]["learning_rate"] == params.load_paper().recipe.train.learning_rate != 0.5
    assert made["model"] == params.load_paper().recipe.model.model_dump()


# the bench


def test_models_and_streams_are_those_of_training():
    at = bench()
    config = at.config("osa_qr", {"model": {"depth": 1}})
    assert (config.model.depth, config.model.embed_dim) == (1, at.paper.recipe.model.embed_dim)
    expected = loop.build_model(config, 3).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in at.model(config, 3).state_dict().items())
    stream = loop.random_stream(3, "theory/tokens")
    expected = torch.randn(2, 5, generator=stream, dtype=torch.float64)
    assert torch.equal(at.normal(3, "theory/tokens", 2, 5), expected)
    assert not torch.equal(at.normal(3, "theory/token", 2, 5), expected)


def test_images_are_the_test_images_in_float64():
    images, labels = bench().images("standard")
    mnist = data.load("data/mnist", "standard")
    assert images.dtype == torch.float64 and torch.equal(images.float(), mnist.test_images)
    assert torch.equal(labels, mnist.test_labels)
    assert not torch.equal(bench().images()[0], images)


def test_labels_and_tables_of_the_runs():
    lab.TABLES.mkdir(parents=True)
    (lab.TABLES / "runs.csv").write_text("variant,seed\nvit,0\n")
    at = bench()
    assert at.label("vit") == "ViT" and at.label("vit_new") == "vit_new"
    assert at.tables.keys() == {"runs"} and at.tables["runs"].to_dict("list") == {"variant": ["vit"], "seed": [0]}


def test_modules_in_float64_are_initialised_without_a_rounding():
    with lab.float64():
        assert torch.nn.Linear(2, 2).weight.dtype == torch.float64
    assert torch.nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), lab.float64():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32
