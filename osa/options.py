"""Options of models, with their types and bounds, and the named models. This module does not import torch."""

import dataclasses
import difflib
import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args, get_type_hints

Method = Literal["qr_literal", "qr", "newton_schulz", "exact", "polar_express", "cayley"]
METHODS = get_args(Method)
# Default K: 6 as in Appendix D, and 7 steps of Polar Express, which suffice for singular values from 10⁻³ to 1
ITERATIONS = {"newton_schulz": 6, "polar_express": 7}
EPSILON = 1e-7  # ε of Section 3, for which the paper gives no value
NORM_EPS = 1e-6  # ε of LayerNorm in the original ViT

AttentionKind = Literal["orthogonal", "softmax", "signal_preserving", "value_skipinit"]
AttentionInit = Literal["section_4", "xavier", "ji"]
MLPInit = Literal["suo", "xavier", "shaped", "isometric"]
ActivationKind = Literal["gelu", "gelu_tanh", "dks_gelu"]
LinearInit = Literal["xavier", "torch", "lecun"]
HeadInit = Literal["xavier", "torch", "lecun", "zeros"]
KernelKind = Literal["uniform", "exponential"]
QueryKeyInit = Literal["zero_query", "zero_key", "small"]
ValueOutInit = Literal["orthogonal", "gaussian"]


MAX_SIZE = 2**14  # maximum of `embed_dim` and other sizes: larger weights do not fit in memory


def _option(default: Any = dataclasses.MISSING, **facts) -> Any:
    """Returns a field for an option. The keywords in `facts` restrict the option:

    above, below    exclusive bounds of a number
    least, most     inclusive bounds of a number
    attention       tuple of the kinds of attention that accept the option
    """
    return field(default=default, metadata=facts)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Parts of a model and their initialisations. None means the default for the kind of attention."""

    attention: AttentionKind
    """"orthogonal" (Eq. 5), "softmax", or, from He et al. 2023, "signal_preserving" or "value_skipinit"."""
    skip: bool
    norm: bool
    mlp_init: MLPInit
    """"suo" (Section 4.4), "xavier" (Appendix D), "shaped", which is SUO with a factor that restores the mean square after
    the activation, or "isometric" (`init_isometric_mlp_`)."""
    method: Method | None = _option(None, attention=("orthogonal",))
    """This option and the next two are arguments of `orthogonal_attention`."""
    num_iterations: int | None = _option(None, least=1, attention=("orthogonal",))
    epsilon: float | None = _option(None, least=0, attention=("orthogonal",))
    alpha_times_depth: float | None = _option(None, above=0, attention=("orthogonal",))
    """α L for L blocks; it replaces `alpha`. If S = α/√d_v · X W̃ Xᵀ with ‖W̃‖₂ = 1 (Section 4.2) and W^O is drawn for all
    h heads together, L attention layers multiply gradients by at most exp(2 L √h ‖X‖₂² α/√d_v)."""
    kernel: KernelKind | None = _option(None, attention=("signal_preserving",))
    """This option and the next four are arguments of `signal_preserving_attention`, which needs `kernel` and
    `kernel_last`."""
    kernel_last: float | None = _option(None, above=0, attention=("signal_preserving",))
    causal: bool | None = _option(None, attention=("signal_preserving",))
    cls_index: int | None = _option(None, least=0, attention=("signal_preserving",))
    repeated: float | None = _option(None, least=0, below=1, attention=("signal_preserving",))
    query_key_init: QueryKeyInit | None = _option(None, attention=("signal_preserving",))
    """This option and the next are arguments of `init_signal_preserving_attention_`."""
    value_out_init: ValueOutInit | None = _option(None, attention=("signal_preserving",))
    attention_init: AttentionInit | None = _option(None, attention=("orthogonal", "softmax"))
    """"section_4", "xavier" (Appendix D) or "ji" (`init_ji_attention_`). None: Section 4 for orthogonal attention and
    Xavier for softmax, as in the paper."""
    joint_value_output: bool = False
    """Draw W^V and W^O of softmax or orthogonal attention each as one orthogonal matrix, as the other kinds of attention
    and the initialisation "ji" do by default."""
    activation: ActivationKind = "gelu"
    """Activation of the MLPs: "gelu", its approximation "gelu_tanh", or "dks_gelu", which is shaped for the depth of the
    model and needs at least 5 blocks."""
    normalise_tokens: bool = False
    """Divide each token by its root mean square before the first block."""
    normalised_skip: float | None = _option(None, above=0)
    """L (1 − α²) for L blocks with skips α x + √(1 − α²) f(x); it must be below L. None: the skips are x + f(x)."""


@dataclass(frozen=True, kw_only=True)
class Initialisation:
    """How the weights are initialised. An option that the architecture does not use has no effect."""

    alpha: float = 0.1
    """Initial α of orthogonal attention."""
    embedding_std: float = _option(0.02, above=0)
    """Standard deviation of the initial position embeddings and [cls]."""
    alpha_per_head: bool = True
    """If True, each head of orthogonal attention has its own α. If False, all heads of a layer share one α."""
    xavier_fused_qkv: bool = False
    """Draw the weights of query, key and value as one Xavier matrix."""
    suo_transposed: bool = False
    """Compute the factor of SUO as if weights were [in, out]: see `init_suo_mlp_`."""
    patch_embedding: LinearInit = "xavier"
    """"xavier", "torch" (PyTorch's default) or "lecun" (Flax's)."""
    head: HeadInit = "xavier"
    """"xavier", "torch" or "lecun", as for `patch_embedding`, or "zeros"."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model, by default those of Appendix D. `VisionTransformer` explains them."""

    image_size: int = _option(28, least=1, most=MAX_SIZE)
    in_channels: int = _option(1, least=1, most=MAX_SIZE)
    patch_size: int = _option(4, least=1, most=MAX_SIZE)
    num_classes: int = _option(10, least=0, most=10**6)
    """0: the model has no head and returns the features of [cls]."""
    embed_dim: int = _option(64, least=1, most=MAX_SIZE)
    depth: int = _option(6, least=1, most=1000)
    num_heads: int = _option(4, least=1, most=MAX_SIZE)
    """h, at least 2 for orthogonal attention."""
    mlp_ratio: float = _option(4.0, above=0, most=1000)
    norm_eps: float = _option(NORM_EPS, above=0)
    """ε of LayerNorm."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Sizes, Initialisation, Architecture):
    """Every option of a model, with the paper's values as defaults. Numbers are converted to int or float.

    Raises:
        ValueError: an option has an impossible value, or belongs to another kind of attention.

    Example:
        >>> ModelConfig(**MODELS["osa_iso"], depth=72).embed_dim
        64
    """

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = _checked(option.name, getattr(self, option.name), FIELD_TYPES[option.name], option.metadata)
            object.__setattr__(self, option.name, value)  # the instance is frozen
        check_attention_options(dataclasses.asdict(self))
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide embed_dim {self.embed_dim}")
        if self.attention == "orthogonal" and self.num_heads == 1:
            raise ValueError("num_heads 1 gives 2 d_v > embed_dim; orthogonal attention needs 2 or more heads (Section 4.2)")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size {self.patch_size} must divide image_size {self.image_size}")
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise ValueError(
                f"mlp_ratio {self.mlp_ratio} leaves the MLPs no hidden units: raise it, for example to 2/embed_dim"
            )
        if self.normalised_skip is not None and not (self.skip and self.normalised_skip < self.depth):
            raise ValueError(
                f"normalised_skip {self.normalised_skip} must be below the depth {self.depth}, and needs skip=True"
            )
        if self.attention == "signal_preserving" and None in (self.kernel, self.kernel_last):
            raise ValueError("signal_preserving attention needs kernel and kernel_last")
        if self.method:
            check_method(self.method, self.num_iterations)

    def given(self, *names: str) -> dict[str, Any]:
        """Returns the named options that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def num_tokens(self) -> int:
        """N, the number of patches plus 1 for [cls]."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def shortcut(self) -> float | None:
        """α of skips α x + √(1 − α²) f(x), or None for skips x + f(x)."""
        return None if self.normalised_skip is None else math.sqrt(1 - self.normalised_skip / self.depth)


FIELDS = {option.name: option for option in dataclasses.fields(ModelConfig)}
FIELD_TYPES = get_type_hints(ModelConfig)


def check_attention_options(options: dict[str, Any]) -> None:
    """Raises ValueError if an option is set that the chosen kind of attention does not accept."""
    for name, value in options.items():
        owners = FIELDS[name].metadata.get("attention") if name in FIELDS else None
        if value is not None and owners and (attention := options["attention"]) not in owners:
            raise ValueError(
                f"{name} belongs to {' or '.join(owners)} attention; for {attention} attention, leave it out or set it to "
                "None"
            )


def _checked(name: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> Any:
    """Returns the value of an option, with numbers as int or float. Raises ValueError if the value is invalid."""
    kinds = get_args(kind)
    if type(None) in kinds:
        if value is None:
            return None
        kind = kinds[0]
    if choices := get_args(kind):
        if value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}")
        return value
    number, word = (numbers.Integral, "a whole number") if kind is int else (numbers.Real, "a finite number")
    limits = {"least": -math.inf, "above": -math.inf, "below": math.inf, "most": math.inf, **bounds}
    fits = isinstance(value, number) and not isinstance(value, bool) and is_finite(value)
    if not (fits and limits["least"] <= value <= limits["most"] and limits["above"] < value < limits["below"]):
        words = {"least": "{} or more", "above": "above {}", "below": "below {}", "most": "{} at most"}
        said = [word, *(form.format(bounds[bound]) for bound, form in words.items() if bound in bounds)]
        raise ValueError(f"{name} must be {', '.join(said)}, not {reprlib.repr(value)}")
    return kind(value)


def is_finite(number: Any) -> bool:
    """True if a real number is finite and fits in a float."""
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number can be too large for a float
        return False


class ModelOptions(TypedDict, total=False):
    """The options of `ModelConfig` as keywords of `create_model`, for type checkers. A test compares the two classes."""

    attention: AttentionKind
    skip: bool
    norm: bool
    mlp_init: MLPInit
    method: Method | None
    num_iterations: int | None
    epsilon: float | None
    alpha_times_depth: float | None
    kernel: KernelKind | None
    kernel_last: float | None
    causal: bool | None
    cls_index: int | None
    repeated: float | None
    query_key_init: QueryKeyInit | None
    value_out_init: ValueOutInit | None
    attention_init: AttentionInit | None
    joint_value_output: bool
    activation: ActivationKind
    normalise_tokens: bool
    normalised_skip: float | None
    alpha: float
    embedding_std: float
    alpha_per_head: bool
    xavier_fused_qkv: bool
    suo_transposed: bool
    patch_embedding: LinearInit
    head: HeadInit
    image_size: int
    in_channels: int
    patch_size: int
    num_classes: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    norm_eps: float


class MethodOptions(TypedDict):
    """A method and its options, as keywords of `orthogonal_attention` and `orthogonal_attention_matrix`."""

    method: Method
    num_iterations: int | None
    epsilon: float


def check_method(method: Method, num_iterations: int | None, epsilon: float = EPSILON) -> None:
    """Raises ValueError for an unknown method, a number out of range, or `num_iterations` if the method does not iterate."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    if num_iterations is not None and method not in ITERATIONS:
        names = " and ".join(ITERATIONS)
        raise ValueError(f"num_iterations belongs to {names}, not to {method}: leave it out")
    if num_iterations is not None and not (isinstance(num_iterations, numbers.Integral) and num_iterations >= 1):
        raise ValueError(f"num_iterations must be a whole number of 1 or more, not {num_iterations!r}")
    if not (isinstance(epsilon, numbers.Real) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon must be a finite number of 0 or more, not {epsilon!r}")


# The models

_OSA: ModelOptions = {"attention": "orthogonal", "skip": False, "norm": False, "mlp_init": "suo"}
_VIT: ModelOptions = {"attention": "softmax", "skip": True, "norm": True, "mlp_init": "xavier"}
# As in He et al. 2023 (H.1): tokens have mean square 1, MLPs preserve this mean square, and W^V and W^O are orthogonal
_SHAPED: ModelOptions = {
    "skip": False,
    "norm": False,
    "mlp_init": "shaped",
    "joint_value_output": True,
    "normalise_tokens": True,
}
_DKS: ModelOptions = _SHAPED | {"activation": "dks_gelu"}
_ISO: ModelOptions = {"mlp_init": "isometric"}
_SKIP: ModelOptions = _SHAPED | {"skip": True, "normalised_skip": 1.4256}  # α² = 1 − 1.4256/36: α = 0.98 on the skips
_UNIFORM: ModelOptions = {"attention": "signal_preserving", "kernel": "uniform", "kernel_last": 0.8, "repeated": 0.04}
_EXPONENTIAL: ModelOptions = _UNIFORM | {"kernel": "exponential", "kernel_last": 0.05}

MODELS: dict[str, ModelOptions] = {
    "osa_qr": _OSA | {"method": "qr"},
    "osa_ns": _OSA | {"method": "newton_schulz", "num_iterations": 6, "epsilon": EPSILON},
    "vit": _VIT,
    "vit_noskip": _VIT | {"skip": False},
    "vit_noskip_nonorm": _VIT | {"skip": False, "norm": False},
    # Variants of osa_qr, not in the paper: osa_exact uses no basis, and osa_qr_literal uses autograd through QR
    "osa_exact": _OSA | {"method": "exact"},
    "osa_qr_literal": _OSA | {"method": "qr_literal"},
    # The Cayley transform of S in place of the exponential
    "osa_cayley": _OSA | {"method": "cayley"},
    # For large depths. The α L of osa_shaped is the best value on a grid (paper_outputs/studies/rates)
    "osa_shaped": _DKS | {"attention": "orthogonal", "method": "exact", "alpha_times_depth": 0.36},
    "softmax_shaped": _DKS | {"attention": "softmax"},
    "softmax_shaped_norm": _DKS | {"attention": "softmax", "norm": True},
    # Attention layers of He et al. 2023; the last two models have softmax attention and the same skips as espa_skip
    "vskipinit": _DKS | {"attention": "value_skipinit"},
    "uspa": _DKS | _UNIFORM,
    "espa": _DKS | _EXPONENTIAL,
    "uspa_causal": _DKS | _UNIFORM | {"causal": True},
    "espa_causal": _DKS | _EXPONENTIAL | {"causal": True},
    "espa_skip": _SKIP | {"attention": "signal_preserving", "kernel": "exponential", "kernel_last": 0.6},
    "softmax_skip": _SKIP | {"attention": "softmax", "norm": True},
    "softmax_skip_nonorm": _SKIP | {"attention": "softmax"},
}
# Both weights of an MLP come from one orthonormal frame. With 72 blocks of width 64, OSA trains reliably only with such MLPs
MODELS |= {
    "osa_iso": MODELS["osa_shaped"] | _ISO,
    "softmax_iso": MODELS["softmax_shaped"] | _ISO,
    "espa_iso": MODELS["espa"] | _ISO,
    "uspa_iso": MODELS["uspa"] | _ISO,
    "vskipinit_iso": MODELS["vskipinit"] | _ISO,
}
# Softmax attention with the initialisation of orthogonal attention, and the reverse
MODELS |= {
    "vit_section_4": _OSA | {"attention": "softmax", "attention_init": "section_4"},
    "osa_xavier": _OSA | {"method": "exact", "mlp_init": "xavier", "attention_init": "xavier"},
}
# The initialisation of Ji et al. 2025: vit_noskip_ji has LayerNorm, as in their paper, and vit_noskip_ji_nonorm has none
_JI: ModelOptions = {"attention": "softmax", "skip": False, "mlp_init": "suo", "attention_init": "ji"}
MODELS |= {"vit_noskip_ji": _JI | {"norm": True}, "vit_noskip_ji_nonorm": _JI | {"norm": False}}


def check_model(name: str) -> None:
    """Raises ValueError if `MODELS` has no model of this name."""
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; {did_you_mean(name, MODELS)}")


def model_name(config: ModelConfig) -> str | None:
    """Returns the most specific name in `MODELS` whose options all agree with the configuration, or None."""
    options = dataclasses.asdict(config)
    names = [name for name, own in MODELS.items() if own.items() <= options.items()]
    return max(names, key=lambda name: len(MODELS[name]), default=None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message, with the most similar known name, or with all known names if none is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
