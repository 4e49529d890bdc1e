"""Linear attention as a substitute for softmax: attention by features of query and key, in time linear in the tokens.

With features φ, row i of the result is φ(qᵢ)ᵀ Σⱼ φ(kⱼ) vⱼᵀ / φ(qᵢ)ᵀ Σⱼ φ(kⱼ). Tensors are (..., N, d).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def elu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention with φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv 2006.16236)."""
    return attend(F.elu(query) + 1, F.elu(key) + 1, value)


def favor(projection: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns FAVOR+, an estimate of softmax attention at the scale 1/√d (Choromanski et al. 2021, arXiv 2009.14794).

    φ(x) = exp(Ωy − ‖y‖²/2) with y = d^(−1/4) x, for a `projection` Ω of shape (m, d). Each query's features, and all keys'
    of a head, are divided by their largest, so that none overflows; these factors cancel.
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
    """Returns Ω (count, width) for FAVOR+: Gaussian rows, orthogonal within each block of `width`. The count is by default
    d ln d, the order for which Choromanski et al. bound the error."""
    count = math.ceil(width * math.log(width)) if count is None else count
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(math.ceil(count / width), width, width, generator=generator)
    q, r = torch.linalg.qr(blocks)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform: Householder's signs depend on the first entries
    directions = q.mT.flatten(0, 1)[:count]
    return directions * torch.randn(count, width, generator=generator).norm(dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention whose weights are the products of the features `query` and `key`, divided by their sum."""
    return query @ (key.mT @ value) / (query @ key.sum(-2, keepdim=True).mT)
