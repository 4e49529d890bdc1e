"""Theorems 2.1 to 4.4: the checks hold of the code, and fail of code that is wrong on purpose."""

import math
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch

import osa.init
from osa import reference
from osa.init import stiefel_uniform
from pipeline.config import reading
from pipeline.core.errors import UserError
from pipeline.report import figures
from pipeline.results import measures
from pipeline.studies.lab import initialised_layers
from pipeline.studies.paper import theorem_2_1, theorem_2_2, theorem_3_1, theorem_4_1, theorem_4_2, theorems_4_3_4_4
from tests.osa.helpers import draw, polar_express_basis

SETTINGS = {
    theorem_2_1: {"sizes": [[7, 2]], "norms": [0.01, 1, 20], "conditions": [1, 1e3]},
    theorem_2_2: {"depths": [0, 1, 4], "alphas": [0.5]},
    theorem_3_1: {"sizes": [[7, 2]], "iterations": 7, "norms": [0.1, 3], "conditions": [1, 10]},
    theorem_4_1: {},
    theorem_4_2: {},
    theorems_4_3_4_4: {},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(theorems_4_3_4_4, "SIZES", ((5, 8, 2),))
    monkeypatch.setattr(theorems_4_3_4_4, "ALPHAS", (1e-5, 1e-4, 1e-3, 1e-2, 1.0))


def settings_of(study):
    return study.Settings.model_validate({"seeds": [0]} | SETTINGS[study])


def measured(study, lab):
    return study.measure(settings_of(study), lab)


def summary(study, lab):
    """The summary; Theorem 4.1 has one for each method."""
    settings, tables = settings_of(study), measured(study, lab)
    if study is not theorem_4_1:
        return study.summarise(settings, tables, lab)
    by_method = tables["errors"].groupby("method")
    return {method: study.summarise(settings, {"errors": own}, lab)["float64"] for method, own in by_method}


def failing(numbers):
    return {name for name, value in numbers.items() if isinstance(value, dict) and value.get("holds") is False}


@pytest.mark.parametrize("study", SETTINGS, ids=lambda study: study.__name__.rpartition(".")[2])
def test_the_code_holds(study, lab):
    numbers = summary(study, lab)
    checks = [value for value in numbers.values() if isinstance(value, dict) and "holds" in value]
    assert checks and not failing(numbers)


def by_one_method(wrong, factor):
    def change(right):
        return lambda *qk, scale, method, **rest: right(
            *qk, scale=factor * scale if method == wrong else scale, method=method, **rest
        )

    return change


def first_order(right):
    """V + S V: the first two terms of exp(S) V."""
    return lambda q, k, v, *, scale, method: v + scale * (q @ k.mT - k @ q.mT) @ v


def stretched(right):
    """A value projection whose columns have unequal lengths, as no weights of Section 4 have."""
    return lambda q, k, v, **rest: right(q, k, v * torch.linspace(1, 2, v.shape[-1], dtype=v.dtype), **rest)


def gaussian(right):
    return lambda n, m, *, generator, dtype=None: 3 * torch.randn(n, m, generator=generator, dtype=dtype) / n**0.5


def halves(right):
    """W^Q and W^K orthonormal each, but not together."""
    return lambda n, m, *, generator, dtype=None: torch.cat(
        [stiefel_uniform(n, m // 2, generator=generator, dtype=dtype) for _ in range(2)], -1
    )


MATRIX = (theorem_2_1, theorem_2_1, "orthogonal_attention_matrix")
SPECTRUM = (theorem_2_2, theorem_2_2, "orthogonal_attention")
METHODS = set(measures.METHODS)
HEAD = (theorem_4_1, measures, "orthogonal_attention")
WEIGHTS = (theorem_4_2, osa.init, "stiefel_uniform")
WRONG = {  # study, what is replaced by what, and the checks that fail
    "2.1 scale of qr": (*MATRIX, by_one_method("qr", 1 + 1e-9), {"float64"}),
    "2.1 scale of exact": (*MATRIX, by_one_method("exact", 1 + 1e-9), {"float64"}),
    "2.1 sign of qr": (*MATRIX, by_one_method("qr", -1), {"float32", "float64"}),
    "2.1 sign of exact": (*MATRIX, by_one_method("exact", -1), {"float32", "float64"}),
    "2.2 first order": (*SPECTRUM, first_order, {"float64"}),
    "2.2 too large": (*SPECTRUM, lambda right: lambda *qkv, **rest: (1 + 1e-9) * right(*qkv, **rest), {"float64"}),
    "3.1 exponential": (theorem_3_1, theorem_3_1, "exponential", lambda right: lambda s: right(2 * s), {"eq_10", "eq_11"}),
    "3.1 overshooting": (
        *(theorem_3_1, theorem_3_1, "iterates"),
        lambda right: lambda *given: [1.4 * basis for basis in right(*given)],
        {"eq_10", "eq_11"},
    ),
    "4.1 scale": (*HEAD, lambda right: lambda *qkv, scale, **rest: right(*qkv, scale=1.001 * scale, **rest), METHODS),
    "4.1 transpose": (*HEAD, lambda right: lambda q, k, v, **rest: right(k, q, v, **rest), METHODS),
    "4.1 half a gradient": (*HEAD, lambda right: lambda q, k, v, **rest: right(q.detach(), k, v, **rest), METHODS),
    "4.1 derivative": (
        *(theorem_4_1, theorem_4_1, "exponential_jacobian"),
        lambda right: lambda x, q, k, scale: right(x, q, q, scale),
        METHODS - {"newton_schulz"},  # whose derivative is automatic
    ),
    "4.2 Gaussian": (*WEIGHTS, gaussian, {"float32", "float64"}),
    "4.2 halves": (*WEIGHTS, halves, {"float32", "float64"}),
    "4.2 rounded to float32": (theorem_4_2, theorem_4_2, "default_dtype", lambda right: nullcontext, {"float64"}),
    "4.3 weights": (theorems_4_3_4_4, measures, "stiefel_uniform", gaussian, {"first_term", "condition"}),
    "4.3 not smooth in alpha": (
        *(theorems_4_3_4_4, theorems_4_3_4_4, "orthogonal_attention"),
        lambda right: lambda *qkv, scale, **rest: right(*qkv, scale=scale**0.9, **rest),
        {"slope", "first_term"},
    ),
    "4.4 stretched": (theorems_4_3_4_4, measures, "orthogonal_attention", stretched, {"condition"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_fails(name, lab, monkeypatch):
    study, module, attribute, change, expected = WRONG[name]
    monkeypatch.setattr(module, attribute, change(getattr(module, attribute)))
    assert failing(summary(study, lab)) == expected


@pytest.mark.parametrize(
    "study, values, words",
    [
        (theorem_2_1, {"sizes": [[5, 3]]}, r"sizes.*N = 5 is below 2 d_v = 6"),
        (theorem_3_1, {"sizes": [[5, 3]]}, r"sizes.*N = 5 is below 2 d_v = 6"),
        *((theorem_2_2, {"depths": depths}, "depths must start at 0") for depths in ([1, 2], [0, 4, 2], [0, 1, 1])),
    ],
)
def test_settings_that_a_theorem_is_not_about_are_refused(study, values, words):
    with pytest.raises(UserError, match=words):
        reading.validate(study.Settings, {"seeds": [0]} | values, "params.yaml")


@pytest.mark.parametrize("study, column", [(theorem_2_1, "exp_error_max"), (theorem_3_1, "error_max")])
def test_trained_layers_are_those_of_the_table(study, column, lab):
    rows = [("osa_ns", 0, 0.1), ("osa_ns", 0, 0.3), ("osa_ns", 1, 0.5), ("osa_ns", 1, None), ("osa_qr", 0, 1e-7)]
    lab.tables = {"layers": pd.DataFrame(rows, columns=["variant", "seed", column])}
    trained = summary(study, lab)["trained"]
    if study is theorem_3_1:
        assert (trained["osa_ns"].mean, trained["osa_ns"].n) == (0.4, 2)
        trained = {name: own.max for name, own in trained.items()}
    assert trained == {"osa_ns": 0.5, "osa_qr": 1e-7}


# Theorem 2.2


@pytest.mark.slow
def test_softmax_loses_rank_and_the_figure_is_the_same_each_time(lab):
    tables, settings = measured(theorem_2_2, lab), settings_of(theorem_2_2)
    numbers = theorem_2_2.summarise(settings, tables, lab)
    assert numbers["rank"]["softmax"] < 1.1 < numbers["rank"]["first"] and numbers["newton_schulz"][0]["change"] > 1e-6
    once, again = (figures.svg(theorem_2_2.draw(settings, tables, lab)) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("tokens", ["gaussian", "mnist"])
def test_eigenvalues_in_the_files_are_those_of_the_tokens(tokens, lab):
    """The trace at depth 0 is ‖X‖²_F: the sum of the eigenvalues of X Xᵀ."""
    tables, image = measured(theorem_2_2, lab), theorem_2_2._image_tokens(lab, 0)
    x = image if tokens == "mnist" else lab.normal(0, "theory/kernel", *image.shape)
    rows = tables["summary"].query("tokens == @tokens and depth == 0 and seed == 0")
    assert rows["trace"].tolist() == pytest.approx([x.square().sum().item()] * len(rows))
    spectrum = tables["spectra"].query("depth == 0 and stack == 'softmax'")["eigenvalue"]
    assert tokens == "gaussian" or spectrum.sum() == pytest.approx(x.square().sum().item())


# Theorem 3.1


def test_the_low_rank_exponential_and_its_bases_are_those_of_the_references():
    query, key, _ = (x.detach() for x in draw(13, 3))
    m = torch.cat([query, key], -1)
    bases = theorem_3_1._bases(m, 8)
    for k, (newton_schulz, express) in enumerate(zip(bases["newton_schulz"], bases["polar_express"], strict=True), 1):
        torch.testing.assert_close(newton_schulz, reference.newton_schulz_basis(m, num_iterations=k))
        torch.testing.assert_close(express, polar_express_basis(m, k))
    actual = theorem_3_1.low_rank_exponential(bases["newton_schulz"][2], reference.skew(query, key, 0.7))
    torch.testing.assert_close(actual, reference.low_rank_matrix(query, key, 0.7, bases["newton_schulz"][2]))


def test_bounds_of_a_known_basis():
    basis = torch.diag(torch.tensor([math.sqrt(0.5), 1.0], dtype=torch.float64))
    skew_norm = torch.tensor(3.0, dtype=torch.float64).log()
    bounds = theorem_3_1.orthogonality_bounds(basis, skew_norm)
    assert [bound.item() for bound in bounds] == pytest.approx([4 * 0.25, 1, 1])
    assert theorem_3_1.orthogonality_bounds(math.sqrt(2) * basis, skew_norm)[2].item() == pytest.approx((9 - 1) ** 2 * 2)


def test_newton_schulz_uses_its_bounds_and_polar_express_breaks_one(lab):
    numbers = summary(theorem_3_1, lab)
    express = numbers["polar_express"]
    assert min(numbers["eq_10"]["share"], numbers["eq_11"]["share"]) > 0.1 and 0 < numbers["initial"] < 1
    assert 0 < express["above_10"] < express["cases"] and express["most_above_10"] > 1 and express["general"]["holds"]


# Theorem 4.1


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_derivative_of_the_exponential_is_the_limit_of_differences():
    x, change, w_query, w_key = normal(5, 4), normal(5, 4, seed=1), normal(4, 2, seed=2), normal(4, 2, seed=3)

    def matrix(step):
        moved = x + step * change
        return measures.exponential(reference.skew(moved @ w_query, moved @ w_key, 0.7))

    expected = (matrix(1e-5) - matrix(-1e-5)) / 2e-5
    actual = theorem_4_1.exponential_jacobian(x, w_query, w_key, 0.7) @ change.mT.flatten()  # vec is column by column
    torch.testing.assert_close(actual.unflatten(0, (5, 5)).mT, expected, rtol=1e-7, atol=1e-8)


def test_terms_of_a_constant_and_of_a_linear_attention():
    x, a, w = normal(3, 4), normal(3, 3, seed=1), normal(4, 4, seed=2)
    first, second = theorem_4_1.jacobian_terms(x, a, torch.zeros(9, 12, dtype=torch.float64), w)
    assert not first.any()
    torch.testing.assert_close(second, measures.jacobian(lambda x: a @ x @ w, x))
    gram = measures.jacobian(lambda x: x @ x.mT, x)
    terms = theorem_4_1.jacobian_terms(x, x @ x.mT, gram, w)
    torch.testing.assert_close(sum(terms), measures.jacobian(lambda x: x @ x.mT @ x @ w, x))


# Theorems 4.3 and 4.4


@pytest.mark.parametrize("method", theorems_4_3_4_4.METHODS)
def test_first_term_is_that_of_theorem_4_1(method):
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 6, generator=generator, dtype=torch.float64), measures.random_head(6, 3, generator)
    expected, _, _ = theorem_4_1.terms_and_jacobian(x, weights, 0.7, method)
    actual = theorems_4_3_4_4.first_term(x, weights, 0.7, method=method)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_condition_bound():
    assert theorems_4_3_4_4.condition_bound(0.1, 0.3) == pytest.approx(1.4 / 0.6)
    assert theorems_4_3_4_4.condition_bound(0.5, 0.5) == math.inf


def test_condition_of_a_whole_layer(lab):
    table = theorems_4_3_4_4.measure(theorems_4_3_4_4.Settings(seeds=[1]), lab)["layers"]
    attention = lab.model(lab.config("osa_qr"), 1).double().blocks[2].attention
    total = sum(w_value @ w_out for _, _, w_value, w_out in measures.head_weights(attention))
    own = table[(table["source"] == "osa_qr") & (table["layer"] == 3)]
    assert own["kappa_sum"].item() == pytest.approx(torch.linalg.cond(total).item(), rel=1e-6)
    assert table.groupby(["seed", "layer"])["kappa_sum"].nunique().eq(1).all()  # the summary takes each once


def test_of_trained_layers_the_first_head_counts(lab):
    columns = ["variant", "seed", "layer", "head", "layer_kappa", "jacobian_kappa"]
    rows = [("osa_qr", 0, layer, 0, 10.0 ** (1 + layer), kappa) for layer, kappa in enumerate((2.0, 9.0, 4.0))]
    rows.append(("osa_qr", 0, 0, 1, 10.0, math.nan))
    lab.tables["layers"] = pd.DataFrame(rows, columns=columns)
    numbers = summary(theorems_4_3_4_4, lab)
    assert numbers["head"]["trained"] == {"osa_qr": 9.0} and 1 <= numbers["head"]["initial"] < numbers["layer"]["initial"]


def test_condition_of_a_head_is_that_of_its_dense_jacobian(lab):
    (_, attention, x), *_ = initialised_layers(lab, 0)
    weights, scale = measures.head_weights(attention)[1], attention.scale()[1]
    whole = measures.jacobian(lambda x: measures.head(x, weights, scale, **attention.options), x[0])
    values = torch.linalg.svdvals(whole)[: x.shape[1] * weights[2].shape[1]]
    result = measures.head_condition(attention, 1, x[0])
    np.testing.assert_allclose([result["kappa"], result["jacobian_norm"]], [values[0] / values[-1], values[0]], rtol=1e-6)
