"""Each statement has a number that shows it, whatever the seed, and a number that does not is told."""

import pytest
import torch

from pipeline.studies.orthogonal import orthogonality_sources
from pipeline.studies.orthogonal.orthogonality_sources import STATEMENTS, Settings, findings, measure


@pytest.fixture(scope="module")
def tables():
    return measure(Settings(seeds=[0, 1, 2]), None)


def test_every_statement_is_shown_for_every_seed(tables):
    (finding,) = findings(Settings(seeds=[0, 1, 2]), tables, None)
    assert [each.what for each in finding.measures if not each.is_met] == []
    assert finding.verdict == "passes" and len(finding.table.rows) == len(STATEMENTS)


def test_one_seed_that_does_not_show_it_is_enough(tables):
    table = tables["checks"].copy()
    ascent = (table["statement"] == "ascent") & (table["seed"] == 1)
    table.loc[ascent, "value"] = 0.99
    (finding,) = findings(Settings(seeds=[0, 1, 2]), {"checks": table}, None)
    assert finding.verdict == "fails"
    assert [each.note for each in finding.measures if not each.is_met] == ["it ascends"]


@pytest.mark.parametrize(
    "name, wrong", [("update", lambda w, g, rate: w - rate * g), ("reflections", lambda v: torch.eye(v.shape[-1]) * v.sum())]
)
def test_other_code_shows_nothing(monkeypatch, name, wrong):
    monkeypatch.setattr(orthogonality_sources, name, wrong)
    (finding,) = findings(Settings(seeds=[0]), measure(Settings(seeds=[0]), None), None)
    assert finding.verdict == "fails"
