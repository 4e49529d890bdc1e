"""Theorem 2.1: exp(S) = I + B (exp[S] − I) Bᵀ with [S] = BᵀSB, for an orthonormal basis B of span[Q, K].

QR and exact must give the dense exponential up to rounding, which checks the code. Newton–Schulz (Eq. 9) stops before its B
is orthonormal: how far from exp(S) is its A? Measured over ‖S‖₂ and cond(M) of Gaussian M, and in layers as initialised.
"""

import itertools
import math

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field
from torch import Tensor

from osa.functional import orthogonal_attention_matrix
from pipeline.core.params import PositiveFloat, Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import (
    METHODS,
    PRODUCTS,
    exponential,
    initialised_layers,
    matrix_with_condition,
    norm,
    rounding,
    scale_for_norm,
    skew,
)
from pipeline.report import charts
from pipeline.report.looks import INK, LINE_WIDTH, METHOD_LABELS, STYLE, look
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest, origin, trained_layers, worst_over_seeds
from pipeline.studies._settings import Condition, HeadSizes

place = 21
IDENTICAL = ("qr", "exact")  # those that are exp(S) but for rounding
DTYPES = {"float32": torch.float32, "float64": torch.float64}
NORM = 1.0  # of S while cond(M) varies


class Settings(Section):
    seeds: Seeds
    sizes: HeadSizes = Field([[17, 4], [50, 16]])  # N, d_v: small, and the paper's
    norms: list[PositiveFloat] = Field([1e-3, 1e-2, 0.1, 1, 3, 10, 30, 100], min_length=1)  # of S
    conditions: list[Condition] = Field([1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8], min_length=1)  # of M


def measure(settings: Settings, lab: Lab) -> Tables:
    """‖A − exp(S)‖₂ for every case, method and precision. A layer's heads have a row each, for the worst of the images."""
    rows = []
    for (tokens, width), seed in itertools.product(settings.sizes, settings.seeds):
        m = lab.normal(seed, f"theory/exponential/{tokens}x{width}", tokens, 2 * width)
        cases = [("norm", value, m, value) for value in settings.norms]
        for value in settings.conditions:
            generator = lab.generator(seed, f"theory/condition/{tokens}x{width}/{value:g}")
            m = matrix_with_condition(tokens, 2 * width, value, generator=generator)
            cases.append(("condition", value, m, NORM))
        for sweep, value, m, skew_norm in cases:
            query, key = m[None, None].split(width, -1)  # (1, 1, N, d_v)
            identity = {"source": "gaussian", "sweep": sweep, "value": value, "tokens": tokens, "width": width, "seed": seed}
            for method in METHODS:
                rows += _rows(identity, query, key, scale_for_norm(query, key, skew_norm)[..., None, None], method)
    for name, layer, x in initialised_layers(lab, settings.seeds[0]):
        query, key, _ = layer.project(x)  # (images, h, N, d_v)
        scale = layer.scale().expand(layer.num_heads, 1, 1)
        identity = name | {"sweep": "layer", "tokens": query.shape[-2], "width": query.shape[-1], "seed": settings.seeds[0]}
        rows += _rows(identity, query, key, scale, **layer.options)
    return {"errors": pd.DataFrame(rows)}


def _rows(identity: dict, query: Tensor, key: Tensor, scale: Tensor, method: str, **options) -> list[dict]:
    """A row for each precision and head, of the image with the largest error.

    Args:
        query, key: (images, h, N, d_v).
        scale: (h, 1, 1).
    """
    rows = []
    for name, dtype in DTYPES.items():
        q, k, c = query.to(dtype), key.to(dtype), scale.to(dtype)
        columns = {
            "norm": norm(skew(q, k, c)),
            "condition": torch.linalg.cond(torch.cat([q, k], -1).double()),
            "error": exponential_error(q, k, c, method, **options),
            "tolerance": exponential_tolerance(q, k, c, method),
        }  # (images, h) each
        for head, worst in enumerate(columns["error"].argmax(0).tolist()):
            values = {column: each[worst, head].item() for column, each in columns.items()}
            rows.append(identity | {"head": head + 1, "method": method, "dtype": name} | values)
    return rows


def exponential_error(query: Tensor, key: Tensor, scale: Tensor, method: str, **options) -> Tensor:
    """‖A − exp(S)‖₂, (...): A by `method` in the inputs' own dtype, exp(S) dense in float64 from the same inputs."""
    a = orthogonal_attention_matrix(query, key, scale=scale, method=method, **options)
    return norm(a.double() - exponential(skew(query, key, scale)))


def exponential_tolerance(query: Tensor, key: Tensor, scale: Tensor, method: str) -> Tensor:
    """What `exponential_error` may be by rounding: γ (1 + μ) for "qr", γ (1 + μ)² for "exact", with μ = |scale| · ‖M‖₂².

    γ is `rounding` over max(N, 2d_v). S is computed with an error of γ μ, dense or not, and exp moves by no more than its
    skew argument does (Lemma C.7). "exact" multiplies by Z with ‖Z‖₂ ≤ μ vectors of size ‖M‖₂, and the result by
    scale · ‖M‖₂, so that μ enters twice; the functions of Z in between act as functions of S, whose norms are at most 1.

    Args:
        query, key: (..., N, d_v).
        scale: (..., 1, 1).

    Returns:
        (...).
    """
    m = torch.cat([query, key], dim=-1)
    size = norm(m.double()).square() * scale.double().abs()[..., 0, 0]  # μ, (...)
    return rounding(max(m.shape[-2:]), query.dtype) * (1 + size) ** (2 if method == "exact" else 1)


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    errors = tables["errors"]
    worst = _worst(settings, errors)
    return [_identity(errors, worst), _newton_schulz(worst, lab)]


def _worst(settings: Settings, errors: pd.DataFrame) -> pd.DataFrame:
    """The largest error by method and precision: at the first ‖S‖₂, at the one nearest to 1 and at the last, and so on."""
    norms, sweep = settings.norms, errors["sweep"]
    chosen = dict.fromkeys([norms[0], min(norms, key=lambda value: abs(math.log(value))), norms[-1]])
    cases = {f"‖S‖₂ = {value:g}": (sweep == "norm") & (errors["value"] == value) for value in chosen}
    cases |= {"any cond(M)": sweep == "condition", "initial layers": sweep == "layer"}
    by = ["method", "dtype"]
    return pd.DataFrame({case: errors[rows].groupby(by, sort=False)["error"].max() for case, rows in cases.items()})


def _identity(errors: pd.DataFrame, worst: pd.DataFrame) -> Finding:
    ratios = (errors["error"] / errors["tolerance"])[errors["dtype"] == "float64"].groupby(errors["method"])
    rows = [[f"{METHOD_LABELS[method]}, {dtype}", *map(number, row)] for (method, dtype), row in worst.iterrows()]
    return Finding(
        id="theorem_2_1",
        title="The low-rank exponential is the dense one",
        place="Theorem 2.1",
        kind=CHECK,
        statement="exp(S) = I + B (exp[S] − I) Bᵀ with [S] = BᵀSB, for an orthonormal basis B of span[Q, K]",
        rule=f"In float64 ‖A − exp(S)‖₂ is in every case at most {PRODUCTS} · n · eps · (1 + μ) with QR, and "
        f"{PRODUCTS} · n · eps · (1 + μ)² with exact, where n = max(N, 2d_v) and μ = α/√d_v · ‖M‖₂².",
        allowance="what rounding allows",
        measures=[
            largest(f"{METHOD_LABELS[method]}, float64: error over what rounding allows", ratios.get_group(method))
            for method in IDENTICAL
        ],
        table=Table(["Largest error", *worst.columns], rows),
        figure=_figure(errors),
        caption="Error of A against the dense float64 exponential. Lines: medians over Gaussian sizes and seeds. Points: "
        "heads of layers as initialised. Dashed: what rounding allows QR.",
    )


def _newton_schulz(worst: pd.DataFrame, lab: Lab) -> Finding:
    cases = worst.loc[("newton_schulz", "float64"), :]
    trained = trained_layers(lab, "exp_error_max")
    return Finding(
        id="theorem_2_1_newton_schulz",
        title="How far Newton–Schulz's attention is from exp(S)",
        place="Theorem 2.1 and Eq. 9",
        kind=OBSERVATION,
        statement="Newton–Schulz stops before its basis is orthonormal. That leaves its A this far from exp(S), in both "
        "precisions, and farther for a larger ‖S‖₂.",
        in_short=f"Off by up to {number(cases['any cond(M)'])} at ‖S‖₂ = {NORM:g} over all cond(M), and by up to "
        f"{number(cases['initial layers'])} in layers as initialised"
        + (f" and {number(trained['exp_error_max'].max())} in trained ones." if len(trained) else "."),
        measures=[Measure(f"Newton–Schulz: largest ‖A − exp(S)‖₂, {case}", value) for case, value in cases.items()]
        + worst_over_seeds(lab, trained, "exp_error_max", "largest ‖A − exp(S)‖₂ of a head"),
        **origin(trained),
    )


@matplotlib.rc_context(STYLE)
def _figure(errors: pd.DataFrame) -> Figure:
    """Error over ‖S‖₂ and over cond(M): a line per method and precision, heads as points, QR's tolerance."""
    dashes = {"float32": (0, (1.2, 1.2)), "float64": "-"}
    figure, panels = charts.panels(2, 4.0, sharey=True)
    for axes, sweep, name in zip(panels, ("norm", "condition"), ("‖S‖₂", "cond(M)"), strict=True):
        lines = errors[errors["sweep"] == sweep].groupby(["method", "dtype", "value"])[["error", "tolerance"]].median()
        for method, dtype in itertools.product(METHODS, DTYPES):
            style = {"color": look(method).colour, "linestyle": dashes[dtype], "linewidth": LINE_WIDTH}
            axes.plot(lines.loc[method, dtype]["error"], **style)
            if method == "qr":
                axes.plot(lines.loc[method, dtype]["tolerance"], **charts.EXPECTED)
        for method, own in errors[errors["sweep"] == "layer"].groupby("method"):
            axes.plot(own[sweep], own["error"], **charts.method_style(method, linestyle="", markersize=3, alpha=0.6))
        charts.logarithmic(axes, "x", "y")
        axes.set(xlabel=name, title=f"Over {name}")
    panels[0].set_ylabel("‖A − exp(S)‖₂")
    precisions = [Line2D([], [], color=INK, linestyle=dashes[dtype], label=dtype) for dtype in DTYPES]
    methods = map(charts.method_line, METHODS)
    charts.legend(figure, [*methods, *precisions, charts.expected_line("rounding allowance of QR")])
    return figure
