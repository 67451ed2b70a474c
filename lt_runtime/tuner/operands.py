"""Memory for the operands of a measurement, in the layouts of the problem's specs and filled with test data.

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
from lt_runtime.problem import ALIGNMENT, DType, MatmulProblem, Spec

# Elements of the margin behind each operand, in which writes beyond the operand are noticed.
_MARGIN: Final = 4096
# Number of elements after which test data repeat: a prime, so that no leading dimension aligns equal values.
_PERIOD: Final = 65521
# Elements by which the test data of one set of operands are shifted against those of the previous set.
_STEP: Final = 7919
_BITS: Final = 8
_EXACT_BYTES: Final = 4
_CACHES: Final = 3
_MOST_SETS: Final = 16


class Difference(NamedTuple):
    """The difference of an array from its expected values.

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
    """Memory of the current GPU, used in the order of CuPy's current stream."""

    device: int
    stream: int

    def allocate(self, size: int) -> Any:
        """Allocates `size` bytes of uninitialised memory; returns CuPy's array, which begins at its `data.ptr`."""
        return CUPY.empty((size,), np.dtype(np.uint8), self.device, self.stream)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Copies a contiguous array from the host; the caller may change the array as soon as this returns."""
        call("cuMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)

    def read(self, address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Copies `count` numbers to the host, after all earlier work on the stream."""
        values = np.empty(count, dtype)
        call("cuMemcpyDtoHAsync", values.ctypes.data, address, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)
        return values

    def expect(self, params: Struct, batch: int) -> None:
        """Computes a product's expected results in FP64; see verify.cu."""
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
        name: of the data, for messages.
        draw: draws a given number of values for an element type; the caller rounds them to the type.
        exact_to: the largest K for which FP32 holds every product and every partial sum exactly; 0 if there is none.
    """

    name: str
    draw: Callable[[np.random.Generator, int, DType], NDArray[Any]]
    exact_to: int


def _edges(generator: np.random.Generator, size: int, dtype: DType) -> NDArray[Any]:
    # FP16's tiny value is subnormal. In the wider types all values are normal, because a kernel may flush subnormal
    # numbers to 0. FP8's values are the least normal one of E4M3, and smaller.
    tiny = 2.0**-6 if dtype.is_float8 else 2.0**-20 if dtype is DType.FLOAT16 else 2.0**-100
    # The product of two such values stays within FP16's range, or that of the wider types.
    large = 16.0 if dtype is DType.FLOAT16 or dtype.is_float8 else 64.0
    scales = generator.choice(np.array([0.0, tiny, 2.0**-10, 1.0, large]), size, p=[0.1, 0.05, 0.2, 0.6, 0.05])
    values: NDArray[Any] = generator.standard_normal(size) * scales
    return values


NORMAL: Final = Data("normally distributed data", lambda generator, size, _: generator.standard_normal(size), 0)
LATTICE: Final = Data("multiples of 1/8", lambda generator, size, _: generator.integers(-16, 17, size) / 8, 60000)
BETWEEN: Final = Data(
    "odd multiples of 1/128", lambda generator, size, _: (2 * generator.integers(-128, 128, size) + 1) / 128, 0
)
"""Values that no sum of products of `LATTICE` equals. BF16 holds these values exactly, and also every sum of products
of `LATTICE` that is at most twice as large."""
EDGES: Final = Data("zeros, tiny and large values", _edges, 0)
ONES: Final = Data("ones", lambda _, size, __: np.ones(size), 2**24 - 2)


@functools.lru_cache(maxsize=128)
def _drawn(data: Data, dtype: DType | None, number: int, scale: float) -> NDArray[Any]:
    """Random test values as unsigned integers of the type's size; random bytes for a mask, whose `dtype` is None."""
    generator = np.random.default_rng(number)
    if dtype is None:
        return (np.full(_PERIOD, 0xFF) if data is ONES else generator.integers(0, 256, _PERIOD)).astype(np.uint8)
    values = scale * data.draw(generator, _PERIOD, dtype)
    return values.astype(dtype.numpy).view(f"uint{_BITS * dtype.itemsize}")


class Buffer:
    """Memory for one operand and a margin behind it.

    Args:
        spec: layout and alignment of the operand. Its address is a multiple of the alignment, and of no larger power
            of two.
        dtype: type of the elements; None for a mask, whose layout counts bits.
        batch: number of matrices.
        scale: factor for the data, a power of two.

    Attributes:
        dtype: see above.
        shape: (batch, rows, cols).
        itemsize: bytes of an element; 1 for a mask.
        size: bytes of the memory, margin included.
        start: address of the memory; the operand begins at `address`.
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
        """Fills the memory from end to end, margin and gaps included.

        A mask's bits are all set where the data is ones, and random otherwise.

        Args:
            number: number of the operand; operands with different numbers get different values.
            seed: number of the set of operands; see `_STEP`.
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
        """Sets every bit, which makes every float NaN."""
        call("cuMemsetD8Async", self.start, 0xFF, self.size, self._memory.stream)

    def snapshot(self) -> Buffer:
        """A copy of the buffer in newly allocated memory."""
        made = copy.copy(self)
        made._hold(self._memory)
        call("cuMemcpyDtoDAsync", made.start, self.start, self.size, self._memory.stream)
        return made

    def equals(self, other: Buffer) -> bool:
        """Whether all bits equal the bits of another buffer of the same operand, margin and gaps included."""
        # Compared as integers of at most 32 bits, which FP64, in which `compare` computes, holds exactly.
        size = min(self.itemsize, _EXACT_BYTES)
        ours, theirs = (_flat(each.start, size) for each in (self, other))
        return self._memory.compare(ours, (1, 1, self.size // size), theirs).bad == 0

    def compare(self, wanted: Buffer, **tolerance: float) -> Difference:
        """Compares the elements with a buffer of as many rows and columns; for `tolerance` see `Memory.compare`."""
        return self._memory.compare(self.elements, self.shape, wanted.elements, **tolerance)

    def count_written(self) -> int:
        """The number of elements, margin and gaps included, that have been written since `poison`."""
        poison = 2.0 ** (_BITS * self.itemsize) - (1 if self.itemsize <= _EXACT_BYTES else 0)
        shape = 1, 1, self.size // self.itemsize
        return self._memory.compare(_flat(self.start, self.itemsize), shape, constant=poison).bad

    def value(self, at: Sequence[int]) -> float:
        """One element; a mask's bit as 0 or 1."""
        place = sum(index * stride for index, stride in zip(at, self._strides, strict=True))
        if self.dtype is None:
            return float(self._memory.read(self.address + place // _BITS, 1, np.uint8)[0] >> place % _BITS & 1)
        return float(self._memory.read(self.address + place * self.itemsize, 1, self.dtype.numpy)[0])


def _flat(address: int, itemsize: int) -> verify.Elements:
    return verify.Elements(address, 0, 0, 1, verify.TYPES[f"uint{_BITS * itemsize}"])


class Operands:
    """Buffers of all operands of a measured product or chain.

    Attributes:
        buffers: by the operand's name in a product, by its `Tensor` in a chain.
        outputs: keys of the buffers that are written before they are read.
    """

    def __init__(self) -> None:
        self.buffers: dict[Any, Buffer] = {}
        self.outputs: list[Any] = []

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size for buffer in self.buffers.values())

    def fill(self, data: Data, seed: int) -> None:
        """Fills every operand with data, outputs included."""
        for number, buffer in enumerate(self.buffers.values()):
            buffer.fill(data, number, seed)

    def poison(self) -> None:
        """Fills every output with NaN, which reveals each element that is not written."""
        for key in self.outputs:
            self.buffers[key].poison()


_Operands = TypeVar("_Operands", bound=Operands)


def buffer_sets(size: int, device: int) -> int:
    """The number of buffer sets of `size` bytes to use in turn, so that the L2 cache never holds the next set.

    The number is 1 if a set is larger than the cache, or so small that it stays in the cache in real use too.
    """
    (cache,) = device_attributes(device, "L2_CACHE_SIZE")
    wanted = -(-_CACHES * cache // max(size, 1))
    return wanted if wanted <= _MOST_SETS else 1


def operand_sets(make: Callable[[], _Operands], device: int) -> list[_Operands]:
    """Filled sets of operands; their number is `buffer_sets`, so that the L2 cache never holds the next set."""
    first = make()
    sets = [first, *(make() for _ in range(1, buffer_sets(first.size, device)))]
    for seed, operands in enumerate(sets):
        operands.fill(NORMAL, seed)
    return sets


def operands_of(problem: MatmulProblem) -> dict[str, tuple[Spec, DType | None]]:
    """Spec and type of each operand of a product, by name; a mask's type is None."""
    epilogue, result = problem.epilogue, problem.d_dtype
    length = problem.m if epilogue is Epilogue.BGRADA else problem.n
    has_vector = epilogue.has_bias or epilogue.has_bias_gradient
    vector = Spec(packed(1, length), problem.bias_alignment) if has_vector else None
    (a, b), aux = problem.types, None if epilogue.activation == "relu" else problem.aux_dtype
    vector_type = problem.bias_dtype if epilogue.has_bias else result
    types = {"a": a, "b": b, "c": problem.aux_dtype, "vector": vector_type, "aux": aux}
    specs = {"a": problem.a, "b": problem.b, "d": problem.d, "c": problem.c, "vector": vector, "aux": problem.aux}
    return {name: (spec, types.get(name, result)) for name, spec in specs.items() if spec is not None}
