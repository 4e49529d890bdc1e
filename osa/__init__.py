"""Orthogonal self-attention (Zhang & Martens): attention matrices exp(S) that are orthogonal, at linear cost."""

import warnings
from importlib.util import find_spec

import torch

from osa import compiled, functional, init, linalg
from osa.constrained import orthogonal, penalties
from osa.deep import shaped
from osa.functional import orthogonal_attention
from osa.models import MODELS, build_vit, create_model
from osa.modules import MLP, Block, OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.vit import VisionTransformer

NUMERICS = 1  # raised by an edit that changes the numbers of a training: runs of another one are trained again

__all__ = [
    "MLP",
    "MODELS",
    "NUMERICS",
    "Block",
    "OrthogonalSelfAttention",
    "SoftmaxSelfAttention",
    "VisionTransformer",
    "build_vit",
    "compiled",
    "create_model",
    "functional",
    "init",
    "linalg",
    "orthogonal",
    "orthogonal_attention",
    "penalties",
    "shaped",
]

if torch.cuda.device_count() and find_spec("triton"):  # the import takes a second, and the CPU has no use for it
    try:
        from osa import kernels  # noqa: F401
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"osa.kernels is not used: {type(error).__name__}: {error}", stacklevel=2)
