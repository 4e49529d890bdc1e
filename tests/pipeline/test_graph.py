"""The graph as DVC itself has it: what waits for what, and what does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import studies
from pipeline.core.files import ROOT

WINGS = {wing: f"pipeline/studies/{wing}/dvc.yaml:" for wing in ("deep", "orthogonal")}
RESEARCH = "pipeline/report/dvc.yaml:"
pytestmark = pytest.mark.slow


def dvc(*arguments: str) -> str:
    return subprocess.check_output([str(Path(sys.executable).parent / "dvc"), *arguments], cwd=ROOT, text=True)


@pytest.fixture(scope="module")
def upstream() -> dict[str, set[str]]:
    """For each stage those that it waits for, directly or not."""
    edges = re.findall(r'"([^"]+)" -> "([^"]+)"', dvc("dag", "--dot", "--full"))
    direct: dict[str, set[str]] = {}
    for before, after in edges:
        direct.setdefault(after, set()).add(before)

    def all_before(name: str) -> set[str]:
        return direct.get(name, set()).union(*map(all_before, direct.get(name, set())))

    return {name: all_before(name) for name in {name for edge in edges for name in edge}}


def test_every_study_has_one_stage_in_its_wing_that_measures_and_one_that_guards_its_runs():
    listed = dvc("stage", "list", "--all", "--name-only").split()
    for study in studies.names():
        if studies.get(study).measure:
            wing = studies.wing(study)
            at = WINGS.get(wing, RESEARCH if study == "harder_data" else "")
            names = [name.removeprefix(at) for name in listed if re.search(rf"[@:]{study}$", name) and name.startswith(at)]
            guards = [name for name in names if name.startswith("runs@")]
            assert len(names) - len(guards) == 1 and (len(guards) == 1 or not studies.get(study).trainings), study


def test_the_root_is_the_paper_alone(upstream):
    """`dvc repro` makes nothing of the other wings, whose runs it compares with their locks."""
    assert not [name for name in upstream["report"] if ":" in name and ":runs@" not in name]
    assert {"check", "tables", "sources"} <= upstream["report"]
    assert any(name.startswith(WINGS["deep"]) for name in upstream[f"{RESEARCH}research"])


def test_everything_waits_until_the_parameters_are_checked(upstream):
    assert [name for name, before in upstream.items() if "check" not in before] == ["check"]


def test_a_training_waits_for_data_and_parameters_alone(upstream):
    trainings = [name for name in upstream if name.startswith("train@")]
    assert trainings and all(upstream[name] == {"check", "fetch"} for name in trainings)


def test_tables_wait_for_the_runs_of_table_2_alone(upstream):
    assert {name.split("@")[0] for name in upstream["tables"]} == {"check", "fetch", "train", "evaluate"}


def test_a_study_waits_for_no_training(upstream):
    """Runs that it compares are what git keeps."""
    for name, before in upstream.items():
        if re.match(r"(.*:)?(analytic|on_images|trained)@", name):
            assert {each for each in before if "runs@" not in each} <= {"check", "fetch", "sources"}, name


def test_what_dvc_shows_of_experiments_are_parameters_and_accuracies():
    """Besides, DVC has a column for each file or folder that a stage reads, and no setting leaves them out of its CSV."""
    columns = dvc("exp", "show", "--csv").partition("\n")[0].split(",")
    files = {column for column in columns if (ROOT / column).exists() or column.startswith(("data/", "paper_outputs/"))}
    assert len(columns) <= 182 and len(set(columns) - files) <= 5 + 61, "experiment, and parameters with osa.NUMERICS"
    assert len([column for column in files if column.endswith((":mean", ":sd", ":n"))]) == 3 * 6


@pytest.mark.parametrize("arguments, lines, width", [(["tables"], 30, 40), (["--md", "report"], 50, 60), (["--md"], 90, 60)])
def test_the_graph_fits_a_screen(arguments, lines, width):
    shown = dvc("dag", "--collapse-foreach-matrix", *arguments).splitlines()
    assert len(shown) <= lines and max(map(len, shown)) <= width
    assert len((ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines()) <= 120
