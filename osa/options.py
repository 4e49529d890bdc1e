"""The options of models as type checkers read them: the words that one can be, and the keywords of `create_model`.

`ModelConfig` of osa/models.py says what each does and what its bounds are; a test holds the two against each other.
"""

from typing import Literal, TypedDict

from osa.deep.shaped import Kernel
from osa.functional import Method
from osa.init import QueryKey, ValueOut

AttentionKind = Literal["orthogonal", "softmax", "signal_preserving", "value_skipinit"]
AttentionStart = Literal["section_4", "xavier", "ji"]
MLPStart = Literal["suo", "xavier", "shaped", "isometric"]
ActivationKind = Literal["gelu", "gelu_tanh", "dks_gelu"]
LinearStart = Literal["xavier", "torch", "lecun"]
HeadStart = Literal["xavier", "torch", "lecun", "zeros"]


class Options(TypedDict, total=False):
    """Any of the options of `ModelConfig`."""

    attention: AttentionKind
    skip: bool
    norm: bool
    mlp_init: MLPStart
    method: Method | None
    num_iterations: int | None
    epsilon: float | None
    alpha_times_depth: float | None
    kernel: Kernel | None
    kernel_last: float | None
    causal: bool | None
    cls_index: int | None
    repeated: float | None
    query_key_init: QueryKey | None
    value_out_init: ValueOut | None
    attention_init: AttentionStart | None
    joint_value_output: bool
    activation: ActivationKind
    normalise_tokens: bool
    normalised_skip: float | None
    alpha: float
    embedding_std: float
    alpha_per_head: bool
    xavier_fused_qkv: bool
    suo_transposed: bool
    patch_embedding: LinearStart
    head: HeadStart
    image_size: int
    in_channels: int
    patch_size: int
    num_classes: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float
    norm_eps: float
