"""Bad inputs of functions, layers and models get one sentence, with the argument's name and a remedy that works."""

import math

import numpy as np
import pytest
import torch

import osa
from osa import orthogonal_attention
from osa.functional import orthogonal_attention_matrix
from osa.options import METHODS
from tests.osa.helpers import draw, relative_error

QUERY, KEY, VALUE = (x.detach() for x in draw(11, 4, dtype=torch.float32))
META = VALUE.to("meta")

REFUSED = {  # arguments in the place of others, the error, and what it says
    "an array": (dict(query=QUERY.numpy()), TypeError, "query.*not ndarray.*torch.as_tensor"),
    "an array of keys": (dict(key=KEY.numpy(), enable_gqa=True), TypeError, "key.*not ndarray"),
    "a list": (dict(value=VALUE.tolist()), TypeError, "value.*not list"),
    "whole numbers": (dict(query=QUERY.long()), ValueError, r"query.*not torch.int64.*float\(\)"),
    "complex numbers": (dict(value=VALUE + 0j), ValueError, "value.*not torch.complex64"),
    "8 bits": (dict(key=KEY.to(torch.float8_e4m3fn)), ValueError, "key.*not torch.float8"),
    "one dimension": (dict(query=QUERY[0, 0, 0]), ValueError, "two dimensions"),
    "two devices": (dict(value=META), ValueError, "one device, not cpu and meta"),
    "a large scale": (dict(scale=1e40), ValueError, r"scale.*fits in torch.float32, not 1e\+40"),
    "no scale": (dict(scale=math.nan), ValueError, "scale.*nan"),
    "an infinite scale": (dict(scale=-math.inf), ValueError, "scale.*-inf"),
    "an imaginary scale": (dict(scale=1j), TypeError, "scale.*real number.*1j"),
    "imaginary scales": (dict(scale=torch.ones(3, 1, 1) * 1j), TypeError, "scale.*real"),
    "a word": (dict(scale="0.1"), TypeError, "scale.*'0.1'"),
    "an array of scales": (dict(scale=np.ones((3, 1, 1))), TypeError, "scale.*tensor"),
    "a scale on another device": (dict(scale=torch.ones(3, 1, 1, device="meta")), ValueError, "scale.*cpu.*meta"),
    "dropout below 0": (dict(dropout_p=-1), ValueError, "dropout_p must be 0, not -1"),
    "no dropout": (dict(dropout_p=math.nan), ValueError, "dropout_p must be 0, not nan"),
    "a mask as array": (dict(attn_mask=np.ones((1, 11), bool)), TypeError, "attn_mask.*not ndarray.*torch.as_tensor"),
    "a mask of other batches": (
        dict(attn_mask=torch.ones(5, 1, 1, 11, dtype=torch.bool)),
        ValueError,
        r"batch dimensions of attn_mask.*\(5, 1\) and \(2, 3\)",
    ),
    "a mask on another device": (
        dict(attn_mask=torch.ones(1, 11, dtype=torch.bool, device="meta")),
        ValueError,
        "attn_mask.*cpu.*meta",
    ),
    "half an iteration": (dict(method="newton_schulz", num_iterations=2.5), ValueError, "num_iterations.*whole.*2.5"),
    "iterations as a word": (dict(method="polar_express", num_iterations="6"), ValueError, "num_iterations.*'6'"),
    "iterations of exact": (dict(num_iterations=6), ValueError, "num_iterations belongs to newton_schulz.*leave it out"),
    "a negative epsilon": (dict(method="newton_schulz", epsilon=-1.0), ValueError, "epsilon.*0 or more, not -1.0"),
    "no epsilon": (dict(method="newton_schulz", epsilon=math.nan), ValueError, "epsilon.*nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(case):
    changes, error, cause = REFUSED[case]
    with pytest.raises(error, match=cause):
        orthogonal_attention(**dict(query=QUERY, key=KEY, value=VALUE) | changes)
    if changes.keys() <= {"query", "key", "scale", "method", "epsilon", "num_iterations"}:
        with pytest.raises(error):
            orthogonal_attention_matrix(**dict(query=QUERY, key=KEY) | changes)


@pytest.mark.parametrize("method", METHODS)
def test_the_remedies_work(method):
    expected = orthogonal_attention(QUERY, KEY, VALUE, scale=0.5, method=method)
    arrays = (torch.as_tensor(x) for x in (QUERY.numpy(), KEY.numpy(), VALUE.numpy()))
    assert torch.equal(orthogonal_attention(*arrays, scale=0.5, method=method), expected)
    for scale in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5), torch.tensor([[[0.5]]] * 3)):
        assert torch.equal(orthogonal_attention(QUERY, KEY, VALUE, scale=scale, method=method), expected)
    low = KEY.to(torch.float8_e4m3fn).float()
    assert relative_error(orthogonal_attention(QUERY, low, VALUE, scale=1, method=method), VALUE) > 0.1
    wide = (x.double() for x in (1e-20 * QUERY.double(), 1e-20 * KEY.double(), VALUE))
    if method in ("exact", "qr"):  # the float64 of which holds more
        assert relative_error(orthogonal_attention(*wide, scale=0.5e40, method=method), expected) < 1e-5


EMPTY = {  # shapes of query and key, and the width of the value
    "no tokens": ((2, 3, 0, 4), 7),
    "no batch": ((0, 3, 5, 4), 7),
    "no heads": ((2, 0, 5, 4), 7),
    "no width": ((2, 3, 5, 0), 7),
    "no values": ((2, 3, 5, 4), 0),
    "nothing": ((0, 0, 0, 0), 0),
}


def assert_taken(attend, case, **options):
    """Output and gradients of empty inputs have their shapes, with a mask and with repeated heads, too."""
    shape, value_width = EMPTY[case]
    mask = torch.ones(shape[0], 1, 1, shape[2], dtype=torch.bool)
    for others in ({}, dict(attn_mask=mask), dict(enable_gqa=True)):
        inputs = [torch.randn(*shape[:-1], width, requires_grad=True) for width in (shape[-1], shape[-1], value_width)]
        output = attend(*inputs, **options, **others)
        assert output.shape == inputs[2].shape
        output.sum().backward()
        assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


@pytest.mark.parametrize("case", EMPTY)
def test_empty_inputs_are_taken_by_every_route(case):
    for method in METHODS:
        assert_taken(orthogonal_attention, case, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_empty_inputs_are_taken_by_compiled_routes(method):
    """Each kind by "exact", as the compiled operator of all methods but "qr_literal" does not look at the method."""
    for case in EMPTY if method in ("exact", "qr_literal") else ["nothing"]:
        assert_taken(torch.compile(orthogonal_attention, backend="aot_eager", dynamic=False), case, method=method)
        torch.compiler.reset()


@pytest.mark.slow
def test_a_single_token_is_taken_by_the_compiled_operator():
    """The gradients of query and key are two parts of one tensor, contiguous both here."""
    inputs = [torch.randn(1, 1, 1, 4, requires_grad=True) for _ in range(3)]
    torch.compile(orthogonal_attention, backend="aot_eager", fullgraph=True)(*inputs).sum().backward()
    torch.testing.assert_close(inputs[2].grad, torch.ones(1, 1, 1, 4))
    assert all(x.grad.abs().max() < 1e-5 for x in inputs[:2])  # S is 0


def test_layers_and_models_take_empty_inputs():
    mask = {shape: torch.ones(shape[:-1], dtype=torch.bool) for shape in ((0, 5, 12), (2, 0, 12), (0, 12))}
    for layer in (osa.OrthogonalSelfAttention(12, 3), osa.SoftmaxSelfAttention(12, 3)):
        for shape, keep in mask.items():
            x = torch.randn(shape, requires_grad=True)
            outputs = layer(x), layer(x, attn_mask=keep)
            sum(y.sum() for y in outputs).backward()
            assert {y.shape for y in outputs} == {x.shape} == {x.grad.shape}
    assert osa.create_model("osa_exact", depth=1)(torch.rand(0, 1, 28, 28)).shape == (0, 10)


def test_keys_of_no_heads_repeat_for_no_heads():
    query, key = torch.randn(2, 4, 5, 3), torch.randn(2, 0, 5, 3)
    assert orthogonal_attention(key, key, key, enable_gqa=True).shape == key.shape
    with pytest.raises(ValueError, match="divide the query's 4 heads, but is 0"):
        orthogonal_attention(query, key, key, enable_gqa=True)


LAYERS = {
    "alpha": (lambda: osa.OrthogonalSelfAttention(12, 3, alpha_init=math.nan), ValueError, "alpha_init.*finite.*nan"),
    "epsilon": (
        lambda: osa.OrthogonalSelfAttention(12, 3, method="newton_schulz", epsilon=-1e-7),
        ValueError,
        "epsilon.*-1e-07",
    ),
    "shortcut": (
        lambda: osa.Block(torch.nn.Identity(), torch.nn.Identity(), embed_dim=4, skip=True, norm=False, shortcut=1.5),
        ValueError,
        r"shortcut must be in \[0, 1\], not 1.5",
    ),
    "tokens as array": (lambda: osa.OrthogonalSelfAttention(12, 3)(np.ones((2, 12))), TypeError, "tokens.*ndarray"),
    "numbers of words": (
        lambda: osa.SoftmaxSelfAttention(12, 3)(torch.ones(2, 5, 12, dtype=torch.long)),
        ValueError,
        "tokens.*floating-point.*int64",
    ),
    "images as array": (lambda: osa.create_model("vit", depth=1)(np.ones((1, 1, 28, 28))), TypeError, "images.*ndarray"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_and_models(case):
    call, error, cause = LAYERS[case]
    with pytest.raises(error, match=cause):
        call()


@pytest.mark.parametrize(
    "name, cause",
    [
        ("osa_qrr", r"^model 'osa_qrr' is unknown; did you mean osa_qr\?$"),
        ("OSA_exact", r"did you mean osa_exact\?"),
        ("vit_no_skip", r"did you mean vit_noskip\?"),
        ("resnet", "choose one of osa_qr, osa_ns, vit"),
        ("", "'' is unknown; choose one of osa_qr"),
    ],
)
def test_names_of_models(name, cause, tmp_path):
    with pytest.raises(ValueError, match=cause):
        osa.create_model(name)
    pytest.importorskip("safetensors")
    with pytest.raises(ValueError, match=cause):
        osa.load_pretrained(tmp_path, name=name)
