"""Models as folders: `model.safetensors` has the weights and `config.json` the options that build the model around them."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from osa.models import MODELS, build_vit, check_model
from osa.vit import VisionTransformer, unwrapped

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PASSING = ("training", "grad_checkpointing")  # attributes of modules that are no part of the function


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Writes a model of `create_model` or `build_vit` to a folder. A parametrised weight is written as the weight it makes.

    Args:
        model: the model, or what torch.compile, a data-parallel wrapper or an average of weights holds it in.

    Raises:
        ValueError: no configuration builds the model: it was built in another way, or has been changed since.
        ImportError: the package safetensors is not installed.
    """
    save_file = _safetensors().save_file
    model = unwrapped(model)
    if not isinstance(model, VisionTransformer) or model.config is None:
        raise ValueError("the model has no config: build it by osa.create_model or osa.build_vit, or keep its state_dict")
    _check_unchanged(model)
    state = model.state_dict()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            inside = f"{path}.parametrizations."
            state = {key: tensor for key, tensor in state.items() if not key.startswith(inside)}
            state |= {f"{path}.{name}": getattr(module, name).detach() for name in module.parametrizations}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}  # no views
    save_file(whole, folder / WEIGHTS)
    content = json.dumps(dataclasses.asdict(model.config), indent=2)
    (folder / CONFIG).write_text(content + "\n", encoding="utf-8")


def _check_unchanged(model: VisionTransformer) -> None:
    """Raises ValueError where a module is not as the model's config builds it, or where layers share a parameter."""
    with torch.device("meta"):
        built = dict(build_vit(**dataclasses.asdict(model.config)).named_modules())
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in built | modules:
        if ".parametrizations" in path:
            continue
        ours, theirs = modules.get(path), built.get(path)
        if ours is None or theirs is None or _kind(ours) != _kind(theirs):
            raise ValueError(
                f"{path or 'the model'} is not what the model's config builds, which alone would be kept: fold an adapter "
                "into the weights, make pruning permanent, or keep the model by torch.save"
            )
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(parameter, name)) != name:
            raise ValueError(
                f"{first} and {name} are one parameter, which the loaded model would have twice: part them, or keep the "
                "model by torch.save"
            )


def _kind(module: nn.Module) -> tuple[type, dict[str, Any]]:
    """Type and settings of a module, without tensors and parts."""
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in PASSING}
    return parametrize.type_before_parametrizations(module), settings


def load_pretrained(name: str, *, folder: str | Path) -> VisionTransformer:
    """The model that `save_pretrained` wrote to a folder, in evaluation mode, on the CPU and in the type of its weights.

    Args:
        name: which of `MODELS` it is, of whatever size and start.
        folder: where it is; or a file of weights alone, of the model as `create_model` builds it by that name.

    Raises:
        FileNotFoundError: the folder has no such model.
        ValueError: the configuration is of another model, or weights and configuration disagree.
        ImportError: the package safetensors is not installed.
    """
    load_file = _safetensors().load_file
    from safetensors import SafetensorError

    check_model(name)
    folder = Path(folder)
    is_file = folder.is_file()
    path, weights = (folder, folder) if is_file else (folder / CONFIG, folder / WEIGHTS)
    for file in (path, weights):
        if not file.exists():
            others = ", ".join(sorted(other.name for other in folder.glob("*.safetensors")))
            remedy = f"; the folder has {others}: give the path of one" if others else ""
            raise FileNotFoundError(f"{file} is missing, which osa.save_pretrained writes{remedy}")
    try:
        options = MODELS[name] if is_file else json.loads(path.read_text(encoding="utf-8"))
        with torch.device("meta"):
            model = build_vit(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no configuration of a model: {error}") from None
    for option, value in MODELS[name].items():
        if getattr(model.config, option) != value:
            raise ValueError(f"{path} is not of {name}: {option} is {getattr(model.config, option)!r}, not {value!r}")
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is no file of safetensors, or not a whole one: {error}") from None
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"weights and configuration in {folder} disagree: {first}") from None
    return model.eval()


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("models are kept by the package safetensors: `pip install safetensors`") from None
    return safetensors.torch
