"""Orthogonal self-attention (Zhang & Martens): attention matrices exp(S) that are orthogonal, at linear cost."""

from osa import functional, init, linalg
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
    "create_model",
    "functional",
    "init",
    "linalg",
    "orthogonal",
    "orthogonal_attention",
    "penalties",
    "shaped",
]
