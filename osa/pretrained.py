"""Saves and loads models as folders: `model.safetensors` holds the weights, `config.json` holds the options.

The Hugging Face Hub uses the same files; there, README.md is the model card.
"""

import dataclasses
import json
import os
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from osa.masking import DTYPES
from osa.models import build_vit, create_model
from osa.options import MODELS, check_model, model_name
from osa.vit import VisionTransformer, unwrapped

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
CARD_TEXT = """\
---
library_name: osa
tags: [osa, orthogonal-self-attention, vision-transformer]
---

# {title}

{kind} with {attention}: {sizes}. `osa.save_pretrained` wrote it with these options:

| Option | Value |
| :-- | :-- |
{options}

```python
import osa  # pip install git+ADDRESS-OF-THIS-REPOSITORY safetensors

# FOLDER is the path of this folder; for a model on the Hub, huggingface_hub.snapshot_download returns the path
model = osa.load_pretrained("FOLDER")
```

To the authors: describe the training data, the results and the intended use here.

The attention is that of *Orthogonal Self-Attention* (Zhang and Martens 2026, [arXiv:2602.05996](https://arxiv.org/abs/2602.05996)).
"""
TRANSIENT = ("training", "grad_checkpointing")  # module attributes that do not affect what the model computes
LFS_POINTER = b"version https://git-lfs"  # first bytes of the pointer that Git LFS stores in place of a file
JOIN = "write the tensors of all parts to one file, model.safetensors, using load_file and save_file from safetensors.torch"
SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Saves a model from `create_model` or `build_vit` in a folder, with a model card unless the folder has a README.md.

    A parametrised weight is saved as its computed value. Hooks are not saved.

    Args:
        model: the model, possibly wrapped for torch.compile, data parallelism or weight averaging.
        folder: the folder; it is created if it does not exist.

    Raises:
        TypeError: `model` is not a module but, for example, a state dict.
        ValueError: the model differs from the model that its configuration builds, or has no configuration; its weights are
            sharded or of several dtypes; or the path is not a folder.
        ImportError: the package safetensors is not installed.

    Example:
        >>> save_pretrained(osa.create_model("osa_qr"), "my_model")
    """
    save_file = _safetensors().save_file
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, such as one from osa.create_model, not {type(model).__name__}")
    model = unwrapped(model)
    _check_whole(model)
    if not isinstance(model, VisionTransformer) or not hasattr(model, "config"):
        raise ValueError(
            "the model has no config: build it with osa.create_model or osa.build_vit, or save its state_dict with "
            "torch.save"
        )
    _check_unchanged(model)
    state = model.state_dict()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            inside = f"{path}.parametrizations."
            state = {key: tensor for key, tensor in state.items() if not key.startswith(inside)}
            for name, _ in module.get_submodule("parametrizations").named_children():
                state[f"{path}.{name}"] = getattr(module, name).detach()
    _check_types(state, "the model has", "convert them, for example with model.float()")
    folder = _local(folder)
    if (folder.exists() and not folder.is_dir()) or (folder / WEIGHTS_FILE).is_dir():
        raise ValueError(f"{folder} is not a folder to which a model can be written: choose another one")
    folder.mkdir(parents=True, exist_ok=True)
    # copies, because safetensors refuses tensors that share memory
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    save_file(whole, folder / WEIGHTS_FILE)
    config = {"model": model_name(model.config)} | dataclasses.asdict(model.config)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not (folder / CARD_FILE).exists():
        (folder / CARD_FILE).write_text(_card(model), encoding="utf-8")


def _check_whole(model: nn.Module) -> None:
    """Raises ValueError if the weights are sharded over processes."""
    by_fsdp = any(type(module).__module__.startswith("torch.distributed.fsdp") for module in model.modules())
    if by_fsdp or any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            "the model is sharded: gather its full weights with get_model_state_dict of torch.distributed.checkpoint."
            "state_dict and StateDictOptions(full_state_dict=True), load them into an unsharded model, and save that model"
        )


def _check_types(state: dict[str, torch.Tensor], whose: str, remedy: str) -> None:
    """Raises ValueError if the weights have several dtypes, or a dtype that is not in `DTYPES`."""
    types = {tensor.dtype for tensor in state.values()}
    if len(types) > 1 or not types <= set(DTYPES):
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise ValueError(
            f"{whose} weights in {names}, but all must have the same 16-, 32- or 64-bit floating-point type: {remedy}"
        )


def _check_unchanged(model: VisionTransformer) -> None:
    """Raises ValueError if a module differs from what the model's config builds, or if layers share a parameter."""
    with torch.device("meta"):
        built = dict(build_vit(model.config).named_modules())
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in built | modules:
        if ".parametrizations" in path:
            continue
        ours, theirs = modules.get(path), built.get(path)
        if ours is None or theirs is None or _kind(ours) != _kind(theirs):
            raise ValueError(
                f"{path or 'the model'} differs from what the model's config builds, and the difference would not be saved: "
                "merge adapters into the weights, make pruning permanent, or save the model with torch.save"
            )
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(parameter, name)) != name:
            raise ValueError(
                f"{first} and {name} are one parameter, of which the loaded model would have two copies: untie them, or "
                "save the model with torch.save"
            )


def _kind(module: nn.Module) -> tuple[type, dict[str, Any]]:
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in TRANSIENT}
    kind = parametrize.type_before_parametrizations(module)
    if kind.__module__.startswith("torch.distributed."):  # torch's `replicate` replaces the class with a subclass
        kind = kind.__bases__[-1]
    return kind, settings


def load_pretrained(path: str | Path, *, name: str | None = None) -> VisionTransformer:
    """Loads a saved model onto the CPU, in evaluation mode and in the dtype of the saved weights.

    Args:
        path: a folder that `save_pretrained` wrote, or a file with weights of the model that `create_model(name)` builds.
        name: a name in `MODELS`, required for a file of weights. It is optional for a folder. If it is given, the
            folder must hold this model, but options that `MODELS` does not set, such as sizes, may differ.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the folder holds a model of another name, weights and configuration disagree, `name` is missing, the
            weights have several dtypes, or the file is a Git LFS pointer or a shard.
        ImportError: the package safetensors is not installed.

    Example:
        >>> save_pretrained(osa.create_model("osa_qr"), "my_model")
        >>> model = load_pretrained("my_model")
    """
    load_file = _safetensors().load_file
    from safetensors import SafetensorError

    if name is not None:
        check_model(name)
    path = _local(path)
    _check_link(path)
    if path.name in (WEIGHTS_FILE, CONFIG_FILE) and path.with_name(CONFIG_FILE).exists():
        path = path.parent
    if path.is_file():
        model, weights, whose = _from_name(path, name), path, f"create_model({name!r})"
    else:
        model, weights, whose = _from_folder(path, name), path / WEIGHTS_FILE, "its configuration"
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a safetensors file, or is incomplete: {error}") from None
    _check_types(state, f"{weights} has", "convert them, and save them again")
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        first = textwrap.shorten(str(error).splitlines()[1], 200)
        raise ValueError(f"the weights of {path} and {whose} disagree: {first}") from None
    return model.eval()


def _local(path: str | Path) -> Path:
    """Returns the path with ~ expanded. Raises ValueError for a URL."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise ValueError(f"{path} is a URL: download the folder, and pass its local path")
    # Unlike Path.expanduser, os.path.expanduser leaves ~name unchanged if there is no such user.
    return Path(os.path.expanduser(path))


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which does not exist: download or copy it again")


def _check_file(file: Path) -> None:
    """Raises FileNotFoundError if the path is missing, and ValueError if it is not a file or is a Git LFS pointer."""
    _check_link(file)
    if not file.exists():
        raise FileNotFoundError(f"{file}, which osa.save_pretrained writes, is missing{_remedy(file.parent)}")
    if not file.is_file():
        raise ValueError(f"{file} is not a file: replace it with the file that osa.save_pretrained writes")
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{file} is a Git LFS pointer: run `git lfs pull` to fetch the file")


def _from_name(file: Path, name: str | None) -> VisionTransformer:
    """Builds the model for a file of weights, without loading the weights."""
    _check_file(file)
    if SHARD.search(file.name):
        raise ValueError(f"{file} holds only part of a model's weights: {JOIN}")
    if name is None:
        raise ValueError(
            f'{file} holds only weights: pass the name of their model, as in name="osa_qr"; osa.MODELS lists the names'
        )
    with torch.device("meta"):
        return create_model(name)


def _from_folder(folder: Path, name: str | None) -> VisionTransformer:
    """Builds the model of a folder from its configuration, without loading the weights."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist{_remedy(folder)}")
    for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        _check_file(file)
    path = folder / CONFIG_FILE
    try:
        options = dict(json.loads(path.read_text(encoding="utf-8")))
        options = {option: value for option, value in options.items() if value is not None}  # None means the default
        names = [each for each in (name, options.pop("model", None)) if each is not None]
        with torch.device("meta"):
            model = build_vit(**options)
        for each in names:
            check_model(each)
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: JSON is nested too deeply or sizes are too large
        raise ValueError(f"{path} is not a valid model configuration: {error}") from None
    for each in names:
        for option, value in MODELS[each].items():
            if (found := getattr(model.config, option)) != value:
                raise ValueError(f"{path} is not a configuration of {each}: {option} is {found!r}, not {value!r}")
    return model


def _remedy(folder: Path) -> str:
    """Returns the end of an error message about a missing path: a hint at what the user may have meant, or nothing."""
    if str(folder) in MODELS:
        return f": pass the path of a saved model, or use osa.create_model({str(folder)!r}) for a new one"
    if not folder.exists():
        if folder.is_absolute() or len(folder.parts) != 2:  # not owner/name, as models on the Hub are named
            return ""
        return f"; if it is on the Hub, pass what huggingface_hub.snapshot_download({str(folder)!r}) returns"
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if any(map(SHARD.search, files)):
        return f"; the folder has the weights in parts: {JOIN}"
    return (
        f"; the folder has {', '.join(files)}: pass the path of one of them, and its model's name as `name`" if files else ""
    )


def _card(model: VisionTransformer) -> str:
    config = model.config
    name = model_name(config)
    attention = {"orthogonal": "orthogonal self-attention", "softmax": "softmax attention"}
    count = sum(parameter.numel() for parameter in model.parameters())
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    images = f"{config.in_channels}×{config.image_size}×{config.image_size}"
    options = {option: value for option, value in dataclasses.asdict(config).items() if value is not None}
    return CARD_TEXT.format(
        title=name or "Vision Transformer",
        kind=f"`{name}` of `osa.MODELS`, a Vision Transformer" if name else "A Vision Transformer",
        attention=attention.get(config.attention, config.attention.replace("_", "-") + " attention"),
        sizes=f"images of {images}, {config.num_classes} classes, {count:,} parameters in {' and '.join(sorted(types))}",
        options="\n".join(f"| `{option}` | {value} |" for option, value in options.items()),
    )


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("saving and loading models needs the package safetensors: run `pip install safetensors`") from None
    return safetensors.torch
