"""torch.compile against eager in one graph: values and gradients of all that has a backward pass of its own."""

from functools import partial

import pytest
import torch

import osa
from osa import compiled
from osa.constrained.orthogonal import MAPS
from osa.functional import orthogonal_attention
from osa.linalg import newton_schulz_gram, phi1_times
from osa.options import METHODS
from tests.osa.helpers import draw, with_gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch.compile itself does so
]


def attention_inputs(n, cancel=0.0):
    """Inputs of attention; with `cancel`, inputs for which "exact" needs a basis."""
    query, key, value = (x.detach() for x in draw(n, 3))
    key = key + cancel * key
    return [query + cancel * key @ torch.ones(3, 3).double(), key, value, torch.tensor(0.3).double()]


def symmetric(x):
    return x + x.mT


def attend(query, key, value, scale, method):
    return orthogonal_attention(query, key, value, scale=scale, method=method)


CASES = {
    **{method: (partial(attend, method=method), attention_inputs) for method in METHODS},
    "exact by a basis": (partial(attend, method="exact"), partial(attention_inputs, cancel=100)),
    **{name: (function, lambda _: torch.randn(2, 2, 5, 5, dtype=torch.float64)) for name, function in MAPS.items()},
    "phi1": (phi1_times, lambda n: [(x - x.mT).double() for x in torch.randn(2, 2, n, n) / n]),
    "newton_schulz_gram": (
        lambda x: symmetric(newton_schulz_gram(symmetric(x))),
        lambda n: [draw(n, n, batch=())[0][None] / n],
    ),
}

STATIC = {*MAPS, "qr_literal", "phi1"}  # whose trace of any size takes minutes


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_eager_ones_at_any_size(name):
    """One that writes to what it returns would lose its gradient without a word; attention is traced once for all N."""
    function, make = CASES[name]
    torch.compiler.reset()
    traced = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=name not in STATIC)
    for size in (11,) if name in STATIC else (11, 7):
        inputs = [x.detach().requires_grad_() for x in make(size)]
        cotangent = torch.randn_like(function(*inputs))
        with torch._dynamo.config.patch(error_on_recompile=size == 7):
            actual = with_gradients(traced, inputs, cotangent)
        exactly = dict(rtol=0, atol=0) if name.startswith("exact") else {}
        torch.testing.assert_close(actual, with_gradients(function, inputs, cotangent), **exactly)


def test_every_backward_pass_of_the_package_is_compared():
    """Backward passes of the attention are inside of its operator; kernels have tests of their own."""
    functions = {each for each in torch.autograd.Function.__subclasses__() if each.__module__.startswith("osa.")}
    names = {each.__name__ for each in functions if ".kernels" not in each.__module__}
    assert names == {"_ByGram", "_ByBasis", "_NewtonSchulzGram", "_Phi1Times", "_Givens", "_Cayley", "_Householder"}


def test_a_compiled_model_runs_attention_once_a_step_and_keeps_nothing(monkeypatch):
    """A compiled step does the work of an eager one. Autograd's tensors go with the graph; a lost graph is made again."""
    calls, plain = [], compiled.plain_attention
    monkeypatch.setattr(compiled, "plain_attention", lambda *arguments: calls.append(1) or plain(*arguments))
    torch.compiler.reset()
    model = osa.create_model("osa_exact", image_size=8, embed_dim=16, num_heads=2, depth=2).double()
    traced, images = torch.compile(model, backend="aot_eager", fullgraph=True), torch.rand(3, 1, 8, 8).double()
    expected = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
    for lose, runs in ((False, 2), (True, 4)):
        calls.clear()
        loss = traced(images).square().sum()
        if lose:
            compiled.GRAPHS.clear()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(gradients, expected)
        assert (len(calls), len(compiled.GRAPHS)) == (runs, 0)
    loss = traced(images).sum()
    assert len(compiled.GRAPHS) == 2
    del loss
    with torch.no_grad():
        traced(images)
    assert not compiled.GRAPHS


@pytest.mark.parametrize("method", sorted({*METHODS} - {"qr_literal"}))
def test_what_is_kept_lies_in_no_memory_of_the_program(method):
    inputs, cotangent, options = attention_inputs(11), torch.randn(2, 3, 11, 7).double(), (method, None, 1e-7)
    expected = compiled._gradients(*(x.clone() for x in inputs), torch.tensor(-1), cotangent, *options)
    _, number = compiled._operator(*inputs, *options, True)
    for x in inputs:
        x.zero_()  # as a buffer that is used again
    torch.testing.assert_close(compiled._gradients(*inputs, number, cotangent, *options), expected)
