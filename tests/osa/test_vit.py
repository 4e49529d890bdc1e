"""The six models of params.yaml: what they compute, what they are made of, and how they start."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer

import osa
from osa import reference
from pipeline import params
from pipeline.train import build_model
from tests.osa.helpers import assert_uniform, relative_error

VARIANTS = ["osa_qr", "osa_ns", "osa_exact", "vit", "vit_noskip", "vit_noskip_nonorm"]
ORTHOGONAL = [name for name in VARIANTS if name.startswith("osa")]
SOFTMAX = [name for name in VARIANTS if name.startswith("vit")]

PARAMS = params.load(Path(__file__).parents[2] / "params.yaml")
APPENDIX_D = {  # so that an edit of params.yaml leaves these tests alone
    "model": dict(image_size=28, patch_size=4, num_classes=10, embed_dim=64, depth=6, num_heads=4, mlp_ratio=4),
    "init": dict(alpha=0.1, embedding_std=0.02, alpha_per_head=True, xavier_fused_qkv=False, suo_transposed=False)
    | dict(patch_embedding="xavier", head="xavier"),
}


def build(variant, seed=0):
    config = params.resolve(PARAMS, variant)
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in APPENDIX_D.items()}
    return build_model(config.model_copy(update=sections), seed)


def images(dtype=torch.float32):
    return torch.rand(3, 1, 28, 28, dtype=dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients(variant):
    model = build(variant)
    logits = model(images())
    assert logits.shape == (3, 10)
    assert logits.isfinite().all()
    nn.functional.cross_entropy(logits, torch.tensor([7, 0, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # Softmax is blind to a shift of its logits: the key bias has the gradient zero, up to rounding.
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_norm_is_where_the_paper_has_it(variant):
    norms = [name for name, module in build(variant).named_modules() if "Norm" in type(module).__name__]
    expected = [f"blocks.{i}.norm{k}" for i in range(6) for k in (1, 2)] + ["norm"]
    assert norms == (expected if variant in ("vit", "vit_noskip") else [])


@pytest.mark.parametrize("sublayer", ["attention.out", "mlp.fc2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_skip_connections_are_where_the_paper_has_them(variant, sublayer):
    """With the output weights of a sublayer at zero only a skip connection lets the input through."""
    x, other = torch.randn(2, 3, 50, 64)
    for block in build(variant).blocks:
        assert not torch.equal(block(x), block(other))
        nn.init.zeros_(block.get_submodule(sublayer).weight)
        assert torch.equal(block(x), block(other)) == (variant != "vit")


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_class_token_of_the_last_block_is_computed(variant):
    """The same logits and gradients as from a last block that computes all of its tokens."""
    model = build(variant).double()
    batch = images(torch.float64)
    x = model.tokens(batch)
    for block in model.blocks:
        assert block(x, num_outputs=1).shape == (3, 1, 64)
        x = block(x)
        assert x.shape == (3, 50, 64)
    actual, expected = model(batch), model.head(model.norm(x[:, 0]))
    assert relative_error(actual, expected) < 1e-12
    cotangent = torch.randn_like(actual)
    gradients = torch.autograd.grad(actual, list(model.parameters()), cotangent)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()), cotangent)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).norm() < 1e-12 * (1 + expected_gradient.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_patches_may_be_permuted_with_their_positions(variant):
    """[cls] sees a set of patches with positions: only the positions tell their order."""
    model = build(variant).double()
    batch = images(torch.float64)
    order = torch.randperm(49)
    patches = nn.functional.unfold(batch, kernel_size=4, stride=4)
    permuted = nn.functional.fold(patches[..., order], (28, 28), kernel_size=4, stride=4)
    logits = model(batch)
    assert relative_error(model(permuted), logits) > 1e-7
    with torch.no_grad():
        model.position_embedding[:, 1:] = model.position_embedding[:, 1:][:, order]
    assert relative_error(model(permuted), logits) < 1e-11


def reference_logits(model, batch, attention):
    """Eq. 1 to 5 and Appendix D written out: patches, positions, six skipless blocks, a linear layer on [cls]."""
    kernel = model.patch_embedding.weight.view(64, 1, 4, 4)
    patches = nn.functional.conv2d(batch, kernel, model.patch_embedding.bias, stride=4).flatten(2).mT
    x = torch.cat([model.cls_token.expand(len(batch), 1, 64), patches], dim=1) + model.position_embedding
    for block in model.blocks:
        layer = block.attention
        projections = [
            linear.weight.mT.unflatten(-1, (4, 16)).movedim(-2, 0) for linear in (layer.query, layer.key, layer.value)
        ]
        out = layer.out.weight.mT.unflatten(0, (4, 16))
        x = reference.multi_head_orthogonal_attention(x, *projections, out, layer.alpha, attention)
        hidden = x @ block.mlp.fc1.weight.mT + block.mlp.fc1.bias
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        x = hidden @ block.mlp.fc2.weight.mT + block.mlp.fc2.bias
    return x[:, 0] @ model.head.weight.mT + model.head.bias


@pytest.mark.parametrize("variant", ORTHOGONAL)
def test_orthogonal_models_match_the_reference_end_to_end(variant):
    model = build(variant).double()
    for block in model.blocks:  # as far from the identity as a trained model is
        nn.init.uniform_(block.attention.alpha, 0.3, 0.6)
    for bias in [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]:
        nn.init.normal_(bias, std=0.1)
    batch = images(torch.float64)
    attention = reference.newton_schulz_attention if variant == "osa_ns" else reference.orthogonal_attention
    actual, expected = model(batch), reference_logits(model, batch, attention)
    assert relative_error(actual, expected) < 1e-11
    cotangent = torch.randn_like(actual)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(actual, parameters, cotangent)
    for name, gradient, expected_gradient in zip(
        names, gradients, torch.autograd.grad(expected, parameters, cotangent), strict=True
    ):
        assert relative_error(gradient, expected_gradient) < 1e-10, name


def test_newton_schulz_starts_from_the_same_weights_and_is_another_function():
    qr, exact, newton_schulz = (build(variant).double() for variant in ("osa_qr", "osa_exact", "osa_ns"))
    for parameters in zip(*(model.parameters() for model in (qr, exact, newton_schulz)), strict=True):
        assert torch.equal(parameters[0], parameters[1]) and torch.equal(parameters[0], parameters[2])
    batch = images(torch.float64)
    assert relative_error(exact(batch), qr(batch)) < 1e-11
    assert relative_error(newton_schulz(batch), qr(batch)) > 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_seed_and_nothing_else_sets_the_initial_weights(variant):
    def weights(seed, global_seed):
        torch.manual_seed(global_seed)
        return nn.utils.parameters_to_vector(build(variant, seed).parameters())

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip(variant):
    model, other = build(variant, seed=0), build(variant, seed=1)
    batch = images()
    assert not torch.equal(model(batch), other(batch))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), other(batch))


@pytest.mark.parametrize("variant", ORTHOGONAL)
def test_orthogonal_models_start_by_section_4(variant):
    for block in build(variant).blocks:
        attention = block.attention
        assert torch.equal(attention.alpha, torch.full((4,), 0.1))
        for i in range(4):
            head = slice(16 * i, 16 * (i + 1))  # nn.Linear keeps Wᵀ
            query_key = torch.cat([attention.query.weight[head], attention.key.weight[head]])
            for rows in (query_key, attention.value.weight[head], attention.out.weight[:, head].mT):
                torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)), rtol=0, atol=1e-6)
        wide, narrow = block.mlp.fc1.weight, block.mlp.fc2.weight
        torch.testing.assert_close(wide.mT @ wide, 4 * torch.eye(64), rtol=0, atol=1e-5)
        torch.testing.assert_close(narrow @ narrow.mT, torch.eye(64), rtol=0, atol=1e-5)


def assert_xavier(*weights):
    """Each is uniform on ±√(6 / (in + out)) by its own shape."""
    for weight in weights:
        assert_uniform(weight, math.sqrt(6 / sum(weight.shape)))


@pytest.mark.parametrize("variant", SOFTMAX)
def test_softmax_models_start_by_xavier(variant):
    for block in build(variant).blocks:
        attention = block.attention
        assert_xavier(*(linear.weight for linear in (attention.query, attention.key, attention.value, attention.out)))
        assert_xavier(block.mlp.fc1.weight, block.mlp.fc2.weight)


@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_and_head_start_alike_in_all_models(variant):
    """Appendix D: N(0, σ²) on ±2σ for positions and [cls]; Xavier for the projections, which it leaves open."""
    model = build(variant)
    embeddings = torch.cat([model.cls_token, model.position_embedding], dim=1)
    assert embeddings.shape == (1, 51, 64)
    assert 0.039 < embeddings.abs().max() <= 0.04
    ratio = embeddings.square().mean() / 0.02**2  # the variance of a normal truncated at ±2 is 0.7737
    assert abs(ratio - 0.7737) < 5 * 0.9 / math.sqrt(embeddings.numel())
    assert 0.02 < model.cls_token.abs().max()
    assert_xavier(model.patch_embedding.weight, model.head.weight)


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_biases_start_at_zero(variant):
    biases = {name: parameter for name, parameter in build(variant).named_parameters() if name.endswith("bias")}
    assert not any(bias.abs().max() for bias in biases.values())
    in_attention = any("attention" in name for name in biases)
    assert in_attention == (variant in SOFTMAX)


def tiny_vit(image_size, patch_size, in_channels=1):
    return osa.VisionTransformer(
        image_size=image_size,
        patch_size=patch_size,
        num_classes=11,
        embed_dim=15,
        depth=2,
        mlp_ratio=2,
        attention=lambda: osa.SoftmaxSelfAttention(15, 3),
        skip=True,
        norm=True,
        in_channels=in_channels,
    )


def tiny_torchvision_vit():
    return TorchvisionTransformer(
        image_size=14, patch_size=7, num_layers=2, num_heads=3, hidden_dim=15, mlp_dim=30, num_classes=11
    )


def copy_weights(theirs, ours):
    """From torchvision's ViT into ours; its query, key and value are one matrix, its patch embedding a convolution."""
    names = {"ln_1": "norm1", "ln_2": "norm2", "self_attention.out_proj": "attention.out"}
    names |= {"mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"}
    state = {
        "patch_embedding.weight": theirs.conv_proj.weight.flatten(1),
        "patch_embedding.bias": theirs.conv_proj.bias,
        "cls_token": theirs.class_token,
        "position_embedding": theirs.encoder.pos_embedding,
    }
    for end, (source, target) in [(end, pair) for end in ("weight", "bias") for pair in names.items()]:
        for i, layer in enumerate(theirs.encoder.layers):
            state[f"blocks.{i}.{target}.{end}"] = getattr(layer.get_submodule(source), end)
    for i, layer in enumerate(theirs.encoder.layers):
        for end in ("weight", "bias"):
            stacked = getattr(layer.self_attention, f"in_proj_{end}")
            for name, part in zip(("query", "key", "value"), stacked.chunk(3), strict=True):
                state[f"blocks.{i}.attention.{name}.{end}"] = part
    for end in ("weight", "bias"):
        state[f"norm.{end}"] = getattr(theirs.encoder.ln, end)
        state[f"head.{end}"] = getattr(theirs.heads.head, end)
    ours.load_state_dict(state)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_vit_equals_torchvisions(dtype, tolerance):
    """Logits and their derivative by the image, with every weight drawn anew."""
    theirs = tiny_torchvision_vit().to(dtype)
    ours = tiny_vit(14, 7, in_channels=3).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    copy_weights(theirs, ours)
    batch = torch.rand(5, 3, 14, 14, dtype=dtype, requires_grad=True)
    expected, actual = theirs(batch), ours(batch)
    assert relative_error(actual, expected) < tolerance
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(logits, batch, cotangent)[0] for logits in (actual, expected)]
    assert relative_error(*gradients) < tolerance


def test_layer_norm_has_torchvisions_epsilon():
    """Visible in the logits only where a token hardly varies, so compared as it stands."""
    ours, theirs = (
        {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
        for model in (build("vit"), tiny_torchvision_vit())
    )
    assert ours == theirs


def test_patch_size_must_divide_the_image():
    with pytest.raises(ValueError, match="patch_size.*image_size"):
        tiny_vit(image_size=28, patch_size=5)
