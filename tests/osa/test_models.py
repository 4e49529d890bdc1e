"""The models by name: what they are made of, that they learn, how they start, and which options are refused."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from osa import MODELS, build_vit, create_model
from tests.osa.helpers import assert_uniform

PLAIN = list(MODELS)[:7]  # the paper's, and its function by other routes
SHAPED = list(MODELS)[7:]
ORTHOGONAL = [name for name in PLAIN if name.startswith("osa")]
SOFTMAX = [name for name in PLAIN if name.startswith("vit")]


def create(name, seed=0, **changes):
    return create_model(name, generator=torch.Generator().manual_seed(seed), **changes)


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def images(count=3, size=28, channels=1):
    return torch.rand(count, channels, size, size)


def test_names():
    paper = ["osa_qr", "osa_ns", "vit", "vit_noskip", "vit_noskip_nonorm"]
    assert PLAIN == [*paper, "osa_exact", "osa_qr_literal"]
    shaped = ["osa_shaped", "softmax_shaped", "softmax_shaped_norm", "vskipinit", "uspa", "espa", "uspa_causal"]
    shaped += ["espa_causal", "espa_skip", "softmax_skip", "softmax_skip_nonorm"]
    isometric = ["osa_iso", "softmax_iso", "espa_iso", "uspa_iso", "vskipinit_iso"]
    assert SHAPED == [*shaped, *isometric, "vit_section_4", "osa_xavier", "vit_noskip_ji", "vit_noskip_ji_nonorm"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    model = create(name)
    for parameter in model.parameters():  # away from the zeros that block gradients at first
        parameter.data += 0.01 * torch.randn_like(parameter)
    batch = images()
    logits = model(batch)
    assert logits.shape == (3, 10)
    assert logits.isfinite().all()
    nn.functional.cross_entropy(logits, torch.tensor([7, 0, 3])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key
        # Softmax is blind to a shift of its logits: the key bias has the gradient zero, up to rounding.
        assert parameter.grad.abs().max() > 0 or key.endswith("key.bias"), key


@pytest.mark.parametrize("name", MODELS)
def test_layer_norm_is_where_the_paper_has_it(name):
    norms = {key: module for key, module in create(name).named_modules() if isinstance(module, nn.LayerNorm)}
    expected = [f"blocks.{i}.norm{k}" for i in range(6) for k in (1, 2)] + ["norm"]
    assert list(norms) == (expected if MODELS[name]["norm"] else [])
    for norm in norms.values():
        assert torch.equal(norm.weight, torch.ones(64)) and torch.equal(norm.bias, torch.zeros(64))


@pytest.mark.parametrize("sublayer", ["attention.out", "mlp.fc2"])
@pytest.mark.parametrize("name", MODELS)
def test_skip_connections_are_where_the_paper_has_them(name, sublayer):
    """With the output weights of a sublayer at zero only a skip connection lets the input through."""
    x, other = torch.randn(2, 3, 50, 64)
    with_skip = ("vit", "espa_skip", "softmax_skip", "softmax_skip_nonorm")
    for block in create(name).blocks:
        assert not torch.equal(block(x), block(other))
        nn.init.zeros_(block.get_submodule(sublayer).weight)
        assert torch.equal(block(x), block(other)) == (name not in with_skip)


@pytest.mark.parametrize("name", MODELS)
def test_the_generator_and_nothing_else_sets_the_initial_weights(name):
    state = torch.get_rng_state()
    first = weights(create(name))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(create(name)), first)
    assert not torch.equal(weights(create(name, seed=1)), first)


@pytest.mark.parametrize("name", ["osa_qr", "vit"])
def test_without_a_generator_the_global_stream_sets_them(name):
    torch.manual_seed(0)
    first = weights(create_model(name))
    assert torch.equal(first, weights(create(name, seed=0)))
    assert not torch.equal(first, weights(create_model(name)))


def test_the_orthogonal_models_start_from_the_same_weights():
    first, *others = (weights(create(name)) for name in ORTHOGONAL)
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_orthogonal_models_start_by_section_4(name):
    for block in create(name).blocks:
        attention = block.attention
        assert torch.equal(attention.alpha, torch.full((4,), 0.1))
        for i in range(4):
            head = slice(16 * i, 16 * (i + 1))  # nn.Linear keeps Wᵀ
            query_key = torch.cat([attention.query.weight[head], attention.key.weight[head]])
            for rows in (query_key, attention.value.weight[head], attention.out.weight[:, head].mT):
                torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)), rtol=0, atol=1e-6)


def gain(linear):
    """Mean square of the layer's outputs over that of its inputs."""
    x = torch.randn(2000, linear.in_features)
    return (linear(x).square().mean() / x.square().mean()).item()


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_every_mlp_layer_alone_keeps_the_mean_square(name):
    """Section 4.4. In an MLP as a whole the factors √4 and √¼ of the transposed reading would cancel."""
    for block in create(name).blocks:
        assert gain(block.mlp.fc1) == pytest.approx(1, abs=1e-5)  # exactly, as it widens
        assert gain(block.mlp.fc2) == pytest.approx(1, abs=0.02)  # on average


def test_suo_transposed_moves_the_factor_to_the_layer_that_narrows():
    for block in create("osa_qr", suo_transposed=True).blocks:
        assert gain(block.mlp.fc1) == pytest.approx(1 / 4, abs=1e-5)
        assert gain(block.mlp.fc2) == pytest.approx(4, abs=0.08)


@pytest.mark.parametrize("name", ["osa_iso", "softmax_iso", "espa_iso", "uspa_iso", "vskipinit_iso"])
def test_isometric_models_differ_from_the_shaped_ones_in_their_mlps_alone(name):
    shaped = {"osa_iso": "osa_shaped", "softmax_iso": "softmax_shaped"}.get(name, name.removesuffix("_iso"))
    assert MODELS[name] == MODELS[shaped] | {"mlp_init": "isometric"}
    for block in create(name).blocks:
        product = block.mlp.fc2.weight @ block.mlp.fc1.weight
        scale = product.square().sum().div(64).sqrt().item()
        torch.testing.assert_close(product @ product.mT, scale**2 * torch.eye(64), rtol=0, atol=1e-5)
        assert 1 < scale < 1.3  # g: six blocks' DKS takes more than the linear part


@pytest.mark.parametrize("activation, depth", [("gelu", 1), ("dks_gelu", 5), ("tat_leaky_relu", 13)])
@pytest.mark.parametrize("mlp_ratio", [1, 4])
def test_isometric_mlps_keep_the_mean_square_on_average(activation, depth, mlp_ratio):
    """Of tokens with q = 1, over draws of the weights; the limit of wide layers differs by the order of 1/width."""
    options = dict(depth=depth, embed_dim=96, mlp_ratio=mlp_ratio, activation=activation, mlp_init="isometric")
    x = nn.functional.rms_norm(torch.randn(200, 96), (96,))
    ratios = [block.mlp(x).square().mean().item() for seed in range(30) for block in create("vit", seed, **options).blocks]
    deviation = torch.tensor(ratios).std().item() / math.sqrt(len(ratios))
    assert abs(sum(ratios) / len(ratios) - 1) < 5 * deviation + 0.02


def test_softmax_attention_by_section_4():
    """The draws of orthogonal attention, in their order, and zero biases."""
    softmax, orthogonal = create("vit_section_4").state_dict(), create("osa_exact").state_dict()
    assert all(torch.equal(softmax[key], value) for key, value in orthogonal.items() if not key.endswith("alpha"))
    assert not any(value.any() for key, value in softmax.items() if key.endswith("bias"))


@pytest.mark.parametrize("name, scale", [("vit_noskip_ji", 9.0), ("vit_noskip_ji_nonorm", 1.0)])
def test_jis_attention_is_scaled_where_a_norm_follows_alone(name, scale):
    model = create(name)
    for block in model.blocks:
        product = block.attention.out.weight @ block.attention.value.weight
        torch.testing.assert_close(product @ product.mT, scale**2 * torch.eye(64), rtol=0, atol=1e-3)


def test_orthogonal_attention_by_xavier():
    """The draws of softmax attention, in their order, and alpha as ever."""
    softmax, orthogonal = create("vit_noskip_nonorm").state_dict(), create("osa_xavier", alpha=0.3).state_dict()
    for key, value in orthogonal.items():
        assert torch.equal(value, torch.full((4,), 0.3) if key.endswith("alpha") else softmax[key])


def assert_xavier(*linears):
    """Each is uniform on ±√(6 / (in + out)) by its own shape."""
    for linear in linears:
        assert_uniform(linear.weight, math.sqrt(6 / sum(linear.weight.shape)))


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_models_start_by_xavier(name):
    for block in create(name).blocks:
        attention = block.attention
        assert_xavier(attention.query, attention.key, attention.value, attention.out, block.mlp.fc1, block.mlp.fc2)


def test_fused_query_key_and_value_have_a_smaller_bound():
    for block in create("vit", xavier_fused_qkv=True).blocks:
        attention = block.attention
        for linear in (attention.query, attention.key, attention.value):
            assert_uniform(linear.weight, math.sqrt(6 / (64 + 3 * 64)))
        assert_xavier(attention.out)


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_head_start_alike_in_all_models(name):
    """Appendix D: N(0, σ²) on ±2σ for positions and [cls]; Xavier for the projections, which it leaves open."""
    model = create(name)
    embeddings = torch.cat([model.cls_token, model.position_embedding], dim=1)
    assert embeddings.shape == (1, 51, 64)
    assert 0.039 < embeddings.abs().max() <= 0.04
    ratio = embeddings.square().mean() / 0.02**2  # the variance of a normal truncated at ±2 is 0.7737
    assert abs(ratio - 0.7737) < 5 * 0.9 / math.sqrt(embeddings.numel())
    assert 0.02 < model.cls_token.abs().max()
    assert_xavier(model.patch_embedding, model.head)


@pytest.mark.parametrize("name", MODELS)
def test_all_biases_start_at_zero(name):
    biases = {key: parameter for key, parameter in create(name).named_parameters() if key.endswith("bias")}
    assert not any(bias.any() for bias in biases.values())
    assert any("attention" in key for key in biases) == (MODELS[name]["attention"] == "softmax")


@pytest.mark.parametrize("part", ["patch_embedding", "head"])
def test_a_projection_by_pytorchs_default(part):
    model = create("osa_qr", **{part: "torch"})
    linear = getattr(model, part)
    bound = 1 / math.sqrt(linear.in_features)
    assert_uniform(linear.weight, bound)
    assert 0 < linear.bias.abs().max() <= bound
    assert_xavier(model.head if part == "patch_embedding" else model.patch_embedding)


def test_softmax_attention_without_biases_of_query_key_and_value():
    model = create("vit", qkv_bias=False)
    for block in model.blocks:
        attention = block.attention
        assert attention.query.bias is attention.key.bias is attention.value.bias is None
        assert attention.out.bias is not None
    expected = create("vit")  # whose biases are zero and take no draw
    assert torch.equal(model(images().fill_(0.3)), expected(images().fill_(0.3)))
    model(images()).sum().backward()


def test_biases_of_the_mlps_are_drawn():
    model = create("vit", mlp_bias_std=0.3)
    biases = torch.cat([linear.bias for block in model.blocks for linear in (block.mlp.fc1, block.mlp.fc2)])
    assert biases.std().item() == pytest.approx(0.3, rel=0.1)
    assert abs(biases.mean()) < 5 * 0.3 / math.sqrt(len(biases))


def test_norm_eps_and_the_approximate_gelu_reach_every_layer():
    model = create("vit", norm_eps=0.5, activation="gelu_tanh")
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {0.5}
    x = torch.linspace(-3, 3, 31)
    for block in model.blocks:
        assert torch.equal(block.mlp.activation(x), nn.functional.gelu(x, approximate="tanh"))


def test_a_head_of_zeros_tells_no_class_from_another():
    model = create("osa_qr", head="zeros")
    assert torch.equal(model(images()), torch.zeros(3, 10))


def test_alpha_and_embedding_std():
    model = create("osa_qr", alpha=0.7, alpha_per_head=False, embedding_std=0.3)
    assert all(torch.equal(block.attention.alpha, torch.full((1,), 0.7)) for block in model.blocks)
    assert 0.55 < model.position_embedding.abs().max() <= 0.6


def test_options_of_the_method_reach_every_layer():
    for name, expected in {"osa_qr": ("qr", None), "osa_ns": ("newton_schulz", 6), "osa_exact": ("exact", None)}.items():
        for block in create(name).blocks:
            options = block.attention.options
            assert (options["method"], options["num_iterations"]) == expected
            assert options["epsilon"] == 1e-7
    changed = create("osa_ns", num_iterations=3, epsilon=1e-3).blocks[0].attention.options
    assert changed == {"method": "newton_schulz", "num_iterations": 3, "epsilon": 1e-3}


def test_sizes():
    sizes = dict(
        image_size=33, patch_size=11, in_channels=3, num_classes=7, embed_dim=15, depth=2, num_heads=3, mlp_ratio=2.5
    )
    model = create("vit_noskip", **sizes)
    assert model(images(2, 33, 3)).shape == (2, 7)
    assert len(model.blocks) == 2
    assert model.patch_embedding.weight.shape == (15, 3 * 11**2)
    assert model.blocks[0].mlp.fc1.weight.shape == (37, 15)
    assert model.blocks[0].attention.num_heads == 3


def test_changes_replace_a_models_own_options():
    options = dict(attention="softmax", skip=True, norm=False, mlp_init="suo", depth=1)
    mixed = create("vit", norm=False, mlp_init="suo", depth=1)
    assert torch.equal(weights(mixed), weights(build_vit(**options, generator=torch.Generator().manual_seed(0))))
    assert MODELS["vit"]["norm"]


@pytest.mark.parametrize("name", MODELS)
def test_forward_pass_on_cuda_without_one(name):
    """Tensors that are nothing but their shape, type and device: none is left on the CPU, and no value is read."""
    with FakeTensorMode(), torch.device("cuda"):
        assert create_model(name)(images()).device.type == "cuda"


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the shapes' checks
@pytest.mark.parametrize("name", ["vit", "osa_exact", "osa_ns", "espa"])
def test_a_trace_or_an_export_takes_batches_of_another_size(name):
    model = create(name, image_size=8, embed_dim=16, num_heads=2, depth=2 if name != "espa" else 5).double()
    few, more = (images(count, 8).double() for count in (2, 5))
    dynamic = [{0: torch.export.Dim("batch", min=2, max=64)}]
    for traced in (
        torch.jit.trace(model, few, check_trace=False),
        torch.export.export(model, (few,), dynamic_shapes=dynamic).module(),
    ):
        torch.testing.assert_close(traced(more), model(more), rtol=1e-9, atol=1e-9)


def test_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert {parameter.dtype for parameter in create("vit", depth=1).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'resnet'") as error:
        create_model("resnet")
    assert all(name in str(error.value) for name in MODELS)


REFUSED = {  # beside those of test_remedies.py
    "attention_init of E-SPA": ("espa", dict(attention_init="xavier"), "attention_init belongs to orthogonal or softmax"),
    "few blocks for TAT": ("vskipinit", dict(activation="tat_leaky_relu"), "6 leaky ReLUs take a cosine of 0 to 0.777"),
    "kernel": ("espa", dict(kernel="linear"), "kernel 'linear'.*uniform, exponential"),
    "rho": ("uspa", dict(kernel_last=1.0), "first <= last < 1"),
    "rho below the tokens' own": ("uspa", dict(kernel_last=0.03), "first <= last < 1, not 0.04 and 0.03"),
    "gamma": ("espa", dict(kernel_last=0.0), "kernel_last.*above 0"),
    "skip that is no truth value": ("vit", dict(skip="yes"), "skip"),
    "weight of a skip": ("vit", dict(normalised_skip=6.0), "normalised_skip 6.0.*depth 6"),
    "repeated tokens beside a skip": ("espa_skip", dict(repeated=0.04), "repeated 0"),
    "method of softmax": ("osa_qr", dict(attention="softmax"), "method belongs to orthogonal"),
    "iterations of softmax": ("vit", dict(num_iterations=6), "num_iterations belongs to orthogonal"),
    "iterations of qr": ("osa_qr", dict(num_iterations=6), "num_iterations.*newton_schulz"),
    "no iterations": ("osa_ns", dict(num_iterations=0), "num_iterations.*1 or more"),
    "epsilon of softmax": ("vit", dict(epsilon=1e-7), "epsilon belongs to orthogonal"),
    "heads": ("vit", dict(num_heads=5), "num_heads 5 must divide embed_dim 64"),
    "no heads": ("vit", dict(num_heads=0), "num_heads must be a whole number, 1"),
    "patches": ("vit", dict(patch_size=5), "patch_size 5 must divide image_size 28"),
    "no patches": ("vit", dict(patch_size=0), "patch_size must be a whole number, 1"),
    "no classes": ("vit", dict(num_classes=-1), "num_classes must be a whole number, 0"),
    "depth": ("vit", dict(depth=0), "depth must be a whole number, 1"),
    "depth, on which shapes depend": ("espa", dict(depth=0), "depth must be a whole number, 1"),
    "no deviation": ("vit", dict(embedding_std=0.0), "embedding_std.*above 0"),
    "image_size of two sides": ("vit", dict(image_size=(28, 56)), "image_size"),
    "image_size of a float": ("vit", dict(image_size=28.0), "image_size"),
    "depth of a float": ("vit", dict(depth=6.0), "depth"),
    "infinite mlp_ratio": ("vit", dict(mlp_ratio=math.inf), "mlp_ratio"),
    "infinite embedding_std": ("vit", dict(embedding_std=math.inf), "embedding_std"),
    "no alpha_times_depth": ("osa_shaped", dict(alpha_times_depth=math.nan), "alpha_times_depth"),
    "norm_eps": ("vit", dict(norm_eps=0.0), "norm_eps"),
    "mlp_bias_std": ("vit", dict(mlp_bias_std=-1e-6), "mlp_bias_std"),
    "qkv_bias of orthogonal attention": ("osa_qr", dict(qkv_bias=True), "qkv_bias belongs to softmax"),
    "alpha": ("osa_qr", dict(alpha=math.nan), "alpha"),
    "epsilon": ("osa_ns", dict(epsilon=-1.0), "epsilon.*0 or more"),
    "tokens repeated more often than there are": ("espa", dict(repeated=1.5), "repeated.*below 1"),
}


def test_an_unknown_option_is_named_with_the_nearest_one():
    with pytest.raises(TypeError, match="dept.*did you mean depth"):
        create_model("vit", dept=12)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_its_configuration_builds(name):
    model = create(name)
    again = build_vit(**dataclasses.asdict(model.config), generator=torch.Generator().manual_seed(0))
    assert torch.equal(weights(again), weights(model))
    assert MODELS[name].items() <= dataclasses.asdict(model.config).items()


@pytest.mark.parametrize("name, changes, message", REFUSED.values(), ids=REFUSED)
def test_impossible_options_are_refused_in_a_sentence(name, changes, message):
    with pytest.raises(ValueError, match=message):
        create_model(name, **changes)
