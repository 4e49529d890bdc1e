"""Kernels of tokens Σ = X Xᵀ/d, as several studies look at them."""

import pandas as pd
from torch import Tensor


def kernels_of(x: Tensor) -> list[Tensor]:
    """X Xᵀ/d of each image, (images, N, d)."""
    return list(x @ x.mT / x.shape[-1])


def cosines(kernel: Tensor) -> Tensor:
    """C = diag(Σ)^{−½} Σ diag(Σ)^{−½}, what a norm before or after leaves of Σ."""
    scale = kernel.diagonal().rsqrt()
    return kernel * scale * scale[:, None]


def picture(kernel: Tensor, every: int) -> pd.DataFrame:
    """C at every so many tokens, to three decimals, for `charts.pictures`."""
    return pd.DataFrame(cosines(kernel)[::every, ::every].numpy().round(3)).add_prefix("c")
