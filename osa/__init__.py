"""Orthogonal self-attention (Zhang & Martens): attention matrices exp(S) that are orthogonal, at linear cost."""

from osa import functional, init, linalg
from osa.modules import MLP, Block, OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.vit import VisionTransformer

__all__ = [
    "MLP",
    "Block",
    "OrthogonalSelfAttention",
    "SoftmaxSelfAttention",
    "VisionTransformer",
    "functional",
    "init",
    "linalg",
]
