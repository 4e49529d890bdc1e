"""How orthogonal attention and weights are as initialised, layer by layer, and what penalties on that can do to a training.

The penalties are those of Zhang et al. 2021, *On Orthogonality Constraints for Transformers*, and the study penalties
trains with them. Beside them stands one that is 0 where Section 4 begins.
"""

import itertools

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osa.constrained.penalties import (
    AM,
    LA,
    LF,
    attention_matrix,
    gram_penalty,
    head_penalty,
    mlp_penalty,
    projection_penalty,
)
from osa.vit import VisionTransformer
from pipeline.core.params import PositiveInt, Section, Seeds
from pipeline.lab import Lab
from pipeline.measures import attention_inputs
from pipeline.studies import Study, Tables, check

MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact", "osa_ns")
TERMS = {"AM": AM, "LA": LA, "LF": LF}
WEIGHTS = (1e-6, 1e-8, 1e-10)  # λ of Section 3
RANK_SHARE = 0.01  # of the largest singular value of A, up to which others do not count for its rank
FLOAT32, FLOAT64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


class Settings(Section):
    seeds: Seeds
    images: PositiveInt = 32  # test images of the loss and of the attention


def measure(settings: Settings, lab: Lab) -> Tables:
    """Of each model and seed: the gradients' norms, and what the attention and the weights of each layer are, in float64."""
    gradients, layers = [], []
    for variant, seed in itertools.product(MODELS, settings.seeds):
        config, identity = lab.config(variant), {"variant": variant, "seed": seed}
        images, labels = (each[: settings.images] for each in lab.images(config.data.pixel_scaling))
        model = lab.model(config, seed).double()
        gradients.append(identity | gradient_norms(model, images, labels))
        with torch.no_grad():
            inputs = zip(model.blocks, attention_inputs(model, images), strict=True)
            for layer, (block, (attention, x)) in enumerate(inputs, 1):
                row = attention_row(attention_matrix(attention, x)) | weight_row(block)
                layers.append(identity | {"layer": layer} | row)
    return {"gradients": pd.DataFrame(gradients), "layers": pd.DataFrame(layers)}


def gradient_norms(model: VisionTransformer, images: Tensor, labels: Tensor) -> dict[str, float]:
    """‖∇‖₂ over all parameters of the cross-entropy and of each term, summed over blocks."""
    inputs = list(zip(model.blocks, (x for _, x in attention_inputs(model, images)), strict=True))
    losses = {"cross_entropy": F.cross_entropy(model(images), labels)}
    losses |= {name: sum(term(block, x) for block, x in inputs) for name, term in TERMS.items()}
    return {name: norm_of_gradient(loss, model) for name, loss in losses.items()}


def norm_of_gradient(loss: Tensor, model: nn.Module) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]).item()


def attention_row(a: Tensor) -> dict[str, float]:
    """Of A (images, h, N, N): ‖AᵀA − I‖_F² / (N − 1), the mean over heads and images, which is 0 for a permutation, 1 for
    uniform attention and N where all rows are one token; the mean product of two rows; how many rows attend most to their
    own token; the rank, with what is below `RANK_SHARE` taken for 0; and the entropy of a row in nats, where rows are
    probabilities."""
    tokens = a.shape[-1]
    rows = a @ a.mT  # (images, h, N, N)
    overlap = (rows.sum((-2, -1)) - rows.diagonal(dim1=-2, dim2=-1).sum(-1)) / (tokens * (tokens - 1))
    own = a.argmax(-1) == torch.arange(tokens)
    penalty = gram_penalty(a) / a[..., 0, 0].numel() / (tokens - 1)
    rank = torch.linalg.matrix_rank(a, rtol=RANK_SHARE)  # (images, h)
    entropy = torch.special.entr(a).sum(-1) if (a >= 0).all() else a.new_full((1,), torch.nan)  # (images, h, N)
    means = {"overlap": overlap, "own_token": own.to(a), "rank": rank.to(a), "entropy": entropy}
    return {"penalty": penalty.item()} | {name: values.mean().item() for name, values in means.items()}


def weight_row(block: nn.Module) -> dict[str, float]:
    return {
        "projections": projection_penalty(block.attention).item(),
        "separate": projection_penalty(block.attention, separate=True).item(),
        "heads": head_penalty(block.attention).item(),
        "mlp": mlp_penalty(block.mlp).item(),
    }


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Whether OSA begins where its own constraints are met; each model's distance from orthogonality, on average over layers
    and seeds, and how much of the first gradient each penalty has at the largest λ."""
    layers, gradients, most = tables["layers"], tables["gradients"], max(WEIGHTS)
    means = layers.drop(columns=["seed", "layer"]).groupby("variant", sort=False).mean()
    rows = []
    for variant, own in gradients.groupby("variant", sort=False):
        shares = {name: float((own[name] / own["cross_entropy"]).median()) for name in TERMS}
        first = {name: most * share for name, share in shares.items()}
        rows.append(
            {"variant": variant, "first": first, "together": sum(first.values()), "equal_at": 1 / max(shares.values())}
        )
        rows[-1] |= {"mean": means.loc[variant].to_dict()}
    exact = layers[layers["variant"] == "osa_exact"]
    return {"most": most, "models": rows, "checks": begins_orthogonal(exact, lab)}


def begins_orthogonal(exact: pd.DataFrame, lab: Lab) -> dict:
    """What is 0 by construction is 0, and SUO is where it has to be; each over what rounding allows."""
    model = lab.paper.recipe.model
    d, hidden = model.embed_dim, round(model.embed_dim * model.mlp_ratio)
    suo = d * (max(1.0, hidden / d) - 1) ** 2 + min(d, hidden) * (max(1.0, d / hidden) - 1) ** 2
    tokens = lab.config("osa_exact").options().num_tokens
    rounding = {"attention": (d * tokens * FLOAT64) ** 2, "heads": (d * FLOAT32) ** 2, "mlp": d * suo * FLOAT32}
    errors = {"attention": exact["penalty"], "heads": exact["heads"], "mlp": (exact["mlp"] - suo).abs()}
    return {name: check(float(error.max()) / rounding[name], 1.0) for name, error in errors.items()}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
