"""Packed sequences: each as it is alone, whatever its neighbours, and offsets that do not fit are a sentence."""

import numpy as np
import pytest
import torch

import osa
from osa import orthogonal_attention, orthogonal_attention_varlen
from osa.options import METHODS
from tests.osa.helpers import DEGENERATE, relative_error

LENGTHS, HEADS, WIDTH, VALUE_WIDTH = (11, 1, 0, 17, 2), 3, 3, 7  # one is empty, and two have fewer tokens than 2d
OFFSETS = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
TOTAL = sum(LENGTHS)


def packed(dtype=torch.float64, heads=HEADS):
    shapes = (TOTAL, HEADS, WIDTH), (TOTAL, heads, WIDTH), (TOTAL, heads, VALUE_WIDTH)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_a_loop(query, key, value, **options):
    outputs = []
    for parts in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        if len(parts[0]):
            outputs.append(orthogonal_attention(*(x.transpose(0, 1) for x in parts), **options).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("method", METHODS)
def test_each_sequence_is_as_it_is_alone(method, dtype, tolerance):
    """Values and gradients agree, with a scale for each head; "qr_literal" has no gradient of matrices without full rank."""
    inputs, scale = packed(dtype), torch.tensor([0.3, -0.5, 0.7]).view(3, 1, 1)
    actual = orthogonal_attention_varlen(*inputs, OFFSETS, scale=scale, method=method)
    expected = by_a_loop(*inputs, scale=scale, method=method)
    assert actual.dtype == dtype and relative_error(actual, expected) < tolerance
    if method != "qr_literal":
        cotangent = torch.randn_like(expected)
        pairs = (torch.autograd.grad(output, inputs, cotangent) for output in (actual, expected))
        assert all(relative_error(*pair) < 10 * tolerance for pair in zip(*pairs, strict=True))


@pytest.mark.parametrize("case", [name for name in DEGENERATE if "token" not in name])
@pytest.mark.parametrize("method", ["exact", "qr", "newton_schulz"])
def test_without_full_rank(method, case):
    query, key, value = packed()
    query, key = DEGENERATE[case](query, key)
    actual = orthogonal_attention_varlen(query, key, value, OFFSETS, method=method)
    assert relative_error(actual, by_a_loop(query, key, value, method=method)) < 1e-10


def test_sequences_do_not_see_one_another_and_few_heads_repeat():
    query, key, value = packed()
    before = orthogonal_attention_varlen(query, key, value, OFFSETS)
    with torch.no_grad():
        query[11], key[12], value[12] = torch.nan, torch.nan, torch.nan  # the second sequence, and the fourth
    after = orthogonal_attention_varlen(query, key, value, OFFSETS)
    assert relative_error(after[:11], before[:11]) < 1e-12 and relative_error(after[29:], before[29:]) < 1e-12
    assert after[11:29].isnan().any(-1).all()
    query, key, value = packed(heads=1)
    shared = orthogonal_attention_varlen(query, key, value, OFFSETS, enable_gqa=True)
    assert torch.equal(shared, orthogonal_attention_varlen(query, key.repeat(1, 3, 1), value.repeat(1, 3, 1), OFFSETS))


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_nothing_is_nothing(offsets):
    empty = torch.zeros(0, HEADS, WIDTH, requires_grad=True)
    output = orthogonal_attention_varlen(empty, empty, empty, torch.tensor(offsets))
    assert output.shape == (0, HEADS, WIDTH)


def test_jagged_tensors_name_it():
    parts = [torch.randn(length, HEADS, WIDTH) for length in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(ValueError, match=r"nested.*values\(\) and offsets\(\) to osa\.orthogonal_attention_varlen"):
        orthogonal_attention(jagged, jagged, jagged)
    x = jagged.values()
    output = orthogonal_attention_varlen(x, 2 * x.roll(1, -1), x, jagged.offsets())
    expected = orthogonal_attention(*(y.transpose(0, 1) for y in (parts[1], 2 * parts[1].roll(1, -1), parts[1])))
    assert relative_error(output[3:], expected.transpose(0, 1)) < 1e-6
    layer = osa.OrthogonalSelfAttention(12, 3)
    jagged = torch.nested.nested_tensor([torch.randn(length, 12) for length in (3, 5)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"nested.*to_padded_tensor.*attn_mask"):
        layer(jagged)
    padded = torch.nested.to_padded_tensor(jagged, 0.0)
    mask = torch.arange(5) < jagged.offsets().diff()[:, None]
    assert relative_error(layer(padded, attn_mask=mask)[0, :3], layer(jagged.unbind()[0])) < 1e-6


@pytest.mark.parametrize(
    "offsets, error, cause",
    [
        ([0, 11, 30], ValueError, "rise from 0 to 31, the number of packed tokens, not 0, 11, 30"),
        ([0, 11, 32], ValueError, "to 31, the number of packed tokens, not 0"),
        ([1, 11, 31], ValueError, "to 31, the number of packed tokens, not 1, 11, 31"),
        ([0, 12, 11, 31], ValueError, "to 31, the number of packed tokens, not 0, 12, 11, 31"),
        ([0, -1, 31], ValueError, "to 31, the number of packed tokens, not 0"),
        (list(range(20)), ValueError, "not 0, 1, 2, 3, …, 17, 18, 19$"),
        ([], ValueError, r"integer tensor of shape \(B \+ 1,\)"),
        ([[0, 31]], ValueError, r"integer tensor.*\(1, 2\)"),
        ([0.0, 31.0], ValueError, "integer tensor.*float32"),
        (None, TypeError, "cu_seqlens must be a tensor, not NoneType"),
        (np.array([0, 31]), TypeError, "cu_seqlens.*ndarray.*torch.as_tensor"),
    ],
)
def test_offsets_that_do_not_fit_are_a_sentence(offsets, error, cause):
    with pytest.raises(error, match=cause):
        orthogonal_attention_varlen(*packed(), torch.tensor(offsets) if isinstance(offsets, list) else offsets)


@pytest.mark.parametrize(
    "change, cause",
    [
        (lambda q, k, v: (q[None], k[None], v[None]), r"\(total, heads, d\), not \(1, 31, 3, 3\)"),
        (lambda q, k, v: (q, k, v[:30]), "the same number of tokens, not 31, 31, 30"),
        (lambda q, k, v: (q, k[:, :2], v), "broadcast"),
        (lambda q, k, v: (q, k[..., :2], v), r"same last two dimensions \(N, d\)"),
        (lambda q, k, v: (q.long(), k, v), "floating-point"),
    ],
)
def test_tensors_that_do_not_fit_are_a_sentence(change, cause):
    with pytest.raises(ValueError, match=cause):
        orthogonal_attention_varlen(*change(*packed()), OFFSETS)
