"""Orthogonal self-attention as a function of query, key and value (Section 2). `osa.routes` implements its methods."""

import math
import warnings
from functools import reduce
from importlib.util import find_spec
from numbers import Real

import torch
from torch import Tensor

from osa import compiled  # noqa: F401  registers its operator
from osa.linalg import Scale
from osa.masking import check_dropout_and_causal, check_tensors, repeat_heads, without_padding
from osa.options import EPSILON, Method, check_method
from osa.routes import plain_attention
from osa.runtime import goes_to_onnx, kernel

if torch.cuda.device_count() and find_spec("triton"):  # kernels need a GPU, and their import takes a second
    try:
        from osa import kernels  # noqa: F401
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"osa.kernels is not used: {type(error).__name__}: {error}", stacklevel=2)


def orthogonal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Scale | None = None,
    enable_gqa: bool = False,
    method: Method = "exact",
    num_iterations: int | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """exp(S) V with S = scale · (Q Kᵀ − K Qᵀ) (Eq. 5), where exp(S) is orthogonal.

    S has rank ≤ 2d, so no N×N matrix is needed (Theorem 2.1). With B an orthonormal basis of the column space of M = [Q, K]
    (N×2d),

        exp(S) V = V + B (exp[S] − I) BᵀV   (Eq. 6),        [S] = BᵀSB   (Eq. 7).

    "qr_literal" computes these equations as they stand, with B from the reduced QR of M (Section 3). The other methods are
    faster. Let J = [[0, I], [−I, 0]] and G = MᵀM, so that S = scale · M J Mᵀ. The faster methods compute

        exp(S) V = V + L φ₁(Z) Y,        φ₁(Z) = (e^Z − I) Z⁻¹ = Σ Z^k / (k + 1)!,

        method           L             Z                     Y                 gradient if M is rank-deficient
        "qr_literal"     Eq. 6 and 7 as they stand                             undefined
        "qr"             B             [S] = BᵀSB            [S] BᵀV           correct
        "exact"          scale · M     scale · J G           J MᵀV             correct
        "newton_schulz"  scale · M     scale · G_K J G       G_K J G_K MᵀV     correct
        "polar_express"  as "newton_schulz", with other polynomials            correct
        "cayley"         as "exact", with (I − Z/2)⁻¹ in place of φ₁(Z)        correct

    Z is at most 2d×2d: every method takes time O(N d² + d³) and memory O(N d + d²).

    "exact" needs no basis, thanks to the identity f(AB) A = A f(BA) (Higham 2008, Section 1.8; Xiao & Liu, ICML 2020).
    "newton_schulz" is Theorem 2.1 with B = M_K of Eq. 9. By the same identity, it needs only G_K = BᵀB. Its matrix is
    orthogonal only as far as the K iterations have converged (Theorem 3.1). "polar_express" replaces the Newton–Schulz steps
    with those of Amsel et al. (2025), and computes in float64. "cayley" replaces exp(S) with another orthogonal matrix, the
    Cayley transform (I − S/2)⁻¹ (I + S/2), which agrees with exp(S) to second order and rotates by less than π (Brantner et
    al. 2023, arXiv 2312.11166).

    However large S is, A = exp(S) preserves lengths: ‖Av‖ equals ‖v‖ up to a relative error of about 100 eps · max(1, ‖S‖₂).
    Where the error could be larger, the result is NaN, with a warning. Here eps is the machine epsilon of the widest
    input dtype, or of float32 if all dtypes are narrower. For float32, "polar_express" has an additional error of up to
    10⁻⁵, provided that the singular values of M lie in [10⁻³, 1] · ‖M‖_F. The matrix of "newton_schulz" is in general
    not orthogonal. It agrees with Eq. 6, 7 and 9 to about 30 eps · scale · ‖M‖₂², or is NaN. "qr_literal" is as accurate
    as torch's matrix exponential.

    The rounding error of Gram matrices grows with scale · ‖M‖₂². This product can exceed ‖S‖₂ if Q ≈ K, if tokens share a
    large component, or if there are outliers. "exact" and "cayley" then replace M with M T, where the matrix T leaves S
    unchanged (see `osa.linalg.balanced`), or use the basis of "qr" in float64. "newton_schulz" computes in float64.

    On a GPU, and under torch.export, torch.jit.trace and function transforms, no branch on the host depends on tensor
    values. "exact" and "cayley" then use M R⁻¹, where R is a Cholesky factor of MᵀM. In traces and transforms on the CPU,
    all methods except "qr" and "qr_literal" compute in float64. CUDA kernels for widths up to 16 are different: for up to 64
    tokens, they choose between M T and a basis, and for 65 to 256 tokens, they use M T, or return NaN. Kernels for more
    tokens or larger widths choose between M T and M R⁻¹. On GPUs, in traces and in transforms, exp(S) is also NaN if ‖S‖_F
    exceeds 69,000, or 23,000 in a kernel. On CUDA, all products of float32 inputs are computed in full float32, even if the
    program allows TF32. The exceptions are torch.compile and the backward pass of "qr_literal".

    Args:
        query: (..., N, d).
        key: (..., N, d).
        value: (..., N, d_value).
        attn_mask: boolean, False for padding, (..., 1, N), or (..., N, N) with equal rows. Padding changes the output of
            other tokens only by rounding. A padded token's output is its own value vector. The gradient of "qr_literal" is
            undefined if fewer than min(N, 2d) tokens remain.
        dropout_p, is_causal: must be 0 and False: otherwise the attention matrix would not be orthogonal.
        scale: α/√d_v of Eq. 5; a number or a tensor that broadcasts against the batch dimensions followed by two
            dimensions of size 1, e.g. (num_heads, 1, 1). Default 1/√d.
        enable_gqa: repeat the heads (dimension −3) of key and value to match the heads of query.
        method: one of the methods in the table above.
        num_iterations: K of Eq. 9, only for "newton_schulz" (default 6, Appendix D) and "polar_express" (default 7).
        epsilon: ε of Section 3, which "newton_schulz" and "polar_express" add to ‖M‖_F.

    Returns:
        (..., N, d_value), in the dtype of value. With bfloat16 or float16 inputs the small matrices are float32.

    Raises:
        TypeError: query, key, value or the mask is not a tensor, or the scale is not a real number.
        ValueError: the shapes, dtypes or devices do not match, the method is unknown, or an argument would give an attention
            matrix that is not orthogonal.

    Example:
        >>> query, key, value = torch.randn(3, 2, 4, 50, 16)  # each (batch, heads, tokens, width)
        >>> orthogonal_attention(query, key, value, scale=0.1 / 16**0.5).shape
        torch.Size([2, 4, 50, 16])
    """
    check_dropout_and_causal(dropout_p, is_causal)
    check_tensors(query, key, value)
    if enable_gqa:
        key, value = repeat_heads(query, key), repeat_heads(query, value)
    scale = _checked_scale(query, key, value, scale, method, num_iterations, epsilon)
    if attn_mask is not None:
        query, key = without_padding(query, key, attn_mask)
    attend = kernel("attend", query, key, value, scale, method) or plain_attention
    return attend(query, key, value, scale, method, num_iterations, epsilon)


def orthogonal_attention_matrix(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: Scale | None = None,
    method: Method = "exact",
    num_iterations: int | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Returns the attention matrix A = exp(S) that `orthogonal_attention` applies, (..., N, N). It takes O(N²) memory.

    Arguments and errors are as for `orthogonal_attention`.

    Example:
        >>> a = orthogonal_attention_matrix(*torch.randn(2, 50, 16, dtype=torch.float64))
        >>> bool((a @ a.mT - torch.eye(50)).abs().max() < 1e-12)
        True
    """
    check_tensors(query, key)
    scale = _checked_scale(query, key, query, scale, method, num_iterations, epsilon)
    if attn_mask is not None:
        query, key = without_padding(query, key, attn_mask)
    identity = torch.eye(query.shape[-2], dtype=query.dtype, device=query.device)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    return plain_attention(query, key, identity.expand(*batch, *identity.shape), scale, method, num_iterations, epsilon)


def _checked_scale(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Scale | None,
    method: Method,
    num_iterations: int | None,
    epsilon: float,
) -> Scale:
    """Checks the arguments, and returns the scale or its default."""
    check_method(method, num_iterations, epsilon)
    if method in ("qr", "qr_literal") and goes_to_onnx():
        raise ValueError(
            f'ONNX has no QR decomposition: export with method="exact", which computes the same function as {method!r}'
        )
    if method == "cayley" and goes_to_onnx():
        raise ValueError('ONNX has no linear solver, which "cayley" needs: train and export with method="exact"')
    if query.shape[-2:] != key.shape[-2:]:
        raise ValueError(
            "query and key must have the same last two dimensions (N, d), not "
            f"{tuple(query.shape[-2:])} and {tuple(key.shape[-2:])}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many tokens as key ({key.shape[-2]}), not {value.shape[-2]}")
    batches = [tuple(x.shape[:-2]) for x in (query, key, value)]
    try:
        batch = torch.broadcast_shapes(*batches)
    except RuntimeError:
        raise ValueError(f"the batch dimensions of query, key and value must be broadcastable, but are {batches}") from None
    if scale is None:
        return 1 / math.sqrt(query.shape[-1] or 1)  # if d is 0, S is 0 at any scale
    if not isinstance(scale, (Tensor, Real)) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError(f"scale must be a real number or a tensor of real numbers, not {scale!r}")
    if not isinstance(scale, Tensor):
        dtype = reduce(torch.promote_types, (query.dtype, key.dtype, value.dtype), torch.float32)
        if not abs(scale) <= torch.finfo(dtype).max:
            raise ValueError(f"scale must be a finite number that fits in {dtype}, not {scale!r}")
    elif scale.device != query.device:
        raise ValueError(f"scale must be on the device of the query, {query.device}, not {scale.device}")
    elif scale.dim():
        try:
            fits = scale.shape[-2:] == (1, 1) and torch.broadcast_shapes(scale.shape[:-2], batch) == batch
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"scale must have a shape that ends in (1, 1) and is broadcastable to {(*batch, 1, 1)}, not "
                f"{tuple(scale.shape)}"
            )
    return scale
