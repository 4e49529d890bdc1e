"""The identity holds where A is exp(S), and fails where it is not quite."""

import pandas as pd
import pytest
import torch

from osa import reference
from pipeline.core import params
from pipeline.core.errors import UserError
from pipeline.measures import scale_for_norm
from pipeline.studies.paper import theorem_2_1, theorem_3_1
from pipeline.studies.paper.theorem_2_1 import IDENTICAL, Settings, exponential_error, exponential_tolerance, measure
from tests.osa.helpers import draw

SETTINGS = Settings(seeds=[0], sizes=[[7, 2]], norms=[0.01, 1, 20], conditions=[1, 1e3])


def summary(lab):
    return theorem_2_1.summarise(SETTINGS, measure(SETTINGS, lab), lab)


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


def test_the_code_holds(lab):
    numbers = summary(lab)
    assert all(numbers[dtype]["holds"] and numbers[dtype]["share"] < 0.5 for dtype in ("float32", "float64"))
    assert numbers["trained"] == {}


@pytest.mark.parametrize("factor", [1 + 1e-9, -1], ids=["scale", "sign"])
@pytest.mark.parametrize("wrong", IDENTICAL)
def test_a_wrong_operator_fails(wrong, factor, lab, monkeypatch):
    right = theorem_2_1.orthogonal_attention_matrix

    def broken(query, key, *, scale, method, **options):
        return right(query, key, scale=factor * scale if method == wrong else scale, method=method, **options)

    monkeypatch.setattr(theorem_2_1, "orthogonal_attention_matrix", broken)
    numbers = summary(lab)
    assert not numbers["float64"]["holds"]
    assert numbers["float32"]["holds"] == (factor != -1)


def test_trained_layers_are_those_of_the_table(lab):
    rows = [("osa_ns", 0, 0.1), ("osa_ns", 1, 0.5), ("osa_ns", 1, None), ("osa_qr", 0, 1e-7)]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", "exp_error_max"])}
    assert summary(lab)["trained"] == {"osa_ns": 0.5, "osa_qr": 1e-7}


@pytest.mark.parametrize("study", [theorem_2_1, theorem_3_1])
def test_too_few_tokens_are_refused(study):
    with pytest.raises(UserError, match=r"sizes.*N = 5 < 2 d_v = 6"):
        params.validate(study.Settings, {"seeds": [0], "sizes": [[5, 3]]}, "params.yaml")
