"""Theorem 2.1 of Zhang et al. 2021 (“On Orthogonality Constraints for Transformers”): how far can a row of softmax attention
move when its query moves?

One row of Q moves by δ with ‖δ‖ = ε; K is fixed. We divide the change of the row of A by the theorem's bound 2α‖K‖₂ε
(α = 1/√d_v), and show that a quarter of this bound suffices. For orthogonal attention we measure the change of all of A.
"""

import itertools
import math
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Generator, Tensor

from osa.functional import orthogonal_attention_matrix
from osa.modules import OrthogonalSelfAttention
from pipeline.config.params import PositiveInt, Section, Seeds
from pipeline.results.measures import attention_inputs, norm
from pipeline.studies import Study, Tables, check
from pipeline.studies.lab import Lab

GAUSSIAN = "Gaussian"
SIZES = ((2, 1), (7, 3), (50, 16), (11, 13))  # N, d_v of Gaussian queries and keys
KEY_MEANS = (0.0, 3.0)  # mean of the keys, which does not change softmax attention
MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact")
EPSILONS = (1e-3, 0.1, 1.0, 10.0)
QUARTER = 0.25  # our sharper bound divided by the theorem's bound
RATIO_ROUNDING = 1e-6  # maximum rounding error of a ratio at the smallest ε


class Settings(Section):
    seeds: Seeds
    images: PositiveInt = 2


@torch.no_grad()
def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures the maximum and the median ratio of change to bound, for each case.

    For softmax attention it also measures the minimum ‖K − K̄‖₂ / ‖K‖₂, where each row of K̄ is the mean key.
    """
    softmax, orthogonal = [], []
    for seed in settings.seeds:
        for identity, query, key, scale in itertools.chain(gaussian(seed, lab), models(seed, settings, lab)):
            generator = lab.generator(seed, f"perturbation/{'/'.join(map(str, identity.values()))}")
            identity["seed"] = seed
            if scale is None:
                softmax += [identity | row for row in softmax_ratios(query, key, generator)]
            if scale is not None or identity["source"] == GAUSSIAN:
                own = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
                orthogonal += [identity | row for row in orthogonal_rows(query, key, own, generator)]
    return {"softmax": pd.DataFrame(softmax), "orthogonal": pd.DataFrame(orthogonal), "attained": attained()}


def gaussian(seed: int, lab: Lab) -> Iterator[tuple[dict, Tensor, Tensor, None]]:
    """Yields (columns that identify the case, query, key, None). Queries and keys are Gaussian, (2, 1, N, d_v)."""
    for (tokens, width), mean in itertools.product(SIZES, KEY_MEANS):
        query, key = lab.normal(seed, f"perturbation/{tokens}x{width}", 2, 2, 1, tokens, width)
        yield {"source": GAUSSIAN, "case": f"N = {tokens}, d_v = {width}, mean {mean:g}"}, query, key + mean, None


def models(seed: int, settings: Settings, lab: Lab) -> Iterator[tuple[dict, Tensor, Tensor, Tensor | None]]:
    """Yields (columns that identify the layer, query, key, scale) for each layer of each model.

    Queries and keys are (images, h, N, d_v). The scale is None for softmax attention.
    """
    for variant in MODELS:
        config = lab.config(variant)
        images = lab.images(config.data.pixel_scaling)[0][: settings.images]
        for layer, (attention, x) in enumerate(attention_inputs(lab.model(config, seed).double(), images), 1):
            scale = attention.scale() if isinstance(attention, OrthogonalSelfAttention) else None
            yield {"source": variant, "case": f"layer {layer}"}, *attention.project(x)[:2], scale


def softmax_ratios(query: Tensor, key: Tensor, generator: Generator) -> Iterator[dict]:
    """Yields the maximum and the median, over rows i, of ‖A'ᵢ − Aᵢ‖/(2α‖K‖₂ε) for each ε.

    A becomes A' when each query moves by a random δ with ‖δ‖ = ε. For ε = 0, `worst_ratios` gives the limits of
    the ratios as ε → 0, for the worst δ.
    """
    scale, size = 1 / math.sqrt(query.shape[-1]), norm(key)[..., None]
    a = torch.softmax(scale * query @ key.mT, dim=-1)
    centred = (norm(key - key.mean(-2, keepdim=True))[..., None] / size).min()
    ratios = {0.0: worst_ratios(query, key)}
    for epsilon in EPSILONS:
        delta = torch.randn(query.shape, generator=generator, dtype=query.dtype)
        moved = query + epsilon * delta / delta.norm(dim=-1, keepdim=True)
        change = (torch.softmax(scale * moved @ key.mT, dim=-1) - a).norm(dim=-1)
        ratios[epsilon] = change / (2 * scale * epsilon * size)
    for epsilon, ratio in ratios.items():
        yield {"epsilon": epsilon, **extreme_ratios(ratio), "centred_keys": centred.item()}


def worst_ratios(query: Tensor, key: Tensor) -> Tensor:
    """Returns ‖(diag f − ffᵀ) K‖₂ / (2‖K‖₂) for each row f of softmax attention, (..., N)."""
    f = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)  # (..., N, N)
    jacobians = f[..., None] * (key[..., None, :, :] - (f @ key)[..., None, :])  # (diag f − ffᵀ) K, (..., N, N, d_v)
    return norm(jacobians) / (2 * norm(key)[..., None])


def orthogonal_rows(query: Tensor, key: Tensor, scale: Tensor | float, generator: Generator) -> Iterator[dict]:
    """Yields the maximum and the median, over images and heads, of ‖A' − A‖₂/(|scale| ‖K‖₂ε) for each ε.

    A = exp(S) becomes A' when one query per head moves by a random δ with ‖δ‖ = ε.
    """
    a = orthogonal_attention_matrix(query, key, scale=scale)
    factor = torch.as_tensor(scale, dtype=key.dtype).abs().expand(*key.shape[:-2], 1, 1)[..., 0, 0]
    for epsilon in EPSILONS:
        delta = torch.zeros_like(query)
        delta[..., 0, :] = torch.randn(delta[..., 0, :].shape, generator=generator, dtype=query.dtype)
        delta *= epsilon / norm(delta)[..., None, None]
        change = norm(orthogonal_attention_matrix(query + delta, key, scale=scale) - a)
        yield {"epsilon": epsilon} | extreme_ratios(change / (factor * norm(key) * epsilon))


def extreme_ratios(ratios: Tensor) -> dict[str, float]:
    return {"largest": ratios.max().item(), "median": ratios.median().item()}


def attained() -> pd.DataFrame:
    """Returns ‖f(ε) − f(0)‖ / (2 ‖K‖₂ ε) for each ε, where f(q) = softmax(q Kᵀ) with N = 2 and K = (1, −1)ᵀ.

    The ratio tends to ¼ as ε → 0.
    """
    key = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    row = lambda q: torch.softmax(q * key.mT, dim=-1)  # noqa: E731
    ratios = [(row(e) - row(0.0)).norm().item() / (2 * norm(key).item() * e) for e in EPSILONS]
    return pd.DataFrame({"epsilon": EPSILONS, "ratio": ratios})


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    softmax, orthogonal = (float(tables[name]["largest"].max()) for name in ("softmax", "orthogonal"))
    return {
        "stated": check(softmax, 1 + RATIO_ROUNDING),
        "quarter": check(softmax, QUARTER + RATIO_ROUNDING),
        "attained": check(4 * float(tables["attained"]["ratio"].max()), 1 - 4 * RATIO_ROUNDING, "above"),
        "orthogonal": check(orthogonal, 1 + RATIO_ROUNDING),
    }


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
