"""The identity passes where A is exp(S), and fails where it is not quite."""

import numpy as np
import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.measures import scale_for_norm
from pipeline.report import figures
from pipeline.studies import CHECK, FAILS, OBSERVATION, PASSES
from pipeline.studies.paper import theorem_2_1
from pipeline.studies.paper.theorem_2_1 import IDENTICAL, exponential_error, exponential_tolerance, findings, measure
from tests.osa.helpers import draw
from tests.pipeline.synthetic import write_params


@pytest.mark.parametrize("method", IDENTICAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1, 30])
def test_exponential_stays_in_its_tolerance(method, dtype, size):
    query, key, _ = (x.detach() for x in draw(17, 5, dtype=dtype))
    scale = scale_for_norm(query[0, 0], key[0, 0], size)[None, None].to(dtype)
    error = exponential_error(query, key, scale, method)
    tolerance = exponential_tolerance(query, key, scale, method)
    assert error.shape == tolerance.shape == (2, 3)
    assert (error <= tolerance).all()
    assert (tolerance < (0.05 if dtype is torch.float32 else 1e-9)).all() or size == 30


@pytest.mark.parametrize("method", IDENTICAL)
def test_a_wrong_exponential_leaves_the_tolerance(method, monkeypatch):
    def first_order(query, key, *, scale, **_):
        return torch.eye(query.shape[-2], dtype=query.dtype) + reference.skew(query, key, scale)

    monkeypatch.setattr(theorem_2_1, "orthogonal_attention_matrix", first_order)
    query, key, _ = (x.detach() for x in draw(17, 5))
    scale = scale_for_norm(query[0, 0], key[0, 0], 1e-3)[None, None]
    error = exponential_error(query, key, scale, method)
    assert (error > 100 * exponential_tolerance(query, key, scale, method)).all()


def found(lab):
    settings = lab.params.studies["theorem_2_1"]
    return findings(settings, measure(settings, lab), lab)


def test_what_is_found(lab):
    check, observation = found(lab)
    assert (check.kind, check.verdict) == (CHECK, PASSES)
    assert all(measure.value < 0.5 for measure in check.measures)
    assert [row[0] for row in check.table.rows][:2] == ["QR, float32", "QR, float64"]
    assert len(figures.png(check.figure)) > 1000
    assert (observation.kind, observation.verdict) == (OBSERVATION, "")
    small, medium, large = (measure.value for measure in observation.measures[:3])
    assert 1e-7 < small < medium < large <= 2


@pytest.mark.parametrize("factor", [1 + 1e-9, -1], ids=["scale", "sign"])
@pytest.mark.parametrize("wrong", [("qr",), ("exact",), IDENTICAL])
def test_a_wrong_operator_fails(wrong, factor, lab, monkeypatch):
    right = theorem_2_1.orthogonal_attention_matrix

    def broken(query, key, *, scale, method, **options):
        return right(query, key, scale=factor * scale if method in wrong else scale, method=method, **options)

    monkeypatch.setattr(theorem_2_1, "orthogonal_attention_matrix", broken)
    check, _ = found(lab)
    assert check.verdict == FAILS
    assert [measure.is_met for measure in check.measures] == [method not in wrong for method in IDENTICAL]


def test_trained_layers_are_those_of_the_table(lab):
    rows = [("osa_ns", 0, 0.1), ("osa_ns", 0, 0.3), ("osa_ns", 1, 0.5), ("osa_qr", 0, 1e-7)]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", "exp_error_max"])}
    _, observation = found(lab)
    trained = [measure for measure in observation.measures if "trained" in measure.what]
    assert [(measure.value, measure.n) for measure in trained] == [(0.4, 2), (1e-7, 1)]
    assert trained[0].what.startswith(lab.label("osa_ns")) and trained[0].note == "from 0.3 to 0.5"
    assert "not evaluated" not in observation.remark
    assert observation.sources == ["paper_outputs/tables/layers.csv"]


@pytest.mark.parametrize("columns", [{}, {"exp_error_max": [np.nan]}], ids=["absent", "empty"])
def test_layers_that_are_not_evaluated_are_said(columns, lab):
    lab.tables = {"layers": pd.DataFrame({"variant": ["osa_ns"], "seed": [0], "error_max": [0.1]} | columns)}
    _, observation = found(lab)
    assert "not evaluated" in observation.remark and not observation.sources
    assert not any("trained" in measure.what for measure in observation.measures)


def test_same_inputs_give_the_same_table(lab):
    settings = lab.params.studies["theorem_2_1"]
    once, again = (measure(settings, lab)["errors"] for _ in range(2))
    pd.testing.assert_frame_equal(once, again, check_exact=True)


@pytest.mark.parametrize("study", ["theorem_2_1", "theorem_3_1"])
def test_too_few_tokens_are_refused(study, tmp_path):
    write_params(tmp_path, lambda raw: raw[study].update(sizes=[[5, 3]]))
    with pytest.raises(UserError, match=f"{study}.*N = 5 < 2 d_v = 6"):
        params.load(tmp_path / "params.yaml")
