"""The Vision Transformer of Appendix D. The models of the paper are this class with different attention and options."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from osa.init import init_xavier_mlp_, truncated_normal_, xavier_linear_
from osa.modules import MLP, Block
from osa.options import NORM_EPS, ModelConfig
from osa.runtime import uncompiled

# One entry per chosen block: its patch tokens, or a pair of its patch tokens and its [cls]
Intermediates = list[Tensor] | list[tuple[Tensor, Tensor]]


class VisionTransformer(nn.Module):
    """A ViT that classifies by its [cls] token (Dosovitskiy et al. 2020): patches, learned 1-D positions, blocks, a head.

    Args:
        image_size: height and width of the image.
        patch_size: p, a divisor of image_size. There are N = (image_size/p)² + 1 tokens.
        num_classes: number of logits. If 0, the model has no head and returns the features of [cls].
        embed_dim: d.
        depth: number of blocks, at least 1.
        mlp_ratio: hidden width of the MLPs divided by d.
        attention: a function that returns the attention module of a block, given the index of the block, 0 to depth − 1.
        skip, norm, norm_eps, shortcut: see `Block`. `norm` also adds a final LayerNorm.
        activation: activation of the MLPs.
        normalise_tokens: divide each token by its root mean square before the first block, without learned parameters.
        in_channels: channels of the image.
        embedding_std: σ of the initial position embeddings and [cls].

    Raises:
        ValueError: the patch size does not divide the image size, or depth < 1.

    Example:
        >>> sizes = dict(image_size=28, patch_size=7, num_classes=10, embed_dim=64, depth=2, mlp_ratio=4)
        >>> vit = VisionTransformer(**sizes, attention=lambda i: osa.OrthogonalSelfAttention(64, 4), skip=True, norm=True)
        >>> vit(torch.randn(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """

    config: ModelConfig  # set by `build_vit`

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        mlp_ratio: float,
        attention: Callable[[int], nn.Module],
        skip: bool,
        norm: bool,
        norm_eps: float = NORM_EPS,
        shortcut: float | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        normalise_tokens: bool = False,
        in_channels: int = 1,
        embedding_std: float = 0.02,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size {patch_size} must divide image_size {image_size}")
        if depth < 1:
            raise ValueError(f"depth must be 1 or more, not {depth}")
        self.image_shape = (in_channels, image_size, image_size)
        self.patch_size, self.normalise_tokens = patch_size, normalise_tokens
        num_tokens = (image_size // patch_size) ** 2 + 1
        self.patch_embedding = nn.Linear(in_channels * patch_size**2, embed_dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.position_embedding = nn.Parameter(torch.empty(1, num_tokens, embed_dim))
        mlp = partial(MLP, embed_dim, int(embed_dim * mlp_ratio), activation)
        block = partial(Block, embed_dim=embed_dim, skip=skip, norm=norm, norm_eps=norm_eps, shortcut=shortcut)
        blocks = [block(attention(i), mlp()) for i in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if norm else nn.Identity()
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.num_features, self.grad_checkpointing = embed_dim, False
        truncated_normal_(self.cls_token, embedding_std)
        truncated_normal_(self.position_embedding, embedding_std)
        xavier_linear_(self.patch_embedding)
        for each in blocks:
            init_xavier_mlp_(each.mlp)
        if isinstance(self.head, nn.Linear):
            xavier_linear_(self.head)

    def tokens(self, images: Tensor) -> Tensor:
        """Returns the input of the first block: [cls] and embedded patches plus positions, (B, C, H, W) → (B, N, d).

        Raises:
            TypeError: the images are not a tensor.
            ValueError: the images have a wrong shape, or are not floating-point.
        """
        if not isinstance(images, Tensor):
            raise TypeError(f"images must be a tensor, not {type(images).__name__}: use torch.as_tensor")
        if images.shape[1:] != self.image_shape:
            raise ValueError(f"images must be (B, {', '.join(map(str, self.image_shape))}), not {tuple(images.shape)}")
        if not images.is_floating_point():
            raise ValueError(
                f"images must be floating-point, not {images.dtype}: convert them, for example with images / 255"
            )
        p = self.patch_size
        patches = images.unfold(2, p, p).unfold(3, p, p)  # (B, C, H/p, W/p, p, p)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)  # (B, N-1, C·p²)
        cls_token = self.cls_token.expand(images.shape[0], -1, -1)  # (B, 1, d)
        tokens = torch.cat([cls_token, self.patch_embedding(patches)], dim=1) + self.position_embedding
        return F.rms_norm(tokens, tokens.shape[-1:], eps=1e-30) if self.normalise_tokens else tokens

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, num_classes)."""
        return self.forward_head(self._features(images, num_outputs=1))  # the head needs only [cls]

    def forward_features(self, images: Tensor) -> Tensor:
        """Tokens after the last block and the final norm, (B, C, H, W) → (B, N, d)."""
        return self._features(images, num_outputs=None)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Intermediates | tuple[Tensor, Intermediates] | dict[str, Tensor | Intermediates]:
        """Returns the tokens after chosen blocks, and the output of `forward_features`, with the interface of timm's models.

        Args:
            images: (B, C, H, W).
            indices: indices of the chosen blocks; negative ones count from the end. A single int n means the last n blocks.
                None: all blocks.
            return_prefix_tokens: for each chosen block, return a pair: its patch tokens, and its [cls] (B, 1, d).
            norm: apply the final norm to each output.
            stop_early: stop after the last chosen block, and compute the features from its output.
            output_fmt: shape of the patch tokens: "NCHW", (B, d, H/p, W/p), or "NLC", (B, N − 1, d).
            intermediates_only: return the list without the features.
            output_dict: return a dict with keys "image_features", "image_intermediates" and "image_intermediates_prefix".

        Returns:
            The features (B, N, d), and a list of the chosen blocks' outputs, in the order of the blocks.

        Raises:
            ValueError: a chosen block does not exist, or the format is unknown.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f'output_fmt must be "NCHW" or "NLC", not {output_fmt!r}')
        taken = self._block_numbers(indices)
        x, outputs = self.tokens(images), []  # (B, N, d)
        for i, block in enumerate(self.blocks):
            if stop_early and i > max(taken):
                break
            x = self._run_block(block, x, None)
            if i in taken:
                outputs.append(self.norm(x) if norm else x)
        rows = images.shape[-1] // self.patch_size
        patches = [y[:, 1:] for y in outputs]  # (B, N − 1, d)
        if output_fmt == "NCHW":
            patches = [y.mT.unflatten(-1, (rows, rows)).contiguous() for y in patches]  # (B, d, H/p, W/p)
        prefix = [y[:, :1] for y in outputs]
        if output_dict:
            parts: dict[str, Tensor | Intermediates] = {"image_intermediates": patches}
            if return_prefix_tokens:
                parts["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                parts["image_features"] = self.norm(x)
            return parts
        intermediates = list(zip(patches, prefix, strict=True)) if return_prefix_tokens else patches
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def _block_numbers(self, indices: int | Sequence[int] | None) -> set[int]:
        """Returns the numbers, 0 to depth − 1, of the blocks that `indices` of `forward_intermediates` selects."""
        depth = len(self.blocks)
        if indices is None:
            indices = depth
        numbers = range(-indices, 0) if isinstance(indices, int) else indices
        if not numbers or not all(-depth <= number < depth for number in numbers):
            raise ValueError(
                f"indices must be block numbers from {-depth} to {depth - 1}, or one number n from 1 to {depth} for the "
                f"last n of the {depth} blocks, not {indices!r}"
            )
        return {number % depth for number in numbers}

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits (B, num_classes) from [cls], the first token of x (B, N, d), or [cls] itself if `pre_logits`."""
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def reset_classifier(self, num_classes: int) -> None:
        """Gives the model a new head with Xavier weights, or none for 0 classes. The device and the dtype stay the same."""
        token = self.cls_token  # gives device and dtype, as adapters may replace any layer but not this parameter
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=token.device, dtype=token.dtype)
            xavier_linear_(self.head)
        if hasattr(self, "config"):
            self.config = dataclasses.replace(self.config, num_classes=num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Switches checkpointing on or off. With it, training stores only the inputs of blocks, and recomputes the rest."""
        self.grad_checkpointing = enable

    def _features(self, images: Tensor, num_outputs: int | None) -> Tensor:
        """Returns the final norm's output for the first `num_outputs` tokens, or for all if None, (B, num_outputs, d)."""
        x = self.tokens(images)  # (B, N, d)
        for i, block in enumerate(self.blocks, 1):
            x = self._run_block(block, x, num_outputs if i == len(self.blocks) else None)
        return self.norm(x)

    def _run_block(self, block: nn.Module, x: Tensor, num_outputs: int | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(block, x, num_outputs, use_reentrant=False))
        return block(x, num_outputs)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model without its wrappers: torch.compile, data parallelism and weight averaging."""
    inner = uncompiled(model)
    if isinstance(model, (nn.DataParallel, DistributedDataParallel, AveragedModel)):
        inner = model.get_submodule("module")
    return model if inner is model else unwrapped(inner)


def blocks_of(model: nn.Module) -> list[Block]:
    """Returns the blocks of a model, which may be inside a wrapper.

    Raises:
        ValueError: the model has no `blocks`.
    """
    blocks = getattr(unwrapped(model), "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise ValueError(
            "the model must have an nn.ModuleList `blocks`, each block with an attention and an mlp; "
            f"{type(model).__name__} has none"
        )
    return list(cast(Iterable[Block], blocks))
