"""Counterexamples of docs/errata.md that one does not see at once: a number shows that a published statement fails.

Zhang et al. 2021 is “On Orthogonality Constraints for Transformers”; the post is “Orthogonal Linear Layers in PyTorch”, of
whose formulas pipeline/benchmarks/post.py makes layers.
"""

import math

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn.utils.parametrizations import orthogonal

from osa.constrained.orthogonal import cayley, givens, gram_error, retract
from osa.constrained.penalties import attention_penalty
from osa.init import stiefel_uniform
from pipeline.benchmarks import post
from pipeline.benchmarks.cost import cost

N = 6  # size of matrices where it does not matter


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rotation(n=N):
    return stiefel_uniform(n, n, dtype=torch.float64)


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


def entries_multiplied(function):
    """Counts entries in element-wise products, as torch's profiler sees them."""
    with profile(record_shapes=True) as profiler:
        function()
    return sum(max(map(math.prod, e.shapes()[:2])) for e in profiler.kineto_results.events() if e.name() == "aten::mul")


def reflections(vectors):
    return post.householder(torch.eye(vectors.shape[-1]), vectors)


def weight_matrix(angles):
    """The product of [[cos θ, −sin θ], [sin θ, cos θ]] in the planes (i, j): `givens` of X_ji = −θ_ij."""
    x = torch.zeros(N, N)
    i, j = post.planes(N)
    x[j, i] = -angles
    return givens(x)


def update(w, gradient, rate):
    """The step of ExponentialOptimizer: W exp(rate · G) with G = ½ Wᵀ(∇ − W∇ᵀW)."""
    g = w.mT @ (gradient - w @ gradient.mT @ w) / 2
    return w @ torch.linalg.matrix_exp(rate * g)


# Zhang et al. 2021


def test_a_token_moves_keys_too():
    x, to_query = torch.randn(N, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    y = x.clone()
    y[0, 1] += 1
    attention = lambda x: torch.softmax(x @ to_query @ (x @ torch.ones(2, 2)).mT, -1)  # noqa: E731
    assert torch.equal(x @ to_query, y @ to_query) and (attention(y) - attention(x)).norm() > 0.1


def test_one_bound_goes_with_any_attention_penalty():
    key = nn.functional.normalize(torch.randn(1, 1, 50, 16), dim=-1)
    sharp, flat = (attention_penalty(torch.softmax(s * key @ key.mT / 4, -1)) for s in (1e4, 1e-2))
    assert sharp < 0.1 * flat


def test_uniform_attention_is_a_stationary_point_of_its_penalty():
    gradient = torch.func.grad(attention_penalty)
    assert gradient(torch.full((1, 1, 50, 50), 0.02)).abs().max() < 1e-12
    assert gradient(torch.softmax(torch.randn(1, 1, 50, 50), -1)).abs().max() > 1e-3


# The post: Givens rotations


def test_the_givens_layer_turns_the_other_way():
    x, angles = torch.randn(4, N), torch.randn(math.comb(N, 2))
    layer = post.givens(x, angles)
    torch.testing.assert_close(layer, x @ weight_matrix(-angles))
    assert (layer - x @ weight_matrix(angles)).norm() > 0.1


def test_costs_of_rotations_and_reflections():
    rotations = [entries_multiplied(lambda n=n: post.givens(torch.eye(n), torch.ones(math.comb(n, 2)))) for n in (8, 16)]
    assert math.log2(rotations[1] / rotations[0]) > 2.9
    reflected = [entries_multiplied(lambda n=n: reflections(torch.ones(n, n))) for n in (16, 32)]
    assert math.log2(reflected[1] / reflected[0]) > 2.9
    x, weight = torch.ones(128, N), torch.eye(N)
    many, one = (cost(lambda x=x: nn.functional.linear(x, weight), x.device) for x in (x, x[:1]))
    assert many.multiply_adds == 128 * one.multiply_adds


# The post: exponential map and Cayley transform


def test_cayley():
    assert not any(len(torch.triu_indices(n, n, 1)) == math.comb(n, 2) for n in range(1, 100))
    for scale in (0.1, 1, 10, 100):
        x = scale * torch.randn(N, N)
        a = x - x.mT
        assert torch.linalg.cond(torch.eye(N) - a) < (1 + norm(a).square()).sqrt() * (1 + 1e-9)
    assert torch.linalg.svdvals(cayley(100 * torch.randn(N, N)) + torch.eye(N)).min() > 1e-5


def test_the_exponential_optimizer_ascends():
    target, start = rotation(), rotation()
    loss = lambda w: (w - target).square().sum()  # noqa: E731
    up = down = start
    for _ in range(20):
        up, down = update(up, torch.func.grad(loss)(up), 0.01), update(down, torch.func.grad(loss)(down), -0.01)
    assert loss(down) < loss(start) < loss(up)


def test_the_exponential_optimizer_keeps_what_it_finds():
    w = nn.Linear(N, N, bias=False).weight.detach()
    for _ in range(20):
        w = update(w, torch.randn(N, N), 0.01)
    assert gram_error(w) > 0.1
    with pytest.raises(RuntimeError):
        update(torch.randn(N), torch.randn(N), 0.01)  # a bias


def test_the_exponential_optimizer_on_weights_that_are_not_square():
    tall = stiefel_uniform(N, 3, dtype=torch.float64)
    assert gram_error(update(tall.mT, torch.randn(3, N), 0.1)) > 1e-4
    outside = lambda new: (new - tall @ (tall.mT @ new)).norm()  # noqa: E731
    gradient = torch.randn(N, 3)
    assert outside(update(tall, gradient, -0.1)) < 1e-9 * outside(retract(tall, -0.1 * gradient))


# The post: Householder reflections


def test_reflections():
    assert torch.linalg.det(reflections(torch.randn(5, 5))) == pytest.approx(-1)
    derivative = torch.func.jacrev(reflections)(torch.randn(N // 2, N)).flatten(2).flatten(0, 1)
    assert torch.linalg.matrix_rank(derivative, rtol=1e-10) == 12 < math.comb(N, 2)
    assert reflections(torch.zeros(1, N)).isnan().all()


def test_householder_product_wants_another_tau():
    v = nn.functional.normalize(torch.randn(N, N), dim=1)
    assert (torch.linalg.householder_product(v.mT, torch.full((N,), 2.0)) - reflections(v)).norm() > 1


# torch


def test_decay_destroys_torchs_householder():
    linear = orthogonal(nn.Linear(N, N), orthogonal_map="householder")
    optimizer = torch.optim.AdamW(linear.parameters(), lr=3e-4, weight_decay=0.05)
    linear(torch.randn(2, N)).square().sum().backward()
    optimizer.step()
    assert linear.weight.norm() == 0
