"""Triton's interpreter made fit for the tests of kernels, and a record of what one program's threads do between barriers."""

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from triton.language import core
from triton.runtime import interpreter

from tests.osa.helpers import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the latter by the interpreter: see conftest.py


@contextlib.contextmanager
def quick():
    """The interpreter fit for NumPy 2.4, and quick.

    It keeps a scalar as an array of one entry, which NumPy no longer takes for an index; it looks for the overflow of each
    sum of integers; it patches Triton's language again whenever a function is called; it finds the type of every tuple,
    which nothing needs; and it works out the shape of every tensor anew. It truncates to bfloat16, multiplies matrices of
    bfloat16 as if they were integers, and rounds a fused product before the sum, where the device does not.
    """
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    run, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    create_dot, find_numpy_type = type(builder).create_dot, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    patched, no_type, numpy_types, blocks, tensors = set(), core.tuple_type([]), {}, {}, {}

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(function):
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch_language(function)

    def run_from_scratch(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    def numpy_type(kind):
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(kind)
        return numpy_types[name]

    def block(self, element_ty, shape):
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self)
        vars(self).update(tensors[type.name], handle=handle, type=type)

    def convert(data, source, target, rounding):
        is_wide = source == core.float32
        wide = data if is_wide else (data.astype(np.uint32) << 16).view(np.float32)
        narrow = torch.from_numpy(np.ascontiguousarray(wide)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return narrow if is_wide else wide

    def dot(builder, a, b, sums, *options):
        a, b = (builder.cast_impl(x, core.float32) if x.dtype == core.bfloat16 else x for x in (a, b))
        return create_dot(builder, a, b, sums, *options)

    def fma(builder, x, y, z):
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_from_scratch)
        patch.setattr(core, "_type_for_tuple_values", lambda values, fields=None: no_type)
        patch.setattr(core.block_type, "__init__", block)
        patch.setattr(core.tensor, "__init__", tensor)
        patch.setattr(interpreter, "_convert_float", convert)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        patch.setattr(type(builder), "create_dot", dot)
        patch.setattr(type(builder), "create_fma", fma)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


def random(tokens, width, value_width=3, batch=(1, 2), seed=0):
    """Query, key and value in float32 on DEVICE."""
    return [x.detach().to(DEVICE) for x in draw(tokens, width, value_width, batch=batch, dtype=torch.float32, seed=seed)]


class Race(Exception):
    """Threads access the same addresses without a barrier between the accesses."""


class Races:
    """Finds accesses to one address that a barrier should lie between, while a kernel runs in the interpreter.

    They are a read of what was written, a write over what was read through another tensor of pointers, and a second write.
    Through the same pointers it is the same thread that reads and writes. Beyond ENOUGH races a kernel ends with `Race`:
    without barriers the accesses to compare grow with each access.
    """

    ENOUGH = 1000

    def __init__(self, *, ignores_barriers: bool = False) -> None:
        self.found, self.barriers, self.ignores_barriers = 0, 0, ignores_barriers
        self.reads: list = []
        self.writes: list = []

    @contextlib.contextmanager
    def watch(self):
        kind = type(interpreter.interpreter_builder)
        load, store, barrier = kind.create_masked_load, kind.create_masked_store, kind.create_barrier

        def watched_load(builder, pointers, mask, *others):
            addresses = self._addresses(pointers, mask)
            self._compare(addresses, self.writes)
            self.reads.append(addresses)
            return load(builder, pointers, mask, *others)

        def watched_store(builder, pointers, value, mask, *others):
            addresses = self._addresses(pointers, mask)
            others_read = (read for read in self.reads if not np.array_equal(read, addresses))
            self._compare(addresses, [*others_read, *self.writes])
            self.writes.append(addresses)
            return store(builder, pointers, value, mask, *others)

        def watched_barrier(builder):
            self.barriers += 1
            if not self.ignores_barriers:
                self.forget()
            return barrier(builder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "create_masked_load", watched_load)
            patch.setattr(kind, "create_masked_store", watched_store)
            patch.setattr(kind, "create_barrier", watched_barrier)
            yield self

    def forget(self) -> None:
        """Forgets accesses, as at a barrier."""
        self.reads, self.writes = [], []

    @staticmethod
    def _addresses(pointers, mask) -> np.ndarray:
        return np.where(mask.data, pointers.data, 0)

    def _compare(self, addresses: np.ndarray, others: list[np.ndarray]) -> None:
        for other in others:
            self.found += np.setdiff1d(np.intersect1d(addresses, other), [0]).size
        if self.found > self.ENOUGH:
            raise Race


def assert_barriers_order(run: Callable[[Races], object], at_least: int) -> None:
    """Asserts that `run(races)` has no race and more barriers than `at_least`, and that it races without them."""
    with Races().watch() as races:
        run(races)
    assert races.barriers > at_least and races.found == 0, races.found
    with Races(ignores_barriers=True).watch() as races, pytest.raises(interpreter.InterpreterError, match="Race"):
        run(races)
