"""Trainability: does OSA make Transformers without skips and normalisation easier to train?

We measure untrained networks of several depths. The paper initialises the MLPs of OSA with SUO and the MLPs of the ViTs
with Xavier. To separate attention from MLPs, we combine OSA (QR), OSA (NS) and softmax with SUO and with Xavier. We also
measure ViTs with normalisation.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from osa.vit import VisionTransformer
from pipeline.config.params import PositiveInt, Section, Seeds
from pipeline.results.measures import blocks_of, condition, gradient_norm, jacobian, power_iteration
from pipeline.studies import Study, Tables
from pipeline.studies._settings import Depths
from pipeline.studies.lab import Lab

# (variant, `mlp_init`)
MODELS = [*itertools.product(("osa_qr", "osa_ns", "vit_noskip_nonorm"), ("suo", "xavier"))]
MODELS += [("vit", "xavier"), ("vit_noskip", "xavier")]


class Settings(Section):
    seeds: Seeds
    depths: Depths
    gradient_images: PositiveInt = 16  # number of test images for the loss whose gradient is measured
    samples: PositiveInt = 8  # draws for Hutchinson's estimator; 8 draws give an error of a few per cent
    power_iterations: PositiveInt = 10  # few, since a product of many matrices has one dominant singular value


def measure(settings: Settings, lab: Lab) -> Tables:
    """Measures ∂logits/∂X₀, the loss's gradient in the first and last block, and ∂X_L/∂X₀ through attention alone."""
    networks, attentions = [], []
    for (variant, mlp), depth, seed in itertools.product(MODELS, settings.depths, settings.seeds):
        config = lab.config(variant, {"model": {"depth": depth}, "variant": {"mlp_init": mlp}})
        images, labels = lab.images(config.data.pixel_scaling)
        few = torch.arange(seed * settings.gradient_images, (seed + 1) * settings.gradient_images) % len(images)
        model = lab.model(config, seed, torch.float64)
        x = model.tokens(images[few[:1]])[0].detach()
        identity = {"variant": variant, "mlp": mlp, "depth": depth, "seed": seed}
        networks.append(identity | logits_jacobian(model, x) | gradient_norms(model, images[few], labels[few]))
        if mlp == lab.config(variant).variant.mlp_init:  # one `mlp_init` suffices: `attention_jacobian` leaves out MLPs
            generator = lab.generator(seed, f"theory/depth/{variant}/{depth}")
            identity = {"variant": variant, "depth": depth, "seed": seed}
            attentions.append(identity | attention_jacobian(model, x, settings, generator))
    return {"networks": pd.DataFrame(networks), "attentions": pd.DataFrame(attentions)}


def logits_jacobian(model: VisionTransformer, x: Tensor) -> dict[str, float]:
    """Returns ‖·‖₂, ‖·‖_F and κ of the Jacobian ∂logits/∂X₀, (classes, N·d)."""

    def logits(x: Tensor) -> Tensor:
        return model.head(model.norm(nn.Sequential(*model.blocks)(x)[:, 0]))  # (batch, classes)

    values = torch.linalg.svdvals(jacobian(logits, x))
    return {
        "logits_spectral": values[0].item(),
        "logits_frobenius": values.norm().item(),
        "logits_kappa": condition(values, rank=len(values)),
    }


def gradient_norms(model: VisionTransformer, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns ‖∂loss/∂θ‖₂ for the parameters of the first block, and for the parameters of the last block."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return {"first_gradient": gradient_norm(model.blocks[0]), "last_gradient": gradient_norm(model.blocks[-1])}


def attention_jacobian(model: VisionTransformer, x: Tensor, settings: Settings, generator: Generator) -> dict[str, float]:
    """Estimates ‖·‖₂ and ‖·‖_F/√(N·d) of ∂X_L/∂X₀ for the network without its MLPs. Never forms the Jacobian."""

    def attend(x: Tensor) -> Tensor:
        for block, attention, _ in blocks_of(model):
            y = attention(block.norm1(x))
            x = x + y if block.skip else y
        return x  # (batch, N, d)

    with sdpa_kernel(SDPBackend.MATH):  # the only backend with second derivatives
        start = torch.randn(1, *x.shape, generator=generator, dtype=x.dtype)
        _, squared = power_iteration(attend, x[None], start, settings.power_iterations)
    frobenius = frobenius_norm(attend, x, num_samples=settings.samples, generator=generator)
    return {"spectral": squared.norm().sqrt().item(), "gain": frobenius / math.sqrt(x.numel())}


def frobenius_norm(function: Callable[[Tensor], Tensor], x: Tensor, *, num_samples: int, generator: Generator) -> float:
    """Estimates ‖∂f/∂X‖_F by Hutchinson's estimator: the root of the mean of ‖Jᵀu‖² over Gaussian u.

    `x` is (N, d). `function` maps (batch, N, d) → (batch, ...), each item of the batch independently.
    """
    copies = x.detach().repeat(num_samples, 1, 1).requires_grad_()
    y = function(copies)
    (pullback,) = torch.autograd.grad(y, copies, torch.randn(y.shape, generator=generator, dtype=y.dtype))
    return pullback.square().sum((1, 2)).mean().sqrt().item()


def summarise(settings: Settings, tables: Tables, lab: Lab) -> dict:
    """Returns a row for each model: geometric means over seeds.

    `kappa` and `first_gradient` are given at the minimum and at the maximum depth. `kept` and `attention_kept` are the
    results of `kept_per_block` with and without MLPs.
    """
    networks, attentions = tables["networks"], tables["attentions"]
    depths = [int(networks["depth"].min()), int(networks["depth"].max())]
    rows = []
    for (variant, mlp), own in networks.groupby(["variant", "mlp"], sort=False):
        ends = [own[own["depth"] == depth] for depth in depths]
        rows.append(
            {"variant": variant, "mlp": mlp, "kept": kept_per_block(own, "logits_frobenius")}
            | {"kappa": [geometric_mean(end["logits_kappa"]) for end in ends]}
            | {"first_gradient": [geometric_mean(end["first_gradient"]) for end in ends]}
            | {"attention_kept": kept_per_block(attentions[attentions["variant"] == variant], "gain")}
        )
    return {"depths": depths, "models": rows}


def kept_per_block(table: pd.DataFrame, column: str) -> float:
    """Returns the factor by which each added block multiplies the values in `column`: the geometric mean over seeds."""
    slopes = [np.polyfit(own["depth"], np.log(own[column]), 1)[0] for _, own in table.groupby("seed")]
    return float(np.exp(np.mean(slopes)))


def geometric_mean(values: pd.Series) -> float:
    return float(np.exp(np.log(values).mean()))


STUDY = Study(settings=Settings, measure=measure, summarise=summarise)
