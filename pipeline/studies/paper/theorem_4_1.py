"""Theorem 4.1: the Jacobian of one head of OSA is J₁ + J₂.

J from automatic differentiation of the head is set beside both terms of Eq. 13, computed by themselves.
"""

import itertools
import math

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from osa.functional import orthogonal_attention_matrix
from pipeline.core.params import Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import METHODS, PRODUCTS, head, jacobian, norm, query_key_product, random_head, rounding, skew
from pipeline.report import charts
from pipeline.report.looks import METHOD_LABELS, STYLE
from pipeline.report.numbers import number
from pipeline.studies import CHECK, Finding, Table, Tables
from pipeline.studies._findings import largest

place = 41
SIZES = ((5, 12, 3), (11, 12, 2), (17, 8, 4))  # N, d, h; the second has N < 2d_v
ALPHA = 1.0  # so that J₁ is as large as J₂


class Settings(Section):
    seeds: Seeds


def measure(settings: Settings, lab: Lab) -> Tables:
    """‖J − (J₁ + J₂)‖_F/‖J‖_F of one head on Gaussian tokens, and both terms' spectral norms."""
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


def terms_and_jacobian(x: Tensor, weights: tuple[Tensor, ...], scale: float, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """J₁ and J₂ of Eq. 13, and J by automatic differentiation, (N·d, N·d) each.

    ∂A is the exponential's derivative in closed form; that of Newton–Schulz, whose A is not exp(S), is automatic too.
    """
    w_query, w_key, w_value, w_out = weights

    def matrix(x: Tensor) -> Tensor:
        return orthogonal_attention_matrix(x @ w_query, x @ w_key, scale=scale, method=method)

    derivative = jacobian(matrix, x) if method == "newton_schulz" else exponential_jacobian(x, w_query, w_key, scale)
    whole = jacobian(lambda x: head(x, weights, scale, method=method), x)
    return *jacobian_terms(x, matrix(x), derivative, w_value @ w_out), whole


def exponential_jacobian(x: Tensor, w_query: Tensor, w_key: Tensor, scale: float) -> Tensor:
    """∂vec A/∂vec X of A = exp(S), (N², N·d), without automatic differentiation.

    ∂S = scale · (∂X W̃ Xᵀ + X W̃ ∂Xᵀ) with W̃ = W^Q(W^K)ᵀ − W^K(W^Q)ᵀ (Eq. 82). The integral of Eq. 79 is elementwise
    in the eigenvectors U of iS, with eigenvalues λ: Uᴴ ∂A U = Φ ∘ Uᴴ ∂S U, Φ_ij = e^(−i(λᵢ+λⱼ)/2) sinc((λᵢ−λⱼ)/2).
    """
    tokens, width = x.shape
    directions = torch.eye(tokens * width, dtype=x.dtype).unflatten(1, (width, tokens)).mT  # (N·d, N, d)
    half = scale * directions @ query_key_product(w_query, w_key) @ x.mT
    change = half - half.mT  # (N·d, N, N): W̃ is skew
    values, vectors = torch.linalg.eigh(1j * skew(x @ w_query, x @ w_key, scale))
    mean, difference = (values[:, None] + values) / 2, (values[:, None] - values) / 2
    phi = torch.exp(-1j * mean) * torch.sinc(difference / math.pi)  # torch's sinc has π in it
    result = vectors @ (phi * (vectors.mH @ change.to(phi.dtype) @ vectors)) @ vectors.mH
    return result.real.mT.flatten(1).mT


def jacobian_terms(x: Tensor, a: Tensor, a_jacobian: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """J₁ = (X W ⊗ I_N)ᵀ ∂vec A/∂vec X and J₂ = Wᵀ ⊗ A of Eq. 13, (N·d, N·d) each, with W = W^V W^O.

    Args:
        x: (N, d).
        a: A(X), (N, N).
        a_jacobian: ∂vec A/∂vec X, (N², N·d).
        w: (d, d).
    """
    identity = torch.eye(len(x), dtype=x.dtype)
    return torch.kron(x @ w, identity).mT @ a_jacobian, torch.kron(w.mT.contiguous(), a)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    table = tables["errors"]
    measures, rows = [], []
    for method, own in table.groupby("method", sort=False):
        ratios = own["error"] / own["tolerance"]
        measures.append(largest(f"{METHOD_LABELS[method]}: relative error over what rounding allows", ratios))
        worst = own[["first_norm", "second_norm", "error"]].max()
        rows.append([METHOD_LABELS[method], *map(number, worst)])
    return [
        Finding(
            id="theorem_4_1",
            title="The Jacobian is J₁ + J₂",
            place="Theorem 4.1",
            kind=CHECK,
            statement="J = ∂vec OSA(X)/∂vec X = (X W^V W^O ⊗ I)ᵀ ∂vec A/∂vec X + (W^V W^O)ᵀ ⊗ A = J₁ + J₂. This holds for "
            "any weights: it tests the gradients of the code.",
            measures=measures,
            rule="In float64 and in every case, J from automatic differentiation differs from J₁ + J₂ by at most "
            f"{PRODUCTS} · max(N, d) · eps · cond(M), relative to ‖J‖_F.",
            allowance="what rounding allows",
            table=Table(["Method", "Largest ‖J₁‖₂", "Largest ‖J₂‖₂", "Largest relative error"], rows),
            figure=draw(table),
            caption="Relative difference of J and J₁ + J₂, for each method, size and seed; dashed, what rounding allows.",
            remark="For QR and exact ∂A is the exponential's derivative in closed form; for Newton–Schulz, whose A is not "
            "exp(S), it too is differentiated automatically.",
        )
    ]


@matplotlib.rc_context(STYLE)
def draw(table: pd.DataFrame) -> Figure:
    """The relative difference of each case, and what rounding allows."""
    figure, (axes,) = charts.panels(1, 3.2)
    sizes = table.groupby(["tokens", "embed_dim", "num_heads"], sort=False)
    for tick, (_, own) in enumerate(sizes):
        for offset, method in zip((-0.18, 0, 0.18), METHODS, strict=True):
            points = own.loc[own["method"] == method, "error"].clip(lower=1e-17)
            axes.plot([tick + offset] * len(points), points, **charts.method_style(method, linestyle="", markersize=5))
        axes.plot([tick - 0.35, tick + 0.35], [own["tolerance"].min()] * 2, **charts.EXPECTED)
    axes.set_xticks(range(len(sizes)), [f"N = {n}, d = {d}, d_v = {d // h}" for (n, d, h), _ in sizes])
    axes.set(ylabel="‖J − J₁ − J₂‖_F / ‖J‖_F", title="Jacobian of one head")
    charts.logarithmic(axes, "y")
    handles = [charts.method_line(method, linestyle="") for method in METHODS]
    charts.legend(figure, [*handles, charts.expected_line("what rounding allows")], 4)
    return figure
