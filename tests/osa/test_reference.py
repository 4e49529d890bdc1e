"""The yardstick itself, against hand-worked values, other algorithms and the paper's theorems."""

import math

import pytest
import torch

from osa import reference
from tests.osa.helpers import draw, relative_error

SIZES = [(1, 3), (5, 3), (7, 3), (11, 5)]  # (N, d_v), with N < 2d_v and N > 2d_v


@pytest.mark.parametrize("angle", [0.04, 0.7])  # the first is where `matrix_exp` of a single matrix errs
def test_two_tokens_turn_by_the_angle_worked_by_hand(angle):
    query, key = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])  # QKᵀ − KQᵀ = [[0, −1], [1, 0]]
    rotation = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    matrix = reference.orthogonal_attention_matrix(query, key, angle)
    torch.testing.assert_close(matrix, torch.tensor(rotation, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e2])
@pytest.mark.parametrize("tokens, width", SIZES)
def test_exponential_matches_the_eigendecomposition(tokens, width, scale):
    """iS is Hermitian: iS = UΛUᴴ, so exp(S) = U exp(−iΛ) Uᴴ, another algorithm for the same matrix."""
    query, key, _ = draw(tokens, width)
    eigenvalues, vectors = torch.linalg.eigh(1j * reference.skew(query, key, scale))
    expected = (vectors * torch.exp(-1j * eigenvalues).unsqueeze(-2)) @ vectors.mH
    actual = reference.orthogonal_attention_matrix(query, key, scale)
    assert relative_error(actual, expected.real) < 1e-13 * (1 + eigenvalues.abs().max())


@pytest.mark.parametrize("tokens, width", SIZES)
def test_theorem_2_1(tokens, width):
    """exp(S) = I + B(exp[S] − I)Bᵀ, with any orthonormal basis B of the columns of Q and K."""
    query, key, value = draw(tokens, width)
    basis = reference.qr_basis(torch.cat([query, key], -1))
    assert basis.shape[-1] == min(tokens, 2 * width)
    expected = reference.orthogonal_attention_matrix(query, key, 0.3)
    assert relative_error(reference.low_rank_matrix(query, key, 0.3, basis), expected) < 1e-12
    assert relative_error(reference.qr_attention(query, key, value, 0.3), expected @ value) < 1e-12


@pytest.mark.parametrize("num_iterations", [0, 1, 6])
def test_newton_schulz_maps_each_singular_value(num_iterations):
    """Eq. 9 keeps the singular vectors of M and sends σ to ½σ(3 − σ²), from σ/(‖M‖_F + ε)."""
    query, key, _ = draw(11, 3)
    left, singular, right = torch.linalg.svd(torch.cat([query, key], dim=-1), full_matrices=False)
    singular = singular / (singular.square().sum(-1, keepdim=True).sqrt() + 0.5)
    for _ in range(num_iterations):
        singular = singular * (3 - singular.square()) / 2
    basis = reference.newton_schulz_basis(torch.cat([query, key], -1), num_iterations=num_iterations, epsilon=0.5)
    torch.testing.assert_close(basis, left * singular.unsqueeze(-2) @ right)


def test_heads_add_up_as_concatenation_does():
    """Σᵢ Hᵢ Wᵢ^O = [H₁, …, H_h] W^O with the blocks of W^O stacked: the form in which the modules compute it."""
    heads, tokens, width = 3, 5, 6
    x = torch.randn(2, tokens, width, dtype=torch.float64)
    query, key, value = torch.randn(3, heads, width, width // heads, dtype=torch.float64)
    out = torch.randn(heads, width // heads, width, dtype=torch.float64)
    alphas = torch.tensor([0.1, -0.2, 0.3])
    parts = [
        reference.orthogonal_attention(x @ query[i], x @ key[i], x @ value[i], alphas[i] / math.sqrt(2))
        for i in range(heads)
    ]
    actual = reference.multi_head_orthogonal_attention(x, query, key, value, out, alphas)
    torch.testing.assert_close(actual, torch.cat(parts, dim=-1) @ out.flatten(0, 1))


def test_softmax_layer_matches_torch():
    heads, width = 3, 6
    layer = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(layer.in_proj_bias)
    torch.nn.init.normal_(layer.out_proj.bias)
    weights = layer.in_proj_weight.view(3, heads, width // heads, width).mT
    biases = layer.in_proj_bias.view(3, heads, width // heads)
    out = layer.out_proj.weight.mT.view(heads, width // heads, width)
    x = torch.randn(2, 5, width, dtype=torch.float64)
    expected, _ = layer(x, x, x, need_weights=False)
    actual = reference.multi_head_softmax_attention(x, *weights, out, *biases, layer.out_proj.bias)
    torch.testing.assert_close(actual, expected)
