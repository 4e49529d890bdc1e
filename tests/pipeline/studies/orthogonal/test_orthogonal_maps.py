"""The four maps part as they should, and one with another scale or another order is caught."""

import subprocess
import sys

import pytest
import torch

from osa.constrained.orthogonal import MAPS
from pipeline.core import files
from pipeline.core.files import ROOT
from pipeline.studies.orthogonal import orthogonal_maps
from pipeline.studies.orthogonal.orthogonal_maps import Settings, findings, measure

SETTINGS = Settings(seeds=[0], sizes=[3, 7])


def check(lab, tmp_path):
    """The finding of what was measured, as its files have it."""
    tables = measure(SETTINGS, lab)
    for name, table in tables.items():
        files.write_csv(tmp_path / f"{name}.csv", table)
    (found,) = findings(SETTINGS, {name: files.read_csv(tmp_path / f"{name}.csv") for name in tables}, lab)
    return found


def test_the_maps_are_what_their_formulas_say(lab, tmp_path):
    found = check(lab, tmp_path)
    assert found.verdict == "passes" and len(found.measures) == 4 + 3 and found.figure is not None


def test_every_map_is_compared():
    assert set(orthogonal_maps.ANGLES) == set(MAPS) == {*orthogonal_maps.ORDERS, orthogonal_maps.EXACT}


@pytest.mark.parametrize(
    "name, change, unmet",
    [
        ("givens", lambda x: MAPS["givens"](1.001 * x), [0, 4]),
        ("exponential", lambda x: MAPS["exponential"](-x), [1, 4, 5, 6]),
        ("cayley", lambda x: MAPS["exponential"](x / 2) @ MAPS["householder"](x / 2), [2, 5]),
        ("householder", lambda x: MAPS["cayley"](x), [6]),
    ],
)
def test_another_map_in_its_place_is_caught(lab, monkeypatch, tmp_path, name, change, unmet):
    monkeypatch.setattr(orthogonal_maps, "MAPS", MAPS | {name: change})
    assert [i for i, measure in enumerate(check(lab, tmp_path).measures) if not measure.is_met] == unmet


def test_distances_are_spectral_norms_along_one_direction(lab):
    apart = measure(SETTINGS, lab)["apart"].set_index(["map", "n", "seed"]).loc[("cayley", 7, 0)]
    x = lab.normal(0, "orthogonal_maps/7", 7, 7).tril(-1)
    x = x / torch.linalg.matrix_norm(x - x.mT, 2)
    at = apart.iloc[-1]
    expected = torch.linalg.matrix_norm(MAPS["cayley"](at["t"] * x) - torch.matrix_exp(at["t"] * (x - x.mT)), 2)
    assert at["t"] == pytest.approx(8) and at["distance"] == pytest.approx(expected.item())


NEW_MAP = """
from osa.constrained.orthogonal import MAPS, orthogonal_
MAPS["again"] = MAPS["cayley"]
import torch
from pipeline.core import params
from pipeline.lab import Lab
from pipeline.studies import in_order
from pipeline.studies.orthogonal import keeping
from pipeline.studies.orthogonal import orthogonal_maps
in_order()
settings = orthogonal_maps.Settings(seeds=[0], sizes=[3])
lab = Lab("orthogonal_maps", params.load(), params.load_paper())
(found,) = orthogonal_maps.findings(settings, orthogonal_maps.measure(settings, lab), lab)
assert found.verdict == "passes", found
MAPS["again"] = lambda x: MAPS["cayley"](1.001 * x)
(found,) = orthogonal_maps.findings(settings, orthogonal_maps.measure(settings, lab), lab)
assert found.verdict == "fails", found
MAPS["again"] = MAPS["cayley"]
assert lab.config("osa_exact", {"variant": keeping.RUNS["osa_again"][1]}).variant.keep_by == "again"
linear = torch.nn.Linear(3, 3)
torch.nn.init.orthogonal_(linear.weight)
orthogonal_(linear, "again")
"""


def test_a_new_map_is_one_function_and_one_name():
    """In a process of its own: modules make their tables of the maps as they are imported."""
    subprocess.run([sys.executable, "-c", NEW_MAP], check=True, cwd=ROOT)
