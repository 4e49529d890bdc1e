"""Transformers shaped at initialisation, so that they can be deep without skips (He et al. 2023, arXiv:2302.10322).

Attention matrices A_l = R_l R_{l−1}^{-1} with R_l R_lᵀ = Σ_l take the tokens' kernel Σ = X Xᵀ/d through a schedule of
kernels Σ_0, …, Σ_L (Eq. 8 and 9), where softmax would make all tokens alike. Value-SkipInit makes A_l = I (Eq. 7). Between
them stand MLPs whose activation is shaped for the depth of the network (DKS, Martens et al. 2021; TAT, Zhang et al. 2022).

Kernels are float64 and on the CPU, whatever the default device. Activations are solved for in plain numbers.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from osa.init import init_signal_preserving_attention_, init_value_skipinit_attention_
from osa.modules import Device, Dtype, SelfAttention, first_rows
from osa.options import Kernel

KERNELS = get_args(Kernel)
FASTEST = 12.0  # γ up to which float64 tells 1 − e^{−2γ} from 1 well enough to take its roots
FLOOR = 1e-15  # least entry: positive, but below what an eigendecomposition tells from 0

# Kernels and their schedules


def _eye(num_tokens: int) -> Tensor:
    return torch.eye(num_tokens, dtype=torch.float64, device="cpu")


def _places(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens, dtype=torch.float64, device="cpu")


def uniform_kernel(num_tokens: int, rho: float) -> Tensor:
    """Σ(ρ) = (1 − ρ) I + ρ 11ᵀ, every two tokens with the cosine ρ (Section 3.2), (N, N)."""
    return (1 - rho) * _eye(num_tokens) + rho


def exponential_kernel(num_tokens: int, gamma: float) -> Tensor:
    """Σ(γ)_ij = exp(−γ|i − j|) (Section 3.2), (N, N); γ = ∞ gives I."""
    if math.isinf(gamma):
        return _eye(num_tokens)
    place = _places(num_tokens)
    return (-gamma * (place[:, None] - place).abs()).exp()


def uniform_schedule(depth: int, last: float, first: float = 0.0) -> list[float]:
    """ρ_0, …, ρ_L, linear in depth (Appendix C).

    Example:
        >>> uniform_schedule(depth=4, last=0.5)
        [0.0, 0.125, 0.25, 0.375, 0.5]
    """
    if not 0 <= first <= last < 1:
        raise ValueError(f"a uniform kernel needs 0 <= first <= last < 1, not {first} and {last}")
    return [first + (last - first) * block / depth for block in range(depth + 1)]


def exponential_schedule(depth: int, last: float) -> list[float]:
    """γ_0 = ∞, …, γ_L with a(γ_l) = a(γ_L)^{l/L} for a(γ) = √(1 − e^{−2γ}) (Appendix C).

    The diagonal of every A_l is then a(γ_L)^{1/L}, but for the first token's (Theorem 3).
    """
    if not 0 < last <= FASTEST:
        raise ValueError(f"an exponential kernel needs a positive rate of decay, {FASTEST:g} at most, not {last}")
    squared = -math.expm1(-2 * last)  # a(γ_L)²
    return [math.inf, *(-math.log1p(-(squared ** (block / depth))) / 2 for block in range(1, depth + 1))]


def residual_schedule(kernel: Kernel, schedule: list[float], shortcut: float) -> list[float]:
    """Kernels that the attention of each block must reach so that a normalised skip α x + √(1 − α²) f(x) is on schedule.

    Uniform kernels (Section 3.4): (ρ_l − α² ρ_{l−1})/(1 − α²), exactly. Exponential ones (Appendix F, Eq. 24 and 26):
    a(γ) = λ_α a(γ_{l−1}) with λ_α² = (λ_0² − α²)/(1 − α²) and λ_0 = a(γ_l)/a(γ_{l−1}), which neglects a term of Eq. 23;
    Eq. 25 as printed has λ_α² in the place of λ_α, and disagrees with Eq. 24.

    Args:
        kernel: one of `KERNELS`.
        schedule: numbers of blocks 0 to L.
        shortcut: α, 0 for none.

    Returns:
        The numbers of blocks 1 to L.

    Raises:
        ValueError: there is no such kernel, because α is too large.
    """
    residual = 1 - shortcut**2
    if kernel == "uniform":
        reached = [(after - shortcut**2 * before) / residual for before, after in itertools.pairwise(schedule)]
        if max(reached) >= 1:
            raise ValueError(f"a skip of weight {shortcut:g} leaves the attention a kernel with cosines above 1: use less")
        return reached
    reached = []
    for before, after in itertools.pairwise(schedule):
        squared = -math.expm1(-2 * before)
        factor = (math.expm1(-2 * after) / -squared - shortcut**2) / residual  # λ_α²
        if factor <= 0:
            raise ValueError(f"a skip of weight {shortcut:g} needs a kernel that changes less: a larger rate of decay")
        reached.append(-math.log1p(-factor * squared) / 2)
    return reached


# Attention matrices


def attention_between(kernel: Kernel, num_tokens: int, before: float, after: float, *, causal: bool = False) -> Tensor:
    """A = R(after) R(before)^{-1}, which takes the one kernel to the other: A Σ(before) Aᵀ = Σ(after) (Eq. 8).

    Causal: R is the Cholesky factor, A lower triangular and not negative (Theorems 1 and 2), for exponential kernels in the
    closed form of Theorem 3. Otherwise R is the symmetric root (Appendix A): not negative by all numerical evidence for
    exponential kernels, and for uniform ones as

        A = s₂ I + (s₁ − s₂) 11ᵀ/N,        s₁² = (1 + (N − 1)ρ_l)/(1 + (N − 1)ρ_{l−1}),        s₂² = (1 − ρ_l)/(1 − ρ_{l−1}).

    Returns:
        (N, N), float64.

    Raises:
        ValueError: there is no such kernel, or a cosine would fall, which needs negative entries.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is unknown; choose one of {', '.join(KERNELS)}")
    if before > after if kernel == "uniform" else before < after:
        raise ValueError(f"cosines of a {kernel} kernel must not fall from block to block: {before:g} to {after:g}")
    if kernel == "uniform":
        return (_causal_uniform_attention if causal else _uniform_attention)(num_tokens, before, after)
    if causal:
        return _causal_exponential_attention(num_tokens, before, after)
    forward = _power(exponential_kernel(num_tokens, after), 0.5)
    return (forward @ _power(exponential_kernel(num_tokens, before), -0.5)).clamp(min=FLOOR)


def _power(kernel: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(kernel)
    return vectors * values**exponent @ vectors.mT


def _uniform_attention(num_tokens: int, before: float, after: float) -> Tensor:
    alike = math.sqrt((1 + (num_tokens - 1) * after) / (1 + (num_tokens - 1) * before))  # s₁
    apart = math.sqrt((1 - after) / (1 - before))  # s₂
    return apart * _eye(num_tokens) + (alike - apart) / num_tokens


def _causal_uniform_attention(num_tokens: int, before: float, after: float) -> Tensor:
    factors = (torch.linalg.cholesky(uniform_kernel(num_tokens, rho)) for rho in (before, after))
    return torch.linalg.solve_triangular(*factors, upper=False, left=False)


def _causal_exponential_attention(num_tokens: int, before: float, after: float) -> Tensor:
    """Theorem 3, with differences of exponentials that do not cancel."""
    decay = math.exp(-after)
    ratio = math.sqrt(math.expm1(-2 * after) / math.expm1(-2 * before))  # λ
    difference = -decay * math.expm1(after - before)  # e^{−γ'} − e^{−γ}
    distance = _places(num_tokens)[:, None] - _places(num_tokens)
    matrix = ratio * difference * (-after * (distance - 1)).exp()
    matrix[:, 0] = (difference + (1 - ratio) * math.exp(-before)) * (-after * (distance[:, 0] - 1)).exp()
    matrix = matrix.tril(-1) + ratio * _eye(num_tokens)
    matrix[0, 0] = 1
    return matrix


def signal_preserving_attention(
    kernel: Kernel,
    num_tokens: int,
    depth: int,
    last: float,
    *,
    causal: bool = False,
    repeated: float = 0.0,
    shortcut: float = 0.0,
    cls_index: int | None = None,
) -> Tensor:
    """The attention matrices A_1, …, A_L of U-SPA (uniform kernels) and E-SPA (exponential ones), in the order of tokens.

    With tokens of which a fraction r repeats another, Σ̄_0 = (1 − r) I + r 11ᵀ on average (Eq. 12). U-SPA then starts from
    ρ_0 = r. E-SPA rescales A_l so that the average of Σ_l keeps the diagonal 1 (Eq. 15).

    Args:
        kernel: one of `KERNELS`.
        num_tokens: N.
        depth: L.
        last: ρ_L or γ_L.
        causal: tokens see those before them alone.
        repeated: r, or the mean cosine that stands for it.
        shortcut: α of a normalised skip around the attention, 0 for none; with it r must be 0.
        cls_index: where the first token, [cls], stands in the sequence: last by default if causal, so that it sees all
            tokens, and in the middle otherwise.

    Returns:
        (L, N, N), float64.

    Raises:
        ValueError: an argument has an impossible value.

    Example:
        >>> signal_preserving_attention("exponential", num_tokens=50, depth=36, last=0.2).shape
        torch.Size([36, 50, 50])
    """
    if num_tokens < 1 or depth < 1:
        raise ValueError(f"num_tokens and depth must be 1 or more, not {num_tokens} and {depth}")
    if not 0 <= repeated < 1:
        raise ValueError(f"repeated is a fraction of the tokens, in [0, 1), not {repeated}")
    if not 0 <= shortcut < 1 or (shortcut and repeated):
        raise ValueError(f"shortcut must be in [0, 1), and with one repeated must be 0, not {shortcut} and {repeated}")
    place = (num_tokens - 1 if causal else (num_tokens - 1) // 2) if cls_index is None else cls_index
    if not 0 <= place < num_tokens:
        raise ValueError(f"cls_index must be 0 to {num_tokens - 1}, not {place}")
    uniform = kernel == "uniform"
    schedule = uniform_schedule(depth, last, repeated) if uniform else exponential_schedule(depth, last)
    reached = residual_schedule(kernel, schedule, shortcut)
    ends = zip(schedule, reached, strict=False)
    matrices = [attention_between(kernel, num_tokens, before, after, causal=causal) for before, after in ends]
    if not shortcut:
        matrices = list(_rescaled(matrices, uniform_kernel(num_tokens, repeated)))
    order = [place, *range(place), *range(place + 1, num_tokens)]
    return torch.stack(matrices)[:, order][:, :, order]


def _rescaled(matrices: list[Tensor], kernel: Tensor) -> Iterator[Tensor]:
    """D̄_l^{−½} A_l D̄_{l−1}^{½}, D̄_l the diagonal of what A_l ⋯ A_1 make of the kernel Σ̄_0, whose own is 1 (Eq. 15)."""
    before = kernel.diagonal().sqrt()
    for matrix in matrices:
        kernel = matrix @ kernel @ matrix.mT
        after = kernel.diagonal().sqrt()
        yield matrix * before / after[:, None]
        before = after


# Layers


class SignalPreservingSelfAttention(SelfAttention):
    """Multi-head softmax attention that starts as a given matrix A ≥ 0 in every head (He et al. 2023, Eq. 10, Algorithm 1).

        heads_i = D softmax(Q_i K_iᵀ/√d_v + log P) V_i,        A = D P,

    with D, the row sums of A, and log P, the least float where A is 0, fixed. W^Q = 0 at first, so that heads_i = A V_i; W^V
    and W^O are each one orthogonal matrix, so that the layer is X → A X W with W orthogonal. No biases.

    Args:
        embed_dim: d.
        num_heads: h.
        matrix: A (N, N), for tokens in this order; the layer's buffers, D and log P, lie on its device.

    Raises:
        ValueError: h does not divide d, or A is not square.
    """

    gain: Tensor
    bias: Tensor

    def __init__(
        self, embed_dim: int, num_heads: int, matrix: Tensor, *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"the attention matrix must be (N, N), not {tuple(matrix.shape)}")
        gain = matrix.sum(-1, keepdim=True)
        dtype = dtype or torch.get_default_dtype()
        bias = (matrix / gain).log().to(dtype).clamp(min=torch.finfo(dtype).min)  # no −∞, which an average makes NaN
        self.register_buffer("gain", gain.to(device, dtype))  # (N, 1)
        self.register_buffer("bias", bias.to(device))  # (N, N)
        init_signal_preserving_attention_(self)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is refused: the matrix A is of a fixed number of tokens, and padding is none of them"
            )
        mask = self.bias[:num_outputs]
        heads = F.scaled_dot_product_attention(query[:, :, :num_outputs], key, value, attn_mask=mask)
        return self.gain[:num_outputs] * heads  # (B, h, n, d_v)


class ValueSkipInitSelfAttention(SelfAttention):
    """Multi-head softmax attention that starts as the identity (Value-SkipInit; He et al. 2023, Eq. 7).

        heads_i = α_i V_i + β_i softmax(Q_i K_iᵀ/√d_v) V_i

    with α_i = 1 and β_i = 0 at first, here `shortcut` and `residual`, one of each for every head. No biases.

    Raises:
        ValueError: num_heads does not divide embed_dim.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        self.shortcut = torch.nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.residual = torch.nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        init_value_skipinit_attention_(self)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        mask = first_rows(attn_mask, num_outputs)
        heads = F.scaled_dot_product_attention(query[:, :, :num_outputs], key, value, attn_mask=mask)
        return self.shortcut[:, None, None] * value[:, :, :num_outputs] + self.residual[:, None, None] * heads


def alpha_of_depth(total: float, depth: int) -> float:
    """α = `total`/L for orthogonal attention in a network of L blocks.

    With ‖W̃‖₂ = 1 in S = α/√d_v · X W̃ Xᵀ (Section 4.2 of the OSA paper), L layers whose W^O is drawn for all h heads
    together multiply gradients by up to exp(2 L √h ‖X‖₂² α/√d_v): bounded in depth if α falls as 1/L and the activation
    keeps ‖X‖₂.

    Example:
        >>> alpha_of_depth(0.36, 36)
        0.01
    """
    return total / depth


# Activations, all with E φ(z)² = 1 for z ~ N(0, 1)


@dataclass(frozen=True)
class ShapedGELU:
    """φ(x) = c (GELU(a x + b) + e), its four numbers fixed (Martens et al. 2021)."""

    input_scale: float  # a
    input_shift: float  # b
    output_scale: float  # c
    output_shift: float  # e

    def __call__(self, x: Tensor) -> Tensor:
        return self.output_scale * (F.gelu(self.input_scale * x + self.input_shift) + self.output_shift)

    def of_number(self, x: float) -> float:
        return self.output_scale * (gelu(self.input_scale * x + self.input_shift) + self.output_shift)


@functools.cache
def dks_gelu(depth: int, slope: float = 5.0) -> ShapedGELU:
    """GELU shaped by Deep Kernel Shaping for `depth` MLPs, one after the other (Martens et al. 2021, Section 8).

    a, b, c and e are such that for z ~ N(0, 1)

        E φ = 0,        E φ² = 1,        E φ φ' z = 1,        E φ'² = slope^{1/depth}:

    in the limit of wide layers q = 1 is kept, tokens without correlation stay without, and the cosine map of the whole
    network, attention left out, has `slope` at 1 (5 in He et al. 2023, H.1).

    Raises:
        ValueError: no GELU is as curved as so few MLPs need: a slope of 5 needs 5 or more.

    Example:
        >>> round(float(dks_gelu(36)(torch.randn(1_000_000)).square().mean()), 1)
        1.0
    """
    if depth < 1:
        raise ValueError(f"depth must be 1 or more, not {depth}")
    target = slope ** (1 / depth)
    limit = math.pi / (math.pi - 1)  # limit of a ReLU, as a → ∞
    if not 1 < target < limit:
        raise ValueError(
            f"a GELU cannot have the slope {slope:g} over {depth} layers: use more layers, or a slope nearer above 1"
        )
    log_scale, shift = 0.0, 0.0
    for _ in range(50):  # Newton's method, with steps of at most 1; 4 to 9 are enough
        residual = [moment - aim for moment, aim in zip(_slopes(log_scale, shift), (1, target), strict=True)]
        if max(map(abs, residual)) < 1e-12:
            scale = math.exp(log_scale)
            mean, variance = _gelu_moments(scale, shift)
            return ShapedGELU(scale, shift, 1 / math.sqrt(variance), -mean)
        step = _newton_step(log_scale, shift, residual)
        damping = max(1.0, *map(abs, step))
        log_scale, shift = log_scale - step[0] / damping, shift - step[1] / damping
    raise ValueError(f"a GELU cannot have the slope {slope:g} over {depth} layers: use more layers or a smaller slope")


def gain(activation: Callable[[float], float]) -> float:
    """1/√E φ(z)² for z ~ N(0, 1): the factor of a weight behind φ that keeps q = 1 (He et al. 2023, H.1).

    Example:
        >>> round(gain(gelu), 3)
        1.534
    """
    return 1 / math.sqrt(_mean(lambda z: activation(z) ** 2))


def linear_share(activation: Callable[[float], float]) -> float:
    """κ = E φ(z) z/√E φ(z)² for z ~ N(0, 1), of an activation of numbers: the cosine between it and a linear one."""
    return _mean(lambda z: activation(z) * z) / math.sqrt(_mean(lambda z: activation(z) ** 2))


def gelu_tanh(x: float) -> float:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³)))/2, `F.gelu` by its approximation, of a number."""
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


# The trapezoidal rule on [−12, 12] integrates functions as smooth as a Gaussian to the last bit, and z φ(z) and φ(z)² of
# leaky ReLUs too, whose kink at 0 is a node.
GRID = [(i / 8, math.exp(-((i / 8) ** 2) / 2) / math.sqrt(2 * math.pi) / 8) for i in range(-96, 97)]  # z and its weight


def _mean(function: Callable[[float], float]) -> float:
    return math.fsum(weight * function(z) for z, weight in GRID)


def gelu(x: float) -> float:
    """x Φ(x), as `F.gelu`, of a number."""
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _gelu_slope(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_moments(scale: float, shift: float) -> tuple[float, float]:
    """Mean and variance of GELU(a z + b)."""
    mean = _mean(lambda z: gelu(scale * z + shift))
    return mean, _mean(lambda z: (gelu(scale * z + shift) - mean) ** 2)


def _slopes(log_scale: float, shift: float) -> tuple[float, float]:
    """E φ φ' z and E φ'² of the φ that has E φ = 0 and E φ² = 1."""
    scale = math.exp(log_scale)
    mean, variance = _gelu_moments(scale, shift)
    of_norms = _mean(lambda z: (gelu(scale * z + shift) - mean) * scale * _gelu_slope(scale * z + shift) * z)
    of_cosines = _mean(lambda z: (scale * _gelu_slope(scale * z + shift)) ** 2)
    return of_norms / variance, of_cosines / variance


def _newton_step(log_scale: float, shift: float, residual: list[float], h: float = 1e-6) -> tuple[float, float]:
    """J⁻¹ residual, with the derivatives of `_slopes` by central differences."""
    ends = [(_slopes(log_scale + i * h, shift), _slopes(log_scale, shift + i * h)) for i in (1, -1)]
    (a, c), (b, d) = ([(up - down) / (2 * h) for up, down in zip(*pair, strict=True)] for pair in zip(*ends, strict=True))
    determinant = a * d - b * c
    return (d * residual[0] - b * residual[1]) / determinant, (a * residual[1] - c * residual[0]) / determinant
