"""Memory for the operands of what is measured, laid out as the problem says and filled with data."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.verify import TYPES, Elements, elements_of
from lt_runtime.layout import packed
from lt_runtime.problem import ALIGNMENT, Compute, DType, MatmulProblem, Spec
from lt_runtime.tuner.memory import Difference, Memory
from lt_runtime.tuner.timing import buffer_sets

_MARGIN: Final = 4096  # elements behind each operand
_PERIOD: Final = 65521  # A prime: no leading dimension puts the same values below each other.
_STEP: Final = 7919  # Each set of operands has the same values, this many places further on than the set before.
_BITS: Final = 8
_EXACT_BYTES: Final = 4


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
        self.size = _whole(self._offset + extent + _MARGIN * self.itemsize, self.itemsize)
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
            self._memory.copy(self.start + filled, self.start, copied)
            filled += copied

    def poison(self) -> None:
        """Sets every bit, which makes every float NaN."""
        self._memory.set(self.start, 0xFF, self.size)

    def snapshot(self) -> Buffer:
        """A copy in memory of its own."""
        made = copy.copy(self)
        made._hold(self._memory)
        self._memory.copy(made.start, self.start, self.size)
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


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


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


def operand_sets(make: Callable[[], _Operands], device: int) -> list[_Operands]:
    """Filled sets of operands, as many as it takes to keep them out of the cache; see `buffer_sets`."""
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


class ProductOperands(Operands):
    """All operands of one matrix product; the outputs are "d", and "aux" or "vector" where the epilogue has them.

    Args:
        problem: none of its extents is 0.

    Attributes:
        has_mask: whether the auxiliary matrix is ReLU's, with a bit for each element.
    """

    def __init__(self, memory: Memory, problem: MatmulProblem) -> None:
        super().__init__()
        self.memory, self.problem = memory, problem
        epilogue, placed = problem.epilogue, operands_of(problem)
        for name, (spec, dtype) in placed.items():
            self.buffers[name] = Buffer(memory, spec, dtype, 1 if name == "vector" else problem.batch)
        self.has_mask = "aux" in placed and epilogue.activation == "relu"
        one = np.ones(1, np.float64 if problem.compute is Compute.FLOAT64 else np.float32)
        self._one = memory.allocate(one.nbytes)
        memory.write(self._one.data.ptr, one)
        written = {"d": True, "vector": epilogue.has_bias_gradient, "aux": epilogue.has_aux_output}
        self.outputs = [name for name, is_output in written.items() if is_output]

    def snapshot(self) -> list[Buffer]:
        """Copies of the outputs."""
        return [self.buffers[name].snapshot() for name in self.outputs]

    def same_as(self, snapshot: list[Buffer]) -> bool:
        """Whether the outputs are what they were, bit for bit."""
        now = (self.buffers[name] for name in self.outputs)
        return all(each.equals(before) for each, before in zip(now, snapshot, strict=True))

    def wrote_outside(self) -> bool:
        """Whether the product, whose results are all numbers, has written between or behind the rows of D."""
        d = self.buffers["d"]
        return d.count_written() != math.prod(d.shape)

    def call(self, stream: int) -> Call:
        """A run on these operands, α and β being 1."""
        addresses = (self.buffers[name].address if name in self.buffers else 0 for name in self.problem.operands)
        one: Any = int(self._one.data.ptr) if self.problem.device_scalars else 1.0
        return Call(tuple(addresses), stream, (one, one if self.problem.c is not None else 0.0))
