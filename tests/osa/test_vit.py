"""The Vision Transformer against the reference end to end, and against its own parts."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import osa
from osa import reference
from tests.osa.helpers import relative_error

MODELS = {  # name → has skip connections and norms
    "osa_qr": (False, False),
    "osa_ns": (False, False),
    "vit": (True, True),
    "vit_noskip": (False, True),
    "vit_noskip_nonorm": (False, False),
    "osa_exact": (False, False),
    "osa_iso": (False, False),
    "softmax_skip_nonorm": (True, False),
}


def build(name):
    return osa.create_model(name, generator=torch.Generator().manual_seed(0))


def images(dtype=torch.float32):
    return torch.rand(3, 1, 28, 28, dtype=dtype)


def reference_logits(model, name, batch):
    """Eq. 1 to 5 and Appendix D written out: patches, positions, six blocks of all tokens, a linear layer on [cls]."""
    has_skip, has_norm = MODELS[name]

    def norm(layer, x):
        return nn.functional.layer_norm(x, (64,), layer.weight, layer.bias, 1e-6) if has_norm else x

    def join(x, y, alpha):
        x = x if has_skip else 0 * x
        return x + y if alpha is None else alpha * x + math.sqrt(1 - alpha**2) * y

    attention = reference.newton_schulz_attention if name == "osa_ns" else reference.orthogonal_attention
    kernel = model.patch_embedding.weight.view(64, 1, 4, 4)
    patches = nn.functional.conv2d(batch, kernel, model.patch_embedding.bias, stride=4).flatten(2).mT
    x = torch.cat([model.cls_token.expand(len(batch), 1, 64), patches], dim=1) + model.position_embedding
    if model.normalise_tokens:
        x = x / x.square().mean(-1, keepdim=True).sqrt()
    for block in model.blocks:
        layer, shape = block.attention, block.mlp.activation
        a, b, c, e = dataclasses.astuple(shape) if dataclasses.is_dataclass(shape) else (1, 0, 1, 0)
        projections = (layer.query, layer.key, layer.value)
        if hasattr(layer, "alpha"):
            weights = [linear.weight.mT.unflatten(-1, (4, 16)).movedim(-2, 0) for linear in projections]
            weights.append(layer.out.weight.mT.unflatten(0, (4, 16)))
            y = reference.multi_head_orthogonal_attention(norm(block.norm1, x), *weights, layer.alpha, attention)
        else:
            heads = (norm(block.norm1, x) @ each.weight.mT + each.bias for each in projections)
            query, key, value = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in heads)
            heads = torch.softmax(query @ key.mT / 4, dim=-1) @ value  # (B, h, N, d_v)
            y = heads.transpose(1, 2).flatten(2) @ layer.out.weight.mT + layer.out.bias
        x = join(x, y, block.shortcut)
        hidden = norm(block.norm2, x) @ block.mlp.fc1.weight.mT + block.mlp.fc1.bias
        hidden = hidden * a + b
        hidden = c * (hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2 + e)  # GELU
        x = join(x, hidden @ block.mlp.fc2.weight.mT + block.mlp.fc2.bias, block.shortcut)
    return norm(model.norm, x[:, 0]) @ model.head.weight.mT + model.head.bias


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("osa_ns", "osa_iso", "vit") else pytest.mark.slow) for name in MODELS],
)
def test_models_match_the_reference_end_to_end(name):
    model = build(name).double()
    for key, parameter in model.named_parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # away from the structure of the initialisation
        if key.endswith("alpha"):  # as far from the identity as a trained model is
            nn.init.uniform_(parameter, *((0.3, 0.6) if name != "osa_iso" else (0.03, 0.1)))
        elif key.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    batch = images(torch.float64)
    actual, expected = model(batch), reference_logits(model, name, batch)
    assert relative_error(actual, expected) < 1e-11
    cotangent = torch.randn_like(actual)
    parameters = dict(model.named_parameters())
    gradients = (torch.autograd.grad(logits, parameters.values(), cotangent) for logits in (actual, expected))
    for key, gradient, expected_gradient in zip(parameters, *gradients, strict=True):
        if name.startswith("osa"):
            assert relative_error(gradient, expected_gradient) < 1e-10, key
        else:  # softmax is blind to the key bias, and without skips the gradients of query and key all but vanish
            assert (gradient - expected_gradient).norm() < 1e-11 * (1 + expected_gradient.norm()), key


@pytest.mark.parametrize("name", ["osa_qr", "vit", "espa"])
def test_features_and_heads_as_in_timm(name):
    model, batch = build(name).double(), images(torch.float64)
    features = model.forward_features(batch)
    assert features.shape == (3, 50, model.num_features)
    torch.testing.assert_close(model.forward_head(features), model(batch))
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])
    model.reset_classifier(3)
    assert (model(batch).shape, model.config.num_classes, model.head.weight.dtype) == ((3, 3), 3, torch.float64)
    model.reset_classifier(0)
    torch.testing.assert_close(model(batch), features[:, 0])
    assert model.config.num_classes == 0 and osa.create_model(name, num_classes=0)(images()).shape == (3, 64)


def block_outputs(model, batch):
    outputs = []
    hooks = [block.register_forward_hook(lambda *given: outputs.append(given[2])) for block in model.blocks]
    features = model.forward_features(batch)
    for hook in hooks:
        hook.remove()
    return features, outputs


@pytest.mark.parametrize("name", ["osa_qr", "vit"])
def test_intermediates_as_in_timm(name):
    model, batch = build(name).eval(), images()
    features, outputs = block_outputs(model, batch)
    x, patches = model.forward_intermediates(batch)
    assert torch.equal(x, features) and len(patches) == 6
    for y, output in zip(patches, outputs, strict=True):
        assert y.shape == (3, 64, 7, 7) and torch.equal(y[1, :, 2, 3], output[1, 1 + 2 * 7 + 3])
    for indices, numbers in {2: [4, 5], (0, -1): [0, 5], (-2, 1): [1, 4], (3,): [3]}.items():
        pairs = model.forward_intermediates(
            batch, list(indices) if isinstance(indices, tuple) else indices, True, output_fmt="NLC", intermediates_only=True
        )
        for (y, cls_token), number in zip(pairs, numbers, strict=True):
            assert torch.equal(torch.cat([cls_token, y], dim=1), outputs[number])
    runs = []
    model.blocks[3].register_forward_hook(lambda *_: runs.append(3))
    x, (_, last) = model.forward_intermediates(batch, [0, 2], norm=True, stop_early=True, output_fmt="NLC")
    assert not runs and torch.equal(x, model.norm(outputs[2])) and torch.equal(last, model.norm(outputs[2])[:, 1:])
    parts = model.forward_intermediates(batch, 1, True, output_dict=True)
    assert torch.equal(parts["image_features"], features) and torch.equal(
        parts["image_intermediates_prefix"][0], outputs[5][:, :1]
    )
    assert parts["image_intermediates"][0].shape == (3, 64, 7, 7)
    only = model.forward_intermediates(batch, 1, intermediates_only=True, output_dict=True)
    assert only.keys() == {"image_intermediates"}
    for wrong in (0, 7, [6], [-7], []):
        with pytest.raises(ValueError, match=r"indices.*6 blocks"):
            model.forward_intermediates(batch, wrong)
    with pytest.raises(ValueError, match='"NCHW" or "NLC"'):
        model.forward_intermediates(batch, output_fmt="NHWC")


@pytest.mark.parametrize("name", ["osa_qr", "vit", "espa"])
def test_gradients_with_checkpoints_are_those_without_and_keep_less(name):
    model, batch, kept, gradients = build(name), images(), [], []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            loss = model(batch).square().sum()
        kept.append(sum(sizes))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients)) and kept[1] < kept[0] / 3
