"""The kernels of long sequences: their numbers, what they launch and move, and the order of what their threads do."""

import math

import numpy as np
import pytest
import torch

from osa import linalg, reference
from tests.osa.helpers import orthogonality_error

pytest.importorskip("triton", reason="Triton comes with torch for CUDA on Linux")

from triton.runtime import interpreter

from osa.kernels import launch, operators
from osa.kernels.long import backend
from osa.kernels.short import backend as short_backend
from osa.options import EPSILON
from tests.osa.interpreter import DEVICE, Races, quick, random
from tests.osa.test_kernels import attend, attend_and_warn, errors, scales
from tests.osa.test_launch import traffic
from tests.osa.test_orthogonality import KINDS, ROUNDINGS, of_norm

INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's loads and stores are watched")
HALF = torch.bfloat16
TILES = "gram_tile", "sheared_tile", "products_tile", "apply_tile", "apply_backward_tile"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def long(monkeypatch):
    """Every sequence counts as long, in parts of 64 rows; few steps for the interpreter. As on CUDA, no value is read."""
    monkeypatch.setattr(short_backend, "MAX_TOKENS", 0)
    monkeypatch.setattr(operators, "HOPPER", {})
    monkeypatch.setattr(linalg, "is_readable", lambda x: False)
    if DEVICE.type == "cuda":
        yield
        return
    monkeypatch.setattr(backend, "MIN_ROWS", 64)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 6)
    for name in TILES:
        tile = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *x, tile=tile: (t := tile(*x)) | {"TILE": (64, *t["TILE"][1:])})
    with quick():
        yield


@pytest.mark.parametrize(
    "method, tokens, width, value_width, dtype",
    [
        ("exact", 3, 5, 3, torch.float32),  # N < 2d
        ("exact", 130, 9, 20, torch.float32),  # nothing whole
        ("exact", 70, 128, 128, torch.float32),
        ("newton_schulz", 100, 8, 8, torch.float32),
        ("exact", 150, 32, 32, HALF),
        ("newton_schulz", 70, 19, 35, HALF),
        ("exact", 70, 9, 7, torch.float16),
    ],
)
def test_output_and_gradients_match_the_reference(method, tokens, width, value_width, dtype):
    query, key, value = (x.to(dtype) for x in random(tokens, width, value_width, (1, 2)))
    scale = scales(0.5, -0.3) / (tokens + width)  # ‖S‖ about 1
    assert max(errors(method, query, key, value, scale)) < {torch.float32: 5e-6, HALF: 5e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("dtype, distance", [(torch.float32, 0), (torch.float32, 1e-3), (HALF, 1e-2), (torch.float32, 1e3)])
def test_columns_are_balanced(dtype, distance):
    """Q near K, which the sums of G do not tell apart, and Q far longer than K. One head of two is so, and ‖S‖ is 1."""
    query, key, value = random(100, 4, 4, (1, 2))
    query[:, 0] = key[:, 0] + distance * query[:, 0]
    query, key, value = (x.to(dtype) for x in (query, key, value))
    norm = torch.linalg.matrix_norm(reference.skew(query.double(), key.double(), 1.0), 2).clamp(min=1e-3)
    found = errors("exact", query, key, value, (1 / norm).float().view(1, 2, 1, 1))
    assert max(found) < (2e-5 if dtype == torch.float32 else 5e-3), found


@pytest.mark.parametrize("mean, dtype", [(0, torch.float32), (1, torch.float32), (1, HALF)])
def test_output_and_gradients_at_any_norm(mean, dtype):
    """One head each of ‖S‖₂ from 1 to 1,000: no digit is lost but those that exp(S) and the type cost."""
    norms = torch.tensor([1.0, 30.0, 70.0, 300.0, 1e3])
    query, key, value = ((x + mean * x[..., :1, :].roll(1, 1)).to(dtype) for x in random(100, 12, 5, (1, 5)))
    sizes = torch.linalg.matrix_norm(reference.skew(query.double(), key.double(), 1.0), 2).cpu()
    scale = (norms / sizes).float().view(1, 5, 1, 1).to(DEVICE)
    inputs = [x.requires_grad_() for x in (query, key, value, scale)]
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    actual, expected = attend(*inputs, "exact"), reference.orthogonal_attention(*exact)
    cotangent = torch.randn(expected.shape).to(dtype)
    grads = (
        torch.autograd.grad(actual, inputs, cotangent.to(actual)),
        torch.autograd.grad(expected, exact, cotangent.double()),
    )
    for a, b in [(actual, expected), *zip(*grads, strict=True)]:
        found = (a.double().cpu() - b).flatten(2).norm(dim=-1) / b.flatten(2).norm(dim=-1)  # (1, heads)
        assert (found < (1e-6 if dtype == torch.float32 else 2e-3) + 3e-6 * norms).all(), found


def test_the_programs_types_do_not_reach_what_lies_between():
    query, key, value = random(70, 8, 8, (1, 2))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = errors("newton_schulz", query, key, value, scales(0.01, 0.01))
    assert max(found) < 5e-6


@INTERPRETED
@pytest.mark.parametrize("method", backend.METHODS)
@pytest.mark.parametrize("width, dtype", [(5, torch.float32), (32, HALF)])
def test_nothing_waits_for_the_device(monkeypatch, method, width, dtype):
    """`traffic` fails where a value is read. The operators between the launches are as many as the documentation says."""
    query, key, value = (x.to(dtype) for x in random(70, width, 3, (1, 2)))
    inputs, output = (query, key, value, scales(0.01, 0.01)), torch.empty_like(value)
    kernels = backend.Long(method)
    saved, options = torch.zeros(kernels.saved_shape(query, value)), (2, EPSILON)
    grads = tuple(map(torch.empty_like, inputs))
    monkeypatch.setattr(launch, "launch", lambda *x: None)
    forward = traffic(lambda: kernels.forward(inputs, output, saved, *options)).names
    backward = traffic(lambda: kernels.backward(inputs, saved, output, grads, *options)).names
    most = {"exact": (160, 320), "newton_schulz": (100, 380)}[method]
    assert len(forward) <= most[0] and len(backward) <= most[1], (len(forward), len(backward))


def test_many_matrices_are_taken_a_part_at_a_time(monkeypatch):
    inputs = [x.requires_grad_() for x in random(5, 3, 2, (2, 3))]
    whole = torch.autograd.grad(attend(*inputs, 0.1, "exact").square().sum(), inputs)
    monkeypatch.setattr(backend, "MATRICES", 4)
    torch.testing.assert_close(torch.autograd.grad(attend(*inputs, 0.1, "exact").square().sum(), inputs), whole)


def test_bfloat16_is_as_orthogonal_as_its_rounding():
    """‖AᵀA − I‖ of A = exp(S) in bfloat16 is that of the exact A when it is rounded."""
    query, key, _ = (x.to(HALF) for x in random(96, 16, 16, (1, 1)))
    identity, scale = torch.eye(96, device=DEVICE, dtype=HALF)[None, None], 0.02
    actual = attend(query, key, identity, scale, "exact")
    rounded = reference.orthogonal_attention(*(x.double().cpu() for x in (query, key, identity)), scale).to(HALF)
    assert orthogonality_error(actual.cpu()) < 1.2 * orthogonality_error(rounded) < 2e-2


def test_where_no_digit_is_left_and_where_a_head_is_nan():
    """The result is NaN, and the other head's as before; with a warning where the inputs are not NaN themselves."""
    query, key, value = random(70, 4, 4, (1, 2))
    expected = attend(query, key, value, scales(0.01, 0.01), "exact")
    broken = query.clone()
    broken[0, 0, 2, 1] = torch.nan
    symmetric = query.clone()
    w = torch.randn(4, 4, device=DEVICE)
    symmetric[0, 0] = key[0, 0] @ (w + w.mT) + 1e-6 * query[0, 0]
    for other, scale in ((broken, 0.01), (query, torch.nan), (symmetric, 1e3), (query, 1e9)):
        actual, warned = attend_and_warn(other, key, value, scales(scale, 0.01), "exact")
        assert warned == (not (other.isnan().any() or math.isnan(scale)))
        assert actual[0, 0].isnan().all() and torch.equal(actual[0, 1], expected[0, 1])


@pytest.mark.filterwarnings("ignore:orthogonal attention returns NaN")
@pytest.mark.parametrize("norm, least", [(1.0, 6), (70.0, 4), (1e3, 4)])
def test_lengths_are_kept_at_any_norm_or_the_result_is_nan(norm, least):
    """Tokens with and without a shared mean and outliers have digits at every norm."""
    drawn = [of_norm(kind, norm, 70, 4, torch.float32) for kind in sorted(KINDS.keys() - {"unequal size"})]
    query, key = (torch.stack(x)[:, None].to(DEVICE) for x in list(zip(*drawn, strict=True))[:2])
    scale = torch.tensor([c for _, _, c in drawn], device=DEVICE).view(-1, 1, 1, 1)
    matrices = attend(query, key, torch.eye(70, device=DEVICE)[None, None], scale, "exact")[:, 0].cpu()
    found = [a for a in matrices if not a.isnan().all()]
    assert len(found) >= least
    assert all(orthogonality_error(a) < ROUNDINGS * 1.2e-7 * max(1, norm) for a in found)


@INTERPRETED
@pytest.mark.parametrize("near", [1.0, 1e-3])
def test_no_program_reads_what_a_launch_writes(monkeypatch, near):
    """No program needs a barrier; between two launches all is in order."""
    query, key, value = random(70, 5, 3, (1, 1))
    inputs, start = [x.requires_grad_() for x in (key + near * query, key, value)], launch.launch
    with Races().watch() as races:
        monkeypatch.setattr(launch, "launch", lambda *x: (races.forget(), start(*x)))
        torch.autograd.grad(attend(*inputs, 0.1, "exact").sum(), inputs)
    assert len(races.writes) > 0 and races.found == races.barriers == 0


class Memory:
    """Bytes that each launch reads and writes, each address once, as long as caches hold what several programs read."""

    def __init__(self) -> None:
        self.launches = []

    def watch(self, monkeypatch) -> None:
        kind, start = type(interpreter.interpreter_builder), launch.launch
        load, store = kind.create_masked_load, kind.create_masked_store

        def watched_launch(kernel, programs, tensors, strides, arguments):
            sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tensors]
            self.tensors = [(x.data_ptr(), x, *np.zeros((2, n), bool)) for x, n in zip(tensors, sizes, strict=True)]
            start(kernel, programs, tensors, strides, arguments)
            used = sum(x.element_size() * int(read.sum() + written.sum()) for _, x, read, written in self.tensors)
            self.launches.append((kernel.fn.__name__, used))

        def touch(pointers, mask, which):
            addresses = pointers.data[mask.data].astype(np.int64)
            for base, x, *used in self.tensors if addresses.size else ():
                index = (addresses - base) // x.element_size()
                if 0 <= index[0] < len(used[which]):
                    used[which][index] = True

        def watched_load(builder, pointers, mask, *others):
            touch(pointers, mask, 0)
            return load(builder, pointers, mask, *others)

        def watched_store(builder, pointers, value, mask, *others):
            touch(pointers, mask, 1)
            return store(builder, pointers, value, mask, *others)

        monkeypatch.setattr(launch, "launch", watched_launch)
        monkeypatch.setattr(kind, "create_masked_load", watched_load)
        monkeypatch.setattr(kind, "create_masked_store", watched_store)


@INTERPRETED
def test_launches_and_bytes(monkeypatch):
    """Use that 65,536 tokens of one head in bfloat16 make of 132 multiprocessors, by half of both.

    Ideal is to read and write every tensor once. Torch's own launches between Gram matrices are small next to these.
    """
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132 // 2)
    monkeypatch.setattr(backend, "MIN_ROWS", 256)
    for name in TILES:
        monkeypatch.setattr(backend, name, lambda *x: {"TILE": (1024, 64, 64, 64), "num_warps": 8})
    inputs = [x.to(HALF).requires_grad_() for x in random(65536 // 2, 64, 64, (1, 1))]
    memory = Memory()
    memory.watch(monkeypatch)
    output = attend(*inputs, 1e-4, "exact")
    forward, memory.launches = memory.launches, []
    torch.autograd.grad(output.sum(), inputs)
    for launches, count, tensors in ((forward, 3, 4), (memory.launches, 2, 7)):
        assert len(launches) == count and sum(used for _, used in launches) <= 2.2 * tensors * output.nbytes, launches
