"""Products and sums of small matrices within one Triton program, in full float32.

A matrix is a tuple (pointer, row stride, column stride, rows, columns, offset). Functions that loop over tiles are not
inlined. A program then holds few numbers between calls, so registers do not spill, and a kernel compiles in seconds.

In all kernels, the name of a matrix in memory is its letter in the equations. The prefix p_ marks a pointer, b_ a block of
entries in registers, i_ an index, and o_ an offset or an array of row or column numbers.
"""

import triton
import triton.language as tl

MAX_ROWS = tl.constexpr(32)  # rows of a tile, and maximum number of rows of a matrix in short/blocks.py
BLOCK = tl.constexpr(16)
LARGEST_NORM = tl.constexpr(16384.0)  # maximum ‖S‖₂: above it, exp(S) has no correct digit in float32
NO_DIGIT_ABOVE = tl.constexpr(2.0**20)  # maximum c ‖M‖_F²: above it, exp(S) has no correct digit (see osa/routes.py)


@triton.jit
def matrix(scratch, rows, columns):
    """Returns a row-major matrix at the start of the free scratch memory, and the scratch memory that remains."""
    return (scratch[0], columns, 1, rows, columns, scratch[1]), (scratch[0], scratch[1] + rows * columns)


@triton.jit
def scratch_at(pointer):
    """Scratch memory at a pointer. Offsets into it are constants and take no registers."""
    return (pointer, tl.full([], 0, tl.int32))


@triton.jit
def slice_of(pointer, index, size):
    """Slice number `index` of memory that is divided into slices of `size` entries."""
    return scratch_at(pointer + (tl.full([], 0, tl.int64) + index) * size)


@triton.jit
def head(pointer, strides, index, heads, rows, columns):
    """Matrix number `index` of a tensor (batch, heads, rows, columns). Offsets have 64 bits, for large tensors."""
    index = tl.full([], 0, tl.int64) + index
    batch = index // heads
    pointer += batch * strides[0] + (index - batch * heads) * strides[1]
    return (pointer, tl.full([], 0, tl.int64) + strides[2], strides[3], rows, columns, 0)


@triton.jit
def transpose(a):
    return (a[0], a[2], a[1], a[4], a[3], a[5])


@triton.jit
def columns_of(a, start, count):
    return (a[0], a[1], a[2], a[3], count, a[5] + start * a[2])


@triton.jit
def rows_of(a, start, count):
    return (a[0], a[1], a[2], count, a[4], a[5] + start * a[1])


@triton.jit
def diagonal(a):
    """The diagonal as a column."""
    return (a[0], a[1] + a[2], 1, a[3], 1, a[5])


@triton.jit
def load(a, o_rows, o_columns):
    """Returns entries of A, and zeros for rows and columns outside of A."""
    mask = (o_rows < a[3])[:, None] & (o_columns < a[4])[None, :]
    return tl.load(a[0] + a[5] + o_rows[:, None] * a[1] + o_columns[None, :] * a[2], mask=mask, other=0.0)


@triton.jit
def store(a, o_rows, o_columns, b_x):
    mask = (o_rows < a[3])[:, None] & (o_columns < a[4])[None, :]
    p_x = a[0] + a[5] + o_rows[:, None] * a[1] + o_columns[None, :] * a[2]
    tl.store(p_x, b_x.to(a[0].dtype.element_ty), mask=mask)


@triton.jit
def high_low(b_x):
    """Splits X into a high and a low part, both in bfloat16. The sum of the parts is X to about 16 significant bits."""
    b_high = b_x.to(tl.bfloat16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot(b_a, b_b, b_sums):
    """sums + A B in full float32."""
    return tl.dot(b_a, b_b, b_sums, input_precision="ieee")


@triton.jit(noinline=True)
def multiply(out, a, b, alpha, add, beta):
    """out ← α A B + β C, or α A B if C (`add`) is None. `out` may be C, or B if B has at most MAX_ROWS rows."""
    for row in range(0, out[3], MAX_ROWS):
        o_rows = row + tl.arange(0, MAX_ROWS)
        for column in range(0, out[4], BLOCK):
            o_columns = column + tl.arange(0, BLOCK)
            b_sums = tl.zeros((MAX_ROWS, BLOCK), tl.float32)
            for start in range(0, a[4], BLOCK):
                o_inner = start + tl.arange(0, BLOCK)
                b_left, b_right = load(a, o_rows, o_inner).to(tl.float32), load(b, o_inner, o_columns).to(tl.float32)
                b_sums = dot(b_left, b_right, b_sums)
            b_sums = alpha * b_sums
            if add is not None:
                b_sums += beta * load(add, o_rows, o_columns).to(tl.float32)
            tl.debug_barrier()  # waits, because other threads may still read the old `out`
            store(out, o_rows, o_columns, b_sums)
    tl.debug_barrier()


@triton.jit(noinline=True)
def copy(out, a, alpha):
    """out ← α A, where A has at most MAX_ROWS rows."""
    for column in range(0, out[4], BLOCK):
        o_rows, o_columns = tl.arange(0, MAX_ROWS), column + tl.arange(0, BLOCK)
        store(out, o_rows, o_columns, alpha * load(a, o_rows, o_columns))
    tl.debug_barrier()


@triton.jit(noinline=True)
def add(out, a, alpha):
    """out ← out + α A, where A has at most MAX_ROWS rows."""
    for column in range(0, out[4], BLOCK):
        o_rows, o_columns = tl.arange(0, MAX_ROWS), column + tl.arange(0, BLOCK)
        store(out, o_rows, o_columns, load(out, o_rows, o_columns) + alpha * load(a, o_rows, o_columns))
    tl.debug_barrier()


@triton.jit(noinline=True)
def set_identity(out):
    """out ← I, where `out` has at most MAX_ROWS rows."""
    for column in range(0, out[4], BLOCK):
        o_rows, o_columns = tl.arange(0, MAX_ROWS), column + tl.arange(0, BLOCK)
        store(out, o_rows, o_columns, tl.where(o_rows[:, None] == o_columns[None, :], 1.0, 0.0))
    tl.debug_barrier()


@triton.jit(noinline=True)
def inner_product(a, b):
    """⟨A, B⟩ = Σ A ∘ B."""
    total = tl.full([], 0.0, tl.float32)
    for column in range(0, a[4], BLOCK):
        o_rows, o_columns = tl.arange(0, MAX_ROWS), column + tl.arange(0, BLOCK)
        total += tl.sum(load(a, o_rows, o_columns) * load(b, o_rows, o_columns))
    return total


@triton.jit(noinline=True)
def apply_j(out, a, alpha):
    """out ← α J A with J = [[0, I], [−I, 0]]."""
    half = a[3] // 2
    for column in range(0, a[4], BLOCK):
        o_rows, o_columns = tl.arange(0, MAX_ROWS), column + tl.arange(0, BLOCK)
        b_other_half = load(a, tl.where(o_rows < half, o_rows + half, o_rows - half), o_columns)
        store(out, o_rows, o_columns, tl.where(o_rows < half, alpha, -alpha)[:, None] * b_other_half)
    tl.debug_barrier()


@triton.jit
def times_j(out, a, alpha):
    """out ← α A J."""
    width = a[4] // 2
    copy(columns_of(out, 0, width), columns_of(a, width, width), -alpha)
    copy(columns_of(out, width, width), columns_of(a, 0, width), alpha)
