"""Layers that are compared compute the same function; and the summary of their times."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from osa.constrained.orthogonal import MAPS
from pipeline.benchmarks import orthogonal, post
from pipeline.benchmarks.orthogonal import BOTH, DENSE, FORWARD, OURS, POST, TORCH
from pipeline.core import files
from pipeline.studies.orthogonal import orthogonal_speed


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def lower(angles, n):
    """X with X_ji = θ_ij, whose skew matrix is −A of the post."""
    x, (i, j) = torch.zeros(n, n, dtype=angles.dtype), post.planes(n)
    x[j, i] = angles
    return x


# The post's steps


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_posts_layers_are_the_maps(n):
    x, angles = numbers(4, n), numbers(n * (n - 1) // 2)
    below = lower(angles, n)
    torch.testing.assert_close(post.givens(x, angles), x @ MAPS["givens"](below))
    torch.testing.assert_close(post.exponential(x, angles), x @ MAPS["exponential"](-below))
    torch.testing.assert_close(post.cayley(x, angles), x @ MAPS["cayley"](-2 * below))
    vectors = torch.eye(n) + below / 2
    torch.testing.assert_close(post.householder(x, vectors.mT), -x @ MAPS["householder"](below))


# The script


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(orthogonal, "SAMPLE_SECONDS", 1e-9)
    monkeypatch.setattr(orthogonal, "TOKENS", (1, 7))
    monkeypatch.setattr(orthogonal, "TRAINING_TOKENS", 7)
    monkeypatch.setattr(orthogonal_speed, "TRAINING_TOKENS", 7)
    monkeypatch.setattr(orthogonal_speed, "GOAL_RANGE", (16, 32))


@pytest.mark.slow
def test_every_layer_is_timed_beside_the_dense_one_and_told_of(folder):
    orthogonal.main(["--largest", "32", "--repeats", "1"])
    (path,) = Path("paper_outputs/benchmarks").glob("*/orthogonal.csv")
    table = files.read_csv(path)
    sized = {n: set(own[["map", "code"]].itertuples(index=False, name=None)) for n, own in table.groupby("n")}
    expected = {(DENSE, DENSE), *((name, code) for name in MAPS for code in (OURS, TORCH, POST))} - {("givens", TORCH)}
    assert sized == {16: expected, 32: expected}
    assert len(table) == 2 * 2 * 2 * len(expected)  # tokens, passes, sizes
    assert (table["orthogonality_error"] < 1e-5).all() and (table["seconds"] > 0).all()
    assert (table.loc[table["code"] == DENSE, "seconds_over_dense"] == 1).all()
    ours = table[(table["code"] == OURS) & (table["n"] == 16)]
    assert set(ours["parameters"]) == set(ours["free"]) == {120}
    (machine,) = orthogonal_speed.summarise(None, {}, None)["machines"].values()
    assert machine["ours"].keys() == set(MAPS) and machine["environment"]["device"] == "cpu"


def test_what_takes_too_long_is_left_out():
    key = ("cayley", OURS, 64, 1, FORWARD)
    for before, expected in (((32, 0.26), True), ((32, 0.27), False), ((16, 0.01), False), (None, False)):
        last = {(key[:2], 1, FORWARD): before} if before else {}
        assert orthogonal.fits(key, last) == expected
    assert orthogonal.fits((DENSE, DENSE, 1024, 1, FORWARD), {}) and orthogonal.fits(("cayley", OURS, 16, 1, FORWARD), {})


@pytest.mark.parametrize(
    "low, high, expected", [([1.1, 1.2], [1.2, 1.3], 1.1), ([0.8, 0.7], [0.9, 1.1], 0.8), ([0.9, 2.0], [1.1, 3.0], 0.9)]
)
def test_a_statement_is_judged_where_it_is_nearest_to_failing(low, high, expected):
    table = pd.DataFrame({"p10_over_dense": low, "p90_over_dense": high, "n": 1, "seconds_over_dense": 1})
    assert orthogonal_speed.statement(table, 1.0)["low"] == expected


def test_our_layers_are_judged_at_the_slowest_size(tmp_path):
    row = {"map": "cayley", "code": OURS, "tokens": 6400, "pass": BOTH, "p10_over_dense": 1.0, "p90_over_dense": 2.0}
    sizes = {32: 9.0, 64: 1.2, 256: 1.31, 512: 9.0}
    rows = [row | {"n": n, "seconds_over_dense": ratio} for n, ratio in sizes.items()]
    rows.append(row | {"map": "givens", "code": POST, "n": 64, "seconds_over_dense": 30.0})
    files.write_csv(tmp_path / "orthogonal.csv", pd.DataFrame(rows))
    files.write_json(tmp_path / "orthogonal.json", {"environment": {}})
    (ours,) = orthogonal_speed.speed_on(tmp_path / "orthogonal.csv")["ours"].values()
    assert (ours["over_dense"], ours["n"]) == (1.31, 256)
