"""Any module in the place of a layer is called: subclasses, wrappers, patched forwards, hooks, quantised weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import osa
from osa.shaped.layers import SignalPreservingSelfAttention, ValueSkipInitSelfAttention
from tests.osa.helpers import relative_error

WIDTH, HEADS, TOKENS = 12, 3, 7
IMAGE = dict(image_size=6, patch_size=3, embed_dim=WIDTH, num_heads=HEADS, depth=2)  # 5 tokens
MODULES = {
    "orthogonal": lambda: osa.OrthogonalSelfAttention(WIDTH, HEADS, alpha_init=0.7),
    "softmax": lambda: osa.SoftmaxSelfAttention(WIDTH, HEADS),
    "value_skipinit": lambda: ValueSkipInitSelfAttention(WIDTH, HEADS),
    "signal_preserving": lambda: SignalPreservingSelfAttention(WIDTH, HEADS, torch.full((TOKENS, TOKENS), 1 / TOKENS)),
    "mlp": lambda: osa.MLP(WIDTH, 17),
    "block": lambda: osa.Block(
        osa.OrthogonalSelfAttention(WIDTH, HEADS), osa.MLP(WIDTH, 17), embed_dim=WIDTH, skip=True, norm=True
    ),
    "osa_exact": lambda: osa.create_model("osa_exact", **IMAGE),
    "vit": lambda: osa.create_model("vit", **IMAGE),
}


class Doubled(nn.Module):
    """An adapter around a layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.factor = base, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, *inputs):
        return self.factor * self.base(*inputs)


def wrapped(layer):
    adapter = Doubled(layer)
    return adapter, adapter.factor


def subclassed(layer):
    """A subclass, as loralib's Linear is of nn.Linear."""

    class Adapted(type(layer)):
        def forward(self, *inputs):
            return self.factor * super().forward(*inputs)

    adapter = copy.deepcopy(layer)
    adapter.__class__, adapter.factor = Adapted, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    return adapter, adapter.factor


def patched(layer):
    """A patched forward, as accelerate and some quantisers have it."""
    factor, forward = nn.Parameter(torch.tensor(2.0, dtype=torch.float64)), layer.forward
    layer.forward = lambda *inputs: factor * forward(*inputs)
    return layer, factor


def hooked(layer):
    factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    layer.register_forward_hook(lambda module, inputs, output: factor * output)
    return layer, factor


def replace(module, path, make):
    parent, _, name = path.rpartition(".")
    layer, factor = make(module.get_submodule(path))
    setattr(module.get_submodule(parent), name, layer)
    return factor


def draw(name):
    """A module with weights of which none is at a special value, and what goes into it."""
    module = MODULES[name]().double().eval()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    shape = (2, 1, 6, 6) if name in osa.MODELS else (2, TOKENS, WIDTH)
    return module, torch.randn(shape, dtype=torch.float64)


WAYS = (wrapped, subclassed, patched, hooked)
QUICK = [(name, make) for name in MODULES for make in WAYS if make is wrapped or name not in osa.MODELS]


@pytest.mark.parametrize(
    "name, make",
    [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in itertools.product(MODULES, WAYS)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_layer_is_called(name, make):
    """Doubling a layer's output does what doubled weights do, and learns."""
    module, x = draw(name)
    leaves = [path for path, layer in module.named_modules() if not list(layer.children())]
    assert len(leaves) == {"mlp": 2, "block": 8, "osa_exact": 19, "vit": 19}.get(name, 4)
    for path in leaves:
        expected, actual = copy.deepcopy(module), copy.deepcopy(module)
        parameters = list(expected.get_submodule(path).parameters())
        for parameter in parameters:
            parameter.data *= 2
        factor = replace(actual, path, make)
        output = actual(x)
        if parameters:  # a norm that is left out has none
            assert relative_error(output, expected(x)) < 1e-12, path
        assert relative_error(output, module(x)) > 1e-4, path
        (gradient,) = torch.autograd.grad(output.square().sum(), factor)
        assert gradient.abs() > 1e-8, path


@pytest.mark.parametrize("name", ["orthogonal", "softmax", "osa_exact"])
def test_all_layers_at_once_and_pre_hooks_are_called(name):
    module, x = draw(name)
    expected = copy.deepcopy(module)
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    for layer in linears:
        layer.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
    for layer in expected.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 2
    assert relative_error(module(x), expected(x)) < 1e-12


@pytest.mark.parametrize("biased", [("query",), ("query", "value"), ("key",)])
def test_some_projections_may_have_a_bias(biased):
    """BEiT and Whisper have such biases."""
    layer, x = draw("orthogonal")
    full = copy.deepcopy(layer)
    for part in ("query", "key", "value"):
        bias = torch.randn(WIDTH, dtype=torch.float64) * (part in biased)
        getattr(full, part).bias = nn.Parameter(bias)
        if part in biased:
            getattr(layer, part).bias = nn.Parameter(bias.clone())
    assert relative_error(layer(x), full(x)) < 1e-12


class Quantised(torch.Tensor):
    """A weight as torchao's: it knows linear layers, and not how to be concatenated."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight):
        self.scale = weight.abs().amax(dim=-1, keepdim=True) / 127
        self.levels = (weight / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), options=None):
        if function is nn.functional.linear:
            x, weight, *bias = arguments
            return nn.functional.linear(x, weight.levels * weight.scale, *bias)
        return super().__torch_function__(function, kinds, arguments, options or {})

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError(f"{function} is not implemented for quantised weights")


@pytest.mark.parametrize("parts", [("query", "key", "value", "out"), ("key",)])
def test_weights_of_a_subclass_are_left_to_their_layer(parts):
    layer, x = draw("softmax")
    rounded = copy.deepcopy(layer)
    for part in parts:
        weight = Quantised(getattr(layer, part).weight.detach())
        getattr(layer, part).weight = nn.Parameter(weight, requires_grad=False)
        getattr(rounded, part).weight.data = weight.levels * weight.scale
    assert relative_error(layer(x), rounded(x)) < 1e-12


def test_what_torch_makes_of_a_weight_is_used_after_each_step():
    """Pruned weights are made by a hook before the layer runs, parametrised ones when they are read."""
    for change in (
        lambda linear: prune.l1_unstructured(linear, "weight", amount=0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ):
        layer, x = draw("orthogonal")
        change(layer.value)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        before = layer(x)
        for _ in range(2):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        assert relative_error(layer(x), before) > 1e-3


def test_layers_of_other_sizes_and_types_are_not_one_product():
    layer, x = draw("orthogonal")
    wide = copy.deepcopy(layer)
    for part, width in (("query", 24), ("key", 24)):
        setattr(wide, part, nn.Linear(WIDTH, width, bias=False, dtype=torch.float64))
    assert [head.shape[-1] for head in wide.project(x)] == [8, 8, 4] and wide(x).shape == x.shape
    layer.float().query.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16


def test_the_three_of_the_paper_stay_one_product(monkeypatch):
    """Parametrised weights, and weights that a function provides, stay one product too."""
    calls = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *x: calls.append(len(x[1])) or linear(*x))
    for name in ("orthogonal", "softmax"):
        layer, x = draw(name)
        layer(x)
        parametrizations.weight_norm(layer.key)
        layer(x)
        torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
        assert calls == [3 * WIDTH, WIDTH] * 3
        calls.clear()


def test_a_head_is_replaced_whatever_stands_for_the_patches():
    model, x = draw("vit")
    model.patch_embedding = Doubled(model.patch_embedding)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3) and model.head.weight.dtype == torch.float64
