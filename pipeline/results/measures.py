"""Functions of tensors that compute the quantities in the paper's theorems.

Everything is float64 unless a dtype is given. Matrices are small, so they are formed in full. N is the number of tokens,
d the width of the model, d_v the width of a head, M = [Q, K] (N×2d_v), and `scale` is the factor α/√d_v in Eq. 5.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor, nn

from osa.functional import orthogonal_attention
from osa.init import stiefel_uniform
from osa.modules import MLP, Block, OrthogonalSelfAttention, SelfAttention
from osa.options import Method
from osa.reference import skew
from osa.vit import VisionTransformer

METHODS: tuple[Method, ...] = ("qr", "newton_schulz", "exact")
ORTHOGONAL = ("osa_qr", "osa_ns", "osa_exact")  # the models that use METHODS, in the same order
LAYER_IMAGES = 2  # number of images on which a layer is measured


def rounding(length: int, dtype: torch.dtype) -> float:
    """Returns 32 n · eps, a tolerance for the relative error of successive matrix products of inner dimension n = `length`.

    The error of one product is at most n · eps/2 · ‖A‖_F‖B‖_F (Higham 2002, Section 3.5), and the relative error is
    typically √n · eps. The factor 32 allows for the 20 to 60 products that computing φ₁ takes.
    """
    return 32 * length * torch.finfo(dtype).eps


def norm(matrix: Tensor) -> Tensor:
    """The spectral norm ‖·‖₂, (..., n, m) → (...)."""
    return torch.linalg.matrix_norm(matrix, 2)


def exponential(s: Tensor) -> Tensor:
    """Returns exp(S) of a skew-symmetric S, (..., n, n), with an error of n · eps · ‖S‖₂.

    torch.linalg.matrix_exp is not accurate enough: for an unbatched float64 matrix with ‖S‖₁ from 3e-4 to 5e-2, the error
    reaches 3.3e-10 (PyTorch issue 196592).
    """
    values, vectors = torch.linalg.eigh(1j * s)
    return ((vectors * torch.exp(-1j * values).unsqueeze(-2)) @ vectors.mH).real


def orthogonality_error(y: Tensor) -> Tensor:
    """‖YᵀY − I‖₂ if m ≥ n, else ‖YYᵀ − I‖₂; Y (..., m, n) → (...)."""
    y = y.mT if y.shape[-2] < y.shape[-1] else y
    return norm(y.mT @ y - torch.eye(y.shape[-1], dtype=y.dtype, device=y.device))


def effective_rank(eigenvalues: Tensor) -> float:
    """Returns exp(−Σ pᵢ log pᵢ), pᵢ = λᵢ/Σλ (Roy and Vetterli 2007): n if n eigenvalues are equal and all others are 0."""
    return torch.special.entr(eigenvalues / eigenvalues.sum()).sum().exp().item()


def mean_cosine(cosines: Tensor) -> Tensor:
    """Returns the mean cosine over all pairs of different tokens, (..., N, N) → (...). The diagonal must be 1."""
    n = cosines.shape[-1]
    return (cosines.sum((-2, -1)) - n) / (n * n - n)


def matrix_with_condition(tokens: int, width: int, condition: float, *, generator: Generator) -> Tensor:
    """Returns a random (tokens, width ≤ tokens) matrix with singular values spaced geometrically from 1 to 1/condition."""
    left = torch.linalg.qr(torch.randn(tokens, width, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    exponents = torch.linspace(0, -math.log10(condition), width, dtype=torch.float64)
    return left * 10**exponents @ right.mT


def scale_for_norm(query: Tensor, key: Tensor, skew_norm: float) -> Tensor:
    """Returns the scale, a scalar tensor, for which S has ‖S‖₂ = `skew_norm`."""
    return skew_norm / norm(skew(query, key, 1.0))


# Weights


def random_head(d: int, num_heads: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws W^Q, W^K, W^V (d, d_v) and W^O (d_v, d) of one head in float64, with Section 4's initialisation."""
    width = d // num_heads
    query_key = stiefel_uniform(d, 2 * width, generator=generator, dtype=torch.float64)
    value, out = (stiefel_uniform(d, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return query_key[:, :width], query_key[:, width:], value, out.mT


def head_weights(layer: SelfAttention) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """W^Q, W^K, W^V (d, d_v) and W^O (d_v, d) of each head, in the paper's orientation."""
    width = layer.embed_dim // layer.num_heads
    heads = []
    for i in range(layer.num_heads):
        rows = slice(i * width, (i + 1) * width)
        query, key, value = (linear.weight[rows].mT for linear in (layer.query, layer.key, layer.value))
        heads.append((query, key, value, layer.out.weight[:, rows].mT))
    return heads


def query_key_product(w_query: Tensor, w_key: Tensor) -> Tensor:
    """W̃ = W^Q (W^K)ᵀ − W^K (W^Q)ᵀ, (..., d, d), for weights (..., d, d_v) (Section 4.2)."""
    half = w_query @ w_key.mT
    return half - half.mT


def condition(singular_values: Tensor, rank: int) -> float:
    """Returns the effective condition number (Section 4.1), the ratio of the largest to the smallest nonzero singular value.

    Singular values are in descending order, and the first `rank` of them are not zero.
    """
    return (singular_values[0] / singular_values[rank - 1]).item()


def weight_condition(w_query: Tensor, w_key: Tensor) -> float:
    """Returns κ(W̃) of a head (Theorem 4.2), from the 2d_v nonzero singular values of W̃."""
    values = torch.linalg.svdvals(query_key_product(w_query.double(), w_key.double()))
    return condition(values, rank=2 * w_query.shape[-1])


def gradient_norm(module: nn.Module, least_dimensions: int = 0) -> float:
    """Returns ‖∂loss/∂θ‖₂ after a backward pass, over the parameters with at least `least_dimensions` dimensions."""
    found = [p.grad.norm() for p in module.parameters() if p.ndim >= least_dimensions and p.grad is not None]
    return torch.stack(found).norm().item()


# Jacobians


def head(x: Tensor, weights: tuple[Tensor, ...], scale: float | Tensor, **method) -> Tensor:
    """One head's OSA(X) = A(X) X W^V W^O (Eq. 5), (..., N, d), for weights W^Q, W^K, W^V (d, d_v) and W^O (d_v, d)."""
    w_query, w_key, w_value, w_out = weights
    return orthogonal_attention(x @ w_query, x @ w_key, x @ w_value, scale=scale, **method) @ w_out


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂vec f(X)/∂vec X, (outputs, N·d). vec stacks columns, as in Eq. 12.

    A single backward pass differentiates all outputs, each at its own copy of X.

    Args:
        function: (batch, N, d) → (batch, n, m) or (batch, m), independently for each item of the batch.
        x: (N, d).
    """
    shape = function(x[None]).shape[1:]
    copies = x.detach().repeat(shape.numel(), 1, 1).requires_grad_()
    basis = torch.eye(shape.numel(), dtype=x.dtype)
    if len(shape) == 2:
        basis = basis.unflatten(1, shape[::-1]).mT  # output (i, j) is row j·n + i
    (rows,) = torch.autograd.grad(function(copies), copies, basis)
    return rows.mT.flatten(1)


def power_iteration(
    function: Callable[[Tensor], Tensor], x: Tensor, start: Tensor, num_iterations: int
) -> tuple[Tensor, Tensor]:
    """Iterates v ← JᵀJ v/‖v‖ from `start`. Returns the last J v/‖v‖ and JᵀJ v/‖v‖; their norms tend to ‖J‖₂ and ‖J‖₂².

    J, the Jacobian at x, is never formed. A backward pass gives Jᵀu. A second backward pass, through u ↦ Jᵀu, gives J v.
    """
    x = x.detach().requires_grad_()
    y = function(x)
    u = torch.zeros_like(y, requires_grad=True)
    (pullback,) = torch.autograd.grad(y, x, u, create_graph=True)  # Jᵀu, linear in u
    v = start
    for _ in range(num_iterations):
        (pushed,) = torch.autograd.grad(pullback, u, v / v.norm(), retain_graph=True)  # J v
        (v,) = torch.autograd.grad(y, x, pushed, retain_graph=True)
    return pushed, v


def head_condition(layer: OrthogonalSelfAttention, index: int, x: Tensor) -> dict[str, float]:
    """Returns κ(J) and ‖J‖₂ of one head at the tokens x (N, d), from the eigenvalues of J Jᵀ.

    The head's outputs lie in the row space of W^O. In coordinates of this space the Jacobian has N·d_v rows, one for each
    nonzero singular value. The layer must be in float64 and on the CPU.
    """
    *inputs, w_out = (weight.detach() for weight in head_weights(layer)[index])
    coordinates = torch.linalg.qr(w_out.mT).R.mT  # (d_v, d_v)
    scale = layer.scale().detach().expand(layer.num_heads, 1, 1)[index]
    weights = (*inputs, coordinates)
    with torch.enable_grad():
        whole = jacobian(lambda x: head(x, weights, scale, **layer.options), x)
    values = torch.linalg.eigvalsh(whole @ whole.mT).clamp(min=0).sqrt().flip(0)
    return {"kappa": condition(values, rank=len(values)), "jacobian_norm": values[0].item()}


# Layers of a model


def blocks_of(model: VisionTransformer) -> list[tuple[Block, SelfAttention, MLP]]:
    """Returns (block, attention, MLP) for each block of the model. The assertions tell mypy the types."""
    blocks = []
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.attention, SelfAttention)
        assert isinstance(block.mlp, MLP)
        blocks.append((block, block.attention, block.mlp))
    return blocks


def attention_inputs(model: VisionTransformer, images: Tensor) -> Iterator[tuple[SelfAttention, Tensor]]:
    """Yields each block's attention module, and the module's input, (images, N, d)."""
    x = model.tokens(images)
    for block, attention, _ in blocks_of(model):
        yield attention, block.norm1(x)
        x = block(x)
