"""The edges of the graph as DVC itself prints them: what waits for what, and what does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import sources, studies
from pipeline.core import params

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def upstream() -> dict[str, set[str]]:
    """For each stage those that it waits for, directly or not; runs by the name of their stage."""
    command = [str(Path(sys.executable).parent / "dvc"), "dag", "--dot"]
    dot = subprocess.check_output(command, cwd=ROOT, text=True)
    edges = re.findall(r'"([^"]+)" -> "([^"]+)"', dot)
    names = set(re.findall(r'^"([^"]+)";', dot, re.MULTILINE)) | {name for edge in edges for name in edge}
    direct = {name: {before for before, after in edges if after == name} for name in names}

    def all_before(name: str) -> set[str]:
        return direct[name].union(*map(all_before, direct[name]))

    return {name: all_before(name) for name in names}


def stage(name: str) -> dict:
    return YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"][name]


def test_every_study_that_measures_has_a_stage_of_its_name(upstream):
    assert set(studies.measuring()) <= set(upstream)
    for name in studies.measuring():
        assert stage(name)["cmd"] == f"python -m pipeline.study {name}"
        assert f"paper_outputs/sources/{name}.txt" in stage(name)["deps"]


def test_tables_wait_for_the_runs_of_table_2_and_for_nothing_else(upstream):
    assert {name.split("@")[0] for name in upstream["tables"]} == {"fetch", "train", "evaluate"}


def test_a_study_waits_for_no_run_of_table_2(upstream):
    """But the one that trains one of them once more."""
    again = params.load(ROOT / "params.yaml").studies["repeats"]
    for name in studies.measuring():
        needed = {f"train@{again.variant}-{again.seed}"} if name == "repeats" else set()
        assert upstream[name] - {"fetch", "sources"} == needed, name


def test_a_study_needs_the_data_if_it_asks_for_images_or_trains(upstream):
    """`initialised_layers` asks for images, and a `Training` of its own loads them."""
    for name in studies.measuring():
        trains = hasattr(studies.module(name), "trainings") and not studies.gathers(name)
        uses_data = trains or re.search(r"lab\.images\(|initialised_layers\(|= Training\(", sources.text(name)) is not None
        assert (
            ("fetch" in upstream[name]) == uses_data == bool({"data", "data/${data.source}"} & set(stage(name)["deps"]))
        ), name


def test_the_report_waits_for_the_tables_and_every_study(upstream):
    assert {"tables", "sources", *studies.measuring()} <= upstream["report"]


def test_the_report_depends_on_what_was_measured_by_hand():
    assert {f"paper_outputs/{name}" for name in ("benchmarks", "pilot.csv", "trust")} <= set(stage("report")["deps"])


def test_no_training_depends_on_how_it_is_told(upstream):
    assert all(upstream[name] == {"fetch"} for name in upstream if name.startswith("train@"))


def test_an_experiment_with_other_settings_leaves_the_studies_alone():
    """Their models follow the recipe, so that no stage of a study depends on what one edits for a training."""
    edited = {"data", "init", "model", "run", "train"}
    for name in studies.measuring():
        assert not edited & {key for key in stage(name).get("params", []) if isinstance(key, str)}, name
