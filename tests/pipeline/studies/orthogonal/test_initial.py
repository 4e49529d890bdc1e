"""Orthogonality as initialised, the maps onto rotations and the bounds on perturbations: the checks hold, and code that is
wrong on purpose fails them."""

import math

import pytest
import torch

from osa.constrained.orthogonal import MAPS
from pipeline.studies.orthogonal import orthogonal_maps, orthogonality, perturbation

SETTINGS = {
    orthogonal_maps: orthogonal_maps.Settings(seeds=[0], sizes=[3, 7]),
    perturbation: perturbation.Settings(seeds=[0], images=1),
}
CHECKS = {  # name → check in a summary
    orthogonal_maps: lambda found: {f"{name} {key}": row[key] for name, row in found["maps"].items() for key in row},
    perturbation: lambda found: found,
}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(perturbation, "MODELS", ("vit", "osa_exact"))


def measured(study, lab):
    tables = study.measure(SETTINGS[study], lab)
    return tables, study.summarise(SETTINGS[study], tables, lab)


def failing(study, lab):
    _, found = measured(study, lab)
    checks = {
        name: each["holds"] for name, each in CHECKS[study](found).items() if isinstance(each, dict) and "holds" in each
    }
    assert len(checks) == {orthogonal_maps: 4 + 3, perturbation: 4}[study]
    return {name for name, holds in checks.items() if not holds}


@pytest.mark.parametrize("study", SETTINGS, ids=lambda study: study.__name__.rpartition(".")[2])
def test_the_code_holds(study, lab):
    assert failing(study, lab) == set()


def another(name, change):
    return orthogonal_maps, orthogonal_maps, "MAPS", lambda right: MAPS | {name: change}


WRONG = {  # study, what is replaced by what, and the checks that fail
    "givens": (*another("givens", lambda x: MAPS["givens"](1.001 * x)), {"givens angle", "givens slope"}),
    "cayley": (
        *another("cayley", lambda x: MAPS["exponential"](x / 2) @ MAPS["householder"](x / 2)),
        {"cayley angle", "cayley slope"},
    ),
    "householder": (*another("householder", MAPS["cayley"]), {"householder slope"}),
    "scale": (
        *(perturbation, perturbation, "orthogonal_attention_matrix"),
        lambda right: lambda query, key, scale: right(query, key, scale=1.1 * scale),
        {"orthogonal"},
    ),
    "sharp softmax": (perturbation, torch, "softmax", lambda right: lambda x, dim: right(5 * x, dim), {"quarter"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_fails(name, lab, monkeypatch):
    study, place, attribute, change, expected = WRONG[name]
    monkeypatch.setattr(place, attribute, change(getattr(place, attribute)))
    if study is perturbation:
        monkeypatch.setattr(perturbation, "MODELS", ())
    assert failing(study, lab) == expected


def test_distances_are_spectral_norms_along_one_direction(lab):
    tables, _ = measured(orthogonal_maps, lab)
    at = tables["apart"].set_index(["map", "n", "seed"]).loc[("cayley", 7, 0)].iloc[-1]
    x = lab.normal(0, "orthogonal_maps/7", 7, 7).tril(-1)
    x = x / torch.linalg.matrix_norm(x - x.mT, 2)
    expected = torch.linalg.matrix_norm(MAPS["cayley"](at["t"] * x) - torch.matrix_exp(at["t"] * (x - x.mT)), 2)
    assert at["t"] == pytest.approx(8) and at["distance"] == pytest.approx(expected.item())
    assert orthogonal_maps.draw(SETTINGS[orthogonal_maps], tables, lab).axes


def test_penalties_have_a_share_of_the_gradient(lab, monkeypatch):
    monkeypatch.setattr(orthogonality, "MODELS", ("vit_noskip_nonorm",))
    settings = orthogonality.Settings(seeds=[0], images=2)
    tables = orthogonality.measure(settings, lab)
    (row,) = orthogonality.summarise(settings, tables, lab)["models"]
    norms = tables["gradients"].set_index("variant").loc["vit_noskip_nonorm"]
    assert row["together"] == pytest.approx(1e-6 * norms[["AM", "LA", "LF"]].sum() / norms["cross_entropy"], rel=1e-4)


@pytest.mark.parametrize(
    "a, expected",
    [
        (torch.eye(5).roll(1, 0), (0, 0, 0, 5, 0)),
        (torch.full((5, 5), 0.2), (1, 0.2, 0.2, 1, math.log(5))),
        (torch.eye(5)[[2] * 5], (5, 1, 0.2, 1, 0)),
        (-torch.eye(5), (0, 0, 0, 5, math.nan)),
    ],
    ids=["permutation", "uniform", "collapse", "no probabilities"],
)
def test_attention_that_is_known(a, expected):
    row = orthogonality.attention_row(a.double().expand(2, 3, 5, 5))
    values = tuple(row[name] for name in ("penalty", "overlap", "own_token", "rank", "entropy"))
    assert values == pytest.approx(expected, nan_ok=True)


def test_gradients_are_those_of_the_sums_over_blocks(lab):
    model = lab.model(lab.config("vit", {"model": {"depth": 2}}), 0).double()
    norms = orthogonality.penalty_gradient_norms(model, *lab.images())
    weights = [w for block in model.blocks for w in (block.mlp.fc1.weight, block.mlp.fc2.weight)]
    expected = [4 * w @ (w.mT @ w - torch.eye(w.shape[1])) for w in weights]
    assert norms["LF"] == pytest.approx(torch.cat([each.flatten() for each in expected]).norm().item())


def test_a_quarter_is_reached_and_a_random_direction_is_never_above_the_worst_one(lab):
    _, summary = measured(perturbation, lab)
    assert 0.999996 < summary["attained"]["value"] <= 1 and 0.5 < summary["orthogonal"]["value"]
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 11, 3, generator=generator, dtype=torch.float64)
    worst, smallest, *_ = perturbation.softmax_ratios(query, key, generator)
    assert 0.1 * worst["largest"] < smallest["largest"] <= worst["largest"] * 1.01 < 0.25
    assert worst["epsilon"] == 0 and 0 < worst["centred_keys"] < 1
