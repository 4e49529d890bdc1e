"""Initialisation of attention, MLPs and linear layers: the paper's (Algorithm 1, Section 4, Appendix D) and others."""

import math
from typing import Protocol, get_args

import torch
from torch import Generator, Tensor, nn

from osa.options import QueryKeyInit, ValueOutInit

TRUNCATED_STD = 0.87962566103423978  # standard deviation of N(0, 1) restricted to [−2, 2]
QUERY_KEY, VALUE_OUT = get_args(QueryKeyInit), get_args(ValueOutInit)  # initialisations of signal-preserving attention
SMALL_SCALE = 0.1  # factor of W^Q and W^K that keeps attention logits at a few hundredths


class Attention(Protocol):
    """The attributes of an attention layer that initialisation uses: its sizes, and four linear layers (d, d)."""

    embed_dim: int
    num_heads: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear


class ScaledAttention(Attention, Protocol):
    """Attention with two factors per head: `shortcut` multiplies V_i, and `residual` multiplies A_i V_i."""

    shortcut: nn.Parameter
    residual: nn.Parameter


class TwoLayers(Protocol):
    """The attributes of an MLP that initialisation uses: two linear layers, with weights (H, d) and (d, H)."""

    fc1: nn.Linear
    fc2: nn.Linear


def stiefel_uniform(n: int, m: int, *, generator: Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Draws W uniformly from the Stiefel manifold {W ∈ ℝ^{n×m}: WᵀW = I} (Algorithm 1).

    W is the Q of the reduced QR decomposition of a Gaussian matrix, with columns multiplied by the signs of R's diagonal.
    Without these signs, the distribution would depend on the sign convention of the QR routine (Mezzadri 2006).

    Args:
        n, m: the shape, n ≥ m ≥ 1.
        generator: a generator on the default device. Default: torch's global one.
        dtype: type of the result. Default: torch's default. All arithmetic is float64.

    Raises:
        ValueError: n < m or m < 1.
    """
    if not n >= m >= 1:
        raise ValueError(f"a Stiefel manifold V_m(R^n) needs n >= m >= 1, not n = {n}, m = {m}")
    if torch.get_default_device().type == "meta":  # no values to draw, and the code below would import torch's compiler
        return torch.empty(n, m, dtype=dtype)
    q, r = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64))
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
    return (q * signs).to(dtype or torch.get_default_dtype())


@torch.no_grad()
def scaled_uniform_orthogonal_(weight: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Fills W, [out, in] as in `nn.Linear.weight`, with max(1, √(out/in)) · Q, where Q is semi-orthogonal and uniform.

    This is the scaled uniform orthogonal initialisation, SUO: y = W x preserves the mean square of the entries, exactly if
    out ≥ in, on average if out < in (Martens et al. 2021; Section 4.4). Returns the weight.

    Raises:
        ValueError: the weight is not a matrix.

    Example:
        >>> w = scaled_uniform_orthogonal_(torch.empty(256, 64))
        >>> bool((w.T @ w - 4 * torch.eye(64)).abs().max() < 1e-4)
        True
    """
    if weight.dim() != 2:
        raise ValueError(f"scaled_uniform_orthogonal_ fills matrices [out, in], not a tensor of shape {tuple(weight.shape)}")
    fan_out, fan_in = weight.shape
    q = stiefel_uniform(max(weight.shape), min(weight.shape), generator=generator, dtype=weight.dtype)
    return weight.copy_(max(1.0, math.sqrt(fan_out / fan_in)) * (q if fan_out >= fan_in else q.mT))


@torch.no_grad()
def init_orthogonal_attention_(
    attention: Attention, *, alpha: float = 0.1, joint_value_output: bool = False, generator: Generator | None = None
) -> None:
    """Draws each head's W^V and (W^O)ᵀ from U_{d×d_v}, independently, and [W^Q, W^K] from U_{d×2d_v} (Section 4).

    U_{n×m} is the distribution of `stiefel_uniform`. Also sets α of orthogonal attention, and sets biases to zero.

    Args:
        attention: `OrthogonalSelfAttention` or `SoftmaxSelfAttention`, with at least two heads.
        alpha: initial α. Softmax attention has none.
        joint_value_output: draw W^V and W^O of all heads together, each as one orthogonal d×d matrix. Each head's blocks
            remain uniform, and Σ_i W^V_i W^O_i becomes orthogonal. If attention is near the identity, each layer
            multiplies the tokens by about this sum.
    """
    d, num_heads = attention.embed_dim, attention.num_heads
    d_v = d // num_heads
    for i in range(num_heads):
        rows = slice(i * d_v, (i + 1) * d_v)  # nn.Linear stores Wᵀ: head i of W^Q, W^K, W^V is a block of rows
        query_key = stiefel_uniform(d, 2 * d_v, generator=generator)
        attention.query.weight[rows] = query_key[:, :d_v].mT
        attention.key.weight[rows] = query_key[:, d_v:].mT
        if not joint_value_output:
            attention.value.weight[rows] = stiefel_uniform(d, d_v, generator=generator).mT
            attention.out.weight[:, rows] = stiefel_uniform(d, d_v, generator=generator)
    if joint_value_output:
        _orthogonal(attention.value, attention.out, generator=generator)
    _zero_biases_and_alpha(attention, alpha)


@torch.no_grad()
def init_softmax_attention_(
    attention: Attention,
    *,
    fused_qkv: bool = False,
    joint_value_output: bool = False,
    alpha: float = 0.1,
    generator: Generator | None = None,
) -> None:
    """Draws Xavier uniform weights, and sets biases to zero (Appendix D).

    Args:
        attention: `SoftmaxSelfAttention` or `OrthogonalSelfAttention`.
        alpha: initial α. Softmax attention has none.
        fused_qkv: draw the weights of query, key and value as one [3d, d] matrix, which divides Xavier's bound by √2.
        joint_value_output: draw W^V and W^O of all heads together, each as one orthogonal d×d matrix, not Xavier uniform.
    """
    gain = math.sqrt(0.5) if fused_qkv else 1.0  # ratio of Xavier's bounds √(6/(d + 3d)) and √(6/(d + d))
    for linear in (attention.query, attention.key, attention.value):
        nn.init.xavier_uniform_(linear.weight, gain=gain, generator=generator)
    nn.init.xavier_uniform_(attention.out.weight, generator=generator)
    if joint_value_output:
        _orthogonal(attention.value, attention.out, generator=generator)
    _zero_biases_and_alpha(attention, alpha)


@torch.no_grad()
def init_ji_attention_(
    attention: Attention,
    *,
    identity: float = 0.6,
    noise: float = 2.0,
    scale: float = 3.0,
    alpha: float = 0.1,
    generator: Generator | None = None,
) -> None:
    """Draws W^V and W^O as scaled orthogonal matrices, and W^Q and W^K so that a token attends mostly to itself.

    This follows Ji et al. 2025 (arXiv:2510.00345). Biases are zero.

        W^V = c U,        W^O = c V,        W^Q_i W^K_iᵀ ≈ a Z_i + b I,

    where U and V are Haar on O(d), and Z_i has independent entries N(0, 1/d). The product W^Q_i W^K_iᵀ is the best rank-d_v
    approximation of a Z_i + b I: if the latter has the singular value decomposition P Σ Rᵀ, then W^Q_i and W^K_i are the
    first d_v columns of P Σ^½ and R Σ^½.

    The defaults are for ViT-B, from secondary sources: summaries and a reproduction of Ji et al. We assume that U and V
    hold the blocks of all heads, and that each head has its own Z_i. Without LayerNorm, c = 1 preserves the norm of tokens.

    Args:
        attention: `SoftmaxSelfAttention` or `OrthogonalSelfAttention`.
        identity, noise, scale: b, a and c.
        alpha: initial α. Softmax attention has none.
    """
    d, num_heads = attention.embed_dim, attention.num_heads
    d_v = d // num_heads
    for i in range(num_heads):
        rows = slice(i * d_v, (i + 1) * d_v)  # nn.Linear stores Wᵀ
        product = noise / math.sqrt(d) * torch.randn(d, d, generator=generator, dtype=torch.float64)
        left, values, right = torch.linalg.svd(product + identity * torch.eye(d, dtype=torch.float64))
        roots = values[:d_v, None].sqrt()
        attention.query.weight[rows] = (roots * left[:, :d_v].mT).to(attention.query.weight.dtype)
        attention.key.weight[rows] = (roots * right[:d_v]).to(attention.key.weight.dtype)
    _orthogonal(attention.value, attention.out, generator=generator)
    attention.value.weight.mul_(scale)
    attention.out.weight.mul_(scale)
    _zero_biases_and_alpha(attention, alpha)


@torch.no_grad()
def init_signal_preserving_attention_(
    attention: Attention,
    *,
    query_key: QueryKeyInit = "zero_query",
    value_out: ValueOutInit = "orthogonal",
    generator: Generator | None = None,
) -> None:
    """Draws weights with zero or small query-key products for `SignalPreservingSelfAttention` (He et al. 2023, Section 3.3).

    Args:
        query_key: "zero_query", as in the paper, sets W^Q = 0 and draws an orthogonal W^K. "zero_key" sets W^K = 0 and draws
            an orthogonal W^Q. "small" draws orthogonal W^Q and W^K, times 0.1.
        value_out: "orthogonal" draws W^V and W^O each as one orthogonal matrix. "gaussian" draws their entries from
            N(0, 1/d) (Figure 9 of He et al.).

    Raises:
        ValueError: query_key or value_out is unknown.
    """
    for option, chosen, choices in (("query_key", query_key, QUERY_KEY), ("value_out", value_out, VALUE_OUT)):
        if chosen not in choices:
            raise ValueError(f"{option} {chosen!r} is unknown; choose one of {', '.join(choices)}")
    drawn, other = attention.key, attention.query
    if query_key == "zero_key":
        drawn, other = other, drawn
    _orthogonal(drawn, generator=generator)
    if value_out == "orthogonal":
        _orthogonal(attention.value, attention.out, generator=generator)
    else:
        for linear in (attention.value, attention.out):
            linear.weight.normal_(std=attention.embed_dim**-0.5, generator=generator)
    if query_key == "small":
        _orthogonal(other, generator=generator)
        drawn.weight.mul_(SMALL_SCALE)
        other.weight.mul_(SMALL_SCALE)
    else:
        nn.init.zeros_(other.weight)


@torch.no_grad()
def init_value_skipinit_attention_(attention: ScaledAttention, *, generator: Generator | None = None) -> None:
    """Draws four orthogonal weights and sets α = 1 and β = 0, for `ValueSkipInitSelfAttention` (He et al. 2023, Eq. 7)."""
    _orthogonal(attention.query, attention.key, attention.value, attention.out, generator=generator)
    nn.init.ones_(attention.shortcut)
    nn.init.zeros_(attention.residual)


def _zero_biases_and_alpha(attention: Attention, alpha: float) -> None:
    for linear in (attention.query, attention.key, attention.value, attention.out):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    alphas = getattr(attention, "alpha", None)  # None for softmax attention
    if alphas is not None:
        alphas.fill_(alpha)


def _orthogonal(*linears: nn.Linear, generator: Generator | None) -> None:
    for linear in linears:
        scaled_uniform_orthogonal_(linear.weight, generator=generator)


@torch.no_grad()
def init_suo_mlp_(
    mlp: TwoLayers, *, transposed: bool = False, gain: float = 1.0, generator: Generator | None = None
) -> None:
    """Draws SUO weights (`scaled_uniform_orthogonal_`) for an MLP, and sets biases to zero (Section 4.4).

    Args:
        transposed: scale by max(1, √(in/out)), not max(1, √(out/in)), as if the weight were [in, out].
        gain: multiplies the second weight, to restore the mean square of tokens, which the activation function reduces.
    """
    for linear in (mlp.fc1, mlp.fc2):
        scaled_uniform_orthogonal_(linear.weight, generator=generator)
        if transposed:
            fan_out, fan_in = linear.weight.shape
            linear.weight.mul_(max(1.0, math.sqrt(fan_in / fan_out)) / max(1.0, math.sqrt(fan_out / fan_in)))
        nn.init.zeros_(linear.bias)
    mlp.fc2.weight.mul_(gain)


@torch.no_grad()
def init_isometric_mlp_(mlp: TwoLayers, *, gain: float, kappa: float, generator: Generator | None = None) -> None:
    """Builds both weights of an MLP from one orthonormal frame, so that a nearly linear MLP is nearly a rotation.

    For fc1 [H, d] and fc2 [d, H], with U uniform on the Stiefel manifold V_d(ℝ^H), R Haar on O(d) and s = √(H/d):

        W₁ = s U,        W₂ = (g/s) R Uᵀ,        W₂ W₁ = g R,        g = 1/√(κ₁² + (E[φ²] − κ₁²) d/H),

    where κ₁ = E[φ(z) z] and E[φ²] = E[φ(z)²] for z ~ N(0, 1). Biases are zero.

    This g preserves the mean square of tokens on average, for any φ. U and U Rᵀ are each uniform, as in `init_suo_mlp_`,
    which draws them independently. Using one U for both is our addition: with the activation "dks_gelu", the variance of
    log |x|² after L blocks is then of order 1/H instead of L/d (docs/depth.md).

    Args:
        mlp: an MLP with linear layers fc1 and fc2.
        gain: 1/√(E[φ(z)²]).
        kappa: κ = E[φ(z) z]/√(E[φ(z)²]), so that g = gain/√(κ² + (1 − κ²) d/H).

    Raises:
        ValueError: H < d, so that no such frame exists.
    """
    hidden_dim, embed_dim = mlp.fc1.weight.shape
    if hidden_dim < embed_dim:
        raise ValueError(
            f"isometric MLPs need a hidden width of embed_dim {embed_dim} or more, not {hidden_dim}: raise mlp_ratio"
        )
    ratio = embed_dim / hidden_dim
    gain /= math.sqrt(kappa**2 + (1 - kappa**2) * ratio)
    frame = stiefel_uniform(hidden_dim, embed_dim, generator=generator, dtype=torch.float64)
    rotation = stiefel_uniform(embed_dim, embed_dim, generator=generator, dtype=torch.float64)
    mlp.fc1.weight.copy_(frame / math.sqrt(ratio))
    mlp.fc2.weight.copy_(gain * math.sqrt(ratio) * rotation @ frame.mT)
    nn.init.zeros_(mlp.fc1.bias)
    nn.init.zeros_(mlp.fc2.bias)


def init_xavier_mlp_(mlp: TwoLayers, *, generator: Generator | None = None) -> None:
    """Draws Xavier uniform weights for an MLP, and sets biases to zero (Appendix D)."""
    for linear in (mlp.fc1, mlp.fc2):
        xavier_linear_(linear, generator=generator)


def xavier_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Draws a Xavier uniform weight, and sets the bias to zero (Appendix D)."""
    nn.init.xavier_uniform_(linear.weight, generator=generator)
    nn.init.zeros_(linear.bias)


def torch_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Draws weight and bias from U(−1/√fan_in, 1/√fan_in), PyTorch's default for `nn.Linear`, but with a generator."""
    bound = 1 / math.sqrt(linear.in_features)
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    nn.init.uniform_(linear.bias, -bound, bound, generator=generator)


def lecun_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Draws a weight of variance 1/fan_in from a normal distribution truncated at 2σ, as Flax does. The bias is zero."""
    truncated_normal_(linear.weight, 1 / (TRUNCATED_STD * math.sqrt(linear.in_features)), generator=generator)
    nn.init.zeros_(linear.bias)


def zeros_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Sets weight and bias to zero, and draws nothing from the generator."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


def truncated_normal_(tensor: Tensor, std: float, *, generator: Generator | None = None) -> Tensor:
    """Draws from N(0, σ²) restricted to [−2σ, 2σ] (Appendix D: learnable embeddings and [cls], σ = 0.02)."""
    if tensor.is_meta:  # there are no values to draw, and `trunc_normal_` would import torch's compiler
        return tensor
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
