"""Kernels with depth: how does attention alone change the tokens' kernel Σ = X Xᵀ/d, block by block? (Figures 1, 6 and 7 of
He et al. 2023.)

Without MLPs and in the limit of wide networks, an attention layer maps Σ to A Σ Aᵀ. We compute this map in float64 and
train nothing. For orthogonal attention we compute X itself, because A depends on X. At the end we measure the attention
layers of real models, which have several heads.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Generator, Tensor

from osa.init import stiefel_uniform
from osa.options import KernelKind
from osa.shaped.matrices import attention_between, signal_preserving_attention
from osa.shaped.schedules import (
    KERNEL_KINDS,
    exponential_kernel,
    exponential_schedule,
    residual_schedule,
    uniform_kernel,
    uniform_schedule,
)
from pipeline.config.looks import look_of
from pipeline.config.params import Fraction, PositiveFloat, PositiveInt, Section, Seeds
from pipeline.results.measures import blocks_of, effective_rank, exponential, mean_cosine, skew
from pipeline.studies import Study, Tables, charts, check
from pipeline.studies._settings import Depths
from pipeline.studies.lab import Lab

ROWS: tuple[str, ...] = ("vanilla", "uspa", "espa", "rms", "pre_ln", "pre_ln_normalised", "post_ln")  # as in Figure 7
ROWS += ("uspa_root", "espa_root", "vskipinit", "osa")
LINES = {  # row → (label, model that gives the line its colour and style)
    "vanilla": ("softmax, no skip", "vit_noskip_nonorm"),
    "post_ln": ("softmax, Post-LN", "vit_noskip"),
    "pre_ln": ("softmax, Pre-LN", "vit"),
    "uspa": ("U-SPA", "uspa"),
    "espa": ("E-SPA", "espa"),
    "osa": ("OSA", "osa_exact"),
}
COLLAPSED = 0.99  # tokens with a mean cosine above this have collapsed to one direction
COLLAPSING = ("vanilla", "rms", "post_ln")  # models whose tokens collapse, as in Figures 1 and 7
TOLERANCE = 1e-10  # maximum error after L products of matrices with condition numbers up to 1e4
# With normalised skips, E-SPA keeps the mean of diag Σ at 1 only approximately.
NORM_TOLERANCE = 0.1  # maximum |q − 1|, where q is the mean of diag Σ after all blocks
# In Figure 6, we expect |q − 1| < CORRECTED with the correction for repeated tokens, and q > UNCORRECTED without it.
CORRECTED, UNCORRECTED = 0.2, 2.0
FIGURE_6 = (36, 0.02, 20)  # number of blocks, γ_L, and number of types of tokens (1/r)
# SKIP_SCALE is L (1 − α²), which gives α = 0.98 at L = 36 blocks. SKIP_GAMMA is γ_L.
SKIP_DEPTHS, SKIP_SCALE, SKIP_GAMMA = (6, 36), 1.4256, 0.6
LAYERS = {  # kind of orthogonal attention → (variant, whether W^V and W^O are drawn for all heads together)
    "osa_shaped": ("osa_shaped", True),
    "osa_joint": ("osa_exact", True),
    "osa_per_head": ("osa_exact", False),
}
KernelMap = Callable[[Tensor], Tensor]  # maps Σ before a block to Σ after the block


class Settings(Section):
    seeds: Seeds
    depths: Depths  # the last depth is L
    tokens: PositiveInt = 100
    types: PositiveInt = 50  # number of types of tokens: two random tokens have the same type with probability r = 1/types
    heads: PositiveInt = 8  # number of heads of the attention with ALiBi
    rho: Fraction = 0.8
    gamma: PositiveFloat = 0.005
    shortcut: Fraction = 0.98
    alpha: PositiveFloat = 0.1
    layer_depths: list[PositiveInt] = Field([6, 12, 36], min_length=1)
    images: PositiveInt = 8


def measure(settings: Settings, lab: Lab) -> Tables:
    kernels, spectra = [], []
    for seed in settings.seeds:
        first = repeated_tokens(settings.tokens, settings.types, lab, seed)
        for row, stack in stacks(settings, lab, seed, first).items():
            own = {depth: kernel for depth, kernel in enumerate(stack, 1) if depth in settings.depths}
            kernels += [{"row": row, "seed": seed, "depth": depth} | summary(kernel) for depth, kernel in own.items()]
            if row == "osa":
                changes = [spectrum_change(first, kernel) for kernel in own.values()]
                spectra.append({"seed": seed, "change": max(changes)})
    return {
        "kernels": pd.DataFrame(kernels),
        "spectra": pd.DataFrame(spectra),
        "schedules": pd.DataFrame(schedules(settings)),
        "skips": pd.DataFrame(skips(settings)),
        "diagonals": pd.DataFrame(diagonals(settings, lab)),
        "layers": pd.DataFrame(layer_rows(settings, lab)),
    }


# Kernels


def repeated_tokens(tokens: int, types: int, lab: Lab, seed: int) -> Tensor:
    """Returns Σ_0 for tokens of random types (Appendix B): entry (i, j) is 1 if tokens i and j share a type, else 0."""
    drawn = torch.randint(types, (tokens,), generator=lab.generator(seed, "kernels/types"))
    return (drawn[:, None] == drawn).double()


def cosines(kernel: Tensor) -> Tensor:
    """Returns the cosines between tokens, diag(Σ)^{−½} Σ diag(Σ)^{−½}, which form the kernel of the normalised tokens."""
    scale = kernel.diagonal().rsqrt()
    return kernel * scale * scale[:, None]


def summary(kernel: Tensor) -> dict[str, float]:
    """Returns statistics of q, the diagonal of a kernel Σ, and of c, the matrix of cosines between tokens."""
    c, q = cosines(kernel), kernel.diagonal()
    return {
        "cosine": mean_cosine(c).item(),
        "near": c.diagonal(1).mean().item(),  # mean cosine of neighbouring tokens
        "far": c.diagonal(len(c) // 2).mean().item(),  # mean cosine of tokens N/2 positions apart
        "effective_rank": effective_rank(torch.linalg.eigvalsh(c).clamp(min=0)),
        "q": q.mean().item(),
        "q_std": q.std().item(),
    }


def alibi(tokens: int, heads: int) -> Tensor:
    """Returns ALiBi's causal attention for Q Kᵀ = 0: softmax(−2^{−8k/h} (i − j)) in head k, (heads, N, N) (Appendix H.2)."""
    place = torch.arange(tokens, dtype=torch.float64)
    distance = place[:, None] - place
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf).softmax(-1)


def softmax_rows(matrices: Tensor, shortcut: float) -> dict[str, KernelMap]:
    """Returns the map from Σ before a block to Σ after it, for each arrangement of softmax attention, norms and skips.

    `matrices` holds the attention matrices of the heads, (heads, N, N). All heads have the same width.
    """

    def attend(kernel: Tensor) -> Tensor:
        return (matrices @ kernel @ matrices.mT).mean(0)

    return {
        "vanilla": attend,
        "rms": lambda kernel: attend(cosines(kernel)),
        "pre_ln": lambda kernel: kernel + attend(cosines(kernel)),
        "pre_ln_normalised": lambda kernel: shortcut**2 * kernel + (1 - shortcut**2) * attend(cosines(kernel)),
        "post_ln": lambda kernel: cosines(kernel + attend(kernel)),
    }


def through(kernel: Tensor, steps: Iterable[KernelMap]) -> Iterator[Tensor]:
    """Yields Σ_1, …, Σ_L: the kernel after each block."""
    for step in steps:
        kernel = step(kernel)
        yield kernel


def attended(kernel: Tensor, matrices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields Σ_l = A_l Σ_{l−1} A_lᵀ for each matrix A_l."""
    for matrix in matrices:
        kernel = matrix @ kernel @ matrix.mT
        yield kernel


def stacks(settings: Settings, lab: Lab, seed: int, first: Tensor) -> dict[str, Iterator[Tensor]]:
    """Returns, for each of `ROWS`, an iterator over the kernels after each block."""
    n, depth = settings.tokens, settings.depths[-1]
    steps = softmax_rows(alibi(n, settings.heads), settings.shortcut) | {"vskipinit": lambda kernel: kernel}
    made = {name: through(first, [step] * depth) for name, step in steps.items()}
    forms: tuple[tuple[str, KernelKind, float], ...]
    forms = (("uspa", "uniform", settings.rho), ("espa", "exponential", settings.gamma))
    for name, form, last in forms:
        attention = partial(signal_preserving_attention, form, n, depth, last, repeated=1 / settings.types, cls_index=0)
        made[name] = attended(first, attention(causal=True))
        made[f"{name}_root"] = attended(first, attention(causal=False))
    made["osa"] = orthogonal_stack(first, depth, settings.alpha, lab.generator(seed, "kernels/osa"))
    return {name: made[name] for name in ROWS}


def orthogonal_stack(kernel: Tensor, depth: int, alpha: float, generator: Generator) -> Iterator[Tensor]:
    """Yields the kernel of each X_l = exp(S_l) X_{l−1} W_l, for one head with orthogonal weights.

    X_0 is √d times the symmetric square root of Σ_0 = `kernel`. The root V Λ^½ would differ between machines, because the
    eigenvectors V are not unique: Σ_0 = V Λ Vᵀ has repeated eigenvalues.
    """
    width = len(kernel)
    values, vectors = torch.linalg.eigh(kernel)
    x = math.sqrt(width) * (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    for _ in range(depth):
        query, key, w = (stiefel_uniform(width, width, generator=generator, dtype=torch.float64) for _ in range(3))
        x = exponential(skew(x @ query, x @ key, alpha / math.sqrt(width))) @ x @ w
        yield x @ x.mT / width


def spectrum_change(before: Tensor, after: Tensor) -> float:
    """Returns max |λᵢ' − λᵢ| / max λᵢ for the sorted eigenvalues λᵢ of `before` and λᵢ' of `after`."""
    first, last = (torch.linalg.eigvalsh(kernel) for kernel in (before, after))
    return ((last - first).abs().max() / first.max()).item()


# Schedules


def schedules(settings: Settings) -> Iterator[dict]:
    """Yields a row for each kind of kernel, with causal and with bidirectional attention, at two depths.

    P_l is the product A_l ⋯ A_1 of attention matrices, and Σ_l is the kernel that the schedule prescribes for block l.

    error   maximum entry of |P_l P_lᵀ − Σ_l| over all blocks l
    least   minimum entry of all A_l, or of their lower triangles if attention is causal
    kappa   κ(P_L)
    """
    n = settings.tokens
    for kernel, causal, depth in itertools.product(KERNEL_KINDS, (True, False), (6, settings.depths[-1])):
        last = settings.rho if kernel == "uniform" else settings.gamma
        steps = (uniform_schedule if kernel == "uniform" else exponential_schedule)(depth, last)
        make = uniform_kernel if kernel == "uniform" else exponential_kernel
        matrices = signal_preserving_attention(kernel, n, depth, last, causal=causal, cls_index=0)
        product, errors = torch.eye(n, dtype=torch.float64), []
        for matrix, value in zip(matrices, steps[1:], strict=True):
            product = matrix @ product
            errors.append((product @ product.mT - make(n, value)).abs().max().item())
        least = matrices[torch.ones_like(matrices).tril().bool()].min() if causal else matrices.min()
        identity = {"kernel": kernel, "causal": causal, "depth": depth}
        kappa = torch.linalg.cond(product).item()
        yield identity | {"error": max(errors), "least": least.item(), "kappa": kappa}


def skips(settings: Settings) -> Iterator[dict]:
    """Yields a `summary` of Σ_L for E-SPA with normalised skips and Σ_0 = I, for each L and each γ (Eq. 25 and Eq. 26)."""
    n = settings.tokens
    for depth, equation in itertools.product(SKIP_DEPTHS, (26, 25)):
        shortcut = math.sqrt(1 - SKIP_SCALE / depth)
        steps = exponential_schedule(depth, SKIP_GAMMA)
        reached = residual_schedule("exponential", steps, shortcut)
        if equation == 25:
            reached = [eq_25(before, after) for before, after in zip(steps, reached, strict=False)]
        kernel = torch.eye(n, dtype=torch.float64)
        for before, after in zip(steps, reached, strict=False):
            matrix = attention_between("exponential", n, before, after)
            kernel = shortcut**2 * kernel + (1 - shortcut**2) * matrix @ kernel @ matrix.mT
        target = mean_cosine(cosines(exponential_kernel(n, SKIP_GAMMA))).item()
        yield {"depth": depth, "equation": equation, "target_cosine": target} | summary(kernel)


def eq_25(before: float, after: float) -> float:
    """Returns a block's γ from Eq. 25 as He et al. print it, including the misprint of λ_α² for λ_α.

    `before` is the γ that the schedule prescribes for the previous block. `after` is the γ that Eq. 26 gives for this block.
    """
    # Let a(γ)² = 1 − exp(−2γ). Then `squared` is −a(before)², and `reached` is −a(after)². Their ratio is λ_α².
    squared, reached = math.expm1(-2 * before), math.expm1(-2 * after)
    return -math.log1p(reached * (reached / squared)) / 2


def diagonals(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Yields mean and standard deviation of diag Σ_l for Figure 6, with and without the correction for repeated tokens."""
    n, (depth, gamma, types) = settings.tokens, FIGURE_6
    for seed, corrected in itertools.product(settings.seeds, (True, False)):
        repeated = 1 / types if corrected else 0.0
        matrices = signal_preserving_attention("exponential", n, depth, gamma, causal=True, repeated=repeated, cls_index=0)
        for block, kernel in enumerate(attended(repeated_tokens(n, types, lab, seed), matrices), 1):
            q = kernel.diagonal()
            yield {"seed": seed, "corrected": corrected, "block": block, "q": q.mean().item(), "q_std": q.std().item()}


# Layers of real models


@torch.no_grad()
def layer_rows(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Applies the attention layers of real models one after the other, without the MLPs. Yields a row for each model.

    trace_change   maximum over images of the relative change of tr X Xᵀ from the first layer's input to the last layer's
                   output
    """
    for depth, (name, (variant, joint)) in itertools.product(settings.layer_depths, LAYERS.items()):
        config = lab.config(variant, {"model": {"depth": depth}, "variant": {"joint_value_output": joint}})
        model = lab.model(config, settings.seeds[0], torch.float64)
        x = first = model.tokens(lab.images()[0][: settings.images])  # (images, N, d)
        for _, attention, _ in blocks_of(model):
            x = attention(x)
        ratios = x.square().sum((1, 2)) / first.square().sum((1, 2))
        yield {"layers": name, "depth": depth, "trace_change": (ratios - 1).abs().max().item()}


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    kernels = tables["kernels"].groupby(["row", "depth"], sort=False).mean(numeric_only=True)
    deepest, trace = settings.depths[-1], tables["layers"].groupby("layers")["trace_change"].max()
    skips = tables["skips"].set_index(["equation", "depth"])["q"]
    repeated = tables["diagonals"][tables["diagonals"]["block"] == FIGURE_6[0]].groupby("corrected")["q"]
    rows = []
    for row in ROWS:
        cosines = [kernels.loc[(row, depth), "cosine"] for depth in settings.depths]
        ends = check(cosines[-1], COLLAPSED, "above" if row in COLLAPSING else "below")
        rows.append({"row": row, "cosines": cosines, "rank": kernels.loc[(row, deepest), "effective_rank"], "ends": ends})
    return {
        "depths": settings.depths,
        "rows": rows,
        "schedule": check(tables["schedules"]["error"].max(), TOLERANCE),
        "skips": check((skips[26] - 1).abs().max(), NORM_TOLERANCE),
        "skips_printed": (skips[25] - 1).abs().max(),  # with Eq. 25 as printed
        "corrected": check((repeated.get_group(True) - 1).abs().max(), CORRECTED),
        "uncorrected": check(repeated.get_group(False).min(), UNCORRECTED, "above"),
        "spectrum": check(tables["spectra"]["change"].max(), TOLERANCE),
        "trace_joint": check(max(trace["osa_shaped"], trace["osa_joint"]), TOLERANCE),
        "trace_per_head": trace["osa_per_head"],
    }


def draw(settings: Settings, tables: Tables, lab: Lab) -> Figure:
    kernels = tables["kernels"].groupby(["row", "depth"], sort=False)["cosine"].mean()
    figure, (axes,) = charts.panels(1, 3.2)
    for row, (label, model) in LINES.items():
        axes.plot(kernels[row], label=label, **look_of(model).line())
    axes.set(xlabel="Blocks", ylabel="Mean cosine", xscale="log", ylim=(0, None))
    axes.set_xticks(settings.depths, map(str, settings.depths))
    axes.set_xticks([], minor=True)
    charts.label_ends(axes)
    return figure


STUDY = Study(settings=Settings, measure=measure, summarise=summarise, figures={"kernels_with_depth": draw})
