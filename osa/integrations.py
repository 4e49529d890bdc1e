"""Orthogonal attention inside models of timm and of Hugging Face's transformers; importing this needs neither."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from osa.functional import check_method, orthogonal_attention


def timm_attention(*, method: str = "exact", alpha_init: float = 0.1, **options: Any) -> type[nn.Module]:
    """A class for the argument `attn_layer` of timm's Vision Transformers: timm's `Attention` with exp(S) for the softmax.

    It has timm's weights, biases and norms under timm's names, so that a checkpoint of timm lacks `alpha` alone, one number
    for each head. Dropout of attention and causal masks are refused; a boolean mask of padding is fine.

    Args:
        method, options: as for `orthogonal_attention`.
        alpha_init: initial α, which multiplies timm's scale 1/√d_v.

    Raises:
        ImportError: timm is not installed.
        ValueError: the method is unknown.
    """
    from timm.layers import Attention

    check_method(method, options.get("num_iterations"))

    class OrthogonalAttention(Attention):
        def __init__(self, dim: int, num_heads: int = 8, **others: Any) -> None:
            super().__init__(dim, num_heads, **others)
            weight = self.proj.weight
            self.alpha = nn.Parameter(torch.full((num_heads,), alpha_init, device=weight.device, dtype=weight.dtype))

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # (B, N, 3, h, d_v)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
            query, key = self.q_norm(query), self.k_norm(key)
            scale = self.scale * self.alpha[:, None, None]
            dropout_p = self.attn_drop.p if self.training else 0.0
            settings = dict(scale=scale, method=method, **options)
            heads = orthogonal_attention(query, key, value, attn_mask, dropout_p, is_causal, **settings)
            y = self.norm(heads.transpose(1, 2).flatten(2))  # (B, N, h·d_v)
            if self.gate is not None:
                y = y * self.gate(x).sigmoid()
            return self.proj_drop(self.proj(y))

    return OrthogonalAttention


def register_with_transformers(name: str = "osa", *, method: str = "exact", alpha: float = 1.0, **options: Any) -> None:
    """Makes `attn_implementation=name` orthogonal attention in models of transformers that encode, such as ViT and BERT.

    With it goes the function that makes masks, without which transformers would hand padding over as no mask at all.
    Causal models and dropout of attention are refused at the first call.

    Args:
        method, options: as for `orthogonal_attention`.
        alpha: α, which multiplies the model's own scale, 1/√d_v as a rule.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the method is unknown.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    check_method(method, options.get("num_iterations"))

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for argument in ("position_bias", "softcap", "sliding_window"):
            if others.get(argument) is not None:
                raise ValueError(f"{argument} is refused: exp(S) has no logits for it to change")
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        scale = alpha * (scaling or 1 / math.sqrt(query.shape[-1]))
        settings = dict(scale=scale, enable_gqa=key.shape[1] != query.shape[1], method=method, **options)
        heads = orthogonal_attention(query, key, value, attention_mask, dropout, causal, **settings)
        return heads.transpose(1, 2).contiguous(), None  # (B, N, h, d_v), and no attention weights

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
