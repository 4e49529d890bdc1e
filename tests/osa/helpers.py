"""Random inputs of unequal prime sizes, the errors that the tests bound, and Polar Express as it is written."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from osa.linalg import POLAR_EXPRESS
from osa.options import EPSILON

REPRESENTATIVES = ["osa_ns", "osa_iso", "vit", "espa_skip", "uspa_causal", "vskipinit"]  # models that have all parts


def skip_without_fake_draws() -> None:
    try:
        with FakeTensorMode():
            torch.nn.init.trunc_normal_(torch.empty(2))
    except DataDependentOutputException:
        pytest.skip("this torch reads the values of a truncated normal, which fakes have none of")


def draw(
    tokens: int,
    width: int,
    value_width: int = 7,
    *,
    batch: tuple[int, ...] = (2, 3),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value, (*batch, tokens, width or value_width): leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch, tokens, width), (*batch, tokens, width), (*batch, tokens, value_width)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


DEGENERATE = {  # query and key for which M = [Q, K] has dependent columns, from random ones
    "zeros": lambda q, k: (0 * q, 0 * k),
    "equal": lambda q, k: (q, q),
    "nearly equal": lambda q, k: (q, q + 1e-3 * k),
    "opposite": lambda q, k: (q, -q),
    "dependent columns": lambda q, k: (torch.cat([q[..., :2], q[..., :1]], -1), torch.cat([2 * q[..., :1], k[..., 1:]], -1)),
    "one live token": lambda q, k: tuple(x * (torch.arange(x.shape[-2]) == 2).unsqueeze(-1) for x in (q, k)),
    "one token": lambda q, k: (q[..., :1, :], k[..., :1, :]),
    "two tokens": lambda q, k: (q[..., :2, :], k[..., :2, :]),
}


def with_gradients(function, inputs, cotangent: Tensor) -> tuple[Tensor, ...]:
    """The output of a function and its gradients by each input."""
    output = function(*inputs)
    return output, *torch.autograd.grad(output, inputs, cotangent.to(output.dtype))


class Results(TorchDispatchMode):
    """Collects the tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tensors += (x for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, over all entries and in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return ((actual - expected).norm() / expected.norm()).item()


def orthogonality_error(matrix: Tensor) -> float:
    """max ‖AᵀA − I‖₂ over the batch, in float64."""
    matrix = matrix.detach().double()
    gram = matrix.mT @ matrix
    return torch.linalg.matrix_norm(gram - torch.eye(matrix.shape[-1], dtype=gram.dtype), ord=2).max().item()


def assert_uniform(weight: Tensor, bound: float) -> None:
    """Within ±bound, close to it, and with the variance bound²/3, to within five standard errors."""
    assert 0.98 * bound < weight.abs().max() <= bound
    assert abs(weight.square().mean() * 3 / bound**2 - 1) < 5 * math.sqrt(0.8 / weight.numel())


def polar_express_basis(m: Tensor, num_iterations: int) -> Tensor:
    """The iterate M_K of Amsel et al. (2025) in N×2d space, M_{k+1} = M_k (a_k I + b_k G_k + c_k G_k²), G_k = M_kᵀM_k."""
    basis = m / (torch.linalg.matrix_norm(m, keepdim=True) + EPSILON)
    for k in range(num_iterations):
        a, b, c = POLAR_EXPRESS[min(k, len(POLAR_EXPRESS) - 1)]
        gram = basis.mT @ basis
        basis = a * basis + basis @ (b * gram + c * gram @ gram)
    return basis
