"""The theory stage: every theorem of the paper measured, `python -m pipeline.theory`.

On Gaussian tokens of several sizes and seeds and on real ones: the activations of the orthogonal models, initialised and,
where their weights are there, trained. The mathematics is in osa.theory, how the numbers are judged in
pipeline.theory_findings, and the figures are in pipeline.theory_figures.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import osa
from osa import functional, reference, theory
from osa.init import stiefel_uniform
from pipeline import data, evaluate, findings, theory_figures, theory_findings, train
from pipeline.errors import entry_point
from pipeline.params import Params, RunConfig, load, resolve
from pipeline.summary import rounded_table

METHODS = ("qr", "newton_schulz", "exact")  # the paper's two, and ours
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LAYER = ("source", "state", "layer")  # columns that a table of layers has, whether or not a model has any
LAYER_CONDITIONS = (*LAYER, "head", "alpha", "alpha_mean", "kappa", "jacobian_norm", "kappa_sum")


@entry_point
def main() -> None:
    params = load()
    train.make_deterministic()
    layers = [layer for variant in orthogonal_variants(params) for layer in model_layers(params, variant)]
    tables = {name: rounded_table(table) for name, table in measure(params, layers).items()}
    write(params, tables)


def measure(params: Params, layers: list["Layer"]) -> dict[str, pd.DataFrame]:
    """Every table, by the name of its file."""
    linear, layer_condition = first_term_sweep(params), layer_conditions(params, layers)
    spectra, kernel = kernel_tables(params)
    with float64():
        weights = weight_spectra(params, layers)
        depth = trainability(params)
    return {
        "theorem_2_1": exponential_errors(params, layers),
        "theorem_2_2": kernel,
        "theorem_2_2_spectra": spectra,
        "theorem_3_1": orthogonality_errors(params, layers),
        "theorem_4_1": jacobian_errors(params),
        "theorem_4_2": weights,
        "theorems_4_3_4_4": linear,
        "theorems_4_3_4_4_layers": layer_condition,
        "trainability": depth,
    }


def write(params: Params, tables: dict[str, pd.DataFrame]) -> None:
    """The tables, the figures and findings.json. The findings are made from the tables as they stand in the files."""
    folder = theory_findings.FOLDER
    found = theory_findings.findings(params, tables)
    tables = tables | {"measures": theory_findings.measure_table(found)}
    findings.write(folder, tables, found, theory_figures.draw(params, tables))


def frame(rows: list[dict], columns: tuple[str, ...]) -> pd.DataFrame:
    """The rows as a table in which these columns exist."""
    table = pd.DataFrame(rows)
    return table.reindex(columns=[*table, *(name for name in columns if name not in table)])


def gaussian(seed: int, name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=train.random_stream(seed, f"theory/{name}"), dtype=torch.float64)


@functools.cache
def mnist_images(pixel_scaling: str) -> tuple[Tensor, Tensor]:
    """The test images in float64, and their labels."""
    mnist = data.load(pixel_scaling=pixel_scaling)
    return mnist.test_images.double(), mnist.test_labels


@contextmanager
def float64() -> Iterator[None]:
    """Modules made inside are float64, and initialised without a rounding to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# The models


@dataclass(frozen=True)
class Layer:
    """One attention layer of an orthogonal model in float64, and what enters it for a few test images, (images, N, d)."""

    variant: str
    state: str  # initialised | trained
    number: int  # 1 for the first
    attention: osa.OrthogonalSelfAttention
    x: Tensor

    @property
    def identity(self) -> dict:
        return {"source": self.variant, "state": self.state, "layer": self.number}

    def project(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key, (images, h, N, d_v), and the scale, (h, 1, 1)."""
        query, key, _ = self.attention.project(self.x)
        scale = self.attention.scale()
        return query, key, scale.expand(self.attention.num_heads, 1, 1)

    def head_weights(self, head: int) -> tuple[Tensor, ...]:
        """W^Q, W^K, W^V (d, d_v) and W^O (d_v, d) of one head as the paper writes them."""
        attention, width = self.attention, self.attention.embed_dim // self.attention.num_heads
        rows = slice(head * width, (head + 1) * width)
        inputs = (linear.weight[rows].mT for linear in (attention.query, attention.key, attention.value))
        return (*inputs, attention.out.weight[:, rows].mT)


def orthogonal_variants(params: Params) -> list[str]:
    return [name for name in params.run.variants if params.variants[name].attention == "orthogonal"]


@torch.no_grad()
def model_layers(params: Params, variant: str) -> list[Layer]:
    """The layers of a variant's model as initialised by the first seed and, if its weights are there, as trained."""
    config, seed = resolve(params, variant), params.run.seeds[0]
    images = mnist_images(config.data.pixel_scaling)[0][: params.theory.images]
    models = {"initialised": train.build_model(config, seed)}
    path = train.weights_path(variant, seed)
    if path.exists():
        models["trained"] = evaluate.load_model(config, variant, seed)
    else:
        print(f"warning: {path} is missing, so {variant} is measured as initialised alone.", file=sys.stderr)
    return [
        Layer(variant, state, number, attention.requires_grad_(False), x)
        for state, model in models.items()
        for number, (attention, x) in enumerate(attention_inputs(model.double(), images), 1)
    ]


def attention_inputs(model: osa.VisionTransformer, images: Tensor) -> Iterator[tuple[torch.nn.Module, Tensor]]:
    """Each block's attention module and its input (images, N, d)."""
    x = model.tokens(images)
    for block in model.blocks:
        yield block.attention, block.norm1(x)
        x = block(x)


# Theorem 2.1


def exponential_errors(params: Params, layers: list[Layer]) -> pd.DataFrame:
    """‖A − exp(S)‖₂ over ‖S‖₂ (Gaussian Q and K), over cond(M) (prescribed singular values), and in the models' layers."""
    settings, rows = params.theory.theorem_2_1, []
    for (tokens, width), seed in itertools.product(settings.sizes, params.theory.seeds):
        m = gaussian(seed, f"exponential/{tokens}x{width}", tokens, 2 * width)
        sweeps = [("norm", value, m, value) for value in settings.norms]
        for value in settings.conditions:
            generator = train.random_stream(seed, f"theory/condition/{tokens}x{width}/{value:g}")
            matrix = theory.matrix_with_condition(tokens, 2 * width, value, generator=generator)
            sweeps.append(("condition", value, matrix, settings.norm))
        for sweep, value, matrix, skew_norm in sweeps:
            query, key = matrix.split(width, -1)
            scale = theory.scale_for_norm(query, key, skew_norm)
            identity = {"source": "gaussian", "sweep": sweep, "value": value, "tokens": tokens, "width": width, "seed": seed}
            for method in METHODS:
                rows += _exponential_rows(identity, query, key, torch.tensor(scale).double(), params, method)
    for layer in layers:
        query, key, scale = layer.project()
        sizes = {"tokens": query.shape[-2], "width": query.shape[-1], "seed": params.run.seeds[0]}
        rows += _exponential_rows(
            layer.identity | {"sweep": "layer"} | sizes, query, key, scale, **layer.attention.options, params=params
        )
    return frame(rows, LAYER)


def _exponential_rows(
    identity: dict, query: Tensor, key: Tensor, scale: Tensor, params: Params, method: str, **options
) -> list[dict]:
    """A row for each dtype; for the heads of a layer, one each, with the largest error over the images."""
    rows = []
    for name, dtype in DTYPES.items():
        q, k, c = query.to(dtype), key.to(dtype), scale.to(dtype)
        error = theory.exponential_error(q, k, c, method, **options)
        columns = {
            "norm": theory.norm(reference.skew(q, k, c)),
            "condition": torch.linalg.cond(torch.cat([q, k], -1).double()),
            "error": error,
            "tolerance": theory.exponential_tolerance(q, k, c, method, params.theory.products),
        }
        stacked = torch.stack(list(columns.values()), -1).reshape(
            -1, query.shape[-3] if query.dim() > 2 else 1, len(columns)
        )
        for head in range(stacked.shape[1]):
            worst = stacked[:, head][stacked[:, head, 2].argmax()]
            values = dict(zip(columns, worst.tolist(), strict=True))
            rows.append(
                identity | ({"head": head + 1} if query.dim() > 2 else {}) | {"method": method, "dtype": name} | values
            )
    return rows


# Theorem 2.2


def stacks(params: Params) -> dict[str, tuple[str | None, float | None, bool]]:
    """Name → method, α and skip of each attention-only model."""
    alphas = params.theory.theorem_2_2.alphas
    orthogonal = {f"{method}, alpha {alpha:g}": (method, alpha, False) for alpha in alphas for method in METHODS}
    return orthogonal | {"softmax": (None, None, False), "softmax, skip": (None, None, True)}


def kernel_tables(params: Params) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every eigenvalue of Σ_l for the first seed's image, and what became of the spectrum for all tokens and seeds."""
    config = resolve(params, orthogonal_variants(params)[0]) if orthogonal_variants(params) else None
    spectra, summary = [], []
    for seed in params.theory.seeds:
        starts = {"gaussian": gaussian(seed, "kernel", _tokens(params), params.model.embed_dim)}
        if config is not None:
            starts["mnist"] = _image_tokens(config, seed)
        for (tokens, x), (name, stack) in itertools.product(starts.items(), stacks(params).items()):
            eigenvalues = _spectrum_by_depth(params, x, seed, *stack)
            for depth, values in eigenvalues.items():
                identity = {"tokens": tokens, "stack": name, "seed": seed, "depth": depth}
                summary.append(identity | _spectrum_summary(values, eigenvalues[0]))
                if tokens == list(starts)[-1] and seed == params.theory.seeds[0]:
                    spectra += [identity | {"index": i, "eigenvalue": v} for i, v in enumerate(values.tolist(), 1)]
    return pd.DataFrame(spectra), pd.DataFrame(summary)


def _tokens(params: Params) -> int:
    return (params.model.image_size // params.model.patch_size) ** 2 + 1


@torch.no_grad()
def _image_tokens(config: RunConfig, seed: int) -> Tensor:
    """What enters the first block of an initialised model for one test image, (N, d)."""
    images, _ = mnist_images(config.data.pixel_scaling)
    return train.build_model(config, seed).double().tokens(images[seed % len(images)][None])[0]


def _spectrum_by_depth(params: Params, x: Tensor, seed: int, method: str | None, alpha: float | None, skip: bool) -> dict:
    """The eigenvalues of Σ_l at each depth, for weights that all stacks of a seed share."""
    depths, width = params.theory.theorem_2_2.depths, x.shape[1]
    generator = train.random_stream(seed, "theory/stack")
    draw = lambda: stiefel_uniform(width, width, generator=generator, dtype=torch.float64)  # noqa: E731
    weights = [(draw(), draw(), draw() @ draw()) for _ in range(depths[-1])]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if method is None:
            return F.scaled_dot_product_attention(query, key, value)
        return functional.orthogonal_attention(query, key, value, scale=alpha / math.sqrt(width), method=method)

    states = enumerate(theory.attention_stack(x, weights, attention, skip))
    return {depth: theory.kernel_eigenvalues(x) for depth, x in states if depth in depths}


def _spectrum_summary(values: Tensor, first: Tensor) -> dict:
    """Effective rank, λ₁/Σλ, and the largest change of an eigenvalue relative to itself at depth 0."""
    kept = first > len(first) * torch.finfo(first.dtype).eps ** 2 * first[0]  # not zero: squares of singular values
    return {
        "effective_rank": theory.effective_rank(values),
        "largest_share": (values[0] / values.sum()).item(),
        "trace": values.sum().item(),
        "change": (values[kept] / first[kept] - 1).abs().max().item(),
    }


# Theorem 3.1


def orthogonality_errors(params: Params, layers: list[Layer]) -> pd.DataFrame:
    """‖YᵀY − I‖₂ and its bounds for both iterations, by K, cond(M) and ‖S‖₂, and in the models' layers at their own K."""
    settings, rows = params.theory.theorem_3_1, []
    for (tokens, width), seed, value in itertools.product(settings.sizes, params.theory.seeds, settings.conditions):
        generator = train.random_stream(seed, f"theory/basis/{tokens}x{width}/{value:g}")
        m = theory.matrix_with_condition(tokens, 2 * width, value, generator=generator)
        query, key = m.split(width, -1)
        identity = {"source": "gaussian", "tokens": tokens, "width": width, "seed": seed, "condition": value}
        for iteration, bases in _bases(m, settings.iterations).items():
            for skew_norm, (k, basis) in itertools.product(settings.norms, enumerate(bases, 1)):
                scale = theory.scale_for_norm(query, key, skew_norm)
                measured = _orthogonality(query, key, torch.tensor(scale).double(), basis)
                row = identity | {"iteration": iteration, "num_iterations": k}
                rows.append(row | {name: column.item() for name, column in measured.items()})
    for layer in layers:
        rows += _layer_orthogonality(layer, params)
    return frame(rows, LAYER)


def _bases(m: Tensor, num_iterations: int) -> dict[str, list[Tensor]]:
    return {
        "newton_schulz": theory.newton_schulz_bases(m, num_iterations),
        "polar_express": theory.polar_express_bases(m, num_iterations),
    }


def _orthogonality(query: Tensor, key: Tensor, scale: Tensor, basis: Tensor) -> dict[str, Tensor]:
    skew = reference.skew(query, key, scale)
    skew_norm = theory.norm(skew)
    sharp, blunt, general = theory.orthogonality_bounds(basis, skew_norm)
    return {
        "norm": skew_norm,
        "sigma_max": theory.norm(basis),
        "error": theory.orthogonality_error(theory.low_rank_exponential(basis, skew)),
        "bound_10": sharp,
        "bound_11": blunt,
        "bound_general": general,
    }


def _layer_orthogonality(layer: Layer, params: Params) -> list[dict]:
    """A row for each head and image. Layers that use no iteration are given the paper's K = 6."""
    query, key, scale = layer.project()
    m = torch.cat([query, key], -1)
    num_iterations = layer.attention.options["num_iterations"] or 6
    sizes = {"tokens": query.shape[-2], "width": query.shape[-1], "seed": params.run.seeds[0]}
    rows = []
    for iteration, bases in _bases(m, num_iterations).items():
        measured = _orthogonality(query, key, scale, bases[-1]) | {"condition": torch.linalg.cond(m)}
        identity = layer.identity | sizes | {"iteration": iteration, "num_iterations": num_iterations}
        for image, head in itertools.product(range(len(query)), range(query.shape[1])):
            values = {name: column[image, head].item() for name, column in measured.items()}
            rows.append(identity | {"image": image, "head": head + 1} | values)
    return rows


# Theorem 4.1


def random_head(d: int, num_heads: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """W^Q, W^K, W^V, W^O of one head by Section 4, in float64."""
    width = d // num_heads
    query_key = stiefel_uniform(d, 2 * width, generator=generator, dtype=torch.float64)
    value, out = (stiefel_uniform(d, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return query_key[:, :width], query_key[:, width:], value, out.mT


def jacobian_errors(params: Params) -> pd.DataFrame:
    """‖J − (J₁ + J₂)‖_F/‖J‖_F: J from autograd, ∂A/∂X the exponential's derivative, or autograd's for Newton–Schulz."""
    settings, rows = params.theory.theorem_4_1, []
    for (tokens, d, heads), seed, method in itertools.product(settings.sizes, params.theory.seeds, METHODS):
        generator = train.random_stream(seed, f"theory/jacobian/{tokens}x{d}x{heads}")
        x = torch.randn(tokens, d, generator=generator, dtype=torch.float64)
        weights = random_head(d, heads, generator)
        first, second, whole = _jacobian_and_terms(x, weights, settings.alpha / math.sqrt(d // heads), method)
        condition = torch.linalg.cond(torch.cat([x @ weights[0], x @ weights[1]], -1)).item()
        rows.append(
            {"tokens": tokens, "embed_dim": d, "num_heads": heads, "seed": seed, "method": method, "condition": condition}
            | {"first_norm": theory.norm(first).item(), "second_norm": theory.norm(second).item()}
            | {"error": ((whole - first - second).norm() / whole.norm()).item()}
            | {"tolerance": theory.rounding(max(tokens, d), x.dtype, params.theory.products) * condition}
        )
    return pd.DataFrame(rows)


def _jacobian_and_terms(x: Tensor, weights: tuple[Tensor, ...], scale: float, method: str) -> tuple[Tensor, ...]:
    """J₁ and J₂ of Eq. 13, and J."""
    w_query, w_key, w_value, w_out = weights

    def matrix(x: Tensor) -> Tensor:
        return functional.orthogonal_attention_matrix(x @ w_query, x @ w_key, scale=scale, method=method)

    if method == "newton_schulz":  # A is not exp(S)
        derivative = theory.jacobian(matrix, x)
    else:
        derivative = theory.exponential_jacobian(x, w_query, w_key, scale)
    whole = theory.jacobian(lambda x: theory.head(x, weights, scale, method=method), x)
    return *theory.jacobian_terms(x, matrix(x), derivative, w_value @ w_out), whole


# Theorem 4.2


@torch.no_grad()
def weight_spectra(params: Params, layers: list[Layer]) -> pd.DataFrame:
    """Singular values of W̃ of each head: as Section 4 initialises them in both dtypes, Xavier's, and the models'."""
    rows = []
    for (d, heads), seed, (name, dtype) in itertools.product(
        params.theory.theorem_4_2.sizes, params.theory.seeds, DTYPES.items()
    ):
        generator = train.random_stream(seed, f"theory/weights/{d}x{heads}")
        attention = osa.OrthogonalSelfAttention(d, heads)
        osa.init.init_orthogonal_attention_(attention, generator=generator)
        rows += _weight_rows({"source": "Section 4", "seed": seed, "dtype": name}, attention.to(dtype))
        if dtype == torch.float64:
            attention = osa.SoftmaxSelfAttention(d, heads)
            osa.init.init_softmax_attention_(attention, generator=generator)
            rows += _weight_rows({"source": "Xavier", "seed": seed, "dtype": name}, attention)
    for layer in layers:
        identity = layer.identity | {"seed": params.run.seeds[0], "dtype": "float32"}  # what its weights are stored in
        rows += _weight_rows(identity, layer.attention)
    return frame(rows, LAYER)


def _weight_rows(identity: dict, attention: torch.nn.Module) -> list[dict]:
    """For each head the 2 d_v singular values of W̃, their extremes, how far they are from 1, and κ."""
    d, heads = attention.embed_dim, attention.num_heads
    query, key = (linear.weight.unflatten(0, (heads, -1)).mT for linear in (attention.query, attention.key))
    rows = []
    for head, product in enumerate(theory.query_key_product(query, key), 1):
        values = torch.linalg.svdvals(product)[: 2 * d // heads]
        row = identity | {"embed_dim": d, "num_heads": heads, "head": head}
        quantiles = {"sigma_max": values[0], "sigma_min": values[-1], "deviation": (values - 1).abs().max()}
        rest = {"kappa": theory.condition(values, rank=len(values)), "singular_values": " ".join(f"{v:.6g}" for v in values)}
        rows.append(row | {key: value.item() for key, value in quantiles.items()} | rest)
    return rows


# Theorems 4.3 and 4.4


def first_term_sweep(params: Params) -> pd.DataFrame:
    """‖J₁‖₂, κ(J) and their bounds against α for one head on Gaussian tokens."""
    settings, rows = params.theory.theorems_4_3_4_4, []
    for (tokens, d, heads), seed in itertools.product(settings.sizes, params.theory.seeds):
        generator = train.random_stream(seed, f"theory/alpha/{tokens}x{d}x{heads}")
        x, weights = torch.randn(tokens, d, generator=generator, dtype=torch.float64), random_head(d, heads, generator)
        for method, alpha in itertools.product(METHODS, settings.alphas):
            identity = {"tokens": tokens, "embed_dim": d, "num_heads": heads, "seed": seed, "method": method, "alpha": alpha}
            rows.append(identity | _first_term_row(x, weights, alpha, d // heads, method))
    return pd.DataFrame(rows)


def _first_term_row(x: Tensor, weights: tuple[Tensor, ...], alpha: float, width: int, method: str) -> dict:
    scale = alpha / math.sqrt(width)
    first = theory.norm(theory.first_term(x, weights, scale, method=method)).item()
    whole = theory.jacobian(lambda x: theory.head(x, weights, scale, method=method), x)
    query, key = x @ weights[0], x @ weights[1]
    a = functional.orthogonal_attention_matrix(query, key, scale=scale, method=method)
    deviation = (torch.linalg.svdvals(a) - 1).abs().max().item()
    kappa = theory.condition(torch.linalg.svdvals(whole), rank=len(x) * width)
    bound = theory.condition_bound(deviation, first)
    return {
        "norm": theory.norm(reference.skew(query, key, scale)).item(),
        "first_norm": first,
        "constant": theory.first_term_constant(x, width),
        "deviation": deviation,
        "kappa": kappa,
        "bound": bound,
        "excess": kappa - 1,  # for small α the digits of κ that a file holds are all zero
        "bound_excess": bound - 1,
    }


def layer_conditions(params: Params, layers: list[Layer]) -> pd.DataFrame:
    """α, ‖J₁‖₂ and κ(J) of the first heads of each layer on one image, and κ(Σᵢ W^Vᵢ W^Oᵢ) of the whole layer."""
    rows = []
    for layer in layers:
        if (layer.number - 1) % params.theory.theorems_4_3_4_4.layer_stride:
            continue
        total = torch.linalg.svdvals(layer.attention.out.weight @ layer.attention.value.weight)
        alphas = layer.attention.alpha.expand(layer.attention.num_heads).tolist()
        for head in range(min(params.theory.theorems_4_3_4_4.heads, len(alphas))):
            rows.append(
                layer.identity | {"head": head + 1, "alpha": alphas[head], "alpha_mean": sum(alphas) / len(alphas)}
                | _head_condition(layer, head) | {"kappa_sum": theory.condition(total, rank=len(total))}
            )  # fmt: skip
    return frame(rows, LAYER_CONDITIONS)


def _head_condition(layer: Layer, head: int) -> dict:
    """κ(J) and ‖J‖₂ of one head from J Jᵀ. The Jacobian's rows are taken in coordinates of W^O's row space, which holds them
    all: N·d_v of them are left, as many as singular values that are not zero."""
    *inputs, w_out = layer.head_weights(head)
    coordinates = torch.linalg.qr(w_out.mT).R.mT  # (d_v, d_v)
    scale = layer.attention.scale().expand(layer.attention.num_heads, 1, 1)[head]
    weights = (*inputs, coordinates)
    whole = theory.jacobian(lambda x: theory.head(x, weights, scale, **layer.attention.options), layer.x[0])
    values = torch.linalg.eigvalsh(whole @ whole.mT).clamp(min=0).sqrt().flip(0)
    return {"kappa": theory.condition(values, rank=len(values)), "jacobian_norm": values[0].item()}


# Trainability


def trainability(params: Params) -> pd.DataFrame:
    """Jacobians and gradients of each model at initialisation, by depth and seed, on one test image; the loss on several."""
    settings, rows = params.theory.trainability, []
    for name, depth, seed in itertools.product(settings.models, settings.depths, params.theory.seeds):
        config = resolve(params, name)
        config = config.model_copy(update={"model": config.model.model_copy(update={"depth": depth})})
        images, labels = mnist_images(config.data.pixel_scaling)
        model = train.build_model(config, seed)
        few = torch.arange(seed * settings.gradient_images, (seed + 1) * settings.gradient_images) % len(images)
        row = {"model": name, "depth": depth, "seed": seed}
        row |= _jacobian_rows(model, images[few[:1]], settings, train.random_stream(seed, f"theory/depth/{name}/{depth}"))
        rows.append(row | _gradient_norms(model, images[few], labels[few]))
    return pd.DataFrame(rows)


def _jacobian_rows(model: osa.VisionTransformer, image: Tensor, settings, generator: torch.Generator) -> dict:
    """Singular values of ∂logits/∂X₀, dense, and norms of ∂X_L/∂X₀ through the attention layers alone, matrix-free."""
    x = model.tokens(image)[0].detach()
    values = torch.linalg.svdvals(theory.jacobian(lambda x: logits(model, x), x))
    attend = lambda x: attention_only(model, x)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):  # the one whose gradient has a gradient
        spectral = theory.spectral_norm(attend, x, num_iterations=settings.power_iterations, generator=generator)
    frobenius = theory.frobenius_norm(attend, x, num_samples=settings.samples, generator=generator)
    return {
        "logits_spectral": values[0].item(),
        "logits_frobenius": values.norm().item(),
        "logits_kappa": theory.condition(values, rank=len(values)),
        "attention_spectral": spectral,
        "attention_gain": frobenius / math.sqrt(x.numel()),
    }


def logits(model: osa.VisionTransformer, x: Tensor) -> Tensor:
    """The logits (batch, classes) from X₀ (batch, N, d)."""
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x[:, 0]))


def attention_only(model: osa.VisionTransformer, x: Tensor) -> Tensor:
    """X_L without the MLPs, (batch, N, d), with the skips and norms that the model has."""
    for block in model.blocks:
        y = block.attention(block.norm1(x))
        x = x + y if block.skip else y
    return x


def _gradient_norms(model: osa.VisionTransformer, images: Tensor, labels: Tensor) -> dict:
    """‖∂loss/∂θ‖₂ over the parameters of the first and of the last block."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    first, last = (
        torch.stack([p.grad.norm() for p in model.blocks[i].parameters() if p.grad is not None]).norm().item()
        for i in (0, -1)
    )
    return {"first_gradient": first, "last_gradient": last}


if __name__ == "__main__":
    main()
