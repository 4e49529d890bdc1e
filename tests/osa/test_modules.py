"""The attention layers: independent draws, and orthogonality through real steps. See test_vit.py for what they compute."""

import pytest
import torch

from osa import OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.functional import orthogonal_attention_matrix
from tests.osa.helpers import orthogonality_error, relative_error

IMAGES, TOKENS, WIDTH, HEADS, HEAD_WIDTH = 2, 11, 15, 3, 5


def head_weights(layer):
    """The paper's W^Q, W^K, W^V (h, d, d_v) and W^O (h, d_v, d), views of the weights of the linear layers."""
    projections = [
        linear.weight.mT.unflatten(-1, (HEADS, HEAD_WIDTH)).movedim(-2, 0)
        for linear in (layer.query, layer.key, layer.value)
    ]
    return [*projections, layer.out.weight.mT.unflatten(0, (HEADS, HEAD_WIDTH))]


def test_every_head_and_matrix_is_a_draw_of_its_own():
    """Independent draws have principal angles strictly between 0 and 90 degrees: not copies, not blocks of one draw."""
    layer = OrthogonalSelfAttention(64, 4).double()
    columns = [linear.weight.detach().mT for linear in (layer.query, layer.value)]
    columns.append(layer.out.weight.detach())  # column i of out.weight is row i of W^O
    heads = [block for matrix in columns for block in matrix.split(16, dim=-1)]
    for i, first in enumerate(heads):
        for second in heads[:i]:
            cosines = torch.linalg.svdvals(first.mT @ second)
            assert 0.3 < cosines.max() < 0.999


@pytest.mark.parametrize("method", ["qr_literal", "qr", "exact"])
def test_attention_stays_orthogonal_through_real_steps(method):
    """Three AdamW steps move the weights away from their initialisation; AᵀA = I holds for any weights."""
    layer = OrthogonalSelfAttention(WIDTH, HEADS, method=method, alpha_init=1)
    x, target = torch.randn(2, IMAGES, TOKENS, WIDTH)
    initial = [weight.detach().clone() for weight in head_weights(layer)]
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.03)
    for _ in range(3):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(layer(x), target).backward()
        optimiser.step()
    assert all(relative_error(*pair) > 0.1 for pair in zip(head_weights(layer), initial, strict=True))
    query, key, _ = layer.project(x)
    matrix = orthogonal_attention_matrix(query, key, scale=layer.scale(), method=method)
    assert relative_error(matrix, torch.eye(TOKENS).expand_as(matrix)) > 0.5
    assert orthogonality_error(matrix) <= 1e-5


@pytest.mark.parametrize(
    "layer_type, sizes, options, cause",
    [
        (OrthogonalSelfAttention, (15, 1), {}, "2 ?d_v|num_heads"),  # query and key of a head are 2d_v columns of d
        (OrthogonalSelfAttention, (15, 4), {}, "num_heads"),
        (SoftmaxSelfAttention, (15, 4), {}, "num_heads"),
        (OrthogonalSelfAttention, (15, 3), {"method": "cayley"}, "cayley.*exact"),
        (OrthogonalSelfAttention, (15, 3), {"method": "qr", "num_iterations": 6}, "num_iterations"),
    ],
)
def test_impossible_layers_are_refused_at_construction(layer_type, sizes, options, cause):
    with pytest.raises(ValueError, match=cause):
        layer_type(*sizes, **options)
