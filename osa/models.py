"""Builds models by name: the paper's models, initialised as in Section 4 and Appendix D, and models for large depths.

For each option of `ModelConfig` that selects a part of the model, a dict maps the option's values to functions.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

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
    truncated_normal_,
    xavier_linear_,
    zeros_linear_,
)
from osa.modules import OrthogonalSelfAttention, SelfAttention, SoftmaxSelfAttention
from osa.options import (
    FIELDS,
    MODELS,
    ActivationKind,
    AttentionInit,
    AttentionKind,
    MLPInit,
    ModelConfig,
    ModelOptions,
    Sizes,
    check_model,
    did_you_mean,
)
from osa.shaped.activations import dks_gelu, gain, gelu, gelu_tanh, linear_share
from osa.shaped.layers import SignalPreservingSelfAttention, ValueSkipInitSelfAttention
from osa.shaped.matrices import signal_preserving_attention
from osa.vit import VisionTransformer, blocks_of

Initialise = Callable[..., None]
LayerAndInit = tuple[Callable[[int], SelfAttention], Initialise]  # constructor of block i's attention, and initialiser
Activation = tuple[Callable[[Tensor], Tensor], float, float]  # φ, 1/√(E[φ(z)²]) for z ~ N(0, 1), and κ of `linear_share`


def _orthogonal_attention(config: ModelConfig) -> LayerAndInit:
    options = config.given("method", "num_iterations", "epsilon") | {"alpha_per_head": config.alpha_per_head}
    make = partial(OrthogonalSelfAttention, config.embed_dim, config.num_heads, **options)
    total = config.alpha_times_depth
    alpha = config.alpha if total is None else total / config.depth
    return lambda _: make(), partial(ATTENTION_INIT[config.attention_init or "section_4"](config), alpha=alpha)


def _softmax_attention(config: ModelConfig) -> LayerAndInit:
    make = partial(SoftmaxSelfAttention, config.embed_dim, config.num_heads)
    return lambda _: make(), ATTENTION_INIT[config.attention_init or "xavier"](config)


def _signal_preserving_attention(config: ModelConfig) -> LayerAndInit:
    assert config.kernel is not None and config.kernel_last is not None  # ModelConfig refuses None for this attention
    options, shortcut = config.given("causal", "cls_index", "repeated"), config.shortcut or 0.0
    matrices = signal_preserving_attention(  # (L, N, N)
        config.kernel, config.num_tokens, config.depth, config.kernel_last, shortcut=shortcut, **options
    )
    initialise = partial(
        init_signal_preserving_attention_,
        query_key=config.query_key_init or "zero_query",
        value_out=config.value_out_init or "orthogonal",
    )
    return lambda i: SignalPreservingSelfAttention(config.embed_dim, config.num_heads, matrices[i]), initialise


def _value_skipinit_attention(config: ModelConfig) -> LayerAndInit:
    return lambda _: ValueSkipInitSelfAttention(config.embed_dim, config.num_heads), init_value_skipinit_attention_


def _xavier_attention(config: ModelConfig) -> Initialise:
    return partial(init_softmax_attention_, fused_qkv=config.xavier_fused_qkv, joint_value_output=config.joint_value_output)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ATTENTION: dict[AttentionKind, Callable[[ModelConfig], LayerAndInit]] = {
    "orthogonal": _orthogonal_attention,
    "softmax": _softmax_attention,
    "signal_preserving": _signal_preserving_attention,
    "value_skipinit": _value_skipinit_attention,
}
ATTENTION_INIT: dict[AttentionInit, Callable[[ModelConfig], Initialise]] = {
    "section_4": lambda config: partial(init_orthogonal_attention_, joint_value_output=config.joint_value_output),
    "xavier": _xavier_attention,
    "ji": lambda config: init_ji_attention_ if config.norm else partial(init_ji_attention_, scale=1.0),
}
MLP_INIT: dict[MLPInit, Callable[[ModelConfig, float, float], Initialise]] = {  # arguments: options, gain, κ
    "suo": lambda config, gain, kappa: partial(init_suo_mlp_, transposed=config.suo_transposed),
    "xavier": lambda config, gain, kappa: init_xavier_mlp_,
    "shaped": lambda config, gain, kappa: partial(init_suo_mlp_, transposed=config.suo_transposed, gain=gain),
    "isometric": lambda config, gain, kappa: partial(init_isometric_mlp_, gain=gain, kappa=kappa),
}
ACTIVATION: dict[ActivationKind, Callable[[int], Activation]] = {  # argument: depth
    "gelu": lambda depth: (F.gelu, gain(gelu), linear_share(gelu)),
    "gelu_tanh": lambda depth: (_gelu_tanh, gain(gelu_tanh), linear_share(gelu_tanh)),
    "dks_gelu": lambda depth: (dks_gelu(depth), 1.0, linear_share(dks_gelu(depth).of_number)),
}
PATCH_EMBEDDING_INIT: dict[str, Initialise] = {"xavier": xavier_linear_, "torch": torch_linear_, "lecun": lecun_linear_}
HEAD_INIT = PATCH_EMBEDDING_INIT | {"zeros": zeros_linear_}


def create_model(name: str, *, generator: Generator | None = None, **changes: Unpack[ModelOptions]) -> VisionTransformer:
    """Builds and initialises a model in `MODELS`, by default with the sizes of Appendix D.

    Args:
        name: a name in `MODELS`. The paper's five models (Section 5) are "osa_qr", "osa_ns", "vit", "vit_noskip" and
            "vit_noskip_nonorm".
        generator: a generator on the default device, used for every draw. Default: torch's global one.
        changes: options of `ModelConfig` that override the named model's options, e.g. depth=12.

    Raises:
        ValueError: the model is unknown, or an option has an impossible value.
        TypeError: an option is unknown.

    Example:
        >>> create_model("osa_iso", depth=12)(torch.randn(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """
    check_model(name)
    return build_vit(**MODELS[name] | changes, generator=generator)


def build_vit(
    config: ModelConfig | None = None, *, generator: Generator | None = None, **options: Unpack[ModelOptions]
) -> VisionTransformer:
    """Builds and initialises the Vision Transformer of Appendix D, given a configuration or options, and sets its `config`.

    Args:
        config: the configuration.
        generator: a generator on the default device, used for every draw. Default: torch's global one.
        options: options of `ModelConfig`, in place of a configuration.

    Raises:
        ValueError: an option has an impossible value.
        TypeError: an option is unknown, a required option is missing, or both a configuration and options are given.

    Example:
        >>> build_vit(attention="orthogonal", method="qr", skip=False, norm=False, mlp_init="suo").config.depth
        6
    """
    if config is None:
        for name in options:
            if name not in FIELDS:
                raise TypeError(f"model option {name!r} is unknown; {did_you_mean(name, FIELDS)}")
        config = ModelConfig(**options)
    elif options:
        raise TypeError(f"build_vit takes either a configuration or options, not both: leave out {', '.join(options)}")
    make_attention, init_attention_ = ATTENTION[config.attention](config)
    activation, *moments = ACTIVATION[config.activation](config.depth)
    init_mlp_ = MLP_INIT[config.mlp_init](config, *moments)

    shared = [option.name for option in dataclasses.fields(Sizes) if option.name != "num_heads"]
    with torch.device("meta"):  # without values, because the code below draws every weight
        vit = VisionTransformer(
            attention=make_attention,
            activation=activation,
            shortcut=config.shortcut,
            **{name: getattr(config, name) for name in (*shared, "skip", "norm", "normalise_tokens")},
        )
    vit.config = config
    _allocate(vit)

    # Keep the order of the draws: in another order, the same seed would give different weights.
    truncated_normal_(vit.cls_token, config.embedding_std, generator=generator)
    truncated_normal_(vit.position_embedding, config.embedding_std, generator=generator)
    PATCH_EMBEDDING_INIT[config.patch_embedding](vit.patch_embedding, generator=generator)
    if isinstance(vit.head, nn.Linear):
        HEAD_INIT[config.head](vit.head, generator=generator)
    for block in blocks_of(vit):
        init_attention_(block.attention, generator=generator)
        init_mlp_(block.mlp, generator=generator)
    for module in vit.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return vit


def _allocate(module: nn.Module) -> None:
    """Replaces meta parameters with uninitialised ones on the default device, like `to_empty`. Works in FakeTensorMode."""
    device = torch.get_default_device()
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            setattr(child, name, nn.Parameter(torch.empty_like(parameter, device=device)))
        for name, buffer in child.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))
