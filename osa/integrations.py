"""Orthogonal attention in models of timm and Hugging Face's transformers. Importing this module imports neither library."""

import copyreg
import functools
import math
import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from osa.functional import orthogonal_attention, orthogonal_attention_matrix
from osa.masking import repeat_heads
from osa.options import EPSILON, Method, MethodOptions, check_method, is_finite

CONFIG_KEY = "orthogonal_attention"  # key of the settings in a configuration of Hugging Face's `transformers`


def timm_attention(
    *, method: Method = "exact", num_iterations: int | None = None, epsilon: float = EPSILON, alpha_init: float = 0.1
) -> type[nn.Module]:
    """Returns a class for `attn_layer` of timm's Vision Transformers: timm's `Attention` with exp(S) in place of softmax.

    Weights, biases and norms have timm's names. A checkpoint of timm lacks only `alpha`, one number per head. The class
    accepts boolean padding masks, and refuses attention dropout and causal masks. Calls with equal arguments return
    the same class.

    Args:
        method, num_iterations, epsilon: as for `orthogonal_attention`.
        alpha_init: initial α, which multiplies timm's scale 1/√d_v.

    Raises:
        ImportError: timm is not installed.
        ValueError: the method is unknown, or α is not finite.

    Example:
        >>> timm.create_model("vit_tiny_patch16_224", attn_layer=timm_attention())  # doctest: +SKIP
    """
    options = _plain(method, num_iterations, epsilon)
    return _timm_class(options["method"], options["num_iterations"], options["epsilon"], _finite("alpha_init", alpha_init))


class _PickledByCall(type):
    """Metaclass of the classes that `_timm_class` returns. Pickle stores them as calls, `_timm_class(*arguments)`."""

    arguments: tuple[Method, int | None, float, float]


@functools.cache
def _timm_class(method: Method, num_iterations: int | None, epsilon: float, alpha_init: float) -> type[nn.Module]:
    from timm.layers.attention import Attention

    class OrthogonalAttention(Attention, metaclass=_PickledByCall):
        arguments = (method, num_iterations, epsilon, alpha_init)

        def __init__(self, dim: int, num_heads: int = 8, **others: Any) -> None:
            super().__init__(dim, num_heads, **others)
            weight = self.proj.weight
            self.alpha = nn.Parameter(torch.full((num_heads,), alpha_init, device=weight.device, dtype=weight.dtype))

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # (B, N, 3, h, d_v)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
            query, key = self.q_norm(query), self.k_norm(key)
            scale = self.scale * self.alpha[:, None, None]
            options: MethodOptions = {"method": method, "num_iterations": num_iterations, "epsilon": epsilon}
            heads = orthogonal_attention(query, key, value, attn_mask, self.dropout_p(), is_causal, scale=scale, **options)
            y = self.norm(heads.transpose(1, 2).flatten(2))  # (B, N, h·d_v)
            if self.gate is not None:
                y = y * self.gate(x).sigmoid()
            return self.proj_drop(self.proj(y))

        def dropout_p(self) -> float:
            if type(self.attn_drop) not in (nn.Dropout, nn.Identity):
                raise ValueError(
                    f"attn_drop must be nn.Dropout or nn.Identity, not {self.attn_drop}: orthogonal attention cannot apply "
                    "another module to exp(S)"
                )
            return self.attn_drop.p if self.training and isinstance(self.attn_drop, nn.Dropout) else 0.0

        def extra_repr(self) -> str:
            return f"method={method}"

    return OrthogonalAttention


def _reduce(made: "_PickledByCall") -> Any:
    """Returns what pickle stores: the call of `_timm_class` that made the class or, for a subclass, the subclass's name."""
    return (_timm_class, made.arguments) if "arguments" in vars(made) else made.__qualname__


copyreg.pickle(_PickledByCall, _reduce)


def register_with_transformers(
    name: str = "osa",
    *,
    method: Method = "exact",
    num_iterations: int | None = None,
    epsilon: float = EPSILON,
    alpha: float = 1.0,
) -> None:
    """Registers orthogonal attention with transformers. `set_attention` can then give it to encoders such as ViT and BERT.

    Register the attention again, with the same settings, before you load a saved model. A causal model, or training with
    attention dropout, raises ValueError at the first call.

    Every configuration gets an attribute `orthogonal_attention`, which is None until `set_attention` sets it. From then on,
    the configuration's `to_dict` also writes the key `attn_implementation`, which transformers reads but does not write.
    Without this key, a saved model would load with softmax.

    Args:
        name: a new name, or one registered by this function before.
        method, num_iterations, epsilon: as for `orthogonal_attention`.
        alpha: α, which multiplies the model's scale, usually 1/√d_v.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the method is unknown, α is not finite, or the name is not a word or names another attention function.

    Example:
        >>> register_with_transformers("osa")  # doctest: +SKIP
        >>> set_attention(AutoModel.from_pretrained("bert-base-uncased"), "osa")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
    from transformers.masking_utils import sdpa_mask

    options, alpha = _plain(method, num_iterations, epsilon), _finite("alpha", alpha)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f'name must be a word such as "osa", not {name!r}')
    if _is_another(name):
        raise ValueError(
            f'the name {name!r} is taken by another attention in transformers: choose a name of your own, such as "osa"'
        )
    AttentionInterface.register(name, functools.partial(_attend, name, options, alpha))
    AttentionMaskInterface.register(name, sdpa_mask)
    configurations: Any = PreTrainedConfig  # Any, because PreTrainedConfig declares no attribute `orthogonal_attention`
    if not hasattr(configurations, CONFIG_KEY):
        configurations.orthogonal_attention = None
        configurations.to_dict = _with_attention(configurations.to_dict)


def set_attention(model: nn.Module, name: str = "osa", parts: Sequence[str] = ()) -> None:
    """Gives a transformers model the attention `name`, and writes the attention's settings into the model's configuration.

    `attn_implementation=name` alone does not write the settings, so a saved model would load with softmax. To prevent
    this, a model without these settings in its configuration raises ValueError at its first call.

    Args:
        model: the whole model that will be saved.
        name: a name registered by `register_with_transformers`.
        parts: keys of the configurations of the parts to change, such as ("vision_config",) for CLIP, whose text model is
            causal. Empty: all parts.

    Raises:
        ValueError: the name is not registered, or the model has no such part.

    Example:
        >>> set_attention(CLIPModel(CLIPConfig()), parts=("vision_config",))  # doctest: +SKIP
    """
    from transformers import AttentionInterface

    registered: Any = AttentionInterface().get(name)
    if not _is_ours(registered):
        raise ValueError(f"the name {name!r} is not registered: call register_with_transformers({name!r}) first")
    config: Any = model.config
    known = _parts(config)
    for part in parts:
        if part not in known:
            raise ValueError(f"parts names {part!r}, which does not exist: the model has {', '.join(known) or 'no parts'}")
    chosen = dict.fromkeys(parts, name) or name
    model.set_attn_implementation(chosen)  # type: ignore[operator]  # transformers has no types for its models
    _, options, alpha = registered.args
    settings = {**options, "alpha": alpha}
    for part in parts or known:
        _mark(known[part], settings)
    config.orthogonal_attention = settings


def _parts(config: Any) -> dict[str, Any]:
    """Returns the configurations of a model's parts, by key. Leaves out parts that have no configuration."""
    return {key: getattr(config, key) for key in config.sub_configs if getattr(config, key, None) is not None}


def _mark(config: Any, settings: dict[str, Any]) -> None:
    """Writes the settings into the configurations of all nested parts, and then into `config`."""
    for part in _parts(config).values():
        _mark(part, settings)
    config.orthogonal_attention = settings


def _with_attention(to_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wraps `to_dict` of a transformers configuration. The dictionary then names the model's current attention."""

    @functools.wraps(to_dict)
    def wrapped(config: Any) -> dict[str, Any]:
        written = to_dict(config)
        settings = written.pop(CONFIG_KEY, None)
        chosen = _implementation(config)
        names = chosen.values() if isinstance(chosen, dict) else [chosen]
        if settings is None or all(map(_is_another, names)):
            return written
        return written | {CONFIG_KEY: settings, "attn_implementation": chosen}

    return wrapped


def _implementation(config: Any) -> str | dict[str, Any]:
    """Returns `attn_implementation`: a name, or a dict from submodels to names if any submodel has its own settings."""
    parts = {key: _implementation(part) for key, part in _parts(config).items() if part.orthogonal_attention is not None}
    own = config._attn_implementation
    return {"": own} | parts if parts else own


def _is_ours(registered: Any) -> TypeGuard[functools.partial]:
    return isinstance(registered, functools.partial) and registered.func is _attend


def _is_another(name: str | None) -> bool:
    """True if transformers has an attention function of this name that this module did not register."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return not _is_ours(AttentionInterface().get(name)) and name in (*AttentionInterface(), *AttentionMaskInterface())


def _attend(
    name: str,
    options: MethodOptions,
    alpha: float,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls. Returns A V of each head (B, N, h, d_v), and A (B, h, N, N) if requested."""
    for argument in ("position_bias", "softcap", "sliding_window"):
        if others.get(argument) is not None:
            raise ValueError(f"{argument} is not supported: orthogonal attention has no softmax logits for it to change")
    _check_saved(module.config, name, {**options, "alpha": alpha})
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    scale = alpha * (scaling or 1 / math.sqrt(query.shape[-1]))
    if key.shape[1] != query.shape[1]:
        key, value = repeat_heads(query, key), repeat_heads(query, value)
    heads = orthogonal_attention(query, key, value, attention_mask, dropout, causal, scale=scale, **options)
    matrices = None
    if output_attentions:
        matrices = orthogonal_attention_matrix(query, key, attention_mask, scale=scale, **options)
    return heads.transpose(1, 2).contiguous(), matrices


def _check_saved(config: Any, name: str, settings: dict[str, Any]) -> None:
    """Raises ValueError if the model's configuration does not record this attention with these settings."""
    saved = config.orthogonal_attention
    if saved is None:
        raise ValueError(
            "the model's configuration does not name its attention, so the saved model would load with softmax: call "
            f"osa.integrations.set_attention(model, {name!r}) with the whole model"
        )
    if saved != settings:
        given = ", ".join(f"{option}={chosen!r}" for option, chosen in saved.items())
        raise ValueError(
            f"the attention settings in the model's configuration differ from those registered as {name!r}: call "
            f"register_with_transformers({name!r}, {given}) to use the model's settings, or set_attention(model, {name!r}) "
            "to use the registered ones"
        )


def _plain(method: Method, num_iterations: int | None, epsilon: float) -> MethodOptions:
    """Checks the options of a method, and converts numbers to Python's int and float, which can be saved as JSON."""
    check_method(method, num_iterations, epsilon)
    iterations = None if num_iterations is None else int(num_iterations)
    return {"method": method, "num_iterations": iterations, "epsilon": float(epsilon)}


def _finite(name: str, number: float) -> float:
    if not (isinstance(number, Real) and is_finite(number)):
        raise ValueError(f"{name} must be a finite number, not {number!r}")
    return float(number)
