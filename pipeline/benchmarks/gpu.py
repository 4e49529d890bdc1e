"""All that needs a GPU, on a machine with torch alone: `make gpu`, or `python pipeline/benchmarks/gpu.py [STEP ...]`.

check      values and gradients of every kernel against the reference in float64
attention  one call with long sequences, by "exact" and torch's softmax attention, as replays of a CUDA graph
warps      one call at the paper's size, by how many warps a matrix has
step       a training step of each model of the paper, as a replay
tests      the tests of kernels and CUDA graphs, where pytest is installed
train      seed 0 of each model, where the pipeline's packages and data/mnist are: carry it along

Each step is a process of its own that ends within ten minutes. All goes to gpu/, and with the runs into gpu.tar.gz, to be
unpacked at the root of a repository with the same code. It runs by its path: `pipeline` asks for packages that may lack.
"""

import argparse
import csv
import importlib.util
import itertools
import runpy
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # instead of this folder

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import osa  # noqa: E402
from osa import reference  # noqa: E402

SECONDS = 570  # of a step
MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_qr", "osa_ns", "osa_exact")
METHODS = ("exact", "qr", "newton_schulz")
NEEDED = ("pandas", "numpy", "scipy", "matplotlib", "pydantic", "ruamel", "tqdm", "hypothesis")  # for a training, tested
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(tiny: bool) -> Iterator[dict]:
    sizes = [(7, 3, 1)] if tiny else [(50, 16, 1), (197, 64, 1), (37, 8, 1), (1024, 64, 1), (1024, 64, 12)]
    for method, (tokens, width, norm), dtype in itertools.product(METHODS, sizes, (torch.float32, torch.bfloat16)):
        torch.manual_seed(0)
        inputs = [torch.randn(2, 3, tokens, width).to(dtype) for _ in range(3)]
        scale = norm / torch.linalg.matrix_norm(reference.skew(*inputs[:2], 1.0), 2).max().item()  # ‖S‖₂, beyond 3 doubled
        dense = reference.newton_schulz_attention if method == "newton_schulz" else reference.orthogonal_attention
        exact = [x.double().requires_grad_() for x in inputs]
        ours = [x.to(DEVICE).requires_grad_() for x in inputs]
        actual, expected = osa.orthogonal_attention(*ours, scale=scale, method=method), dense(*exact, scale)
        weight = torch.randn_like(expected)
        grads = torch.autograd.grad(actual, ours, weight.to(actual)), torch.autograd.grad(expected, exact, weight)
        pairs = [(actual.detach(), expected.detach()), *zip(*grads, strict=True)]
        errors = [((a.double().cpu() - b).norm() / b.norm()).item() for a, b in pairs]
        case = {"method": method, "tokens": tokens, "width": width, "norm": norm, "dtype": dtype}
        yield case | dict(zip(("output", "query", "key", "value"), errors, strict=True))


def attention(tiny: bool) -> Iterator[dict]:
    """Long sequences, by "exact", by torch's softmax attention, which takes its own choice or cuDNN's kernel, and by the
    roofline: inputs and output copied once, and what gradients need besides."""
    calls = {
        "exact": partial(osa.orthogonal_attention, scale=0.01, method="exact"),
        "sdpa": F.scaled_dot_product_attention,
        "sdpa_cudnn": cudnn_attention,
    }
    sizes = [(1,), (16,), (300,)] if tiny else [(1, 8, 64), (64,), (256, 1024, 4096, 16384, 65536)]
    for heads, width, tokens, dtype in itertools.product(*sizes, (torch.float32, torch.bfloat16)):
        if heads * tokens**2 > (2**33 if dtype == torch.float32 else 2**38):
            continue
        inputs = [torch.randn(1, heads, tokens, width, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3)]
        case = {"heads": heads, "width": width, "tokens": tokens, "dtype": dtype}
        for method, call in calls.items():
            if method != "sdpa_cudnn" or (dtype == torch.bfloat16 and DEVICE.type == "cuda"):
                yield {"method": method} | case | timings(call, inputs)
        copies = [partial(copy, inputs[0].detach(), count) for count in (2, 6)]
        yield {"method": "copy"} | case | dict(zip(("forward", "both"), map(seconds, copies), strict=True))


def cudnn_attention(*inputs: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*inputs)


def copy(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Reads and writes `count` tensors: 2 for Q, K, V and the output, 4 more for these again and all four gradients."""
    return tuple(x.clone() for _ in range(count))


def warps(tiny: bool) -> Iterator[dict]:
    """One call at the paper's size, by how many warps a matrix has; `osa.kernels.launch` chooses one."""
    from osa.kernels import launch

    chosen = launch.WARP
    inputs = [torch.randn(2 if tiny else 128, 4, 50, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    for method, count in itertools.product(METHODS, (1, 2, 4)):
        launch.WARP = chosen | {"num_warps": count}
        call = partial(osa.orthogonal_attention, scale=0.01, method=method)
        yield {"method": method, "warps": count} | timings(call, inputs)


def timings(call: Callable, inputs: list[torch.Tensor]) -> dict[str, float]:
    """Seconds of a call, and of it with its gradients."""
    forward, both = (partial(differentiate, call, inputs[: 3 * n], inputs) for n in (0, 1))
    return {"forward": seconds(forward), "both": seconds(both)}


def differentiate(call: Callable, wanted: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple:
    with torch.set_grad_enabled(bool(wanted)):
        output = call(*inputs)
        return torch.autograd.grad(output.sum(), wanted) if wanted else (output,)


def step(tiny: bool) -> Iterator[dict]:
    for name in MODELS[-1:] if tiny else MODELS:
        model = osa.create_model(name).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=DEVICE.type == "cuda")
        images = torch.rand(4 if tiny else 128, 1, 28, 28, device=DEVICE)
        yield {"model": name, "seconds": seconds(partial(train_step, model, optimizer, images))}


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> tuple:
    loss = F.cross_entropy(model(images), torch.arange(len(images), device=DEVICE) % 10)
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (loss.detach(),)


def seconds(work: Callable[[], tuple]) -> float:
    """The median of up to 20 samples of replays of a CUDA graph, within half a second, or of two calls on a CPU."""
    clock, times, samples = runpy.run_path(str(ROOT / "pipeline/cost.py"))["seconds"], 1, 2
    if DEVICE.type == "cuda":
        work, _ = runpy.run_path(str(ROOT / "pipeline/training/cuda_graph.py"))["record"](work)
        once = clock(work, 1, DEVICE)
        times = 10 if once < 0.01 else 1
        samples = min(20, max(3, int(0.5 / (times * once))))
    return statistics.median(clock(work, times, DEVICE) for _ in range(samples))


TABLES = {"check": check, "attention": attention, "warps": warps, "step": step}


def commands(name: str) -> list[list[str]]:
    """What a step that is no table runs: nothing where the machine lacks what that needs."""
    has_packages = all(map(importlib.util.find_spec, NEEDED))
    if name == "tests" and importlib.util.find_spec("pytest"):
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]  # other versions warn of other things
        kernels = [f"tests/osa/test_{each}.py" for each in ("kernels", "launch", "long")]
        graph = [[*pytest, "tests/pipeline/test_cuda_graph.py"]] if has_packages else []
        return [[*pytest, "--noconftest", *kernels], *graph]
    if name == "train" and has_packages and (ROOT / "data/mnist").exists():
        return [["-m", "pipeline.train", model, "0", "--no-tracking"] for model in MODELS[:-1]]
    return []


def main() -> None:
    parser, known = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]), (*TABLES, "tests", "train")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(known)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="at a tiny size, on a CPU too")
    parser.add_argument("--into", type=Path, default=ROOT / "gpu", metavar="FOLDER")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if DEVICE.type != "cuda" and not chosen.rehearse:
        sys.exit("error: torch finds no CUDA device here: run it where there is one, or add --rehearse.")
    if unknown := set(chosen.steps) - set(known):
        sys.exit(f"error: {', '.join(sorted(unknown))}: no such step; choose from {', '.join(known)}.")
    folder, outcomes = chosen.into.resolve(), {}
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.inside:
        write(folder / f"{chosen.steps[0]}.csv", TABLES[chosen.steps[0]](chosen.rehearse))
        return
    for name in chosen.steps or known:
        options = ["--into", folder, "--inside", *(["--rehearse"] if chosen.rehearse else [])]
        outcomes[name] = run([[__file__, name, *options]] if name in TABLES else commands(name), folder / f"{name}.txt")
        print(f"{name}: {outcomes[name]}", flush=True)
        with tarfile.open(folder.with_suffix(".tar.gz"), "w:gz") as archive:
            archive.add(folder, "gpu")
            for path in sorted(ROOT.glob("paper_outputs/runs/table_2/*/0")) if outcomes.get("train") == "done" else ():
                archive.add(path, path.relative_to(ROOT))
    if failed := [name for name, outcome in outcomes.items() if outcome not in ("done", "skipped")]:
        sys.exit(f"error: {', '.join(failed)} did not end well: see {folder}; give its name to try it again.")


def write(path: Path, rows: Iterator[dict]) -> None:
    """Row by row, so that what was measured before the time ran out is kept."""
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"}
    with path.open("w", newline="", encoding="utf-8") as file:
        for i, row in enumerate(rows):
            writer = csv.DictWriter(file, row | facts)
            if i == 0:
                writer.writeheader()
            writer.writerow(row | facts)
            file.flush()


def run(steps: list[list], log: Path) -> str:
    with log.open("w", encoding="utf-8") as file:
        for command in steps:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "cwd": ROOT, "timeout": SECONDS, "check": True}
            try:
                subprocess.run([sys.executable, *map(str, command)], **options)
            except subprocess.SubprocessError as error:
                return type(error).__name__
    return "done" if steps else "skipped"


if __name__ == "__main__":
    main()
