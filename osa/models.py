"""The paper's models by name, built and initialised by Section 4 and Appendix D.

An option of `build_vit` that picks a part does so in one of the dicts below; a new part is one more entry.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, nn

from osa.init import (
    init_orthogonal_attention_,
    init_softmax_attention_,
    init_suo_mlp_,
    init_xavier_mlp_,
    torch_linear_,
    truncated_normal_,
    xavier_linear_,
    zeros_linear_,
)
from osa.linalg import EPSILON
from osa.modules import OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.vit import VisionTransformer

_OSA = {"attention": "orthogonal", "skip": False, "norm": False, "mlp_init": "suo"}
_VIT = {"attention": "softmax", "skip": True, "norm": True, "mlp_init": "xavier"}

MODELS: dict[str, dict] = {
    "osa_qr": _OSA | {"method": "qr"},
    "osa_ns": _OSA | {"method": "newton_schulz", "num_iterations": 6, "epsilon": EPSILON},
    "vit": _VIT,
    "vit_noskip": _VIT | {"skip": False},
    "vit_noskip_nonorm": _VIT | {"skip": False, "norm": False},
    # Not in the paper: the function of osa_qr without a basis, and with the gradient through QR
    "osa_exact": _OSA | {"method": "exact"},
    "osa_qr_literal": _OSA | {"method": "qr_literal"},
}


def create_model(name: str, *, generator: Generator | None = None, **changes) -> VisionTransformer:
    """A model of `MODELS` with the sizes of Appendix D, initialised.

    Args:
        name: "osa_qr", "osa_ns", "vit", "vit_noskip" or "vit_noskip_nonorm", the paper's five (Section 5), or "osa_exact" or
            "osa_qr_literal".
        generator: of the CPU, for every draw. Default: torch's global one.
        changes: options of `build_vit` that replace the model's own, e.g. depth=12.

    Raises:
        ValueError: there is no such model, or an option has an impossible value.
    """
    return build_vit(**_entry("model", name, MODELS) | changes, generator=generator)


def build_vit(
    *,
    attention: str,
    skip: bool,
    norm: bool,
    mlp_init: str,
    method: str | None = None,
    num_iterations: int | None = None,
    epsilon: float | None = None,
    image_size: int = 28,
    patch_size: int = 4,
    num_classes: int = 10,
    embed_dim: int = 64,
    depth: int = 6,
    num_heads: int = 4,
    mlp_ratio: float = 4,
    in_channels: int = 1,
    alpha: float = 0.1,
    embedding_std: float = 0.02,
    alpha_per_head: bool = True,
    xavier_fused_qkv: bool = False,
    suo_transposed: bool = False,
    patch_embedding: str = "xavier",
    head: str = "xavier",
    generator: Generator | None = None,
) -> VisionTransformer:
    """A Vision Transformer of Appendix D from its options, initialised. The defaults are the paper's.

    Args:
        attention: "orthogonal" (Eq. 5) or "softmax".
        skip, norm, image_size, patch_size, num_classes, embed_dim, depth, mlp_ratio, in_channels: see `VisionTransformer`.
        mlp_init: "suo" (Section 4.4) or "xavier" (Appendix D).
        method, num_iterations, epsilon: of orthogonal attention alone; see `orthogonal_attention`. None: its defaults.
        num_heads: h, 2 or more for orthogonal attention.
        alpha, alpha_per_head: initial α of orthogonal attention, and whether every head has its own.
        embedding_std: σ of positions and [cls].
        xavier_fused_qkv: draw the query, key and value of softmax attention as one matrix.
        suo_transposed: SUO of the weights read as [in, out].
        patch_embedding: "xavier" or "torch", PyTorch's default.
        head: "xavier", "zeros" or "torch".
        generator: of the CPU, for every draw. Default: torch's global one, of which nothing is drawn otherwise.

    Raises:
        ValueError: an option has an impossible value.
    """
    _check_positive(image_size=image_size, patch_size=patch_size, num_classes=num_classes, in_channels=in_channels)
    _check_positive(embed_dim=embed_dim, num_heads=num_heads, embedding_std=embedding_std)
    if int(embed_dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio {mlp_ratio} leaves the MLPs no hidden unit; 1/embed_dim or more does")
    options = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon, "alpha": alpha}
    options |= {"alpha_per_head": alpha_per_head, "xavier_fused_qkv": xavier_fused_qkv, "suo_transposed": suo_transposed}
    make_attention, init_attention_ = _entry("attention", attention, ATTENTION)(**options)
    init_mlp_ = _entry("mlp_init", mlp_init, MLP_INIT)(**options)
    init_patch_embedding_ = _entry("patch_embedding", patch_embedding, PATCH_EMBEDDING_INIT)
    init_head_ = _entry("head", head, HEAD_INIT)

    with torch.device("meta"):  # shapes without values, so that every weight is drawn once, below
        vit = VisionTransformer(
            image_size=image_size,
            patch_size=patch_size,
            num_classes=num_classes,
            embed_dim=embed_dim,
            depth=depth,
            mlp_ratio=mlp_ratio,
            attention=partial(make_attention, embed_dim, num_heads),
            skip=skip,
            norm=norm,
            in_channels=in_channels,
        )
    _allocate(vit)

    # The order of the draws is part of what a seed means.
    truncated_normal_(vit.cls_token, embedding_std, generator=generator)
    truncated_normal_(vit.position_embedding, embedding_std, generator=generator)
    init_patch_embedding_(vit.patch_embedding, generator=generator)
    init_head_(vit.head, generator=generator)
    for block in vit.blocks:
        init_attention_(block.attention, generator=generator)
        init_mlp_(block.mlp, generator=generator)
    for module in vit.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return vit


def _allocate(module: nn.Module) -> None:
    """Moves parameters from the meta device to the default one, as `to_empty` does, but under FakeTensorMode too."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(torch.empty_like(parameter, device=torch.get_default_device())))


# An entry takes all options of `build_vit` that concern some attention or MLP, and leaves alone those that are not its own.


def _orthogonal_attention(
    *, method: str | None, num_iterations: int | None, epsilon: float | None, alpha: float, alpha_per_head: bool, **_
) -> tuple[Callable[[int, int], nn.Module], Callable[..., None]]:
    options = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon}
    given = {name: value for name, value in options.items() if value is not None}
    make = partial(OrthogonalSelfAttention, alpha_per_head=alpha_per_head, **given)
    return make, partial(init_orthogonal_attention_, alpha=alpha)


def _softmax_attention(
    *, method: str | None, num_iterations: int | None, epsilon: float | None, xavier_fused_qkv: bool, **_
) -> tuple[Callable[[int, int], nn.Module], Callable[..., None]]:
    for name, value in (("method", method), ("num_iterations", num_iterations), ("epsilon", epsilon)):
        if value is not None:
            raise ValueError(f"{name} belongs to orthogonal attention; leave it out, or None, for softmax attention")
    return SoftmaxSelfAttention, partial(init_softmax_attention_, fused_qkv=xavier_fused_qkv)


def _suo_mlp(*, suo_transposed: bool, **_) -> Callable[..., None]:
    return partial(init_suo_mlp_, transposed=suo_transposed)


def _xavier_mlp(**_) -> Callable[..., None]:
    return init_xavier_mlp_


ATTENTION = {"orthogonal": _orthogonal_attention, "softmax": _softmax_attention}  # what makes a layer, what initialises it
MLP_INIT = {"suo": _suo_mlp, "xavier": _xavier_mlp}
PATCH_EMBEDDING_INIT = {"xavier": xavier_linear_, "torch": torch_linear_}
HEAD_INIT = PATCH_EMBEDDING_INIT | {"zeros": zeros_linear_}


def _entry(option: str, name: str, entries: dict):
    if name not in entries:
        raise ValueError(f"{option} {name!r} is unknown; choose one of {', '.join(entries)}")
    return entries[name]


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")
