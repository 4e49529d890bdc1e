"""The graph as DVC itself has it: what waits for what, and what does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import studies
from pipeline.core.files import ROOT
from pipeline.report.__main__ import studies_on

BY_HAND = {"first_steps", "pilot", "rates"}  # measured by a command, and kept
pytestmark = pytest.mark.slow


def dvc(*arguments: str) -> str:
    return subprocess.check_output([str(Path(sys.executable).parent / "dvc"), *arguments], cwd=ROOT, text=True)


@pytest.fixture(scope="module")
def upstream() -> dict[str, set[str]]:
    """Stages that each stage waits for, directly or not."""
    edges = re.findall(r'"([^"]+)" -> "([^"]+)"', dvc("dag", "--dot", "--full"))
    direct: dict[str, set[str]] = {}
    for before, after in edges:
        direct.setdefault(after, set()).add(before)

    def all_before(name: str) -> set[str]:
        return direct.get(name, set()).union(*map(all_before, direct.get(name, set())))

    return {name: all_before(name) for name in {name for edge in edges for name in edge}}


def is_measuring(name: str) -> bool:
    return name == "verdicts" or name.startswith(("analytic@", "on_images@"))


def measuring(names: set[str]) -> set[str]:
    return {name.rpartition("@")[2] for name in names if is_measuring(name)}


def test_every_study_that_measures_has_a_stage_and_its_page_waits_for_it(upstream):
    measured = {name for name in studies.names() if studies.get(name).measure}
    assert measuring(set(upstream)) == measured - BY_HAND
    for page in ("paper", "research"):
        assert measuring(upstream[page]) == (measured - BY_HAND) & set(studies_on(page))


def test_the_papers_page_waits_for_nothing_beyond_the_paper(upstream):
    assert {"check", "tables"} <= upstream["paper"] and "research" not in upstream["paper"]


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
        if is_measuring(name):
            assert before <= {"check", "fetch"}, name


def test_what_dvc_shows_of_experiments_are_parameters_and_accuracies():
    """Besides, DVC has a column for each file or folder that a stage reads, and no setting leaves them out of its CSV."""
    columns = dvc("exp", "show", "--csv").partition("\n")[0].split(",")
    files = {column for column in columns if (ROOT / column).exists() or column.startswith(("data/", "paper_outputs/"))}
    assert len(set(columns) - files) <= 180, "experiment, parameters with osa.NUMERICS, recipe, sections of studies"
    assert len([column for column in files if column.endswith((":mean", ":sd", ":n"))]) == 3 * 6


@pytest.mark.parametrize("arguments, lines, width", [(["tables"], 30, 40), (["--md", "paper"], 50, 60), (["--md"], 90, 60)])
def test_the_graph_fits_a_screen(arguments, lines, width):
    shown = dvc("dag", "--collapse-foreach-matrix", *arguments).splitlines()
    assert len(shown) <= lines and max(map(len, shown)) <= width
    assert len((ROOT / "dvc.yaml").read_text(encoding="utf-8").splitlines()) <= 125
