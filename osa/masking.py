"""Checks and applies the arguments that orthogonal attention shares with torch's `scaled_dot_product_attention`."""

import torch
from torch import Tensor

from osa.runtime import assert_later, has_values, is_captured, is_eager

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(*tensors: Tensor) -> None:
    """Raises TypeError or ValueError unless query, key and value are dense floating-point tensors on one device."""
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(f"query, key and value must be tensors, not {type(x).__name__}: use torch.as_tensor")
        if x.is_nested:
            raise ValueError(
                "nested tensors are not supported: pass their values() and offsets() to osa.orthogonal_attention_varlen"
            )
        if x.dim() < 2:
            raise ValueError("query, key and value need at least two dimensions, (..., N, d)")
        if x.dtype not in DTYPES:
            raise ValueError(
                f"query, key and value must be 16-, 32- or 64-bit floating-point tensors, not {x.dtype}: convert them, for "
                "example with .float()"
            )
        if x.device != tensors[0].device:
            raise ValueError(f"query, key and value must be on one device, not {tensors[0].device} and {x.device}")


def check_dropout_and_causal(dropout_p: float, is_causal: bool) -> None:
    """Raises ValueError for dropout and for a causal mask, because with either, attention would not be orthogonal."""
    if is_causal:
        raise ValueError(
            "is_causal=True is not supported: a causal attention matrix is triangular, and a triangular matrix is "
            "orthogonal only if it is diagonal, so no token could attend to another"
        )
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0, not {dropout_p}: with entries dropped, exp(S) would not be orthogonal; apply dropout to "
            "the output instead"
        )


def without_padding(query: Tensor, key: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sets query and key of padded tokens to zero, so that padded tokens and other tokens do not affect each other.

    Args:
        query, key: (..., N, d).
        mask: boolean, False for padding, (..., 1, N), or (..., N, N) with equal rows. Under torch.compile and in function
            transforms, the check for equal rows runs later, on the device.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: the mask has a wrong dtype, device or shape, or its rows differ.
    """
    num_tokens = query.shape[-2]
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a boolean tensor, not {type(mask).__name__}: use torch.as_tensor")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attn_mask must be boolean, not {mask.dtype}: orthogonal attention has no softmax logits to which a mask could "
            "be added"
        )
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on the device of the query, {query.device}, not {mask.device}")
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (0, 0)
    if columns != num_tokens or (rows != num_tokens and rows != 1):  # `in` cannot be traced with symbolic sizes
        raise ValueError(
            f"attn_mask must be (..., 1, {num_tokens}) or (..., {num_tokens}, {num_tokens}), not {tuple(mask.shape)}"
        )
    try:
        torch.broadcast_shapes(mask.shape[:-2], query.shape[:-2])
    except RuntimeError:
        batches = f"{tuple(mask.shape[:-2])} and {tuple(query.shape[:-2])}"
        raise ValueError(f"the batch dimensions of attn_mask and query must be broadcastable, but are {batches}") from None
    first = mask[..., :1, :]  # (..., 1, N)
    if mask.shape[-2] > 1:
        check_condition(
            (mask == first).all(),
            "attn_mask must mask whole tokens, with equal rows: with single entries masked, exp(S) would not be orthogonal",
        )
    left_out = ~first.mT  # (..., N, 1)
    return query.masked_fill(left_out, 0), key.masked_fill(left_out, 0)


def check_condition(condition: Tensor, message: str) -> None:
    """Raises ValueError if `condition` is false. In traces, transforms and CUDA graphs: RuntimeError, from the device."""
    if not is_eager() or is_captured(condition):
        assert_later(condition, message)
    elif has_values(condition) and not condition.is_meta and not condition:
        raise ValueError(message)


def repeat_heads(query: Tensor, other: Tensor) -> Tensor:
    """Repeats each head of key or value h/h' times, (..., h', N, d) → (..., h, N, d), as torch's `enable_gqa` does.

    Raises:
        ValueError: h' does not divide h.
    """
    heads, others = (x.shape[-3] if x.dim() > 2 else 0 for x in (query, other))
    if min(query.dim(), other.dim()) < 3 or (heads % others if others else heads):
        raise ValueError(
            f"with enable_gqa, the number of key and value heads must divide the query's {heads} heads, but is {others}"
        )
    return other.repeat_interleave(heads // others, dim=-3) if others else other
