"""The Jacobian's two terms against differences and known maps, and wrong operators that the check must catch."""

import pytest
import torch

from osa.functional import orthogonal_attention
from pipeline import measures
from pipeline.studies.paper import theorem_4_1
from pipeline.studies.paper.theorem_4_1 import METHODS, Settings, exponential_jacobian, jacobian_terms, measure


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(lab):
    return measure(Settings(seeds=[0]), lab)["errors"]


def check(table, lab):
    return theorem_4_1.summarise(Settings(seeds=[0]), {"errors": table}, lab)["float64"]


def test_the_code_holds(lab):
    assert check(errors(lab), lab)["holds"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, *, scale, **rest: orthogonal_attention(q, k, v, scale=1.001 * scale, **rest),
        lambda q, k, v, *, scale, **rest: orthogonal_attention(k, q, v, scale=scale, **rest),  # the transpose
        lambda q, k, v, *, scale, **rest: orthogonal_attention(q.detach(), k, v, scale=scale, **rest),  # half a gradient
    ],
    ids=["scale", "transpose", "gradient"],
)
def test_a_wrong_operator_fails(wrong, lab, monkeypatch):
    monkeypatch.setattr(measures, "orthogonal_attention", wrong)
    table = errors(lab)
    assert not any(check(own, lab)["holds"] for _, own in table.groupby("method"))


def test_a_wrong_derivative_fails_where_it_enters(lab, monkeypatch):
    monkeypatch.setattr(theorem_4_1, "exponential_jacobian", lambda x, q, k, scale: exponential_jacobian(x, q, q, scale))
    held = {method: check(own, lab)["holds"] for method, own in errors(lab).groupby("method")}
    assert held == {method: method == "newton_schulz" for method in METHODS}


def test_derivative_of_the_exponential_is_the_limit_of_differences():
    x, change, w_query, w_key = gaussian(5, 4), gaussian(5, 4, seed=1), gaussian(4, 2, seed=2), gaussian(4, 2, seed=3)

    def matrix(step):
        moved = x + step * change
        return measures.exponential(measures.skew(moved @ w_query, moved @ w_key, 0.7))

    expected = (matrix(1e-5) - matrix(-1e-5)) / 2e-5
    actual = exponential_jacobian(x, w_query, w_key, 0.7) @ change.mT.flatten()  # vec is column by column
    torch.testing.assert_close(actual.unflatten(0, (5, 5)).mT, expected, rtol=1e-7, atol=1e-8)


def test_terms_of_a_constant_and_of_a_linear_attention():
    x, a, w = gaussian(3, 4), gaussian(3, 3, seed=1), gaussian(4, 4, seed=2)
    first, second = jacobian_terms(x, a, torch.zeros(9, 12, dtype=torch.float64), w)
    assert not first.any()
    torch.testing.assert_close(second, measures.jacobian(lambda x: a @ x @ w, x))
    gram = measures.jacobian(lambda x: x @ x.mT, x)
    first, second = jacobian_terms(x, x @ x.mT, gram, w)
    torch.testing.assert_close(first + second, measures.jacobian(lambda x: x @ x.mT @ x @ w, x))
