"""How much do orthogonality penalties contribute to the gradient at the first training step?

The penalties come from Zhang et al. 2021, *On Orthogonality Constraints for Transformers*, and act on attention and weights.
The study `penalties` trains models with them.
"""

import itertools

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from osa.constrained.penalties import AM, LA, LF, gram_penalty, head_penalty, mlp_penalty, projection_penalty
from osa.modules import MLP, SelfAttention
from osa.vit import VisionTransformer
from pipeline.config.params import PositiveInt, Section, Seeds
from pipeline.results.measures import attention_inputs, blocks_of
from pipeline.studies import Study, Tables
from pipeline.studies.lab import Lab

MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_exact", "osa_ns")
TERMS = {"AM": AM, "LA": LA, "LF": LF}
WEIGHT = 1e-6  # the largest λ in Section 3 of Zhang et al.
RANK_SHARE = 0.01  # singular values below this share of the largest do not count towards the rank of A


class Settings(Section):
    seeds: Seeds
    images: PositiveInt = 32


def measure(settings: Settings, lab: Lab) -> Tables:
    gradients = []
    for variant, seed in itertools.product(MODELS, settings.seeds):
        config = lab.config(variant)
        images, labels = (each[: settings.images] for each in lab.images(config.data.pixel_scaling))
        norms = penalty_gradient_norms(lab.model(config, seed).double(), images, labels)
        gradients.append({"variant": variant, "seed": seed} | norms)
    return {"gradients": pd.DataFrame(gradients)}


def penalty_gradient_norms(model: VisionTransformer, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns gradient norms over all parameters: for the cross-entropy, and for each penalty summed over the blocks."""
    blocks = [block for block, _, _ in blocks_of(model)]
    inputs = list(zip(blocks, (x for _, x in attention_inputs(model, images)), strict=True))
    losses = {"cross_entropy": F.cross_entropy(model(images), labels)}
    losses |= {name: sum((term(block, x) for block, x in inputs), torch.zeros(())) for name, term in TERMS.items()}
    return {name: norm_of_gradient(loss, model) for name, loss in losses.items()}


def norm_of_gradient(loss: Tensor, model: nn.Module) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]).item()


def attention_row(a: Tensor) -> dict[str, float]:
    """Returns numbers that describe attention matrices A, as means over heads and images. A is (images, h, N, N).

    penalty     ‖AᵀA − I‖_F² / (N − 1): 0 for a permutation, 1 for uniform attention, N if all rows attend to the same token
    overlap     mean inner product of two different rows
    own_token   share of rows that attend most to their own token
    rank        number of singular values above `RANK_SHARE` times the largest
    entropy     mean entropy of a row in nats, NaN if the rows are not probabilities
    """
    tokens = a.shape[-1]
    rows = a @ a.mT  # (images, h, N, N)
    overlap = (rows.sum((-2, -1)) - rows.diagonal(dim1=-2, dim2=-1).sum(-1)) / (tokens * (tokens - 1))
    own = a.argmax(-1) == torch.arange(tokens)
    penalty = gram_penalty(a) / a[..., 0, 0].numel() / (tokens - 1)
    rank = torch.linalg.matrix_rank(a, rtol=RANK_SHARE)  # (images, h)
    entropy = torch.special.entr(a).sum(-1) if (a >= 0).all() else a.new_full((1,), torch.nan)  # (images, h, N)
    means = {"overlap": overlap, "own_token": own.to(a), "rank": rank.to(a), "entropy": entropy}
    return {"penalty": penalty.item()} | {name: values.mean().item() for name, values in means.items()}


def weight_row(attention: SelfAttention, mlp: MLP) -> dict[str, float]:
    return {
        "projections": projection_penalty(attention).item(),
        "separate": projection_penalty(attention, separate=True).item(),
        "heads": head_penalty(attention).item(),
        "mlp": mlp_penalty(mlp).item(),
    }


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns λ Σ ‖∂penalty/∂θ‖ / ‖∂loss/∂θ‖ for each model: a sum over `TERMS`, where each ratio is a median over seeds."""
    rows = []
    for variant, own in tables["gradients"].groupby("variant", sort=False):
        shares = [float((own[name] / own["cross_entropy"]).median()) for name in TERMS]
        rows.append({"variant": variant, "together": sum(WEIGHT * share for share in shares)})
    return {"most": WEIGHT, "models": rows}


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
