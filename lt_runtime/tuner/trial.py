"""A matrix product's operands in memory of their own, laid out as the problem says, filled with data to try it on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

_BOUNDARY: Final = 256
_MARGIN: Final = 4096
_PERIOD: Final = 65521  # a prime, so that no leading dimension brings the same elements round
_STEP: Final = 7919  # values from one set of operands to the next, which has the same ones at other places
_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Data:
    """Values for operands.

    Attributes:
        name: for messages.
        draw: a number of them for a type, which they are then rounded to.
        exact_to: the largest K for which FP32 holds every product and every partial sum exactly; 0 if there is none.
    """

    name: str
    draw: Callable[[np.random.Generator, int, DType], NDArray[Any]]
    exact_to: int


def _normal(generator: np.random.Generator, size: int, _: DType) -> NDArray[Any]:
    return generator.standard_normal(size)


def _lattice(generator: np.random.Generator, size: int, _: DType) -> NDArray[Any]:
    return generator.integers(-16, 17, size) / 8


def _ones(_: np.random.Generator, size: int, __: DType) -> NDArray[Any]:
    return np.ones(size)


def _between(generator: np.random.Generator, size: int, _: DType) -> NDArray[Any]:
    return (2 * generator.integers(-128, 128, size) + 1) / 128


def _edges(generator: np.random.Generator, size: int, dtype: DType) -> NDArray[Any]:
    # FP16's is subnormal. Others' are far from it, as CuPy's kernels, and so the reference, take such numbers for 0.
    tiny = 2.0**-20 if dtype is DType.FLOAT16 else 2.0**-100
    large = 16.0 if dtype is DType.FLOAT16 else 64.0  # no product leaves the type's range
    scales = generator.choice(np.array([0.0, tiny, 2.0**-10, 1.0, large]), size, p=[0.1, 0.05, 0.2, 0.6, 0.05])
    values: NDArray[Any] = generator.standard_normal(size) * scales
    return values


NORMAL: Final = Data("normally distributed data", _normal, 0)
LATTICE: Final = Data("multiples of 1/8", _lattice, 60000)
BETWEEN: Final = Data("odd multiples of 1/128", _between, 0)
"""No sum of products of `LATTICE` is one. BF16 has them exactly, and such sums of up to twice their size as well."""
EDGES: Final = Data("zeros, tiny and large values", _edges, 0)
ONES: Final = Data("ones", _ones, 2**24 - 2)


def values_for(data: Data, dtype: DType, operand: int, seed: int, scale: float = 1.0) -> NDArray[Any]:
    """Values for `Buffer.fill`, drawn once for each operand of a number; a seed only moves them on."""
    return np.roll(_drawn(data, dtype, operand, scale), _STEP * seed)


def mask_for(data: Data, operand: int, seed: int) -> NDArray[Any]:
    """The same for a mask, whose bits are set where the data is ones, and random otherwise."""
    return np.roll(_drawn_bytes(data is ONES, operand), _STEP * seed)


@functools.lru_cache(maxsize=128)
def _drawn(data: Data, dtype: DType, operand: int, scale: float) -> NDArray[Any]:
    values = scale * data.draw(np.random.default_rng(operand), _PERIOD, dtype)
    return values.astype(dtype.numpy).view(f"uint{_BITS * dtype.itemsize}")


@functools.lru_cache(maxsize=8)
def _drawn_bytes(all_set: bool, operand: int) -> NDArray[Any]:
    values = np.full(_PERIOD, 0xFF) if all_set else np.random.default_rng(operand).integers(0, 256, _PERIOD)
    return values.astype(np.uint8)


class Buffer:
    """Memory for one operand and a margin behind it.

    Args:
        xp: CuPy, or NumPy.
        spec: how the operand lies in it; its address is a multiple of the alignment and of no more than that.
        itemsize: bytes an element.
        batch: number of matrices.

    Attributes:
        flat: all of it, unsigned integers of the elements' size.
        bits: the matrices, (batch, rows, cols).
    """

    def __init__(self, xp: Any, spec: Spec, itemsize: int, batch: int) -> None:
        self._xp, self._itemsize = xp, itemsize
        offset = spec.alignment % _BOUNDARY // itemsize
        size = offset + (batch - 1) * spec.batch_stride + spec.layout.extent + _MARGIN
        self.flat = xp.empty(size, f"uint{_BITS * itemsize}")
        strides = [itemsize * stride for stride in (spec.batch_stride, *spec.layout.strides)]
        start = self.flat[offset:]
        self.bits = xp.lib.stride_tricks.as_strided(start, (batch, *spec.layout.shape), strides)
        self.address: int = start.ctypes.data if xp is np else start.data.ptr

    def fill(self, values: NDArray[Any]) -> None:
        """Repeats unsigned values on the host, of the elements' size, from end to end, margin and gaps included."""
        flat, count = self.flat, min(values.size, self.flat.size)
        flat[:count] = self._xp.asarray(values[:count])
        while count < flat.size:
            step = min(count, flat.size - count)
            flat[count : count + step] = flat[:step]
            count += step

    def poison(self) -> None:
        """Sets every bit: NaN, if they are floats."""
        self.flat.view("uint8").fill(0xFF)

    def untouched(self) -> int:
        """How many elements are still as `poison` left them."""
        return int((self.flat.view(f"int{_BITS * self._itemsize}") == -1).sum())


class Trial:
    """All operands of one product: read, written and judged as a whole.

    Args:
        xp: CuPy with the device and the stream current that everything is to happen on; or NumPy.
        problem: none of its extents is 0.

    Attributes:
        outputs: names of what the product writes: "d", and "aux" or "vector" where the epilogue has them.
        has_mask: whether the auxiliary matrix is ReLU's, a bit an element.
    """

    def __init__(self, xp: Any, problem: MatmulProblem) -> None:
        self.xp, self.problem = xp, problem
        epilogue, result = problem.epilogue, problem.d_dtype.itemsize
        self._buffers = {
            "a": Buffer(xp, problem.a, problem.dtype.itemsize, problem.batch),
            "b": Buffer(xp, problem.b, problem.dtype.itemsize, problem.batch),
            "d": Buffer(xp, problem.d, result, problem.batch),
        }
        if problem.c is not None:
            self._buffers["c"] = Buffer(xp, problem.c, result, problem.batch)
        if epilogue.has_bias or epilogue.has_bias_gradient:
            length = problem.m if epilogue is Epilogue.BGRADA else problem.n
            self._buffers["vector"] = Buffer(xp, Spec(packed(1, length), problem.vector), result, 1)
        self.has_mask = problem.aux is not None and epilogue.activation == "relu"
        if problem.aux is not None:
            spec, itemsize = (mask_in_bytes(problem.aux), 1) if self.has_mask else (problem.aux, result)
            self._buffers["aux"] = Buffer(xp, spec, itemsize, problem.batch)
        self._scalar = xp.ones(1, "float64" if problem.compute is Compute.FLOAT64 else "float32")
        written = {"d": True, "vector": epilogue.has_bias_gradient, "aux": epilogue.has_aux_output}
        self.outputs = tuple(name for name, is_output in written.items() if is_output)

    @property
    def size(self) -> int:
        """Bytes of all that a launch reads or writes."""
        return sum(buffer.flat.nbytes for buffer in self._buffers.values())

    def fill(self, data: Data, seed: int) -> None:
        """Puts data into every operand that the product reads."""
        for number, (name, buffer) in enumerate(self._buffers.items()):
            if name in self.outputs:
                continue
            is_mask = name == "aux" and self.has_mask
            buffer.fill(mask_for(data, number, seed) if is_mask else values_for(data, self._dtype(name), number, seed))

    def poison(self) -> None:
        """Fills every output with NaN, so that what is not written shows."""
        for name in self.outputs:
            self._buffers[name].poison()

    def snapshot(self) -> list[Any]:
        """Copies of the outputs' bits."""
        return [self._buffers[name].flat.copy() for name in self.outputs]

    def same_as(self, snapshot: list[Any]) -> bool:
        """Whether the outputs are what they were, bit for bit."""
        now = [self._buffers[name].flat for name in self.outputs]
        return all(bool((flat == before).all()) for flat, before in zip(now, snapshot, strict=True))

    def wrote_outside(self) -> bool:
        """Whether the product, all of whose results are numbers, has written between or behind the rows of D."""
        d = self._buffers["d"]
        return d.untouched() != int(d.flat.size - d.bits.size)

    def call(self, stream: int) -> Call:
        """A launch on these operands, α and β being 1."""
        at = {name: buffer.address for name, buffer in self._buffers.items()}
        one = self._scalar_address() if self.problem.device_scalars else 1.0
        beta = one if self.problem.c is not None else 0.0
        vector, aux = at.get("vector", 0), at.get("aux", 0)
        return Call((at["a"], at["b"], at.get("c", 0), vector, aux, at["d"]), stream, (one, beta))

    def read(self, name: str, rows: slice = slice(None)) -> Any:
        """Rows of an operand's matrices in float64, (batch, rows, cols); a mask's bits as 0 and 1."""
        bits = self._buffers[name].bits
        if name == "aux" and self.has_mask:
            return self._unpack(bits)[:, rows].astype("float64")
        return decode(bits[:, rows], self._dtype(name)).astype("float64")

    def _dtype(self, name: str) -> DType:
        return self.problem.dtype if name in ("a", "b") else self.problem.d_dtype

    def _unpack(self, mask: Any) -> Any:
        bits = (mask[..., None] >> self.xp.arange(_BITS, dtype="uint8")) & 1
        lines = bits.reshape(*mask.shape[:2], -1)
        flipped = self.problem.d.layout.order is Order.COLUMN
        positive = lines[..., : self.problem.m if flipped else self.problem.n]
        return positive.swapaxes(-1, -2) if flipped else positive

    def _scalar_address(self) -> int:
        scalar = self._scalar
        return int(scalar.ctypes.data if self.xp is np else scalar.data.ptr)


def mask_in_bytes(aux: Spec) -> Spec:
    """How a mask lies in bytes, from how it lies in bits."""
    layout = aux.layout
    lines, bits = layout.shape if layout.order is Order.ROW else (layout.cols, layout.rows)
    in_bytes = Layout(lines, -(-bits // _BITS), Order.ROW, layout.leading_dimension // _BITS)
    return Spec(in_bytes, aux.alignment, aux.batch_stride // _BITS)


def decode(bits: Any, dtype: DType) -> Any:
    """The floats that bits stand for; BF16 as FP32, for not every NumPy-like library knows it."""
    if dtype is DType.BFLOAT16:
        return (bits.astype("uint32") << 16).view("float32")
    return bits.view(dtype.value)
