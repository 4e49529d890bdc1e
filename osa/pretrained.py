"""Models as folders: `model.safetensors` has the weights and `config.json` the options that build the model around them."""

import dataclasses
import json
from pathlib import Path

import torch
from torch.nn.utils import parametrize

from osa.models import MODELS, build_vit
from osa.vit import VisionTransformer

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_pretrained(model: VisionTransformer, folder: str | Path) -> None:
    """Writes a model of `create_model` or `build_vit` to a folder. A parametrised weight is written as the weight it makes.

    Raises:
        ValueError: the model was built in another way, so that no configuration says how.
        ImportError: the package safetensors is not installed.
    """
    save_file = _safetensors().save_file
    if model.config is None:
        raise ValueError("the model has no config: build it by osa.create_model or osa.build_vit, or keep its state_dict")
    state = model.state_dict()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            inside = f"{path}.parametrizations."
            state = {key: tensor for key, tensor in state.items() if not key.startswith(inside)}
            state |= {f"{path}.{name}": getattr(module, name).detach() for name in module.parametrizations}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS)
    content = json.dumps(dataclasses.asdict(model.config), indent=2)
    (folder / CONFIG).write_text(content + "\n", encoding="utf-8")


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
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; choose one of {', '.join(MODELS)}")
    is_file = Path(folder).is_file()
    path, weights = (Path(folder), Path(folder)) if is_file else (Path(folder, CONFIG), Path(folder, WEIGHTS))
    for file in (path, weights):
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing; osa.save_pretrained writes it")
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
        model.load_state_dict(load_file(weights), assign=True)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"weights and configuration in {folder} disagree: {first}") from None
    return model.eval()


def _safetensors():
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("models are kept by the package safetensors: `pip install safetensors`") from None
    return safetensors.torch
