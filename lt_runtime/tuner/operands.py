"""Memory for the operands of what is measured, laid out as the problem says and filled with data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import ALIGNMENT, Compute, DType, MatmulProblem, Spec
from lt_runtime.tuner.timing import buffer_sets

_MARGIN: Final = 4096  # elements behind each operand
_PERIOD: Final = 65521  # A prime: no leading dimension puts the same values below each other.
_STEP: Final = 7919  # Each set of operands has the same values, this many places further on than the set before.
_BITS: Final = 8


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
    # FP16's tiny value is subnormal. Those of the other types are far from that, because CuPy's kernels, which make the
    # reference, take subnormal numbers for 0.
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
        xp: CuPy, or NumPy.
        spec: how the operand lies; its address is a multiple of the alignment, and of no larger power of two.
        dtype: of its elements; None for a mask, whose layout counts bits.
        batch: number of matrices.
        scale: factor that the data is multiplied by, a power of two.

    Attributes:
        flat: the memory as unsigned integers of the elements' size.
        bits: the matrices as such integers, (batch, rows, cols).
    """

    def __init__(self, xp: Any, spec: Spec, dtype: DType | None, batch: int = 1, scale: float = 1.0) -> None:
        self._xp, self._dtype, self._scale = xp, dtype, scale
        self._itemsize = 1 if dtype is None else dtype.itemsize
        spec = _in_bytes(spec) if dtype is None else spec
        offset = spec.alignment % ALIGNMENT // self._itemsize
        size = offset + (batch - 1) * spec.batch_stride + spec.layout.extent + _MARGIN
        self._periods = xp.empty((-(-size // _PERIOD), _PERIOD), f"uint{_BITS * self._itemsize}")
        self.flat = self._periods.reshape(-1)[:size]
        strides = [self._itemsize * stride for stride in (spec.batch_stride, *spec.layout.strides)]
        start = self.flat[offset:]
        self.bits = xp.lib.stride_tricks.as_strided(start, (batch, *spec.layout.shape), strides)
        self.address: int = start.ctypes.data if xp is np else start.data.ptr

    def fill(self, data: Data, number: int, seed: int) -> None:
        """Fills the memory from end to end, margin and gaps included.

        A mask's bits are all set where the data is ones, and random otherwise.

        Args:
            number: of the operand; other numbers get other values.
            seed: of the set of operands; see `_STEP`.
        """
        values = np.roll(_drawn(data, self._dtype, number, self._scale), _STEP * seed)
        self._periods[...] = self._xp.asarray(values)

    def poison(self) -> None:
        """Sets every bit, which makes every float NaN."""
        self.flat.view("uint8").fill(0xFF)

    def values(self, rows: slice = slice(None)) -> Any:
        """Rows of the matrices in float64, (batch, rows, cols); a mask's bytes."""
        bits = self.bits[:, rows]
        if self._dtype is DType.BFLOAT16:  # CuPy does not know the type: its bits are the upper half of FP32's.
            bits = (bits.astype("uint32") << 16).view("float32")
        elif self._dtype is not None:
            bits = bits.view(self._dtype.value)
        return bits.astype("float64")


def _in_bytes(mask: Spec) -> Spec:
    """How a mask lies, counted in bytes."""
    layout = mask.layout
    lines, bits = layout.shape if layout.order is Order.ROW else (layout.cols, layout.rows)
    in_bytes = Layout(lines, -(-bits // _BITS), Order.ROW, layout.leading_dimension // _BITS)
    return Spec(in_bytes, mask.alignment, mask.batch_stride // _BITS)


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
        return sum(buffer.flat.nbytes for buffer in self.buffers.values())

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
        xp: CuPy, with the device and the stream current that everything is to happen on; or NumPy.
        problem: none of its extents is 0.

    Attributes:
        has_mask: whether the auxiliary matrix is ReLU's, with a bit for each element.
    """

    def __init__(self, xp: Any, problem: MatmulProblem) -> None:
        super().__init__()
        self.xp, self.problem = xp, problem
        epilogue, placed = problem.epilogue, operands_of(problem)
        for name, (spec, dtype) in placed.items():
            self.buffers[name] = Buffer(xp, spec, dtype, 1 if name == "vector" else problem.batch)
        self.has_mask = "aux" in placed and epilogue.activation == "relu"
        self._one = xp.ones(1, "float64" if problem.compute is Compute.FLOAT64 else "float32")
        written = {"d": True, "vector": epilogue.has_bias_gradient, "aux": epilogue.has_aux_output}
        self.outputs = [name for name, is_output in written.items() if is_output]

    def snapshot(self) -> list[Any]:
        """Copies of the outputs' bits."""
        return [self.buffers[name].flat.copy() for name in self.outputs]

    def same_as(self, snapshot: list[Any]) -> bool:
        """Whether the outputs are what they were, bit for bit."""
        now = [self.buffers[name].flat for name in self.outputs]
        return all(bool((flat == before).all()) for flat, before in zip(now, snapshot, strict=True))

    def wrote_outside(self) -> bool:
        """Whether the product, whose results are all numbers, has written between or behind the rows of D."""
        d = self.buffers["d"]
        poisoned = int((~d.flat == 0).sum())
        return poisoned != int(d.flat.size - d.bits.size)

    def call(self, stream: int) -> Call:
        """A run on these operands, α and β being 1."""
        addresses = (self.buffers[name].address if name in self.buffers else 0 for name in self.problem.operands)
        one: Any = 1.0
        if self.problem.device_scalars:
            one = int(self._one.ctypes.data if self.xp is np else self._one.data.ptr)
        return Call(tuple(addresses), stream, (one, one if self.problem.c is not None else 0.0))

    def read(self, name: str, rows: slice = slice(None)) -> Any:
        """Rows of an operand's matrices in float64, (batch, rows, cols); a mask's bits as 0 and 1."""
        if name != "aux" or not self.has_mask:
            return self.buffers[name].values(rows)
        mask = self.buffers[name].bits
        lines = ((mask[..., None] >> self.xp.arange(_BITS, dtype="uint8")) & 1).reshape(*mask.shape[:2], -1)
        flipped = self.problem.d.layout.order is Order.COLUMN
        positive = lines[..., : self.problem.m if flipped else self.problem.n]
        return (positive.swapaxes(-1, -2) if flipped else positive)[:, rows].astype("float64")
