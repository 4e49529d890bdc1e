"""What the Vision Transformer computes: against the reference end to end, and against torchvision's."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer

import osa
from osa import reference
from tests.osa.helpers import relative_error

ORTHOGONAL = [name for name in osa.MODELS if name.startswith("osa")]
KNOWS_PLACES = [
    "espa",
    "espa_iso",
    "uspa_causal",
    "espa_causal",
    "espa_skip",
]  # whose attention is not blind to the order of tokens
SEES_NO_PATCH = ["vskipinit", "vskipinit_iso"]  # as initialised


def build(name):
    return osa.create_model(name, generator=torch.Generator().manual_seed(0))


def images(dtype=torch.float32):
    return torch.rand(3, 1, 28, 28, dtype=dtype)


@pytest.mark.parametrize("name", osa.MODELS)
def test_only_the_class_token_of_the_last_block_is_computed(name):
    """The same logits and gradients as from a last block that computes all of its tokens."""
    model = build(name).double()
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


@pytest.mark.parametrize("name", [name for name in osa.MODELS if name not in KNOWS_PLACES + SEES_NO_PATCH])
def test_patches_may_be_permuted_with_their_positions(name):
    """[cls] sees a set of patches with positions: only the positions tell their order."""
    model = build(name).double()
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
    if model.normalise_tokens:
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    for block in model.blocks:
        layer, shape = block.attention, block.mlp.activation
        a, b, c, e = dataclasses.astuple(shape) if dataclasses.is_dataclass(shape) else (1, 0, 1, 0)
        projections = [
            linear.weight.mT.unflatten(-1, (4, 16)).movedim(-2, 0) for linear in (layer.query, layer.key, layer.value)
        ]
        out = layer.out.weight.mT.unflatten(0, (4, 16))
        x = reference.multi_head_orthogonal_attention(x, *projections, out, layer.alpha, attention)
        hidden = x @ block.mlp.fc1.weight.mT + block.mlp.fc1.bias
        hidden = hidden * a + b
        hidden = c * (hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2 + e)  # GELU
        x = hidden @ block.mlp.fc2.weight.mT + block.mlp.fc2.bias
    return x[:, 0] @ model.head.weight.mT + model.head.bias


@pytest.mark.parametrize("name", ORTHOGONAL)
def test_orthogonal_models_match_the_reference_end_to_end(name):
    model = build(name).double()
    for block in model.blocks:  # as far from the identity as a trained model is
        nn.init.uniform_(block.attention.alpha, *((0.3, 0.6) if name not in ("osa_shaped", "osa_iso") else (0.03, 0.1)))
    for bias in [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]:
        nn.init.normal_(bias, std=0.1)
    batch = images(torch.float64)
    attention = reference.newton_schulz_attention if name == "osa_ns" else reference.orthogonal_attention
    actual, expected = model(batch), reference_logits(model, batch, attention)
    assert relative_error(actual, expected) < 1e-11
    cotangent = torch.randn_like(actual)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(actual, parameters, cotangent)
    for name, gradient, expected_gradient in zip(
        names, gradients, torch.autograd.grad(expected, parameters, cotangent), strict=True
    ):
        assert relative_error(gradient, expected_gradient) < 1e-10, name


def test_newton_schulz_is_another_function_of_the_same_weights():
    qr, exact, newton_schulz = (build(name).double() for name in ("osa_qr", "osa_exact", "osa_ns"))
    batch = images(torch.float64)
    assert relative_error(exact(batch), qr(batch)) < 1e-11
    assert relative_error(newton_schulz(batch), qr(batch)) > 1e-4


def tiny_vit(image_size, patch_size, in_channels=1):
    return osa.VisionTransformer(
        image_size=image_size,
        patch_size=patch_size,
        num_classes=11,
        embed_dim=15,
        depth=2,
        mlp_ratio=2,
        attention=lambda _: osa.SoftmaxSelfAttention(15, 3),
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


@pytest.mark.parametrize("name", ["osa_qr", "vit", "espa"])
def test_features_and_head_as_in_timm(name):
    model, batch = build(name), images()
    features = model.forward_features(batch)
    assert features.shape == (3, 50, model.num_features)
    torch.testing.assert_close(model.forward_head(features), model(batch), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])


def test_another_head():
    model, batch = build("osa_qr").double(), images(torch.float64)
    features = model.forward_features(batch)[:, 0]
    model.reset_classifier(3)
    assert (model(batch).shape, model.config.num_classes, model.head.weight.dtype) == ((3, 3), 3, torch.float64)
    model.reset_classifier(0)
    torch.testing.assert_close(model(batch), features)
    assert model.config.num_classes == 0
    assert osa.create_model("osa_qr", num_classes=0)(images()).shape == (3, 64)


@pytest.mark.parametrize("name", ["osa_qr", "vit", "espa"])
def test_gradients_with_checkpoints_are_those_without_and_keep_less(name):
    model, batch, kept, gradients = build(name), images(), {}, {}
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        kept[enable] = 0

        def count(tensor, enable=enable):
            kept[enable] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(batch).square().sum()
        gradients[enable] = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, gradients[True], gradients[False]))
    assert kept[True] < kept[False] / 3
