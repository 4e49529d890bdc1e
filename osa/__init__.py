"""Orthogonal self-attention (Zhang & Martens): attention matrices exp(S) that are orthogonal, at linear cost."""

import warnings
from importlib.util import find_spec

import torch

from osa import compiled  # noqa: F401, which registers itself
from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from osa.models import MODELS, ModelConfig, build_vit, create_model
from osa.modules import MLP, Block, OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.pretrained import load_pretrained, save_pretrained
from osa.varlen import orthogonal_attention_varlen
from osa.vit import VisionTransformer

__version__ = "1.1.0"
NUMERICS = 2  # raised by an edit that changes the numbers of a training: runs of another one are trained again

__all__ = [
    "MLP",
    "MODELS",
    "NUMERICS",
    "Block",
    "ModelConfig",
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

if torch.cuda.device_count() and find_spec("triton"):  # the import takes a second, and the CPU has no use for it
    try:
        from osa import kernels  # noqa: F401
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"osa.kernels is not used: {type(error).__name__}: {error}", stacklevel=2)
