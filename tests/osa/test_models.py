"""The models by name: their parts, how they start, and which options are refused. test_golden.py trains them."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import osa
from osa import MODELS, ModelConfig, build_vit, create_model
from tests.osa.helpers import REPRESENTATIVES, assert_uniform, skip_without_fake_draws

ROOT = Path(__file__).parents[2]
ORTHOGONAL = ["osa_qr", "osa_ns", "osa_exact", "osa_qr_literal"]  # the paper's two, and their function by other routes


def create(name, seed=0, **changes):
    return create_model(name, generator=torch.Generator().manual_seed(seed), **changes)


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


IMAGES = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_the_generator_and_nothing_else_sets_the_initial_weights(name):
    small = dict(patch_size=14, embed_dim=16, num_heads=2)
    state = torch.get_rng_state()
    first = weights(create(name, **small))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(create(name, **small)), first)
    assert not torch.equal(weights(create(name, seed=1, **small)), first)
    torch.manual_seed(0)  # the global stream is the default
    assert torch.equal(weights(create_model(name, **small)), first)


def test_orthogonal_models_start_by_section_4_from_the_same_weights():
    first, *others = (weights(create(name)) for name in ORTHOGONAL)
    assert all(torch.equal(other, first) for other in others)
    drawn = []
    for block in create("osa_qr", depth=2).blocks:
        attention = block.attention
        assert torch.equal(attention.alpha, torch.full((4,), 0.1))
        for i in range(4):
            head = slice(16 * i, 16 * (i + 1))  # nn.Linear keeps Wᵀ
            query_key = torch.cat([attention.query.weight[head], attention.key.weight[head]])
            for rows in (query_key, attention.value.weight[head], attention.out.weight[:, head].mT):
                torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)), rtol=0, atol=1e-6)
                drawn.append(rows[-16:])
    for pair in itertools.combinations(drawn, 2):  # neither copies nor blocks of one draw: angles between 0 and 90 degrees
        assert 0.3 < torch.linalg.svdvals(pair[0] @ pair[1].mT).max() < 0.999
    for transposed, wide, narrow in ((False, 4, 1), (True, 1, 4)):
        for block in create("osa_qr", suo_transposed=transposed).blocks:
            fc1, fc2 = block.mlp.fc1.weight, block.mlp.fc2.weight
            torch.testing.assert_close(fc1.mT @ fc1, wide * torch.eye(64), rtol=0, atol=1e-5)
            torch.testing.assert_close(fc2 @ fc2.mT, narrow * torch.eye(64), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation, depth", [("gelu", 1), ("dks_gelu", 5)])
@pytest.mark.parametrize("mlp_ratio", [1, 4])
def test_isometric_mlps_keep_the_mean_square_on_average(activation, depth, mlp_ratio):
    """Tokens with q = 1 keep it on average over draws of weights; the limit of wide layers differs by order 1/width."""
    options = dict(depth=depth, embed_dim=96, mlp_ratio=mlp_ratio, activation=activation, mlp_init="isometric")
    x = nn.functional.rms_norm(torch.randn(200, 96), (96,))
    ratios = [block.mlp(x).square().mean().item() for seed in range(30) for block in create("vit", seed, **options).blocks]
    deviation = torch.tensor(ratios).std().item() / math.sqrt(len(ratios))
    assert abs(sum(ratios) / len(ratios) - 1) < 5 * deviation + 0.02


def test_either_attention_by_the_others_initialisation():
    """The draws come in their order, with zero biases, and alpha as ever."""
    section_4, xavier = create("osa_exact").state_dict(), create("vit_noskip_nonorm").state_dict()
    softmax, orthogonal = create("vit_section_4").state_dict(), create("osa_xavier", alpha=0.3).state_dict()
    assert all(torch.equal(softmax[key], value) for key, value in section_4.items() if not key.endswith("alpha"))
    assert not any(value.any() for key, value in softmax.items() if key.endswith("bias"))
    for key, value in orthogonal.items():
        assert torch.equal(value, torch.full((4,), 0.3) if key.endswith("alpha") else xavier[key])
    for name, scale in {"vit_noskip_ji": 9.0, "vit_noskip_ji_nonorm": 1.0}.items():  # scaled where a norm follows alone
        attention = create(name).blocks[-1].attention
        product = attention.out.weight @ attention.value.weight
        torch.testing.assert_close(product @ product.mT, scale**2 * torch.eye(64), rtol=0, atol=1e-3)


def assert_xavier(*linears):
    """Each is uniform on ±√(6 / (in + out)) by its own shape."""
    for linear in linears:
        assert_uniform(linear.weight, math.sqrt(6 / sum(linear.weight.shape)))


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_embeddings_head_and_biases_start_alike_in_all_models(name):
    """Appendix D: N(0, σ²) on ±2σ for positions and [cls]; Xavier for the projections, which it leaves open."""
    model = create(name)
    embeddings = torch.cat([model.cls_token, model.position_embedding], dim=1)
    assert embeddings.shape == (1, 51, 64)
    assert 0.039 < embeddings.abs().max() <= 0.04
    ratio = embeddings.square().mean() / 0.02**2  # the variance of a normal truncated at ±2 is 0.7737
    assert abs(ratio - 0.7737) < 5 * 0.9 / math.sqrt(embeddings.numel())
    assert 0.02 < model.cls_token.abs().max()
    assert_xavier(model.patch_embedding, model.head)
    biases = {key: parameter for key, parameter in model.named_parameters() if key.endswith("bias")}
    assert not any(bias.any() for bias in biases.values())
    assert any("attention" in key for key in biases) == (MODELS[name]["attention"] == "softmax")
    for block in model.blocks if name == "vit" else ():
        attention = block.attention
        assert_xavier(attention.query, attention.key, attention.value, attention.out, block.mlp.fc1, block.mlp.fc2)


def test_what_cannot_be_read_or_exported_is_refused_with_a_remedy(monkeypatch):
    with pytest.raises(ValueError, match="uint8"):
        create("vit")(torch.zeros(2, 1, 28, 28, dtype=torch.uint8))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert create("osa_exact")(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match='method="exact"'):
        create("osa_qr")(torch.rand(2, 1, 28, 28))


def test_options_reach_every_layer():
    own = {name: create(name).blocks[-1].attention.options for name in ("osa_qr", "osa_exact")}
    assert [options["method"] for options in own.values()] == ["qr", "exact"]
    changed = create("osa_ns", num_iterations=3, epsilon=1e-3).blocks[0].attention.options
    assert changed == {"method": "newton_schulz", "num_iterations": 3, "epsilon": 1e-3}
    for part, other in itertools.permutations(("patch_embedding", "head")):
        model = create("osa_qr", **{part: "torch"})
        linear = getattr(model, part)
        assert_uniform(linear.weight, 1 / math.sqrt(linear.in_features))
        assert 0 < linear.bias.abs().max() <= 1 / math.sqrt(linear.in_features)
        assert_xavier(getattr(model, other))
    model = create("vit", norm_eps=0.5, activation="gelu_tanh", xavier_fused_qkv=True, head="zeros")
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {0.5}
    assert torch.equal(model(IMAGES), torch.zeros(3, 10))
    x = torch.linspace(-3, 3, 31)
    for block in model.blocks:
        assert torch.equal(block.mlp.activation(x), nn.functional.gelu(x, approximate="tanh"))
        for linear in (block.attention.query, block.attention.key, block.attention.value):
            assert_uniform(linear.weight, math.sqrt(6 / (64 + 3 * 64)))  # one draw with the fans of all three
        assert_xavier(block.attention.out)
    model = create("osa_qr", alpha=0.7, alpha_per_head=False, embedding_std=0.3)
    assert all(torch.equal(block.attention.alpha, torch.full((1,), 0.7)) for block in model.blocks)
    assert 0.55 < model.position_embedding.abs().max() <= 0.6


def test_numbers_of_any_type_are_kept_as_pythons_own():
    given = dict(alpha=np.float32(0.25), depth=np.int64(2), mlp_ratio=Fraction(5, 2), epsilon=0, num_iterations=np.int32(3))
    config = create("osa_ns", **given).config
    for name, value in given.items():
        assert type(getattr(config, name)) is (int if name in ("depth", "num_iterations") else float), name
        assert getattr(config, name) == value
    assert osa.ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


IMPORTED = """
import sys
import osa

osa.create_model("osa_qr", depth=1)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_creating_a_model_imports_no_compiler():
    assert subprocess.check_output([sys.executable, "-c", IMPORTED], cwd=ROOT, text=True) == "False\n"


def test_sizes():
    images = dict(image_size=33, patch_size=11, in_channels=3, num_classes=7)
    model = create("vit_noskip", **images, embed_dim=15, depth=2, num_heads=3, mlp_ratio=2.5)
    assert model(torch.rand(2, 3, 33, 33)).shape == (2, 7)
    assert len(model.blocks) == 2
    assert model.patch_embedding.weight.shape == (15, 3 * 11**2)
    assert model.blocks[0].mlp.fc1.weight.shape == (37, 15)
    assert model.blocks[0].attention.num_heads == 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("osa_ns", "vit") else pytest.mark.slow) for name in REPRESENTATIVES]
)
def test_forward_pass_on_cuda_without_one(name):
    """Tensors that are nothing but their shape, type and device: none is left on the CPU, and no value is read."""
    skip_without_fake_draws()
    with FakeTensorMode(), torch.device("cuda"):
        assert create_model(name)(torch.rand(3, 1, 28, 28)).device.type == "cuda"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # raised by checks of shapes
@pytest.mark.parametrize("name", ["vit", "osa_exact", "osa_ns", "espa"])
def test_a_trace_or_an_export_takes_batches_of_another_size(name):
    model = create(name, image_size=8, embed_dim=16, num_heads=2, depth=2 if name != "espa" else 5).double()
    few, more = (torch.rand(count, 1, 8, 8).double() for count in (2, 5))
    dynamic = [{0: torch.export.Dim("batch", min=2, max=64)}]
    for traced in (
        torch.jit.trace(model, few, check_trace=False),
        torch.export.export(model, (few,), dynamic_shapes=dynamic).module(),
    ):
        torch.testing.assert_close(traced(more), model(more), rtol=1e-9, atol=1e-9)


REFUSED = [  # more of these have a remedy, below
    ("espa", dict(attention_init="xavier"), "attention_init belongs to orthogonal or softmax"),
    ("vit", dict(depth=4, activation="dks_gelu"), "slope"),
    ("espa", dict(kernel="linear"), "kernel 'linear'.*uniform, exponential"),
    ("uspa", dict(kernel_last=0.03), "first <= last < 1"),  # below the tokens' own
    ("espa", dict(kernel_last=0.0), "kernel_last.*above 0"),
    ("vit", dict(normalised_skip=6.0), "normalised_skip 6.0.*depth 6"),
    ("osa_qr", dict(attention="softmax"), "method belongs to orthogonal"),
    ("osa_qr", dict(num_iterations=6), "num_iterations.*newton_schulz"),
    ("osa_ns", dict(num_iterations=0), "num_iterations.*1 or more"),
    ("osa_qr", dict(kernel="uniform"), "kernel belongs to signal_preserving"),
    ("vit", dict(num_heads=5), "num_heads.*embed_dim 64"),
    ("vit", dict(patch_size=5), "patch_size.*image_size 28"),
    ("vit", dict(depth=6.0), "depth"),
    ("vit", dict(depth=10**9), "depth.*1000 at most, not 1000000000"),
    ("vit", dict(embed_dim=2**40), "embed_dim.*16384 at most"),
    ("osa_qr", dict(alpha=10**400), "alpha.*finite"),
    ("vit", dict(image_size=(28, 56)), "image_size"),
    ("vit", dict(mlp_ratio=math.inf), "mlp_ratio"),
    ("vit", dict(embedding_std=0.0), "embedding_std.*above 0"),
    ("osa_qr", dict(alpha=math.nan), "alpha"),
    ("osa_ns", dict(epsilon=-1.0), "epsilon.*0 or more"),
    ("espa", dict(repeated=1.5), "repeated.*below 1"),  # more often than there are tokens
    ("resnet", {}, "resnet.*osa_qr.*vit"),
    ("vit", dict(dept=12), "dept.*depth"),
]


@pytest.mark.parametrize("name, changes, cause", REFUSED)
def test_impossible_options_are_refused(name, changes, cause):
    with pytest.raises(TypeError if "dept" in changes else ValueError, match=cause):
        create_model(name, **changes)


FOLLOWED = {  # a model, options that are refused, the word that names the remedy, and options that follow it
    "raise mlp_ratio": ("osa_iso", dict(mlp_ratio=0.5), "raise mlp_ratio", dict(mlp_ratio=1)),
    "2/embed_dim": ("vit", dict(embed_dim=49, num_heads=7, mlp_ratio=1 / 50), "2/embed_dim", dict(mlp_ratio=2 / 49)),
    "more heads": ("osa_qr", dict(num_heads=1), "2 or more heads", dict(num_heads=2)),
    "more layers": ("osa_shaped", dict(depth=4), "more layers", dict(depth=5)),
    "larger rate": ("espa_skip", dict(kernel_last=0.1), "larger rate", dict(kernel_last=0.9)),
    "rate at most": ("espa", dict(kernel_last=19.0), "12 at most", dict(kernel_last=12.0)),
    "lighter skip": ("espa_skip", dict(kernel="uniform", kernel_last=0.8), "smaller weight", dict(normalised_skip=5.9)),
    "leave it out": ("vit", dict(kernel="uniform"), "set it to None", dict(kernel=None)),
    "needs kernel": (
        "vit_noskip",
        dict(attention="signal_preserving"),
        "kernel_last",
        dict(kernel="uniform", kernel_last=0.5),
    ),
    "needs skip": ("vit_noskip", dict(normalised_skip=1.0), "needs skip=True", dict(skip=True)),
    "place of [cls]": ("espa", dict(cls_index=99), "cls_index must be from 0 to 4", dict(cls_index=4)),
}


@pytest.mark.parametrize("name, refused, word, followed", FOLLOWED.values(), ids=FOLLOWED)
def test_options_that_follow_what_is_said(name, refused, word, followed):
    options = dict(image_size=8, embed_dim=16, num_heads=2) | refused
    with pytest.raises(ValueError, match=word):
        create_model(name, **options)
    create_model(name, **options | followed)


def test_a_model_is_built_from_a_configuration_or_from_options_and_not_from_both():
    config = ModelConfig(**MODELS["osa_exact"], depth=2)
    model = build_vit(config, generator=torch.Generator().manual_seed(0))
    assert model.config is config and torch.equal(weights(model), weights(create("osa_exact", depth=2)))
    with pytest.raises(TypeError, match="leave out depth"):
        build_vit(config, depth=3)
