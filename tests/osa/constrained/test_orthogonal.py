"""Maps onto rotations, weights parametrised by them, and steps along Stiefel manifolds."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from osa import create_model
from osa.constrained.orthogonal import (
    CONSTRAINTS,
    MAPS,
    RETRACTION,
    Orthogonal,
    StiefelConstraint,
    constrain_,
    constrained_parameters,
    gram_error,
    orthogonal_,
    orthonormal_,
    retract,
)
from osa.constrained.penalties import PENALTIES, with_penalty
from osa.init import stiefel_uniform
from tests.osa.helpers import skip_without_fake_draws

SIZES = (1, 2, 3, 5, 7)
FRAMES = [(7, 3), (5, 5), (3, 7), (7, 1)]
ROUNDING = 50 * torch.finfo(torch.float64).eps

every_map = pytest.mark.parametrize("name", MAPS)


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def float32_rounding(n):
    """Rounding of ‖QᵀQ − I‖_F: n · eps for ‖·‖₂ of a product, times √n."""
    return n**1.5 * torch.finfo(torch.float32).eps


def skew(x):
    return x.tril(-1) - x.tril(-1).mT


def planes(x):
    """`givens` as it is defined: one rotation after the other, lexicographically."""
    w, n = torch.eye(len(x), dtype=x.dtype), len(x)
    for i in range(n):
        for j in range(i + 1, n):
            turn = torch.eye(n, dtype=x.dtype)
            turn[i, i] = turn[j, j] = x[j, i].cos()
            turn[i, j], turn[j, i] = (-x[j, i]).sin(), x[j, i].sin()
            w = w @ turn
    return w


# The maps


@every_map
def test_a_map_leads_to_rotations_with_the_derivative_a_at_0(name, subtests):
    function, h = MAPS[name], 1e-5
    for n in SIZES:
        with subtests.test(n=n):
            x, base = numbers(2, 3, n, n), numbers(2, 3, n, n)
            w, zero = function(x), torch.zeros_like(x)
            assert w.shape == x.shape and gram_error(w) < n * ROUNDING
            torch.testing.assert_close(torch.linalg.det(w), torch.ones(2, 3, dtype=x.dtype))
            assert torch.equal(function(zero), torch.eye(n, dtype=x.dtype).expand_as(x))  # to the last bit
            torch.testing.assert_close((function(h * x) - function(-h * x)) / (2 * h), skew(x), rtol=0, atol=1e-8)
            assert torch.equal(function(x.tril(-1)), w)  # entries on and above the diagonal do not count
            torch.testing.assert_close(function(x)[1, 2], function(x[1, 2]))
            torch.testing.assert_close(function(x, base), w @ base)
            assert torch.equal(function(x, base=base), function(x, base)) and torch.equal(function(zero, base), base)


@every_map
def test_gradients(name):
    for base in ((), (numbers(2, 5, 5).requires_grad_(),)):
        torch.autograd.gradcheck(MAPS[name], (numbers(2, 5, 5).requires_grad_(), *base))


def test_maps_are_what_they_say(subtests):
    for n in SIZES:
        with subtests.test(n=n):
            x = numbers(n, n)
            a, identity = skew(x), torch.eye(n, dtype=x.dtype)
            exponential = torch.linalg.matrix_exp(torch.stack([a, a]))[0]  # see `reference`
            torch.testing.assert_close(MAPS["givens"](x), planes(x))
            torch.testing.assert_close(MAPS["exponential"](x), exponential)
            torch.testing.assert_close(MAPS["cayley"](x), torch.linalg.solve(identity - a / 2, identity + a / 2))
            vectors = identity + x.tril(-1) / 2
            reflections = torch.linalg.householder_product(x.tril(-1) / 2, 2 / vectors.square().sum(0))
            torch.testing.assert_close(MAPS["householder"](x), -reflections)


@every_map
def test_half_precision_is_that_of_float32_rounded_once(name, subtests):
    assert gram_error(MAPS[name](0.1 * numbers(67, 67, dtype=torch.float32))) < float32_rounding(67)
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(dtype=dtype):
            x = 0.3 * numbers(2, 5, 5).to(dtype)
            assert torch.equal(MAPS[name](x), MAPS[name](x.float()).to(dtype))
            assert torch.equal(MAPS[name](x, x), MAPS[name](x.float(), x.float()).to(dtype))


@every_map
def test_autocast_leaves_maps_steps_and_their_backward_passes_alone(name):
    x, weight = (0.1 * numbers(2, 7, 7, dtype=torch.float32)).requires_grad_(), numbers(2, 7, 7, dtype=torch.float32)
    base = torch.linalg.qr(numbers(2, 7, 3, dtype=torch.float32)).Q

    def results():
        w = MAPS[name](x)
        gradient = torch.autograd.grad(w, x, weight) if name != "exponential" else ()  # whose backward is autograd's
        return w, retract(base, x[..., :3]), *gradient

    expected = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = results()
    assert all(map(torch.equal, actual, expected))


# Parametrised weights


def drawn(out_features, in_features):
    linear = nn.Linear(in_features, out_features, dtype=torch.float64)
    orthonormal_(linear.weight)
    return linear


@every_map
def test_a_parametrised_weight_begins_as_it_was_and_stays_orthogonal(name):
    linear = drawn(5, 5)
    before, determinant = linear.weight.clone(), torch.linalg.det(linear.weight)
    orthogonal_(linear, name)
    assert torch.equal(linear.weight, before)
    assert sum(p.numel() for p in linear.parametrizations.parameters()) == 10  # n(n − 1)/2, one for each degree of freedom
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(50):  # each step tries to change lengths as well
        optimizer.zero_grad()
        linear(numbers(4, linear.in_features)).pow(3).sum().backward()
        optimizer.step()
    assert (linear.weight - before).norm() > 0.1 and gram_error(linear.weight) < 10 * ROUNDING
    torch.testing.assert_close(torch.linalg.det(linear.weight), determinant)


def test_what_cannot_be_parametrised_is_refused():
    for shape in ((7, 3), (3, 7)):
        with pytest.raises(ValueError, match="cayley is for square weights"):
            orthogonal_(drawn(*shape), "cayley")
    with pytest.raises(ValueError, match="qr.*givens"):
        Orthogonal("qr")
    unknown = nn.Linear(5, 5)
    nn.init.constant_(unknown.weight, math.nan)
    for linear in (nn.Linear(5, 5), unknown):
        with pytest.raises(ValueError, match="not orthonormal"):
            orthogonal_(linear, "cayley")


@torch.no_grad()
def draw_(weight):
    weight.copy_(stiefel_uniform(*weight.shape, dtype=weight.dtype))


@every_map
def test_begin_with_orthonormal_or_an_orthogonal_draw(name, subtests):
    """The error asks for it; `orthonormal_` finds the nearest such matrix, and leaves an orthonormal one alone."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for dtype, begin in itertools.product(dtypes, (orthonormal_, draw_)):
        with subtests.test(dtype=dtype, begin=begin.__name__):
            linear = nn.Linear(64, 64, dtype=dtype)
            with pytest.raises(ValueError, match="orthonormal_"):
                orthogonal_(linear, name)
            u, _, v = torch.linalg.svd(linear.weight.detach().double(), full_matrices=False)
            begin(linear.weight)
            if begin is orthonormal_:
                assert torch.equal(linear.weight, (u @ v).to(dtype))
            expected = linear.weight.clone()
            assert torch.equal(orthonormal_(linear.weight), expected)
            assert torch.equal(orthogonal_(linear, name).weight, expected)


# Steps along the manifold


@pytest.mark.parametrize("m, k", FRAMES)
def test_a_retraction_is_the_geodesic_of_the_canonical_metric(m, k):
    """exp(KWᵀ − WKᵀ) W with K = U − W WᵀU/2, of m×m matrices; and a tall W leaves its column space."""
    w, u = torch.linalg.qr(numbers(2, max(m, k), min(m, k))).Q, numbers(2, max(m, k), min(m, k))
    generator = u - w @ w.mT @ u / 2
    expected = torch.linalg.matrix_exp(generator @ w.mT - w @ generator.mT) @ w
    outside = (expected - w @ w.mT @ expected).norm()
    assert (outside > 0.1) == (m != k)
    if m < k:
        w, u, expected = w.mT, u.mT, expected.mT
    torch.testing.assert_close(retract(w, u), expected)
    assert gram_error(retract(w, 3 * u)) < 10 * ROUNDING
    torch.testing.assert_close(retract(w, -0.3 * w), w)  # decoupled weight decay moves nothing


def test_rounding_does_not_add_up():
    w = stiefel_uniform(67, 17, dtype=torch.float32)
    for _ in range(300):
        w = retract(w, 1e-3 * numbers(67, 17, dtype=torch.float32))
    assert gram_error(w) < float32_rounding(17)


# Models


def small(name="vit"):
    return create_model(name, image_size=4, patch_size=2, embed_dim=12, depth=2, num_heads=3, mlp_ratio=1)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("name", ["osa_exact", "vit"])
def test_a_constraint_holds_under_adamw_and_leaves_the_rest_free(name, constraint):
    model = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    constrain_(model, constraint, RETRACTION)
    stiefel = StiefelConstraint(model, constraint)
    if name == "osa_exact" and CONSTRAINTS[constraint].per_head:  # as Section 4 draws them
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    start, before = stiefel.weights(), {key: value.clone() for key, value in model.state_dict().items()}
    constrained = {id(weight) for weight in constrained_parameters(model, constraint)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    for _ in range(5):
        model(torch.randn(7, 1, 4, 4)).square().sum().backward()
        with stiefel.project_step():
            optimizer.step()
    for old, new in zip(start, stiefel.weights(), strict=True):
        assert gram_error(new) < float32_rounding(12) < 1e-3 < (new - old).norm()
    assert (before["blocks.0.mlp.fc1.weight"] - model.blocks[0].mlp.fc1.weight).norm() > 1e-3
    with stiefel.project_step(), torch.no_grad():  # writes the constrained parameters alone
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        for parameter in constrained_parameters(model, constraint):
            parameter.add_(torch.randn_like(parameter))
    moved = {id(parameter) for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == constrained and len(moved) == 2 * (4 if constraint == "attention" else 2)


def to_dtype(model):
    model.to(torch.float64)


def to_empty(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)


def to_other_parameters(model):
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def to_other_layers(model):
    for block in model.blocks:
        block.attention = copy.deepcopy(block.attention)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_constraint_follows_the_weights_of_its_model(constraint, subtests):
    """Weights have another storage once the model has moved to another device or type, or has been loaded."""
    for move in (to_dtype, to_empty, to_other_parameters, to_other_layers):
        with subtests.test(move=move.__name__):
            model = small()
            constrain_(model, constraint, RETRACTION)
            stiefel = StiefelConstraint(model, constraint)
            move(model)
            weights = constrained_parameters(model, constraint)
            optimizer = torch.optim.SGD(weights, lr=1.0)
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            start = stiefel.weights()
            with stiefel.project_step():
                optimizer.step()
            for old, new in zip(start, stiefel.weights(), strict=True):
                assert gram_error(new) < float32_rounding(12) < 1e-2 < (new - old).norm()


def test_a_constraint_that_cannot_write_is_refused():
    model = small()
    constrain_(model, "whole_value_out", "cayley")
    stiefel = StiefelConstraint(nn.DataParallel(model), "whole_value_out")  # a wrapper can be read
    assert max(map(gram_error, stiefel.weights())) < float32_rounding(12)
    for call in (lambda: stiefel.project_step().__enter__(), lambda: constrain_(model, "value_out", RETRACTION)):
        with pytest.raises(ValueError, match="value.weight to be an nn.Parameter"):
            call()
    for call in (constrained_parameters, StiefelConstraint, lambda *others: constrain_(*others, RETRACTION)):
        with pytest.raises(ValueError, match="'value' is unknown; choose one of value_out"):
            call(model, "value")
        with pytest.raises(ValueError, match="`blocks`.*Linear has none"):
            call(nn.Linear(2, 2), "value_out")


@every_map
def test_whole_matrices_of_a_model_can_be_parametrised(name):
    model = small()
    with pytest.raises(ValueError, match="whole matrices"):
        constrain_(model, "value_out", name)
    constrain_(model, "whole_key_value", name)
    for block in model.blocks:
        key, query = block.attention.key.weight, block.attention.query.weight
        assert gram_error(key) < 1e-5 < 0.1 < gram_error(query)
        assert block.attention.value.parametrizations.weight.original.shape == (66,)
    assert model(torch.randn(2, 1, 4, 4)).shape == (2, 10)


@pytest.mark.slow
def test_on_cuda_without_one():
    """Tensors that are nothing but their shape, type and device: none is left on the CPU, and no value is read."""
    skip_without_fake_draws()
    with FakeTensorMode(), torch.device("cuda"):
        x, model = torch.empty(2, 5, 5), create_model("vit")
        assert {function(*inputs).device.type for function in MAPS.values() for inputs in ([x], [x, x])} == {"cuda"}
        assert retract(x[..., :3], x[..., :3]).device.type == "cuda"
        for penalty in PENALTIES:
            assert with_penalty(model, torch.empty(2, 1, 28, 28), penalty)[1].device.type == "cuda"
