"""Launches the kernels for long sequences and wide heads.

The forward pass reads the tokens twice, and so does the backward pass, each time in a kernel of passes.py. In between, torch
computes T in V + M T from G = MᵀM and X = MᵀV in the forward pass, and the gradients of G and X in the backward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from osa import linalg, runtime
from osa.kernels import launch
from osa.kernels.launch import Inputs, padded, ratio_up
from osa.kernels.long import passes
from osa.kernels.tiles import LARGEST_NORM, NO_DIGIT_ABOVE

METHODS = ("exact", "newton_schulz")  # methods that compute T from Gram matrices alone
MAX_WIDTH = 128  # maximum number of columns of query, key and value
MIN_ROWS = 256  # minimum number of rows of a part of a sequence
MIN_SHARE = 2.0**-46  # `_sigma` replaces ‖q_j‖² or ‖k_j‖² by this share of ‖q_j‖² + ‖k_j‖² if it is smaller
MIN_SHARE_LEFT = 2.0**-5  # minimum of ‖q − γ k‖² / ‖q‖² (γ k: projection of q on k): below it, float32 loses over 5 bits
# Maximum error of R Z R⁻¹ in units of eps (Σ|λ|²)^½, for the eigenvalues λ of Z. Errors of the output then stay below
# 100 eps ‖S‖₂. With MAX_ROUNDING = 16, errors would grow with ‖S‖₂²
MAX_ROUNDING = 8.0
MATRICES = 128  # number of matrices per autograd call. At a width of 64, autograd stores 2 MB per matrix
Mixing = Callable[..., Tensor]  # `_mixed` with the method and its options filled in


@dataclass(frozen=True)
class Long:
    """Implements `osa.kernels.operators.Backend` for one method."""

    method: str

    def forms(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[str, ...]:
        return ("long",) if all(x.shape[-1] <= MAX_WIDTH for x in (query, key, value)) else ()

    def forward(self, inputs: Inputs, output: Tensor, saved: Tensor, num_iterations: int, epsilon: float) -> None:
        """Writes the output and, for each head, a row of `saved`: the entries of all matrices that `_matrices` returns."""
        query, key, value, scale = inputs
        width, value_width = query.shape[-1], value.shape[-1]
        length = 3 * width**2 + 2 * width * value_width
        sums = query.new_empty(len(saved), partition(query, value)[0], length, dtype=torch.float32)
        none = sums.new_empty(0)
        gram, products = _gram_and_products(inputs, sums, none, none)
        c = scale.reshape(-1, 1, 1).float()
        if self.method == "exact":
            shear, is_lost = _shear(gram)
            again = _gram_and_products(inputs, sums, shear, is_lost.float())
            gram = torch.where(is_lost, again[0], _sheared(_sheared(gram, shear).mT, shear))
            products = torch.where(is_lost, again[1], _sheared(products, shear))
            sigma = _sigma(gram)
            gram, products = sigma * gram * sigma.mT, sigma * products
            *r_and_inverse, is_lost = _r_and_inverse(gram, c)
        else:
            shear, sigma = gram.new_zeros(len(gram), 2 * width, 1), gram.new_ones(len(gram), 2 * width, 1)
            square_norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            r_and_inverse, is_lost = [], c.abs() * square_norm > NO_DIGIT_ABOVE.value
        c = c.masked_fill(is_lost, math.nan)
        mixed = _mixed(self.method, num_iterations, epsilon, gram, products, c, *r_and_inverse)
        rows = [x.flatten(1) for x in (shear, sigma, mixed, gram, products, c, *r_and_inverse[1:])]
        torch.cat(rows, 1, out=saved[:, : sum(row.shape[1] for row in rows)])
        _launch(passes.apply_kernel, (query, key, value, output), (saved,), apply_tile(query, value))

    def backward(
        self, inputs: Inputs, saved: Tensor, grad: Tensor, grads: Inputs, num_iterations: int, epsilon: float
    ) -> None:
        query, key, value, _ = inputs
        _, _, mixed, *given, r_inverse = _matrices(saved, query, value)
        r_and_inverse: tuple[Tensor, ...] = ()
        if self.method == "exact":
            r = torch.linalg.solve_triangular(r_inverse, linalg.identity_like(r_inverse), upper=True)
            r_and_inverse = r, r_inverse
        sums = query.new_empty(len(saved), partition(query, value)[0], *mixed.shape[1:], dtype=torch.float32)
        _launch_parts(passes.products_kernel, (query, key, grad), (sums, saved), products_tile(query, value))
        parts = zip(*(x.split(MATRICES) for x in (sums.sum(1), *given, *r_and_inverse)), strict=True)
        mixing = partial(_mixed, self.method, num_iterations, epsilon)
        found = [_mixing_gradients(mixing, *part) for part in parts]
        grad_gram, grad_products, grad_c = map(torch.cat, zip(*found, strict=True))
        grads[3].copy_(grad_c.view(grads[3].shape))
        others = saved, grad_products, (grad_gram + grad_gram.mT).contiguous()
        _launch(
            passes.apply_backward_kernel, (query, key, value, grad, *grads[:3]), others, apply_backward_tile(query, value)
        )

    def saved_shape(self, query: Tensor, value: Tensor) -> tuple[int, int]:
        return math.prod(query.shape[:2]), ratio_up(sum(map(math.prod, _shapes(query, value))), 16) * 16

    def scale_where_valid(self, query: Tensor, value: Tensor, saved: Tensor) -> Tensor | None:
        return _matrices(saved, query, value)[-2] if self.method == "exact" else None


def _shapes(query: Tensor, value: Tensor) -> list[tuple[int, int]]:
    size, width = 2 * query.shape[-1], value.shape[-1]
    return [(size, 1), (size, 1), (size, width), (size, size), (size, width), (1, 1), (size, size)]


def _matrices(saved: Tensor, query: Tensor, value: Tensor) -> list[Tensor]:
    """Splits `saved` into γ, σ, T, G, X, c and R⁻¹, (matrices, rows, columns) each. The kernels read the first three."""
    shapes = _shapes(query, value)
    rows = saved[:, : sum(map(math.prod, shapes))].split([math.prod(shape) for shape in shapes], 1)
    return [row.unflatten(1, shape) for row, shape in zip(rows, shapes, strict=True)]


def _mixed(
    method: str, num_iterations: int, epsilon: float, gram: Tensor, products: Tensor, c: Tensor, *r_and_inverse: Tensor
) -> Tensor:
    """Returns T in V + M T, given G = MᵀM, X = MᵀV, c and, for "exact", R and R⁻¹. Computes in float32, without TF32."""
    with runtime.full_precision(gram.device), runtime.without_autocast(gram.device):
        if method == "exact":
            r, r_inverse = r_and_inverse
            z = torch.bmm(torch.bmm(r, linalg.apply_j(c * gram)), r_inverse)
            return c * torch.bmm(r_inverse, linalg.phi1_times(z, torch.bmm(r, linalg.apply_j(products))))
        projector = _projector(gram, num_iterations, epsilon)
        z = torch.bmm(projector, linalg.apply_j(c * gram))
        return c * linalg.phi1_times(z, torch.bmm(projector, linalg.apply_j(torch.bmm(projector, products))))


def _r_and_inverse(gram: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns R, R⁻¹, and whether precision is lost. M R⁻¹ replaces M, and R Z R⁻¹ replaces Z = c J G.

    If Z is so nonnormal that φ₁(Z) would be inaccurate, R is the `osa.linalg.gram_factor` of G, and R Z R⁻¹ is nearly
    skew. Otherwise R is I. Derivatives treat R as a constant, because φ₁(Z) = R⁻¹ φ₁(R Z R⁻¹) R for any R. The rounding
    error ΔG of G causes an error c R J ΔG R⁻¹ in R Z R⁻¹. If the entries of ΔG are random and of size eps |m_i| |m_j|, this
    error is about eps c ‖diag G‖ times the root of the mean of G_ii (G⁻¹)_ii.
    """
    z, identity = linalg.apply_j(c * gram), linalg.identity_like(gram)
    spectrum = linalg.square_moduli(z)
    is_far = linalg.imbalance(z, spectrum) > linalg.IMBALANCE
    r = torch.where(is_far, linalg.gram_factor(gram), identity)
    r_inverse = torch.linalg.solve_triangular(r, identity, upper=True)
    squares = gram.diagonal(dim1=-2, dim2=-1)[..., None]
    inflation = (squares * r_inverse.square()).sum((-2, -1), keepdim=True)  # 2d times the mean of G_ii (G⁻¹)_ii
    rounding = (c * squares).square().sum(-2, keepdim=True) * inflation
    is_lost = rounding > MAX_ROUNDING**2 * gram.shape[-1] * spectrum.clamp(min=1)
    return r, r_inverse, (is_far & is_lost) | (spectrum > 2 * LARGEST_NORM.value**2)


@torch.inference_mode(False)  # these two decorators turn on autograd, which is off inside an operator
@torch.enable_grad()
def _mixing_gradients(
    mixing: Mixing, grad: Tensor, gram: Tensor, products: Tensor, c: Tensor, *r_and_inverse: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of G, X and c, given the gradient of T."""
    small = [x.detach().requires_grad_() for x in (gram, products, c)]
    mixed = mixing(*small, *r_and_inverse)
    with runtime.full_precision(grad.device), runtime.without_autocast(grad.device):
        return torch.autograd.grad(mixed, small, grad)


def _projector(gram: Tensor, num_iterations: int, epsilon: float) -> Tensor:
    """Returns Π = G_K, the result of K Newton–Schulz iterations from G_0 = G / (‖M‖_F + ε)²."""
    square_norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    # The clamp keeps the derivative of the square root finite at M = 0.
    norm = square_norm.clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    return linalg.newton_schulz_gram(gram / (norm + epsilon).square(), num_iterations)


def _gram_and_products(inputs: Inputs, sums: Tensor, shear: Tensor, is_lost: Tensor) -> tuple[Tensor, Tensor]:
    """Returns G = MᵀM and X = MᵀV.

    If `shear` is not empty, the kernel shears M (see `_shear`), and returns zeros for the matrices whose `is_lost` is 0.
    """
    query, key, value, _ = inputs
    is_sheared = shear.numel() > 0
    tile = sheared_tile(query, value) if is_sheared else gram_tile(query, value)
    _launch_parts(passes.gram_kernel, (query, key, value), (sums, shear, is_lost), tile, SHEARED=is_sheared)
    width, total = query.shape[-1], sums.sum(1)
    blocks, products = total.split([3 * width**2, total.shape[1] - 3 * width**2], 1)
    q_q, q_k, k_k = blocks.unflatten(1, (3, width, width)).unbind(1)
    gram = torch.cat([torch.cat([q_q, q_k], -1), torch.cat([q_k.mT, k_k], -1)], -2)
    return gram, products.unflatten(1, (2 * width, -1))


def _sheared(x: Tensor, shear: Tensor) -> Tensor:
    """x_i − γ_i x_j for each row i, where rows i and j = i ± d are a pair."""
    return x - shear * x.roll(x.shape[-2] // 2, -2)


def _shear(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Returns γ, (matrices, 2d, 1), and a flag, (matrices, 1, 1): whether G would be inaccurate after shearing by γ.

    In each pair of columns q_j and k_j, shearing subtracts from the shorter column its projection onto the longer column.
    This projection is γ times the longer column. The longer column does not change, so its γ is 0.
    """
    q_q, k_k = gram.diagonal(dim1=-2, dim2=-1).chunk(2, -1)  # (matrices, d)
    q_k = gram.diagonal(gram.shape[-1] // 2, -2, -1)
    longer, shorter = torch.maximum(q_q, k_k), torch.minimum(q_q, k_k)
    ratio = q_k / longer.clamp(min=1e-37)
    of_query = ratio * (k_k >= q_q)
    shear = torch.cat([of_query, ratio - of_query], -1)
    return shear[..., None], (shorter - ratio * q_k < MIN_SHARE_LEFT * shorter).any(-1)[:, None, None]


def _sigma(gram: Tensor) -> Tensor:
    """Returns σ, (matrices, 2d, 1): powers of two, s for q_j and 1/s for k_j, so that s q_j and k_j/s have similar norms."""
    squares = gram.diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1))  # (matrices, 2, d)
    least = MIN_SHARE * squares.sum(1, keepdim=True) + 1e-37  # keeps σ finite if shearing leaves a column of zeros
    of_query, of_key = torch.maximum(squares, least).log2().unbind(1)
    exponent = (0.25 * (of_key - of_query) + 0.5).floor()
    return torch.cat([exponent, -exponent], -1).exp2()[..., None]


def _launch_parts(kernel, tensors: tuple[Tensor, ...], others: tuple[Tensor, ...], tile: dict, **constants) -> None:
    """Launches one program for each block of columns of Q and K in each part of a sequence."""
    parts, rows = partition(tensors[0], tensors[2])
    _, part, columns, _ = tile["TILE"]
    _launch(kernel, tensors, others, tile, parts, columns // part, rows_of_part=rows, **constants)


def _launch(
    kernel, tensors: tuple[Tensor, ...], others: tuple[Tensor, ...], tile: dict, parts: int = 0, blocks: int = 1, **constants
) -> None:
    """Launches parts · blocks programs for each head. If `parts` is 0, each tile of rows is a part.

    The first three of `tensors` are query, key, and a tensor with as many columns as `value`.
    """
    query, _, value, *_ = tensors
    batch, heads, tokens, width = query.shape
    parts = parts or ratio_up(tokens, tile["TILE"][0])
    constants |= {"WIDTH": width, "VALUE_WIDTH": value.shape[-1], "TENSOR_CORES": uses_tensor_cores(query, value)}
    numbers, strides = {"heads": heads, "tokens": tokens, "parts": parts}, [x.stride() for x in tensors]
    launch.launch(kernel, batch * heads * parts * blocks, (*tensors, *others), strides, numbers | constants | tile)


def partition(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Splits sequences into parts that together fill half the multiprocessors. Returns (number of parts, rows per part)."""
    batch, heads, tokens, _ = query.shape
    parts = min(ratio_up(launch.multiprocessors(query.device), 2 * batch * heads), ratio_up(tokens, MIN_ROWS))
    rows = ratio_up(ratio_up(tokens, parts), 64) * 64
    return ratio_up(tokens, rows), rows


def uses_tensor_cores(*tensors: Tensor) -> bool:
    """True if all tensors are in bfloat16. Tensor cores then compute the products."""
    return all(x.dtype == torch.bfloat16 for x in tensors)


def gram_tile(query: Tensor, value: Tensor) -> dict:
    """Launch options of `gram_kernel`. TILE is (rows, columns of the left factor, columns of Q and K, columns of V)."""
    width, value_width, is_halved = padded(query.shape[-1]), padded(value.shape[-1]), uses_tensor_cores(query, value)
    if is_halved and width == 64 >= value_width and launch.has_wgmma(query.device):
        return {"TILE": (64, width, width, value_width), "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    return _tile(32 if is_halved else 16, 32, query, value, 3)


def sheared_tile(query: Tensor, value: Tensor) -> dict:
    """Launch options of `gram_kernel` with SHEARED."""
    return _tile(16, 32, query, value, 1) | {"maxnreg": 255}


def products_tile(query: Tensor, value: Tensor) -> dict:
    """Launch options of `products_kernel`. With tensor cores, tiles have more rows, and loads are pipelined."""
    return _tile(64, 32, query, value, 3) if uses_tensor_cores(query, value) else _tile(16, 32, query, value, 1)


def apply_tile(query: Tensor, value: Tensor) -> dict:
    """Launch options of `apply_kernel`. A program multiplies 16 columns of M at a time, and loads T once for all rows."""
    return _tile(128 if uses_tensor_cores(query, value) else 32, 16, query, value, 1)


def apply_backward_tile(query: Tensor, value: Tensor) -> dict:
    """Launch options of `apply_backward_kernel`: those of `apply_kernel`, with fewer rows if registers would run out."""
    tile, has_room = apply_tile(query, value), launch.has_wgmma(query.device)
    rows, *others = tile["TILE"]
    most = {64: 128 if has_room else 32, 128: 64}.get(max(others), 128)
    return tile | {"TILE": (min(rows, most), *others)}


def _tile(rows: int, part: int, query: Tensor, value: Tensor, stages: int) -> dict:
    width, value_width = padded(query.shape[-1]), padded(value.shape[-1])
    tile, widest = (rows, min(part, width), width, value_width), max(width, value_width)
    is_shared = widest == 64 and uses_tensor_cores(query, value)  # two programs then share a multiprocessor
    registers = 128 if is_shared else 255
    return {"TILE": tile, "num_warps": 4 if widest <= 32 else 8, "num_stages": stages, "maxnreg": registers}
