"""Penalties on attention matrices and weights that are not orthogonal (Zhang et al. 2021, *On Orthogonality Constraints for
Transformers*).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from osa.constrained.names import Penalty
from osa.init import Attention, TwoLayers
from osa.linalg import identity_like
from osa.modules import Block, attention_matrix
from osa.vit import blocks_of


def gram_penalty(weight: Tensor) -> Tensor:
    """Σ (σᵢ² − 1)² over the singular values of W, summed over the batch.

    The sum is the smaller of ‖WᵀW − I‖_F² and ‖WWᵀ − I‖_F², which differ by |m − n|. Its gradient is 4 W (WᵀW − I).

    Args:
        weight: (..., m, n).

    Returns:
        A scalar tensor, ().

    Example:
        >>> gram_penalty(2 * torch.eye(3))
        tensor(27.)
    """
    wide = weight.shape[-2] < weight.shape[-1]
    gram = weight @ weight.mT if wide else weight.mT @ weight
    return (gram - identity_like(gram)).square().sum()


def attention_penalty(a: Tensor) -> Tensor:
    """L_AM = ‖AᵀA − I‖_F² (Section 2.2), summed over the heads and averaged over the batch, for A (B, num_heads, N, N).

    For a row-stochastic A, the penalty is 0 only if A is a permutation. Its maximum, N(N − 1), is reached if all tokens
    attend to the same single token. Uniform attention is a saddle point with penalty N − 1.
    """
    return gram_penalty(a) / len(a)


def projection_penalty(attention: Attention, *, separate: bool = False) -> Tensor:
    """L_LA = ‖PᵀP − I‖_F² with P = [W^Q; W^K; W^V; W^O], (4d, d), the concatenation of `nn.Linear.weight` (Section 2.1).

    The penalty is 0 if Σ WᵢᵀWᵢ = I over the four weights. The paper does not say along which dimension it concatenates them.

    Args:
        separate: return the sum of the four ‖WᵢᵀWᵢ − I‖_F² instead, which is 0 if each weight is orthogonal.
    """
    weights = torch.stack([part.weight for part in (attention.query, attention.key, attention.value, attention.out)])
    return gram_penalty(weights if separate else weights.flatten(0, 1))


def mlp_penalty(mlp: TwoLayers) -> Tensor:
    """L_LF = ‖M₁ᵀM₁ − I‖_F² + ‖M₂ᵀM₂ − I‖_F² (Section 2.1), minus the constant |hidden − d|."""
    return gram_penalty(mlp.fc1.weight) + gram_penalty(mlp.fc2.weight)


def head_penalty(attention: Attention) -> Tensor:
    """The sum over all heads of `gram_penalty` for [W^Q, W^K], for W^V and for W^Oᵀ.

    The initialisation of Section 4 of *Orthogonal Self-Attention* has penalty 0.
    """
    query, key, value, out = (
        weight.unflatten(0, (attention.num_heads, -1))  # (h, d_v, d)
        for weight in (attention.query.weight, attention.key.weight, attention.value.weight, attention.out.weight.mT)
    )
    return gram_penalty(torch.cat([query, key], dim=1)) + gram_penalty(value) + gram_penalty(out)


Term = Callable[[Block, Tensor], Tensor]  # arguments: a block, and the input of the block's attention

AM: Term = lambda block, x: attention_penalty(attention_matrix(block.attention, x))  # noqa: E731
LA: Term = lambda block, x: projection_penalty(block.attention)  # noqa: E731
LF: Term = lambda block, x: mlp_penalty(block.mlp)  # noqa: E731

PENALTIES: dict[Penalty, tuple[Term, ...]] = {
    "VAR-I": (AM,),  # Section 3
    "VAR-II": (AM, LA),
    "VAR-III": (AM, LA, LF),
    "VAR-II-separate": (AM, lambda block, x: projection_penalty(block.attention, separate=True)),
    "heads": (lambda block, x: head_penalty(block.attention),),
}


def with_penalty(model: nn.Module, images: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Returns the output of the model, and the sum of a penalty over its blocks, a scalar tensor.

    A penalty on attention matrices recomputes them from the inputs of the attention layers, with N² memory per head.

    Args:
        model: a model with `blocks`, each with an `attention` and an `mlp`, or a wrapper around such a model.
        images: input of the model.
        name: one of `PENALTIES`.

    Raises:
        ValueError: the penalty is unknown, the model has no blocks, or hooks do not run, as under torch.compile.

    Example:
        >>> logits, penalty = with_penalty(osa.create_model("vit"), torch.randn(2, 1, 28, 28), "VAR-I")
    """
    if name not in PENALTIES:
        raise ValueError(f"penalty {name!r} is unknown; choose one of {', '.join(PENALTIES)}")
    inputs: list[Tensor] = []
    blocks = blocks_of(model)
    hooks = [block.attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in blocks]
    try:
        output = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    if len(inputs) != len(blocks):
        raise ValueError(
            "with_penalty cannot see the inputs of the blocks, because the blocks are compiled or DataParallel has copied "
            "them: pass the model without torch.compile or DataParallel"
        )
    terms = [term(block, x) for block, x in zip(blocks, inputs, strict=True) for term in PENALTIES[name]]
    return output, torch.stack(terms).sum()
