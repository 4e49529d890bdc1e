"""Section 3 says that gradients through a QR basis can explode where M = [Q, K] is nearly rank-deficient, and that
Newton–Schulz is stable there. How does the error of a float32 gradient grow as σ_min(M) falls?
"""

import itertools
from typing import Annotated

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from osa import reference
from osa.functional import orthogonal_attention
from pipeline.config.params import PositiveFloat, Section, Seeds
from pipeline.results.measures import matrix_with_condition, scale_for_norm
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab

METHODS = ("qr_literal", "qr", "newton_schulz", "exact")
TOKENS, WIDTH = 50, 16  # N and d_v of the paper's models
SKEW_NORM = 1.0  # ‖S‖₂, as in a model after a few epochs of training


class Settings(Section):
    seeds: Seeds
    conditions: Annotated[list[PositiveFloat], Field(min_length=2)]


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures the relative error of ∂⟨direction, output⟩/∂M in float32, for each matrix M and each method.

    Every M has σ_max = 1. The reference gradient comes from autograd through the dense form of the same function in float64.
    """
    rows = []
    for condition, seed in itertools.product(settings.conditions, settings.seeds):
        m = matrix_with_condition(TOKENS, 2 * WIDTH, condition, generator=lab.generator(seed, f"m/{condition:g}")).float()
        value, direction = (lab.normal(seed, name, TOKENS, WIDTH).float() for name in ("value", "direction"))
        query, key = m.double().chunk(2, dim=-1)
        scale = scale_for_norm(query, key, SKEW_NORM)
        for method in METHODS:
            own = gradient(m, value, direction, scale.float(), method)
            dense = reference.newton_schulz_attention if method == "newton_schulz" else reference.orthogonal_attention
            right = gradient(m.double(), value.double(), direction.double(), scale, dense)
            error = ((own.double() - right).norm() / right.norm()).item()
            identity = {"method": method, "condition": condition, "seed": seed}
            rows.append(identity | {"gradient": right.norm().item(), "error": error})
    return {"gradients": pd.DataFrame(rows)}


def gradient(m: Tensor, value: Tensor, direction: Tensor, scale: Tensor, method) -> Tensor:
    """Returns ∂⟨direction, output⟩/∂M, (N, 2d_v). `method` is the name of a method, or a function of `osa.reference`."""
    m = m.clone().requires_grad_()
    query, key = (part[None] for part in m.chunk(2, dim=-1))  # (1, N, d_v)
    if callable(method):
        out = method(query, key, value[None], scale)
    else:
        out = orthogonal_attention(query, key, value[None], scale=scale, method=method)
    return torch.autograd.grad((out[0] * direction).sum(), m)[0]


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """For the matrices M with the maximum condition number, returns σ_min(M) and each method's median error."""
    gradients, worst = tables["gradients"], max(settings.conditions)
    errors = gradients[gradients["condition"] == worst].groupby("method")["error"].median()
    return {"methods": {method: {"worst": errors[method]} for method in METHODS}, "smallest": 1 / worst}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
