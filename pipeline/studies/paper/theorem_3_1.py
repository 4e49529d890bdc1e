"""Theorem 3.1: ‖YᵀY − I‖₂ ≤ (e^{‖S‖₂} − 1)² maxᵢ|σᵢ²(σᵢ² − 1)| ≤ ¼ (e^{‖S‖₂} − 1)² for Y = I + B (exp[S] − I) Bᵀ.

Proved for singular values σᵢ of B of at most 1, such as those of Newton–Schulz (Eq. 9): there it checks the code. What
becomes of the bounds with Polar Express, which passes 1 before it converges, and how orthogonal are the layers? Measured by
K, cond(M) and ‖S‖₂, and in the layers of the models as initialised at their own K.
"""

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator
from pydantic import Field
from torch import Tensor

from osa.functional import ITERATIONS
from osa.linalg import EPSILON, POLAR_EXPRESS
from pipeline.core.params import PositiveFloat, PositiveInt, Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import (
    PRODUCTS,
    exponential,
    initialised_layers,
    matrix_with_condition,
    norm,
    orthogonality_error,
    rounding,
    scale_for_norm,
    skew,
)
from pipeline.report import charts
from pipeline.report.looks import INK, METHOD_LABELS, PALETTE, STYLE, look
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest, origin, trained_layers, worst_over_seeds
from pipeline.studies._settings import Condition, HeadSizes

place = 31
EXPRESS = PALETTE[3]  # no model of Table 2 uses Polar Express
CROSS = {"color": INK, "linestyle": "", "marker": "x", "markersize": 4, "markeredgewidth": 0.9}  # layers


class Settings(Section):
    seeds: Seeds
    sizes: HeadSizes = Field([[50, 16]])  # N, d_v: the paper's
    iterations: PositiveInt = 12  # K from 1 to here
    norms: list[PositiveFloat] = Field([0.1, 1, 3], min_length=1)  # of S: what trained layers have
    conditions: list[Condition] = Field([1, 10, 100, 1e4], min_length=1)  # of M


def measure(settings: Settings, lab: Lab) -> Tables:
    """‖YᵀY − I‖₂ and its bounds for both iterations, in float64."""
    rows = []
    for (tokens, width), seed, condition in itertools.product(settings.sizes, settings.seeds, settings.conditions):
        generator = lab.generator(seed, f"theory/basis/{tokens}x{width}/{condition:g}")
        m = matrix_with_condition(tokens, 2 * width, condition, generator=generator)
        query, key = m.split(width, -1)
        skews = [skew(query, key, scale_for_norm(query, key, skew_norm)) for skew_norm in settings.norms]
        identity = {"source": "gaussian", "tokens": tokens, "width": width, "seed": seed}
        rows += _rows(identity, m, torch.tensor(condition).double(), skews, range(1, settings.iterations + 1))
    for name, layer, x in initialised_layers(lab, settings.seeds[0]):
        query, key, _ = layer.project(x)  # (images, h, N, d_v)
        m = torch.cat([query, key], -1)
        identity = name | {"tokens": query.shape[-2], "width": query.shape[-1], "seed": settings.seeds[0]}
        num_iterations = layer.options["num_iterations"] or ITERATIONS["newton_schulz"]
        rows += _rows(identity, m, torch.linalg.cond(m), [skew(query, key, layer.scale())], [num_iterations])
    return {"errors": pd.DataFrame(rows)}


def _rows(identity: dict, m: Tensor, condition: Tensor, skews: list[Tensor], counts: Sequence[int]) -> list[dict]:
    """A row for each iteration, S, number of iterations, and, where there are any, image and head.

    Args:
        m: ([images, h,] N, 2d_v).
        condition: of M, ([images, h]).
        skews: each S, ([images, h,] N, N).
        counts: of iterations, in rising order.
    """
    rows = []
    for iteration, bases in _bases(m, counts[-1]).items():
        for s, k in itertools.product(skews, counts):
            measured = _orthogonality(s, bases[k - 1])  # ([images, h]) each
            for index in np.ndindex(condition.shape):
                case = {"condition": condition[index].item(), "iteration": iteration, "num_iterations": k}
                place = {"image": index[0], "head": index[1] + 1} if index else {}
                rows.append(identity | case | {name: column[index].item() for name, column in measured.items()} | place)
    return rows


def _bases(m: Tensor, num_iterations: int) -> dict[str, list[Tensor]]:
    """M₁ … M_K of both iterations."""
    express = [POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)] for k in range(num_iterations)]
    return {"newton_schulz": iterates(m, [(1.5, -0.5, 0.0)] * num_iterations), "polar_express": iterates(m, express)}


def iterates(m: Tensor, coefficients: list[tuple[float, float, float]]) -> list[Tensor]:
    """M_{k+1} = M_k (a_k I + b_k G_k + c_k G_k²) with G_k = M_kᵀM_k, from M₀ = M/(‖M‖_F + ε) for M (..., N, 2d_v).

    Eq. 9 for (1.5, −0.5, 0) at every step; with those of Amsel et al. (2025) the steps overshoot: singular values pass 1
    before they converge to it.

    Returns:
        M₁, M₂, …, (..., N, 2d_v) each.
    """
    basis = m / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    bases = []
    for a, b, c in coefficients:
        gram = basis.mT @ basis
        basis = a * basis + basis @ (b * gram + c * gram @ gram)  # (..., N, 2d_v)
        bases.append(basis)
    return bases


def _orthogonality(s: Tensor, basis: Tensor) -> dict[str, Tensor]:
    skew_norm = norm(s)
    bounds = zip(("bound_10", "bound_11", "bound_general"), orthogonality_bounds(basis, skew_norm), strict=True)
    error = orthogonality_error(low_rank_exponential(basis, s))
    return {"norm": skew_norm, "sigma_max": norm(basis), "error": error} | dict(bounds)


def low_rank_exponential(basis: Tensor, s: Tensor) -> Tensor:
    """I + B (exp[S] − I) Bᵀ with [S] = BᵀSB (Eq. 6 and 7), (..., N, N), for B (..., N, r) and a skew S (..., N, N)."""
    small = basis.mT @ s @ basis
    exp_minus_identity = exponential((small - small.mT) / 2) - torch.eye(small.shape[-1], dtype=s.dtype)  # (..., r, r)
    return torch.eye(s.shape[-1], dtype=s.dtype) + basis @ exp_minus_identity @ basis.mT


def orthogonality_bounds(basis: Tensor, skew_norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bounds of Theorem 3.1 on ‖YᵀY − I‖₂ for B (..., N, r), and one for B of any norm, (...) each.

        (e^‖S‖ − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|        Eq. 10
        (e^‖S‖ − 1)² / 4                         Eq. 11
        (e^(σ₁²‖S‖) − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|   without ‖B‖₂ ≤ 1

    with σ the singular values of B. The proof (Eq. 41 and 43) drops ‖Σ‖₂⁴ and ‖ΣΣᵀ‖₂ⁿ⁻¹ because Newton–Schulz keeps
    σ ≤ 1. With them in place Eq. 42 sums to (e^(σ₁²‖S‖) − 1)/σ₁², which is the third bound.
    """
    squares = torch.linalg.svdvals(basis).square()
    gap = (squares * (squares - 1)).abs().amax(-1)
    factor = torch.expm1(skew_norm).square()
    return factor * gap, factor / 4, torch.expm1(squares.amax(-1) * skew_norm).square() * gap


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    errors = tables["errors"]
    slack = errors["tokens"].map(lambda tokens: rounding(tokens, torch.float64))
    over = {f"over_{bound}": errors["error"] / (errors[f"bound_{bound}"] + slack) for bound in ("10", "11", "general")}
    errors = errors.assign(**over)
    classical = errors[errors["iteration"] == "newton_schulz"]
    express = errors[errors["iteration"] == "polar_express"]
    return [_bounded(settings, errors, classical), _polar_express(express), _layers(classical, lab)]


def _bounded(settings: Settings, errors: pd.DataFrame, classical: pd.DataFrame) -> Finding:
    return Finding(
        id="theorem_3_1",
        title="The orthogonality error stays within its bounds",
        place="Theorem 3.1",
        kind=CHECK,
        statement="‖YᵀY − I‖₂ ≤ (e^{‖S‖₂} − 1)² maxᵢ|σᵢ²(σᵢ² − 1)| ≤ ¼ (e^{‖S‖₂} − 1)², σᵢ the singular values of B",
        rule=f"With Newton–Schulz, in every case, the measured error is at most either bound plus {PRODUCTS} · N · eps.",
        allowance="what the bounds allow",
        measures=[
            largest(f"Newton–Schulz: measured over Eq. {bound} + rounding", classical[f"over_{bound}"])
            for bound in ("10", "11")
        ],
        table=_table(settings, errors),
        figure=_figure(settings, errors),
        caption="Left: ‖YᵀY − I‖₂ over the iterations, a colour per condition of M; dashed, Eq. 11. Right: measured against "
        "Eq. 10, for every case; above the diagonal the bound fails. Bounds beyond the axis stand at its end.",
    )


def _table(settings: Settings, errors: pd.DataFrame) -> Table:
    """The largest error on Gaussian M by its condition, at the paper's K and at the last."""
    gaussian = errors[errors["source"] == "gaussian"]
    worst = gaussian.groupby(["condition", "iteration", "num_iterations"])["error"].max()
    last = sorted({min(ITERATIONS["newton_schulz"], settings.iterations), settings.iterations})
    cases = list(itertools.product(("newton_schulz", "polar_express"), last))
    rows = [[f"{value:g}", *(number(worst[value, *case]) for case in cases)] for value in settings.conditions]
    return Table(
        ["cond(M), largest error of all its sizes", *(f"{METHOD_LABELS[iteration]}, K = {k}" for iteration, k in cases)],
        rows,
    )


def _polar_express(express: pd.DataFrame) -> Finding:
    measures = []
    for bound in ("10", "11"):
        above = express[express[f"over_{bound}"] > 1]
        note = f"of {len(express)}; {(above['sigma_max'] > 1).sum()} of them have a singular value of B above 1"
        measures.append(Measure(f"Cases above Eq. {bound}", len(above), "cases", note=note))
        measures.append(Measure(f"Measured over Eq. {bound} + rounding, largest", express[f"over_{bound}"].max()))
    above_10, above_11 = (measure.value for measure in measures[::2])
    what = "Measured over Eq. 10 with ‖B‖₂² ‖S‖₂ for ‖S‖₂, + rounding, largest"
    return Finding(
        id="theorem_3_1_polar_express",
        title="Polar Express can break the bounds of Theorem 3.1",
        place="Theorem 3.1 and Section 3",
        kind=OBSERVATION,
        statement="The proof uses σᵢ ≤ 1, which the statement does not say. The iteration of Amsel et al. (2025) passes 1, "
        "and both bounds can fail; Eq. 10 holds again with ‖B‖₂² ‖S‖₂ in place of ‖S‖₂.",
        in_short=f"Of {len(express)} cases {above_10:g} are above Eq. 10, and {above_11:g} above Eq. 11.",
        measures=[*measures, Measure(what, express["over_general"].max())],
    )


def _layers(classical: pd.DataFrame, lab: Lab) -> Finding:
    initial = classical[classical["source"] != "gaussian"]
    trained = trained_layers(lab, "error_max", "norm_max")
    iterating = [name for name, variant in lab.params.variants.items() if variant.method == "newton_schulz"]
    iterated = trained[trained["variant"].isin(iterating)]
    iterated = iterated.assign(over_11=iterated["error_max"] / (np.expm1(iterated["norm_max"]) ** 2 / 4))
    return Finding(
        id="theorem_3_1_layers",
        title="How orthogonal the attention of the layers is",
        place="Theorem 3.1",
        kind=OBSERVATION,
        statement="‖AᵀA − I‖₂ on real tokens, with the K of Appendix D for Newton–Schulz, and what the bounds allow there",
        in_short=f"With Newton–Schulz ‖AᵀA − I‖₂ is up to {number(initial['error'].max())} in layers as initialised"
        + (f", and up to {number(iterated['error_max'].max())} in trained ones." if len(iterated) else "."),
        measures=[
            Measure("Layers as initialised, Newton–Schulz: largest ‖YᵀY − I‖₂", initial["error"].max()),
            Measure("Layers as initialised, Newton–Schulz: largest bound of Eq. 10", initial["bound_10"].max()),
            *worst_over_seeds(lab, trained, "error_max", "largest ‖AᵀA − I‖₂ of a head"),
            *worst_over_seeds(lab, iterated, "over_11", "largest ‖AᵀA − I‖₂ over Eq. 11 at the head's largest ‖S‖₂"),
        ],
        **origin(trained),
    )


@matplotlib.rc_context(STYLE)
def _figure(settings: Settings, errors: pd.DataFrame) -> Figure:
    """Error over the number of iterations at the largest ‖S‖₂, Polar Express hollow; and every case against Eq. 10."""
    figure, (left, right) = charts.panels(2, 4.0)
    gaussian, classical = errors["source"] == "gaussian", errors["iteration"] == "newton_schulz"
    own = errors[gaussian & np.isclose(errors["norm"], max(settings.norms), rtol=1e-3)]
    medians = own.groupby(["iteration", "condition", "num_iterations"])[["error", "bound_11"]].median()
    shades = dict(zip(settings.conditions, charts.ramp(len(settings.conditions)), strict=True))
    for condition, shade in shades.items():
        for iteration, fill in (("newton_schulz", shade), ("polar_express", "#ffffff")):
            style = charts.method_style(iteration, color=shade, markersize=3.5, markerfacecolor=fill, linewidth=1.2)
            left.plot(medians.loc[iteration, condition]["error"].clip(lower=1e-16), **style)
    left.plot(medians.loc["newton_schulz", settings.conditions[0]]["bound_11"], **charts.EXPECTED)
    left.set(title=f"Over iterations, ‖S‖₂ = {max(settings.norms):g}", xlabel="Iterations K", ylabel="‖YᵀY − I‖₂")
    charts.logarithmic(left, "y")
    left.xaxis.set_major_locator(MultipleLocator(2))

    ends = (1e-16, 1e4)  # of the axis of bounds
    dots = {"linestyle": "", "marker": ".", "markersize": 3.5, "alpha": 0.7}
    clouds = [
        (gaussian & ~classical, dots | {"color": EXPRESS}),
        (gaussian & classical, dots | {"color": look("newton_schulz").colour}),
        (~gaussian & classical, CROSS),
    ]
    for cases, style in clouds:
        right.plot(errors.loc[cases, "bound_10"].clip(*ends), errors.loc[cases, "error"], **style)
    right.plot(ends, ends, **charts.EXPECTED)
    right.set(title="Against the bound", xlabel="Bound of Eq. 10", ylabel="‖YᵀY − I‖₂", ylim=(1e-17, 1e3))
    charts.logarithmic(right, "x", "y")

    handles = [
        *(Line2D([], [], color=shade, label=f"cond(M) = {condition:g}") for condition, shade in shades.items()),
        charts.method_line("newton_schulz", linestyle=""),
        charts.method_line("polar_express", linestyle="", color=EXPRESS, markerfacecolor="#ffffff"),
        Line2D([], [], **CROSS, label="layers as initialised"),
        charts.expected_line("bounds (Eq. 11, Eq. 10)"),
    ]
    charts.legend(figure, handles, 4)
    return figure
