"""Kernels, schedules and activations against known answers and other ways to compute them; the layers as initialised."""

import importlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from osa import create_model
from osa.init import init_signal_preserving_attention_
from osa.shaped.activations import dks_gelu, gain, gelu, gelu_tanh, linear_share
from osa.shaped.layers import SignalPreservingSelfAttention, ValueSkipInitSelfAttention
from osa.shaped.matrices import attention_between, signal_preserving_attention
from osa.shaped.schedules import (
    KERNEL_KINDS,
    exponential_kernel,
    exponential_schedule,
    residual_schedule,
    uniform_kernel,
    uniform_schedule,
)

IMAGES, TOKENS, WIDTH, HEADS = 2, 11, 15, 3
LAST = {"uniform": 0.8, "exponential": 0.05}
MAKE = {"uniform": uniform_kernel, "exponential": exponential_kernel}
FORMS = list(itertools.product(KERNEL_KINDS, (True, False)))


def schedule(kernel, depth, repeated=0.0):
    if kernel == "uniform":
        return uniform_schedule(depth, LAST[kernel], repeated)
    return exponential_schedule(depth, LAST[kernel])


def close(actual, expected, tolerance):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=tolerance)


# Schedules


def test_exponential_schedule():
    """γ_l = −½ log(1 − a_L^{2l/L}), so that the diagonal of A_l is a_L^{1/L} in every block, the first token apart."""
    first, *rest = exponential_schedule(6, 0.05)
    assert math.isinf(first) and rest == pytest.approx((0.5630, 0.3049, 0.1844, 0.1169, 0.0759, 0.05), abs=6e-5)
    for depth, expected in {6: 0.8220, 12: 0.9066, 36: 0.9679, 72: 0.9838}.items():
        matrices = signal_preserving_attention("exponential", 7, depth, 0.05, causal=True, cls_index=0)
        close(matrices.diagonal(dim1=1, dim2=2)[:, 1:], torch.full((depth, 6), expected), 6e-5)


# Matrices


@pytest.mark.parametrize("kernel, causal", FORMS)
@pytest.mark.parametrize("num_tokens, depth", [(1, 6), (7, 5), (50, 36)])
def test_matrices_follow_the_schedule_and_are_no_less_than_0(kernel, causal, num_tokens, depth):
    """(A_l ⋯ A_1)(A_l ⋯ A_1)ᵀ = Σ_l for every l; above the diagonal there is nothing if causal, as of Cholesky factors."""
    matrices = signal_preserving_attention(kernel, num_tokens, depth, LAST[kernel], causal=causal, cls_index=0)
    product = torch.eye(num_tokens, dtype=torch.float64)
    for matrix, value in zip(matrices, schedule(kernel, depth)[1:], strict=True):
        product = matrix @ product
        close(product @ product.mT, MAKE[kernel](num_tokens, value), 1e-11)
    for before, after in itertools.pairwise(schedule(kernel, depth)):
        with pytest.raises(ValueError, match="must not fall"):  # a fall needs negative entries
            attention_between(kernel, num_tokens, after, before, causal=causal)
    seen = torch.ones(num_tokens, num_tokens).tril() if causal else torch.ones(num_tokens, num_tokens)
    assert (matrices > 0).eq(seen.bool()).all() and not (matrices < 0).any()


@pytest.mark.parametrize("kernel, causal", FORMS)
def test_repeated_tokens_leave_the_diagonal_at_1(kernel, causal):
    """Eq. 12 to 15: with Σ̄_0 = (1 − r) I + r 11ᵀ. Without tokens that repeat, the correction is none."""
    repeated = 0.1
    make = partial(signal_preserving_attention, kernel, TOKENS, 5, LAST[kernel], causal=causal, cls_index=0)
    matrices, plain = make(repeated=repeated), make()
    average, uncorrected = (uniform_kernel(TOKENS, repeated) for _ in range(2))
    for matrix, without in zip(matrices, plain, strict=True):
        average, uncorrected = matrix @ average @ matrix.mT, without @ uncorrected @ without.mT
        close(average.diagonal(), torch.ones(TOKENS), 1e-12)
    assert uncorrected.diagonal().max() > 1.3
    ends = itertools.pairwise(schedule(kernel, 5))
    close(plain, torch.stack([attention_between(kernel, TOKENS, *pair, causal=causal) for pair in ends]), 1e-11)


@pytest.mark.parametrize("causal, place", [(True, TOKENS - 1), (False, 5)])
def test_cls_stands_last_if_causal_and_else_in_the_middle(causal, place):
    in_sequence = signal_preserving_attention("exponential", TOKENS, 5, 0.05, causal=causal, cls_index=0)
    in_place = signal_preserving_attention("exponential", TOKENS, 5, 0.05, causal=causal)
    patches = [i for i in range(TOKENS) if i != place]
    assert torch.equal(in_place[:, 1:, 1:], in_sequence[:, patches][:, :, patches])
    assert torch.equal(in_place[:, 0, 1:], in_sequence[:, place, patches])
    assert torch.equal(in_place[:, 0, 0], in_sequence[:, place, place])


# Skips


def test_a_skip_of_uniform_kernels_is_exact():
    """α² Σ_{l−1} + (1 − α²) A Σ_{l−1} Aᵀ = Σ_l; the weight 0 is no skip."""
    steps, shortcut = uniform_schedule(36, 0.8), 0.9
    for before, reached, after in zip(steps, residual_schedule("uniform", steps, shortcut), steps[1:], strict=False):
        matrix = attention_between("uniform", TOKENS, before, reached)
        attended = matrix @ uniform_kernel(TOKENS, before) @ matrix.mT
        block = shortcut**2 * uniform_kernel(TOKENS, before) + (1 - shortcut**2) * attended
        close(block, uniform_kernel(TOKENS, after), 1e-13)


def test_a_skip_of_exponential_kernels_is_eq_24_and_not_eq_25():
    """a(γ_out) = λ_α a(γ_{l−1}); Eq. 25 as printed has λ_α² there, and .0440 instead of .1714 in the first of six blocks."""
    shortcut, steps = 0.873, exponential_schedule(6, 0.2)
    factor = math.sqrt(((1 - math.exp(-0.4)) ** (1 / 6) - shortcut**2) / (1 - shortcut**2))
    reached = residual_schedule("exponential", steps, shortcut)
    a = lambda gamma: math.sqrt(-math.expm1(-2 * gamma))  # noqa: E731
    assert [a(gamma) for gamma in reached] == pytest.approx([factor * a(gamma) for gamma in steps[:-1]])
    assert reached[0] == pytest.approx(0.1714, abs=5e-5)
    assert -math.log1p(-(factor**4)) / 2 == pytest.approx(0.0440, abs=5e-5)


# Layers


@pytest.mark.parametrize("query_key, nearly", [("zero_query", 1e-12), ("zero_key", 1e-12), ("small", 0.05)])
@pytest.mark.parametrize("kernel, causal", FORMS)
def test_a_signal_preserving_layer_starts_as_its_matrix(kernel, causal, query_key, nearly):
    """A X W^V W^O with W^Q = 0 or W^K = 0, which leaves the other no gradient at first; or near it, with both small."""
    matrix = signal_preserving_attention(kernel, TOKENS, 5, LAST[kernel], causal=causal)[2]
    layer = SignalPreservingSelfAttention(WIDTH, HEADS, matrix, dtype=torch.float64)
    init_signal_preserving_attention_(layer, query_key=query_key)
    x = torch.randn(IMAGES, TOKENS, WIDTH, dtype=torch.float64)
    expected = (matrix @ x @ layer.value.weight.mT @ layer.out.weight.mT).detach()
    error = ((layer(x) - expected).norm() / expected.norm()).item()
    assert error < nearly and (error > 1e-5) == (query_key == "small")
    close(layer.float()(x.float()), layer.double()(x).float(), 1e-5)
    size = {"zero_query": (0, 1), "zero_key": (1, 0), "small": (0.1, 0.1)}[query_key]
    for linear, scale in zip((layer.query, layer.key, layer.value, layer.out), (*size, 1, 1), strict=True):
        close(linear.weight @ linear.weight.mT, scale**2 * torch.eye(WIDTH), 1e-6)
    for step in range(3):
        layer.zero_grad()
        layer(x).pow(3).sum().backward()
        moves = [bool(linear.weight.grad.any()) for linear in (layer.query, layer.key, layer.value, layer.out)]
        assert moves == [step > 0 or size[1] > 0, step > 0 or size[0] > 0, True, True]
        for parameter in layer.parameters():
            parameter.data -= 0.1 * parameter.grad


def test_values_and_output_may_start_as_gaussians():
    layer = SignalPreservingSelfAttention(256, 4, torch.eye(3))
    init_signal_preserving_attention_(layer, value_out="gaussian")
    for linear in (layer.value, layer.out):
        assert linear.weight.std().item() == pytest.approx(1 / 16, rel=0.05)


def test_value_skipinit_starts_as_the_identity():
    layer = ValueSkipInitSelfAttention(WIDTH, HEADS).double()
    x = torch.randn(IMAGES, TOKENS, WIDTH, dtype=torch.float64)
    close(layer(x).detach(), (x @ layer.value.weight.mT @ layer.out.weight.mT).detach(), 1e-12)
    layer(x).pow(3).sum().backward()
    assert layer.residual.grad.all() and not layer.query.weight.grad.any() and not layer.key.weight.grad.any()
    nn.init.zeros_(layer.shortcut)
    nn.init.ones_(layer.residual)
    heads = F.scaled_dot_product_attention(*layer.project(x))
    close(layer(x, num_outputs=3).detach(), layer.out(heads.transpose(1, 2).flatten(2))[:, :3].detach(), 1e-12)


@pytest.mark.parametrize("name", ["uspa_causal", "espa_causal"])
def test_a_causal_model_lets_no_token_see_a_later_one(name):
    """[cls] comes last and sees all patches; a patch sees those before it."""
    model = create_model(name).double()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    x = torch.randn(1, 50, 64, dtype=torch.float64)
    other = x.clone()
    other[:, 20] += 1
    for block in model.blocks:
        x, other = block(x), block(other)
    changed = (x != other).any(-1)[0]
    assert changed.tolist() == [True] + [False] * 19 + [True] * 30


def test_alpha_falls_with_depth():
    for depth, changes, expected in ((6, {}, 0.06), (9, {}, 0.04), (6, {"alpha_times_depth": None}, 0.1)):
        alpha = create_model("osa_shaped", depth=depth, **changes).blocks[-1].attention.alpha
        assert alpha.tolist() == pytest.approx([expected] * 4)


# Activations


def moments(function):
    """E φ, E φ², E φ φ' z and E φ'² for z ~ N(0, 1), by autograd and 4,001 points of Simpson's rule."""
    z = torch.linspace(-12, 12, 4001, dtype=torch.float64, requires_grad=True)
    y = function(z)
    (slope,) = torch.autograd.grad(y.sum(), z)
    rule = torch.tensor([1.0, *[4.0, 2.0] * 1999, 4.0, 1.0], dtype=torch.float64) * (24 / 4000 / 3)
    density = rule * (-(z.detach() ** 2) / 2).exp() / math.sqrt(2 * math.pi)
    return [(density * values).sum().item() for values in (y, y**2, y * slope * z, slope**2)]


@pytest.mark.parametrize("depth", [5, 6, 12, 36, 72, 1000])
def test_dks_has_its_four_moments(depth):
    assert moments(dks_gelu(depth)) == pytest.approx([0, 1, 1, 5 ** (1 / depth)], abs=1e-9)


def test_activations_of_numbers_are_those_of_tensors_and_their_linear_share_the_cosine_with_the_identity():
    z = torch.linspace(-12, 12, 48001, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2)
    assert gain(gelu) == pytest.approx(1.533530, abs=5e-7)
    pairs = {gelu: F.gelu, gelu_tanh: lambda x: F.gelu(x, approximate="tanh")}
    pairs |= {each.of_number: each for each in (dks_gelu(5), dks_gelu(72))}
    for of_number, of_tensor in pairs.items():
        phi, few = of_tensor(z), z[::1000]
        close(torch.tensor([of_number(x) for x in few.tolist()]).double(), of_tensor(few), 2e-6)
        share = (weight * phi * z).sum() / (weight * phi.square()).sum().sqrt() / weight.sum().sqrt()
        assert linear_share(of_number) == pytest.approx(share.item(), abs=1e-6)


@pytest.mark.parametrize(
    "call, cause",
    [
        (lambda: SignalPreservingSelfAttention(WIDTH, HEADS, torch.ones(3, 5)), r"\(N, N\).*\(3, 5\)"),
        (lambda: signal_preserving_attention("exponential", 0, 3, 0.5), "1 or more"),
        (lambda: signal_preserving_attention("exponential", 5, 0, 0.5), "1 or more"),
        (lambda: init_signal_preserving_attention_(None, value_out="zero"), "value_out"),
        (lambda: init_signal_preserving_attention_(None, query_key="gaussian"), "query_key"),
        (lambda: dks_gelu(0), "1 or more"),
        (lambda: dks_gelu(4), "slope"),
        (lambda: dks_gelu(6, 1.0), "slope"),
        (lambda: dks_gelu(6, 1e9), "slope"),
    ],
)
def test_what_no_schedule_and_no_activation_can_do_is_refused(call, cause):
    with pytest.raises(ValueError, match=cause):
        call()


def test_the_old_path_forwards_and_warns():
    with pytest.warns(DeprecationWarning, match="import from osa.shaped"):
        old = importlib.import_module("osa.deep.shaped")
    assert old.SignalPreservingSelfAttention is SignalPreservingSelfAttention and old.dks_gelu is dks_gelu
