"""Kernels for few heads of long sequences: a program computes a part of a head, not a whole head as in fused.py.

    gram_kernel            G and (MᵀV)ᵀ of each part, in the forward and the backward pass
    mix_kernel             c Tᵀ of each head, given the sums over the parts of the head
    apply_kernel           V + c M T
    products_kernel        Fᵀ of each part
    mix_backward_kernel    A₂, A₃ and the gradient of c
    apply_backward_kernel  the gradients of Q, K and V

torch sums the results of a head's parts, in a fixed order. `mix_kernel`, with one program per head, would read them slowly.
"""

import triton
import triton.language as tl

from osa.kernels.hopper import fused
from osa.kernels.hopper.fused import COLUMNS, ENTRIES, FUSED, SCRATCH, STEPS, load_scale, o_head, p_panel
from osa.kernels.tiles import high_low

NUMBERS = ["heads", "tokens", "parts", "rows"]
PART_SUMS = tl.constexpr(3 * 8192)  # entries of G and (MᵀV)ᵀ together
HEAD_SCRATCH = tl.constexpr(27 * 8192)  # SCRATCH entries, followed by the entries of c Tᵀ, A₂ᵀ and A₃


@triton.jit
def o_gram():
    """Offsets of a COLUMNS × COLUMNS matrix."""
    return tl.arange(0, COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def part_of(tokens, parts, rows):
    """Returns the index of a program's head, the first token of the program's part, and this part's number of tokens."""
    start = tl.program_id(0) % parts * rows
    return tl.program_id(0) // parts, start, tl.minimum(tokens - start, rows)


@triton.jit(do_not_specialize=NUMBERS)
def gram_kernel(
    query, key, value, sums, strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr,
):  # fmt: skip
    i_head, start, count = part_of(tokens, parts, rows)
    o_input = o_head(i_head, heads, strides) + start * strides[2]
    p_q, p_k, p_v, p_sums = query + o_input, key + o_input, value + o_input, sums + tl.program_id(0).to(tl.int64) * PART_SUMS
    b_gram, b_vm = fused.gram_and_sums(p_q, p_k, p_v, strides[2], count, WIDTH, GRAM_ROWS, GRAM_STAGES)
    tl.store(p_sums + o_gram(), b_gram)
    tl.store(p_panel(p_sums + COLUMNS * COLUMNS), b_vm)


@triton.jit(do_not_specialize=NUMBERS)
def products_kernel(
    query, key, grad, sums, strides, e_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, GRAM_ROWS: tl.constexpr, GRAM_STAGES: tl.constexpr,
):  # fmt: skip
    i_head, start, count = part_of(tokens, parts, rows)
    o_input = o_head(i_head, heads, strides) + start * strides[2]
    o_grad = o_head(i_head, heads, e_strides) + start * e_strides[2]
    p_q, p_k, p_e, p_sums = query + o_input, key + o_input, grad + o_grad, sums + tl.program_id(0).to(tl.int64) * ENTRIES
    tl.store(p_panel(p_sums), fused.products(p_q, p_k, p_e, strides[2], e_strides[2], count, WIDTH, GRAM_ROWS, GRAM_STAGES))


@triton.jit
def mix_kernel(sums, scale, state, mixed):
    """Stores each head's state, FUSED or STEPS, and its matrix c Tᵀ as a sum of two bfloat16 matrices, high + low."""
    i_head = tl.program_id(0)
    p_sums, p_mixed = sums + i_head.to(tl.int64) * PART_SUMS, p_panel(mixed + i_head.to(tl.int64) * 2 * ENTRIES)
    b_gram, b_vm = tl.load(p_sums + o_gram()), tl.load(p_panel(p_sums + COLUMNS * COLUMNS))
    b_total, _, _, suffices = fused.sum_terms(b_gram, b_vm, load_scale(scale, i_head), p_mixed, False)
    tl.store(state + i_head, tl.where(suffices, FUSED, STEPS))
    b_high, b_low = high_low(b_total)
    tl.store(p_mixed, b_high)
    tl.store(p_mixed + ENTRIES, b_low)


@triton.jit(do_not_specialize=NUMBERS)
def apply_kernel(
    query, key, value, output, state, mixed, strides, out_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_head, start, count = part_of(tokens, parts, rows)
    if tl.load(state + i_head) == FUSED:
        o_input = o_head(i_head, heads, strides) + start * strides[2]
        p_out = output + o_head(i_head, heads, out_strides) + start * out_strides[2]
        p_mixed = p_panel(mixed + i_head.to(tl.int64) * 2 * ENTRIES)
        b_high, b_low = tl.load(p_mixed), tl.load(p_mixed + ENTRIES)
        p_q, p_k, p_v = query + o_input, key + o_input, value + o_input
        fused.apply(p_q, p_k, p_v, p_out, strides[2], out_strides[2], count, b_high, b_low, WIDTH, ROWS, STAGES)


@triton.jit
def mix_backward_kernel(sums, products, scale, grad_scale, state, scratch):
    i_head = tl.program_id(0)
    if tl.load(state + i_head) == FUSED:
        p_sums, p_terms = sums + i_head.to(tl.int64) * PART_SUMS, p_panel(scratch + i_head.to(tl.int64) * HEAD_SCRATCH)
        c, b_gram, b_vm = load_scale(scale, i_head), tl.load(p_sums + o_gram()), tl.load(p_panel(p_sums + COLUMNS * COLUMNS))
        b_total, b_z, degree, _ = fused.sum_terms(b_gram, b_vm, c, p_terms, True)
        b_t = b_total.to(tl.bfloat16)
        grad_c, b_a2, b_a3 = fused.adjoint(
            tl.load(p_panel(products + i_head.to(tl.int64) * ENTRIES)), b_t, b_z, degree, c, p_terms
        )
        tl.store(grad_scale + i_head, grad_c.to(grad_scale.dtype.element_ty))
        tl.store(p_terms + SCRATCH, b_t)
        tl.store(p_terms + SCRATCH + ENTRIES, b_a2)
        tl.store(scratch + i_head.to(tl.int64) * HEAD_SCRATCH + SCRATCH + 2 * ENTRIES + o_gram(), b_a3)


@triton.jit(do_not_specialize=NUMBERS)
def apply_backward_kernel(
    query, key, value, grad, grad_query, grad_key, grad_value, state, scratch,
    strides, e_strides, grad_strides, heads, tokens, parts, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_head, start, count = part_of(tokens, parts, rows)
    if tl.load(state + i_head) == FUSED:
        o_input = o_head(i_head, heads, strides) + start * strides[2]
        o_grad = o_head(i_head, heads, grad_strides) + start * grad_strides[2]
        p_e = grad + o_head(i_head, heads, e_strides) + start * e_strides[2]
        p_mixed = scratch + i_head.to(tl.int64) * HEAD_SCRATCH + SCRATCH
        b_t = tl.load(p_panel(p_mixed))
        b_a2 = tl.load(p_panel(p_mixed + ENTRIES))
        b_a3 = tl.load(p_mixed + 2 * ENTRIES + o_gram())
        p_q = query + o_input
        p_k = key + o_input
        p_v = value + o_input
        p_grad_q = grad_query + o_grad
        p_grad_k = grad_key + o_grad
        p_grad_v = grad_value + o_grad
        row_strides = strides[2], e_strides[2], grad_strides[2]
        fused.apply_backward(
            p_q, p_k, p_v, p_e, p_grad_q, p_grad_k, p_grad_v, *row_strides, count, b_t, b_a2, b_a3, WIDTH, ROWS, STAGES
        )
