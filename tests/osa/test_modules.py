"""The attention layers against the loop over heads of the reference; the initialisation of Section 4; real steps."""

import math

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
ALPHAS = torch.tensor([0.3, -0.7, 1.1])
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


def assert_equal_with_gradients(layer, actual, expected, x):
    inputs = {"x": x, **dict(layer.named_parameters())}
    cotangent = torch.randn_like(actual)
    gradients = torch.autograd.grad(actual, inputs.values(), cotangent)
    expected_gradients = torch.autograd.grad(expected, inputs.values(), cotangent)
    assert relative_error(actual, expected) < 1e-11
    for name, gradient, expected_gradient in zip(inputs, gradients, expected_gradients, strict=True):
        error = (gradient - expected_gradient).norm()  # the softmax key bias has no gradient but rounding
        assert error < 1e-11 * (1 + expected_gradient.norm()), name


def tokens(dtype=torch.float64):
    return torch.randn(IMAGES, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("method", REFERENCE)
def test_orthogonal_layer_is_the_sum_over_heads(method):
    layer = randomised(OrthogonalSelfAttention(WIDTH, HEADS, method=method))
    x = tokens()
    expected = reference.multi_head_orthogonal_attention(x, *head_weights(layer), layer.alpha, REFERENCE[method])
    assert_equal_with_gradients(layer, layer(x), expected, x)


def test_number_of_iterations_reaches_newton_schulz():
    x = tokens()
    outputs = []
    for num_iterations in (2, 6, None):
        torch.manual_seed(1)
        method = dict(method="newton_schulz", num_iterations=num_iterations)
        layer = OrthogonalSelfAttention(WIDTH, HEADS, **method, alpha_init=1)
        outputs.append(layer.double()(x))
    assert not torch.allclose(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


def test_softmax_layer_is_the_sum_over_heads():
    layer = randomised(SoftmaxSelfAttention(WIDTH, HEADS))
    x = tokens()
    biases = [linear.bias.view(HEADS, HEAD_WIDTH) for linear in (layer.query, layer.key, layer.value)]
    expected = reference.multi_head_softmax_attention(x, *head_weights(layer), *biases, layer.out.bias)
    assert_equal_with_gradients(layer, layer(x), expected, x)


@pytest.mark.parametrize("layer_type", [OrthogonalSelfAttention, SoftmaxSelfAttention])
def test_projections_are_those_of_each_head(layer_type):
    layer = randomised(layer_type(WIDTH, HEADS))
    x = tokens()
    linears = (layer.query, layer.key, layer.value)
    for projection, weight, linear in zip(layer.project(x), head_weights(layer), linears, strict=False):
        assert projection.shape == (IMAGES, HEADS, TOKENS, HEAD_WIDTH)
        bias = 0 if linear.bias is None else linear.bias.view(HEADS, 1, HEAD_WIDTH)
        torch.testing.assert_close(projection, x.unsqueeze(1) @ weight + bias)


def test_scale_is_alpha_over_the_root_of_the_head_width():
    layer = OrthogonalSelfAttention(WIDTH, HEADS)
    with torch.no_grad():
        layer.alpha.copy_(ALPHAS)
    torch.testing.assert_close(layer.scale(), ALPHAS.view(HEADS, 1, 1) / math.sqrt(HEAD_WIDTH))


def test_orthogonal_layer_has_no_biases_and_one_alpha_per_head():
    layer = OrthogonalSelfAttention(WIDTH, HEADS)
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    matrices = {f"{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    assert shapes == matrices | {"alpha": (HEADS,)}
    assert torch.equal(layer.alpha, torch.full((HEADS,), 0.1))
    assert torch.equal(OrthogonalSelfAttention(WIDTH, HEADS, alpha_init=0.7).alpha, torch.full((HEADS,), 0.7))


def test_one_alpha_for_all_heads():
    """alpha_per_head=False reads Eq. 5 literally: one scalar, the same function where all α are equal."""
    torch.manual_seed(1)
    shared = OrthogonalSelfAttention(WIDTH, HEADS, alpha_init=0.7, alpha_per_head=False)
    torch.manual_seed(1)
    own = OrthogonalSelfAttention(WIDTH, HEADS, alpha_init=0.7)
    assert shared.alpha.numel() == 1
    x = tokens(torch.float32)
    torch.testing.assert_close(shared(x), own(x))


def test_query_key_initialisation():
    """Section 4.2: [W^Q, W^K] of a head is one Stiefel draw, so that W̃ has 2d_v singular values 1, the others 0."""
    layer = OrthogonalSelfAttention(WIDTH, HEADS).double()
    query, key, _, _ = (weight.detach() for weight in head_weights(layer))
    stacked = torch.cat([query, key], dim=-1)
    identity = torch.eye(2 * HEAD_WIDTH, dtype=torch.float64).expand(HEADS, -1, -1)
    torch.testing.assert_close(stacked.mT @ stacked, identity, rtol=0, atol=1e-6)
    singular = torch.linalg.svdvals(query @ key.mT - key @ query.mT)
    expected = torch.arange(WIDTH).lt(2 * HEAD_WIDTH).double().expand(HEADS, -1)
    torch.testing.assert_close(singular, expected, rtol=0, atol=1e-6)


def test_value_output_initialisation():
    """Section 4.1: W^V = U and W^O = Vᵀ of a head are two Stiefel draws: W^V W^O has d_v singular values 1."""
    layer = OrthogonalSelfAttention(WIDTH, HEADS).double()
    _, _, value, out = (weight.detach() for weight in head_weights(layer))
    identity = torch.eye(HEAD_WIDTH, dtype=torch.float64).expand(HEADS, -1, -1)
    torch.testing.assert_close(value.mT @ value, identity, rtol=0, atol=1e-6)
    torch.testing.assert_close(out @ out.mT, identity, rtol=0, atol=1e-6)
    expected = torch.arange(WIDTH).lt(HEAD_WIDTH).double().expand(HEADS, -1)
    torch.testing.assert_close(torch.linalg.svdvals(value @ out), expected, rtol=0, atol=1e-6)


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


def test_initialisation_follows_the_seed():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([parameter.flatten() for parameter in OrthogonalSelfAttention(WIDTH, HEADS).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_two_query_key_heads_must_fit_into_the_width():
    with pytest.raises(ValueError, match="2 ?d_v|num_heads"):
        OrthogonalSelfAttention(15, 1)


@pytest.mark.parametrize("layer_type", [OrthogonalSelfAttention, SoftmaxSelfAttention])
def test_heads_must_divide_the_width(layer_type):
    with pytest.raises(ValueError, match="num_heads"):
        layer_type(15, 4)


def test_unknown_method_is_refused_at_construction():
    with pytest.raises(ValueError, match="cayley.*exact"):
        OrthogonalSelfAttention(WIDTH, HEADS, method="cayley")


def test_iterations_without_an_iterating_method_are_refused_at_construction():
    with pytest.raises(ValueError, match="num_iterations"):
        OrthogonalSelfAttention(WIDTH, HEADS, method="qr", num_iterations=6)


@pytest.mark.parametrize("method", ["qr_literal", "qr", "exact"])
def test_attention_stays_orthogonal_through_real_steps(method):
    """Three AdamW steps move the weights away from their initialisation; AᵀA = I holds for any weights."""
    layer = OrthogonalSelfAttention(WIDTH, HEADS, method=method, alpha_init=1)
    x, target = torch.randn(2, IMAGES, TOKENS, WIDTH)
    initial = [weight.detach().clone() for weight in head_weights(layer)]
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(layer(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    for before, after in zip(initial, head_weights(layer), strict=True):
        assert relative_error(after, before) > 0.1
    query, key, _ = layer.project(x)
    matrix = orthogonal_attention_matrix(query, key, scale=layer.scale(), method=method)
    assert relative_error(matrix, torch.eye(TOKENS).expand_as(matrix)) > 0.5
    assert orthogonality_error(matrix) <= 1e-5
