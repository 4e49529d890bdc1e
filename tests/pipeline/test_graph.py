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


def test_every_study_that_measures_has_one_stage_in_its_wing():
    listed = dvc("stage", "list", "--all", "--name-only").split()
    for study in studies.names():
        if studies.get(study).measure:
            (name,) = (name for name in listed if re.search(rf"[@:]{study}$", name))
            wing = studies.wing(study)
            assert name.startswith(WINGS.get(wing, RESEARCH if study == "harder_data" else "")), name
            assert wing != "paper" or study == "harder_data" or ":" not in name


def test_the_root_is_the_paper_alone(upstream):
    """`dvc repro` runs nothing of the other wings."""
    assert not [name for name in upstream["report"] if ":" in name]
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
    """Runs that it compares are a dependency that git keeps."""
    for name, before in upstream.items():
        if re.match(r"(.*:)?(analytic|on_images|trained)@", name):
            assert before <= {"check", "fetch", "sources"}, name
