"""Uniform draws from the Stiefel manifold (Algorithm 1) and scaled uniform orthogonal weights (Section 4.4)."""

import math
from functools import partial

import pytest
import torch

from osa import MLP, SoftmaxSelfAttention
from osa.init import (
    init_isometric_mlp_,
    init_ji_attention_,
    lecun_linear_,
    scaled_uniform_orthogonal_,
    stiefel_uniform,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n, m", [(1, 1), (7, 1), (7, 3), (7, 7), (64, 32)])
def test_stiefel_columns_are_orthonormal(n, m):
    sample = stiefel_uniform(n, m, generator=generator())
    assert sample.shape == (n, m)
    assert not sample.requires_grad
    torch.testing.assert_close(sample.mT @ sample, torch.eye(m, dtype=sample.dtype), rtol=0, atol=1e-6)


def test_draws_follow_their_generator_or_the_global_stream():
    for draw in (partial(stiefel_uniform, 7, 3), lambda **options: scaled_uniform_orthogonal_(torch.empty(7, 3), **options)):
        global_state, stream = torch.get_rng_state(), generator(1)
        first, second = draw(generator=stream), draw(generator=stream)
        assert torch.equal(torch.get_rng_state(), global_state) and not torch.equal(first, second)
        torch.manual_seed(1)
        assert torch.equal(draw(), first) and torch.equal(draw(generator=generator(1)), first)


@pytest.mark.parametrize(
    "call, cause",
    [
        (lambda: stiefel_uniform(3, 5), "3.*5|5.*3"),
        (lambda: scaled_uniform_orthogonal_(torch.empty(7)), "out.*in"),
        (lambda: scaled_uniform_orthogonal_(torch.empty(7, 3, 3)), "out.*in"),
        (lambda: init_isometric_mlp_(MLP(7, 5), gain=1.0, kappa=1.0), "7.*5"),
    ],
)
def test_shapes_without_such_a_matrix_are_refused(call, cause):
    with pytest.raises(ValueError, match=cause):
        call()


DRAWS = 4000


def assert_mean(values, expected):
    """The mean over the draws is the expected one, to within five standard errors for each entry."""
    standard_error = values.std(dim=0) / math.sqrt(len(values))
    assert (values.std(dim=0) > 0).all()
    assert ((values.mean(dim=0) - expected).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("n, m", [(5, 3), (3, 3)])
def test_stiefel_moments_are_those_of_the_uniform_distribution(n, m):
    """E Q = 0, E Q_ij² = 1/n, E Q_ij⁴ = 3/(n(n + 2)). LAPACK's own signs make all Q_11 negative and fail the first.

    The same holds for UQV with fixed rotations U and V, whose rows and columns are uncorrelated.
    """
    stream = generator(2)
    samples = torch.stack([stiefel_uniform(n, m, generator=stream) for _ in range(DRAWS)]).double()
    left, right = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q for size in (n, m))
    for each in (samples, left @ samples @ right):
        assert_mean(each, 0)
        assert_mean(each.square(), 1 / n)
        assert_mean(each.pow(4), 3 / (n * (n + 2)))
        assert_mean(each[:, 0, 0] * each[:, 1, 1], 0)


@pytest.mark.parametrize("out_features, in_features", [(192, 49), (64, 256), (53, 53)])
def test_suo_weight_is_a_scaled_orthogonal_matrix(out_features, in_features):
    """max(1, √(out/in)) · Q for [out, in]: WᵀW = (out/in) I for a widening layer, WWᵀ = I for a narrowing one."""
    weight = scaled_uniform_orthogonal_(torch.empty(out_features, in_features), generator=generator())
    gram = weight.mT @ weight if out_features >= in_features else weight @ weight.mT
    torch.testing.assert_close(gram, max(1, out_features / in_features) * torch.eye(len(gram)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("d, num_heads", [(15, 3), (7, 1)])
def test_jis_query_key_product_is_the_nearest_of_its_rank(d, num_heads):
    """The target is a Z + b I with Z of N(0, 1/d) from the same stream; the singular values cut off make the error."""
    layer, stream = SoftmaxSelfAttention(d, num_heads).double(), generator(1)
    torch.nn.init.ones_(layer.query.bias)
    init_ji_attention_(layer, identity=0.7, noise=1.3, scale=1.5, generator=generator(1))
    d_v, identity = d // num_heads, torch.eye(d, dtype=torch.float64)
    for i in range(num_heads):
        rows = slice(i * d_v, (i + 1) * d_v)
        target = 1.3 * torch.randn(d, d, dtype=torch.float64, generator=stream) / math.sqrt(d) + 0.7 * identity
        query, key = layer.query.weight.detach()[rows], layer.key.weight.detach()[rows]
        error, values = torch.linalg.matrix_norm(query.mT @ key - target), torch.linalg.svdvals(target)
        assert error.item() == pytest.approx(values[d_v:].norm().item(), abs=1e-12)
        torch.testing.assert_close(query @ query.mT, key @ key.mT, rtol=0, atol=1e-12)  # evenly shared
    for weight in (layer.value.weight.detach(), layer.out.weight.detach()):
        torch.testing.assert_close(weight @ weight.mT, 2.25 * identity, rtol=0, atol=1e-5)
    assert not layer.query.bias.any()


@pytest.mark.parametrize("d, hidden", [(7, 7), (7, 13), (1, 3), (53, 211)])
def test_isometric_mlp_is_a_scaled_rotation_between_scaled_frames(d, hidden):
    """W₁ᵀW₁ = H/d, W₂W₂ᵀ = g² d/H and W₂W₁ = g R, g = gain/√(κ² + (1 − κ²) d/H); gain 1.7 and κ 0.6 here."""
    mlp = MLP(d, hidden).double()
    torch.nn.init.ones_(mlp.fc1.bias)
    init_isometric_mlp_(mlp, gain=1.7, kappa=0.6, generator=generator())
    w1, w2, identity = mlp.fc1.weight.detach(), mlp.fc2.weight.detach(), torch.eye(d, dtype=torch.float64)
    g = 1.7 / math.sqrt(0.36 + 0.64 * d / hidden)
    torch.testing.assert_close(w1.mT @ w1, hidden / d * identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(w2 @ w2.mT, g**2 * d / hidden * identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(w2 @ w1 @ w1.mT @ w2.mT, g**2 * identity, rtol=0, atol=1e-12)
    assert not mlp.fc1.bias.any() and not mlp.fc2.bias.any()


def test_lecun_draws_a_truncated_normal():
    """No entry beyond two standard deviations before the truncation, which are 2.2737 after it; zero bias."""
    linear = torch.nn.Linear(53, 997)
    lecun_linear_(linear, generator=generator())
    assert_mean(linear.weight.detach().flatten().square(), 1 / 53)
    assert 0.995 < linear.weight.abs().max() / (2.2737 * math.sqrt(1 / 53)) < 1.0005
    assert not linear.bias.any()
