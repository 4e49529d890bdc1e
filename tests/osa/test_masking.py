"""Calls as of `scaled_dot_product_attention`: padding is left out, heads repeat, and what is not orthogonal is refused."""

import pytest
import torch
import torch.nn.functional as F

import osa
from osa import orthogonal_attention
from osa.options import METHODS
from osa.shaped.layers import SignalPreservingSelfAttention, ValueSkipInitSelfAttention
from tests.osa.helpers import draw, relative_error

TOKENS, LEFT, WIDTH = 17, 11, 4
KEEP = torch.arange(TOKENS) < LEFT


def masks():
    row = KEEP.view(1, 1, 1, TOKENS)
    return {"row": row, "square": row.expand(2, 1, TOKENS, TOKENS), "two dimensions": row[0, 0].expand(TOKENS, TOKENS)}


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method, subtests):
    """Any values may stand in it; the gradients do not depend on it either, but for "qr_literal", whose M loses its rank."""
    for shape, mask in masks().items():
        with subtests.test(shape=shape):
            inputs = draw(TOKENS, WIDTH)
            shorter = [x[..., :LEFT, :].detach().requires_grad_() for x in inputs]
            for unread in inputs[:2]:
                unread.data[..., LEFT:, :] = torch.inf
            actual = orthogonal_attention(*inputs, mask, scale=0.7, method=method)
            expected = orthogonal_attention(*shorter, scale=0.7, method=method)
            assert relative_error(actual[..., :LEFT, :], expected) < 1e-12
            assert torch.equal(actual[..., LEFT:, :], inputs[2][..., LEFT:, :])
            if method != "qr_literal":
                cotangent = torch.randn_like(actual)
                gradients = torch.autograd.grad(actual, inputs, cotangent)
                short_gradients = torch.autograd.grad(expected, shorter, cotangent[..., :LEFT, :])
                for gradient, short in zip(gradients, short_gradients, strict=True):
                    assert relative_error(gradient[..., :LEFT, :], short) < 1e-10
                assert not gradients[0][..., LEFT:, :].any() and not gradients[1][..., LEFT:, :].any()


def test_a_batch_of_masks_is_one_for_each_sequence_and_is_traced():
    inputs, mask = draw(TOKENS, WIDTH), torch.stack([KEEP, ~KEEP]).view(2, 1, 1, TOKENS)
    actual = orthogonal_attention(*inputs, mask)
    for i in range(2):
        assert relative_error(actual[i], orthogonal_attention(*(x[i] for x in inputs), mask[i])) < 1e-12
    square = mask.expand(2, 1, TOKENS, TOKENS)
    compiled = torch.compile(orthogonal_attention, backend="eager", fullgraph=True)
    for length in (3, 4, 5):  # after which the number of tokens is a symbol
        compiled(*draw(length, WIDTH))
    assert relative_error(compiled(*inputs, square), actual) < 1e-12
    same = lambda *x: orthogonal_attention(*x, square[0])  # noqa: E731
    assert relative_error(torch.func.vmap(same)(*inputs), same(*inputs)) < 1e-12


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_keys_and_values_of_fewer_heads_repeat_as_in_torch(heads):
    query, _, _ = draw(TOKENS, WIDTH, batch=(2, 6))
    _, key, value = draw(TOKENS, WIDTH, batch=(2, heads))
    order = torch.arange(6) // (6 // heads)
    actual = orthogonal_attention(query, key, value, enable_gqa=True)
    assert torch.equal(actual, orthogonal_attention(query, key[:, order], value[:, order]))
    softmax = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)  # the same order there
    torch.testing.assert_close(softmax, F.scaled_dot_product_attention(query, key[:, order], value[:, order]))


@pytest.mark.parametrize(
    "arguments, cause",
    [
        (dict(is_causal=True), "is_causal.*triangular"),
        (dict(dropout_p=0.1), "dropout_p.*not be orthogonal"),
        (dict(attn_mask=torch.zeros(TOKENS, TOKENS)), "attn_mask.*boolean"),
        (dict(attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()), "attn_mask.*whole tokens"),
        (dict(attn_mask=KEEP), "attn_mask.*1, 17"),
        (dict(attn_mask=KEEP[None, :5]), "attn_mask.*1, 17"),
        (dict(enable_gqa=True, key_heads=2), "enable_gqa.*3.*2"),
    ],
)
def test_what_has_no_orthogonal_matrix_is_refused_with_its_reason(arguments, cause):
    query, key, value = draw(TOKENS, WIDTH)
    heads = arguments.get("key_heads", 3)
    others = {name: value for name, value in arguments.items() if name != "key_heads"}
    with pytest.raises(ValueError, match=cause):
        orthogonal_attention(query, key[:, :heads], value[:, :heads], **others)


# Layers

LAYERS = {
    "exact": lambda: osa.OrthogonalSelfAttention(12, 3, alpha_init=0.7),
    "newton_schulz": lambda: osa.OrthogonalSelfAttention(12, 3, method="newton_schulz", alpha_init=0.7),
    "softmax": lambda: osa.SoftmaxSelfAttention(12, 3),
    "value_skipinit": lambda: ValueSkipInitSelfAttention(12, 3),
}


def block_of(layer):
    return osa.Block(layer, osa.MLP(12, 17), embed_dim=12, skip=True, norm=True)


def draw_layer(name, wrap):
    layer = wrap(LAYERS[name]()).double()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return layer, torch.randn(2, TOKENS, 12, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("wrap", [lambda layer: layer, block_of], ids=["layer", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_padding_of_layers_changes_nothing(name, wrap):
    """Gradients of weights and tokens do not depend on it either. Masks are of tokens, or as the heads take them."""
    layer, x = draw_layer(name, wrap)
    keep = torch.stack([KEEP, torch.ones_like(KEEP)])  # (B, N)
    shorter = x[0, :LEFT].detach().requires_grad_()
    expected, whole = layer(shorter), layer(x[1])
    cotangent = torch.randn_like(whole)
    actual = layer(x, attn_mask=keep)
    assert relative_error(actual[0, :LEFT], expected) < 1e-12 and relative_error(actual[1], whole) < 1e-12
    assert relative_error(layer(x)[0, :LEFT], expected) > 1e-3  # it reads the padding
    parameters = list(layer.parameters())
    ours = torch.autograd.grad(actual[0, :LEFT], [x, *parameters], cotangent[:LEFT], retain_graph=True)
    theirs = torch.autograd.grad(expected, [shorter, *parameters], cotangent[:LEFT])
    assert not ours[0][0, LEFT:].any() and relative_error(ours[0][0, :LEFT], theirs[0]) < 1e-10
    for ours_each, theirs_each in zip(ours[1:], theirs[1:], strict=True):  # softmax is blind to the key's bias
        assert (ours_each - theirs_each).norm() < 1e-10 * (theirs_each.norm() + 0.1)
    for mask in (
        keep[:, None, None],
        keep[:, None, None].expand(2, 1, TOKENS, TOKENS),
        keep[:, None, None].expand(2, 3, 1, -1),
    ):
        assert relative_error(layer(x, attn_mask=mask)[:, :LEFT], actual[:, :LEFT]) < 1e-12
        assert relative_error(layer(x, 2, attn_mask=mask), actual[:, :2]) < 1e-12
    assert relative_error(layer(x[0], attn_mask=KEEP)[:LEFT], expected) < 1e-12
    assert relative_error(layer(x[0], 1, attn_mask=KEEP), expected[:1]) < 1e-12


@pytest.mark.parametrize("wrap", [lambda layer: layer, block_of], ids=["layer", "block"])
@pytest.mark.parametrize(
    "mask, error, cause",
    [
        (KEEP[:5], ValueError, r"attn_mask must be a boolean tensor of shape \(2, 17\).*not torch.bool of shape \(5,\)"),
        (KEEP, ValueError, r"\(2, 17\).*\(17,\)"),
        (torch.ones(2, TOKENS), ValueError, r"boolean.*not torch.float32 of shape \(2, 17\)"),
        (torch.ones(TOKENS, 2, dtype=torch.bool), ValueError, r"not torch.bool of shape \(17, 2\)"),
        (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None], ValueError, "whole tokens"),
        ([[True] * TOKENS] * 2, TypeError, "attn_mask must be a boolean tensor, not list"),
    ],
)
def test_masks_that_do_not_fit_a_layer_are_a_sentence(mask, error, cause, wrap):
    layer, x = draw_layer("exact", wrap)
    with pytest.raises(error, match=cause):
        layer(x, attn_mask=mask)


@pytest.mark.parametrize("name", ["exact", "softmax"])
def test_a_triangle_is_not_taken_for_padding(name):
    """A mask (N, N) of a batch of N sequences has the shape of padding, (B, N); the remedy says which of them it is."""
    layer, _ = draw_layer(name, lambda layer: layer)
    x, lower = torch.randn(5, 5, 12, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).tril()
    for mask in (lower, ~lower):
        with pytest.raises(
            ValueError, match=r"triangular.*attn_mask\[None\] for a causal.*attn_mask\[:, None, None\] for a padding"
        ):
            layer(x, attn_mask=mask)
    padded = layer(x, attn_mask=lower[:, None, None])
    for i in range(5):
        assert relative_error(padded[i, : i + 1], layer(x[i, : i + 1])) < 1e-12
    if name == "exact":
        with pytest.raises(ValueError, match="whole tokens"):
            layer(x, attn_mask=lower[None])
    else:
        assert relative_error(layer(x, attn_mask=lower[None])[:, 0], layer(x[:, :1])[:, 0]) < 1e-12
    other = lower.clone()
    other[0, 1] = True  # sequences of 2, 2, 3, 4 and 5 tokens
    assert torch.equal(layer(x, attn_mask=other), layer(x, attn_mask=other[:, None, None]))
    assert layer(x[:1, :1], attn_mask=lower[:1, :1]).shape == (1, 1, 12)


def test_attentions_that_know_no_mask():
    x = torch.randn(2, 7, 12)
    fixed = osa.Block(
        SignalPreservingSelfAttention(12, 3, torch.eye(7)), osa.MLP(12, 17), embed_dim=12, skip=False, norm=False
    )
    with pytest.raises(ValueError, match="attn_mask is not supported: .*fixed number of tokens"):
        fixed(x, attn_mask=torch.ones(2, 7, dtype=torch.bool))

    class Mean(torch.nn.Module):
        def forward(self, x, num_outputs):
            return x.mean(-2, keepdim=True).expand_as(x)[..., :num_outputs, :]

    block = block_of(Mean())
    assert block(x, 2).shape == (2, 2, 12)
    with pytest.raises(TypeError, match="attn_mask"):
        block(x, attn_mask=torch.ones(2, 7, dtype=torch.bool))
