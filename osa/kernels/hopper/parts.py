"""Few heads of long sequences: a head's tokens in parts, each with a program, where fused.py has one for all.

    gram_kernel            G and (MᵀV)ᵀ of each part, in both passes
    mix_kernel             Tᵀ of each head, given the sums over its parts
    apply_kernel           V + M T
    products_kernel        Fᵀ of each part
    mix_backward_kernel    A₂, A₃ and the gradient of c
    apply_backward_kernel  the gradients of Q, K and V

The functions are those of fused.py. torch adds up the parts, in an order that is always the same: a program alone reads
memory too slowly for it.
"""

import triton
import triton.language as tl

from osa.kernels.hopper import fused
from osa.kernels.hopper.fused import ENTRIES, SCRATCH, SIZE, first_of, scale_of, term_at
from osa.kernels.tiles import split

NUMBERS = ["heads", "tokens", "parts", "rows"]
LENGTH = tl.constexpr(3 * 8192)  # entries of G and (MᵀV)ᵀ
KEPT = tl.constexpr(27 * 8192)  # entries of a head's scratch, of fused.py's and then Tᵀ, A₂ᵀ and A₃


@triton.jit
def square():
    """Places of a matrix of SIZE rows and columns."""
    return tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def part_of(tokens, parts, rows):
    """A program's head, the first token of its part, and the number of tokens in it."""
    start = tl.program_id(0) % parts * rows
    return tl.program_id(0) // parts, start, tl.minimum(tokens - start, rows)


@triton.jit(do_not_specialize=NUMBERS)
def gram_kernel(
    query, key, value, sums, strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr,
):  # fmt: skip
    i, start, count = part_of(tokens, parts, rows)
    first = first_of(i, heads, strides) + start * strides[2]
    q, k, v, own = query + first, key + first, value + first, sums + tl.program_id(0).to(tl.int64) * LENGTH
    gram, vm = fused.gram_and_sums(q, k, v, strides[2], count, WIDTH, GRAM_ROWS, GRAM_STAGES)
    tl.store(own + square(), gram)
    tl.store(term_at(own + SIZE * SIZE), vm)


@triton.jit(do_not_specialize=NUMBERS)
def products_kernel(
    query, key, grad, sums, strides, e_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr,
):  # fmt: skip
    i, start, count = part_of(tokens, parts, rows)
    first, place = first_of(i, heads, strides) + start * strides[2], first_of(i, heads, e_strides) + start * e_strides[2]
    q, k, e, own = query + first, key + first, grad + place, sums + tl.program_id(0).to(tl.int64) * ENTRIES
    tl.store(term_at(own), fused.products(q, k, e, strides[2], e_strides[2], count, WIDTH, GRAM_ROWS, GRAM_STAGES))


@triton.jit
def mix_kernel(sums, scale, state, mixed):
    """Tᵀ in two parts of each head that one product a term suffices for, and its `state`, as in `fused.forward_kernel`."""
    i = tl.program_id(0)
    own, kept = sums + i.to(tl.int64) * LENGTH, term_at(mixed + i.to(tl.int64) * 2 * ENTRIES)
    gram, vm = tl.load(own + square()), tl.load(term_at(own + SIZE * SIZE))
    total, _, _, suffices = fused.sum_terms(gram, vm, scale_of(scale, i), kept, False)
    tl.store(state + i, tl.where(suffices, 1.0, 0.0))
    high, low = split(total)
    tl.store(kept, high)
    tl.store(kept + ENTRIES, low)


@triton.jit(do_not_specialize=NUMBERS)
def apply_kernel(
    query, key, value, output, state, mixed, strides, out_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i, start, count = part_of(tokens, parts, rows)
    if tl.load(state + i) == 1.0:
        first = first_of(i, heads, strides) + start * strides[2]
        out = output + first_of(i, heads, out_strides) + start * out_strides[2]
        kept = term_at(mixed + i.to(tl.int64) * 2 * ENTRIES)
        high, low = tl.load(kept), tl.load(kept + ENTRIES)
        q, k, v = query + first, key + first, value + first
        fused.apply(q, k, v, out, strides[2], out_strides[2], count, high, low, WIDTH, ROWS, STAGES)


@triton.jit
def mix_backward_kernel(sums, products, scale, grad_scale, state, scratch):
    i = tl.program_id(0)
    if tl.load(state + i) == 1.0:
        own, terms = sums + i.to(tl.int64) * LENGTH, term_at(scratch + i.to(tl.int64) * KEPT)
        c, gram, vm = scale_of(scale, i), tl.load(own + square()), tl.load(term_at(own + SIZE * SIZE))
        total, z, degree, _ = fused.sum_terms(gram, vm, c, terms, True)
        t = total.to(tl.bfloat16)
        gradient, a2, a3 = fused.adjoint(tl.load(term_at(products + i.to(tl.int64) * ENTRIES)), t, z, degree, c, terms)
        tl.store(grad_scale + i, gradient.to(grad_scale.dtype.element_ty))
        tl.store(terms + SCRATCH, t)
        tl.store(terms + SCRATCH + ENTRIES, a2)
        tl.store(scratch + i.to(tl.int64) * KEPT + SCRATCH + 2 * ENTRIES + square(), a3)


@triton.jit(do_not_specialize=NUMBERS)
def apply_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, state, scratch,
    strides, e_strides, grad_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i, start, count = part_of(tokens, parts, rows)
    if tl.load(state + i) == 1.0:
        first = first_of(i, heads, strides) + start * strides[2]
        place = first_of(i, heads, grad_strides) + start * grad_strides[2]
        e = grad + first_of(i, heads, e_strides) + start * e_strides[2]
        kept = scratch + i.to(tl.int64) * KEPT + SCRATCH
        t, a2, a3 = tl.load(term_at(kept)), tl.load(term_at(kept + ENTRIES)), tl.load(kept + 2 * ENTRIES + square())
        q, k, v, gq, gk, gv = (
            query + first,
            key + first,
            value + first,
            grad_query + place,
            grad_key + place,
            grad_value + place,
        )
        strides_of_rows = strides[2], e_strides[2], grad_strides[2]
        fused.apply_backward(q, k, v, e, gq, gk, gv, *strides_of_rows, count, t, a2, a3, WIDTH, ROWS, STAGES)
