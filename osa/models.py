"""The paper's models by name, built and initialised by Section 4 and Appendix D, and models for depth.

`ModelConfig` lists every option once. An option that picks a part does so in a dict below; a new part is one more entry.
"""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from osa.deep.shaped import (
    Kernel,
    ShapedGELU,
    SignalPreservingSelfAttention,
    ValueSkipInitSelfAttention,
    alpha_of_depth,
    dks_gelu,
    gain,
    gelu,
    gelu_tanh,
    linear_share,
    signal_preserving_attention,
)
from osa.functional import Method, check_method
from osa.init import (
    QueryKey,
    ValueOut,
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
from osa.linalg import EPSILON
from osa.modules import NORM_EPS, OrthogonalSelfAttention, SelfAttention, SoftmaxSelfAttention
from osa.options import (
    ActivationKind,
    AttentionKind,
    AttentionStart,
    HeadStart,
    LinearStart,
    MLPStart,
    Options,
)
from osa.vit import VisionTransformer, blocks_of

# Parts that an option can pick. Each entry takes the whole configuration. An attention's entry returns two functions, one
# that makes the layer of a block from its number, one that initialises it. An MLP's entry returns the latter, for an
# activation with this gain and kappa.

Initialise = Callable[..., None]
Parts = tuple[Callable[[int], SelfAttention], Initialise]
Activation = tuple[Callable[[Tensor], Tensor], float, float]  # φ, 1/√E φ(z)² for z ~ N(0, 1), and κ of `linear_share`


def _orthogonal_attention(config: "ModelConfig") -> Parts:
    options = config.given("method", "num_iterations", "epsilon") | {"alpha_per_head": config.alpha_per_head}
    make = partial(OrthogonalSelfAttention, config.embed_dim, config.num_heads, **options)
    total = config.alpha_times_depth
    alpha = config.alpha if total is None else alpha_of_depth(total, config.depth)
    return lambda _: make(), partial(ATTENTION_INIT[config.attention_init or "section_4"](config), alpha=alpha)


def _softmax_attention(config: "ModelConfig") -> Parts:
    make = partial(SoftmaxSelfAttention, config.embed_dim, config.num_heads)
    return lambda _: make(), ATTENTION_INIT[config.attention_init or "xavier"](config)


def _signal_preserving_attention(config: "ModelConfig") -> Parts:
    assert config.kernel is not None and config.kernel_last is not None  # as it checks itself
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


def _value_skipinit_attention(config: "ModelConfig") -> Parts:
    return lambda _: ValueSkipInitSelfAttention(config.embed_dim, config.num_heads), init_value_skipinit_attention_


def _ji(config: "ModelConfig") -> Initialise:
    return init_ji_attention_ if config.norm else partial(init_ji_attention_, scale=1.0)


def _section_4(config: "ModelConfig") -> Initialise:
    return partial(init_orthogonal_attention_, joint_value_output=config.joint_value_output)


def _xavier_attention(config: "ModelConfig") -> Initialise:
    return partial(init_softmax_attention_, fused_qkv=config.xavier_fused_qkv, joint_value_output=config.joint_value_output)


def _suo_mlp(config: "ModelConfig", gain: float) -> Initialise:
    return partial(init_suo_mlp_, transposed=config.suo_transposed, gain=gain)


def _shaped(activation: ShapedGELU) -> Activation:
    return activation, 1.0, linear_share(activation.of_number)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ATTENTION: dict[AttentionKind, Callable[["ModelConfig"], Parts]] = {
    "orthogonal": _orthogonal_attention,
    "softmax": _softmax_attention,
    "signal_preserving": _signal_preserving_attention,
    "value_skipinit": _value_skipinit_attention,
}
ATTENTION_INIT: dict[AttentionStart, Callable[["ModelConfig"], Initialise]] = {
    "section_4": _section_4,
    "xavier": _xavier_attention,
    "ji": _ji,
}
MLP_INIT: dict[MLPStart, Callable[["ModelConfig", float, float], Initialise]] = {
    "suo": lambda config, gain, kappa: _suo_mlp(config, 1.0),
    "xavier": lambda config, gain, kappa: init_xavier_mlp_,
    "shaped": lambda config, gain, kappa: _suo_mlp(config, gain),
    "isometric": lambda config, gain, kappa: partial(init_isometric_mlp_, gain=gain, kappa=kappa),
}
ACTIVATION: dict[ActivationKind, Callable[[int], Activation]] = {  # shaped for the depth of a network
    "gelu": lambda depth: (F.gelu, gain(gelu), linear_share(gelu)),
    "gelu_tanh": lambda depth: (_gelu_tanh, gain(gelu_tanh), linear_share(gelu_tanh)),
    "dks_gelu": lambda depth: _shaped(dks_gelu(depth)),
}
PATCH_EMBEDDING_INIT: dict[str, Initialise] = {
    "xavier": xavier_linear_,
    "torch": torch_linear_,
    "lecun": lecun_linear_,
}
HEAD_INIT = PATCH_EMBEDDING_INIT | {"zeros": zeros_linear_}


# The options


def _option(default: Any = dataclasses.MISSING, **facts) -> Any:
    """An option with its bounds (`above`, `least`, `below`) and the attentions that alone have it (`attention`)."""
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Parts of a model, and the initialisations that fit them. An attention's own option that is None has its default."""

    attention: AttentionKind
    """"orthogonal" (Eq. 5), "softmax", or of He et al. 2023 "signal_preserving" or "value_skipinit"."""
    skip: bool
    norm: bool
    mlp_init: MLPStart
    """"suo" (Section 4.4), "xavier" (Appendix D), "shaped", which is SUO with a second layer that makes good what the
    activation takes from the mean square, or "isometric", both layers from one frame: see `init_isometric_mlp_`."""
    method: Method | None = _option(None, attention=("orthogonal",))
    """This and the next two as for `orthogonal_attention`."""
    num_iterations: int | None = _option(None, least=1, attention=("orthogonal",))
    epsilon: float | None = _option(None, least=0, attention=("orthogonal",))
    alpha_times_depth: float | None = _option(None, above=0, attention=("orthogonal",))
    """Initial α times depth, instead of `alpha`: see `alpha_of_depth`."""
    kernel: Kernel | None = _option(None, attention=("signal_preserving",))
    """This and the next, which signal-preserving attention needs, and three more as for `signal_preserving_attention`."""
    kernel_last: float | None = _option(None, above=0, attention=("signal_preserving",))
    causal: bool | None = _option(None, attention=("signal_preserving",))
    cls_index: int | None = _option(None, least=0, attention=("signal_preserving",))
    repeated: float | None = _option(None, least=0, below=1, attention=("signal_preserving",))
    query_key_init: QueryKey | None = _option(None, attention=("signal_preserving",))
    """This and the next as for `init_signal_preserving_attention_`."""
    value_out_init: ValueOut | None = _option(None, attention=("signal_preserving",))
    attention_init: AttentionStart | None = _option(None, attention=("orthogonal", "softmax"))
    """"section_4", "xavier" (Appendix D) or "ji" (`init_ji_attention_`). None: Section 4 for orthogonal attention and
    Xavier for softmax, as in the paper."""
    joint_value_output: bool = False
    """W^V and W^O of softmax or orthogonal attention each as one orthogonal matrix; the others, and those by "ji", are so
    in any case."""
    activation: ActivationKind = "gelu"
    """Activation of the MLPs: "gelu", its approximation "gelu_tanh", or "dks_gelu", which is shaped for the depth and needs
    5 blocks or more."""
    normalise_tokens: bool = False
    """Divide each token by its root mean square before the first block."""
    normalised_skip: float | None = _option(None, above=0)
    """L (1 − α²) for skips α x + √(1 − α²) f(x), below L. None: x + f(x)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of the weights, for any architecture: an option that concerns another architecture is idle."""

    alpha: float = 0.1
    """Initial α of orthogonal attention."""
    embedding_std: float = _option(0.02, above=0)
    """σ of positions and [cls]."""
    alpha_per_head: bool = True
    """Whether every head of orthogonal attention has its own α, or a layer one."""
    xavier_fused_qkv: bool = False
    """Draw query, key and value by Xavier as one matrix."""
    suo_transposed: bool = False
    """SUO of the weights read as [in, out]."""
    patch_embedding: LinearStart = "xavier"
    """"xavier", "torch" (PyTorch's default) or "lecun" (Flax's)."""
    head: HeadStart = "xavier"
    """One of these or "zeros"."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model, Appendix D's by default: see `VisionTransformer`."""

    image_size: int = _option(28, least=1)
    in_channels: int = _option(1, least=1)
    patch_size: int = _option(4, least=1)
    num_classes: int = _option(10, least=0)
    """0: no head, the model returns the features of [cls]."""
    embed_dim: int = _option(64, least=1)
    depth: int = _option(6, least=1)
    num_heads: int = _option(4, least=1)
    """h, 2 or more for orthogonal attention."""
    mlp_ratio: float = _option(4.0, above=0)
    norm_eps: float = _option(NORM_EPS, above=0)
    """ε of LayerNorm."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Sizes, Start, Architecture):
    """Every option of a model. The defaults are the paper's.

    Raises:
        ValueError: an option has an impossible value, or belongs to another attention.

    Example:
        >>> ModelConfig(**MODELS["osa_iso"], depth=72).embed_dim
        64
    """

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            _check(option.name, getattr(self, option.name), TYPES[option.name], option.metadata)
        check_own(dataclasses.asdict(self))
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide embed_dim {self.embed_dim}")
        if self.attention == "orthogonal" and self.num_heads == 1:
            raise ValueError("num_heads 1 gives 2 d_v > embed_dim; orthogonal attention needs 2 or more heads (Section 4.2)")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size {self.patch_size} must divide image_size {self.image_size}")
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLPs no hidden unit: raise it, 2/embed_dim does")
        if self.normalised_skip is not None and not (self.skip and self.normalised_skip < self.depth):
            raise ValueError(f"normalised_skip {self.normalised_skip} must be below the depth {self.depth}, and needs skip")
        if self.attention == "signal_preserving" and None in (self.kernel, self.kernel_last):
            raise ValueError("signal_preserving attention needs kernel and kernel_last")
        if self.method:
            check_method(self.method, self.num_iterations)

    def given(self, *names: str) -> dict[str, Any]:
        """The named options that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def num_tokens(self) -> int:
        """Patches and [cls]."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def shortcut(self) -> float | None:
        """α of skips α x + √(1 − α²) f(x)."""
        return None if self.normalised_skip is None else math.sqrt(1 - self.normalised_skip / self.depth)


OPTIONS = {option.name: option for option in dataclasses.fields(ModelConfig)}
TYPES = get_type_hints(ModelConfig)


def check_own(options: dict[str, Any]) -> None:
    """Raises ValueError if an option is given that belongs to another attention."""
    for name, value in options.items():
        owners = OPTIONS[name].metadata.get("attention") if name in OPTIONS else None
        if value is not None and owners and (attention := options["attention"]) not in owners:
            raise ValueError(
                f"{name} belongs to {' or '.join(owners)} attention; leave it out, or None, for {attention} attention"
            )


def _check(name: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> None:
    kinds = get_args(kind)
    if type(None) in kinds:
        if value is None:
            return
        kind = kinds[0]
    if choices := get_args(kind):
        if value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
    else:
        number, word = (numbers.Integral, "a whole number") if kind is int else (numbers.Real, "a finite number")
        limits = {"least": -math.inf, "above": -math.inf, "below": math.inf, **bounds}
        fits = isinstance(value, number) and not isinstance(value, bool) and math.isfinite(value)
        if not (fits and value >= limits["least"] and limits["above"] < value < limits["below"]):
            words = {"least": "{} or more", "above": "above {}", "below": "below {}"}
            said = [word, *(form.format(bounds[bound]) for bound, form in words.items() if bound in bounds)]
            raise ValueError(f"{name} must be {', '.join(said)}, not {value!r}")


# The models

_OSA: Options = {"attention": "orthogonal", "skip": False, "norm": False, "mlp_init": "suo"}
_VIT: Options = {"attention": "softmax", "skip": True, "norm": True, "mlp_init": "xavier"}
# He et al. 2023 (H.1): q = 1 from the tokens on, an activation that keeps it, V and O orthogonal
_SHAPED: Options = {"skip": False, "norm": False, "mlp_init": "shaped", "joint_value_output": True, "normalise_tokens": True}
_DKS: Options = _SHAPED | {"activation": "dks_gelu"}
_ISO: Options = {"mlp_init": "isometric"}
_SKIP: Options = _SHAPED | {"skip": True, "normalised_skip": 1.4256}  # α = 0.98 at 36 blocks
_UNIFORM: Options = {"attention": "signal_preserving", "kernel": "uniform", "kernel_last": 0.8, "repeated": 0.04}
_EXPONENTIAL: Options = {"attention": "signal_preserving", "kernel": "exponential", "kernel_last": 0.05, "repeated": 0.04}

MODELS: dict[str, Options] = {
    "osa_qr": _OSA | {"method": "qr"},
    "osa_ns": _OSA | {"method": "newton_schulz", "num_iterations": 6, "epsilon": EPSILON},
    "vit": _VIT,
    "vit_noskip": _VIT | {"skip": False},
    "vit_noskip_nonorm": _VIT | {"skip": False, "norm": False},
    # Not in the paper: the function of osa_qr without a basis, and with the gradient through QR
    "osa_exact": _OSA | {"method": "exact"},
    "osa_qr_literal": _OSA | {"method": "qr_literal"},
    # The Cayley transform of S in place of its exponential
    "osa_cayley": _OSA | {"method": "cayley"},
    # For depth: OSA with the best α L of a grid (paper_outputs/studies/rates), and softmax in the same frame
    "osa_shaped": _DKS | {"attention": "orthogonal", "method": "exact", "alpha_times_depth": 0.36},
    "softmax_shaped": _DKS | {"attention": "softmax"},
    "softmax_shaped_norm": _DKS | {"attention": "softmax", "norm": True},
    # Attention of He et al. 2023
    "vskipinit": _DKS | {"attention": "value_skipinit"},
    "uspa": _DKS | _UNIFORM,
    "espa": _DKS | _EXPONENTIAL,
    "uspa_causal": _DKS | _UNIFORM | {"causal": True},
    "espa_causal": _DKS | _EXPONENTIAL | {"causal": True},
    "espa_skip": _SKIP | {"attention": "signal_preserving", "kernel": "exponential", "kernel_last": 0.6},
    "softmax_skip": _SKIP | {"attention": "softmax", "norm": True},
    "softmax_skip_nonorm": _SKIP | {"attention": "softmax"},
}
# Both layers of an MLP drawn from one frame, which 72 blocks need at this width
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
# Initialisation of Ji et al. 2025, who keep LayerNorm
_JI: Options = {"attention": "softmax", "skip": False, "mlp_init": "suo", "attention_init": "ji"}
MODELS |= {"vit_noskip_ji": _JI | {"norm": True}, "vit_noskip_ji_nonorm": _JI | {"norm": False}}


def create_model(name: str, *, generator: Generator | None = None, **changes: Unpack[Options]) -> VisionTransformer:
    """A model of `MODELS` with the sizes of Appendix D, initialised.

    Args:
        name: "osa_qr", "osa_ns", "vit", "vit_noskip" or "vit_noskip_nonorm", the paper's five (Section 5), or another one of
            `MODELS`.
        generator: a generator of the default device, for every draw. Default: torch's global one.
        changes: options of `ModelConfig` that replace the model's own, e.g. depth=12.

    Raises:
        ValueError: there is no such model, or an option has an impossible value.
        TypeError: there is no such option.

    Example:
        >>> create_model("osa_iso", depth=12)(torch.randn(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """
    check_model(name)
    return build_vit(**MODELS[name] | changes, generator=generator)


def build_vit(*, generator: Generator | None = None, **options: Unpack[Options]) -> VisionTransformer:
    """A Vision Transformer of Appendix D from its options, initialised; it keeps them as its `config`.

    Args:
        generator: a generator of the default device, for every draw. Default: torch's global one.
        options: options of `ModelConfig`.

    Raises:
        ValueError: an option has an impossible value.
        TypeError: there is no such option, or one without a default is missing.

    Example:
        >>> build_vit(attention="orthogonal", method="qr", skip=False, norm=False, mlp_init="suo").config.depth
        6
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"{name} is no option of a model; {did_you_mean(name, OPTIONS)}")
    config = ModelConfig(**options)
    make_attention, init_attention_ = ATTENTION[config.attention](config)
    activation, *moments = ACTIVATION[config.activation](config.depth)
    init_mlp_ = MLP_INIT[config.mlp_init](config, *moments)

    shared = [option.name for option in dataclasses.fields(Sizes) if option.name != "num_heads"]
    with torch.device("meta"):  # shapes without values, so that every weight is drawn once, below
        vit = VisionTransformer(
            attention=make_attention,
            activation=activation,
            shortcut=config.shortcut,
            **{name: getattr(config, name) for name in (*shared, "skip", "norm", "normalise_tokens")},
        )
    vit.config = config
    _allocate(vit)

    # The order of the draws is part of what a seed means.
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


def check_model(name: str) -> None:
    """Raises ValueError if there is no such model in `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; {did_you_mean(name, MODELS)}")


def model_name(config: ModelConfig) -> str | None:
    """Name in `MODELS` that a configuration is of, whatever its sizes and start: the most specific one, or None."""
    options = dataclasses.asdict(config)
    names = [name for name, own in MODELS.items() if own.items() <= options.items()]
    return max(names, key=lambda name: len(MODELS[name]), default=None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as a question, or all of them to choose from."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"


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
