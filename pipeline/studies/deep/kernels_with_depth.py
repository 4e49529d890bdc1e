"""Kernels with depth: what attention alone makes of the tokens' Σ = X Xᵀ/d, block by block. Figures 1, 6 and 7 of He et al.
2023.

Without MLPs and in the limit of wide networks, where an attention layer is Σ ← A Σ Aᵀ, exactly and in float64: nothing is
trained. Their signal-preserving attention and Value-SkipInit, the usual arrangements of norms and skips around softmax with
ALiBi, and orthogonal attention, which needs X itself. Then the same for the tokens of a ViT, where no mask is causal.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import Field, model_validator
from torch import Generator, Tensor

from osa.deep.shaped import (
    KERNELS,
    attention_between,
    exponential_kernel,
    exponential_schedule,
    residual_schedule,
    signal_preserving_attention,
    uniform_kernel,
    uniform_schedule,
)
from osa.init import stiefel_uniform
from pipeline.core.params import Fraction, PositiveFloat, PositiveInt, Section, Seeds
from pipeline.lab import Lab, float64
from pipeline.measures import effective_rank, exponential, skew
from pipeline.report import charts
from pipeline.report.looks import PALETTE, STYLE, look
from pipeline.report.numbers import fixed, number
from pipeline.studies import CHECK, OBSERVATION, Finding, Measure, Table, Tables
from pipeline.studies._findings import largest
from pipeline.studies._kernels import cosines, kernels_of, picture

place = 51
PAPER = "He et al. 2023"
ROWS = {  # of Figure 7, in its order, and ours
    "vanilla": "Softmax, no skip",
    "uspa": "U-SPA",
    "espa": "E-SPA",
    "rms": "Softmax, RMSNorm, no skip",
    "pre_ln": "Softmax, Pre-LN",
    "pre_ln_normalised": "Softmax, Pre-LN, normalised skips",
    "post_ln": "Softmax, Post-LN",
    "uspa_root": "U-SPA, not causal",
    "espa_root": "E-SPA, not causal",
    "vskipinit": "V-SkipInit",
    "osa": "OSA, one head",
}
SPA = {"uniform": "U-SPA", "exponential": "E-SPA"}
LOOKS = {  # the colour of the nearest model, and dashes, of each row
    row: {"color": look(model).colour, "linestyle": dashes}
    for row, model, dashes in (
        ("vanilla", "vit_noskip_nonorm", "-"),
        ("rms", "vit_noskip_nonorm", "--"),
        ("post_ln", "vit_noskip", "-"),
        ("pre_ln", "vit", "-"),
        ("pre_ln_normalised", "vit", "--"),
        ("vskipinit", "vskipinit", ":"),
        ("uspa", "uspa", "-"),
        ("uspa_root", "uspa", "--"),
        ("espa", "espa", "-"),
        ("espa_root", "espa", "--"),
        ("osa", "osa_exact", "-"),
    )
}
COLLAPSED = 0.99  # a mean cosine above which all tokens are as good as one
COLLAPSING = ("vanilla", "rms", "post_ln")  # to one direction, as Figures 1 and 7 show
PICTURED, EVERY = ("vanilla", "uspa", "espa", "rms", "pre_ln", "post_ln", "osa"), 5  # of the tokens, in the pictures
TOLERANCE = 1e-10  # of what is an identity: L products of N×N matrices with condition numbers up to 1e4
NORM_TOLERANCE = 0.1  # of q = 1 after all blocks with normalised skips, where E-SPA is an approximation
ROOTS = {True: "causal", False: "symmetric root"}
FIGURE_6 = (36, 0.02, 20)  # blocks, γ_L, and types of tokens, so that r = 0.05
SKIP_DEPTHS, SKIP_SCALE, SKIP_GAMMA = (6, 36), 1.4256, 0.6  # L (1 − α²) is that of α = 0.98 at 36 blocks
VISION_GAMMA = 0.05  # γ_L for 50 tokens, which gives about the cosines of 0.005 for 500
LAYERS = {  # orthogonal attention of several heads: the variant, and whether V and O are drawn for all heads together
    "osa_shaped": ("osa_shaped", True),
    "osa_joint": ("osa_exact", True),
    "osa_per_head": ("osa_exact", False),
}
VISION = {
    "vanilla": "Softmax with logits of 0, no skip",
    "pre_ln": "The same, Pre-LN",
    "post_ln": "The same, Post-LN",
    "vskipinit": "V-SkipInit",
    "uspa_root": "U-SPA",
    "espa_root": "E-SPA",
    "osa_shaped": "OSA (shaped)",
    "osa_joint": "OSA (exact), V and O drawn jointly",
    "osa_per_head": "OSA (exact), V and O drawn per head",
}
Step = Callable[[Tensor], Tensor]  # what a block makes of Σ


class Settings(Section):
    seeds: Seeds
    depths: list[PositiveInt] = Field(min_length=2)  # the last one is L
    tokens: PositiveInt = 100
    types: PositiveInt = 50  # of tokens, drawn at random: two are the same with the probability r = 1/types
    heads: PositiveInt = 8  # of ALiBi
    rho: Fraction = 0.8
    gamma: PositiveFloat = 0.005
    shortcut: Fraction = 0.98
    alpha: PositiveFloat = 0.1
    vision_depths: list[PositiveInt] = Field([6, 12, 36], min_length=1)
    images: PositiveInt = 8

    @model_validator(mode="after")
    def _depths_rise(self):
        if self.depths != sorted(set(self.depths)):
            raise ValueError("depths must rise")
        return self


def measure(settings: Settings, lab: Lab) -> Tables:
    """Mean cosine, rank and norms by row and depth; what they look like; the schedules; Figure 6; a ViT's tokens."""
    kernels, pictures, spectra = [], [], []
    for seed in settings.seeds:
        first = repeated_tokens(settings.tokens, settings.types, lab, seed)
        for row, stack in stacks(settings, lab, seed, first).items():
            own = {depth: kernel for depth, kernel in enumerate(stack, 1) if depth in settings.depths}
            kernels += [{"row": row, "seed": seed, "depth": depth} | summary(kernel) for depth, kernel in own.items()]
            if row == "osa":
                changes = [spectrum_change(first, kernel) for kernel in own.values()]
                spectra.append({"seed": seed, "change": max(changes)})
            if seed == settings.seeds[0] and row in PICTURED:
                pictures += [picture(kernel, EVERY).assign(row=row, depth=depth) for depth, kernel in own.items()]
    return {
        "kernels": pd.DataFrame(kernels),
        "pictures": pd.concat(pictures),
        "spectra": pd.DataFrame(spectra),
        "schedules": pd.DataFrame(schedules(settings)),
        "skips": pd.DataFrame(skips(settings)),
        "diagonals": pd.DataFrame(diagonals(settings, lab)),
        "vision": pd.DataFrame(vision(settings, lab)),
    }


# Kernels


def repeated_tokens(tokens: int, types: int, lab: Lab, seed: int) -> Tensor:
    """Σ_0 of tokens of random types, whose embeddings are orthogonal: 1 for two of a type, else 0 (Appendix B)."""
    drawn = torch.randint(types, (tokens,), generator=lab.generator(seed, "kernels/types"))
    return (drawn[:, None] == drawn).double()


def mean_cosine(kernel: Tensor) -> float:
    """Of two different tokens."""
    n = len(kernel)
    return ((cosines(kernel).sum() - n) / (n * n - n)).item()


def summary(kernel: Tensor) -> dict[str, float]:
    """Mean cosine, that of tokens a lag apart, effective rank of C, and the diagonal q."""
    c, q = cosines(kernel), kernel.diagonal()
    near, far = 1, len(c) // 2
    return {
        "cosine": mean_cosine(kernel),
        "near": c.diagonal(near).mean().item(),
        "far": c.diagonal(far).mean().item(),
        "effective_rank": effective_rank(torch.linalg.eigvalsh(c).clamp(min=0)),
        "q": q.mean().item(),
        "q_std": q.std().item(),
    }


def alibi(tokens: int, heads: int) -> Tensor:
    """The causal attention matrices of ALiBi with logits of zero, softmax(−2^{−8k/h} (i − j)), (heads, N, N) (H.2)."""
    place = torch.arange(tokens, dtype=torch.float64)
    distance = place[:, None] - place
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf).softmax(-1)


def softmax_rows(matrices: Tensor, shortcut: float) -> dict[str, Step]:
    """One block around attention with these matrices (heads, N, N), each with an equal share of the width."""

    def attend(kernel: Tensor) -> Tensor:
        return (matrices @ kernel @ matrices.mT).mean(0)

    return {
        "vanilla": attend,
        "rms": lambda kernel: attend(cosines(kernel)),
        "pre_ln": lambda kernel: kernel + attend(cosines(kernel)),
        "pre_ln_normalised": lambda kernel: shortcut**2 * kernel + (1 - shortcut**2) * attend(cosines(kernel)),
        "post_ln": lambda kernel: cosines(kernel + attend(kernel)),
    }


def attending(matrices: Iterable[Tensor]) -> list[Step]:
    """Σ ← A Σ Aᵀ for each of these matrices."""
    return [lambda kernel, a=matrix: a @ kernel @ a.mT for matrix in matrices]


def through(kernel: Tensor, steps: list[Step]) -> Iterator[Tensor]:
    """Σ_1, …, Σ_L."""
    for step in steps:
        kernel = step(kernel)
        yield kernel


def stacks(settings: Settings, lab: Lab, seed: int, first: Tensor) -> dict[str, Iterator[Tensor]]:
    """For each row the kernels of all blocks."""
    n, depth = settings.tokens, settings.depths[-1]
    steps = softmax_rows(alibi(n, settings.heads), settings.shortcut) | {"vskipinit": lambda kernel: kernel}
    made = {name: through(first, [step] * depth) for name, step in steps.items()}
    for name, kernel, last in (("uspa", "uniform", settings.rho), ("espa", "exponential", settings.gamma)):
        for suffix, causal in (("", True), ("_root", False)):
            options = {"causal": causal, "repeated": 1 / settings.types, "cls_index": 0}
            made[name + suffix] = through(first, attending(signal_preserving_attention(kernel, n, depth, last, **options)))
    made["osa"] = orthogonal_stack(first, depth, settings.alpha, lab.generator(seed, "kernels/osa"))
    return {name: made[name] for name in ROWS}


def orthogonal_stack(kernel: Tensor, depth: int, alpha: float, generator: Generator) -> Iterator[Tensor]:
    """The kernels of X_l = exp(S_l) X_{l−1} W_l, of one head with orthogonal weights, from an X_0 with this kernel.

    X_0 = √d Σ^½ is the one symmetric root: eigenvectors alone would be another choice on another machine, where eigenvalues
    are equal.
    """
    width = len(kernel)
    values, vectors = torch.linalg.eigh(kernel)
    x = math.sqrt(width) * (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    for _ in range(depth):
        query, key, w = (stiefel_uniform(width, width, generator=generator, dtype=torch.float64) for _ in range(3))
        x = exponential(skew(x @ query, x @ key, alpha / math.sqrt(width))) @ x @ w
        yield x @ x.mT / width


def spectrum_change(before: Tensor, after: Tensor) -> float:
    """The largest change of an eigenvalue, relative to the largest eigenvalue."""
    first, last = (torch.linalg.eigvalsh(kernel) for kernel in (before, after))
    return ((last - first).abs().max() / first.max()).item()


# Schedules


def schedules(settings: Settings) -> Iterator[dict]:
    """Of each form of signal-preserving attention: how far A_l ⋯ A_1 is from the kernel that block l is to have."""
    n = settings.tokens
    for (kernel, causal), depth in itertools.product(itertools.product(KERNELS, ROOTS), (6, *settings.depths[-1:])):
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
    """Of E-SPA with normalised skips, from Σ_0 = I: q and cosines after all blocks, as Eq. 26 has it and as Eq. 25 does."""
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
        target = mean_cosine(exponential_kernel(n, SKIP_GAMMA))
        yield {"depth": depth, "equation": equation, "target_cosine": target} | summary(kernel)


def eq_25(before: float, after: float) -> float:
    """The rate of decay that Eq. 25 as printed gives where Eq. 26 gives `after`: with λ_α² in the place of λ_α."""
    squared, reached = math.expm1(-2 * before), math.expm1(-2 * after)  # −a(γ)² of both, so that λ_α² is their ratio
    return -math.log1p(reached * (reached / squared)) / 2


def diagonals(settings: Settings, lab: Lab) -> Iterator[dict]:
    """Figure 6: the diagonal of Σ_l of one sequence, with and without the correction for tokens that repeat."""
    n, (depth, gamma, types) = settings.tokens, FIGURE_6
    for seed, corrected in itertools.product(settings.seeds, (True, False)):
        repeated = 1 / types if corrected else 0.0
        matrices = signal_preserving_attention("exponential", n, depth, gamma, causal=True, repeated=repeated, cls_index=0)
        kernels = through(repeated_tokens(n, types, lab, seed), attending(matrices))
        for block, q in enumerate((kernel.diagonal() for kernel in kernels), 1):
            yield {"seed": seed, "corrected": corrected, "block": block, "q": q.mean().item(), "q_std": q.std().item()}


# A ViT's tokens


@torch.no_grad()
def vision(settings: Settings, lab: Lab) -> Iterator[dict]:
    """The same without a mask for tokens of images, mean over them; of orthogonal attention in the layers of real models."""
    for depth, (name, (variant, joint)) in itertools.product(settings.vision_depths, LAYERS.items()):
        config = lab.config(variant, {"model": {"depth": depth}, "variant": {"joint_value_output": joint}})
        with float64():
            model = lab.model(config, settings.seeds[0])
        x = model.tokens(lab.images()[0][: settings.images])  # (images, N, d)
        first = kernels_of(x)
        if name == "osa_shaped":
            yield from vision_kernels(settings, depth, first)
        for block in model.blocks:
            x = block.attention(x)
        yield vision_row(name, depth, kernels_of(x), first)


def vision_kernels(settings: Settings, depth: int, first: list[Tensor]) -> Iterator[dict]:
    n = len(first[0])
    repeated = max(0.0, float(np.mean([mean_cosine(kernel) for kernel in first])))
    steps = softmax_rows(torch.full((1, n, n), 1 / n, dtype=torch.float64), settings.shortcut)
    rows = {name: [steps[name]] * depth for name in ("vanilla", "pre_ln", "post_ln")} | {
        "vskipinit": [lambda kernel: kernel]
    }
    for name, kernel, last in (("uspa_root", "uniform", settings.rho), ("espa_root", "exponential", VISION_GAMMA)):
        rows[name] = attending(signal_preserving_attention(kernel, n, depth, last, repeated=repeated))
    for name, steps in rows.items():
        *_, after = zip(*(through(kernel, steps) for kernel in first), strict=True)
        yield vision_row(name, depth, after, first)


def vision_row(row: str, depth: int, kernels: list[Tensor], before: list[Tensor]) -> dict:
    means = pd.DataFrame(map(summary, kernels)).mean().to_dict()
    first = pd.DataFrame(map(summary, before)).mean()
    traces = [(after.trace() / kernel.trace()).item() for after, kernel in zip(kernels, before, strict=True)]
    start = {"first_cosine": first["cosine"], "first_rank": first["effective_rank"]}
    return {"row": row, "depth": depth} | means | start | {"trace_change": max(abs(ratio - 1) for ratio in traces)}


def findings(settings: Settings, tables: Tables, lab: Lab) -> list[Finding]:
    kernels = tables["kernels"].groupby(["row", "depth"], sort=False).mean(numeric_only=True)
    return [
        figures_1_and_7(settings, kernels),
        pictures_of_figure_1(settings, tables["pictures"]),
        on_schedule(tables["schedules"]),
        with_skips(tables["skips"]),
        figure_6(tables["diagonals"]),
        orthogonal_kernels(tables["spectra"], tables["vision"]),
        tokens_of_images(settings, tables["vision"]),
    ]


def figures_1_and_7(settings: Settings, kernels: pd.DataFrame) -> Finding:
    last = settings.depths[-1]
    cosine, rank = kernels["cosine"], kernels["effective_rank"]
    measures = [
        Measure(
            f"{label}: mean cosine after {last} blocks",
            cosine[row, last],
            side="above" if row in COLLAPSING else "below",
            limit=COLLAPSED,
            note=f"effective rank {number(rank[row, last])}",
        )
        for row, label in ROWS.items()
    ]
    rows = [[label, *(fixed(cosine[row, depth], 3) for depth in settings.depths)] for row, label in ROWS.items()]
    return Finding(
        id="kernels_with_depth",
        title="Which attention makes all tokens alike",
        place=f"{PAPER}, Figures 1 and 7",
        kind=CHECK,
        statement="Without skips, softmax attention quickly makes all tokens point one way, with RMSNorm or without, and "
        "with Post-LN it does so more slowly. With Pre-LN and in signal-preserving attention the mean cosine stays below "
        f"{COLLAPSED} for {last} blocks",
        rule=f"In exact kernel space, {settings.tokens} tokens of {settings.types} types, mean over {len(settings.seeds)} "
        f"draws: the mean cosine of two tokens ends above {COLLAPSED} in softmax without skips and with Post-LN, and below "
        "it in all others.",
        measures=measures,
        table=Table(["Mean cosine after", *map(str, settings.depths)], rows),
        figure=draw_curves(settings, kernels),
        caption="Mean cosine of two tokens, and effective rank of their cosines, through attention alone. Softmax has the "
        "causal biases of ALiBi and logits of zero.",
        remark="V-SkipInit keeps the tokens as they are, and OSA every eigenvalue of their kernel (Theorem 2.2), if "
        "not of the cosines, whose rank is shown: both leave it to training to make tokens more alike. Below the line "
        f"little of the rank may be left: {number(rank['pre_ln', last])} with Pre-LN, {number(rank['espa', last])} in "
        "E-SPA.",
    )


def pictures_of_figure_1(settings: Settings, pictures: pd.DataFrame) -> Finding:
    last = pictures[pictures["depth"] == settings.depths[-1]].set_index("row").drop(columns="depth")
    measures = [
        Measure(f"{ROWS[row]}: smallest cosine after {settings.depths[-1]} blocks", last.loc[row].to_numpy().min())
        for row in PICTURED
    ]
    return Finding(
        id="kernels_pictured",
        title="What the kernels look like",
        place=f"{PAPER}, Figures 1 and 7",
        kind=OBSERVATION,
        statement="Cosines of every fifth token with every other, at several depths. E-SPA and Pre-LN with ALiBi keep "
        "neighbours more alike than distant tokens; U-SPA makes all pairs equally alike; OSA keeps those of one type alike "
        "and spreads the rest around 0.",
        measures=measures,
        figure=charts.pictures(pictures, {row: ROWS[row] for row in PICTURED}),
        caption="Black is a cosine of 1, white 0 or less. Tokens of one type are alike from the start.",
    )


def on_schedule(table: pd.DataFrame) -> Finding:
    measures, rows = [], []
    for (kernel, causal), own in table.groupby(["kernel", "causal"], sort=False):
        label = f"{SPA[kernel]}, {ROOTS[causal]}"
        measures.append(largest(f"{label}: largest error of an entry of Σ_l", own["error"], TOLERANCE))
        least = "the least of all blocks" + (", on and below the diagonal" if causal else "")
        asked = {"side": "above", "limit": 0.0} if causal else {}  # the others are clamped
        measures.append(Measure(f"{label}: smallest entry of A_l", own["least"].min(), note=least, **asked))
        rows += [[label, str(depth), number(kappa)] for depth, kappa in zip(own["depth"], own["kappa"], strict=True)]
    return Finding(
        id="signal_preserving_schedules",
        title="Signal-preserving attention follows its schedule",
        place=f"{PAPER}, Eq. 8 and 9, Theorems 1 to 3, Appendix A",
        kind=CHECK,
        statement="A_l ⋯ A_1 takes I to the kernel that block l is to have, with entries that are not negative",
        rule=f"In float64 every entry of (A_l ⋯ A_1)(A_l ⋯ A_1)ᵀ is within {TOLERANCE:g} of Σ_l, and every entry of a "
        "causal A_l that its mask leaves is positive.",
        measures=measures,
        table=Table(["Attention", "Blocks", "κ(A_L ⋯ A_1)"], rows, align="lrr"),
        remark="The price of cosines that rise is a Jacobian that is not well conditioned: κ(A_L ⋯ A_1) is the same at "
        "every depth, that of the last kernel’s root. It is 1 in V-SkipInit and, but for its dependence on X, in OSA. "
        "Entries of the symmetric root that rounding hides are set to 10⁻¹⁵.",
    )


def with_skips(table: pd.DataFrame) -> Finding:
    measures, rows = [], []
    for (depth, equation), own in table.groupby(["depth", "equation"], sort=False):
        row, what = own.iloc[0], f"Eq. {equation}, {depth} blocks: |mean q − 1|"
        judged = {"side": "below", "limit": NORM_TOLERANCE} if equation == 26 else {}
        measures.append(Measure(what, abs(row["q"] - 1), **judged))
        rows.append([f"Eq. {equation}", str(depth), *(fixed(row[name], 3) for name in ("q", "cosine", "target_cosine"))])
    return Finding(
        id="normalised_skips",
        title="E-SPA beside a normalised skip keeps the tokens’ norm",
        place=f"{PAPER}, Appendix F, Eq. 23 to 26",
        kind=CHECK,
        statement="With the rate of decay that Eq. 26 gives to the attention, the block as a whole follows the schedule "
        "approximately",
        rule=f"From Σ_0 = I, γ_L = {SKIP_GAMMA} and L (1 − α²) = {SKIP_SCALE}: the mean diagonal of Σ_L is within "
        f"{NORM_TOLERANCE:g} of 1.",
        measures=measures,
        table=Table(["Rate by", "Blocks", "Mean q", "Mean cosine", "Cosine wanted"], rows, align="lrrrr"),
        remark="Eq. 25 as printed puts λ_α² where Eq. 24 and 26 have λ_α, and takes q and the cosines several times as far "
        "from where they should be.",
    )


def figure_6(table: pd.DataFrame) -> Finding:
    last = table[table["block"] == table["block"].max()]
    errors = (last[last["corrected"]]["q"] - 1).abs()
    raw = last[~last["corrected"]]["q"]
    return Finding(
        id="repeated_tokens",
        title="Tokens that repeat need the correction",
        place=f"{PAPER}, Appendix B, Figure 6",
        kind=CHECK,
        statement="Where tokens repeat and the attention takes Σ_0 for I, the diagonal of Σ_l grows with depth; with the "
        "correction of Eq. 15 it stays around 1",
        rule=f"E-SPA, r = {1 / FIGURE_6[2]:g}, after {FIGURE_6[0]} blocks, every draw: the mean diagonal is within 0.2 of 1 "
        "with the correction, and above 2 without.",
        measures=[
            largest("Corrected: |mean q − 1|", errors, 0.2),
            Measure("Not corrected: mean q", raw.min(), side="above", limit=2.0, note=f"the smallest of {len(raw)} draws"),
        ],
        figure=draw_diagonals(table[table["seed"] == table["seed"].min()]),
        caption="Diagonal of Σ_l of one sequence, mean and standard deviation over its tokens.",
    )


def orthogonal_kernels(spectra: pd.DataFrame, vision: pd.DataFrame) -> Finding:
    change = vision.groupby("row")["trace_change"].max()
    joint = pd.Series([change["osa_shaped"], change["osa_joint"]])
    return Finding(
        id="orthogonal_kernels",
        title="What orthogonal attention keeps, with one head and with several",
        place="Theorem 2.2",
        kind=CHECK,
        statement="One head with orthogonal weights keeps every eigenvalue of Σ. Several heads keep its trace if V and O "
        "are each one orthogonal matrix",
        rule=f"In float64 no eigenvalue of Σ_l changes by more than {TOLERANCE:g} of the largest at any depth, and the "
        f"trace of Σ_L by no more than {TOLERANCE:g} of itself.",
        measures=[
            largest("One head: change of an eigenvalue", spectra["change"], TOLERANCE),
            largest("Several heads, V and O drawn jointly: change of the trace", joint, TOLERANCE),
            Measure("Several heads, V and O drawn per head: change of the trace", change["osa_per_head"]),
        ],
        remark="Theorem 2.2 covers one head. With V and O drawn per head, as Section 4.1 has it, a deep stack multiplies "
        "matrices Σ_i W^V_i W^O_i that are not orthogonal.",
    )


def tokens_of_images(settings: Settings, table: pd.DataFrame) -> Finding:
    depths = settings.vision_depths
    own = table.set_index(["row", "depth"])
    rows, measures = [], []
    for row, label in VISION.items():
        found = [own.loc[(row, depth)] for depth in depths]
        cells = [f"{fixed(each['cosine'], 3)}\nrank {number(each['effective_rank'])}" for each in found]
        rows.append([label, *cells, number(found[-1]["q"])])
        what, note = f"{label}: effective rank after {depths[-1]} blocks", f"from {number(found[-1]['first_rank'])}"
        measures.append(Measure(what, found[-1]["effective_rank"], note=note))
    columns = ["Attention", *(f"Cosine after {depth}" for depth in depths), f"q after {depths[-1]}"]
    return Finding(
        id="kernels_of_images",
        title="The same for the tokens of a ViT",
        place=f"{PAPER}, Appendix A; Theorem 2.2",
        kind=OBSERVATION,
        statement="Tokens of images as they enter the first block, divided by their root mean square, through attention "
        "alone and without a mask; mean over images. Softmax with logits of zero makes all tokens one in a single block.",
        measures=measures,
        table=Table(columns, rows),
        remark=f"Signal-preserving attention is that of its symmetric root, with γ_L = {VISION_GAMMA}. OSA’s rows are the "
        "attention layers of initialised models; “exact” has the paper’s tokens and α.",
    )


# Figures


@matplotlib.rc_context(STYLE)
def draw_curves(settings: Settings, kernels: pd.DataFrame) -> Figure:
    figure, panels = charts.panels(2, 4.4)
    titles = {"cosine": "Mean cosine", "effective_rank": "Effective rank"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for row, style in LOOKS.items():
            axes.plot(kernels.loc[row][column], linewidth=1.5, **style)
        axes.set(title=title, xlabel="Blocks", xscale="log", ylim=(0, None))
        axes.set_xticks(settings.depths, settings.depths)
        axes.set_xticks([], minor=True)
    charts.legend(figure, [Line2D([], [], label=ROWS[row], **style) for row, style in LOOKS.items()])
    return figure


@matplotlib.rc_context(STYLE)
def draw_diagonals(table: pd.DataFrame) -> Figure:
    figure, (axes,) = charts.panels(1, 3.2)
    for corrected, label, colour in ((False, "Σ₀ taken for I", PALETTE[3]), (True, "Corrected", PALETTE[0])):
        own = table[table["corrected"] == corrected]
        axes.plot(own["block"], own["q"], color=colour, label=label)
        band = own["q"] - own["q_std"], own["q"] + own["q_std"]
        axes.fill_between(own["block"], *band, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(1, **charts.EXPECTED)
    axes.set(xlabel="Blocks", ylabel="Diagonal of Σ_l")
    axes.legend()
    return figure
