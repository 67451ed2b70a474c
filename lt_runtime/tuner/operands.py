"""Memory for the operands of a measurement, laid out as the problem says and filled with data.

Arrays are filled and compared by the driver and our own kernels, because CuPy would first compile a kernel for each.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lt_runtime.arrays.operand import CUPY
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.devices import device_attributes
from lt_runtime.gpu.driver import call
from lt_runtime.kernels.verify import (
    TYPES,
    CompareParams,
    Comparison,
    Elements,
    ExpectParams,
    compare_blocks,
    elements_of,
    launch_compare,
    launch_expect,
)
from lt_runtime.layout import packed
from lt_runtime.problem import ALIGNMENT, DType, MatmulProblem, Spec

_MARGIN: Final = 4096  # elements behind each operand
_PERIOD: Final = 65521  # A prime: no leading dimension puts the same values below each other.
_STEP: Final = 7919  # Each set of operands has the same values, this many places further on than the set before.
_BITS: Final = 8
_EXACT_BYTES: Final = 4
_CACHES: Final = 3
_MOST_SETS: Final = 16


class Difference(NamedTuple):
    """How two arrays differ.

    Attributes:
        bad: how many elements are off by more than their limit, or NaN.
        first: index of the first such element in row-major order; meaningless if `bad` is 0.
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
        """Uninitialised memory of `size` bytes; it begins at `data.ptr` of what is returned."""
        return CUPY.empty((size,), np.dtype(np.uint8), self.device, self.stream)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Copies an array without gaps from the host, which may change it afterwards."""
        call("cuMemcpyHtoDAsync", address, values.ctypes.data, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)

    def read(self, address: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Copies `count` numbers to the host, once the stream has made them."""
        values = np.empty(count, dtype)
        call("cuMemcpyDtoHAsync", values.ctypes.data, address, values.nbytes, self.stream)
        call("cuStreamSynchronize", self.stream)
        return values

    def expect(self, params: ExpectParams, batch: int) -> None:
        """Computes a product's expected results in FP64; see verify.cu."""
        launch_expect(params, batch, self.device, self.stream)

    def compare(
        self,
        found: Elements,
        shape: tuple[int, int, int],
        wanted: Elements | None = None,
        *,
        constant: float = 0.0,
        limits: int = 0,
        limit: float = 0.0,
        relative: float = 0.0,
    ) -> Difference:
        """Compares every element of some matrices with the same element of others, in FP64.

        Args:
            shape: (batch, rows, cols).
            wanted: None if every element must be `constant`.
            limits: address of how far off each element may be, FP64, row-major without gaps; 0 where that is `limit`
                plus `relative` times the magnitude of what is wanted.
        """
        parts = np.dtype(Comparison)
        blocks = compare_blocks(shape[0] * shape[1] * shape[2])
        made = self.allocate(blocks * parts.itemsize)
        params = CompareParams(found, wanted or Elements(), limits, made.data.ptr, *shape, constant, limit, relative)
        launch_compare(params, self.device, self.stream)
        of_blocks = self.read(made.data.ptr, blocks, parts)
        sums = (of_blocks[name].sum() for name in ("error_squares", "wanted_squares"))
        return Difference(int(of_blocks["bad"].sum()), int(of_blocks["first"].min()), *map(float, sums))


class Data(NamedTuple):
    """Values for operands.

    Attributes:
        name: for messages.
        draw: draws that many values for a type; they are rounded to the type afterwards.
        exact_to: the largest K up to which FP32 holds every product and every partial sum exactly; 0 if there is none.
    """

    name: str
    draw: Callable[[np.random.Generator, int, DType], NDArray[Any]]
    exact_to: int


def _edges(generator: np.random.Generator, size: int, dtype: DType) -> NDArray[Any]:
    # FP16's tiny value is subnormal. The other types' values are far from that, because a kernel may take subnormal
    # numbers for 0.
    tiny = 2.0**-20 if dtype is DType.FLOAT16 else 2.0**-100
    large = 16.0 if dtype is DType.FLOAT16 else 64.0  # No product of two such values leaves the type's range.
    scales = generator.choice(np.array([0.0, tiny, 2.0**-10, 1.0, large]), size, p=[0.1, 0.05, 0.2, 0.6, 0.05])
    values: NDArray[Any] = generator.standard_normal(size) * scales
    return values


NORMAL: Final = Data("normally distributed data", lambda generator, size, _: generator.standard_normal(size), 0)
LATTICE: Final = Data("multiples of 1/8", lambda generator, size, _: generator.integers(-16, 17, size) / 8, 60000)
BETWEEN: Final = Data(
    "odd multiples of 1/128", lambda generator, size, _: (2 * generator.integers(-128, 128, size) + 1) / 128, 0
)
"""No sum of products of `LATTICE` is such a value. BF16 holds these values exactly, and such sums up to twice as large
as well."""
EDGES: Final = Data("zeros, tiny and large values", _edges, 0)
ONES: Final = Data("ones", lambda _, size, __: np.ones(size), 2**24 - 2)


@functools.lru_cache(maxsize=128)
def _drawn(data: Data, dtype: DType | None, number: int, scale: float) -> NDArray[Any]:
    """Values as unsigned integers of their size; for a mask, whose type is None, bytes."""
    generator = np.random.default_rng(number)
    if dtype is None:
        return (np.full(_PERIOD, 0xFF) if data is ONES else generator.integers(0, 256, _PERIOD)).astype(np.uint8)
    values = scale * data.draw(generator, _PERIOD, dtype)
    return values.astype(dtype.numpy).view(f"uint{_BITS * dtype.itemsize}")


class Buffer:
    """Memory for one operand and a margin behind it.

    Args:
        spec: how the operand lies; its address is a multiple of the alignment, and of no larger power of two.
        dtype: of its elements; None for a mask, whose layout counts bits.
        batch: number of matrices.
        scale: factor that the data is multiplied by, a power of two.

    Attributes:
        dtype: as given.
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
    def elements(self) -> Elements:
        """The operand as kernels read it."""
        return elements_of(self.address, self._strides, self.dtype)

    def fill(self, data: Data, number: int, seed: int) -> None:
        """Fills the memory from end to end, margin and gaps included.

        A mask's bits are all set where the data is ones, and random otherwise.

        Args:
            number: of the operand; other numbers get other values.
            seed: of the set of operands; see `_STEP`.
        """
        values = np.roll(_drawn(data, self.dtype, number, self._scale), _STEP * seed)
        values = values[: self.size // self.itemsize]
        self._memory.write(self.start, values)
        filled = values.nbytes
        while filled < self.size:  # twice as many periods each time
            copied = min(filled, self.size - filled)
            call("cuMemcpyDtoDAsync", self.start + filled, self.start, copied, self._memory.stream)
            filled += copied

    def poison(self) -> None:
        """Sets every bit, which makes every float NaN."""
        call("cuMemsetD8Async", self.start, 0xFF, self.size, self._memory.stream)

    def snapshot(self) -> Buffer:
        """A copy in memory of its own."""
        made = copy.copy(self)
        made._hold(self._memory)
        call("cuMemcpyDtoDAsync", made.start, self.start, self.size, self._memory.stream)
        return made

    def equals(self, other: Buffer) -> bool:
        """Whether all bits are those of another buffer of the same operand, margin and gaps included."""
        size = min(self.itemsize, _EXACT_BYTES)  # FP64, in which numbers are compared, holds integers of up to 32 bits
        ours, theirs = (_flat(each.start, size) for each in (self, other))
        return self._memory.compare(ours, (1, 1, self.size // size), theirs).bad == 0

    def compare(self, wanted: Buffer, *, limit: float = 0.0, relative: float = 0.0) -> Difference:
        """Compares the elements with those of another buffer of the same operand; see `Memory.compare`."""
        return self._memory.compare(self.elements, self.shape, wanted.elements, limit=limit, relative=relative)

    def count_written(self) -> int:
        """How many elements, margin and gaps included, have another value than `poison` gives them."""
        poison = 2.0 ** (_BITS * self.itemsize) - (1 if self.itemsize <= _EXACT_BYTES else 0)
        shape = 1, 1, self.size // self.itemsize
        return self._memory.compare(_flat(self.start, self.itemsize), shape, constant=poison).bad

    def value(self, at: tuple[int, int, int]) -> float:
        """One element; a mask's bit as 0 or 1."""
        place = sum(index * stride for index, stride in zip(at, self._strides, strict=True))
        if self.dtype is None:
            return float(self._memory.read(self.address + place // _BITS, 1, np.uint8)[0] >> place % _BITS & 1)
        return float(self._memory.read(self.address + place * self.itemsize, 1, self.dtype.numpy)[0])


def _flat(address: int, itemsize: int) -> Elements:
    return Elements(address, 0, 0, 1, TYPES[f"uint{_BITS * itemsize}"])


class Operands:
    """Buffers of all operands of what is measured.

    Attributes:
        buffers: by the operand's name, or by its place in a chain.
        outputs: keys of the buffers that are written and not read before.
    """

    def __init__(self) -> None:
        self.buffers: dict[Any, Buffer] = {}
        self.outputs: list[Any] = []

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.size for buffer in self.buffers.values())

    def fill(self, data: Data, seed: int) -> None:
        """Puts data into every operand, those that are to be written included."""
        for number, buffer in enumerate(self.buffers.values()):
            buffer.fill(data, number, seed)

    def poison(self) -> None:
        """Fills every output with NaN, so that an element that is not written is noticed."""
        for key in self.outputs:
            self.buffers[key].poison()


_Operands = TypeVar("_Operands", bound=Operands)


def buffer_sets(size: int, device: int) -> int:
    """Number of buffer sets of `size` bytes that must take turns so that the L2 cache holds none of them.

    One set is returned if it is larger than the cache, or so small that it stays in the cache in real use too.
    """
    (cache,) = device_attributes(device, "L2_CACHE_SIZE")
    wanted = -(-_CACHES * cache // max(size, 1))
    return wanted if wanted <= _MOST_SETS else 1


def operand_sets(make: Callable[[], _Operands], device: int) -> list[_Operands]:
    """Filled sets of operands, so many that the L2 cache holds none of them at its next use; see `buffer_sets`."""
    first = make()
    sets = [first, *(make() for _ in range(1, buffer_sets(first.size, device)))]
    for seed, operands in enumerate(sets):
        operands.fill(NORMAL, seed)
    return sets


def operands_of(problem: MatmulProblem) -> dict[str, tuple[Spec, DType | None]]:
    """How the operands lie that a product has, and their types, by name; a mask's type is None."""
    epilogue, result = problem.epilogue, problem.d_dtype
    vector: Spec | None = None
    if epilogue.has_bias or epilogue.has_bias_gradient:
        vector = Spec(packed(1, problem.m if epilogue is Epilogue.BGRADA else problem.n), problem.bias_alignment)
    aux = problem.aux, None if epilogue.activation == "relu" else result
    found: dict[str, tuple[Spec | None, DType | None]] = {
        "a": (problem.a, problem.dtype),
        "b": (problem.b, problem.dtype),
    }
    found |= {"d": (problem.d, result), "c": (problem.c, result), "vector": (vector, result), "aux": aux}
    return {name: (spec, dtype) for name, (spec, dtype) in found.items() if spec is not None}
