"""‖Av‖ = ‖v‖ at any norm of S: by each method and route to a constant times eps · ‖S‖₂, or NaN."""

import itertools
from functools import partial

import pytest
import torch

from osa import linalg, reference, routes
from osa.constrained.orthogonal import exponential, retract
from osa.functional import orthogonal_attention
from tests.osa.helpers import orthogonality_error

DTYPES = [torch.float32, torch.float64]
ROUNDINGS = 128  # times eps · max(1, ‖S‖₂)
NORMS = [1e-3, 1.0, 30.0, 1e3, 1e4, 3e4, 1e5]
LARGEST = 1e4  # ‖S‖₂ up to which a route that reads no value has digits
SIZES = [(50, 16), (53, 5), (7, 3), (1, 2)]  # (N, d)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def of_shared_mean(mean):
    return lambda n, d: (normal(n, d) + mean * normal(1, d), normal(n, d) + mean * normal(1, d))


def projected(mean):
    """Query and key of tokens that share a part, as a layer has them."""

    def make(n, d):
        x = normal(n, d) + mean * normal(1, d)
        return x @ normal(d, d) / d**0.5, x @ normal(d, d) / d**0.5

    return make


def with_outliers(size, row_of_key):
    def make(n, d):
        query, key = normal(n, d), normal(n, d)
        query[0] *= size
        key[min(row_of_key, n - 1)] *= size
        return query, key

    return make


def nearly_symmetric(size):
    """Q ≈ K W with W symmetric, whose large parts cancel in S."""

    def make(n, d):
        key, w = normal(n, d), normal(d, d)
        return key @ (w + w.mT) + normal(n, d) / size, key

    return make


def of_unequal_size(n, d):
    """Whose squares overflow in float32, and S does not."""
    return 1e-19 * normal(n, d), 1e19 * normal(n, d)


KINDS = {f"mean {mean:g}": of_shared_mean(mean) for mean in (0, 1, 30, 1e3, 1e4)}
KINDS |= {f"projected mean {mean:g}": projected(mean) for mean in (30, 1e3)}
KINDS |= {f"outlier {size:g}": with_outliers(size, 0) for size in (30, 1e4)}
KINDS |= {f"two outliers {size:g}": with_outliers(size, 1) for size in (30, 1e4)}
KINDS["unequal size"] = of_unequal_size
KINDS |= {f"cancelling {size:g}": nearly_symmetric(size) for size in (10, 1e3)}


def of_norm(kind, norm, n, d, dtype):
    """Query and key of a kind, and the scale with which ‖S‖₂ is the norm."""
    query, key = (x.to(dtype) for x in KINDS[kind](n, d))
    size = torch.linalg.matrix_norm(reference.skew(query, key, 1.0), 2).item()
    return query, key, norm / size if n > 1 else norm


def all_of_size(n, d, dtype):
    """Query, key and scale of all kinds at all norms, and which they are."""
    cases = list(itertools.product(KINDS, NORMS))
    query, key, scale = zip(*(of_norm(*case, n, d, dtype) for case in cases), strict=True)
    return torch.stack(query), torch.stack(key), torch.tensor(scale, dtype=dtype).view(-1, 1, 1), cases


def matrix(query, key, scale, method):
    identity = torch.eye(query.shape[-2], dtype=query.dtype)
    return orthogonal_attention(query, key, identity, scale=scale, method=method)


def one_by_one(query, key, scale, method, function=matrix):
    """Matrices one by one, as a batch takes the route that its hardest matrix needs."""
    return torch.stack([function(*each, method) for each in zip(query, key, scale, strict=True)])


def in_vmap(query, key, scale, method):
    return torch.func.vmap(partial(matrix, method=method))(query, key, scale)


def in_a_graph(query, key, scale, method):
    torch.compiler.reset()
    return one_by_one(query, key, scale, method, torch.compile(matrix, backend="aot_eager", fullgraph=True))


def without_values(query, key, scale, method):
    """Runs in the inputs' own type and reads no value, as on CUDA without a kernel."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (routes, linalg):
            patch.setattr(module, "is_readable", lambda x: False)
        patch.setattr(routes, "_safe_dtype", lambda m: m.dtype)
        return matrix(query, key, scale, method)


READ = ("eager", "compiled")  # routes that choose by values
ROUTES = {"eager": one_by_one, "vmap": in_vmap, "compiled": in_a_graph, "without values": without_values}
every_route = pytest.mark.parametrize(
    "route", [pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ()) for name in ROUTES]
)
may_lose_digits = pytest.mark.filterwarnings(
    "ignore:orthogonal attention returns NaN", "ignore:.*should not be instantiated"
)


def has_digits(route, method, kind, norm, dtype):
    """Tells whether a result is due: a route that reads values always has one, the others at moderate norms and kinds."""
    if route in READ:
        return True
    is_wide = method == "qr" or (route, dtype) == ("vmap", torch.float32)
    return norm <= LARGEST and (is_wide or (norm <= 30 and kind in ("mean 0", "mean 1")))


QUICK = list(itertools.product(("eager", "vmap", "without values"), SIZES[2:], DTYPES))
SLOW = [case for case in itertools.product(ROUTES, SIZES, DTYPES) if case not in QUICK]


@may_lose_digits
@pytest.mark.parametrize("calls", [pytest.param(QUICK, id="quick"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["exact", "qr", "cayley"])
def test_lengths_are_kept_or_the_result_is_nan(method, calls, subtests):
    for route, size, dtype in calls:
        with subtests.test(route=route, size=size, dtype=dtype):
            *inputs, cases = all_of_size(*size, dtype)
            for a, (kind, norm) in zip(ROUTES[route](*inputs, method), cases, strict=True):
                if a.isnan().all() and not has_digits(route, method, kind, norm, dtype):
                    continue
                assert a.isfinite().all(), (kind, norm)
                error = orthogonality_error(a) / (torch.finfo(dtype).eps * max(1, norm))
                assert error < ROUNDINGS, (kind, norm, error)


@may_lose_digits
@every_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_polar_express_keeps_lengths_to_float32_within_its_singular_values(dtype, route):
    query, key, scale, cases = all_of_size(53, 5, dtype)
    values = torch.linalg.svdvals(torch.cat([query, key], dim=-1).double())
    within = values.amin(-1) >= 1e-3 * torch.linalg.vector_norm(values, dim=-1)
    assert within.sum() > 20
    matrices = ROUTES[route](query[within], key[within], scale[within], "polar_express")
    norms = torch.tensor([norm for _, norm in cases])[within].tolist()
    for a, norm in zip(matrices, norms, strict=True):
        assert a.isfinite().all() or (norm > LARGEST and route not in READ)
        assert a.isnan().all() or orthogonality_error(a) < 1e-5 + ROUNDINGS * 1.2e-7 * max(1, norm)


@may_lose_digits
@every_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_newton_schulz_equals_its_equations_or_is_nan(dtype, route):
    """Newton–Schulz is not orthogonal by design, and its rounding grows with scale · ‖M‖₂²."""
    query, key, scale, cases = all_of_size(53, 5, dtype)
    sizes = scale[:, 0, 0] * torch.linalg.matrix_norm(torch.cat([query, key], dim=-1).double(), 2) ** 2
    identity = torch.eye(53, dtype=torch.float64)
    expected = reference.newton_schulz_attention(query, key, identity, scale)
    matrices = ROUTES[route](query, key, scale, "newton_schulz")
    for a, right, (kind, norm), size in zip(matrices, expected, cases, sizes.tolist(), strict=True):
        rounding = torch.finfo(dtype).eps * max(1, size)
        if a.isnan().all() and (rounding > 1e-3 or (norm > LARGEST and route not in READ)):
            continue
        assert (a - right).norm() < 32 * rounding * identity.norm(), (kind, norm, size)


MAPS = {  # onto matrices with orthonormal columns, of a generator of the norm
    "exponential": lambda x, base: exponential(x),
    "retraction": lambda x, base: retract(base, x),
}


@may_lose_digits
@pytest.mark.parametrize("name", MAPS)
def test_maps_lead_to_orthonormal_columns(name, subtests):
    for norm, dtype, mean in itertools.product(NORMS, DTYPES, (0, 30, 1e3)):
        with subtests.test(norm=norm, dtype=dtype, mean=mean):
            x, base = normal(53, 53 if name == "exponential" else 5), torch.linalg.qr(normal(53, 5)).Q.to(dtype)
            x = (x + mean * normal(1, x.shape[1])).to(dtype)
            a = x.tril(-1) - x.tril(-1).mT if name == "exponential" else reference.skew(x, base, 1.0)
            w = MAPS[name](norm / torch.linalg.matrix_norm(a, 2).to(dtype) * x, base)
            assert orthogonality_error(w) < ROUNDINGS * torch.finfo(dtype).eps * max(1, norm)
