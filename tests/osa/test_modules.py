"""The layers: draws, orthogonality through real steps, inputs, refusals. See test_vit.py for what they compute."""

import pytest
import torch

import osa
from osa import OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.functional import orthogonal_attention_matrix
from osa.shaped.layers import SignalPreservingSelfAttention, ValueSkipInitSelfAttention
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
        (OrthogonalSelfAttention, (15, 3), {"method": "givens"}, "givens.*exact"),
        (OrthogonalSelfAttention, (15, 3), {"method": "qr", "num_iterations": 6}, "num_iterations"),
    ],
)
def test_impossible_layers_are_refused_at_construction(layer_type, sizes, options, cause):
    with pytest.raises(ValueError, match=cause):
        layer_type(*sizes, **options)


LAYERS = {
    "orthogonal": osa.OrthogonalSelfAttention,
    "softmax": osa.SoftmaxSelfAttention,
    "value_skipinit": ValueSkipInitSelfAttention,
    "signal_preserving": lambda d, h, **k: SignalPreservingSelfAttention(d, h, torch.full((7, 7), 1 / 7), **k),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_one_sequence_a_device_and_a_type_and_says_what_it_is(name):
    layer = LAYERS[name](12, 3, dtype=torch.float64)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x[1]), layer(x)[1])
    torch.testing.assert_close(layer(x[1], 1), layer(x)[1, :1])
    block = osa.Block(layer, osa.MLP(12, 24, dtype=torch.float64), embed_dim=12, skip=True, norm=True, dtype=torch.float64)
    torch.testing.assert_close(block(x[0], 2), block(x)[0, :2])
    empty = LAYERS[name](12, 3, device="meta", dtype=torch.bfloat16)
    assert {(tensor.device.type, tensor.dtype) for tensor in empty.state_dict().values()} == {("meta", torch.bfloat16)}
    assert all("num_heads=3" in repr(each) for each in (layer, empty))


@pytest.mark.parametrize("shapes", [[(2, 7, 12)] * 3, [(2, 7, 12)] * 2, [(2, 3, 7, 12)], [(12,)], [(2, 7, 11)]])
@pytest.mark.parametrize("name", LAYERS)
def test_other_inputs_of_a_layer_are_a_sentence(name, shapes):
    with pytest.raises(ValueError, match=r"layer\(x\)" if len(shapes) > 1 else r"\(B, N, 12\)"):
        LAYERS[name](12, 3)(*(torch.randn(shape) for shape in shapes))
