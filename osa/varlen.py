"""Orthogonal attention for packed sequences: one tensor holds sequences of different lengths, one after the other."""

import itertools

import torch
from torch import Tensor

from osa.functional import orthogonal_attention
from osa.linalg import Scale
from osa.masking import check_tensors
from osa.options import EPSILON, Method, MethodOptions


def orthogonal_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: Scale | None = None,
    enable_gqa: bool = False,
    method: Method = "exact",
    num_iterations: int | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Applies `orthogonal_attention` to each sequence of packed tensors, with `cu_seqlens` as in FlashAttention.

    The sequences are padded with zeros to the length of the longest, so pack sequences of similar length. Padding changes
    the output only by rounding. Reading the lengths waits for the GPU, and causes a graph break under torch.compile.

    Args:
        query, key: (total, heads, d).
        value: (total, heads, d_value).
        cu_seqlens: the offsets of the B sequences: 0, n₁, n₁ + n₂, …, total. Integers, (B + 1,), on any device.
        scale, enable_gqa, method, num_iterations, epsilon: as for `orthogonal_attention`. A scale per head
            has the shape (heads, 1, 1). The gradient of "qr_literal" is defined only if all lengths are equal.

    Returns:
        (total, heads, d_value).

    Raises:
        TypeError, ValueError: as for `orthogonal_attention`, or the offsets are invalid.

    Example:
        >>> packed = torch.randn(30, 4, 16)  # 10 and 20 tokens of four heads
        >>> orthogonal_attention_varlen(packed, packed.roll(1), packed, torch.tensor([0, 10, 30])).shape
        torch.Size([30, 4, 16])
    """
    check_tensors(query, key, value)
    if not query.dim() == key.dim() == value.dim() == 3:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"packed query, key and value must be (total, heads, d), not {shapes}")
    lengths = _lengths(cu_seqlens, query.shape[0])
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        totals = ", ".join(str(x.shape[0]) for x in (query, key, value))
        raise ValueError(f"query, key and value must have the same number of tokens, not {totals}")
    counts = torch.tensor(lengths, device=query.device)
    is_token = torch.arange(max(lengths, default=0), device=query.device) < counts[:, None]  # (B, N)
    query, key, value = (_padded(x, is_token).transpose(1, 2) for x in (query, key, value))  # (B, heads, N, d)
    options: MethodOptions = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon}
    heads = orthogonal_attention(query, key, value, scale=scale, enable_gqa=enable_gqa, **options)
    return heads.transpose(1, 2)[is_token]


def _padded(x: Tensor, is_token: Tensor) -> Tensor:
    """(total, heads, d) → (B, N, heads, d)."""
    padded = x.new_zeros(*is_token.shape, *x.shape[1:])
    padded[is_token] = x
    return padded


def _lengths(cu_seqlens: Tensor, total: int) -> list[int]:
    """Returns the length of each sequence, given the offsets. Raises TypeError or ValueError if the offsets are invalid."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, not {type(cu_seqlens).__name__}: use torch.as_tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or not len(cu_seqlens):
        shape = tuple(cu_seqlens.shape)
        raise ValueError(f"cu_seqlens must be an integer tensor of shape (B + 1,), not {cu_seqlens.dtype} of shape {shape}")
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to {total}, the number of packed tokens, not {_brief(offsets)}")
    return lengths


def _brief(offsets: list[int]) -> str:
    """Formats the offsets for an error message. If there are more than eight, shows the first four and the last three."""
    if len(offsets) <= 8:
        return ", ".join(map(str, offsets))
    return ", ".join([*map(str, offsets[:4]), "…", *map(str, offsets[-3:])])
