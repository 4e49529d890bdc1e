"""Theorem 3.1: ‖YᵀY − I‖₂ ≤ (e^{‖S‖₂} − 1)² maxᵢ|σᵢ²(σᵢ² − 1)| ≤ ¼ (e^{‖S‖₂} − 1)² for Y = I + B (exp[S] − I) Bᵀ.

The proof needs a B whose singular values σᵢ are at most 1. Newton–Schulz (Eq. 9) gives such a B. Do the bounds hold with
Polar Express, whose σᵢ exceed 1 before they converge? And how orthogonal is A in a model? We vary the number of iterations,
cond(M) and ‖S‖₂ for random M = [Q, K]. We also measure layers of initialised models, with their own numbers of iterations.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator
from pydantic import Field
from torch import Tensor

from osa.linalg import POLAR_EXPRESS
from osa.options import EPSILON, ITERATIONS
from osa.reference import skew
from pipeline.config.looks import INK, METHOD_LABELS, PALETTE, look_of
from pipeline.config.params import PositiveFloat, PositiveInt, Section, Seeds
from pipeline.results.measures import exponential, matrix_with_condition, norm, orthogonality_error, rounding, scale_for_norm
from pipeline.studies import Study, Tables, charts
from pipeline.studies._settings import Condition, HeadSizes
from pipeline.studies._summaries import trained_layers, worst_case, worst_of_seeds
from pipeline.studies.lab import Lab, initialised_layers

BOUND_COLUMNS = ["bound_10", "bound_11", "bound_general"]
COLOURS = {"newton_schulz": look_of("newton_schulz").colour, "polar_express": PALETTE[4]}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))  # a line style for each cond(M) in the figure


class Settings(Section):
    seeds: Seeds
    sizes: HeadSizes = Field([[50, 16]])  # (N, d_v) of the paper's heads
    iterations: PositiveInt = 12  # maximum number of iterations
    norms: list[PositiveFloat] = Field([0.1, 1, 3], min_length=1)  # ‖S‖₂, as in trained layers
    conditions: list[Condition] = Field([1, 10, 100, 1e4], min_length=1)  # cond(M)


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures ‖YᵀY − I‖₂ and its bounds for Newton–Schulz and Polar Express, in float64."""
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
    """Returns a row for each algorithm, S and number of iterations. A model's layer has such rows for each image and head.

    `m` is (..., N, 2d_v), `condition` is cond(M), of shape (...), and each S of `skews` is (..., N, N). Leading dimensions
    are (images, h) for a model's layer, and () for a random M. `counts` holds the numbers of iterations, in rising order.
    """
    rows = []
    for iteration, bases in _bases(m, counts[-1]).items():
        for s, k in itertools.product(skews, counts):
            measured = _orthogonality(s, bases[k - 1])  # each tensor in `measured` has the shape of `condition`
            for index in np.ndindex(condition.shape):
                case = {"condition": condition[index].item(), "iteration": iteration, "num_iterations": k}
                place = {"image": index[0], "head": index[1] + 1} if index else {}
                rows.append(identity | case | {name: column[index].item() for name, column in measured.items()} | place)
    return rows


def _bases(m: Tensor, num_iterations: int) -> dict[str, list[Tensor]]:
    """Returns the iterates M₁, …, M_K of Newton–Schulz and of Polar Express."""
    express = [POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)] for k in range(num_iterations)]
    return {"newton_schulz": iterates(m, [(1.5, -0.5, 0.0)] * num_iterations), "polar_express": iterates(m, express)}


def iterates(m: Tensor, coefficients: list[tuple[float, float, float]]) -> list[Tensor]:
    """Returns M₁, M₂, …, where M_{k+1} = M_k (a_k I + b_k G_k + c_k G_k²), G_k = M_kᵀM_k and M₀ = M/(‖M‖_F + ε).

    Each matrix is (..., N, 2d_v). The coefficients (1.5, −0.5, 0) at every step give Eq. 9.
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
    bounds = zip(BOUND_COLUMNS, orthogonality_bounds(basis, skew_norm), strict=True)
    error = orthogonality_error(low_rank_exponential(basis, s))
    return {"norm": skew_norm, "sigma_max": norm(basis), "error": error} | dict(bounds)


def low_rank_exponential(basis: Tensor, s: Tensor) -> Tensor:
    """Returns I + B (exp[S] − I) Bᵀ with [S] = BᵀSB (Eq. 6 and 7). B is (..., N, r); S and the result are (..., N, N)."""
    small = basis.mT @ s @ basis
    exp_minus_identity = exponential((small - small.mT) / 2) - torch.eye(small.shape[-1], dtype=s.dtype)  # (..., r, r)
    return torch.eye(s.shape[-1], dtype=s.dtype) + basis @ exp_minus_identity @ basis.mT


def orthogonality_bounds(basis: Tensor, skew_norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the two bounds on ‖YᵀY − I‖₂ of Theorem 3.1, and a third bound that allows ‖B‖₂ > 1, each of shape (...).

        (e^‖S‖ − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|        Eq. 10
        (e^‖S‖ − 1)² / 4                         Eq. 11
        (e^(σ₁²‖S‖) − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|   for B of any norm

    σᵢ are the singular values of B (..., N, r). The proof (Eq. 41 and 43) drops the factors ‖Σ‖₂⁴ and ‖ΣΣᵀ‖₂ⁿ⁻¹, which are
    at most 1 for Newton–Schulz. If we keep them, Eq. 42 sums to (e^(σ₁²‖S‖) − 1)/σ₁², which gives the third bound.
    """
    squares = torch.linalg.svdvals(basis).square()
    gap = (squares * (squares - 1)).abs().amax(-1)
    factor = torch.expm1(skew_norm).square()
    return factor * gap, factor / 4, torch.expm1(squares.amax(-1) * skew_norm).square() * gap


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Checks the bounds, and summarises ‖AᵀA − I‖₂ in untrained and in trained layers."""
    errors = _with_rounding(tables["errors"])
    classical, express = (errors[errors["iteration"] == name] for name in ("newton_schulz", "polar_express"))
    above = express[express["error"] > express["bound_10"]]
    return {
        "eq_10": worst_case(classical["error"], classical["bound_10"]),
        "eq_11": worst_case(classical["error"], classical["bound_11"]),
        "polar_express": {
            "cases": len(express),
            "above_10": len(above),
            "most_above_10": (express["error"] / express["bound_10"]).max(),
            "last_above_10": int(above["num_iterations"].max()) if len(above) else 0,
            "general": worst_case(express["error"], express["bound_general"]),
        },
        "initial": classical.loc[classical["source"] != "gaussian", "error"].max(),
        "trained": worst_of_seeds(trained_layers(lab, "error_max"), "error_max"),
    }


def _with_rounding(errors: pd.DataFrame) -> pd.DataFrame:
    """Adds an allowance for rounding to the bounds, which were derived for exact arithmetic."""
    slack = errors["tokens"].map(lambda tokens: rounding(tokens, torch.float64))
    return errors.assign(**{bound: errors[bound] + slack for bound in BOUND_COLUMNS})


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    """Plots, against the iterations, the median error at the ‖S‖₂ nearest to 1, and the largest ratio of error to bound."""
    errors = _with_rounding(tables["errors"])
    gaussian = errors[errors["source"] == "gaussian"].assign(ratio=lambda own: own["error"] / own["bound_10"])
    size = min(settings.norms, key=lambda value: abs(math.log(value)))
    own = gaussian[np.isclose(gaussian["norm"], size, rtol=1e-3)]
    medians = own.groupby(["iteration", "condition", "num_iterations"])["error"].median()
    conditions = list(dict.fromkeys([*settings.conditions[:2], settings.conditions[-1]]))
    figure, (left, right) = charts.panels(2, 3.4)
    for iteration, colour in COLOURS.items():
        for condition, dashes in zip(conditions, DASHES, strict=False):
            left.plot(medians[iteration, condition].clip(lower=1e-16), linestyle=dashes, color=colour)
        right.plot(gaussian[gaussian["iteration"] == iteration].groupby("num_iterations")["ratio"].max(), color=colour)
    left.axvline(ITERATIONS["newton_schulz"], **charts.EXPECTED)
    right.axhline(1, **charts.EXPECTED)
    left.set(title=f"Error at ‖S‖₂ = {size:g}", ylabel="‖AᵀA − I‖₂")
    right.set(title="Largest error / bound", ylabel="‖AᵀA − I‖₂ / Eq. 10")
    for axes in (left, right):
        axes.set_xlabel("Iterations K")
        axes.xaxis.set_major_locator(MultipleLocator(2))
        charts.logarithmic(axes, "y")
    handles = [Line2D([], [], color=colour, label=METHOD_LABELS[iteration]) for iteration, colour in COLOURS.items()]
    handles += [
        Line2D([], [], color=INK, linestyle=dashes, label=f"cond(M) = {condition:g}")
        for condition, dashes in zip(conditions, DASHES, strict=False)
    ]
    charts.legend(figure, handles)
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"theorem_3_1": draw})
