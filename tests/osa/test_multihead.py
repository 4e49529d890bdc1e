"""Orthogonal attention in the place of `nn.MultiheadAttention`: encoders of torch and torchvision, masks, refusals."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import osa
from tests.osa.helpers import relative_error

WIDTH, HEADS, TOKENS = 16, 2, 7
PADDING = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [4], [2]])  # (3, N), True for padding as torch has it


def attention(**options):
    return osa.MultiheadOrthogonalAttention(WIDTH, HEADS, **dict(batch_first=True, alpha_init=3.0) | options)


def tokens(**options):
    return torch.randn(3, TOKENS, WIDTH, dtype=torch.float64, **options)


def plain(layer):
    """The layer that takes tokens and a mask of those that take part."""
    other = osa.OrthogonalSelfAttention(WIDTH, HEADS).to(layer.alpha.dtype)
    other.load_state_dict(layer.state_dict())
    return other


def test_the_call_is_torchs():
    ours, theirs = (inspect.signature(each.forward) for each in (osa.MultiheadOrthogonalAttention, nn.MultiheadAttention))
    assert [(each.name, each.default) for each in ours.parameters.values()] == [
        (each.name, each.default) for each in theirs.parameters.values()
    ]
    default = inspect.signature(nn.MultiheadAttention).parameters["batch_first"].default
    assert osa.MultiheadOrthogonalAttention(WIDTH, HEADS).batch_first is default


def test_outputs_and_matrices_have_torchs_shapes_and_our_values():
    layer, x = attention().double(), tokens()
    whole = plain(layer)
    turned = attention(batch_first=False).double()
    turned.load_state_dict(whole.state_dict())
    torchs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    for given in (x, x[0]):
        for average in (True, False):
            y, weights = layer(given, given, given, average_attn_weights=average)
            assert torch.equal(y, whole(given))
            assert [each.shape for each in torchs(given, given, given, average_attn_weights=average)] == [
                y.shape,
                weights.shape,
            ]
    _, _, value = whole.project(x)
    matrices = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(whole.out((matrices @ value).transpose(1, 2).flatten(2)), whole(x))
    torch.testing.assert_close(layer(x, x, x)[1], matrices.mean(1))
    assert layer(x, x, x, need_weights=False)[1] is None
    other = x.transpose(0, 1)
    assert torch.equal(turned(other, other, other)[0].transpose(0, 1), whole(x))
    one = x[0]
    assert torch.equal(turned(one, one, one)[0], whole(one))


def test_outputs_and_matrices_have_torchs_types_under_autocast():
    x = tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = (layer(x, x, x) for layer in (attention(), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))
    assert [each.dtype for each in ours] == [each.dtype for each in torchs] == [torch.bfloat16, torch.bfloat16]


def test_masks_of_padding_in_all_of_torchs_forms():
    layer, x = attention().double(), tokens()
    expected = plain(layer)(x, attn_mask=~PADDING)
    as_numbers = torch.zeros(PADDING.shape, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    of_heads = PADDING.repeat_interleave(HEADS, 0)[:, None].expand(-1, TOKENS, TOKENS)
    for masks in (dict(key_padding_mask=PADDING), dict(key_padding_mask=as_numbers), dict(attn_mask=of_heads)):
        y, weights = layer(x, x, x, **masks)
        torch.testing.assert_close(y, expected)
        assert torch.equal(weights[2, 2:], torch.eye(TOKENS, dtype=torch.float64)[2:])  # padding stays by itself
    first, rest = torch.zeros(TOKENS, TOKENS).double(), PADDING.clone()
    first[:, 5:], rest[:, 5:] = -torch.inf, False
    torch.testing.assert_close(layer(x, x, x, rest, attn_mask=first)[0][1:], expected[1:])
    one = x[1]
    for masks in (dict(key_padding_mask=PADDING[1]), dict(attn_mask=PADDING[1].expand(TOKENS, TOKENS))):
        torch.testing.assert_close(layer(one, one, one, **masks)[0], expected[1])


CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
REFUSED = {
    "cross-attention": (lambda x: (x, x + 1, x + 1), {}, ValueError, r"same tensor.*not support cross-attention"),
    "an array": (lambda x: (x.numpy(),) * 3, {}, TypeError, "not ndarray"),
    "nested": (lambda x: (torch.nested.nested_tensor(list(x)),) * 3, {}, ValueError, "nested"),
    "causal": (None, dict(is_causal=True), ValueError, "is_causal"),
    "a causal mask": (None, dict(attn_mask=CAUSAL), ValueError, "attn_mask.*whole tokens"),
    "a causal mask of words": (None, dict(attn_mask=CAUSAL != 0), ValueError, "attn_mask.*whole tokens"),
    "added numbers": (None, dict(attn_mask=torch.ones(TOKENS, TOKENS)), ValueError, "attn_mask must be 0 or −∞"),
    "a float of padding": (None, dict(key_padding_mask=-1e9 * PADDING.double()), ValueError, "key_padding_mask must be 0"),
    "another shape": (None, dict(key_padding_mask=PADDING[:, :4]), ValueError, r"key_padding_mask.*\(3, 7\), not.*\(3, 4\)"),
    "of other heads": (None, dict(attn_mask=CAUSAL.expand(3, -1, -1)), ValueError, r"attn_mask.*\(6, 7, 7\), not"),
    "whole numbers": (None, dict(key_padding_mask=PADDING.long()), ValueError, "boolean or floating-point"),
    "a list": (None, dict(key_padding_mask=PADDING.tolist()), TypeError, "key_padding_mask.*list.*torch.as_tensor"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_be_is_a_sentence(case):
    make, options, error, cause = REFUSED[case]
    x = tokens()
    with pytest.raises(error, match=cause):
        attention().double()(*(make or (lambda x: (x, x, x)))(x), **options)


def layer_by_hand(layer, x, keep):
    """`nn.TransformerEncoderLayer` with its norms after each part, without dropout."""
    y = layer.norm1(x + plain(layer.self_attn)(x, attn_mask=keep))
    return layer.norm2(y + layer.linear2(F.relu(layer.linear1(y))))


def encoders():
    """Encoders whose attention is ours from the beginning, and is put in the place of torch's."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True).double()
    late = nn.TransformerEncoder(layer, 2)
    for each in late.layers:
        each.self_attn = attention().double()
    early = copy.deepcopy(layer)
    early.self_attn = attention().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unchecked = nn.TransformerEncoder(early, 2, mask_check=False)
        return {"late": late, "early": nn.TransformerEncoder(early, 2), "unchecked": unchecked}


@pytest.mark.parametrize("way", ["late", "early", "unchecked"])
def test_torchs_encoder_computes_with_it_in_training_and_evaluation(way):
    """Torch's fast path, which is softmax's own, is taken neither by the encoder nor by a layer."""
    encoder, x = encoders()[way], tokens(requires_grad=True)
    for mask in (None, PADDING):
        keep = None if mask is None else ~mask
        first = layer_by_hand(encoder.layers[0], x, keep)
        expected = layer_by_hand(encoder.layers[1], first, keep)
        is_token = torch.ones_like(PADDING) if mask is None else ~PADDING
        encoder.train()
        y = encoder(x, src_key_padding_mask=mask)
        assert relative_error(y, expected) < 1e-12
        (wanted,) = torch.autograd.grad(expected[is_token].sin().sum(), x)
        found = torch.autograd.grad(y[is_token].sin().sum(), [x, *encoder.parameters()])
        torch.testing.assert_close(found[0], wanted)
        assert all(each.abs().max() > 0 for each in found)
        encoder.eval()
        frozen = copy.deepcopy(encoder).requires_grad_(False)
        for model, grad in ((encoder, True), (encoder, False), (frozen, True)):
            with torch.set_grad_enabled(grad):
                assert relative_error(model(x.detach(), src_key_padding_mask=mask), expected) < 1e-12
                assert relative_error(model.layers[0](x.detach(), None, mask), first) < 1e-12
    with pytest.raises(ValueError, match="whole tokens|is_causal"):
        encoder(x, CAUSAL)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["late", "early", "unchecked"])
def test_torchs_encoder_is_compiled_with_it(way):
    encoder, x = encoders()[way].eval(), tokens()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
            actual = compiled(x, src_key_padding_mask=PADDING)
            assert relative_error(actual, encoder(x, src_key_padding_mask=PADDING)) < 1e-12


def test_it_exchanges_weights_with_the_layer():
    layer, x = attention(method="newton_schulz", num_iterations=4), torch.randn(2, TOKENS, WIDTH)
    other, again = osa.OrthogonalSelfAttention(WIDTH, HEADS, **layer.options), attention(**layer.options)
    other.load_state_dict(layer.state_dict())
    again.load_state_dict(other.state_dict())
    assert torch.equal(other(x), layer(x, x, x)[0]) and torch.equal(again(x, x, x)[0], other(x))


def test_torchvisions_vision_transformer_computes_with_it():
    models = pytest.importorskip("torchvision").models
    sizes = dict(image_size=8, patch_size=4, num_layers=2, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=32, num_classes=3)
    vit = models.VisionTransformer(**sizes).double()
    nn.init.normal_(vit.heads.head.weight)
    for block in vit.encoder.layers:
        block.self_attention = attention().double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    patches = vit.conv_proj(images).flatten(2).mT
    x = torch.cat([vit.class_token.expand(2, -1, -1), patches], dim=1) + vit.encoder.pos_embedding
    for block in vit.encoder.layers:
        x = x + plain(block.self_attention)(block.ln_1(x))
        x = x + block.mlp(block.ln_2(x))
    expected = vit.heads(vit.encoder.ln(x)[:, 0])
    for model in (vit.train(), vit.eval()):
        assert relative_error(model(images), expected) < 1e-12
    with torch.no_grad():
        assert relative_error(vit(images), expected) < 1e-12
    vit(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in vit.parameters())
    assert all(block.self_attention.alpha.grad.abs().min() > 0 for block in vit.encoder.layers)
    other = models.VisionTransformer(**sizes).double().eval()
    for block in other.encoder.layers:
        block.self_attention = attention().double()
    other.load_state_dict(vit.state_dict())
    assert torch.equal(other(images), vit(images))
