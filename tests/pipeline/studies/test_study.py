"""Studies: each is one object in a wing, whose section is checked when it runs, and whose failure is its own."""

import ast
import subprocess
import sys

import pytest

import osa
from pipeline import studies
from pipeline.config import params
from pipeline.core import files
from pipeline.core.errors import UserError
from pipeline.core.files import ROOT
from pipeline.report.page import to_json
from pipeline.results.runs import run_row
from pipeline.studies import check, comparison, study
from pipeline.studies.lab import Lab
from pipeline.training.recorder import train
from tests.pipeline.trainings import config

NAN = float("nan")


def test_every_study_has_its_section_and_what_it_trains_can_be_trained(subtests):
    for name in studies.names():
        with subtests.test(name=name):
            one, settings = studies.get(name), studies.settings(name)
            assert settings is not None or one.measure is one.read is None
            if one.trainings:
                lab = Lab(name, params.load(), params.load_paper())
                requests = one.trainings(settings, lab)
                assert requests and all(lab.config(variant, overrides) for variant, overrides, _ in requests)
            else:
                assert one.watch is None


@pytest.mark.parametrize(
    "value, limit, side, holds, share",
    [
        (1, 4, "below", True, 0.25),
        (2, 2, "below", False, 1),
        (8, 4, "above", True, 0.5),
        (NAN, 2, "above", False, NAN),
        (0, 0, "below", False, NAN),
    ],
)
def test_a_check_is_on_its_side_or_fails(value, limit, side, holds, share):
    found = check(value, limit, side)
    assert found["holds"] is holds and found["share"] == pytest.approx(share, nan_ok=True)


def test_an_unknown_study_and_a_missing_section_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="theorem_4_2"):
        studies.get("theorem_4_3")
    monkeypatch.chdir(tmp_path)
    files.write_text("pipeline/studies/paper/params.yaml", "theorem_4_1: {}\n")
    with pytest.raises(UserError, match=r"paper/params\.yaml has no section theorem_4_2: write"):
        studies.settings("theorem_4_2")


def test_a_study_writes_its_tables_and_removes_stale_ones(project):
    (folder := study.STUDIES / "theorem_4_2").mkdir(parents=True)
    files.write_text(folder / "stale.csv", "a\n1\n")
    study.main(["theorem_4_2"])
    assert {path.name for path in folder.iterdir()} == {"weights.csv", "record.json"}
    assert files.read_json(folder / "record.json")["settings"] == {"seeds": [0, 1, 2]}
    assert study.read_tables("theorem_4_2")["weights"]["kappa"].min() >= 1


def test_tables_that_are_missing_are_named_with_the_command(project):
    with pytest.raises(UserError, match=r"python -m pipeline study theorem_4_1"):
        study.read_tables("theorem_4_1")


def test_a_comparison_reads_what_is_there_and_lists_what_is_missing(project):
    lab = Lab("a_study", params.load(), params.load_paper())
    runs = {
        "short": {"variant": "vit", "set": {"train": {"epochs": 1}}, "seeds": [0, 1]},
        "none": {"variant": "osa_qr", "seeds": [0]},
    }
    settings = comparison.Settings(reading="first", runs=runs)
    requests = comparison.trainings(settings, lab)
    assert requests == [("vit", {"train": {"epochs": 1}}, 0), ("vit", {"train": {"epochs": 1}}, 1), ("osa_qr", {}, 0)]
    variant, overrides, seed = requests[0]
    train(lab.run(variant, overrides, seed), lab.config(variant, overrides), watch=lambda training: [{"size": 2.0}])
    tables = comparison.read(settings, lab)
    assert tables["runs"]["status"].tolist() == ["finished", "missing", "missing"]
    assert set(tables["histories"]["name"]) == {"short"} and tables["watched"]["size"].eq(2).all()
    assert to_json(tables["runs"]["numerics"].tolist())[0] == osa.NUMERICS


def test_a_run_of_another_configuration_in_the_place_of_a_studys_is_refused(project):
    lab = Lab("a_study", params.load(), params.load_paper())
    train(lab.run("vit"), config("vit"))  # params.yaml, which is not the recipe
    with pytest.raises(UserError, match=r"vit/0/record.json has data.pixel_scaling standard, not unit: .*a_study/vit/0"):
        run_row(lab.run("vit"), lab.config("vit"))
    elsewhere = lab.config("vit")
    elsewhere = elsewhere.model_copy(update={"data": elsewhere.data.model_copy(update={"source": "sample"})})
    assert run_row(lab.run("vit"), elsewhere) == {"status": "missing"}, "params.yaml chooses other images"


@pytest.mark.slow
@pytest.mark.usefixtures("starts_warm")
def test_a_broken_study_stops_no_training_and_no_other_study(tmp_path):
    """One study of a copy of the code is no Python."""
    for path in subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "osa", "pipeline", "params.yaml"], cwd=ROOT, text=True
    ).split():
        if (ROOT / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    (tmp_path / "pipeline/studies/paper/theorem_4_1.py").write_text("this is no Python\n", encoding="utf-8")
    for command in (["pipeline.tools.train", "--help"], ["pipeline.studies.study", "theorem_4_2"]):
        subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True, capture_output=True)
    loaded = "any('studies.paper.' in name for name in sys.modules)"
    code = f"import sys, pipeline.tools.train; from pipeline.config import params; params.load(); sys.exit({loaded})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


FLOORS = (
    {"core"},
    {"config"},
    {"data", "statistics"},
    {"training"},
    {"results", "tracking", "benchmarks"},
    {"studies"},
    {"report"},
    {"tools"},
)


def test_no_floor_imports_what_stands_on_it():
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for path in (ROOT / "pipeline").rglob("*.py"):
        own = floor_of.get(path.relative_to(ROOT / "pipeline").with_suffix("").parts[0])
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
        names = [f"{node.module}.{alias.name}".split(".") for node in nodes for alias in node.names]
        above = [name for root, name, *_ in names if root == "pipeline" and floor_of.get(name, 0) > (own or 0)]
        assert own is None or not above, path
