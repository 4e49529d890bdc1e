"""Theorem 4.1: the Jacobian of one head of OSA is J₁ + J₂.

We compute J by automatic differentiation of the head, and compare it with J₁ + J₂, which we compute from Eq. 13.
"""

import itertools
import math

import pandas as pd
import torch
from torch import Tensor

from osa.functional import orthogonal_attention_matrix
from osa.options import Method
from osa.reference import skew
from pipeline.config.params import Section, Seeds
from pipeline.results.measures import METHODS, head, jacobian, norm, query_key_product, random_head, rounding
from pipeline.studies import Study, Tables
from pipeline.studies._summaries import worst_case
from pipeline.studies.lab import Lab

SIZES = ((5, 12, 3), (11, 12, 2), (17, 8, 4))  # N, d, h. In the first two sizes, N is less than 2d_v.
ALPHA = 1.0  # with this α, J₁ is about as large as J₂


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures ‖J − (J₁ + J₂)‖_F/‖J‖_F, ‖J₁‖₂ and ‖J₂‖₂ of one head on Gaussian tokens."""
    rows = []
    for (tokens, d, heads), seed, method in itertools.product(SIZES, settings.seeds, METHODS):
        generator = lab.generator(seed, f"theory/jacobian/{tokens}x{d}x{heads}")
        x = torch.randn(tokens, d, generator=generator, dtype=torch.float64)
        weights = random_head(d, heads, generator)
        first, second, whole = terms_and_jacobian(x, weights, ALPHA / math.sqrt(d // heads), method)
        condition = torch.linalg.cond(torch.cat([x @ weights[0], x @ weights[1]], -1)).item()
        rows.append(
            {"tokens": tokens, "embed_dim": d, "num_heads": heads, "seed": seed, "method": method, "condition": condition}
            | {"first_norm": norm(first).item(), "second_norm": norm(second).item()}
            | {"error": ((whole - first - second).norm() / whole.norm()).item()}
            | {"tolerance": rounding(max(tokens, d), x.dtype) * condition}
        )
    return {"errors": pd.DataFrame(rows)}


def terms_and_jacobian(
    x: Tensor, weights: tuple[Tensor, ...], scale: float, method: Method
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns J₁ and J₂ of Eq. 13, and J by automatic differentiation, each (N·d, N·d).

    J₁ needs ∂A, which has a closed form for A = exp(S). For Newton–Schulz we differentiate A automatically.
    """
    w_query, w_key, w_value, w_out = weights

    def matrix(x: Tensor) -> Tensor:
        return orthogonal_attention_matrix(x @ w_query, x @ w_key, scale=scale, method=method)

    derivative = jacobian(matrix, x) if method == "newton_schulz" else exponential_jacobian(x, w_query, w_key, scale)
    whole = jacobian(lambda x: head(x, weights, scale, method=method), x)
    return *jacobian_terms(x, matrix(x), derivative, w_value @ w_out), whole


def exponential_jacobian(x: Tensor, w_query: Tensor, w_key: Tensor, scale: float) -> Tensor:
    """Returns ∂vec A/∂vec X of A = exp(S), (N², N·d), without automatic differentiation.

    ∂S = scale · (∂X W̃ Xᵀ + X W̃ ∂Xᵀ) with W̃ = W^Q(W^K)ᵀ − W^K(W^Q)ᵀ (Eq. 82). Let U be the matrix of
    eigenvectors of iS, and λᵢ the eigenvalues. In the basis U, the integral of Eq. 79 is an elementwise product:
    Uᴴ ∂A U = Φ ∘ (Uᴴ ∂S U) with Φ_ij = e^(−i(λᵢ+λⱼ)/2) sinc((λᵢ−λⱼ)/2).
    """
    tokens, width = x.shape
    directions = torch.eye(tokens * width, dtype=x.dtype).unflatten(1, (width, tokens)).mT  # (N·d, N, d)
    half = scale * directions @ query_key_product(w_query, w_key) @ x.mT
    change = half - half.mT  # ∂S, (N·d, N, N): half.mT = −scale · X W̃ ∂Xᵀ, since W̃ is skew-symmetric
    values, vectors = torch.linalg.eigh(1j * skew(x @ w_query, x @ w_key, scale))
    mean, difference = (values[:, None] + values) / 2, (values[:, None] - values) / 2
    phi = torch.exp(-1j * mean) * torch.sinc(difference / math.pi)  # torch.sinc(x) is sin(πx)/(πx)
    result = vectors @ (phi * (vectors.mH @ change.to(phi.dtype) @ vectors)) @ vectors.mH
    return result.real.mT.flatten(1).mT


def jacobian_terms(x: Tensor, a: Tensor, a_jacobian: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns J₁ = (X W ⊗ I_N)ᵀ ∂vec A/∂vec X and J₂ = Wᵀ ⊗ A of Eq. 13, with W = W^V W^O. Each is (N·d, N·d).

    X is (N, d), A is (N, N), ∂vec A/∂vec X is (N², N·d), and W is (d, d).
    """
    identity = torch.eye(len(x), dtype=x.dtype)
    return torch.kron(x @ w, identity).mT @ a_jacobian, torch.kron(w.mT.contiguous(), a)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    errors = tables["errors"]
    return {"float64": worst_case(errors["error"], errors["tolerance"])}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
