"""Benchmarks a GPU in ten minutes with only torch and Triton: `make gpu`, or `python pipeline/benchmarks/gpu.py [PART ...]`.

docs/benchmarks.md lists the parts. Each part runs in a separate process, writes each row as soon as it is measured, and
stops at its deadline. Tables and output go to the folder gpu/, which is packed into gpu.tar.gz after each part. At the end
the script prints the main results. Run it by its path, because the package `pipeline` imports packages that may be missing.
"""

import argparse
import contextlib
import csv
import json
import os
import runpy
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # import from the repository root, not from this script's folder
STARTED = time.perf_counter()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import osa  # noqa: E402
from osa import linalg, routes, runtime  # noqa: E402
from osa.options import EPSILON, AttentionKind, Method  # noqa: E402

TOTAL_SECONDS = 570
SHARES = {"machine": 25, "forms": 130, "attention": 130, "split": 40, "vit_b16": 70, "step": 70, "train": 70, "profile": 30}
TINY_MODEL: dict[str, Any] = {"depth": 1, "patch_size": 14}
MODELS = ("vit", "vit_noskip", "vit_noskip_nonorm", "osa_qr", "osa_ns", "osa_exact")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, SINGLE = torch.bfloat16, torch.float32
# Values of ‖S‖₂. In the paper's trained models, a block's median over heads is 0.7 to 1.7. In an untrained ViT-B/16 it is 6.
NORMS = (2.0, 6.0, 40.0)
TINY_NORMS = NORMS[:2]  # Triton's interpreter is slow at a norm of 40
Rows = Iterator[dict]


def device_rates(tiny: bool) -> Rows:
    size, bytes_copied = (64, 2**12) if tiny else (8192, 2**30)
    x = torch.empty(bytes_copied, dtype=torch.uint8, device=DEVICE)
    time_of_copy = median_seconds(lambda: (x.clone(),))
    yield {"what": "copy", "seconds": time_of_copy, "rate": 2 * bytes_copied / time_of_copy, "unit": "B/s"}
    a = torch.randn(size, size, dtype=HALF, device=DEVICE)
    time_of_product = median_seconds(lambda: (a @ a,))
    yield {"what": "product", "seconds": time_of_product, "rate": 2 * size**3 / time_of_product, "unit": "FLOP/s"}


Form = tuple[Method, int, int, int, int, torch.dtype]
FORMS: tuple[Form, ...] = (  # method, batch, heads, tokens, width, type
    ("exact", 2, 160, 197, 64, HALF),  # enough heads to fill a device
    ("exact", 1, 3, 8192, 64, HALF),  # too few heads to fill a device
    ("exact", 2, 3, 50, 16, SINGLE),
    ("qr", 2, 3, 50, 16, SINGLE),
    ("newton_schulz", 2, 3, 50, 16, SINGLE),
    *(("exact", 2, 160, 197, width, HALF) for width in (32, 48, 80, 96, 128)),
    ("exact", 1, 3, 1024, 64, SINGLE),
    ("newton_schulz", 1, 3, 1024, 64, HALF),
)
TINY_FORMS: tuple[Form, ...] = (("exact", 1, 2, 7, 3, SINGLE), ("exact", 1, 1, 37, 33, HALF))
ERRORS = ("output", "query", "key", "value")  # columns with the relative errors of the output and of the gradients


def forms(tiny: bool) -> Rows:
    """Measures each entry of FORMS in a separate process, several at once, since a kernel may take a minute to compile."""
    chosen, unknown = TINY_FORMS if tiny else FORMS, ("norm", "first_use", "same_bits", *ERRORS)

    def tried(index: int) -> list[dict]:
        options = ["--form", str(index), *(["--rehearse"] if tiny else [])]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, cwd=ROOT, check=False)
        print(done.stderr, file=sys.stderr, flush=True)
        error = "" if done.returncode == 0 else (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return found or [case(*chosen[index]) | dict.fromkeys(unknown, "") | {"failed": error}]

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        for future in as_completed([pool.submit(tried, index) for index in range(len(chosen))]):
            yield from future.result()


def form(
    norms: tuple[float, ...], method: Method, batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype
) -> Rows:
    """Measures attention at each ‖S‖₂ in `norms`: the time of the first call, and errors against float64 on the CPU."""
    for norm in norms:
        inputs, scale = random_inputs(batch, heads, tokens, width, dtype, norm)
        call = partial(osa.orthogonal_attention, scale=scale, method=method)
        start, grad = time.perf_counter(), torch.randn_like(inputs[2])
        found = outputs_and_gradients(call, inputs, grad)
        first = time.perf_counter() - start
        again = outputs_and_gradients(call, inputs, grad)
        few = [x.detach()[:1, :2].cpu().double().requires_grad_() for x in inputs]
        plain = partial(routes.plain_attention, scale=scale, method=method, num_iterations=None, epsilon=EPSILON)
        expected = outputs_and_gradients(plain, few, grad[:1, :2].cpu().double())
        errors = [((x[:1, :2].cpu().double() - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]
        yield (
            case(method, batch, heads, tokens, width, dtype)
            | {"norm": norm, "first_use": first, "same_bits": all(map(torch.equal, found, again))}
            | dict(zip(ERRORS, errors, strict=True))
            | {"failed": ""}
        )


def outputs_and_gradients(call: Callable, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    output = call(*inputs)
    found = [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return found


def case(method: str, batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> dict:
    names = {"method": method, "batch": batch, "heads": heads, "tokens": tokens, "width": width}
    return names | {"dtype": str(dtype).removeprefix("torch.")}


def random_inputs(
    batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype, norm: float
) -> tuple[list[Tensor], float]:
    """Returns Gaussian query, key and value, and the scale c at which the maximum ‖S‖₂ of the first two heads is `norm`.

    ‖S‖₂ is the spectral radius of c J MᵀM, for M = [Q, K] and the matrix J of `linalg.apply_j`.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, heads, tokens, width, generator=generator).to(dtype) for _ in range(3)]
    m = torch.cat(inputs[:2], -1)[0, :2].double()
    radius = torch.linalg.eigvals(linalg.apply_j(m.mT @ m)).abs().max().item()
    return [x.to(DEVICE).requires_grad_() for x in inputs], norm / radius


SHAPES = (  # batch, heads, tokens: ViT-B/16, and then long sequences
    (128, 12, 197),
    (1, 64, 4096),
    (1, 64, 1024),
    (1, 1, 4096),
    (1, 1, 16384),
    (1, 64, 16384),
    (1, 8, 16384),
    (1, 64, 65536),
)


def attention_calls(tiny: bool) -> Rows:
    """Measures the time of attention calls (width 64, bfloat16), and of each of their kernel launches separately."""
    for batch, heads, tokens in ((1, 1, 20),) if tiny else SHAPES:
        shape = {"batch": batch, "heads": heads, "tokens": tokens}
        for norm in TINY_NORMS if tiny else NORMS:
            inputs, scale = random_inputs(batch, heads, tokens, 64, HALF, norm)
            call = partial(osa.orthogonal_attention, scale=scale, method="exact")
            for row in timings(call, inputs, with_launches=True):
                yield shape | {"norm": norm, "method": "exact"} | row
            if norm == NORMS[0] and (tiny or (batch, heads, tokens) in SHAPES[:2]):
                with mock.patch.object(runtime, "KERNELS", {}):
                    for row in timings(call, inputs):
                        yield shape | {"norm": norm, "method": "exact, torch's products"} | row
        others: dict[str, Callable[..., Tensor]] = {"sdpa": F.scaled_dot_product_attention}
        if DEVICE.type == "cuda":
            others["cudnn"] = by_cudnn
        for name, other in others.items():
            for row in timings(other, inputs):
                yield shape | {"norm": "", "method": name} | row
        for work, count in (("forward", 2), ("both", 6)):
            row = {"norm": "", "method": "copy", "work": work, "part": "all", "how": "replay"}
            yield shape | row | {"seconds": median_seconds(partial(copies, inputs[0].detach(), count))}


SPLIT = (  # batch, heads, tokens, width, type
    (1, 64, 4096, 64, SINGLE),
    (128, 12, 197, 64, SINGLE),
    (1, 64, 4096, 128, HALF),
)


def split(tiny: bool) -> Rows:
    """Times OSA split between our kernels and torch, OSA in torch alone, and torch's softmax attention, with gradients."""
    for batch, heads, tokens, width, dtype in ((1, 1, 20, 17, SINGLE),) if tiny else SPLIT:
        inputs, scale = random_inputs(batch, heads, tokens, width, dtype, NORMS[0])
        methods: tuple[Method, ...] = ("exact", "newton_schulz")
        for method in methods:
            row = case(method, batch, heads, tokens, width, dtype)
            work = partial(differentiate, partial(osa.orthogonal_attention, scale=scale, method=method), inputs, inputs)
            yield row | {"by": "kernels", "seconds": median_seconds(work)}
            with mock.patch.object(runtime, "KERNELS", {}):
                yield row | {"by": "torch's products", "seconds": median_seconds(work)}
        work = partial(differentiate, F.scaled_dot_product_attention, inputs, inputs)
        yield case("sdpa", batch, heads, tokens, width, dtype) | {"by": "sdpa", "seconds": median_seconds(work)}


def by_cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value)


def copies(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Copies x `count` times. Each copy reads one tensor and writes one tensor.

    A forward pass reads or writes four tensors (Q, K, V and the output), as 2 copies do. A backward pass reads or writes
    eight (these and their gradients), as 4 copies do.
    """
    return tuple(x.clone() for _ in range(count))


def timings(call: Callable, inputs: list[Tensor], *, with_launches: bool = False) -> Rows:
    """Times a call with and without gradients, each in eager mode and as the replay of a CUDA graph."""
    for name, wanted in (("forward", []), ("both", inputs)):
        work = partial(differentiate, call, wanted, inputs)
        whole = median_seconds(work)
        yield {"work": name, "part": "all", "how": "replay", "seconds": whole}
        yield {"work": name, "part": "all", "how": "eager", "seconds": median_seconds(work, replayed=False)}
    shares = []
    for part, alone in launches_of(work) if with_launches else ():
        shares.append(median_seconds(alone))
        yield {"work": "both", "part": part, "how": "replay", "seconds": shares[-1]}
    if with_launches:
        yield {"work": "both", "part": "rest", "how": "replay", "seconds": rest(whole, shares)}


def rest(whole: float, shares: list[float]) -> float | None:
    """Returns a call's time outside our kernels, or None if the kernels, timed separately, take longer than the call."""
    left = whole - sum(shares)
    return left if left >= 0 else None


def differentiate(call: Callable, wanted: list[Tensor], inputs: list[Tensor]) -> tuple:
    with torch.set_grad_enabled(bool(wanted)):
        output = call(*inputs)
        return torch.autograd.grad(output, wanted, output.detach()) if wanted else (output,)


def launches_of(work: Callable[[], tuple]) -> list[tuple[str, Callable[[], tuple]]]:
    """Lists the kernel launches of `work`, each as a name, such as "1 forward_kernel", and a function that repeats it."""
    from osa.kernels import launch

    start, found = launch.launch, []

    def listed(*given: Any) -> None:
        found.append(given)
        start(*given)

    with mock.patch.object(launch, "launch", listed):
        work()
    return [(f"{i} {given[0].fn.__name__}", partial(again, start, given)) for i, given in enumerate(found, 1)]


def again(start: Callable, given: tuple) -> tuple:
    start(*given)
    return ()


def vit_b16(tiny: bool) -> Rows:
    """Times a training step of ViT-B/16 on 128 images, in bfloat16 with autocast. All models have skips and LN.

    The models differ only in attention. ‖S‖₂ is 6 for α = 0.1, the default of `build_vit`. For α = 0.025 it is 1.5, a
    value that also occurs in the paper's trained models.
    """
    small: dict[str, Any] = {"image_size": 16, "patch_size": 4, "embed_dim": 128, "depth": 1, "num_heads": 2}
    sizes = small if tiny else {"image_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    batch = 1 if tiny else 128
    images = torch.randn(batch, 3, sizes["image_size"], sizes["image_size"], device=DEVICE)  # standardised pixels
    kinds: tuple[tuple[AttentionKind, Any], ...] = (("softmax", ""), ("orthogonal", 0.025), ("orthogonal", 0.1))
    for kind, alpha in kinds:
        options: dict[str, Any] = {"method": "exact", "alpha": alpha} if alpha else {}
        model = osa.build_vit(
            attention=kind, **options, **sizes, skip=True, norm=True, mlp_init="xavier", in_channels=3, num_classes=1000
        )
        work = step_of(model.to(DEVICE), images, autocast=True)
        for how in ("replay", "eager"):
            row = {"attention": kind, "alpha": alpha, "batch": batch, "how": how}
            yield row | {"seconds": median_seconds(work, replayed=how == "replay")}


def step(tiny: bool) -> Rows:
    """Times each model's training step and parts of the step. A GPU replays each of them from a CUDA graph.

    seconds             a whole step
    forward             the forward pass
    both                the forward and the backward pass
    without_attention   a whole step, with the identity in place of attention
    """
    images = torch.rand(1 if tiny else 128, 1, 28, 28, device=DEVICE)
    labels = torch.arange(len(images), device=DEVICE) % 10
    for name in MODELS[-1:] if tiny else MODELS:
        model = osa.create_model(name, **(TINY_MODEL if tiny else {})).to(DEVICE)
        row = {"model": name, "seconds": median_seconds(step_of(model, images))}

        def forward(model=model) -> tuple[Tensor]:
            return (F.cross_entropy(model(images), labels),)

        def both(forward=forward, model=model) -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward()[0], list(model.parameters()))

        row |= {"forward": median_seconds(forward), "both": median_seconds(both)}
        for module in model.modules():
            if isinstance(module, osa.modules.SelfAttention):
                module.mix = identity  # type: ignore[method-assign,assignment]
        yield row | {"without_attention": median_seconds(step_of(model, images))}


def identity(query: Tensor, key: Tensor, value: Tensor, num_outputs: int | None, mask: Tensor | None = None) -> Tensor:
    """A stand-in for `SelfAttention.mix`. Returns the value, with zero gradients for query and key."""
    return (value + 0 * query + 0 * key)[:, :, :num_outputs]


def step_of(model: torch.nn.Module, images: Tensor, *, autocast: bool = False) -> Callable[[], tuple]:
    """Returns a function that performs a training step as the pipeline does, with arbitrary labels."""
    labels = torch.arange(len(images), device=DEVICE) % 10
    return partial(train_step, model, optimizer_of(model), autocast, images, labels)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with a learning rate of 0, which keeps ‖S‖₂ constant and does not change the time of a step."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, capturable=DEVICE.type == "cuda")


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, autocast: bool, images: Tensor, labels: Tensor
) -> tuple:
    with torch.autocast(DEVICE.type, HALF, enabled=autocast, cache_enabled=False):  # cached casts would be stale in a replay
        loss = F.cross_entropy(model(images), labels)
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (loss.detach(),)


def whole_training(tiny: bool) -> Rows:
    """Times the phases of training OSA (exact): ten epochs of 60,000 images, with 40 evaluations and 40 checkpoints."""
    count, tested, batch, epochs, points = (4, 2, 2, 1, 2) if tiny else (60000, 10000, 128, 10, 40)
    yield {"phase": "import", "times": 1, "seconds": time.perf_counter() - STARTED}
    clock = Stopwatch()
    torch.zeros(1, device=DEVICE)
    yield clock.row("device")
    images, labels = torch.rand(count, 1, 28, 28, device=DEVICE), torch.arange(count, device=DEVICE) % 10
    yield clock.row("images")
    model = osa.create_model("osa_exact", **(TINY_MODEL if tiny else {})).to(DEVICE)
    optimizer = optimizer_of(model)
    yield clock.row("model")
    take = partial(train_step, model, optimizer, False)
    first = images[:batch], labels[:batch]
    take(*first)
    yield clock.row("first step")
    if DEVICE.type == "cuda":
        take = runpy.run_path(str(ROOT / "pipeline/training/cuda_graph.py"))["GraphedStep"](take, model, [optimizer], *first)
    yield clock.row("recording")
    steps, kept = epochs * (count // batch), {"steps": 0.0, "evaluations": 0.0, "checkpoints": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(steps):
            rows = torch.arange(i * batch, (i + 1) * batch, device=DEVICE) % count
            take(images[rows], labels[rows])
            if (i + 1) % (steps // points) == 0:
                kept["steps"] += clock.lap()
                with torch.no_grad():
                    (model(images[:tested]).argmax(-1) == labels[:tested]).float().mean().item()
                kept["evaluations"] += clock.lap()
                with open(Path(folder, "checkpoint.pt"), "wb") as file:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                    os.fsync(file.fileno())
                kept["checkpoints"] += clock.lap()
    for phase, spent in kept.items():
        yield {"phase": phase, "times": steps if phase == "steps" else points, "seconds": spent}


class Stopwatch:
    """Measures how many seconds each lap takes. A lap ends when the device has finished all queued work."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        before, self.last = self.last, time.perf_counter()
        return self.last - before

    def row(self, phase: str) -> dict:
        return {"phase": phase, "times": 1, "seconds": self.lap()}


def profile(tiny: bool) -> Rows:
    """Yields the slowest kernels (on a CPU, operators) of attention and its gradients, at ViT-B/16's size and longer."""
    activity = torch.profiler.ProfilerActivity
    for batch, heads, tokens in ((1, 1, 37),) if tiny else SHAPES[:2]:
        inputs, scale = random_inputs(batch, heads, tokens, 64, HALF, NORMS[0])
        work = partial(differentiate, partial(osa.orthogonal_attention, scale=scale, method="exact"), inputs, inputs)
        work()
        with torch.profiler.profile(activities=[activity.CUDA if DEVICE.type == "cuda" else activity.CPU]) as profiler:
            work()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(str(Path(folder, "trace.json")))
            events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        wanted = [each for each in events if each.get("cat") == ("kernel" if DEVICE.type == "cuda" else "cpu_op")]
        for event in sorted(wanted, key=lambda each: -each["dur"])[:20]:
            facts = event["args"]
            yield {
                "heads": batch * heads,
                "tokens": tokens,
                "kernel": event["name"][:80],
                "seconds": event["dur"] / 1e6,
                "registers": facts.get("registers per thread", ""),
                "shared_bytes": facts.get("shared memory", ""),
                "occupancy_percent": facts.get("est. achieved occupancy %", ""),
                "grid": facts.get("grid", ""),
                "block": facts.get("block", ""),
            }


def median_seconds(work: Callable[[], tuple], *, replayed: bool = True) -> float:
    """Returns how many seconds `work` takes: the median of 3 to 20 samples on a GPU, or a single sample on a CPU."""
    clock, times, samples = runpy.run_path(str(ROOT / "pipeline/benchmarks/cost.py"))["seconds"], 1, 1
    if DEVICE.type == "cuda":
        if replayed:
            work, _ = runpy.run_path(str(ROOT / "pipeline/training/cuda_graph.py"))["capture"](work)
        else:
            work()
        once = clock(work, 1, DEVICE)
        times = 10 if once < 0.01 else 1
        samples = min(20, max(3, int(0.5 / (times * once))))
    return statistics.median(clock(work, times, DEVICE) for _ in range(samples))


PARTS: dict[str, Callable[[bool], Rows]] = {
    "machine": device_rates,
    "forms": forms,
    "attention": attention_calls,
    "split": split,
    "vit_b16": vit_b16,
    "step": step,
    "train": whole_training,
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--rehearse", action="store_true", help="use a tiny size; on a CPU, with Triton's interpreter")
    parser.add_argument("--into", type=Path, default=ROOT / "gpu", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="seconds for all parts (default: %(default)s)")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # the time at which a child process stops
    parser.add_argument("--form", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if DEVICE.type != "cuda" and not chosen.rehearse:
        sys.exit("error: torch finds no CUDA device: run this script on a machine that has one, or add --rehearse.")
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        sys.exit(f"error: part {unknown[0]!r} is unknown; choose one of {', '.join(PARTS)}.")
    folder = chosen.into.resolve()
    if chosen.form is not None or chosen.until:
        with interpreted() if DEVICE.type == "cpu" else contextlib.nullcontext():
            measure(chosen, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in chosen.parts or PARTS:
        share = chosen.seconds if chosen.parts else SHARES[name] * chosen.seconds / TOTAL_SECONDS
        outcomes[name] = run_part(
            name, folder, min(share, chosen.seconds - (time.perf_counter() - STARTED) - 5), chosen.rehearse
        )
        print(f"{name}: {outcomes[name]}", flush=True)
        with tarfile.open(folder.with_suffix(".tar.gz"), "w:gz") as archive:
            archive.add(folder, "gpu")
    print("\n".join(first_look(folder)), flush=True)
    if failed := [name for name, outcome in outcomes.items() if outcome not in ("done", "out of time")]:
        sys.exit(f"error: {', '.join(failed)} failed: see PART.txt in {folder}; to run a part again, pass its name.")


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """Measures one entry of FORMS, or one part of the benchmark. Runs in a child process."""
    if chosen.form is not None:
        norms, found = (TINY_NORMS, TINY_FORMS) if chosen.rehearse else (NORMS, FORMS)
        for row in form(norms, *found[chosen.form]):
            print(json.dumps(row), flush=True)
    else:
        (name,) = chosen.parts
        write_rows(folder / f"{name}.csv", PARTS[name](chosen.rehearse), chosen.until)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside the context, the kernels run on the CPU, in Triton's interpreter, as in the tests."""
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
    from osa.kernels import operators
    from tests.osa.interpreter import quick

    runtime.KERNELS["attend"] = [(operators.fits, operators.attend)]
    runtime.KERNELS["phi1_times"] = [(operators.fits_phi1, operators.phi1_times)]
    with quick():
        yield


def run_part(name: str, folder: Path, allowed: float, tiny: bool) -> str:
    """Runs a part in a separate process, and returns the outcome. The process is killed if it has not stopped in time."""
    if allowed < 5:
        return "out of time"
    options = ["--into", folder, "--until", time.time() + allowed - 2, *(["--rehearse"] if tiny else [])]
    command = [sys.executable, __file__, name, *map(str, options)]
    with (folder / f"{name}.txt").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            status = child.wait(allowed)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)  # also kills the processes that the child has started
            child.wait()
            return "out of time"
    return "done" if status == 0 else f"status {status}"


def write_rows(path: Path, rows: Rows, until: float) -> None:
    """Writes each row as soon as it is measured, so that no row is lost when time runs out."""
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, row | facts, restval="", extrasaction="ignore")
                writer.writeheader()
            writer.writerow(row | facts)
            file.flush()
            if time.time() > until:
                break


def first_look(folder: Path) -> Iterator[str]:
    """Yields the main results as text: errors, then relative times of a training step and of attention calls."""
    forms_found = read_rows(folder / "forms.csv")
    # Kernels return NaN where no digit would be correct. A row with NaN is therefore not a failure.
    kept = [row for row in forms_found if row["output"] != "nan"]
    wrong = [row for row in kept if row["failed"] or row["same_bits"] != "True"]
    yield f"kernel forms that fail or are not bit-reproducible: {len(wrong)} of {len(forms_found)}"
    for dtype in sorted({row["dtype"] for row in forms_found}):
        errors = [float(row[name] or "inf") for row in forms_found if row["dtype"] == dtype for name in ERRORS]
        yield f"largest error in {dtype}: {max(errors):.1e}"
    steps = [row for row in read_rows(folder / "vit_b16.csv") if row["how"] == "replay"]
    for row in steps[1:]:
        ratio = float(row["seconds"]) / float(steps[0]["seconds"])
        what = f"ViT-B/16 training step, orthogonal attention with α = {row['alpha']}"
        yield f"{what}: {ratio:.2f} × the time with softmax (target: 1.3)"
    calls: dict[tuple, dict[str, float]] = {}
    for row in read_rows(folder / "attention.csv"):
        if (row["part"], row["how"], row["work"]) == ("all", "replay", "both") and row["norm"] in ("", str(NORMS[0])):
            calls.setdefault((row["batch"], row["heads"], row["tokens"]), {})[row["method"]] = float(row["seconds"])
    for (batch, heads, tokens), found in calls.items():
        for other, called in (("sdpa", "torch's attention"), ("exact, torch's products", "torch's matrix products")):
            if {"exact", other} <= found.keys():
                what = f"exact, {batch} × {heads} heads of {tokens} tokens"
                yield f"{what}: {found[other] / found['exact']:.2f} × as fast as {called}"
    for row, after in pairwise(read_rows(folder / "split.csv")):
        if (row["by"], after["by"]) == ("kernels", "torch's products"):
            ratio = float(after["seconds"]) / float(row["seconds"])
            what = f"{row['method']}, {row['dtype']}, {row['tokens']} tokens of width {row['width']}"
            yield f"{what}: {ratio:.2f} × as fast as torch's matrix products"


def read_rows(path: Path) -> list[dict]:
    """Returns the rows of a table, or [] if the file is missing."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
