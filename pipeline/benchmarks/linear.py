"""Linear attention, which replaces softmax attention and takes time linear in the number of tokens.

With a feature map φ, row i of the output is (φ(qᵢ)ᵀ Σⱼ φ(kⱼ) vⱼᵀ) / (φ(qᵢ)ᵀ Σⱼ φ(kⱼ)). Tensors are (..., N, d).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def elu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention with φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""
    return attend(F.elu(query) + 1, F.elu(key) + 1, value)


def favor(projection: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns FAVOR+ attention, an estimate of softmax attention at scale 1/√d (Choromanski et al. 2021, arXiv 2009.14794).

    φ(x) = exp(Ωy − ‖y‖²/2) with y = d^(−1/4) x and Ω = `projection` (m, d). To avoid overflow, we divide the features of
    each query by their maximum, and the features of all keys of a head by their common maximum. These factors cancel.
    """
    exponents = []
    for x in (query, key):
        y = x * x.shape[-1] ** -0.25
        exponents.append(y @ projection.mT - y.square().sum(-1, keepdim=True) / 2)
    of_query, of_key = exponents
    of_query = of_query - of_query.amax(-1, keepdim=True)
    of_key = of_key - of_key.amax((-2, -1), keepdim=True)
    return attend(of_query.exp(), of_key.exp(), value)


def orthogonal_projection(width: int, count: int | None = None) -> Tensor:
    """Returns Ω (count, width) for FAVOR+: Gaussian rows, orthogonal within each block of `width` rows.

    By default `count` is d ln d, rounded up, with d = `width`. Choromanski et al. bound the error for counts of this order.
    """
    count = math.ceil(width * math.log(width)) if count is None else count
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(math.ceil(count / width), width, width, generator=generator)
    q, r = torch.linalg.qr(blocks)
    # LAPACK chooses the signs of r's diagonal; q is uniformly distributed once they are made positive
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    directions = q.mT.flatten(0, 1)[:count]
    return directions * torch.randn(count, width, generator=generator).norm(dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns linear attention, where `query` and `key` hold the features φ(q) and φ(k)."""
    return query @ (key.mT @ value) / (query @ key.sum(-2, keepdim=True).mT)
