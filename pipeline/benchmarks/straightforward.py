"""The models written in the obvious way: torchvision's ViT, and the formulas and library calls that the paper names.

The code is neither optimised nor slowed down: it calls torch.linalg.qr and torch.linalg.matrix_exp, and applies Eq. 9 to
the N×2d_v matrix [Q, K]. With the weights from `load_weights`, a model computes the same function as ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import osa
from osa.reference import newton_schulz_basis
from pipeline.config.params import RunConfig
from pipeline.results.measures import blocks_of

if TYPE_CHECKING:  # torchvision takes seconds to import, and the formulas do not need it
    from torchvision.models.vision_transformer import VisionTransformer

RENAMED = {  # part of a parameter's name in `osa.VisionTransformer` → the same part in torchvision
    "blocks.": "encoder.layers.encoder_layer_",
    "attention.out.": "attention.out_proj.",
    "attention.": "self_attention.",
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
    "mlp.fc1.": "mlp.0.",
    "mlp.fc2.": "mlp.3.",
    "patch_embedding.": "conv_proj.",
    "cls_token": "class_token",
    "position_embedding": "encoder.pos_embedding",
    "head.": "heads.head.",
    "norm.": "encoder.ln.",
}


def orthogonal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | Tensor, num_iterations: int | None = None
) -> Tensor:
    """Returns V + B (exp[S] − I) BᵀV, where [S] = BᵀSB (Eq. 5–7). Inputs and output are (..., N, d_v).

    B is a basis of the columns of M = [Q, K]. It comes from M's reduced QR decomposition, or from `num_iterations`
    Newton–Schulz iterations (Eq. 9).
    """
    m = torch.cat([query, key], dim=-1)  # (..., N, 2 d_v)
    if num_iterations is None:
        basis = torch.linalg.qr(m).Q
    else:
        basis = newton_schulz_basis(m, num_iterations=num_iterations, dtype=m.dtype)
    query, key = basis.mT @ query, basis.mT @ key  # (..., 2 d_v, d_v)
    s = scale * (query @ key.mT - key @ query.mT)  # (..., 2 d_v, 2 d_v)
    identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    return value + basis @ ((torch.linalg.matrix_exp(s) - identity) @ (basis.mT @ value))


class OrthogonalAttention(nn.Module):
    """Multi-head orthogonal attention with its projections (Eq. 3–4)."""

    def __init__(self, embed_dim: int, num_heads: int, num_iterations: int | None) -> None:
        super().__init__()
        self.num_heads, self.num_iterations = num_heads, num_iterations
        self.query, self.key, self.value, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4))
        self.alpha = nn.Parameter(torch.full((num_heads, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )  # (B, h, N, d_v)
        scale = self.alpha / math.sqrt(v.shape[-1])
        heads = orthogonal_attention(q, k, v, scale=scale, num_iterations=self.num_iterations)
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, N, d)


class SoftmaxAttention(nn.MultiheadAttention):
    """torch's multi-head attention, called as torchvision's encoder calls it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    """torchvision's block, without skips if `skip` is false and without LayerNorm if `norm` is false."""

    def __init__(self, attention: nn.Module, embed_dim: int, hidden_dim: int, *, skip: bool, norm: bool) -> None:
        from torchvision.models.vision_transformer import MLPBlock

        super().__init__()
        self.self_attention, self.skip = attention, skip
        self.ln_1, self.ln_2 = (nn.LayerNorm(embed_dim, eps=1e-6) if norm else nn.Identity() for _ in range(2))
        self.mlp = MLPBlock(embed_dim, hidden_dim, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.self_attention(self.ln_1(x))
        x = x + y if self.skip else y
        y = self.mlp(self.ln_2(x))
        return x + y if self.skip else y


def build(config: RunConfig) -> VisionTransformer:
    """Returns torchvision's ViT, built from our `Block` unless the variant is a softmax ViT with skips and LN."""
    from torchvision.models.vision_transformer import VisionTransformer

    model, variant = config.model, config.variant
    hidden_dim = int(model.embed_dim * model.mlp_ratio)
    vit = VisionTransformer(
        image_size=config.data.images.size,
        patch_size=model.patch_size,
        num_layers=model.depth,
        num_heads=model.num_heads,
        hidden_dim=model.embed_dim,
        mlp_dim=hidden_dim,
        num_classes=model.num_classes,
    )
    patches = dict(kernel_size=model.patch_size, stride=model.patch_size)
    vit.conv_proj = nn.Conv2d(config.data.images.channels, model.embed_dim, **patches)
    if variant.attention == "softmax" and variant.skip and variant.norm:
        return vit
    for i in range(model.depth):
        if variant.attention == "softmax":
            attention: nn.Module = SoftmaxAttention(model.embed_dim, model.num_heads, batch_first=True)
        else:
            attention = OrthogonalAttention(model.embed_dim, model.num_heads, variant.num_iterations)
        vit.encoder.layers[i] = Block(attention, model.embed_dim, hidden_dim, skip=variant.skip, norm=variant.norm)
    if not variant.norm:
        vit.encoder.ln = nn.Identity()
    return vit


def load_weights(model: VisionTransformer, ours: osa.VisionTransformer) -> None:
    """Copies all weights of our model into the straightforward model of the same variant."""
    own, state = model.state_dict(), {}
    (_, attention, _), *_ = blocks_of(ours)
    num_heads = attention.num_heads
    for name, tensor in ours.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = tensor.expand(num_heads) if name.endswith("alpha") else tensor
    for name in own:
        if "in_proj_" in name:  # nn.MultiheadAttention stacks query, key and value
            layer, kind = name.split("in_proj_")
            state[name] = torch.cat([state.pop(f"{layer}{part}.{kind}") for part in ("query", "key", "value")])
    model.load_state_dict({name: tensor.reshape(own[name].shape) for name, tensor in state.items()})
