"""The yardstick itself, against values worked by hand and other algorithms."""

import itertools
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


def test_exponential_matches_the_eigendecomposition(subtests):
    """iS is Hermitian: iS = UΛUᴴ, so exp(S) = U exp(−iΛ) Uᴴ, another algorithm for the same matrix."""
    for size, scale in itertools.product(SIZES, (1e-6, 1e-2, 1.0, 1e2)):
        with subtests.test(size=size, scale=scale):
            query, key, _ = draw(*size)
            eigenvalues, vectors = torch.linalg.eigh(1j * reference.skew(query, key, scale))
            expected = (vectors * torch.exp(-1j * eigenvalues).unsqueeze(-2)) @ vectors.mH
            actual = reference.orthogonal_attention_matrix(query, key, scale)
            assert relative_error(actual, expected.real) < 1e-13 * (1 + eigenvalues.abs().max())


def test_the_cayley_transform_turns_by_twice_the_arctangent_of_half_the_angle():
    """Two tokens have S = angle · [[0, −1], [1, 0]]."""
    query, key = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])
    turned = reference.cayley_attention(query, key, torch.eye(2), 0.7)
    expected = reference.orthogonal_attention(query, key, torch.eye(2), 2 * math.atan(0.35))
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)


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
