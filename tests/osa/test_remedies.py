"""What an error tells one to do works: each remedy is followed."""

import sys

import pytest
import torch
from torch import nn

import osa
from osa.constrained.orthogonal import FRAME_MAPS, MAPS, orthogonal_, orthonormal_
from osa.init import scaled_uniform_orthogonal_
from osa.models import OPTIONS

SIZES = dict(image_size=8, embed_dim=16, num_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("map_name, rows", [*((name, 64) for name in MAPS), *((name, 96) for name in FRAME_MAPS)])
def test_begin_with_orthonormal_or_an_orthogonal_draw(map_name, rows, dtype):
    for begin in (orthonormal_, scaled_uniform_orthogonal_):
        linear = nn.Linear(64, rows, dtype=dtype)
        with pytest.raises(ValueError, match="orthonormal_"):
            orthogonal_(linear, map_name)
        begin(linear.weight)
        if begin is scaled_uniform_orthogonal_ and rows > 64:
            continue  # which is larger by the factor √(out/in)
        expected = linear.weight.clone()
        assert torch.equal(orthogonal_(linear, map_name).weight, expected)


FOLLOWED = {  # a model, options that are refused, the word that names the remedy, and options that follow it
    "raise mlp_ratio": ("osa_iso", dict(mlp_ratio=0.5), "raise mlp_ratio", dict(mlp_ratio=1)),
    "2/embed_dim": ("vit", dict(embed_dim=49, num_heads=7, mlp_ratio=1 / 50), "2/embed_dim", dict(mlp_ratio=2 / 49)),
    "more heads": ("osa_qr", dict(num_heads=1), "2 or more heads", dict(num_heads=2)),
    "more layers": ("osa_shaped", dict(depth=4), "more layers", dict(depth=5)),
    "larger rate": ("espa_skip", dict(kernel_last=0.1), "larger rate", dict(kernel_last=0.9)),
    "rate at most": ("espa", dict(kernel_last=19.0), "12 at most", dict(kernel_last=12.0)),
    "lighter skip": ("espa_skip", dict(kernel="uniform", kernel_last=0.8), "use less", dict(normalised_skip=5.9)),
    "leave it out": ("vit", dict(kernel="uniform"), "or None", dict(kernel=None)),
    "needs kernel": (
        "vit_noskip",
        dict(attention="signal_preserving"),
        "kernel_last",
        dict(kernel="uniform", kernel_last=0.5),
    ),
    "needs skip": ("vit_noskip", dict(normalised_skip=1.0), "needs skip", dict(skip=True)),
    "place of [cls]": ("espa", dict(cls_index=99), "cls_index must be 0 to 4", dict(cls_index=4)),
}


@pytest.mark.parametrize("name, refused, word, followed", FOLLOWED.values(), ids=FOLLOWED)
def test_options_that_follow_what_is_said(name, refused, word, followed):
    options = SIZES | refused
    with pytest.raises(ValueError, match=word):
        osa.create_model(name, **options)
    osa.create_model(name, **options | followed)


@pytest.mark.parametrize(
    "option", ["attention", "mlp_init", "activation", "patch_embedding", "head", "method", "attention_init"]
)
def test_every_choice_that_is_listed_is_one(option):
    with pytest.raises(ValueError, match="choose one of") as caught:
        osa.create_model("osa_exact", **{option: "other"})
    choices = str(caught.value).partition("choose one of ")[2].split(", ")
    assert len(choices) >= 2
    for choice in choices:
        attention = choice if option == "attention" else OPTIONS[option].metadata.get("attention", ("softmax",))[0]
        kernel = {"kernel": "uniform", "kernel_last": 0.5} if attention == "signal_preserving" else {}
        osa.create_model("vit", **SIZES | dict(depth=14, attention=attention) | kernel | {option: choice})


def test_without_safetensors_its_installation_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: osa.save_pretrained(None, tmp_path), lambda: osa.load_pretrained("vit", folder=tmp_path)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
