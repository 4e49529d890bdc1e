"""Models compute the same numbers after every way of keeping, copying and loading them, and under PyTorch's own tools."""

import copy
import dataclasses
import functools
import io
import json
import pickle
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import osa
from osa import MODELS
from osa.constrained.orthogonal import MAPS, orthogonal_, orthonormal_
from osa.options import model_name
from tests.osa.helpers import REPRESENTATIVES

SIZES = dict(image_size=8, embed_dim=16, num_heads=2, depth=5)
IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


def create(name, seed=0, **changes):
    """A copy of the model, as drawing one takes much longer."""
    return copy.deepcopy(drawn(name, seed, **changes))


@functools.cache
def drawn(name, seed, **changes):
    model = osa.create_model(name, generator=torch.Generator().manual_seed(seed), **SIZES | changes)
    for parameter in model.parameters():  # away from zeros that hide a part of the model
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def parametrised(map_name, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(16, 16)
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
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 10**6)  # values that memory may hold
    empty.load_state_dict(state)
    return empty


def by_ema(module, other):
    average = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(module)  # the first copies
    average.update_parameters(module)
    return average.module


def by_assignment(module, other):
    with torch.device("meta"):
        built = isinstance(other, osa.VisionTransformer)
        empty = osa.build_vit(**dataclasses.asdict(other.config)) if built else copy.deepcopy(other).to("meta")
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
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
    "pickle": lambda module, _: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module, _: torch.load(saved(module), weights_only=False),
}


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_model_travels(name):
    model, other = create(name), create(name, seed=1)
    expected = model(IMAGES)
    for way, travel in WAYS.items():
        arrived = travel(model, copy.deepcopy(other)).eval()
        assert torch.equal(arrived(IMAGES), expected), way
        assert MODELS[name].items() <= dataclasses.asdict(arrived.config).items(), way


@pytest.mark.parametrize("map_name", MAPS)
def test_a_parametrised_weight_travels(map_name, subtests):
    for way in list(WAYS)[:5]:  # torch pickles no parametrised module
        with subtests.test(way=way):
            linear = parametrised(map_name)
            x = torch.randn(3, 16)
            expected = linear(x)
            arrived = WAYS[way](linear, parametrised(map_name, seed=1))
            torch.testing.assert_close(arrived(x), expected, rtol=0, atol=1e-6)
            arrived(x).sum().backward()


def test_a_checkpoint_brings_its_schedule():
    first, second = create("espa"), create("espa", kernel_last=0.8)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(IMAGES), first(IMAGES))


# Folders


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_model_travels_as_a_folder(name, tmp_path):
    pytest.importorskip("safetensors")
    model = create(name, alpha_per_head=False)
    osa.save_pretrained(model, tmp_path / "a")
    loaded = osa.load_pretrained(tmp_path / "a", name=name)
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
    loaded = osa.load_pretrained(tmp_path, name="osa_exact")
    assert torch.equal(loaded(IMAGES.bfloat16()), model(IMAGES.bfloat16()))
    assert parametrize.is_parametrized(model.blocks[0].attention.value)


def by_vector(model):
    """Every parameter is a part of one tensor then."""
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters())
    return model


def test_a_path_is_enough_and_a_name_is_checked(tmp_path):
    """A folder's configuration has the name; a file of weights alone needs one."""
    pytest.importorskip("safetensors")
    model, folder = create("vit_noskip", num_classes=3), tmp_path / "a"
    osa.save_pretrained(model, folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"] == "vit_noskip"
    ways = [
        osa.load_pretrained(folder),
        osa.load_pretrained(str(folder), name="vit_noskip"),
        osa.load_pretrained(folder / "config.json"),
        osa.load_pretrained(folder / "model.safetensors"),  # next to its configuration
    ]
    assert all(torch.equal(other(IMAGES), model(IMAGES)) and other.config == model.config for other in ways)
    for call in (
        lambda: osa.load_pretrained(folder, name="vit"),
        lambda: osa.load_pretrained(folder / "model.safetensors", name="vit"),
    ):
        with pytest.raises(ValueError, match="not a configuration of vit: skip is False, not True"):
            call()
    whole, weights = osa.create_model("vit_noskip"), tmp_path / "5.safetensors"
    pytest.importorskip("safetensors.torch").save_file(whole.state_dict(), weights)
    loaded, images = osa.load_pretrained(weights, name="vit_noskip"), torch.rand(2, 1, 28, 28)
    assert torch.equal(loaded(images), whole(images)) and not loaded.training
    with pytest.raises(ValueError, match=r'5\.safetensors holds only weights.*name="osa_qr"'):
        osa.load_pretrained(weights)
    with pytest.raises(ValueError, match="did you mean vit_noskip"):
        osa.load_pretrained(weights, name="vit_noskp")
    with pytest.raises(ValueError, match=r"6\.safetensors and create_model\('vit_noskip'\) disagree: Missing key"):
        osa.load_pretrained(folder.joinpath("model.safetensors").rename(tmp_path / "6.safetensors"), name="vit_noskip")
    with pytest.raises(
        FileNotFoundError, match="config.json, which .* is missing.*the folder has 5.safetensors, 6.safetensors"
    ):
        osa.load_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"use osa.create_model\('osa_qr'\) for a new one"):
        osa.load_pretrained("osa_qr")


def test_a_model_without_a_name_is_loaded(tmp_path):
    pytest.importorskip("safetensors")
    model = osa.build_vit(**SIZES, attention="softmax", skip=True, norm=False, mlp_init="suo").eval()
    osa.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["model"] is None
    (tmp_path / "config.json").write_text(json.dumps(config | {"qkv_bias": None}), encoding="utf-8")  # as 1.1.0 writes
    assert torch.equal(osa.load_pretrained(tmp_path)(IMAGES), model(IMAGES))


def test_a_models_name_is_that_of_its_options(subtests):
    for name, options in MODELS.items():
        with subtests.test(name=name):
            assert model_name(osa.ModelConfig(**options | dict(depth=13, alpha=0.3, num_classes=7))) == name


def test_a_card_says_what_is_known_and_is_left_alone_once_it_is_there(tmp_path):
    pytest.importorskip("safetensors")
    model, card = create("osa_ns", alpha=0.25), tmp_path / "README.md"
    osa.save_pretrained(model, tmp_path)
    text = card.read_text(encoding="utf-8")
    header, body = text.removeprefix("---\n").split("---\n", 1)
    assert {"library_name: osa", "tags: [osa, orthogonal-self-attention, vision-transformer]"} == set(header.splitlines())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"images of 1×8×8, 10 classes, {count:,} parameters in float32" in body and "`osa_ns`" in body
    assert {"| `alpha` | 0.25 |", "| `num_iterations` | 6 |", "| `depth` | 5 |"} < set(body.splitlines())
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert not re.search(r"pip install .*orthogonal-self-attention", text)  # a name that nobody holds
    names = {}
    exec(code.replace("FOLDER", str(tmp_path)), names)
    assert torch.equal(names["model"](IMAGES), model(IMAGES))
    card.write_text("Trained on 12 digits of mine.", encoding="utf-8")
    osa.save_pretrained(create("vit").bfloat16(), tmp_path)
    assert card.read_text(encoding="utf-8") == "Trained on 12 digits of mine."
    card.unlink()
    osa.save_pretrained(create("vit").bfloat16(), tmp_path)
    assert "in bfloat16" in card.read_text(encoding="utf-8") and "softmax attention" in card.read_text(encoding="utf-8")


HELD = {
    "views of one tensor": by_vector,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "average": AveragedModel,
    "average of a compiled one": lambda model: AveragedModel(torch.compile(model, backend="eager")),
    "checkpoints": lambda model: model.set_grad_checkpointing() or model,
    "frozen": lambda model: model.requires_grad_(False),
    "another head": lambda model: model.reset_classifier(3) or model,
}


@pytest.mark.parametrize("way", HELD)
def test_what_holds_a_model_leaves_its_folder_alone(way, tmp_path):
    pytest.importorskip("safetensors")
    model = create("osa_iso")
    osa.save_pretrained(HELD[way](model), tmp_path)
    assert torch.equal(osa.load_pretrained(tmp_path, name="osa_iso")(IMAGES), model(IMAGES))


def set_forward(model):
    layer = model.blocks[1].attention.out
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def add_adapter(model):
    attention, plain = model.blocks[1].attention, model.blocks[1].attention.value
    attention.value = Twice(16, 16, bias=False)
    attention.value.load_state_dict(plain.state_dict())  # with the same keys


CHANGES = {  # changes that no configuration shows, and their places
    "another method": (
        lambda model: model.blocks[2].attention.options.update(method="newton_schulz"),
        "blocks.2.attention differs",
    ),
    "a skip": (lambda model: setattr(model.blocks[3], "skip", True), "blocks.3 differs"),
    "another activation": (lambda model: setattr(model.blocks[0].mlp, "activation", torch.relu), "blocks.0.mlp differs"),
    "tokens of another size": (lambda model: setattr(model, "normalise_tokens", False), "the model differs"),
    "a head of one's own": (lambda model: setattr(model, "head", nn.Linear(16, 3)), "head differs"),
    "an adapter": (add_adapter, "blocks.1.attention.value differs"),
    "a forward of its own": (set_forward, "blocks.1.attention.out differs"),
    "a norm": (lambda model: setattr(model, "norm", nn.LayerNorm(16)), "norm differs"),
    "another block": (lambda model: model.blocks.append(copy.deepcopy(model.blocks[0])), "blocks.5 differs"),
    "a block less": (lambda model: model.blocks.__delitem__(4), "blocks.4 differs"),
    "pruning": (
        lambda model: prune.l1_unstructured(model.blocks[0].attention.key, "weight", 0.5),
        "blocks.0.attention.key differs",
    ),
    "int8": (lambda model: quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True), "patch_embedding differs"),
    "a tied weight": (
        lambda model: setattr(model.blocks[0].attention.key, "weight", model.blocks[0].attention.query.weight),
        "blocks.0.attention.query.weight and blocks.0.attention.key.weight are one parameter",
    ),
    "a block twice": (
        lambda model: setattr(model.blocks[1], "mlp", model.blocks[0].mlp),
        "blocks.0.mlp.fc1.weight and blocks.1.mlp.fc1.weight are one parameter",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.ao.quantization raises them
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_folder_cannot_say_is_refused_and_travels_whole(change, tmp_path):
    """Torch.save writes it whole, as the message says; save_pretrained writes nothing."""
    pytest.importorskip("safetensors")
    model, (edit, place) = create("osa_iso"), CHANGES[change]
    edit(model)
    with pytest.raises(ValueError, match=f"{place}.*torch.save"):
        osa.save_pretrained(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    if change == "a forward of its own":  # a function that is local to this test
        return
    arrived = torch.load(saved(model), weights_only=False)
    assert torch.equal(arrived(IMAGES), model(IMAGES))
    tied = len(list(model.parameters())), len(list(arrived.parameters()))
    assert tied[0] == tied[1]


def test_another_model_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    for model in (nn.Linear(2, 2), nn.Sequential(create("vit")), create("vit").blocks[0]):
        with pytest.raises(ValueError, match=r"no config.*osa\.build_vit"):
            osa.save_pretrained(model, tmp_path)


@pytest.mark.parametrize(
    "name, file, old, new, cause",
    [
        ("vit", "config.json", '"depth": 5', '"depth": 4', r"disagree.*blocks\.4"),
        ("vit", "config.json", '"embed_dim": 16', '"embed_dim": 32', r"disagree.*\(16,\).*\(32,\)|disagree.*16.*32"),
        ("vit", "config.json", '"depth"', '"dept"', "'dept' is unknown; did you mean depth"),
        ("vit", "config.json", "{", "[", "config.json"),
        ("vit_noskip", "config.json", "", "", "not a configuration of vit_noskip: skip"),
        ("resnet", "config.json", "", "", "resnet"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_in_a_sentence(name, file, old, new, cause, tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match="config.json"):
        osa.load_pretrained(tmp_path, name="vit")
    osa.save_pretrained(create("vit"), tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=cause):
        osa.load_pretrained(tmp_path, name=name)


def test_files_that_hold_no_whole_model_are_a_sentence(tmp_path):
    pytest.importorskip("safetensors")
    osa.save_pretrained(create("vit"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file, or is incomplete"):
        osa.load_pretrained(tmp_path, name="vit")
    (tmp_path / "config.json").unlink()
    weights.rename(tmp_path / "5.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"config\.json, which .* is missing.*the folder has 5\.safetensors: pass the path"
    ):
        osa.load_pretrained(tmp_path, name="vit")


def edit_config(**changes):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")

    return edit


def with_types(**types):
    """Casts the weights whose names begin so."""

    def edit(folder):
        safetensors = pytest.importorskip("safetensors.torch")
        state = safetensors.load_file(folder / "model.safetensors")
        for name, dtype in types.items():
            state |= {key: tensor.to(dtype) for key, tensor in state.items() if key.startswith(name)}
        safetensors.save_file(state, folder / "model.safetensors")

    return edit


def link_to_nothing(name):
    def edit(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "blobs" / name)

    return edit


def as_folder(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def as_shards(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def pointer(name):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


FOUND = {  # faults of people's folders, the error, and its words
    "a pointer of Git LFS": (
        pointer("model.safetensors"),
        ValueError,
        "model.safetensors is a Git LFS pointer.*git lfs pull",
    ),
    "a configuration as pointer": (pointer("config.json"), ValueError, "config.json is a Git LFS pointer.*git lfs pull"),
    "shards": (as_shards, FileNotFoundError, "weights in parts.*load_file and save_file"),
    "a link to nothing": (
        link_to_nothing("model.safetensors"),
        FileNotFoundError,
        "model.safetensors is a link.*does not exist",
    ),
    "a configuration that is gone": (
        link_to_nothing("config.json"),
        FileNotFoundError,
        "config.json is a link.*does not exist",
    ),
    "a folder for a file": (as_folder, ValueError, "model.safetensors is not a file"),
    "two types": (with_types(head=torch.bfloat16), ValueError, "weights in bfloat16 and float32.*convert"),
    "complex numbers": (with_types(head=torch.complex64), ValueError, "complex64"),
    "8 bits": (with_types(**{"": torch.float8_e4m3fn}), ValueError, "weights in float8_e4m3fn"),
    "whole numbers": (with_types(**{"": torch.int8}), ValueError, "weights in int8"),
    "a size beyond memory": (edit_config(embed_dim=2**40), ValueError, "config.json.*embed_dim.*16384 at most"),
    "a depth without end": (edit_config(depth=10**9), ValueError, "config.json.*depth.*1000 at most"),
    "a number without end": (edit_config(alpha=10**400), ValueError, "config.json.*alpha"),
    "brackets": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000, encoding="utf-8"),
        ValueError,
        "config.json.*recursion",
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_lies_in_peoples_folders_is_a_sentence(case, tmp_path):
    pytest.importorskip("safetensors")
    edit, error, cause = FOUND[case]
    osa.save_pretrained(create("osa_exact"), tmp_path)
    edit(tmp_path)
    with pytest.raises(error, match=cause):
        osa.load_pretrained(tmp_path)


def test_paths_as_people_write_them(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    model = create("osa_exact")
    osa.save_pretrained(model, "~/a")
    assert torch.equal(osa.load_pretrained("~/a")(IMAGES), model(IMAGES)) and (tmp_path / "a/config.json").exists()
    for path in ("https://example.org/me/a", "s3://bucket/a", "file:///tmp/a"):
        for call in (lambda path: osa.save_pretrained(model, path), osa.load_pretrained):
            with pytest.raises(ValueError, match=f"{path} is a URL: download"):
                call(path)
    with pytest.raises(FileNotFoundError, match=r"^/nowhere/me/a does not exist$"):
        osa.load_pretrained("/nowhere/me/a")
    with pytest.raises(FileNotFoundError, match=r"me/a does not exist; .*snapshot_download\('me/a'\)"):
        osa.load_pretrained("me/a")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="link is a link to .*nothing, which does not exist"):
        osa.load_pretrained(tmp_path / "link")
    shard = (tmp_path / "a/model.safetensors").rename(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="holds only part of a model's weights"):
        osa.load_pretrained(shard, name="osa_exact")
    with pytest.raises(ValueError, match="is not a folder to which a model can be written"):
        osa.save_pretrained(model, shard)
    (tmp_path / "b/model.safetensors").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not a folder to which a model can be written"):
        osa.save_pretrained(model, tmp_path / "b")


def test_a_folder_of_links_is_loaded(tmp_path):
    """As huggingface_hub.snapshot_download keeps it: the Hub has the folder of save_pretrained."""
    pytest.importorskip("safetensors")
    model, snapshot = create("osa_exact"), tmp_path / "snapshots/1a2b"
    osa.save_pretrained(model, tmp_path / "blobs")
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert torch.equal(osa.load_pretrained(snapshot)(IMAGES), model(IMAGES))


def test_what_is_no_model_to_save_is_a_sentence(tmp_path):
    pytest.importorskip("safetensors")
    model = create("osa_exact")
    for given in (model.state_dict(), "my_model", None):
        with pytest.raises(TypeError, match=f"model must be an nn.Module.*not {type(given).__name__}"):
            osa.save_pretrained(given, tmp_path / "a")
    model.head.bfloat16()
    with pytest.raises(ValueError, match=r"weights in bfloat16 and float32.*model\.float"):
        osa.save_pretrained(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    osa.save_pretrained(model.float(), tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in MODELS),
        ("vit", dict(activation="gelu_tanh")),
    ],
)
def test_every_model_travels_in_every_way(name, options, tmp_path):
    pytest.importorskip("safetensors")
    model = create(name, **options)
    expected = model(IMAGES)
    osa.save_pretrained(model, tmp_path)
    arrived = [osa.load_pretrained(tmp_path, name=name)]
    arrived += [travel(model, create(name, seed=1, **options)).eval() for travel in WAYS.values()]
    assert all(torch.equal(other(IMAGES), expected) and other.config == model.config for other in arrived)


def test_without_safetensors_its_installation_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: osa.save_pretrained(None, tmp_path), lambda: osa.load_pretrained(tmp_path, name="vit")):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()


# PyTorch's tools


def gradients(name):
    model = create(name).double()
    model(IMAGES.double()).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-11 * (theirs.norm() + 0.1)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # softmax under vmap raises it
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "osa_exact", "osa_qr"])
def test_gradients_of_each_image(name):
    model = create(name).double()
    loss = lambda parameters, image: functional_call(model, parameters, (image[None],)).square().mean()  # noqa: E731
    each = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), IMAGES.double())
    assert_close([gradient.mean(0) for gradient in each.values()], gradients(name))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP2-wrapped module.*returned a view")  # torch's own
def test_shards_have_the_gradients_of_the_whole(mesh):
    from torch.distributed.fsdp import fully_shard  # which takes a second to import

    for name in REPRESENTATIVES:
        model = create(name).double()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        model(IMAGES.double()).square().mean().backward()
        assert_close([parameter.grad.full_tensor() for parameter in model.parameters()], gradients(name))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*NO_SHARD:UserWarning")  # torch's own
def test_what_torch_distributed_does_to_a_model_and_its_folder(mesh, tmp_path):
    pytest.importorskip("safetensors")
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    for name, wrap in {"replicate": replicate, "DDP": nn.parallel.DistributedDataParallel}.items():
        osa.save_pretrained(wrap(create("osa_exact")), tmp_path / name)
        assert torch.equal(osa.load_pretrained(tmp_path / name)(IMAGES), create("osa_exact")(IMAGES))
    model, part = create("osa_exact"), create("osa_exact")
    for block in (*model.blocks, model, part.blocks[0]):
        fully_shard(block, mesh=mesh)
    for sharded in (model, part, FullyShardedDataParallel(create("osa_exact"), device_id=torch.device("cpu"))):
        with pytest.raises(ValueError, match="sharded.*get_model_state_dict"):
            osa.save_pretrained(sharded, tmp_path / "a")
        whole = create("osa_exact", seed=1)  # as the message says
        whole.load_state_dict(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
        osa.save_pretrained(whole, tmp_path / "a")
        assert torch.equal(osa.load_pretrained(tmp_path / "a")(IMAGES), create("osa_exact")(IMAGES))
        shutil.rmtree(tmp_path / "a")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.ao.quantization raises them
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_pruned_and_quantised_layers_are_called(name):
    pruned, plain = create(name), create(name)
    linear = pruned.blocks[0].attention.value
    prune.l1_unstructured(linear, "weight", amount=0.5)
    plain.blocks[0].attention.value.weight.data.mul_(linear.weight_mask)
    assert linear.weight_mask.mean() == 0.5 and torch.equal(pruned(IMAGES), plain(IMAGES))
    quantised = quantize_dynamic(create(name), {nn.Linear}, dtype=torch.qint8)
    assert quantised(IMAGES).isfinite().all()
    actual, expected = (
        torch.stack(model.blocks[0].attention.project(torch.ones(2, 5, 16))) for model in (quantised, create(name))
    )
    assert 0 < (actual - expected).abs().max() < 0.05 * expected.abs().max()


def in_data_parallel(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for name in ("osa_exact", "espa"):
        model = nn.parallel.DistributedDataParallel(create(name).double())
        model(IMAGES.double().chunk(2)[rank]).square().mean().backward()
        assert_close([parameter.grad for parameter in model.parameters()], gradients(name))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    torch.multiprocessing.spawn(in_data_parallel, (str(tmp_path / "meeting"),), nprocs=2)
