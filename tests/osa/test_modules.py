"""The attention layers against the loop over heads of the reference; the initialisation of Section 4; real steps."""

import pytest
import torch

from osa import OrthogonalSelfAttention, SoftmaxSelfAttention, reference
from osa.functional import orthogonal_attention_matrix
from tests.osa.helpers import orthogonality_error, relative_error

REFERENCE = {
    "qr_literal": reference.orthogonal_attention,
    "qr": reference.orthogonal_attention,
    "newton_schulz": reference.newton_schulz_attention,
    "exact": reference.orthogonal_attention,
}
IMAGES, TOKENS, WIDTH, HEADS, HEAD_WIDTH = 2, 11, 15, 3, 5


def head_weights(layer):
    """The paper's W^Q, W^K, W^V (h, d, d_v) and W^O (h, d_v, d), views of the weights of the linear layers."""
    projections = [
        linear.weight.mT.unflatten(-1, (HEADS, HEAD_WIDTH)).movedim(-2, 0)
        for linear in (layer.query, layer.key, layer.value)
    ]
    return [*projections, layer.out.weight.mT.unflatten(0, (HEADS, HEAD_WIDTH))]


def randomised(layer):
    """The layer in float64 with all its parameters drawn anew, so that no structure of the initialisation is left."""
    layer = layer.double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("method", [*REFERENCE, "softmax"])
def test_a_layer_is_the_sum_over_heads(method):
    x = torch.randn(IMAGES, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    if method == "softmax":
        layer = randomised(SoftmaxSelfAttention(WIDTH, HEADS))
        biases = [linear.bias.view(HEADS, HEAD_WIDTH) for linear in (layer.query, layer.key, layer.value)]
        expected = reference.multi_head_softmax_attention(x, *head_weights(layer), *biases, layer.out.bias)
    else:
        layer = randomised(OrthogonalSelfAttention(WIDTH, HEADS, method=method))
        expected = reference.multi_head_orthogonal_attention(x, *head_weights(layer), layer.alpha, REFERENCE[method])
    actual, inputs = layer(x), {"x": x, **dict(layer.named_parameters())}
    assert relative_error(actual, expected) < 1e-11
    cotangent = torch.randn_like(actual)
    gradients = (torch.autograd.grad(output, inputs.values(), cotangent) for output in (actual, expected))
    for name, gradient, expected_gradient in zip(inputs, *gradients, strict=True):
        error = (gradient - expected_gradient).norm()  # the softmax key bias has no gradient but rounding
        assert error < 1e-11 * (1 + expected_gradient.norm()), name


def test_orthogonal_layer_has_no_biases_and_one_alpha_per_head():
    layer = OrthogonalSelfAttention(WIDTH, HEADS)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    matrices = {f"{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    assert shapes == matrices | {"alpha": (HEADS,)}
    assert torch.equal(layer.alpha, torch.full((HEADS,), 0.1))
    assert torch.equal(OrthogonalSelfAttention(WIDTH, HEADS, alpha_init=0.7).alpha, torch.full((HEADS,), 0.7))


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
