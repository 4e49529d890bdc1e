"""Orthogonal self-attention (Zhang & Martens 2026): attention with an orthogonal matrix exp(S), in linear time.

Names are imported on first use, so that reading `osa.MODELS` or `osa.NUMERICS` does not import torch.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osa.functional import orthogonal_attention, orthogonal_attention_matrix
    from osa.models import build_vit, create_model
    from osa.modules import MLP, Block, MultiheadOrthogonalAttention, OrthogonalSelfAttention, SoftmaxSelfAttention
    from osa.options import MODELS, ModelConfig
    from osa.pretrained import load_pretrained, save_pretrained
    from osa.varlen import orthogonal_attention_varlen
    from osa.vit import VisionTransformer

__version__ = "1.1.0"
# Increase this number with every edit that changes the results of training: runs made under a lower number may be invalid
NUMERICS = 2

__all__ = [
    "MLP",
    "MODELS",
    "NUMERICS",
    "Block",
    "ModelConfig",
    "MultiheadOrthogonalAttention",
    "OrthogonalSelfAttention",
    "SoftmaxSelfAttention",
    "VisionTransformer",
    "build_vit",
    "create_model",
    "load_pretrained",
    "orthogonal_attention",
    "orthogonal_attention_matrix",
    "orthogonal_attention_varlen",
    "save_pretrained",
]

_MODULES = {
    "functional": ("orthogonal_attention", "orthogonal_attention_matrix"),
    "models": ("build_vit", "create_model"),
    "modules": ("MLP", "Block", "MultiheadOrthogonalAttention", "OrthogonalSelfAttention", "SoftmaxSelfAttention"),
    "options": ("MODELS", "ModelConfig"),
    "pretrained": ("load_pretrained", "save_pretrained"),
    "varlen": ("orthogonal_attention_varlen",),
    "vit": ("VisionTransformer",),
}


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__`, or a module of this package, on first use (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"osa.{module}"), name)
            return value
    if not name.startswith("_") and find_spec(f"osa.{name}"):
        return importlib.import_module(f"osa.{name}")
    raise AttributeError(f"module 'osa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
