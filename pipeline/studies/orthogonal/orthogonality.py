"""How orthogonal attention and weights are as initialised, layer by layer, and what penalties on that can do to a training.

The penalties are those of Zhang et al. 2021, *On Orthogonality Constraints for Transformers*, with which the study penalties
trains. Beside them the one that is 0 where Section 4 begins.
"""

import itertools

import matplotlib
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
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
from pipeline.report import charts
from pipeline.report.looks import STYLE, look
from pipeline.report.numbers import number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest

place = 61
PAPER = "Zhang et al. 2021, Section 2"
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


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    return [begins_orthogonal(tables["layers"], lab), reach(tables["gradients"], lab), with_depth(tables["layers"], lab)]


def begins_orthogonal(table: pd.DataFrame, lab: Lab) -> Finding:
    """What is 0 by construction is 0, and SUO is where it has to be."""
    recipe, exact = lab.paper.recipe, table[table["variant"] == "osa_exact"]
    model = recipe.model
    d, hidden = model.embed_dim, round(model.embed_dim * model.mlp_ratio)
    suo = d * (max(1.0, hidden / d) - 1) ** 2 + min(d, hidden) * (max(1.0, d / hidden) - 1) ** 2
    tokens = (recipe.data.image_size // model.patch_size) ** 2 + 1
    rounding = {"attention": (d * tokens * FLOAT64) ** 2, "heads": (d * FLOAT32) ** 2, "mlp": d * suo * FLOAT32}
    return Finding(
        id="orthogonality_begins",
        title="OSA begins where its own constraints are met",
        place="Sections 2 and 4",
        kind=CHECK,
        statement="As initialised, exp(S) has ‖AᵀA − I‖_F = 0 for any weights, and the weights of each head are "
        f"orthonormal. The MLPs are not: SUO gives ‖M₁ᵀM₁ − I‖_F² = {number(suo)}, which the penalty pulls at.",
        measures=[
            largest("‖AᵀA − I‖_F² over N − 1, over what rounding allows", exact["penalty"] / rounding["attention"]),
            largest("Penalty of the heads, over what rounding allows", exact["heads"] / rounding["heads"]),
            largest(
                "Penalty of the MLPs less SUO’s, over what rounding allows", (exact["mlp"] - suo).abs() / rounding["mlp"]
            ),
        ],
        rule="In every layer of OSA (exact): ‖AᵀA − I‖_F² / (N − 1) ≤ (d N eps)² in float64, the heads’ penalty ≤ (d eps)², "
        "and the MLPs’ within d · eps of SUO’s, relatively, with the eps of the float32 that weights are drawn in.",
        models=("osa_exact",),
    )


def reach(table: pd.DataFrame, lab: Lab) -> Finding:
    """λ‖∇penalty‖ over ‖∇cross-entropy‖ at the start."""
    measures, rows, most = [], [], max(WEIGHTS)
    for variant, own in table.groupby("variant", sort=False):
        ratios = {name: (own[name] / own["cross_entropy"]).median() for name in TERMS}
        what = f"{lab.label(variant)}: all terms at λ = {number(most)}, over the cross-entropy’s"
        measures.append(Measure(what, most * sum(ratios.values())))
        cells = [most * ratio for ratio in ratios.values()], 1 / max(ratios.values())
        rows.append([lab.label(variant), *map(number, cells[0]), number(cells[1])])
    columns = ["Model", *(f"{name} at λ = {number(most)}" for name in TERMS), "λ at which the largest equals it"]
    return Finding(
        id="penalties_reach",
        title="What penalties can do to the first steps",
        place=PAPER,
        kind=OBSERVATION,
        statement="The norm of λ∇penalty over that of the cross-entropy’s gradient, as initialised, for AM (attention "
        "matrices), LA (projections) and LF (MLPs), summed over blocks. Medians over seeds; of all terms the sum of norms, "
        "which the norm of the sum is below.",
        measures=measures,
        table=Table(columns, rows, variants=list(dict.fromkeys(table["variant"]))),
        remark=f"The paper’s λ are {', '.join(map(number, WEIGHTS))}. A ratio below float32’s {number(FLOAT32)} is "
        "nothing but other rounding to a training.",
        models=MODELS,
    )


def with_depth(table: pd.DataFrame, lab: Lab) -> Finding:
    """The attention matrices and the weights of each model."""
    measures, rows = [], []
    for variant, own in table.groupby("variant", sort=False):
        mean = own.drop(columns=["variant", "seed", "layer"]).mean()
        measures.append(Measure(f"{lab.label(variant)}: ‖AᵀA − I‖_F² / (N − 1), mean over layers", mean["penalty"]))
        rows.append([lab.label(variant), *map(number, mean)])
    columns = ["‖AᵀA − I‖²/(N − 1)", "Row overlap", "Rows at their own token", "Rank of A", "Entropy of a row"]
    columns += ["L_LA", "L_LA, each matrix", "Heads", "L_LF"]
    return Finding(
        id="orthogonality_with_depth",
        title="Orthogonality with depth, as initialised",
        place=PAPER,
        kind=OBSERVATION,
        statement="How far attention matrices and weights are from orthogonal: 0 for a permutation and for exp(S), 1 for "
        "uniform attention. Means over layers and seeds.",
        measures=measures,
        table=Table(
            ["Model", *columns],
            rows,
            variants=list(dict.fromkeys(table["variant"])),
            note=f"Singular values below {RANK_SHARE:g} times the largest count as 0 for the rank. The entropy is in nats, "
            "where rows are probabilities.",
        ),
        figure=draw(table, lab),
        caption="‖AᵀA − I‖_F² / (N − 1), and the mean product of two rows of A, by layer.",
        remark="At uniform attention the gradient of ‖AᵀA − I‖_F² is 0: near it the penalty hardly acts.",
        models=MODELS,
    )


@matplotlib.rc_context(STYLE)
def draw(table: pd.DataFrame, lab: Lab) -> Figure:
    figure, panels = charts.panels(2, 3.6)
    titles = {"penalty": "‖AᵀA − I‖_F² / (N − 1)", "overlap": "Product of two rows of A"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for variant, own in table.groupby("variant", sort=False):
            axes.plot(own.groupby("layer")[column].mean(), label=lab.label(variant), **look(variant).line())
        axes.set(title=title, xlabel="Layer", xticks=sorted(set(table["layer"])))
    charts.legend(figure, panels[0].get_legend_handles_labels()[0])
    return figure
