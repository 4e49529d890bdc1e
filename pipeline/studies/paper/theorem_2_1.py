"""Theorem 2.1: exp(S) = I + B (exp[S] − I) Bᵀ with [S] = BᵀSB, for an orthonormal basis B of span[Q, K].

The methods "qr" and "exact" must give the dense exponential up to rounding. Newton–Schulz (Eq. 9) stops before B is
orthonormal. How far from exp(S) is the resulting A? We vary ‖S‖₂ and cond(M) for random M = [Q, K], and also measure layers
of untrained models.
"""

import itertools

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from osa.functional import orthogonal_attention_matrix
from osa.options import Method
from osa.reference import skew
from pipeline.config.params import PositiveFloat, Section, Seeds
from pipeline.results.measures import METHODS, exponential, matrix_with_condition, norm, rounding, scale_for_norm
from pipeline.studies import Study, Tables
from pipeline.studies._settings import Condition, HeadSizes
from pipeline.studies._summaries import trained_layers, worst_case
from pipeline.studies.lab import Lab, initialised_layers

IDENTICAL = ("qr", "exact")  # methods that give exp(S) up to rounding
DTYPES = {"float32": torch.float32, "float64": torch.float64}
NORM = 1.0  # ‖S‖₂ while cond(M) varies


class Settings(Section):
    seeds: Seeds
    sizes: HeadSizes = Field([[17, 4], [50, 16]])  # (N, d_v) of a small head and of the paper's heads
    norms: list[PositiveFloat] = Field([1e-3, 1e-2, 0.1, 1, 3, 10, 30, 100], min_length=1)  # ‖S‖₂
    conditions: list[Condition] = Field([1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8], min_length=1)  # cond(M)


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures ‖A − exp(S)‖₂ for every case, method and precision."""
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


def _rows(identity: dict, query: Tensor, key: Tensor, scale: Tensor, method: Method, **options) -> list[dict]:
    """Returns a row for each precision and head: the values for the image with the largest error.

    `query` and `key` are (images, h, N, d_v), and `scale` is (h, 1, 1).
    """
    rows = []
    for name, dtype in DTYPES.items():
        q, k, c = query.to(dtype), key.to(dtype), scale.to(dtype)
        columns = {
            "norm": norm(skew(q, k, c)),
            "condition": torch.linalg.cond(torch.cat([q, k], -1).double()),
            "error": exponential_error(q, k, c, method, **options),
            "tolerance": exponential_tolerance(q, k, c, method),
        }  # each (images, h)
        for head, worst in enumerate(columns["error"].argmax(0).tolist()):
            values = {column: each[worst, head].item() for column, each in columns.items()}
            rows.append(identity | {"head": head + 1, "method": method, "dtype": name} | values)
    return rows


def exponential_error(query: Tensor, key: Tensor, scale: Tensor, method: Method, **options) -> Tensor:
    """Returns ‖A − exp(S)‖₂, of shape (...). `method` computes A in the inputs' dtype. The reference exp(S) is float64."""
    a = orthogonal_attention_matrix(query, key, scale=scale, method=method, **options)
    return norm(a.double() - exponential(skew(query, key, scale)))


def exponential_tolerance(query: Tensor, key: Tensor, scale: Tensor, method: str) -> Tensor:
    """Bounds rounding errors in `exponential_error`: γ (1 + μ) for "qr", γ (1 + μ)² for "exact", with μ = |scale| · ‖M‖₂².

    γ is `rounding(max(N, 2d_v))`. The error of S is γ μ, which also bounds the error of exp(S) (Lemma C.7). The method
    "exact" computes I + scale · M φ₁(Z) J Mᵀ with ‖Z‖₂ ≤ μ (see `osa.functional`). The products with Z contribute one
    factor 1 + μ to the bound, and the products with scale · M and Mᵀ contribute another factor 1 + μ.

    `query` and `key` are (..., N, d_v), `scale` is (..., 1, 1), and the result is (...).
    """
    m = torch.cat([query, key], dim=-1)
    size = norm(m.double()).square() * scale.double().abs()[..., 0, 0]  # μ, of shape (...)
    return rounding(max(m.shape[-2:]), query.dtype) * (1 + size) ** (2 if method == "exact" else 1)


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns the worst error of "qr" and "exact" by precision, and the largest ‖A − exp(S)‖₂ of each trained model."""
    errors = tables["errors"]
    identical = errors[errors["method"].isin(IDENTICAL)]
    checks = {dtype: worst_case(own["error"], own["tolerance"]) for dtype, own in identical.groupby("dtype")}
    trained = trained_layers(lab, "exp_error_max").groupby("variant", sort=False)["exp_error_max"].max()
    return checks | {"trained": trained.to_dict()}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
