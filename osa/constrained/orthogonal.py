"""Keeps weights orthogonal: parametrises them as rotations, or retracts them after each step of the optimiser.

Each map in `MAPS` returns a rotation Q(X) ∈ SO(n) or, given a base B (..., n, n), the product Q(X) B. Only the part of
X (..., n, n) below the diagonal matters. All maps have Q(0) = I and dQ(0)[X] = A = tril(X, −1) − tril(X, −1)ᵀ, so the
same learning rate gives the same step size with every map. Only the exponential map works under torch.func.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from osa.constrained.names import RETRACTION, HeadConstraint, Map, WholeConstraint
from osa.functional import orthogonal_attention
from osa.linalg import as_batch, identity_like, phi1_times, resolvent_times
from osa.runtime import full_precision, in_own_types, without_autocast
from osa.vit import blocks_of

# Maximum ‖WᵀW − I‖_F of an orthonormal W. Rounding to float32 gives about 1e-6
ORTHONORMAL = 1e-4


def _in_float32(rotation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates a map: casts bfloat16 and float16 inputs to float32, disables TF32, and rounds the result to x.dtype."""

    @wraps(rotation)
    def rounded(x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device), full_precision(x.device):
            given, by_name = [y.to(dtype) for y in others], {name: y.to(dtype) for name, y in named.items()}
            return rotation(x.to(dtype), *given, **by_name).to(x.dtype)

    return rounded


@_in_float32
def givens(x: Tensor, base: Tensor | None = None) -> Tensor:
    """The product of rotations by −X_ji in the planes (i, j), i < j, ordered by i and then j. The range is SO(n).

    Planes with the same i + j share no index, and sorting by i + j keeps the order of any two planes that share an index.
    So 2n − 3 steps of up to n/2 simultaneous rotations give the same product, in 3n²(n − 1) operations. The backward pass
    undoes the steps one by one, and so needs only O(n²) memory. Second derivatives raise an error.
    """
    n = x.shape[-1]
    j, i = torch.tril_indices(n, n, -1, device=x.device)
    rotation = _Givens.apply(as_batch(x)[:, j, i], i, j, n).view(x.shape)
    return rotation if base is None else rotation @ base


class _Givens(torch.autograd.Function):
    """`givens` as an autograd function of the angles, (b, n(n − 1)/2). `forward` builds W by rotating the rows of Wᵀ.

    For all i < j with i + j = t, step t replaces row r_i with cos θ r_i − sin θ r_j, and row r_j with sin θ r_i + cos θ r_j,
    where θ = −X_ji. To swap r_i and r_j for all these i and j, the code flips rows max(0, t − n + 1) to min(t, n − 1).
    """

    @staticmethod
    def forward(ctx, x: Tensor, i: Tensor, j: Tensor, n: int) -> Tensor:
        cos, sin = x.new_ones(len(x), 2 * n, n, 1), x.new_zeros(len(x), 2 * n, n, 1)  # (b, step, row, 1)
        cos[:, i + j, i, 0] = cos[:, i + j, j, 0] = x.cos()
        sin[:, i + j, i, 0] = x.sin()
        sin[:, i + j, j, 0] = -x.sin()
        rows = torch.eye(n, dtype=x.dtype, device=x.device).repeat(len(x), 1, 1)
        for t in range(1, 2 * n - 2):
            touched = slice(max(0, t - n + 1), min(t, n - 1) + 1)
            block = rows[:, touched]
            exchanged = block.flip(1)
            block.mul_(cos[:, t, touched]).addcmul_(sin[:, t, touched], exchanged)
        ctx.save_for_backward(rows, cos, sin, i, j)
        return rows.clone().mT  # torch.compile loses the gradient of an output that was changed in place

    @staticmethod
    @in_own_types
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, cos, sin, i, j = ctx.saved_tensors
        n = rows.shape[-1]
        rows, products = torch.cat([rows, grad.mT], dim=-1), torch.zeros_like(sin)  # (b, n, 2n): rows and their gradients
        for t in range(2 * n - 3, 0, -1):
            touched = slice(max(0, t - n + 1), min(t, n - 1) + 1)
            block = rows[:, touched]
            exchanged = block.flip(1)
            products[:, t, touched] = (block[..., n:] * exchanged[..., :n]).sum(-1, keepdim=True)
            block.mul_(cos[:, t, touched]).addcmul_(sin[:, t, touched], exchanged, value=-1)
        return products[:, i + j, i, 0] - products[:, i + j, j, 0], None, None, None


@_in_float32
def exponential(x: Tensor, base: Tensor | None = None) -> Tensor:
    """exp(A) = I + A φ₁(A), computed with matrix products alone. The range is SO(n)."""
    a = _skew(x)
    base = identity_like(x).expand_as(x) if base is None else base
    return base + a @ phi1_times(a, base)


@_in_float32
def cayley(x: Tensor, base: Tensor | None = None) -> Tensor:
    """(I − A/2)⁻¹ (I + A/2) = 2 (I − A/2)⁻¹ − I. The range is all rotations without the eigenvalue −1.

    Second derivatives raise an error.
    """
    return _Cayley.apply(x, identity_like(x) if base is None else base)


class _Cayley(torch.autograd.Function):
    """Computes `cayley` in the form 2RB − B with R = (I − A/2)⁻¹. Its differential R dA RB needs only matrix products."""

    @staticmethod
    def forward(ctx, x: Tensor, base: Tensor) -> Tensor:
        a = _skew(x)
        inverse = resolvent_times(a, identity_like(a).expand_as(a))
        half_way = inverse @ base
        ctx.save_for_backward(inverse, half_way)
        return 2 * half_way - base

    @staticmethod
    @in_own_types
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        inverse, half_way = ctx.saved_tensors
        outer = inverse.mT @ grad
        of_skew = outer @ half_way.mT
        of_base = 2 * outer - grad if ctx.needs_input_grad[1] else None
        return (of_skew - of_skew.mT).tril_(-1), of_base


@_in_float32
def householder(x: Tensor, base: Tensor | None = None) -> Tensor:
    """−H₁ ⋯ H_n with Hᵢ = I − 2 vᵢvᵢᵀ/‖vᵢ‖² and vᵢ column i of V = I + tril(X, −1)/2. The range is almost all of SO(n).

    The product of the reflections is I − V T⁻¹ Vᵀ, where T is triu(VᵀV) with its diagonal halved (Joffrain et al.
    2006). Second derivatives raise an error.
    """
    return _Householder.apply(x, identity_like(x) if base is None else base)


class _Householder(torch.autograd.Function):
    """V T⁻¹VᵀB − B with T = `_upper(VᵀV)`. For M = T⁻¹VᵀB and N = V T⁻¹, the differential in V is dV M + N dVᵀB − N dT M."""

    @staticmethod
    def forward(ctx, x: Tensor, base: Tensor) -> Tensor:
        v = x.tril(-1).div_(2)
        v.diagonal(dim1=-2, dim2=-1).fill_(1)
        triangle = _upper(v.mT @ v)
        right = torch.linalg.solve_triangular(triangle, v.mT @ base, upper=True)  # M
        ctx.save_for_backward(v, triangle, right, base)
        return v @ right - base

    @staticmethod
    @in_own_types
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        v, triangle, right, base = ctx.saved_tensors
        left = torch.linalg.solve_triangular(triangle, v, upper=True, left=False)  # N
        of_base = v @ (left.mT @ grad) - grad if ctx.needs_input_grad[1] else None
        first = grad @ right.mT
        of_triangle = _upper(left.mT @ first)
        of_v = first + base @ (grad.mT @ left) - v @ (of_triangle + of_triangle.mT)
        return of_v.tril_(-1).div_(2), of_base


def _upper(gram: Tensor) -> Tensor:
    """triu(G) with its diagonal halved."""
    upper = gram.triu()
    upper.diagonal(dim1=-2, dim2=-1).div_(2)
    return upper


MAPS: dict[Map, Callable[..., Tensor]] = {
    "givens": givens,
    "exponential": exponential,
    "cayley": cayley,
    "householder": householder,
}


class Orthogonal(nn.Module):
    """A parametrisation for `torch.nn.utils.parametrize`: W = Q(X) B, where B is the weight at registration.

    The parameter consists of the n(n − 1)/2 entries of X below the diagonal. X starts at 0, which leaves the weight
    unchanged, bit for bit. The sign of det W is always that of det B. Weight decay on X pulls W towards B.

    Args:
        name: one of `MAPS`.

    Raises:
        ValueError: the map is unknown.
    """

    base: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in MAPS:
            raise ValueError(f"map {name!r} is unknown; choose one of {', '.join(MAPS)}")
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        n = self.base.shape[-1]
        i, j = torch.tril_indices(n, n, -1, device=x.device)
        full = x.new_zeros(*x.shape[:-1], n * n).index_copy(-1, i * n + j, x)
        return MAPS[self.name](full.unflatten(-1, (n, n)), self.base)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Stores an orthonormal weight of shape (..., n, n) as the base, and returns X = 0.

        Raises:
            ValueError: the weight is not square, or not orthonormal.
        """
        rows, columns = weight.shape[-2:]
        if rows != columns:
            raise ValueError(f"{self.name} is for square weights, not {rows}×{columns}: use `retract` for others")
        if not is_orthonormal(weight):
            raise ValueError("the weight is not orthonormal: use `orthonormal_` or an orthogonal initialisation first")
        self.register_buffer("base", weight.detach().clone())
        return weight.new_zeros(*weight.shape[:-2], rows * (rows - 1) // 2)


def orthogonal_(linear: nn.Linear, name: str) -> nn.Linear:
    """Parametrises the orthonormal weight of a linear layer with `Orthogonal` and a map in `MAPS`. Returns the layer.

    Example:
        >>> layer = nn.Linear(16, 16)
        >>> _ = orthonormal_(layer.weight)
        >>> is_orthonormal(orthogonal_(layer, "cayley").weight)
        True
    """
    register_parametrization(linear, "weight", Orthogonal(name))
    return linear


def gram_error(weight: Tensor) -> float:
    """Computes in float64 the maximum over the batch of ‖WᵀW − I‖_F, or of ‖WWᵀ − I‖_F if W is wide.

    Example:
        >>> gram_error(torch.eye(16))
        0.0
    """
    w = weight.detach().double()
    w = w.mT if w.shape[-2] < w.shape[-1] else w
    return torch.linalg.matrix_norm(w.mT @ w - identity_like(w.mT @ w)).max().item()


def is_orthonormal(weight: Tensor) -> bool:
    """True if W's columns, or a wide W's rows, are orthonormal up to `ORTHONORMAL` or rounding errors, whichever is larger.

    A weight with a NaN is not orthonormal. A weight on the meta device, which has no values, counts as orthonormal.
    """
    rounding = torch.finfo(weight.dtype).eps * min(weight.shape[-2:]) ** 0.5
    return weight.is_meta or gram_error(weight) <= max(ORTHONORMAL, rounding)


@torch.no_grad()
def orthonormal_(weight: Tensor) -> Tensor:
    """Replaces W with the nearest orthonormal matrix, the polar factor UVᵀ of W = UΣVᵀ, unless W is orthonormal already.

    Example:
        >>> is_orthonormal(orthonormal_(torch.randn(16, 64)))
        True
    """
    if not is_orthonormal(weight):
        u, _, v = torch.linalg.svd(weight.double(), full_matrices=False)
        weight.copy_(u @ v)
    return weight


@_in_float32
def retract(weight: Tensor, step: Tensor) -> Tensor:
    """Returns the end point of the geodesic from an orthonormal W along the step U (Stiefel manifold, canonical metric).

    The geodesic starts in the direction of U projected onto the tangent space, U − W (WᵀU + UᵀW)/2. It ends at
    exp(KWᵀ − WKᵀ) W with K = U − W WᵀU/2 (Edelman et al. 1998). The result is orthogonal attention (Eq. 5) with
    query K, key W and value W, computed in time O(m k² + k³). A step U ∝ W, such as decoupled weight decay, has no effect.

    Args:
        weight, step: W and U, (..., m, k). If m < k, the rows of W are orthonormal.

    Returns:
        (..., m, k).

    Example:
        >>> is_orthonormal(retract(torch.eye(64, 16), 0.1 * torch.randn(64, 16)))
        True
    """
    if weight.shape[-2] < weight.shape[-1]:
        return retract(weight.mT, step.mT).mT
    generator = step - weight @ (weight.mT @ step) / 2
    weight = orthogonal_attention(generator, weight, weight, scale=1.0, method="exact")
    return 1.5 * weight - 0.5 * weight @ (weight.mT @ weight)


# Constraints on the weights of a model

Views = tuple[Tensor, ...]  # views of weights, (count, rows, d) each, whose stacked rows are orthonormal


@dataclass(frozen=True)
class Constraint:
    """A constraint on an attention layer: the stacked weights of each group of projections are orthonormal.

    If `per_head`, the weights of each head are stacked separately. Otherwise, whole matrices are stacked.
    """

    groups: tuple[tuple[str, ...], ...]
    per_head: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.groups))

    def views(self, attention: nn.Module) -> list[Views]:
        """Returns the views of each group of projections: (num_heads, d_v, d) each, or (1, d, d) if not `per_head`."""
        return [tuple(self._rows(attention, part) for part in group) for group in self.groups]

    def _rows(self, attention: nn.Module, part: str) -> Tensor:
        weight = getattr(attention, part).weight.detach()
        if not self.per_head:
            return weight[None]
        return (weight.mT if part == "out" else weight).unflatten(0, (attention.num_heads, -1))  # (num_heads, d_v, d)


CONSTRAINTS: dict[HeadConstraint | WholeConstraint, Constraint] = {
    "value_out": Constraint((("value",), ("out",))),  # W^V and W^Oᵀ in V_{d_v}(R^d), as in Section 4.1
    "query_key": Constraint((("query", "key"),)),  # [W^Q, W^K] in V_{2d_v}(R^d), as in Section 4.2
    "attention": Constraint((("value",), ("out",), ("query", "key"))),
    "whole_value_out": Constraint((("value",), ("out",)), per_head=False),  # in O(d)
    "whole_key_value": Constraint((("key",), ("value",)), per_head=False),
}


def constrain_(model: nn.Module, name: str, by: str) -> None:
    """Replaces the constrained weights of every block with the nearest orthonormal ones.

    Args:
        model: a model with `blocks`, each with an `attention`.
        name: one of `CONSTRAINTS`.
        by: name of the map in `MAPS` that parametrises the weights, or "retraction" for training with `StiefelConstraint`.

    Raises:
        ValueError: the constraint is unknown, a weight is not a parameter, or the constraint is on single heads but `by` is
            not "retraction" (maps parametrise only whole matrices).
    """
    constraint = _constraint(name)
    if by != RETRACTION and constraint.per_head:
        whole = " or ".join(name for name, other in CONSTRAINTS.items() if not other.per_head)
        raise ValueError(
            f"the map {by} parametrises whole matrices, as in {whole}, but {name} constrains single heads: "
            f'use by="{RETRACTION}"'
        )
    constrained_parameters(model, name)  # raises if a weight is not a parameter
    for block in blocks_of(model):
        for views in constraint.views(block.attention):
            _write(views, orthonormal_(torch.cat(views, dim=-2)))
        if by != RETRACTION:
            for part in constraint.parts:
                orthogonal_(getattr(block.attention, part), by)


def constrained_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Returns the constrained weights of every block.

    Raises:
        ValueError: the constraint is unknown, or a weight is not a parameter.
    """
    attentions, weights = [block.attention for block in blocks_of(model)], []
    for part in _constraint(name).parts:
        for attention in attentions:
            weight = getattr(getattr(attention, part), "weight", None)
            if not isinstance(weight, nn.Parameter):
                raise ValueError(
                    f"{name} needs {part}.weight to be an nn.Parameter, not parametrised or adapted: remove the "
                    "parametrisation, or merge the adapter, first"
                )
            weights.append(weight)
    return weights


class StiefelConstraint:
    """Keeps the constrained weights of a model orthonormal under any optimiser. Call `constrain_` first.

    Example:
        >>> model = osa.create_model("osa_exact")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> constrain_(model, "value_out", by="retraction")
        >>> with StiefelConstraint(model, "value_out").project_step():
        ...     optimizer.step()
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        self.weights()  # raises if the constraint does not fit the model

    def _groups(self) -> list[tuple[Views, ...]]:
        """Returns each group's `Views` in each block. Makes new views, as the model may have moved to another device."""
        views = (_constraint(self.name).views(block.attention) for block in blocks_of(self.model))
        return list(zip(*views, strict=True))

    def weights(self) -> list[Tensor]:
        """Returns a copy of the stacked weights of each group of projections, (depth, count, rows, d)."""
        return [torch.stack([torch.cat(views, dim=-2) for views in group]) for group in self._groups()]

    @contextmanager
    def project_step(self) -> Iterator[None]:
        """Context manager for one step of an optimiser. On exit, the result of `retract` replaces the new weights."""
        constrained_parameters(self.model, self.name)  # raises if a weight cannot be written to
        before = self.weights()
        yield
        for group, old, new in zip(self._groups(), before, self.weights(), strict=True):
            for views, weight in zip(group, retract(old, new - old), strict=True):
                _write(views, weight)


def _constraint(name: str) -> Constraint:
    if name not in CONSTRAINTS:
        raise ValueError(f"constraint {name!r} is unknown; choose one of {', '.join(CONSTRAINTS)}")
    return CONSTRAINTS[name]


def _write(views: Views, weight: Tensor) -> None:
    for view, rows in zip(views, weight.split([view.shape[-2] for view in views], dim=-2), strict=True):
        view.copy_(rows)


def _skew(x: Tensor) -> Tensor:
    below = x.tril(-1)
    return below - below.mT
