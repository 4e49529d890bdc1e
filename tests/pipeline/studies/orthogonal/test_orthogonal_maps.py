"""The four maps differ as they should, and one with another scale or another order is caught."""

import pytest
import torch

from osa.constrained.orthogonal import MAPS
from pipeline.studies.orthogonal import orthogonal_maps
from pipeline.studies.orthogonal.orthogonal_maps import Settings, draw, measure, summarise

SETTINGS = Settings(seeds=[0], sizes=[3, 7])


def fails(lab):
    """The maps and checks that fail."""
    maps = summarise(SETTINGS, measure(SETTINGS, lab), lab)["maps"]
    checks = {(name, key): row[key] for name, row in maps.items() for key in ("angle", "slope") if key in row}
    assert len(checks) == 4 + 3
    return {key for key, check in checks.items() if not check["holds"]}


def test_the_maps_are_what_their_formulas_say(lab):
    assert not fails(lab)
    assert draw(SETTINGS, measure(SETTINGS, lab), lab).axes


@pytest.mark.parametrize(
    "name, change, expected",
    [
        ("givens", lambda x: MAPS["givens"](1.001 * x), {("givens", "angle"), ("givens", "slope")}),
        (
            "cayley",
            lambda x: MAPS["exponential"](x / 2) @ MAPS["householder"](x / 2),
            {("cayley", "angle"), ("cayley", "slope")},
        ),
        ("householder", lambda x: MAPS["cayley"](x), {("householder", "slope")}),
    ],
)
def test_another_map_in_its_place_is_caught(lab, monkeypatch, name, change, expected):
    monkeypatch.setattr(orthogonal_maps, "MAPS", MAPS | {name: change})
    assert fails(lab) == expected


def test_distances_are_spectral_norms_along_one_direction(lab):
    apart = measure(SETTINGS, lab)["apart"].set_index(["map", "n", "seed"]).loc[("cayley", 7, 0)]
    x = lab.normal(0, "orthogonal_maps/7", 7, 7).tril(-1)
    x = x / torch.linalg.matrix_norm(x - x.mT, 2)
    at = apart.iloc[-1]
    expected = torch.linalg.matrix_norm(MAPS["cayley"](at["t"] * x) - torch.matrix_exp(at["t"] * (x - x.mT)), 2)
    assert at["t"] == pytest.approx(8) and at["distance"] == pytest.approx(expected.item())
