"""The layers: inputs of either kind, and what is refused. See test_vit.py for what they compute."""

import pytest
import torch

import osa
from osa import OrthogonalSelfAttention, SoftmaxSelfAttention


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


LAYERS = {
    "orthogonal": osa.OrthogonalSelfAttention,
    "softmax": osa.SoftmaxSelfAttention,
    "value_skipinit": osa.shaped.ValueSkipInitSelfAttention,
    "signal_preserving": lambda d, h, **k: osa.shaped.SignalPreservingSelfAttention(d, h, torch.full((7, 7), 1 / 7), **k),
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
