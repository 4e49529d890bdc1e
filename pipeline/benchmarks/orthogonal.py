"""Measures the time of orthogonal linear layers relative to a dense layer: `python -m pipeline benchmarks.orthogonal`.

Each map of osa/constrained/orthogonal.py has three implementations: our parametrisation, torch's (which lacks Givens
rotations), and the code of a blog post, in pipeline/benchmarks/post.py. At each size, every round times all layers in a
new random order, and we divide each layer's time by the dense layer's time in the same round. The results go to
orthogonal.csv and orthogonal.json in paper_outputs/benchmarks/HARDWARE/.
"""

import argparse
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from tqdm import tqdm

from osa.constrained.orthogonal import MAPS, orthogonal_
from osa.init import stiefel_uniform
from pipeline.benchmarks import cost, measurements, post
from pipeline.benchmarks.cost import BOTH, FORWARD, Call
from pipeline.core import provenance
from pipeline.core.errors import entry_point
from pipeline.results.measures import orthogonality_error

DENSE, OURS, TORCH, POST = "dense", "ours", "torch", "the post’s steps"  # values of the column `code`
TRAINING_TOKENS = 6400  # 128 images of 50 tokens
SEED = 0
SMALLEST = 16  # n of the smallest layer
TOKENS = (1, 128, TRAINING_TOKENS)
STD = 0.01  # standard deviation of the parameters, as in the blog post that post.py implements
SAMPLE_SECONDS = 0.02  # minimum duration of a sample; a shorter call is repeated
MOST_SECONDS = 1.5  # a call that is predicted to take longer is left out
POWER = 2.5  # we predict that time grows as n^POWER, a compromise between n² (many tokens) and n³ (few tokens)
LARGEST_GIVENS = 128  # maximum n for `post.givens`, since autograd stores the results of n(n − 1)/2 rotations
TORCH_MAPS = {"exponential": "matrix_exp", "cayley": "cayley", "householder": "householder"}
KEYS = ["map", "code", "n", "tokens", "pass"]  # columns that identify a row

Key = tuple[str, str, int, int, str]


@dataclass(frozen=True)
class Layer:
    """A linear layer.

    function     maps tokens (b, n) and the parameters to the output
    parameters   the parameters of the layer, as one tensor
    free         number of degrees of freedom
    """

    function: Callable[[Tensor, Tensor], Tensor]
    parameters: Tensor
    free: int


@entry_point
def main(arguments: list[str] | None = None) -> None:
    parser = measurements.parser("orthogonal", __doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--largest", type=int, default=1024, help="largest n; the sizes are 16, 32, 64, ...")
    options, device = parser.parse_args(arguments), provenance.default_device()
    measurements.write_measurements(
        "orthogonal", measure(options, device), device, options, inputs={"std": STD, "seed": SEED}
    )


def measure(options: argparse.Namespace, device: torch.device) -> pd.DataFrame:
    order, rows = random.Random(SEED), []
    last: dict[tuple, tuple[int, float]] = {}
    sizes = [SMALLEST * 2**k for k in range((options.largest // SMALLEST).bit_length())]
    for n, tokens in tqdm(list(itertools.product(sizes, TOKENS)), desc="orthogonal", unit="size", disable=None):
        x, found = torch.randn(tokens, n, device=device), layers(n, device)
        calls: dict[Key, Call] = {}
        for (name, code), layer in found.items():
            forward = Call(layer.function, (x, layer.parameters))
            for direction in (FORWARD, BOTH):
                key = name, code, n, tokens, direction
                if fits(key, last):
                    calls[key] = forward if direction == FORWARD else forward.with_backward()
        samples = cost.sample_seconds(calls, options.repeats, SAMPLE_SECONDS, order, device)
        for key, seconds in samples.items():
            dense = samples[DENSE, DENSE, n, tokens, key[-1]]
            over = {f"{name}_over_dense": ratio for name, ratio in measurements.quantiles(np.divide(seconds, dense)).items()}
            row: dict[str, Any] = dict(zip(KEYS, key, strict=True)) | measurements.quantiles(seconds) | over
            row |= describe(found[key[:2]], n)
            if tokens == TRAINING_TOKENS:
                of = cost.cost(calls[key], device)
                row |= {"peak_bytes": of.peak_bytes, "multiply_adds": of.multiply_adds}
            rows.append(row)
            last[key[:2], tokens, key[-1]] = n, row["seconds"]
    return pd.DataFrame(rows)


def layers(n: int, device: torch.device) -> dict[tuple[str, str], Layer]:
    """Returns the layers of width n, keyed by (map, implementation).

    Our layers and torch's are initialised with the same weight. Small random numbers are then added to their parameters.
    """
    generator, free = torch.Generator().manual_seed(SEED), n * (n - 1) // 2
    angles = (STD * torch.randn(free, generator=generator)).to(device)
    vectors = (STD * torch.randn(n, n, generator=generator)).to(device)
    weight = stiefel_uniform(n, n, generator=generator).to(device)

    def parametrised(register: Callable[[nn.Linear], nn.Module], change: Tensor) -> Layer:
        linear = nn.Linear(n, n, bias=False, device=device)
        linear.weight.data.copy_(weight)
        built = register(linear).get_submodule("parametrizations.weight")
        assert isinstance(built, ParametrizationList)
        return Layer(lambda x, parameters: F.linear(x, built[0](parameters)), built.original.detach() + change, free)

    found = {(DENSE, DENSE): Layer(F.linear, weight, n * n)}
    found |= {(name, OURS): parametrised(partial(orthogonal_, name=name), angles) for name in MAPS}
    for name, theirs in TORCH_MAPS.items():
        register = partial(parametrizations.orthogonal, orthogonal_map=theirs)
        found[name, TORCH] = parametrised(register, vectors.tril(-1))
    for name in MAPS:
        if name != "givens" or n <= LARGEST_GIVENS:
            found[name, POST] = Layer(getattr(post, name), vectors if name == "householder" else angles, free)
    return found


def fits(key: Key, last: dict[tuple, tuple[int, float]]) -> bool:
    """Returns whether to time a call. The dense layer is timed at every size, because we divide the other times by its time.

    For each map, implementation, number of tokens and pass, `last` holds the last call's n and its time in seconds.
    """
    name, code, n, tokens, direction = key
    if code == DENSE:
        return True
    before = last.get(((name, code), tokens, direction))
    if before is None:
        return n == SMALLEST
    return before[0] * 2 == n and before[1] * 2**POWER <= MOST_SECONDS


def describe(layer: Layer, n: int) -> dict[str, float]:
    """Returns a layer's numbers of parameters and of degrees of freedom, and ‖WᵀW − I‖₂ of the matrix W that it applies."""
    w = layer.function(torch.eye(n, device=layer.parameters.device), layer.parameters).detach().double()
    error = orthogonality_error(w).item()
    return {"parameters": layer.parameters.numel(), "free": layer.free, "orthogonality_error": error}


if __name__ == "__main__":
    main()
