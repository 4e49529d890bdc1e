"""Initialisation: the Stiefel manifold (Algorithm 1), orthogonal attention (Section 4) and the ViT baseline (Appendix D)."""

import math
from typing import Protocol, get_args

import torch
from torch import Generator, Tensor, nn

from osa.options import QueryKeyInit, ValueOutInit

TRUNCATED_STD = 0.87962566103423978  # standard deviation of N(0, 1) restricted to [−2, 2]
QUERY_KEY, VALUE_OUT = get_args(QueryKeyInit), get_args(ValueOutInit)  # options of signal-preserving attention
SMALL_SCALE = 0.1  # times W^Q and W^K: attention's logits are then some hundredths


class Attention(Protocol):
    """Parts of an attention layer that are initialised: four linear layers (d, d), which num_heads heads share."""

    embed_dim: int
    num_heads: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear


class ScaledAttention(Attention, Protocol):
    """Attention with a number for each head that multiplies its values, and one that multiplies its attention."""

    shortcut: nn.Parameter
    residual: nn.Parameter


class TwoLayers(Protocol):
    """Parts of an MLP that are initialised: its linear layers (H, d) and (d, H)."""

    fc1: nn.Linear
    fc2: nn.Linear


def stiefel_uniform(n: int, m: int, *, generator: Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A draw from the uniform distribution on the Stiefel manifold {W ∈ ℝ^{n×m}: WᵀW = I} (Algorithm 1).

    Takes the reduced QR decomposition of a Gaussian matrix and moves the signs of R's diagonal into Q: without this
    correction the draw would depend on the sign convention of the QR routine (Mezzadri 2006).

    Args:
        n, m: the shape, n ≥ m ≥ 1.
        generator: a generator of the default device. Default: torch's global one.
        dtype: type of the result. Default: torch's default. The arithmetic is float64.

    Raises:
        ValueError: n < m or m < 1.

    Example:
        >>> w = stiefel_uniform(64, 16, dtype=torch.float64)
        >>> bool((w.T @ w - torch.eye(16)).abs().max() < 1e-12)
        True
    """
    if not n >= m >= 1:
        raise ValueError(f"a Stiefel manifold V_m(R^n) needs n >= m >= 1, not n = {n}, m = {m}")
    if torch.get_default_device().type == "meta":  # shapes alone: torch draws no values, and is slow at it
        return torch.empty(n, m, dtype=dtype)
    q, r = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64))
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0)
    return (q * signs).to(dtype or torch.get_default_dtype())


@torch.no_grad()
def scaled_uniform_orthogonal_(weight: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Fills W, laid out [out, in] as in `nn.Linear.weight`, with max(1, √(out/in)) · Q, Q uniformly semi-orthogonal.

    With zero biases the mean square of a vector's entries is kept by y = W x: exactly for out ≥ in, on average for
    out < in (Martens et al. 2021, SUO; Section 4.4). Code that reads the weight as [in, out] scales the wrong layers.

    Returns:
        The weight.

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
    """Section 4: per head, W^V = U and W^O = Vᵀ from independent draws of U_{d×d_v}, [W^Q, W^K] from one draw of U_{d×2d_v},
    and α small. Softmax attention has no α; its biases start at zero.

    Args:
        attention: `OrthogonalSelfAttention` or `SoftmaxSelfAttention`, of two heads or more.
        alpha: of orthogonal attention alone.
        joint_value_output: draw W^V and W^O of all heads together, each as one orthogonal d×d matrix. A head's blocks are
            uniform on the Stiefel manifold as before, but Σ_i W^V_i W^O_i is orthogonal: with per-head draws it is not, and
            a deep stack whose attention is near the identity multiplies such matrices.
    """
    d, num_heads = attention.embed_dim, attention.num_heads
    d_v = d // num_heads
    for i in range(num_heads):
        rows = slice(i * d_v, (i + 1) * d_v)  # nn.Linear keeps Wᵀ: head i of W^Q, W^K, W^V is a block of rows
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
    """Xavier uniform weights and zero biases (Appendix D).

    Args:
        attention: `SoftmaxSelfAttention` or `OrthogonalSelfAttention`.
        alpha: of orthogonal attention alone.
        fused_qkv: draw query, key and value as one [3d, d] matrix, whose bound is smaller by √2.
        joint_value_output: draw W^V and W^O each as one orthogonal matrix instead.
    """
    gain = math.sqrt(0.5) if fused_qkv else 1.0  # √(6 / (d + 3d)) over √(6 / (d + d))
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
    """Orthogonal values, attention that leans on the token itself, and zero biases (Ji et al. 2025, arXiv:2510.00345).

        W^V = c U,        W^O = c V,        W^Q_i W^K_iᵀ ≈ a Z_i + b I,

    U and V Haar on O(d), the entries of Z_i independent N(0, 1/d), and in the place of a Z_i + b I the nearest matrix of
    rank d_v: from the singular value decomposition P Σ Rᵀ, W^Q_i = P Σ^½ and W^K_i = R Σ^½, cut to d_v columns.

    The paper, as read in summaries and in a reproduction of it, has a = 2, b = 0.6 and c = 3 for ViT-B, and orthogonal MLPs
    (`init_suo_mlp_`). Our reading: U and V hold all heads, and Z_i is drawn for each. Without LayerNorm c = 1 keeps the
    tokens' size.

    Args:
        attention: `SoftmaxSelfAttention` or `OrthogonalSelfAttention`.
        identity, noise, scale: b, a and c.
        alpha: of orthogonal attention alone.
    """
    d, num_heads = attention.embed_dim, attention.num_heads
    d_v = d // num_heads
    for i in range(num_heads):
        rows = slice(i * d_v, (i + 1) * d_v)  # nn.Linear keeps Wᵀ
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
    """Query-key products that begin at zero, for `SignalPreservingSelfAttention` (He et al. 2023, Section 3.3).

    Args:
        query_key: "zero_query" as in the paper, or "zero_key": one of W^Q and W^K is zero and the other an orthogonal draw;
            or "small": both are orthogonal draws times 0.1.
        value_out: W^V and W^O are each one "orthogonal" draw, or "gaussian", N(0, 1/d) (their Figure 9).

    Raises:
        ValueError: query_key or value_out is none of these.
    """
    if query_key not in QUERY_KEY or value_out not in VALUE_OUT:
        raise ValueError(f"choose query_key of {', '.join(QUERY_KEY)} and value_out of {', '.join(VALUE_OUT)}")
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
    """Four orthogonal draws, α = 1 and β = 0, for `ValueSkipInitSelfAttention` (He et al. 2023, Eq. 7)."""
    _orthogonal(attention.query, attention.key, attention.value, attention.out, generator=generator)
    nn.init.ones_(attention.shortcut)
    nn.init.zeros_(attention.residual)


def _zero_biases_and_alpha(attention: Attention, alpha: float) -> None:
    for linear in (attention.query, attention.key, attention.value, attention.out):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    alphas = getattr(attention, "alpha", None)  # only orthogonal attention has any
    if alphas is not None:
        alphas.fill_(alpha)


def _orthogonal(*linears: nn.Linear, generator: Generator | None) -> None:
    for linear in linears:
        scaled_uniform_orthogonal_(linear.weight, generator=generator)


@torch.no_grad()
def init_suo_mlp_(
    mlp: TwoLayers, *, transposed: bool = False, gain: float = 1.0, generator: Generator | None = None
) -> None:
    """SUO weights and zero biases for an MLP (Section 4.4).

    Args:
        transposed: scale by max(1, √(in/out)) instead, as a reading of the weight as [in, out] would.
        gain: factor of the second layer, which restores the mean square that the activation reduces.

    Example:
        >>> block = osa.create_model("vit", depth=1).blocks[0]
        >>> init_suo_mlp_(block.mlp)
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
    """Both layers of an MLP from one orthogonal frame, with zero biases, so that a nearly linear MLP is nearly a rotation.

    For fc1 [H, d] and fc2 [d, H], U uniform on the Stiefel manifold V_d(ℝ^H), R Haar on O(d) and s = √(H/d):

        W₁ = s U,        W₂ = (g/s) R Uᵀ,        W₂ W₁ = g R,        g = 1/√(κ₁² + (E φ² − κ₁²) d/H),

    where κ₁ = E φ(z) z and E φ² = E φ(z)² for z ~ N(0, 1).

    This g keeps the mean square of tokens on average, for any φ: if |x|² = d, the entries of z = s U x are nearly N(0, 1),
    and φ(z) = κ₁ z + r with r ⟂ z. Uᵀ gives back all of κ₁ z and, as U is uniform but for z, the share d/H of |r|². Angles
    are kept where φ is nearly linear, at any width. U and U Rᵀ are each uniform on their Stiefel manifold, as in
    `init_suo_mlp_`; only their dependence is new, and ours.

    What still fluctuates is κ₁ as a mean over H entries: log |x|² with a variance of order (1 − κ₁²)/H in an MLP, and so of
    1/H over L of them that are shaped for L blocks, where 1 − κ₁² ≈ ln 5/L. Independent draws have 2 (1 − d/H) L/d, which is
    the fluctuation of Hanin and Nica 2020 (arXiv:1812.05994). docs/depth.md derives and measures both.

    Args:
        mlp: with linear layers fc1 and fc2.
        gain: 1/√E φ(z)².
        kappa: κ = E φ(z) z/√E φ(z)², so that g = gain/√(κ² + (1 − κ²) d/H).

    Raises:
        ValueError: H < d, so that no frame fits.

    Example:
        >>> mlp = osa.MLP(64, 256)
        >>> init_isometric_mlp_(mlp, gain=1.0, kappa=1.0)
        >>> rotation = mlp.fc2.weight @ mlp.fc1.weight
        >>> bool((rotation @ rotation.T - torch.eye(64)).abs().max() < 1e-5)
        True
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
    """Xavier uniform weights and zero biases for an MLP (Appendix D)."""
    for linear in (mlp.fc1, mlp.fc2):
        xavier_linear_(linear, generator=generator)


def xavier_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Xavier uniform weight and zero bias (Appendix D)."""
    nn.init.xavier_uniform_(linear.weight, generator=generator)
    nn.init.zeros_(linear.bias)


def torch_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """PyTorch's default of `nn.Linear`, U(−1/√in, 1/√in) for weight and bias, from an explicit generator."""
    bound = 1 / math.sqrt(linear.in_features)
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    nn.init.uniform_(linear.bias, -bound, bound, generator=generator)


def lecun_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """A normal weight that is truncated at two of its standard deviations and has the variance 1/in, and a zero bias.

    Flax's default of convolutions and dense layers, `lecun_normal`, which corrects σ for the truncation.
    """
    truncated_normal_(linear.weight, 1 / (TRUNCATED_STD * math.sqrt(linear.in_features)), generator=generator)
    nn.init.zeros_(linear.bias)


def zeros_linear_(linear: nn.Linear, *, generator: Generator | None = None) -> None:
    """Zero weight and bias, which take no draw from the generator."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)


def truncated_normal_(tensor: Tensor, std: float, *, generator: Generator | None = None) -> Tensor:
    """N(0, σ²) restricted to [−2σ, 2σ] (Appendix D: learnable embeddings and [cls], σ = 0.02)."""
    if tensor.is_meta:  # has no values to draw, and torch would import its compiler to say so
        return tensor
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
