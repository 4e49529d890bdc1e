"""Our attention in other libraries, where they are installed: the code of docs/library.md, and what it promises."""

import copy
import inspect
import io
import itertools
import math
import pickle
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import osa
from osa import integrations, orthogonal_attention
from tests.osa.helpers import relative_error

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of the packages are not ours


@pytest.mark.parametrize("package, size", [("timm", 224), ("transformers", 224), ("torchvision", 32)])
def test_the_pages_model_trains_ten_steps(package, size):
    pytest.importorskip(package)
    assert len(re.findall(r"^.*\S", SNIPPETS[package], re.MULTILINE)) <= 8
    names, losses = {}, []
    exec(compile(SNIPPETS[package], "docs/library.md", "exec"), names)
    images, target = torch.randn(1, 3, size, size), torch.randn(10)
    parameters = dict(names["vit"].train().named_parameters())
    projections = ("attn.qkv.weight", "q_proj.weight", "query.weight")
    weight = next(each for name, each in parameters.items() if name.endswith(projections))
    optimizer, before = torch.optim.AdamW(parameters.values(), lr=1e-3), weight.detach().clone()
    for _ in range(10):
        outputs = names["vit"](images)
        outputs = getattr(outputs, "last_hidden_state", outputs)[..., :10]
        loss = (outputs.reshape(-1, 10)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and not torch.equal(weight, before)


def test_the_pages_encoder_of_torch_leaves_padding_out():
    names = {}
    exec(compile(SNIPPETS["torch"], "docs/library.md", "exec"), names)
    encoder, x = names["encoder"].eval(), torch.randn(2, 50, 64)
    assert names["outputs"].shape == (2, 50, 64)
    padded = encoder(x, src_key_padding_mask=names["padding"])
    assert relative_error(padded[1, :33], encoder(x[1:, :33])[0]) < 1e-5
    assert relative_error(padded[1, :33], encoder(x)[1, :33]) > 1e-4


def test_the_pages_lines_for_the_hub_bring_a_model_there_and_back(tmp_path, monkeypatch):
    """The Hub is a folder here; the calls are checked against the library's own signatures."""
    hub = pytest.importorskip("huggingface_hub")

    def called(function, act):
        signature = inspect.signature(function)
        return lambda *args, **options: act(**signature.bind(*args, **options).arguments)

    acts = dict(
        create_repo=lambda repo_id: (tmp_path / repo_id).mkdir(parents=True),
        upload_folder=lambda repo_id, folder_path: shutil.copytree(folder_path, tmp_path / repo_id, dirs_exist_ok=True),
        snapshot_download=lambda repo_id: str(tmp_path / repo_id),
    )
    for name, act in acts.items():
        monkeypatch.setattr(hub, name, called(getattr(hub, name), act))
    monkeypatch.chdir(tmp_path)
    model, images = osa.create_model("osa_exact", depth=1).eval(), torch.randn(2, 1, 28, 28)
    osa.save_pretrained(model, "my_model")
    names = {"osa": osa}
    exec(compile(SNIPPETS["huggingface_hub"], "docs/library.md", "exec"), names)
    assert torch.equal(names["model"](images), model(images))


PRINTED = """
import pickle, sys, torch

print(pickle.load(sys.stdin.buffer)(torch.ones(1, 3, 16, 16)).sum().item())
"""


def run(package, folder):
    names = {}
    exec(compile(SNIPPETS[package].replace('"merged"', repr(str(folder))), "docs/library.md", "exec"), names)
    return names


def test_weights_of_torchao_are_used(tmp_path):
    torchao = pytest.importorskip("torchao")
    names = run("torchao", tmp_path)
    model, images = names["model"], torch.randn(2, 1, 28, 28)
    assert names["logits"].shape == (8, 10)
    exact, layer = osa.create_model("osa_exact"), model.blocks[0].attention
    for name, parameter in model.named_parameters():
        weight = parameter.dequantize() if isinstance(parameter, torchao.utils.TorchAOBaseTensor) else parameter
        assert (type(parameter) is torch.nn.Parameter) == (not name.endswith("weight")), name
        exact.get_parameter(name).data.copy_(weight)
    assert relative_error(model(images), exact(images)) < 1e-5
    weights = [part.weight.dequantize() for part in (layer.query, layer.key, layer.value)]
    x = torch.randn(2, 5, 64)
    for head, weight in zip(layer.project(x), weights, strict=True):
        assert relative_error(head.transpose(1, 2).flatten(2), x @ weight.mT) < 1e-6
    with pytest.raises(ValueError, match=r"torch\.save"):
        osa.save_pretrained(model, tmp_path / "a")


def test_adapters_of_peft_learn_and_are_saved_once_they_are_merged(tmp_path):
    peft = pytest.importorskip("peft")
    names = run("peft", tmp_path / "merged")
    assert names["logits"].shape == (8, 10)
    model = peft.get_peft_model(osa.create_model("osa_exact"), names["lora"])
    images = torch.randn(2, 1, 28, 28)
    before, optimizer = model(images).detach(), torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    adapters = [parameter for name, parameter in model.named_parameters() if "lora" in name]
    assert len(adapters) == 24 and all(parameter.grad.any() for parameter in adapters)
    after = model(images)
    assert relative_error(after, before) > 1e-3
    with pytest.raises(ValueError, match="merge adapters"):
        osa.save_pretrained(model.base_model.model, tmp_path / "a")
    osa.save_pretrained(model.merge_and_unload(), tmp_path / "a")
    assert relative_error(osa.load_pretrained(tmp_path / "a")(images), after) < 1e-5


def timm_vit(**options):
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=16, patch_size=8, num_classes=7, depth=2)
    return timm.create_model("vit_tiny_patch16_224", **sizes, **options)


def test_timms_attention_is_ours_with_timms_weights():
    pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = timm_vit(attn_layer=integrations.timm_attention(method="qr", alpha_init=0.75), qk_norm=True)
    missing = ours.load_state_dict(timm_vit(qk_norm=True).state_dict(), strict=False)
    assert missing.missing_keys == ["blocks.0.attn.alpha", "blocks.1.attn.alpha"] and not missing.unexpected_keys
    layer, x = ours.blocks[0].attn.double(), torch.randn(2, 5, 192, dtype=torch.float64)
    query, key, value = layer.qkv(x).unflatten(-1, (3, 3, 64)).movedim((2, 3), (0, 2))
    heads = orthogonal_attention(layer.q_norm(query), layer.k_norm(key), value, scale=0.75 / 8, method="qr")
    assert relative_error(layer(x), layer.proj(heads.transpose(1, 2).flatten(2))) < 1e-9
    images = torch.randn(2, 3, 16, 16)
    ours.float()(images).sum().backward()
    assert all(block.attn.alpha.grad.abs().min() > 0 for block in ours.blocks)
    model = timm_vit(attn_layer=integrations.timm_attention(), attn_drop_rate=0.1)  # refused in training
    assert model.eval()(images).shape == (2, 7)
    with pytest.raises(ValueError, match="dropout_p"):
        model.train()(images)


def test_intermediates_are_given_as_timms_are():
    """The same calls give the same kinds, shapes and keys, and fail alike."""
    timm = pytest.importorskip("timm")
    sizes = dict(img_size=28, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=3, num_heads=4)
    theirs = timm.models.vision_transformer.VisionTransformer(**sizes).eval()
    ours, x = osa.create_model("vit", depth=3).eval(), torch.randn(2, 1, 28, 28)
    values = dict(
        indices=[None, 1, 3, [0], [2, 0], [-1]],
        return_prefix_tokens=[False, True],
        norm=[False, True],
        stop_early=[False, True],
        output_fmt=["NCHW", "NLC"],
        intermediates_only=[False, True],
        output_dict=[False, True],
    )
    for choice in itertools.product(*values.values()):
        arguments = dict(zip(values, choice, strict=True))
        ours_flat, theirs_flat = (tree_flatten(model.forward_intermediates(x, **arguments)) for model in (ours, theirs))
        assert [y.shape for y in ours_flat[0]] == [y.shape for y in theirs_flat[0]] and ours_flat[1] == theirs_flat[1], (
            arguments
        )
    for wrong in (dict(indices=4), dict(indices=[3]), dict(output_fmt="NHWC")):
        for model, error in ((ours, ValueError), (theirs, AssertionError)):
            with pytest.raises(error):
                model.forward_intermediates(x, **wrong)


def test_timms_models_are_pickled_and_copied_with_their_attention():
    """Pickling works in one process and between two: classes made by a call have no name that pickle could look up."""
    timm = pytest.importorskip("timm")
    settings = dict(method="newton_schulz", num_iterations=5, epsilon=1e-3, alpha_init=0.75)
    layer = integrations.timm_attention(**settings)
    assert layer is integrations.timm_attention(**settings) is not integrations.timm_attention()
    model, images = timm_vit(attn_layer=layer).eval(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for other in copies:
        assert type(other.blocks[0].attn) is layer and torch.equal(other(images), expected)
        other.blocks[0].attn.alpha.data.zero_()
    assert torch.equal(model(images), expected)
    plain = timm.layers.Attention(192, 3)
    printed = subprocess.run([sys.executable, "-c", PRINTED], input=pickle.dumps(model), capture_output=True, cwd=ROOT)
    assert float(printed.stdout) == pytest.approx(model(torch.ones(1, 3, 16, 16)).sum().item(), rel=1e-5), printed.stderr
    with pytest.raises(RuntimeError, match="alpha"):
        layer(192, 3).load_state_dict(plain.state_dict())

    class Derived(layer):  # a class of one's own is found by its own name, or not at all
        pass

    with pytest.raises((pickle.PicklingError, AttributeError), match="Derived"):
        pickle.dumps(Derived(192, 3))
    assert type(copy.deepcopy(Derived(192, 3))) is Derived


@pytest.mark.parametrize("part", ["qkv", "q_norm", "k_norm", "norm", "gate", "proj", "proj_drop"])
def test_every_layer_of_timms_attention_is_called(part):
    timm = pytest.importorskip("timm")
    made = integrations.timm_attention(alpha_init=2.0)
    layer = made(16, 2, qk_norm=True, scale_norm=True, gated=True, norm_layer=torch.nn.LayerNorm)
    x, factor, inner = torch.randn(2, 5, 16), torch.nn.Parameter(torch.tensor(2.0)), layer.get_submodule(part)
    assert isinstance(layer, timm.layers.Attention)
    before = layer(x)
    setattr(layer, part, torch.nn.Sequential(inner, Scaled(factor)))
    output = layer(x)
    output.square().sum().backward()
    assert relative_error(output, before) > 1e-3 and factor.grad.abs() > 1e-6
    layer.attn_drop = torch.nn.Sequential(torch.nn.Dropout(0.1))  # would act on a matrix that is not there
    with pytest.raises(ValueError, match="attn_drop must be nn.Dropout"):
        layer(x)


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x.sin()


def bert(name=None):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=50)
    torch.manual_seed(0)
    return with_attention(transformers.BertModel(transformers.BertConfig(**sizes)).eval(), name)


def with_attention(model, name):
    """The model with the attention registered as `name`, or as it is."""
    if name is not None:
        integrations.set_attention(model, name)
    return model


def test_berts_padding_is_left_out():
    pytest.importorskip("transformers")
    integrations.register_with_transformers("osa_test", alpha=2.0)
    model = bert("osa_test")
    words, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        padded = model(words, attention_mask=mask).last_hidden_state
        assert relative_error(padded[1, :5], model(words[1:, :5]).last_hidden_state[0]) < 1e-5
        assert relative_error(padded[1, :5], model(words).last_hidden_state[1, :5]) > 1e-3  # it reads the padding
        assert relative_error(padded, bert()(words, attention_mask=mask).last_hidden_state) > 1e-3


def test_a_causal_model_is_refused():
    transformers = pytest.importorskip("transformers")
    integrations.register_with_transformers("osa_test")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=50)
    config = transformers.LlamaConfig(**sizes, intermediate_size=64)
    for mask in (None, torch.tensor([[1, 1, 1, 0, 0]])):
        with pytest.raises(ValueError, match=r"is_causal|whole tokens"):
            with_attention(transformers.LlamaModel(config), "osa_test")(torch.randint(50, (1, 5)), attention_mask=mask)


def encoder(name="osa_test"):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, image_size=16)
    torch.manual_seed(0)
    return with_attention(transformers.ViTModel(transformers.ViTConfig(**sizes, patch_size=4)).eval(), name)


SETTINGS = dict(method="newton_schulz", num_iterations=5, epsilon=1e-3, alpha=2.0)


@pytest.fixture
def registered():
    """Registers a name, with which a loaded model has to agree, and frees it afterwards."""
    pytest.importorskip("transformers")
    from transformers import AttentionInterface, AttentionMaskInterface

    integrations.register_with_transformers("osa_test", **SETTINGS)
    yield lambda: [each._global_mapping.pop("osa_test") for each in (AttentionInterface, AttentionMaskInterface)]
    integrations.register_with_transformers("osa_test")


def test_a_model_of_transformers_is_loaded_as_it_was_saved_or_refused(registered, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, images = encoder(), torch.randn(2, 3, 16, 16)
    expected = model(images).last_hidden_state
    model.save_pretrained(tmp_path / "a")
    for load in (transformers.ViTModel, transformers.AutoModel):
        loaded = load.from_pretrained(tmp_path / "a")
        loaded.save_pretrained(tmp_path / "b")  # before it is called
        loaded = load.from_pretrained(tmp_path / "b")
        assert torch.equal(loaded(images).last_hidden_state, expected)
    softmax = transformers.ViTModel.from_pretrained(tmp_path / "b", attn_implementation="sdpa")  # the caller's choice
    assert relative_error(softmax(images).last_hidden_state, expected) > 0.1
    softmax.save_pretrained(tmp_path / "c")
    again = transformers.ViTModel.from_pretrained(tmp_path / "c")
    assert torch.equal(again(images).last_hidden_state, softmax(images).last_hidden_state)
    for name, other in SETTINGS.items():
        other = {"method": "polar_express"}.get(name, other + 1 if name != "method" else None)
        integrations.register_with_transformers("osa_test", **SETTINGS | {name: other})
        with pytest.raises(ValueError, match=f"attention settings .* differ.*{name}={SETTINGS[name]!r}"):
            loaded(images)
    remedy = re.search(r"register_with_transformers\(.*?\)", str(error_of(lambda: loaded(images))))[0]
    exec(f"integrations.{remedy}")
    assert torch.equal(loaded(images).last_hidden_state, expected)
    registered()
    for load in (transformers.ViTModel, transformers.AutoModel):
        with pytest.raises(ValueError, match="osa_test"):
            load.from_pretrained(tmp_path / "a")


def error_of(call):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    return caught.value


def model_of_two_parts(name):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(vocab_size=20, max_position_embeddings=8, projection_size=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    configuration = config(text_config=text | sizes, vision_config=dict(image_size=16, patch_size=4, **sizes))
    return getattr(transformers, f"{name}Model")(configuration).eval()


def features(model, images):
    """The vision part's output for images: a tensor in some versions of transformers, and an attribute in others."""
    found = model.get_image_features(pixel_values=images)
    return getattr(found, "pooler_output", found)


@pytest.mark.parametrize("name, parts", [("Siglip", ()), ("Siglip", ("vision_config",)), ("CLIP", ("vision_config",))])
def test_a_model_of_several_parts_is_loaded_as_it_was_saved_or_refused(name, parts, registered, tmp_path):
    model, images = model_of_two_parts(name), torch.randn(2, 3, 16, 16)
    softmax = features(model, images)
    model.set_attn_implementation({"vision_config": "osa_test"})
    assert "set_attention" in str(error_of(lambda: features(model, images)))
    integrations.set_attention(model, "osa_test", parts)
    expected = features(model, images)
    assert relative_error(expected, softmax) > 1e-2
    model.save_pretrained(tmp_path / "a")
    type(model).from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    loaded = type(model).from_pretrained(tmp_path / "b")
    assert relative_error(features(loaded, images), expected) < 1e-5
    assert loaded.config.text_config._attn_implementation == ("sdpa" if parts else "osa_test")
    integrations.register_with_transformers("osa_test", **SETTINGS | {"alpha": 3.0})
    with pytest.raises(ValueError, match="attention settings .* differ"):
        features(loaded, images)
    registered()
    with pytest.raises(ValueError, match="osa_test"):
        features(type(model).from_pretrained(tmp_path / "b"), images)


def test_the_pages_model_of_several_parts_has_ours_where_it_says():
    pytest.importorskip("transformers")
    names = {}
    exec(compile(SNIPPETS["clip"], "docs/library.md", "exec"), names)
    config = names["clip"].config
    assert (config.vision_config._attn_implementation, config.text_config._attn_implementation) == ("osa", "sdpa")


def test_what_set_attention_refuses(registered):
    with pytest.raises(ValueError, match="not registered"):
        integrations.set_attention(encoder(None), "unknown")
    with pytest.raises(ValueError, match="no parts"):
        integrations.set_attention(encoder(None), "osa_test", ("vision_config",))


def test_a_model_is_orthogonal_only_where_its_configuration_says_so(registered, tmp_path):
    """Saved before a first call or after it: what transformers writes of a model tells of its attention."""
    transformers = pytest.importorskip("transformers")
    model, images = encoder(), torch.ones(1, 3, 16, 16)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(images)[0], model(images)[0])
    chosen = transformers.ViTModel(transformers.ViTConfig(**encoder(None).config.to_dict(), attn_implementation="osa_test"))
    assert "set_attention(model, 'osa_test')" in str(error_of(lambda: chosen(images)))
    loaded.set_attn_implementation("sdpa")
    loaded.config.orthogonal_attention = None
    loaded.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(images)[0], loaded(images)[0])


def test_a_model_is_saved_with_the_attention_that_it_was_given_last(registered, tmp_path):
    """Without a word to the configuration's `orthogonal_attention`, for a whole model and for a part of one."""
    model, images = encoder(), torch.randn(2, 3, 16, 16)
    expected = model(images)[0]
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "a")
    loaded = type(model).from_pretrained(tmp_path / "a")
    assert torch.equal(loaded(images)[0], model(images)[0]) and relative_error(loaded(images)[0], expected) > 0.1
    assert "orthogonal" not in (tmp_path / "a/config.json").read_text(encoding="utf-8")
    model.set_attn_implementation("osa_test")
    model.save_pretrained(tmp_path / "a")
    assert torch.equal(type(model).from_pretrained(tmp_path / "a")(images)[0], expected)
    model = with_attention(model_of_two_parts("Siglip"), "osa_test")
    model.set_attn_implementation({"vision_config": "sdpa"})
    model.save_pretrained(tmp_path / "b")
    loaded = type(model).from_pretrained(tmp_path / "b")
    assert torch.equal(features(loaded, images), features(model, images))
    parts = loaded.config.vision_config, loaded.config.text_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "osa_test"]


def test_settings_of_any_type_are_saved_as_numbers(registered, tmp_path):
    given = dict(num_iterations=np.int64(5), epsilon=Fraction(1, 1000))
    integrations.register_with_transformers("osa_test", method="newton_schulz", alpha=np.float32(0.25), **given)
    model, images = encoder(), torch.randn(2, 3, 16, 16)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(images)[0], model(images)[0])


def test_settings_of_timms_attention_are_kept_as_numbers():
    pytest.importorskip("timm")
    given = dict(num_iterations=np.int64(5), epsilon=Fraction(1, 1000), alpha_init=np.float32(0.25))
    layer = integrations.timm_attention(method="newton_schulz", **given)
    assert [type(each) for each in layer.arguments] == [str, int, float, float]


def test_a_pickled_model_of_transformers_keeps_its_settings(registered):
    model, images = encoder(), torch.randn(2, 3, 16, 16)
    expected = model(images).last_hidden_state
    arrived = pickle.loads(pickle.dumps(model))
    assert torch.equal(arrived(images).last_hidden_state, expected)
    integrations.register_with_transformers("osa_test", alpha=3.0)
    assert "alpha=2.0" in str(error_of(lambda: arrived(images)))
    integrations.set_attention(arrived, "osa_test")  # as the message says
    assert relative_error(arrived(images).last_hidden_state, expected) > 1e-3


def test_attention_matrices_are_given_where_asked_for(registered):
    model, images = encoder(), torch.randn(2, 3, 16, 16)
    outputs = model(images, output_attentions=True)
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, 4, 17, 17)] * 2
    assert model(images).attentions is None
    integrations.register_with_transformers("osa_test_exact", alpha=2.0)
    masked, mask = bert("osa_test_exact"), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    for a in masked(torch.randint(50, (2, 9)), attention_mask=mask, output_attentions=True).attentions:
        torch.testing.assert_close(a @ a.mT, torch.eye(9).expand_as(a), rtol=0, atol=1e-5)
        torch.testing.assert_close(a[1, :, 5:], torch.eye(9)[5:].expand(4, 4, 9))
        assert (a[0] - torch.eye(9)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "arguments, error, cause",
    [
        (dict(name="sdpa"), ValueError, "'sdpa' is taken by another attention in transformers.*your own"),
        (dict(name="eager"), ValueError, "'eager' is taken by another"),
        (dict(name="flash_attention_2"), ValueError, "'flash_attention_2' is taken by another"),
        (dict(name=""), ValueError, "name must be a word.*''"),
        (dict(name="kernels-community/osa"), ValueError, "name must be a word"),
        (dict(name="paged|osa"), ValueError, "name must be a word"),
        (dict(name=None), ValueError, "name must be a word.*None"),
        (dict(alpha=math.nan), ValueError, "alpha must be a finite number"),
        (dict(alpha=10**400), ValueError, "alpha must be a finite number"),
        (dict(alpha="0.1"), ValueError, "alpha must be a finite number"),
        (dict(method="qrr"), ValueError, "'qrr' is unknown"),
        (dict(epsilon=-1.0), ValueError, "epsilon"),
        (dict(num_iterations=3), ValueError, "num_iterations"),
        (dict(methd="qr"), TypeError, "methd"),
    ],
)
def test_names_and_settings_that_are_refused(arguments, error, cause):
    pytest.importorskip("transformers")
    from transformers import AttentionInterface, AttentionMaskInterface

    before = [dict(each._global_mapping) for each in (AttentionInterface, AttentionMaskInterface)]
    with pytest.raises(error, match=cause):
        integrations.register_with_transformers(**dict(name="osa_test") | arguments)
    assert before == [dict(each._global_mapping) for each in (AttentionInterface, AttentionMaskInterface)]
    others = {"alpha_init" if key == "alpha" else key: value for key, value in arguments.items()}
    if "name" not in others:
        with pytest.raises(error, match=cause.replace("alpha", "alpha_init")):
            integrations.timm_attention(**others)
