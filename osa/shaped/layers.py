"""Softmax attention whose initial attention matrix is a given matrix or the identity (He et al. 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from osa.init import init_signal_preserving_attention_, init_value_skipinit_attention_
from osa.modules import Device, Dtype, SelfAttention, softmax_attention


class SignalPreservingSelfAttention(SelfAttention):
    """Softmax attention with the same initial attention matrix A ≥ 0 in every head (He et al. 2023, Eq. 10, Algorithm 1).

        heads_i = D softmax(Q_i K_iᵀ/√d_v + log P) V_i,        A = D P,

    D is the diagonal matrix of the row sums of A. D and log P are fixed. Where A is 0, log P is the lowest finite float.
    Initially W^Q = 0, so heads_i = A V_i. The initial W^V and W^O are orthogonal, so the layer maps X to A X W with an
    orthogonal W. The layer has no biases.

    Args:
        embed_dim: d.
        num_heads: h.
        matrix: A, (N, N). Its rows and columns are in the order of the tokens.

    Raises:
        ValueError: h does not divide d, or A is not square.
    """

    gain: Tensor
    bias: Tensor

    def __init__(
        self, embed_dim: int, num_heads: int, matrix: Tensor, *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"the attention matrix must be (N, N), not {tuple(matrix.shape)}")
        gain = matrix.sum(-1, keepdim=True)
        dtype = dtype or torch.get_default_dtype()
        bias = (matrix / gain).log().to(dtype).clamp(min=torch.finfo(dtype).min)  # weight averaging would turn −∞ into NaN
        self.register_buffer("gain", gain.to(device, dtype))  # (N, 1)
        self.register_buffer("bias", bias.to(device))  # (N, N)
        init_signal_preserving_attention_(self)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is not supported: the matrix A is for a fixed number of tokens, none of which can be padding"
            )
        mask = self.bias[:num_outputs]
        heads = F.scaled_dot_product_attention(query[:, :, :num_outputs], key, value, attn_mask=mask)
        return self.gain[:num_outputs] * heads  # (B, h, n, d_v)


class ValueSkipInitSelfAttention(SelfAttention):
    """Multi-head softmax attention whose attention matrix is initially the identity (Value-SkipInit; He et al. 2023, Eq. 7).

        heads_i = α_i V_i + β_i softmax(Q_i K_iᵀ/√d_v) V_i

    Each head has an α_i (`shortcut`, initially 1) and a β_i (`residual`, initially 0). There are no biases.

    Raises:
        ValueError: num_heads does not divide embed_dim.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        self.shortcut = torch.nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.residual = torch.nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        init_value_skipinit_attention_(self)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        heads = softmax_attention(query, key, value, num_outputs, attn_mask)
        return self.shortcut[:, None, None] * value[:, :, :num_outputs] + self.residual[:, None, None] * heads
