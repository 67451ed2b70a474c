"""Buffers for the operands of a measurement, with the layouts of the problem's specs, and their test data.

The CUDA driver and our own kernels fill and compare arrays, because CuPy would first compile a kernel for each task.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lt_runtime.arrays.operand import CUPY
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.devices import device_attributes
from lt_runtime.gpu.driver import call
from lt_runtime.kernels import verify
from lt_runtime.kernels.kernel import Struct
from lt_runtime.layout import packed
from lt_runtime.problem import ALIGNMENT, SCALES, DType, MatmulProblem, Spec

# Elements of a margin after each operand, which reveals writes beyond the operand.
_MARGIN: Final = 4096
# Number of elements after which test data repeat: a prime, so that no leading dimension aligns equal values.
_PERIOD: Final = 65521
# Offset, in elements, between the test data of one buffer set and those of the next.
_STEP: Final = 7919
_BITS: Final = 8
_EXACT_BYTES: Final = 4
_CACHES: Final = 3
_MOST_SETS: Final = 16


class Difference(NamedTuple):
    """How an array differs from its expected values.

    Attributes:
        bad: number of elements that are NaN or differ by more than their limit.
        first: index of the first bad element in row-major order; meaningless if `bad` is 0.
        error_squares: sum of the squares of all differences.
        wanted_squares: sum of the squares of the expected values.
    """

    bad: int
    first: int
    error_squares: float
    wanted_squares: float


class Memory(NamedTuple):
    """Allocates, copies and compares memory of the current GPU, in order on CuPy's current stream."""

    device: int
    stream: int

    def allocate(self, size: int) -> Any:
        """Allocates `size` bytes of uninitialised memory; returns an array of CuPy, at address `data.ptr`."""
        return CUPY.empty((size,), np.dtype(np.uint8), self.device, self.stream)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Copies a contiguous host array to the GPU; the caller may change the array as soon as the method returns."""
        call("cuMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)

    def read(self, address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Copies `count` numbers to the host, after all earlier work on the stream."""
        values = np.empty(count, dtype)
        call("cuMemcpyDtoHAsync", values.ctypes.data, address, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)
        return values

    def expect(self, params: Struct, batch: int) -> None:
        """Computes the expected results of a product in FP64; see `expect` in verify.cu."""
        verify.launch_expect(params, batch, self.device, self.stream)

    def compare(
        self, found: verify.Elements, shape: Sequence[int], wanted: verify.Elements | None = None, **tolerance: float
    ) -> Difference:
        """Compares every element of a batch of matrices with the expected element, in FP64.

        Args:
            shape: (batch, rows, cols).
            wanted: the expected elements; None if every element must be `constant`, one of the tolerances.
            tolerance: `limits` is the address of each element's tolerance, FP64, row-major without gaps. Without it,
                the tolerance is `limit` plus `relative` times the magnitude of the expected element.
        """
        parts, blocks = np.dtype(verify.Comparison), verify.compare_blocks(math.prod(shape))
        made = self.allocate(blocks * parts.itemsize)
        params = verify.COMPARE.params(found, wanted or verify.Elements(), parts=made.data.ptr, **tolerance)
        params.batch, params.rows, params.cols = shape
        verify.launch_compare(params, self.device, self.stream)
        of_blocks = self.read(made.data.ptr, blocks, parts)
        sums = (of_blocks[name].sum() for name in ("error_squares", "wanted_squares"))
        return Difference(int(of_blocks["bad"].sum()), int(of_blocks["first"].min()), *map(float, sums))


class Data(NamedTuple):
    """A kind of random test data for the operands of a measurement.

    Attributes:
        name: name of the data, for messages.
        draw: function that draws a number of values for an element type, to which the caller rounds them.
        exact_to: the largest K for which every product and partial sum is exact in FP32; 0 if none is.
    """

    name: str
    draw: Callable[[np.random.Generator, int, DType], NDArray[Any]]
    exact_to: int


def _edges(generator: np.random.Generator, size: int, dtype: DType) -> NDArray[Any]:
    # The data have tiny values: in FP16 a subnormal one; in BF16 and wider types a normal one, because a kernel may
    # flush subnormal numbers to 0; in FP8 the least normal number of E4M3.
    tiny = 2.0**-6 if dtype.is_float8 else 2.0**-20 if dtype is DType.FLOAT16 else 2.0**-100
    # Products of two large values stay within the type's range.
    large = 16.0 if dtype is DType.FLOAT16 or dtype.is_float8 else 64.0
    scales = generator.choice(np.array([0.0, tiny, 2.0**-10, 1.0, large]), size, p=[0.1, 0.05, 0.2, 0.6, 0.05])
    values: NDArray[Any] = generator.standard_normal(size) * scales
    return values


NORMAL: Final = Data("normally distributed data", lambda generator, size, _: generator.standard_normal(size), 0)
LATTICE: Final = Data("multiples of 1/8", lambda generator, size, _: generator.integers(-16, 17, size) / 8, 60000)
BETWEEN: Final = Data(
    "odd multiples of 1/128", lambda generator, size, _: (2 * generator.integers(-128, 128, size) + 1) / 128, 0
)
"""Values of the bias that no sum of products of `LATTICE` data equals. BF16 holds these values exactly, and also every
such sum that is at most twice as large.
"""
EDGES: Final = Data("zeros, tiny and large values", _edges, 0)
ONES: Final = Data("ones", lambda _, size, __: np.ones(size), 2**24 - 2)


@functools.lru_cache(maxsize=128)
def _drawn(data: Data, dtype: DType | None, number: int, scale: float) -> NDArray[Any]:
    """Random test values as raw bits, in unsigned integers of the type's size; random bytes if `dtype` is None."""
    generator = np.random.default_rng(number)
    if dtype is None:
        return (np.full(_PERIOD, 0xFF) if data is ONES else generator.integers(0, 256, _PERIOD)).astype(np.uint8)
    values = scale * data.draw(generator, _PERIOD, dtype)
    return values.astype(dtype.numpy).view(f"uint{_BITS * dtype.itemsize}")


class Buffer:
    """Memory for one operand, and a margin after it.

    Args:
        spec: layout and alignment of the operand, whose address is a multiple of the alignment and, if that is below
            256 bytes, of no larger power of two.
        dtype: type of the elements; None for a mask, whose layout counts bits.
        batch: number of matrices.
        scale: factor by which test data are multiplied, a power of two.

    Attributes:
        dtype: the argument.
        shape: (batch, rows, cols).
        itemsize: bytes of an element; 1 for a mask.
        size: bytes of the memory, including the margin.
        start: address of the memory; the operand itself begins at `address`.
    """

    def __init__(self, memory: Memory, spec: Spec, dtype: DType | None, batch: int = 1, scale: float = 1.0) -> None:
        self.dtype, self._scale = dtype, scale
        bits = 1 if dtype is None else _BITS * dtype.itemsize
        self._offset = spec.alignment % ALIGNMENT
        self.itemsize = max(1, bits // _BITS)
        extent = -(-((batch - 1) * spec.batch_stride + spec.layout.extent) * bits // _BITS)
        self.size = (-(-(self._offset + extent) // self.itemsize) + _MARGIN) * self.itemsize
        self.shape = batch, *spec.layout.shape
        self._strides = spec.batch_stride, *spec.layout.strides
        self._hold(memory)

    def _hold(self, memory: Memory) -> None:
        self._memory = memory
        self._held = memory.allocate(self.size)
        self.start: int = self._held.data.ptr
        self.address = self.start + self._offset

    @property
    def elements(self) -> verify.Elements:
        """The operand as the struct `Elements`, which the kernels that verify results read."""
        return verify.elements_of(self.address, self._strides, self.dtype)

    def fill(self, data: Data, number: int, seed: int) -> None:
        """Fills the whole memory with test data, including margin and gaps.

        For a mask all bits are set if the data are `ONES`, and random otherwise.

        Args:
            number: number of the operand in its set; it selects the operand's values.
            seed: number of the buffer set, which shifts the values by multiples of `_STEP`.
        """
        values = np.roll(_drawn(data, self.dtype, number, self._scale), _STEP * seed)
        values = values[: self.size // self.itemsize]
        self._memory.write(self.start, values)
        filled = values.nbytes
        while filled < self.size:  # each copy doubles the filled part
            copied = min(filled, self.size - filled)
            call("cuMemcpyDtoDAsync", self.start + filled, self.start, copied, self._memory.stream)
            filled += copied

    def poison(self) -> None:
        """Sets every bit of the memory, which makes every floating-point element NaN."""
        call("cuMemsetD8Async", self.start, 0xFF, self.size, self._memory.stream)

    def snapshot(self) -> Buffer:
        """A copy of the buffer in newly allocated memory."""
        made = copy.copy(self)
        made._hold(self._memory)
        call("cuMemcpyDtoDAsync", made.start, self.start, self.size, self._memory.stream)
        return made

    def equals(self, other: Buffer) -> bool:
        """Whether this buffer equals another buffer of the same operand bit for bit, including margin and gaps."""
        # The memory is compared as integers of at most 32 bits: `compare` converts to FP64, which holds these exactly.
        size = min(self.itemsize, _EXACT_BYTES)
        ours, theirs = (_flat(each.start, size) for each in (self, other))
        return self._memory.compare(ours, (1, 1, self.size // size), theirs).bad == 0

    def compare(self, wanted: Buffer, **tolerance: float) -> Difference:
        """Compares the elements with another buffer's of the same shape; for `tolerance` see `Memory.compare`."""
        return self._memory.compare(self.elements, self.shape, wanted.elements, **tolerance)

    def count_written(self) -> int:
        """The number of elements, including margin and gaps, that differ from what `poison` wrote."""
        poison = 2.0 ** (_BITS * self.itemsize) - (1 if self.itemsize <= _EXACT_BYTES else 0)
        shape = 1, 1, self.size // self.itemsize
        return self._memory.compare(_flat(self.start, self.itemsize), shape, constant=poison).bad

    def value(self, at: Sequence[int]) -> float:
        """One element as a float; of a mask a bit, 0 or 1."""
        place = sum(index * stride for index, stride in zip(at, self._strides, strict=True))
        if self.dtype is None:
            return float(self._memory.read(self.address + place // _BITS, 1, np.uint8)[0] >> place % _BITS & 1)
        return float(self._memory.read(self.address + place * self.itemsize, 1, self.dtype.numpy)[0])


def _flat(address: int, itemsize: int) -> verify.Elements:
    return verify.Elements(address, 0, 0, 1, verify.TYPES[f"uint{_BITS * itemsize}"])


class Operands:
    """Buffers of all operands of a measured product or chain.

    Attributes:
        buffers: the buffers, by operand name for a product, by `Tensor` for a chain.
        outputs: keys of the buffers that the measured work writes.
    """

    def __init__(self) -> None:
        self.buffers: dict[Any, Buffer] = {}
        self.outputs: list[Any] = []

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size for buffer in self.buffers.values())

    def fill(self, data: Data, seed: int) -> None:
        """Fills every operand with test data, including outputs."""
        for number, buffer in enumerate(self.buffers.values()):
            buffer.fill(data, number, seed)

    def poison(self) -> None:
        """Fills every output with NaN, which reveals elements that are not written."""
        for key in self.outputs:
            self.buffers[key].poison()


_Operands = TypeVar("_Operands", bound=Operands)


def buffer_sets(size: int, device: int) -> int:
    """Number of buffer sets of `size` bytes to use in turn, so that the next set is never in the L2 cache.

    The number is 1 if a set is at least three times as large as the cache, or so small that it would stay in the cache
    in real use too.
    """
    (cache,) = device_attributes(device, "L2_CACHE_SIZE")
    wanted = -(-_CACHES * cache // max(size, 1))
    return wanted if wanted <= _MOST_SETS else 1


def operand_sets(make: Callable[[], _Operands], device: int) -> list[_Operands]:
    """Makes as many sets of operands as `buffer_sets` says, filled with test data."""
    first = make()
    sets = [first, *(make() for _ in range(1, buffer_sets(first.size, device)))]
    for seed, operands in enumerate(sets):
        operands.fill(NORMAL, seed)
    return sets


def operands_of(problem: MatmulProblem) -> dict[str, tuple[Spec, DType | None]]:
    """Spec and type of each operand of a product, by name; the type of a mask is None."""
    epilogue, result = problem.epilogue, problem.d_dtype
    length = problem.m if epilogue is Epilogue.BGRADA else problem.n
    has_vector = epilogue.has_bias or epilogue.has_bias_gradient
    vector = Spec(packed(1, length), problem.bias_alignment) if has_vector else None
    (a, b), aux = problem.types, None if epilogue.activation == "relu" else problem.aux_dtype
    vector_type = problem.bias_dtype if epilogue.has_bias else result
    types = {"a": a, "b": b, "c": problem.aux_dtype, "vector": vector_type, "aux": aux}
    scales = zip(SCALES, (problem.m, problem.n), strict=False) if problem.scale_vectors else ()
    vectors = {name: (Spec(packed(1, size)), DType.FLOAT32) for name, size in scales}
    specs = {"a": problem.a, "b": problem.b, "d": problem.d, "c": problem.c, "vector": vector, "aux": problem.aux}
    return {name: (spec, types.get(name, result)) for name, spec in specs.items() if spec is not None} | vectors
