"""The measured side of each theorem: what the paper states, as functions of tensors that give the number it is about.

Everything is float64 unless a dtype says otherwise, and dense where the statement is: sizes are those of a figure. N is
the number of tokens, d the width of the model, d_v that of a head, M = [Q, K] (N×2d_v), `scale` the α/√d_v of Eq. 5.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from osa import reference
from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from osa.linalg import EPSILON, POLAR_EXPRESS


def rounding(length: int, dtype: torch.dtype, products: int) -> float:
    """products · n · eps: what a chain of matrix products with inner dimension n may err by, relative to its factors.

    One product errs by at most n · eps/2 · ‖A‖_F‖B‖_F (Higham 2002, Section 3.5), and typically by √n · eps.
    """
    return products * length * torch.finfo(dtype).eps


def norm(matrix: Tensor) -> Tensor:
    """The spectral norm ‖·‖₂ of (..., n, m), (...)."""
    return torch.linalg.matrix_norm(matrix, 2)


def matrix_with_condition(tokens: int, width: int, condition: float, *, generator: Generator) -> Tensor:
    """A random (tokens, width) matrix, tokens ≥ width, with singular values from 1 to 1/condition in equal ratios."""
    left = torch.linalg.qr(torch.randn(tokens, width, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    exponents = torch.linspace(0, -math.log10(condition), width, dtype=torch.float64)
    return left * 10**exponents @ right.mT


def scale_for_norm(query: Tensor, key: Tensor, skew_norm: float) -> float:
    """The scale that gives ‖S‖₂ the value `skew_norm`."""
    return skew_norm / norm(reference.skew(query, key, 1.0)).item()


# Theorem 2.1


def exponential(s: Tensor) -> Tensor:
    """exp(S) of a skew-symmetric S (..., n, n), dense, from the eigenvalues of the Hermitian iS: right to n eps ‖S‖₂.

    torch.linalg.matrix_exp is no yardstick here: of a single float64 matrix with ‖S‖₁ between 3e-4 and 5e-2 it is off by
    up to 1e-10, a plane rotation by 0.04 among them (PyTorch issue 196592: a wrong coefficient of its degree 8).
    """
    values, vectors = torch.linalg.eigh(1j * s)
    return ((vectors * torch.exp(-1j * values).unsqueeze(-2)) @ vectors.mH).real


def low_rank_exponential(basis: Tensor, s: Tensor) -> Tensor:
    """I + B (exp[S] − I) Bᵀ with [S] = BᵀSB (Eq. 6 and 7), (..., N, N), for B (..., N, r) and a skew S (..., N, N)."""
    small = basis.mT @ s @ basis
    identity = torch.eye(s.shape[-1], dtype=s.dtype)
    return identity + basis @ (exponential((small - small.mT) / 2) - torch.eye(small.shape[-1], dtype=s.dtype)) @ basis.mT


def exponential_error(query: Tensor, key: Tensor, scale: float | Tensor, method: str, **options) -> Tensor:
    """‖A − exp(S)‖₂, (...): A by `method` in the inputs' own dtype, exp(S) dense in float64 from the same inputs."""
    a = orthogonal_attention_matrix(query, key, scale=scale, method=method, **options)
    return norm(a.double() - exponential(reference.skew(query, key, scale)))


def exponential_tolerance(query: Tensor, key: Tensor, scale: float | Tensor, method: str, products: int) -> Tensor:
    """What `exponential_error` may be by rounding: γ (1 + μ) for "qr", γ (1 + μ)² for "exact", with μ = scale · ‖M‖₂².

    γ is `rounding` over max(N, 2d_v). S is computed with an error of γ μ, dense or not, and exp moves by no more than its
    skew argument does (Lemma C.7). "exact" multiplies by Z with ‖Z‖₂ ≤ μ vectors of size ‖M‖₂, and the result by
    scale · ‖M‖₂, so that μ enters twice; the functions of Z in between act as functions of S, whose norms are at most 1.

    Returns:
        (...).
    """
    m = torch.cat([query, key], dim=-1)
    scale = torch.as_tensor(scale, dtype=torch.float64).abs()
    size = norm(m.double()).square() * (scale[..., 0, 0] if scale.dim() else scale)  # μ, (...)
    exponent = 2 if method == "exact" else 1
    return rounding(max(m.shape[-2:]), query.dtype, products) * (1 + size) ** exponent


# Theorem 2.2


def kernel_eigenvalues(x: Tensor) -> Tensor:
    """The eigenvalues of Σ = X Xᵀ in descending order, min(N, d) of them: squared singular values of X (N, d).

    The others are zero. Eigenvalues of the product itself would lose those below eps · λ₁.
    """
    return torch.linalg.svdvals(x).square()


def effective_rank(eigenvalues: Tensor) -> float:
    """exp(−Σ pᵢ log pᵢ) with pᵢ = λᵢ/Σλ (Roy and Vetterli 2007): 1 for one direction, n for n equal ones."""
    return torch.special.entr(eigenvalues / eigenvalues.sum()).sum().exp().item()


def attention_stack(x: Tensor, weights: list[tuple[Tensor, Tensor, Tensor]], attention: Callable[..., Tensor], skip: bool):
    """X₀ = x and then X_l = attention(X W^Q_l, X W^K_l, X W_l) [+ X for `skip`] of each layer l, as they are computed.

    Args:
        x: (N, d).
        weights: for each layer W^Q, W^K and W = W^V W^O, (d, d) each: one head, no MLP (Theorem 2.2).
        attention: (query, key, value) → (N, d).
    """
    yield x
    for w_query, w_key, w_value in weights:
        y = attention(x @ w_query, x @ w_key, x @ w_value)  # (N, d)
        x = x + y if skip else y
        yield x


# Theorem 3.1


def newton_schulz_bases(m: Tensor, num_iterations: int) -> list[Tensor]:
    """M₁ … M_K of Eq. 9 for M (..., N, 2d_v), after the division by ‖M‖_F + ε."""
    return _iterates(m, [(1.5, -0.5, 0.0)] * num_iterations)


def polar_express_bases(m: Tensor, num_iterations: int) -> list[Tensor]:
    """As `newton_schulz_bases`, with M_{k+1} = M_k (a_k I + b_k G_k + c_k G_k²), G_k = M_kᵀM_k, of Amsel et al. (2025).

    Unlike Eq. 9 these steps overshoot: singular values pass 1 before they converge to it.
    """
    return _iterates(m, [POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)] for k in range(num_iterations)])


def _iterates(m: Tensor, coefficients: list[tuple[float, float, float]]) -> list[Tensor]:
    basis = m / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    iterates = []
    for a, b, c in coefficients:
        gram = basis.mT @ basis
        basis = a * basis + basis @ (b * gram + c * gram @ gram)  # (..., N, 2d_v)
        iterates.append(basis)
    return iterates


def orthogonality_error(y: Tensor) -> Tensor:
    """‖YᵀY − I‖₂ for Y (..., N, N), (...)."""
    return norm(y.mT @ y - torch.eye(y.shape[-1], dtype=y.dtype))


def orthogonality_bounds(basis: Tensor, skew_norm: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """The bounds of Theorem 3.1 on ‖YᵀY − I‖₂ for B (..., N, r), and one for B of any norm, (...) each.

        (e^‖S‖ − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|        Eq. 10
        (e^‖S‖ − 1)² / 4                         Eq. 11
        (e^(σ₁²‖S‖) − 1)² maxᵢ |σᵢ² (σᵢ² − 1)|   without ‖B‖₂ ≤ 1

    with σ the singular values of B. The proof (Eq. 41 and 43) drops ‖Σ‖₂⁴ and ‖ΣΣᵀ‖₂ⁿ⁻¹ because Newton–Schulz keeps
    σ ≤ 1. With them in place Eq. 42 sums to (e^(σ₁²‖S‖) − 1)/σ₁², which is the third bound.
    """
    squares = torch.linalg.svdvals(basis).square()
    gap = (squares * (squares - 1)).abs().amax(-1)
    skew_norm = torch.as_tensor(skew_norm, dtype=squares.dtype)
    factor = torch.expm1(skew_norm).square()
    return factor * gap, factor / 4, torch.expm1(squares.amax(-1) * skew_norm).square() * gap


# Theorem 4.1


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂vec f(X)/∂vec X, (outputs, N·d), with vec column by column as in Eq. 12.

    One backward pass over as many copies of X as there are outputs, each of which asks for its own.

    Args:
        function: (batch, N, d) → (batch, n, m) or (batch, m), each item of the batch by itself.
        x: (N, d).
    """
    shape = function(x[None]).shape[1:]
    copies = x.detach().repeat(shape.numel(), 1, 1).requires_grad_()
    basis = torch.eye(shape.numel(), dtype=x.dtype)
    if len(shape) == 2:
        basis = basis.unflatten(1, shape[::-1]).mT  # output (i, j) is row j·n + i
    (rows,) = torch.autograd.grad(function(copies), copies, basis)
    return rows.mT.flatten(1)


def exponential_jacobian(x: Tensor, w_query: Tensor, w_key: Tensor, scale: float) -> Tensor:
    """∂vec A/∂vec X of A = exp(S), (N², N·d), without automatic differentiation.

    ∂S = scale · (∂X W̃ Xᵀ + X W̃ ∂Xᵀ) with W̃ = W^Q W^Kᵀ − W^K W^Qᵀ (Eq. 82). The integral of Eq. 79 is elementwise
    in the eigenvectors U of iS, with eigenvalues λ: Uᴴ ∂A U = Φ ∘ Uᴴ ∂S U, Φ_ij = e^(−i(λᵢ+λⱼ)/2) sinc((λᵢ−λⱼ)/2).
    """
    tokens, width = x.shape
    directions = torch.eye(tokens * width, dtype=x.dtype).unflatten(1, (width, tokens)).mT  # (N·d, N, d)
    half = scale * directions @ query_key_product(w_query, w_key) @ x.mT
    change = half - half.mT  # (N·d, N, N): W̃ is skew
    values, vectors = torch.linalg.eigh(1j * reference.skew(x @ w_query, x @ w_key, scale))
    mean, difference = (values[:, None] + values) / 2, (values[:, None] - values) / 2
    phi = torch.exp(-1j * mean) * torch.sinc(difference / math.pi)  # torch's sinc has π in it
    result = vectors @ (phi * (vectors.mH @ change.to(phi.dtype) @ vectors)) @ vectors.mH
    return result.real.mT.flatten(1).mT


def jacobian_terms(x: Tensor, a: Tensor, a_jacobian: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """J₁ = (X W ⊗ I_N)ᵀ ∂vec A/∂vec X and J₂ = Wᵀ ⊗ A of Eq. 13, (N·d, N·d) each, with W = W^V W^O.

    Args:
        x: (N, d).
        a: A(X), (N, N).
        a_jacobian: ∂vec A/∂vec X, (N², N·d).
        w: (d, d).
    """
    identity = torch.eye(len(x), dtype=x.dtype)
    return torch.kron(x @ w, identity).mT @ a_jacobian, torch.kron(w.mT.contiguous(), a)


# Theorem 4.2


def query_key_product(w_query: Tensor, w_key: Tensor) -> Tensor:
    """W̃ = W^Q (W^K)ᵀ − W^K (W^Q)ᵀ, (..., d, d), for weights (..., d, d_v) (Section 4.2)."""
    half = w_query @ w_key.mT
    return half - half.mT


def condition(singular_values: Tensor, rank: int | None = None) -> float:
    """The effective condition number σ_max/σ_min>0 (Section 4.1) of singular values in descending order.

    Args:
        rank: how many of them are not zero. Default: as many as exceed n · eps · σ_max.
    """
    if rank is None:
        threshold = len(singular_values) * torch.finfo(singular_values.dtype).eps * singular_values[0]
        rank = int((singular_values > threshold).sum())
    return (singular_values[0] / singular_values[rank - 1]).item()


# Theorems 4.3 and 4.4


def head(x: Tensor, weights: tuple[Tensor, ...], scale: float | Tensor, **method) -> Tensor:
    """OSA(X) = A(X) X W^V W^O of one head (Eq. 5), (..., N, d), with weights W^Q, W^K, W^V (d, d_v) and W^O (d_v, d)."""
    w_query, w_key, w_value, w_out = weights
    return orthogonal_attention(x @ w_query, x @ w_key, x @ w_value, scale=scale, **method) @ w_out


def first_term(x: Tensor, weights: tuple[Tensor, ...], scale: float | Tensor, **method) -> Tensor:
    """J₁ of Eq. 13 by itself, (N·d, N·d): the Jacobian of `head` with X W^V held fixed, free of cancellation with J₂."""
    w_query, w_key, w_value, w_out = weights
    value = x @ w_value

    def attend(copies: Tensor) -> Tensor:
        values = value.expand(len(copies), *value.shape)
        return orthogonal_attention(copies @ w_query, copies @ w_key, values, scale=scale, **method) @ w_out

    return jacobian(attend, x)


def first_term_constant(x: Tensor, width: int) -> float:
    """C = 2‖X‖₂²/√d_v, with which ‖J₁‖₂ ≤ C α for A = exp(S) at the initialisation of Section 4, whatever the rank of M.

    ‖J₁‖₂ ≤ ‖X W^V W^O‖₂ ‖∂vec A/∂vec S‖₂ ‖∂vec S/∂vec X‖₂, where the first factor is at most ‖X‖₂, the second 1 (Eq. 80
    for S itself) and the third 2α‖X‖₂/√d_v (Eq. 83). No basis enters: A does not depend on the choice of one.
    """
    return 2 * norm(x).item() ** 2 / math.sqrt(width)


def condition_bound(deviation: float, first_norm: float) -> float:
    """(1 + δ + Cα)/(1 − δ − Cα) of Eq. 16, ∞ where its denominator is not positive."""
    rest = 1 - deviation - first_norm
    return (1 + deviation + first_norm) / rest if rest > 0 else math.inf


# Jacobians that do not fit


def spectral_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, num_iterations: int, generator: Generator) -> float:
    """‖∂f/∂X‖₂ from below by power iteration on JᵀJ, matrix-free: Jᵀu is a backward pass, and J v one through that.

    Args:
        function: (1, N, d) → any shape.
        x: (N, d).
    """
    x = x[None].detach().requires_grad_()
    y = function(x)
    u = torch.zeros_like(y, requires_grad=True)
    (pullback,) = torch.autograd.grad(y, x, u, create_graph=True)  # Jᵀu, linear in u
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    for _ in range(num_iterations):
        (pushed,) = torch.autograd.grad(pullback, u, v / v.norm(), retain_graph=True)  # J v
        (v,) = torch.autograd.grad(y, x, pushed, retain_graph=True)
    return v.norm().sqrt().item()


def frobenius_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, num_samples: int, generator: Generator) -> float:
    """‖∂f/∂X‖_F by Hutchinson's estimator: the root of the mean of ‖Jᵀu‖² over Gaussian u.

    Args:
        function: (batch, N, d) → (batch, ...), each item of the batch by itself.
        x: (N, d).
    """
    copies = x.detach().repeat(num_samples, 1, 1).requires_grad_()
    y = function(copies)
    (pullback,) = torch.autograd.grad(y, copies, torch.randn(y.shape, generator=generator, dtype=y.dtype))
    return pullback.square().sum((1, 2)).mean().sqrt().item()
