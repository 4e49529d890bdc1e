"""Models and parametrised weights compute the same numbers after every usual way of keeping, copying and loading them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import osa
from osa.constrained.orthogonal import FRAME_MAPS, MAPS, orthogonal_, orthonormal_

SIZES = dict(image_size=8, embed_dim=16, num_heads=2, depth=5)
IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


def create(name, seed=0, **changes):
    model = osa.create_model(name, generator=torch.Generator().manual_seed(seed), **SIZES | changes)
    for parameter in model.parameters():  # away from zeros that hide a part of the model
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def parametrised(map_name, seed=0, rows=16, columns=16):
    torch.manual_seed(seed)
    linear = nn.Linear(columns, rows)
    orthonormal_(linear.weight)
    orthogonal_(linear, map_name)
    nn.init.normal_(linear.parametrizations.weight.original, std=0.3)
    return linear


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return io.BytesIO(file.getvalue())


def by_meta(module, _):
    state, empty = copy.deepcopy(module.state_dict()), copy.deepcopy(module).to("meta").to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 10**6)  # what memory may hold
    empty.load_state_dict(state)
    return empty


def by_ema(module, other):
    average = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(module)  # the first copies
    average.update_parameters(module)
    return average.module


def by_assignment(module, other):
    with torch.device("meta"):
        empty = copy.deepcopy(other).to("meta")
    empty.load_state_dict(torch.load(saved(module.state_dict()), weights_only=True), assign=True)
    return empty


def by_state_dict(module, other):
    other.load_state_dict(torch.load(saved(module.state_dict()), weights_only=True))
    return other


WAYS = {
    "deepcopy": lambda module, _: copy.deepcopy(module),
    "meta, to_empty, load": by_meta,
    "meta, load with assign": by_assignment,
    "EMA": by_ema,
    "state dict": by_state_dict,
}
WHOLE = {
    "pickle": lambda module, _: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module, _: torch.load(saved(module), weights_only=False),
}


@pytest.mark.parametrize("way", WAYS | WHOLE)
@pytest.mark.parametrize("name", osa.MODELS)
def test_a_model_travels(name, way):
    model = create(name)
    expected = model(IMAGES)
    assert torch.equal((WAYS | WHOLE)[way](model, create(name, seed=1)).eval()(IMAGES), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("map_name, rows", [*((name, 16) for name in MAPS), *((name, 24) for name in FRAME_MAPS)])
def test_a_parametrised_weight_travels(map_name, rows, way):
    linear = parametrised(map_name, rows=rows)
    x = torch.randn(3, 16)
    expected = linear(x)
    arrived = WAYS[way](linear, parametrised(map_name, seed=1, rows=rows))
    torch.testing.assert_close(arrived(x), expected, rtol=0, atol=1e-6)
    arrived(x).sum().backward()


@pytest.mark.parametrize("map_name", MAPS)
def test_a_parametrised_weight_begins_on_the_meta_device(map_name):
    linear = parametrised(map_name)
    with torch.device("meta"):
        empty = orthogonal_(nn.Linear(16, 16), map_name)
    empty.load_state_dict(linear.state_dict(), assign=True)
    assert torch.equal(empty.weight, linear.weight)


@pytest.mark.parametrize("name", osa.MODELS)
def test_a_model_that_is_built_on_the_meta_device_takes_its_weights(name):
    model = create(name)
    with torch.device("meta"):
        empty = osa.create_model(name, **SIZES).eval()
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(IMAGES), model(IMAGES))


def test_a_checkpoint_brings_its_schedule_and_one_of_before_leaves_the_models_own():
    first, second = create("espa"), create("espa", kernel_last=0.8)
    older = {
        key: value for key, value in first.state_dict().items() if not key.endswith(("attention.gain", "attention.bias"))
    }
    expected = first(IMAGES)
    other = create("espa", seed=1)
    other.load_state_dict(older)
    assert torch.equal(other(IMAGES), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(IMAGES), expected)
    with torch.device("meta"), pytest.raises(RuntimeError, match="gain"):
        osa.create_model("espa", **SIZES).load_state_dict(older, assign=True)


# Folders


@pytest.mark.parametrize("name", osa.MODELS)
def test_a_model_travels_as_a_folder(name, tmp_path):
    pytest.importorskip("safetensors")
    model = create(name, alpha_per_head=False)
    osa.save_pretrained(model, tmp_path / "a")
    loaded = osa.load_pretrained(name, folder=tmp_path / "a")
    assert loaded.config == model.config
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_a_parametrised_model_travels_as_the_weights_that_it_makes(tmp_path):
    pytest.importorskip("safetensors")
    model = create("osa_exact").to(torch.bfloat16)
    for block in model.blocks:
        orthonormal_(block.attention.value.weight)
        orthogonal_(block.attention.value, "cayley")
        nn.init.normal_(block.attention.value.parametrizations.weight.original, std=0.3)
    osa.save_pretrained(model, tmp_path)
    loaded = osa.load_pretrained("osa_exact", folder=tmp_path)
    assert torch.equal(loaded(IMAGES.bfloat16()), model(IMAGES.bfloat16()))
    assert parametrize.is_parametrized(model.blocks[0].attention.value)


@pytest.mark.parametrize(
    "name, file, old, new, cause",
    [
        ("vit", "config.json", '"depth": 5', '"depth": 4', r"disagree.*blocks\.4"),
        ("vit", "config.json", '"embed_dim": 16', '"embed_dim": 32', r"disagree.*\(16,\).*\(32,\)|disagree.*16.*32"),
        ("vit", "config.json", '"depth"', '"dept"', "dept .*did you mean depth"),
        ("vit", "config.json", '"depth": 5', '"depth": 0', "depth must be"),
        ("vit", "config.json", "{", "[", "config.json"),
        ("vit_noskip", "config.json", "", "", "not of vit_noskip: skip"),
        ("resnet", "config.json", "", "", "resnet"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_in_a_sentence(name, file, old, new, cause, tmp_path):
    pytest.importorskip("safetensors")
    osa.save_pretrained(create("vit"), tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=cause):
        osa.load_pretrained(name, folder=tmp_path)


def test_what_is_no_model_with_a_configuration_is_not_saved_and_an_empty_folder_is_named(tmp_path):
    pytest.importorskip("safetensors")
    model = create("vit")
    model.config = None
    with pytest.raises(ValueError, match="config"):
        osa.save_pretrained(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="config.json"):
        osa.load_pretrained("vit", folder=tmp_path)


def test_a_new_head_travels_too(tmp_path):
    pytest.importorskip("safetensors")
    for num_classes in (3, 0):
        model = create("osa_exact")
        model.reset_classifier(num_classes)
        osa.save_pretrained(model, tmp_path)
        assert torch.equal(osa.load_pretrained("osa_exact", folder=tmp_path)(IMAGES), model(IMAGES))
