"""A Transformer block with optional skips and norms, and its parts: two kinds of self-attention and the MLP."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from osa.functional import orthogonal_attention
from osa.init import init_orthogonal_attention_, init_softmax_attention_
from osa.masking import check_condition, check_dropout_and_causal, check_tensors
from osa.options import EPSILON, NORM_EPS, Method, MethodOptions, check_method
from osa.runtime import has_hooks, is_eager

Device = torch.device | str | None
Dtype = torch.dtype | None


class SelfAttention(nn.Module):
    """Query, key, value and output projections of multi-head self-attention. Subclasses define the attention in `mix`.

    Head i uses rows i·d_v to (i+1)·d_v of the query, key and value weights, and columns i·d_v to (i+1)·d_v of the output
    weight. The sum of A_i X W^V_i W^O_i over heads (Eq. 4) is then one product: concatenated heads times output weight.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads {num_heads} must divide embed_dim {embed_dim}")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        linear = partial(nn.Linear, embed_dim, embed_dim, device=device, dtype=dtype)
        self.query, self.key, self.value = (linear(bias=bias) for _ in range(3))
        self.out = linear(bias=bias)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns query, key and value of each head, (B, num_heads, N, d_v), for x (B, N, embed_dim).

        A single matrix product computes all three if the layers can be joined.
        """
        parts = (self.query, self.key, self.value)
        if joined := _joined(parts):
            qkv = F.linear(x, *joined).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, h, d_v)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        else:
            query, key, value = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return query, key, value

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Returns A_i V_i of each head, (B, h, num_outputs, d_v), for the first `num_outputs` tokens, or for all if None."""
        raise NotImplementedError

    def forward(self, x: Tensor, num_outputs: int | None = None, *others: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Σ_i A_i X W^V_i W^O_i (Eq. 4), (B, N, embed_dim) → (B, N, embed_dim), or (N, embed_dim) → (N, embed_dim).

        Args:
            num_outputs: compute the output of only the first `num_outputs` tokens. None: all.
            attn_mask: boolean, False for padding, (B, N) or (N,). 3D and 4D masks are broadcast to (B, num_heads, N, N).

        Raises:
            TypeError: x or the mask is not a tensor.
            ValueError: x has a wrong shape, is nested or is not floating-point; key and value are given too; or the mask
                has a wrong dtype, device or shape, or its rows differ.
        """
        self._check(x, num_outputs, *others)
        mask = attn_mask if attn_mask is None else _for_heads(attn_mask, x)
        query, key, value = self.project(x if x.dim() == 3 else x[None])
        heads = self.mix(query, key, value, num_outputs, mask)  # A_i V_i, (B, h, N, d_v)
        y = self.out(heads.transpose(1, 2).flatten(2))  # (B, N, d)
        return y if x.dim() == 3 else y[0]

    def _check(self, x: Tensor, num_outputs: int | None, *others: Tensor) -> None:
        """Raises the errors that `forward` documents, except those about the mask."""
        if others or isinstance(num_outputs, Tensor):
            raise ValueError(
                "self-attention takes one input, from which it computes query, key and value: call it as layer(x)"
            )
        if not isinstance(x, Tensor):
            raise TypeError(f"the tokens must be a tensor, not {type(x).__name__}: use torch.as_tensor")
        if x.is_nested:
            raise ValueError(
                "nested tensors are not supported: pad them with torch.nested.to_padded_tensor, and mask the padding with "
                "attn_mask"
            )
        if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim or not x.is_floating_point():
            d = self.embed_dim
            raise ValueError(
                f"the tokens must be a floating-point tensor of shape (B, N, {d}) or (N, {d}), not {x.dtype} of shape "
                f"{tuple(x.shape)}"
            )


def attention_matrix(attention: SelfAttention, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Returns the attention matrix A of each head, (B, num_heads, N, N), for x (B, N, d), computed as A V with V = I."""
    query, key, _ = attention.project(x)
    num_tokens = x.shape[-2]
    identity = torch.eye(num_tokens, dtype=x.dtype, device=x.device).expand(*query.shape[:-2], num_tokens, num_tokens)
    return attention.mix(query, key, identity, None, attn_mask)


def _for_heads(attn_mask: Tensor, x: Tensor) -> Tensor:
    """Reshapes a mask, (B, N) → (B, 1, 1, N) or (N,) → (1, 1, N). A mask of 3 or more dimensions stays as it is."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a boolean tensor, not {type(attn_mask).__name__}: use torch.as_tensor")
    if attn_mask.dim() > 2:
        return attn_mask
    if attn_mask.shape != x.shape[:-1] or attn_mask.dtype != torch.bool:
        expected, given = tuple(x.shape[:-1]), f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}"
        raise ValueError(
            f"attn_mask must be a boolean tensor of shape {expected}, or of three or more dimensions, not {given}"
        )
    if is_eager() and attn_mask.dim() == 2 and attn_mask.shape[0] == attn_mask.shape[1] > 1:
        lower = torch.ones_like(attn_mask).tril()
        check_condition(
            (attn_mask != lower).any() & (attn_mask == lower).any(),  # False for the triangle and for its complement
            "attn_mask is triangular, so it could be a causal mask (N, N) or a padding mask (B, N): pass attn_mask[None] "
            "for a causal mask, or attn_mask[:, None, None] for a padding mask",
        )
    return attn_mask[..., None, None, :]


def _joined(parts: tuple[nn.Linear, ...]) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight and bias of one linear layer d → 3d that computes query, key and value, or None if no layer can."""
    if not all(map(_is_plain, parts)):
        return None
    weights = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)) or not _are_alike(weights) or not _are_alike(biases):
        return None
    return torch.cat(weights), torch.cat(biases) if biases else None


def _is_plain(part: nn.Module) -> bool:
    """True for an `nn.Linear`, parametrised or not. False for a subclass, or if hooks or another `forward` are set."""
    if parametrize.type_before_parametrizations(part) is not nn.Linear or "forward" in vars(part):
        return False
    return not has_hooks(part)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """True if shapes, dtypes and devices are the same. False for subclasses of Tensor, which may not support `torch.cat`."""
    is_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    return is_plain and len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) <= 1


class OrthogonalSelfAttention(SelfAttention):
    """Multi-head orthogonal self-attention (Eq. 3–5): Σ_i exp(S_i) X W^V_i W^O_i, S_i = α_i/√d_v (Q_i K_iᵀ − K_i Q_iᵀ).

    The layer has no biases, is initialised as in Section 4, is permutation equivariant, and is not causal.

    Args:
        embed_dim: d.
        num_heads: h ≥ 2, because Section 4.2 needs 2 d_v ≤ d, where d_v = d/h.
        method, num_iterations, epsilon: as for `osa.orthogonal_attention`; the attribute `options` holds them.
        alpha_init: initial α.
        alpha_per_head: if True, each head has its own α. If False, all heads share one α.
        device, dtype: of the weights.

    Raises:
        ValueError: h does not divide d, 2 d_v > d, the method is unknown, a number is out of range, or `num_iterations` is
            given for a method that does not iterate.

    Example:
        >>> OrthogonalSelfAttention(embed_dim=64, num_heads=4)(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        method: Method = "exact",
        num_iterations: int | None = None,
        epsilon: float = EPSILON,
        alpha_init: float = 0.1,
        alpha_per_head: bool = True,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        if num_heads < 2:
            raise ValueError(
                f"num_heads {num_heads} gives 2 d_v = {2 * embed_dim} > embed_dim = {embed_dim}; "
                "orthogonal attention needs 2 or more heads (Section 4.2)"
            )
        check_method(method, num_iterations, epsilon)
        if not math.isfinite(alpha_init):
            raise ValueError(f"alpha_init must be a finite number, not {alpha_init!r}")
        self.options: MethodOptions = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon}
        self.alpha = nn.Parameter(torch.empty(num_heads if alpha_per_head else 1, device=device, dtype=dtype))
        init_orthogonal_attention_(self, alpha=alpha_init)

    def extra_repr(self) -> str:
        alpha = str(tuple(self.alpha.shape))
        if type(self.alpha.data) is Tensor and not self.alpha.is_meta:
            alpha = ", ".join(f"{each:.3g}" for each in dict.fromkeys(self.alpha.tolist()))
        return f"{super().extra_repr()}, method={self.options['method']}, alpha={alpha}"

    def scale(self) -> Tensor:
        """α/√d_v of Eq. 5, (num_heads or 1, 1, 1)."""
        return (self.alpha / math.sqrt(self.embed_dim // self.num_heads))[:, None, None]

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        heads = orthogonal_attention(query, key, value, attn_mask, scale=self.scale(), **self.options)
        return heads[:, :, :num_outputs]  # (B, h, N, d_v)


class LayerOptions(TypedDict, total=False):
    """Options of `OrthogonalSelfAttention`."""

    method: Method
    num_iterations: int | None
    epsilon: float
    alpha_init: float
    alpha_per_head: bool
    device: Device
    dtype: Dtype


class _NoFastPath:
    """A placeholder weight. Its `__torch_function__` keeps torch's encoder off the fast path, which computes softmax."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class MultiheadOrthogonalAttention(OrthogonalSelfAttention):
    """`OrthogonalSelfAttention` with the call signature of `nn.MultiheadAttention`, for encoders of torch and torchvision.

    Cross-attention is not supported. A mask may exclude whole tokens (padding), but not single pairs of query and key.

    Args:
        embed_dim: d.
        num_heads: h ≥ 2.
        batch_first: if True, tokens are (B, N, d). If False, they are (N, B, d), the default of `nn.MultiheadAttention`.
        options: options of `OrthogonalSelfAttention`. Both classes have the same state dict.

    Raises:
        ValueError: as for `OrthogonalSelfAttention`.

    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> encoder.self_attn = MultiheadOrthogonalAttention(64, 4, batch_first=True)
        >>> encoder(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    in_proj_weight = in_proj_bias = _NoFastPath()
    _qkv_same_embed_dim = True  # torch's encoder reads this attribute

    def __init__(
        self, embed_dim: int, num_heads: int, *, batch_first: bool = False, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.batch_first = batch_first

    @property
    def out_proj(self) -> nn.Linear:
        return self.out

    def forward(  # type: ignore[override]  # the signature of nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, with the shape of query, and the matrices exp(S). Without `need_weights`, the latter are None.

        Args:
            query, key, value: the same tensor, (B, N, d), or (N, B, d) if not `batch_first`, or (N, d).
            key_padding_mask: (B, N) or (N,), True or −∞ for padding, False or 0 for other tokens.
            need_weights: return the matrices, (B, N, N), or (N, N) if query is (N, d).
            attn_mask: a second padding mask, (N, N) or (B·h, N, N), with equal rows, and values as in `key_padding_mask`.
            average_attn_weights: average the matrices over heads; otherwise they are (B, h, N, N) or (h, N, N).
            is_causal: must be False.

        Raises:
            TypeError: the tokens or a mask are not tensors.
            ValueError: query, key and value are different tensors, a mask has differing rows or numbers other than 0 and −∞,
                or the shapes do not match.
        """
        if not (query is key is value):
            raise ValueError(
                "query, key and value must be the same tensor, as in attention(x, x, x): orthogonal attention needs queries "
                "and keys of the same tokens, so it does not support cross-attention"
            )
        check_tensors(query)
        check_dropout_and_causal(0.0, is_causal)
        is_turned = not self.batch_first and query.dim() == 3
        x = query.transpose(0, 1) if is_turned else query
        mask = self._mask(x, key_padding_mask, attn_mask)
        y = super().forward(x, attn_mask=mask)
        weights = self._weights(x, mask, average_attn_weights).to(y.dtype) if need_weights else None
        return y.transpose(0, 1) if is_turned else y, weights

    def _mask(self, x: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
        """Combines `key_padding_mask` and `attn_mask` into one mask, (B or 1, h or 1, 1 or N, N), False for padding."""
        square = (x.shape[-2], x.shape[-2])
        mask = None
        if key_padding_mask is not None:
            mask = _kept_entries("key_padding_mask", key_padding_mask, x.shape[:-1])[..., None, None, :]
        if attn_mask is not None:
            batch = x.shape[0] if x.dim() == 3 else 1
            is_of_heads = isinstance(attn_mask, Tensor) and attn_mask.dim() == 3
            kept = _kept_entries("attn_mask", attn_mask, (batch * self.num_heads, *square) if is_of_heads else square)
            kept = kept.unflatten(0, (batch, self.num_heads)) if is_of_heads else kept[None]
            mask = kept if mask is None else mask & kept
        return mask

    def _weights(self, x: Tensor, mask: Tensor | None, average: bool) -> Tensor:
        weights = attention_matrix(self, x if x.dim() == 3 else x[None], mask)  # (B, h, N, N)
        weights = weights.mean(1) if average else weights
        return weights if x.dim() == 3 else weights[0]


def _kept_entries(name: str, mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Checks a mask in the format of `nn.MultiheadAttention`, and returns a boolean mask that is False for padding."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(mask).__name__}: use torch.as_tensor")
    if mask.shape != torch.Size(shape) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        given = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ValueError(f"{name} must be a boolean or floating-point tensor of shape {tuple(shape)}, not {given}")
    if mask.dtype == torch.bool:
        return ~mask
    check_condition(
        ((mask == 0) | (mask == -math.inf)).all(),
        f"{name} must be 0 or −∞ everywhere: orthogonal attention has no softmax logits to which other numbers could be "
        "added",
    )
    return mask == 0


class SoftmaxSelfAttention(SelfAttention):
    """Multi-head softmax self-attention with biases (Vaswani et al. 2017), initialised as in Appendix D.

    Args:
        embed_dim: d.
        num_heads: h.
        device, dtype: of the weights.

    Raises:
        ValueError: num_heads does not divide embed_dim.

    Example:
        >>> SoftmaxSelfAttention(embed_dim=64, num_heads=4)(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__(embed_dim, num_heads, bias=True, device=device, dtype=dtype)
        init_softmax_attention_(self)

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None = None
    ) -> Tensor:
        return softmax_attention(query, key, value, num_outputs, attn_mask)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, attn_mask: Tensor | None
) -> Tensor:
    """softmax(Q_i K_iᵀ/√d_v) V_i for the first `num_outputs` queries, with a mask (..., 1 or N, N)."""
    mask = attn_mask if attn_mask is None else attn_mask[..., :num_outputs, :]
    return F.scaled_dot_product_attention(query[:, :, :num_outputs], key, value, attn_mask=mask)


class MLP(nn.Module):
    """Linear layer, activation, linear layer, applied to each token separately (Eq. 2).

    Example:
        >>> MLP(64, 256)(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_dim, embed_dim, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class Block(nn.Module):
    """Attention, then an MLP (Eq. 1–2), each with an optional pre-norm and an optional skip connection.

    Args:
        attention: a module (B, N, d) → (B, N, d) that also takes `num_outputs`, and `attn_mask` if the block is given one.
        mlp: a module (B, N, d) → (B, N, d).
        skip: add each sublayer's input to its output.
        norm: apply LayerNorm before each sublayer.
        norm_eps: ε of LayerNorm.
        shortcut: α of a normalised skip α x + √(1 − α²) f(x) (Martens et al. 2021). The skip preserves the mean square if x
            and f(x) have the same mean square. None: x + f(x).

    Raises:
        ValueError: the shortcut is not in [0, 1].

    Example:
        >>> block = Block(OrthogonalSelfAttention(64, 4), MLP(64, 256), embed_dim=64, skip=False, norm=False)
        >>> block(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
    """

    attention: Any
    mlp: Any

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        embed_dim: int,
        skip: bool,
        norm: bool,
        norm_eps: float = NORM_EPS,
        shortcut: float | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        make_norm = partial(nn.LayerNorm, embed_dim, norm_eps, device=device, dtype=dtype) if norm else nn.Identity
        if shortcut is not None and not 0 <= shortcut <= 1:
            raise ValueError(f"shortcut must be in [0, 1], not {shortcut!r}")
        self.norm1, self.attention, self.norm2 = make_norm(), attention, make_norm()
        self.mlp = mlp
        self.skip, self.shortcut = skip, shortcut

    def forward(self, x: Tensor, num_outputs: int | None = None, *, attn_mask: Tensor | None = None) -> Tensor:
        """Maps x, (B, N, d) or (N, d), to an output of the same shape.

        Args:
            num_outputs: compute the output of only the first `num_outputs` tokens. None: all.
            attn_mask: boolean, (B, N), False for padding, or another mask that the attention accepts.
        """
        masked = {} if attn_mask is None else {"attn_mask": attn_mask}
        y = self.join(x[..., :num_outputs, :], self.attention(self.norm1(x), num_outputs, **masked))  # (B, N, d)
        return self.join(y, self.mlp(self.norm2(y)))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """Applies the skip connection to a sublayer's input x and output y. Without skips, returns y."""
        if not self.skip:
            return y
        return x + y if self.shortcut is None else self.shortcut * x + math.sqrt(1 - self.shortcut**2) * y
