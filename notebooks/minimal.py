"""*Orthogonal Self-Attention* (Leo Zhang and James Martens, arXiv:2602.05996) in one file, to be read from top to bottom.

OSA (QR) in a Vision Transformer without skip connections and LayerNorm learns MNIST by the paper's recipe, and by
PyTorch's defaults where that is silent. After `python -m pipeline fetch mnist` it needs torch alone:
`python notebooks/minimal.py`.

N tokens, width d, h heads of width d_v = d/h. Section and equation numbers are the paper's.
"""

import csv
import gzip
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
D, HEADS, DEPTH, PATCH, CLASSES, HIDDEN = 64, 4, 6, 4, 10, 256  # Appendix D
ALPHA, EMBEDDING_STD = 0.1, 0.02
EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY, CLIP = 10, 128, 3e-4, 0.05, 1.0


# Sections 2 and 3: the attention


def orthogonal_attention(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """exp(S) V with S = scale · (QKᵀ − KQᵀ), (..., N, d_v), in time linear in N.

    S is skew-symmetric, so exp(S) rotates the tokens (Eq. 5). M = [Q, K] spans the range of S. With the orthonormal basis B
    of M = BR and the small [S] = BᵀSB, exp(S) = I + B (exp[S] − I) Bᵀ (Eq. 6 and 7).
    """
    basis = torch.linalg.qr(torch.cat([query, key], dim=-1)).Q  # B, (..., N, 2d_v)
    q, k = basis.mT @ query, basis.mT @ key  # (..., 2d_v, d_v)
    small = scale * (q @ k.mT - k @ q.mT)  # [S]
    identity = torch.eye(small.shape[-1], dtype=small.dtype)
    return value + basis @ ((torch.linalg.matrix_exp(small) - identity) @ (basis.mT @ value))


class Attention(nn.Module):
    """Σᵢ exp(Sᵢ) X Wᵢ^V Wᵢ^O over heads, with the scale αᵢ/√d_v; α is learnt (Eq. 3 to 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.alpha = nn.Parameter(torch.full((HEADS,), ALPHA))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (batch, h, N, d_v)
            for part in (self.query, self.key, self.value)
        )
        scale = (self.alpha / math.sqrt(D // HEADS))[:, None, None]
        return self.out(orthogonal_attention(query, key, value, scale).transpose(1, 2).flatten(2))


# Appendix D: the Vision Transformer


class Block(nn.Module):
    """MLP(Attention(X)): Eq. 1 and 2 without skip connections and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(D, HIDDEN), "fc2": nn.Linear(HIDDEN, D)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.attention(x))))


class VisionTransformer(nn.Module):
    """Logits (batch, 10) of images (batch, 1, 28, 28): 49 patches and [cls], six blocks, and a linear layer on [cls]."""

    def __init__(self, generator: Generator | None = None) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(PATCH**2, D)
        self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        self.position_embedding = nn.Parameter(torch.empty(1, (28 // PATCH) ** 2 + 1, D))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(D, CLASSES)
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, PATCH, stride=PATCH).mT  # (batch, 49, 16)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), self.patch_embedding(patches)], dim=1)
        x = x + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


# Section 4: the initialisation


def stiefel(rows: int, columns: int, generator: Generator | None) -> Tensor:
    """A uniform draw of orthonormal columns (Algorithm 1): QR of a Gaussian matrix, with the signs of R's diagonal."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()


@torch.no_grad()
def initialise(model: VisionTransformer, generator: Generator | None) -> None:
    """Per head [W^Q, W^K], W^V and W^O are orthonormal, and MLPs are scaled uniformly orthogonal with zero biases."""
    for embedding in (model.cls_token, model.position_embedding):
        nn.init.trunc_normal_(embedding, std=EMBEDDING_STD, a=-2 * EMBEDDING_STD, b=2 * EMBEDDING_STD, generator=generator)
    for linear in (model.patch_embedding, model.head):  # PyTorch's default, from the generator
        bound = 1 / math.sqrt(linear.in_features)
        nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
    d_v = D // HEADS
    for block in model.blocks:
        part = block.attention
        for i in range(HEADS):  # nn.Linear keeps Wᵀ, of which a head has d_v rows, or in W^O columns
            rows = slice(i * d_v, (i + 1) * d_v)
            part.query.weight[rows], part.key.weight[rows] = stiefel(D, 2 * d_v, generator).mT.split(d_v)
            part.value.weight[rows] = stiefel(D, d_v, generator).mT
            part.out.weight[:, rows] = stiefel(D, d_v, generator)
        wide = math.sqrt(HIDDEN / D)  # keeps the tokens' mean square where a layer widens
        block.mlp["fc1"].weight.copy_(wide * stiefel(HIDDEN, D, generator))
        block.mlp["fc2"].weight.copy_(stiefel(HIDDEN, D, generator).mT)
        for linear in block.mlp.values():
            linear.bias.zero_()


# Section 5: MNIST and the training


def load(split: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) with pixels in [0, 1] and labels (n,) of the split train or t10k."""

    def read(name: str, header: int) -> Tensor:
        content = gzip.decompress((folder / f"{split}-{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header)

    return read("images-idx3", 16).view(-1, 1, 28, 28) / 255, read("labels-idx1", 8).long()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One step on the cross-entropy, with gradients clipped to a norm of 1. Returns the loss before it."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    hits = [(model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return 100 * sum(hits) / len(labels)


def main(seed: int = 0, epochs: int = EPOCHS, folder: Path = ROOT / "data/mnist") -> float:
    """Trains, and prints the test accuracy in per cent beside that of the repository's own runs and the paper's."""
    generator = torch.Generator().manual_seed(seed)
    (images, labels), (test_images, test_labels) = load("train", folder), load("t10k", folder)
    mean, std = images.mean(), images.std()
    images, test_images = (images - mean) / std, (test_images - mean) / std
    model = VisionTransformer(generator)
    optimizer = make_optimizer(model)
    for epoch in range(1, epochs + 1):
        batches = torch.randperm(len(labels), generator=generator).split(BATCH)
        losses = [step(model, optimizer, images[batch], labels[batch]) for batch in batches]
        reached = accuracy(model, test_images, test_labels)
        print(f"epoch {epoch}: train loss {sum(losses) / len(losses):.3f}, test accuracy {reached:.2f} %", flush=True)
    with open(ROOT / "paper_outputs/table_2.csv", encoding="utf-8") as table:
        row = next(row for row in csv.DictReader(table) if row["variant"] == "osa_qr")
    print(f"after {EPOCHS} epochs expected: {float(row['mean']):.2f} ± {float(row['std']):.2f} %; paper: {row['paper']} %")
    return reached


if __name__ == "__main__":
    main()
