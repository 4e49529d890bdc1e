"""The paper's models by name, built and initialised by Section 4 and Appendix D; beside them models that are made for depth.

An option of `build_vit` that picks a part does so in one of the dicts below; a new part is one more entry.
"""

import math
import numbers
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, nn

from osa.deep.shaped import (
    ShapedGELU,
    ShapedLeakyReLU,
    SignalPreservingSelfAttention,
    ValueSkipInitSelfAttention,
    alpha_of_depth,
    dks_gelu,
    gain,
    gelu,
    gelu_tanh,
    linear_share,
    signal_preserving_attention,
    tat_leaky_relu,
)
from osa.init import (
    init_isometric_mlp_,
    init_ji_attention_,
    init_orthogonal_attention_,
    init_signal_preserving_attention_,
    init_softmax_attention_,
    init_suo_mlp_,
    init_value_skipinit_attention_,
    init_xavier_mlp_,
    lecun_linear_,
    torch_linear_,
    trunc_normal_linear_,
    truncated_normal_,
    xavier_linear_,
    zeros_linear_,
)
from osa.linalg import EPSILON
from osa.modules import NORM_EPS, OrthogonalSelfAttention, SoftmaxSelfAttention
from osa.vit import VisionTransformer

_OSA = {"attention": "orthogonal", "skip": False, "norm": False, "mlp_init": "suo"}
_VIT = {"attention": "softmax", "skip": True, "norm": True, "mlp_init": "xavier"}
# He et al. 2023 (H.1): q = 1 from the tokens on, an activation that keeps it, V and O orthogonal
_SHAPED = {"skip": False, "norm": False, "mlp_init": "shaped", "joint_value_output": True, "normalise_tokens": True}
_DKS = _SHAPED | {"activation": "dks_gelu"}
_ISO = {"mlp_init": "isometric"}
_SKIP = _SHAPED | {"skip": True, "normalised_skip": 1.4256}  # α = 0.98 at 36 blocks
_UNIFORM = {"attention": "signal_preserving", "kernel": "uniform", "kernel_last": 0.8, "repeated": 0.04}
_EXPONENTIAL = {"attention": "signal_preserving", "kernel": "exponential", "kernel_last": 0.05, "repeated": 0.04}

MODELS: dict[str, dict] = {
    "osa_qr": _OSA | {"method": "qr"},
    "osa_ns": _OSA | {"method": "newton_schulz", "num_iterations": 6, "epsilon": EPSILON},
    "vit": _VIT,
    "vit_noskip": _VIT | {"skip": False},
    "vit_noskip_nonorm": _VIT | {"skip": False, "norm": False},
    # Not in the paper: the function of osa_qr without a basis, and with the gradient through QR
    "osa_exact": _OSA | {"method": "exact"},
    "osa_qr_literal": _OSA | {"method": "qr_literal"},
    # For depth: OSA with the best α L of a grid (paper_outputs/studies/rates), and softmax in the same frame
    "osa_shaped": _DKS | {"attention": "orthogonal", "method": "exact", "alpha_times_depth": 0.36},
    "softmax_shaped": _DKS | {"attention": "softmax"},
    "softmax_shaped_norm": _DKS | {"attention": "softmax", "norm": True},
    # Of He et al. 2023
    "vskipinit": _DKS | {"attention": "value_skipinit"},
    "uspa": _DKS | _UNIFORM,
    "espa": _DKS | _EXPONENTIAL,
    "uspa_causal": _DKS | _UNIFORM | {"causal": True},
    "espa_causal": _DKS | _EXPONENTIAL | {"causal": True},
    "espa_skip": _SKIP | {"attention": "signal_preserving", "kernel": "exponential", "kernel_last": 0.6},
    "softmax_skip": _SKIP | {"attention": "softmax", "norm": True},
    "softmax_skip_nonorm": _SKIP | {"attention": "softmax"},
}
# The same with both layers of an MLP drawn together, which 72 blocks need at this width
MODELS |= {
    "osa_iso": MODELS["osa_shaped"] | _ISO,
    "softmax_iso": MODELS["softmax_shaped"] | _ISO,
    "espa_iso": MODELS["espa"] | _ISO,
    "uspa_iso": MODELS["uspa"] | _ISO,
    "vskipinit_iso": MODELS["vskipinit"] | _ISO,
}
# Attention or initialisation? Softmax that starts by Section 4 alone, and OSA that starts by Xavier
MODELS |= {
    "vit_section_4": _OSA | {"attention": "softmax", "attention_init": "section_4"},
    "osa_xavier": _OSA | {"method": "exact", "mlp_init": "xavier", "attention_init": "xavier"},
}
# Of Ji et al. 2025, who keep LayerNorm
_JI = {"attention": "softmax", "skip": False, "mlp_init": "suo", "attention_init": "ji"}
MODELS |= {"vit_noskip_ji": _JI | {"norm": True}, "vit_noskip_ji_nonorm": _JI | {"norm": False}}


def create_model(name: str, *, generator: Generator | None = None, **changes) -> VisionTransformer:
    """A model of `MODELS` with the sizes of Appendix D, initialised.

    Args:
        name: "osa_qr", "osa_ns", "vit", "vit_noskip" or "vit_noskip_nonorm", the paper's five (Section 5), or another one of
            `MODELS`.
        generator: of the default device, for every draw. Default: torch's global one.
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
    alpha_times_depth: float | None = None,
    kernel: str | None = None,
    kernel_last: float | None = None,
    causal: bool | None = None,
    cls_index: int | None = None,
    repeated: float | None = None,
    query_key_init: str | None = None,
    value_out_init: str | None = None,
    attention_init: str | None = None,
    qkv_bias: bool | None = None,
    joint_value_output: bool = False,
    activation: str = "gelu",
    normalise_tokens: bool = False,
    normalised_skip: float | None = None,
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
    mlp_bias_std: float = 0.0,
    patch_embedding: str = "xavier",
    head: str = "xavier",
    norm_eps: float = NORM_EPS,
    generator: Generator | None = None,
) -> VisionTransformer:
    """A Vision Transformer of Appendix D from its options, initialised. The defaults are the paper's.

    Args:
        attention: "orthogonal" (Eq. 5), "softmax", or of He et al. 2023 "signal_preserving" or "value_skipinit"; see
            `SignalPreservingSelfAttention` and `ValueSkipInitSelfAttention`.
        skip, norm, norm_eps, image_size, patch_size, num_classes, embed_dim, depth, mlp_ratio, in_channels: see
            `VisionTransformer`.
        normalise_tokens, embedding_std: see there, too.
        mlp_init: "suo" (Section 4.4), "xavier" (Appendix D), "shaped": SUO with a second layer that makes good what the
            activation takes from the mean square, or "isometric": both layers from one frame; see `init_isometric_mlp_`.
        method, num_iterations, epsilon: of orthogonal attention alone; see `orthogonal_attention`. None: its defaults.
        alpha_times_depth: of orthogonal attention alone: initial α times depth, instead of `alpha`; see `alpha_of_depth`.
        kernel, kernel_last, causal, cls_index, repeated: of signal-preserving attention alone, which needs the first two;
            see `signal_preserving_attention`. None: its defaults.
        query_key_init, value_out_init: of signal-preserving attention alone; see `init_signal_preserving_attention_`.
        attention_init: of orthogonal and softmax attention: "section_4", "xavier" (Appendix D) or "ji"; see
            `init_ji_attention_`. None: Section 4 for orthogonal attention and Xavier for softmax, as in the paper.
        qkv_bias: of softmax attention alone: whether query, key and value have biases. None: yes.
        joint_value_output: W^V and W^O of softmax or orthogonal attention each as one orthogonal matrix; the others, and
            those by "ji", are so in any case.
        activation: "gelu", its approximation "gelu_tanh", or shaped for the depth "dks_gelu" or "tat_leaky_relu"; see there
            for the least depth.
        normalised_skip: L (1 − α²) for skips α x + √(1 − α²) f(x); None: x + f(x).
        num_heads: h, 2 or more for orthogonal attention.
        alpha, alpha_per_head: initial α of orthogonal attention, and whether every head has its own.
        xavier_fused_qkv: draw query, key and value by Xavier as one matrix.
        suo_transposed: SUO of the weights read as [in, out].
        mlp_bias_std: σ of the MLPs' biases; 0 for none to be drawn.
        patch_embedding: "xavier", "torch" (PyTorch's default), "lecun" (Flax's) or "trunc_normal" (as positions).
        head: one of these or "zeros".
        generator: of the default device, for every draw. Default: torch's global one, of which nothing is drawn otherwise.

    Raises:
        ValueError: an option has an impossible value.
    """
    _check_sizes(image_size=image_size, patch_size=patch_size, num_classes=num_classes, in_channels=in_channels)
    _check_sizes(embed_dim=embed_dim, depth=depth, num_heads=num_heads)
    _check_finite(alpha=alpha)
    _check_finite(above=0, embedding_std=embedding_std, mlp_ratio=mlp_ratio, norm_eps=norm_eps)
    _check_finite(above=0, **_given(alpha_times_depth=alpha_times_depth))
    _check_finite(least=0, mlp_bias_std=mlp_bias_std, epsilon=epsilon or 0)
    if int(embed_dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio {mlp_ratio} leaves the MLPs no hidden unit; 1/embed_dim or more does")
    shortcut = _shortcut(skip, normalised_skip, depth)
    own = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon, "alpha_times_depth": alpha_times_depth}
    own |= {"kernel": kernel, "kernel_last": kernel_last, "causal": causal, "cls_index": cls_index, "repeated": repeated}
    own |= {"query_key_init": query_key_init, "value_out_init": value_out_init, "attention_init": attention_init}
    own |= {"qkv_bias": qkv_bias}
    _check_own(attention, own)
    num_tokens = (image_size // patch_size) ** 2 + 1
    options = own | {"embed_dim": embed_dim, "num_heads": num_heads, "num_tokens": num_tokens, "depth": depth}
    options |= {"alpha": alpha, "alpha_per_head": alpha_per_head, "shortcut": shortcut or 0.0}
    options |= {"joint_value_output": joint_value_output, "xavier_fused_qkv": xavier_fused_qkv}
    options |= {"norm": norm}
    make_attention, init_attention_ = _entry("attention", attention, ATTENTION)(**options)
    activate, mlp_gain, kappa = _entry("activation", activation, ACTIVATION)(depth)
    init_mlp_ = _entry("mlp_init", mlp_init, MLP_INIT)(suo_transposed=suo_transposed, gain=mlp_gain, kappa=kappa)
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
            attention=make_attention,
            skip=skip,
            norm=norm,
            norm_eps=norm_eps,
            shortcut=shortcut,
            activation=activate,
            normalise_tokens=normalise_tokens,
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
        if mlp_bias_std:
            for linear in (block.mlp.fc1, block.mlp.fc2):
                nn.init.normal_(linear.bias, std=mlp_bias_std, generator=generator)
    for module in vit.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return vit


def _allocate(module: nn.Module) -> None:
    """Moves parameters from the meta device to the default one, as `to_empty` does, but under FakeTensorMode too.

    Buffers have their values from the beginning, on the CPU.
    """
    device = torch.get_default_device()
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))


# An entry takes all options of `build_vit` that concern some attention or MLP, and leaves alone those that are not its own.
# Of an attention it returns what makes the layer of a block from its number, and what initialises it.

Parts = tuple[Callable[[int], nn.Module], Callable[..., None]]


def _orthogonal_attention(
    *,
    embed_dim: int,
    num_heads: int,
    depth: int,
    method: str | None,
    num_iterations: int | None,
    epsilon: float | None,
    alpha: float,
    alpha_times_depth: float | None,
    alpha_per_head: bool,
    attention_init: str | None,
    **options,
) -> Parts:
    given = _given(method=method, num_iterations=num_iterations, epsilon=epsilon)
    make = partial(OrthogonalSelfAttention, embed_dim, num_heads, alpha_per_head=alpha_per_head, **given)
    initial = alpha if alpha_times_depth is None else alpha_of_depth(alpha_times_depth, depth)
    return lambda _: make(), partial(_attention_init(attention_init or "section_4", **options), alpha=initial)


def _softmax_attention(
    *, embed_dim: int, num_heads: int, attention_init: str | None, qkv_bias: bool | None, **options
) -> Parts:
    make = partial(SoftmaxSelfAttention, embed_dim, num_heads, **_given(qkv_bias=qkv_bias))
    return lambda _: make(), _attention_init(attention_init or "xavier", **options)


def _attention_init(name: str, **options) -> Callable[..., None]:
    return _entry("attention_init", name, ATTENTION_INIT)(**options)


def _section_4(*, joint_value_output: bool, **_) -> Callable[..., None]:
    return partial(init_orthogonal_attention_, joint_value_output=joint_value_output)


def _ji(*, norm: bool, **_) -> Callable[..., None]:
    return partial(init_ji_attention_, **({} if norm else {"scale": 1.0}))


def _xavier_attention(*, xavier_fused_qkv: bool, joint_value_output: bool, **_) -> Callable[..., None]:
    return partial(init_softmax_attention_, fused_qkv=xavier_fused_qkv, joint_value_output=joint_value_output)


def _signal_preserving_attention(
    *,
    embed_dim: int,
    num_heads: int,
    num_tokens: int,
    depth: int,
    kernel: str | None,
    kernel_last: float | None,
    causal: bool | None,
    cls_index: int | None,
    repeated: float | None,
    query_key_init: str | None,
    value_out_init: str | None,
    shortcut: float,
    **_,
) -> Parts:
    if kernel is None or kernel_last is None:
        raise ValueError("signal_preserving attention needs kernel and kernel_last")
    given = _given(causal=causal, cls_index=cls_index, repeated=repeated)
    matrices = signal_preserving_attention(kernel, num_tokens, depth, kernel_last, shortcut=shortcut, **given)  # (L, N, N)
    initialise = partial(init_signal_preserving_attention_, **_given(query_key=query_key_init, value_out=value_out_init))
    return lambda i: SignalPreservingSelfAttention(embed_dim, num_heads, matrices[i]), initialise


def _value_skipinit_attention(*, embed_dim: int, num_heads: int, **_) -> Parts:
    return lambda _: ValueSkipInitSelfAttention(embed_dim, num_heads), init_value_skipinit_attention_


def _suo_mlp(*, suo_transposed: bool, **_) -> Callable[..., None]:
    return partial(init_suo_mlp_, transposed=suo_transposed)


def _shaped_mlp(*, suo_transposed: bool, gain: float, **_) -> Callable[..., None]:
    return partial(init_suo_mlp_, transposed=suo_transposed, gain=gain)


def _isometric_mlp(*, gain: float, kappa: float, **_) -> Callable[..., None]:
    return partial(init_isometric_mlp_, gain=gain, kappa=kappa)


def _xavier_mlp(**_) -> Callable[..., None]:
    return init_xavier_mlp_


ATTENTION = {
    "orthogonal": _orthogonal_attention,
    "softmax": _softmax_attention,
    "signal_preserving": _signal_preserving_attention,
    "value_skipinit": _value_skipinit_attention,
}
ATTENTION_INIT = {"section_4": _section_4, "xavier": _xavier_attention, "ji": _ji}
_KERNEL = ("kernel", "kernel_last", "causal", "cls_index", "repeated", "query_key_init", "value_out_init")
OWN = {  # the attentions that an option belongs to
    **dict.fromkeys(("method", "num_iterations", "epsilon", "alpha_times_depth"), ("orthogonal",)),
    **dict.fromkeys(_KERNEL, ("signal_preserving",)),
    "attention_init": ("orthogonal", "softmax"),
    "qkv_bias": ("softmax",),
}
ACTIVATION = {  # φ for the depth of a network, 1/√E φ(z)² for z ~ N(0, 1), and κ of `linear_share`
    "gelu": lambda depth: (F.gelu, gain(gelu), linear_share(gelu)),
    "gelu_tanh": lambda depth: (partial(F.gelu, approximate="tanh"), gain(gelu_tanh), linear_share(gelu_tanh)),
    "dks_gelu": lambda depth: _shaped(dks_gelu(depth)),
    "tat_leaky_relu": lambda depth: _shaped(tat_leaky_relu(depth)),
}
MLP_INIT = {"suo": _suo_mlp, "xavier": _xavier_mlp, "shaped": _shaped_mlp, "isometric": _isometric_mlp}
PATCH_EMBEDDING_INIT = {
    "xavier": xavier_linear_,
    "torch": torch_linear_,
    "lecun": lecun_linear_,
    "trunc_normal": trunc_normal_linear_,
}
HEAD_INIT = PATCH_EMBEDDING_INIT | {"zeros": zeros_linear_}


def _shaped(activation: ShapedGELU | ShapedLeakyReLU) -> tuple[Callable, float, float]:
    return activation, 1.0, linear_share(activation.of_number)


def _entry(option: str, name: str, entries: dict):
    if name not in entries:
        raise ValueError(f"{option} {name!r} is unknown; choose one of {', '.join(entries)}")
    return entries[name]


def _given(**options) -> dict:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _check_own(attention: str, options: dict) -> None:
    for name in _given(**options):
        if attention in ATTENTION and attention not in OWN[name]:
            owners = " or ".join(OWN[name])
            raise ValueError(f"{name} belongs to {owners} attention; leave it out, or None, for {attention} attention")


def _shortcut(skip: bool, normalised_skip: float | None, depth: int) -> float | None:
    """α of skips α x + √(1 − α²) f(x), from L (1 − α²)."""
    if normalised_skip is None:
        return None
    if not (skip and 0 < normalised_skip < depth):
        raise ValueError(f"normalised_skip {normalised_skip} must be between 0 and the depth {depth}, and needs skip")
    return math.sqrt(1 - normalised_skip / depth)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, not {size!r}")


def _check_finite(*, above: float = -math.inf, least: float = -math.inf, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= above or value < least:
            bound = f" and above {above}" if above == 0 else f" and {least} or more" if least == 0 else ""
            raise ValueError(f"{name} must be finite{bound}, not {value!r}")
