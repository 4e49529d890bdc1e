"""Calls as of `scaled_dot_product_attention`: padding is left out, heads repeat, and what is not orthogonal is refused."""

import pytest
import torch
import torch.nn.functional as F

from osa import orthogonal_attention
from osa.functional import METHODS
from tests.osa.helpers import draw, relative_error

TOKENS, LEFT, WIDTH = 17, 11, 4
KEEP = torch.arange(TOKENS) < LEFT


def masks():
    row = KEEP.view(1, 1, 1, TOKENS)
    return {"row": row, "square": row.expand(2, 1, TOKENS, TOKENS), "two dimensions": row[0, 0].expand(TOKENS, TOKENS)}


@pytest.mark.parametrize("shape", masks())
@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method, shape):
    """Whatever stands in it; nor the gradients, but for "qr_literal", whose M loses its rank."""
    inputs = draw(TOKENS, WIDTH)
    shorter = [x[..., :LEFT, :].detach().requires_grad_() for x in inputs]
    for unread in inputs[:2]:
        unread.data[..., LEFT:, :] = torch.inf
    actual = orthogonal_attention(*inputs, masks()[shape], scale=0.7, method=method)
    expected = orthogonal_attention(*shorter, scale=0.7, method=method)
    assert relative_error(actual[..., :LEFT, :], expected) < 1e-12
    assert torch.equal(actual[..., LEFT:, :], inputs[2][..., LEFT:, :])
    if method != "qr_literal":
        cotangent = torch.randn_like(actual)
        gradients = torch.autograd.grad(actual, inputs, cotangent)
        for gradient, short in zip(gradients, torch.autograd.grad(expected, shorter, cotangent[..., :LEFT, :]), strict=True):
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
        (dict(dropout_p=0.1), "dropout_p.*not orthogonal"),
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
