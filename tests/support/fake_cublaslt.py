"""cuBLASLt on a pretended GPU: NumPy computes each product as the real library's descriptors describe it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import struct
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lt_runtime.cublaslt import (
    AlgoCapAttribute,
    BatchMode,
    ComputeType,
    DataType,
    Epilogue,
    MatmulDescAttribute,
    MatmulMatrixScale,
    MatrixLayoutAttribute,
    MatrixTransformDescAttribute,
    Operation,
    Order,
    PointerMode,
    PreferenceAttribute,
    Status,
)
from lt_runtime.cublaslt.attributes import Attribute
from tests.support.device_memory import DeviceMemory, matrix_at
from tests.support.fake_streams import KERNEL, Streams
from tests.support.races import Touch

_ID: Final = MatmulDescAttribute
TYPES: Final[Mapping[int, np.dtype[Any]]] = {
    DataType.R_32F: np.dtype(np.float32),
    DataType.R_64F: np.dtype(np.float64),
    DataType.R_16F: np.dtype(np.float16),
    DataType.R_16BF: np.dtype(ml_dtypes.bfloat16),
    DataType.R_8F_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DataType.R_8F_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
_FLOAT8: Final = (DataType.R_8F_E4M3, DataType.R_8F_E5M2)
_FLOAT8_UNIT: Final = 16
"""Sizes and leading dimensions of FP8 products are multiples of this many elements, addresses of this many bytes."""
_SCALES: Final = (_ID.A_SCALE_POINTER, _ID.B_SCALE_POINTER, _ID.D_SCALE_POINTER, _ID.AMAX_D_POINTER)
_COMPUTES: Final = {
    ComputeType.COMPUTE_32F: DataType.R_32F,
    ComputeType.COMPUTE_32F_FAST_TF32: DataType.R_32F,
    ComputeType.COMPUTE_64F: DataType.R_64F,
}
_WORKSPACE: Final = 8192  # bytes of workspace that a fake algorithm needs if the limit allows them
_WORKSPACE_ALIGNMENT: Final = 256
_RELU_AUX_BITS: Final = 128
_GELU_AUX_ELEMENTS: Final = 8
ALGORITHM_IDS: Final = (21, 22, 23)
_VECTORS: Final = 16
"""Bytes of a vector store of the algorithm that the pretended heuristic offers first. It imitates a fault of the real
library: the algorithm is offered where C's rows are aligned to the vector, even if D's rows are not."""
_SCRIBBLE: Final = 1 << 14  # size of the parts at both ends of the workspace that each product overwrites, in bytes

_BIAS: Final = frozenset(
    (Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS)
)
_AUX_OUT: Final = frozenset((Epilogue.RELU_AUX, Epilogue.RELU_AUX_BIAS, Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS))
_DERIVATIVES: Final = frozenset((Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD))
_GRADIENTS: Final = frozenset((Epilogue.DRELU_BGRAD, Epilogue.DGELU_BGRAD, Epilogue.BGRADA, Epilogue.BGRADB))


class LibraryMisuseError(AssertionError):
    """Raised for a call that the real library would answer with wrong results or a crash."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A `cublasLtMatrixLayout_t`: type, shape, order, leading dimension, batch."""

    dtype: int
    order: int
    rows: int
    cols: int
    leading: int
    batch: int
    stride: int

    @property
    def numpy(self) -> np.dtype[Any]:
        return TYPES[self.dtype]

    def takes_vectors(self, address: int = 0) -> bool:
        """Whether all rows, or columns, are aligned to 16 bytes if the first lies at `address`."""
        width = self.numpy.itemsize
        return all(each % _VECTORS == 0 for each in (address, self.leading * width, self.stride * width))

    def at(self, memory: DeviceMemory, address: int, name: str) -> NDArray[Any]:
        """Returns a view of the batch (batch, rows, cols) at an address."""
        inner = (1, self.leading) if self.order == Order.COL else (self.leading, 1)
        shape = (self.batch, self.rows, self.cols)
        return matrix_at(memory, address, self.numpy, shape, (self.stride, *inner), name)


@dataclasses.dataclass(frozen=True)
class Desc:
    """The attributes of a `cublasLtMatmulDesc_t` that describe the product, without addresses."""

    compute: int
    scale: int
    mode: int
    trans_a: int
    trans_b: int
    epilogue: int
    bias_dtype: int
    bias_stride: int
    aux_leading: int
    aux_stride: int
    aux_dtype: int = -1
    fast_accumulation: int = 0
    a_scale_mode: int = 0
    b_scale_mode: int = 0

    @property
    def has_scale_vectors(self) -> bool:
        return self.a_scale_mode == MatmulMatrixScale.OUTER_VEC_32F


_LAYOUT_SIZE: Final = 14 * 8
"""Bytes of cublasLtMatrixLayoutOpaque_t, which holds its attributes by value."""
_DESC_SIZE: Final = 32 * 8
"""Bytes of cublasLtMatmulDescOpaque_t, which holds its attributes by value."""
_LAYOUT: Final = [
    *(MatrixLayoutAttribute.TYPE, MatrixLayoutAttribute.ORDER, MatrixLayoutAttribute.ROWS, MatrixLayoutAttribute.COLS),
    *(MatrixLayoutAttribute.LD, MatrixLayoutAttribute.BATCH_COUNT, MatrixLayoutAttribute.STRIDED_BATCH_OFFSET),
]
_ALIGNMENTS: Final = [PreferenceAttribute[f"MIN_ALIGNMENT_{name}_BYTES"] for name in "ABCD"]
_DESC: Final = [
    *(_ID.COMPUTE_TYPE, _ID.SCALE_TYPE, _ID.POINTER_MODE, _ID.TRANSA, _ID.TRANSB, _ID.EPILOGUE, _ID.BIAS_DATA_TYPE),
    *(_ID.BIAS_BATCH_STRIDE, _ID.EPILOGUE_AUX_LD, _ID.EPILOGUE_AUX_BATCH_STRIDE),
    *(_ID.EPILOGUE_AUX_DATA_TYPE, _ID.FAST_ACCUM, _ID.A_SCALE_MODE, _ID.B_SCALE_MODE),
]
"""The attributes that are read for each call: those of a layout, in the order of `Layout`'s fields, once for each of A
to D; then those of the product's descriptor, in the order of `Desc`'s fields."""


class Matmul(NamedTuple):
    """One call of cublasLtMatmul, with all attributes read from its descriptors.

    Attributes:
        alpha, beta: numbers, or addresses where `desc.mode` says so.
        bias, aux: addresses; 0 where none is set.
        scales: addresses of the scales of A, B and D and of D's largest magnitude; 0 where none is set.
        algorithm: 64 bytes.
    """

    desc: Desc
    alpha: float
    a: int
    a_layout: Layout
    b: int
    b_layout: Layout
    beta: float
    c: int
    c_layout: Layout
    d: int
    d_layout: Layout
    bias: int
    aux: int
    scales: tuple[int, ...]
    algorithm: bytes
    workspace: int
    workspace_size: int
    stream: int

    @property
    def algorithm_id(self) -> int:
        """Returns the algorithm's id, which is in its first four bytes."""
        return int.from_bytes(self.algorithm[:4], "little")

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout, Layout]:
        return self.a_layout, self.b_layout, self.c_layout, self.d_layout


class FakeCublasLt:
    """The functions of cuBLASLt that need a GPU. All others, also those of descriptors, are the real library's.

    Attributes:
        calls: every matmul, in the order of the calls.
        refused: epilogues for which the heuristic offers no algorithm.
        fault: changes each matmul before it is done, to pretend that the program had made a wrong call.
    """

    def __init__(self, real: ctypes.CDLL, memory: DeviceMemory, streams: Streams) -> None:
        self._real, self._memory, self._streams = real, memory, streams
        self.calls: list[Matmul] = []
        self.refused: frozenset[int] = frozenset()
        self.fault: Callable[[Matmul], Matmul] = lambda call: call
        self._workspaces: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._layouts: dict[bytes, Layout] = {}
        self._descs: dict[bytes, tuple[Desc, int, int, tuple[int, ...]]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., int]]:
        """Returns the stand-in's functions by name."""
        return {
            "cublasLtCreate": self._create,
            "cublasLtDestroy": lambda _: 0,
            "cublasLtMatmulAlgoGetHeuristic": self._heuristic,
            "cublasLtMatmulAlgoGetIds": self._list,
            "cublasLtMatmulAlgoInit": self._init,
            "cublasLtMatmulAlgoCapGetAttribute": self._capability,
            "cublasLtMatmulAlgoCheck": self._check,
            "cublasLtMatmul": self._matmul,
            "cublasLtMatrixTransform": self._transform,
        }

    def _create(self, out: Any) -> int:
        ctypes.c_void_p.from_address(address_of(out)).value = 0xB1A5
        return 0

    # Descriptors

    def _get(self, owner: int, attribute: Attribute) -> int:
        """Reads an attribute of a descriptor; numbers are read as signed."""
        cell, written = (ctypes.c_uint8 * attribute.size)(), ctypes.c_size_t()
        kind = type(attribute).__name__.removesuffix("Attribute").replace("Preference", "MatmulPreference")
        arguments = ctypes.c_void_p(owner), ctypes.c_int(attribute), cell, ctypes.c_size_t(attribute.size)
        status = getattr(self._real, f"cublasLt{kind}GetAttribute")(*arguments, ctypes.byref(written))
        assert status == 0, f"{kind} has no attribute {attribute}"
        return int.from_bytes(bytes(cell), "little", signed=True)

    def layout(self, handle: int) -> Layout:
        """Reads the layout with this handle. Layouts are kept by the bytes of their descriptors, to read each once."""
        content = ctypes.string_at(handle, _LAYOUT_SIZE)
        if content not in self._layouts:
            if self._get(handle, MatrixLayoutAttribute.BATCH_MODE) != BatchMode.STRIDED:
                raise NotImplementedError("batches by pointers")
            self._layouts[content] = Layout(*(self._get(handle, attribute) for attribute in _LAYOUT))
        return self._layouts[content]

    def _describe(self, handle: int) -> tuple[Desc, int, int, tuple[int, ...]]:
        """Reads a descriptor: the product, and the addresses of the bias, the auxiliary tensor and the scales."""
        content = ctypes.string_at(handle, _DESC_SIZE)
        if content not in self._descs:
            assert not self._get(handle, _ID.C_SCALE_POINTER), "cuBLASLt hangs if the scale of C is 0 and beta is not"
            assert self._get(handle, _ID.TRANSC) == Operation.N
            desc = Desc(*(self._get(handle, attribute) for attribute in _DESC))
            addresses = self._get(handle, _ID.BIAS_POINTER), self._get(handle, _ID.EPILOGUE_AUX_POINTER)
            self._descs[content] = desc, *addresses, tuple(self._get(handle, each) for each in _SCALES)
        return self._descs[content]

    def supports(self, desc: Desc, layouts: Iterable[Layout]) -> bool:
        """Checks that the library supports a product at all, whatever the algorithm."""
        a, b, c, d = layouts
        if any(each.dtype not in TYPES for each in (a, b, c, d)) or desc.compute not in _COMPUTES:
            return False
        epilogue, is_double = desc.epilogue, d.dtype == DataType.R_64F
        swaps = {Epilogue.BGRADA: desc.trans_a != Operation.N, Epilogue.BGRADB: desc.trans_b != Operation.T}
        return (
            epilogue not in self.refused
            and not swaps.get(Epilogue(epilogue), False)
            and (_supports_float8(desc, *layouts) if a.dtype in _FLOAT8 else a.dtype == b.dtype and c.dtype == d.dtype)
            and desc.scale == _COMPUTES[ComputeType(desc.compute)]
            and is_double == (desc.compute == ComputeType.COMPUTE_64F)
            and (a.dtype == d.dtype or a.dtype in _FLOAT8 or (d.dtype == DataType.R_32F and not is_double))
            and (desc.compute != ComputeType.COMPUTE_32F_FAST_TF32 or a.dtype == DataType.R_32F)
            and (epilogue == Epilogue.DEFAULT or (not is_double and d.order == Order.COL))
            and self._fits(desc, a, b, c, d)
        )

    def _fits(self, desc: Desc, a: Layout, b: Layout, c: Layout, d: Layout) -> bool:
        m, k = (a.rows, a.cols) if desc.trans_a == Operation.N else (a.cols, a.rows)
        inner, n = (b.rows, b.cols) if desc.trans_b == Operation.N else (b.cols, b.rows)
        shapes_agree = inner == k and (m, n) == (d.rows, d.cols) == (c.rows, c.cols)
        return shapes_agree and a.batch == b.batch == c.batch == d.batch and 0 not in (m, n, k)

    # Algorithms

    def _heuristic(self, *arguments: Any) -> int:
        _, operation, *handles, preference, wanted, results, returned = arguments
        desc, layouts = self._product(operation, handles)
        offered: list[int] = []
        if self.supports(desc, layouts):
            needed = min(_WORKSPACE, self._get(address_of(preference), PreferenceAttribute.MAX_WORKSPACE_BYTES))
            promised = [self._get(address_of(preference), each) for each in _ALIGNMENTS]
            takes_vectors = layouts[2].takes_vectors(min(promised[2:]))
            offered = [each for each in ALGORITHM_IDS if takes_vectors or each != ALGORITHM_IDS[0]][:wanted]
            for index, number in enumerate(offered):
                blob = struct.pack("<I52xII", number, _pack_alignments(promised), _digest(desc, layouts))
                _write_result(address_of(results) + 96 * index, blob, needed)
        ctypes.c_int.from_address(address_of(returned)).value = len(offered)
        return 0 if offered else int(Status.NOT_SUPPORTED)

    def _product(self, operation: Any, handles: list[Any]) -> tuple[Desc, tuple[Layout, ...]]:
        desc, *_ = self._describe(address_of(operation))
        return desc, tuple(self.layout(address_of(handle)) for handle in handles)

    def _list(self, *arguments: Any) -> int:
        (ctypes.c_int * len(ALGORITHM_IDS)).from_address(address_of(arguments[8]))[:] = ALGORITHM_IDS
        ctypes.c_int.from_address(address_of(arguments[9])).value = len(ALGORITHM_IDS)
        return 0

    def _init(self, *arguments: Any) -> int:
        if arguments[7] not in ALGORITHM_IDS:
            return int(Status.NOT_SUPPORTED)
        ctypes.memmove(address_of(arguments[8]), struct.pack("<I60x", arguments[7]), 64)
        return 0

    def _check(self, *arguments: Any) -> int:
        _, operation, *handles, algorithm, result = arguments
        desc, layouts = self._product(operation, handles)
        blob = ctypes.string_at(address_of(algorithm), 64)
        number = int.from_bytes(blob[:4], "little")
        if not self.supports(desc, layouts) or (number == ALGORITHM_IDS[0] and not layouts[2].takes_vectors()):
            return int(Status.NOT_SUPPORTED)
        _write_result(address_of(result), blob, _WORKSPACE)
        return 0

    def _capability(self, *arguments: Any) -> int:
        algorithm, attribute, buffer, size, written = arguments
        if attribute != AlgoCapAttribute.MIN_ALIGNMENT_D_BYTES:
            return int(Status.NOT_SUPPORTED)
        number = ctypes.c_uint32.from_address(address_of(algorithm)).value
        ctypes.memmove(address_of(buffer), struct.pack("<I", _VECTORS if number == ALGORITHM_IDS[0] else 1), size)
        ctypes.c_size_t.from_address(address_of(written)).value = size
        return 0

    # Products

    def _matmul(self, *arguments: Any) -> int:
        call = self._read_matmul(arguments)
        if not self.supports(call.desc, call.layouts):
            return int(Status.NOT_SUPPORTED)
        capturing = call.stream in self._streams.captures
        if capturing and not any(map(self._memory.holds, (call.a, call.b, call.d))):
            # Rehearses a launch: captures it to see the nodes of its graph, with addresses that belong to no
            # allocation.
            self._streams.put(call.stream, KERNEL, "matmul", _never)
            return 0
        call = self.fault(call)
        self.calls.append(call)
        self._check_algorithm(call)
        self._check_workspace(call)
        work, touches = self._work(call)

        def run() -> None:
            self._check_owner(call.workspace, self._streams.running_on(call.stream), call.stream)
            work()

        name = "float8 matmul" if call.a_layout.dtype in _FLOAT8 else "matmul"
        self._streams.put(call.stream, KERNEL, name, run, lambda: touches)
        return 0

    def _read_matmul(self, arguments: tuple[Any, ...]) -> Matmul:
        _, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *rest = arguments
        workspace, size, stream = rest
        desc, bias, aux, scales = self._describe(address_of(operation))
        scalars = [self._scalar(desc, address_of(each)) for each in (alpha, beta)]
        layouts = [self.layout(address_of(each)) for each in (a_layout, b_layout, c_layout, d_layout)]
        assert algorithm is not None, "the library would ask its heuristic anew at each call"
        blob = ctypes.string_at(address_of(algorithm), 64)
        assert c != d or layouts[2] == layouts[3], "cuBLASLt refuses a C that is D with another layout"
        operands = (a, layouts[0], b, layouts[1], scalars[1], c, layouts[2], d, layouts[3])
        return Matmul(desc, scalars[0], *operands, bias, aux, scales, blob, workspace or 0, size, stream or 0)

    def _scalar(self, desc: Desc, address: int) -> float:
        """Reads alpha or beta.

        A number in host memory is read at the call; an address in device memory is read when the product runs.
        """
        if desc.mode == PointerMode.DEVICE:
            return address
        assert desc.mode == PointerMode.HOST
        return float((ctypes.c_double if desc.scale == DataType.R_64F else ctypes.c_float).from_address(address).value)

    def _check_algorithm(self, call: Matmul) -> None:
        """Fails unless an algorithm is used for the problem and the alignments for which the heuristic offered it."""
        number, promised, digest = struct.unpack("<I52xII", call.algorithm)
        if number not in ALGORITHM_IDS:
            raise LibraryMisuseError(f"the algorithm has id {number}, which the library never offered")
        if number == ALGORITHM_IDS[0] and not call.layouts[3].takes_vectors(call.d):
            raise LibraryMisuseError(f"a misaligned address: the algorithm stores vectors to D at {call.d:#x}")
        if not digest:
            return  # AlgoInit makes algorithms that may be used for any problem
        if digest != _digest(call.desc, call.layouts):
            raise LibraryMisuseError("the algorithm was offered for another problem")
        reads_c = call.desc.mode == PointerMode.DEVICE or call.beta != 0
        operands = zip("ABCD", (call.a, call.b, call.c, call.d), _unpack_alignments(promised), strict=True)
        for name, address, alignment in operands:
            if address % alignment and (name != "C" or reads_c):
                raise LibraryMisuseError(f"{name} is at {address:#x}, and {alignment} bytes' alignment was promised")

    def _check_workspace(self, call: Matmul) -> None:
        if call.workspace_size < _WORKSPACE or call.workspace % _WORKSPACE_ALIGNMENT:
            raise LibraryMisuseError(f"a workspace of {call.workspace_size} bytes at {call.workspace:#x} does not do")
        self._memory.view(call.workspace, call.workspace_size, "the workspace")
        capture = self._streams.captures.get(call.stream)
        if capture is not None and capture.workspaces.setdefault(call.workspace, call.stream) != call.stream:
            raise LibraryMisuseError(f"two branches of a graph share the workspace at {call.workspace:#x}")

    def _check_owner(self, workspace: int, stream: int, captured: int) -> None:
        """Checks that a workspace is used by one stream only.

        A product in a graph counts for the stream from which the graph was captured, any other for its own stream.
        """
        block = self._memory.block(workspace)
        if block is None:
            raise LibraryMisuseError(f"the workspace at {workspace:#x} was freed before the work was done")
        known, owner = self._workspaces.get(workspace, (None, stream))
        if known is None or known() is not block:
            self._workspaces[workspace], owner = (weakref.ref(block), stream), stream
        if owner not in (stream, captured):
            raise LibraryMisuseError(f"streams {owner:#x} and {stream:#x} share a workspace")

    def _work(self, call: Matmul) -> tuple[Callable[[], None], list[Touch]]:
        """Returns a function that computes the product, and the memory that it touches.

        The operands' allocations are looked up in this call. So an allocation that is freed before the function runs is
        still the one that the function reads.
        """
        memory, desc = self._memory, call.desc
        a, b, d = (
            layout.at(memory, address, name)
            for name, address, layout in (
                ("A", call.a, call.a_layout), ("B", call.b, call.b_layout), ("D", call.d, call.d_layout),
            )
        )  # fmt: skip
        reads_c = desc.mode == PointerMode.DEVICE or call.beta != 0
        c = call.c_layout.at(memory, call.c, "C") if reads_c else None
        alpha, beta = (self._reader(desc, value, name) for value, name in ((call.alpha, "α"), (call.beta, "β")))
        vector = self._vector(call)
        aux = self._aux(call)
        lengths = (d.shape[1], d.shape[2]) if desc.has_scale_vectors else (1, 1)
        sized = zip(call.scales, (*lengths, 1, 1), strict=True)
        *factors, amax = (self._scale(call, address, length) for address, length in sized)
        workspace = memory.view(call.workspace, call.workspace_size, "the workspace")

        def run() -> None:
            # The stand-in overwrites both ends of the workspace, since a real kernel may overwrite all of it.
            workspace[:_SCRIBBLE] = workspace[-_SCRIBBLE:] = 0xFF
            scale_a, scale_b, scale_d = (np.ones(1) if each is None else each.astype(np.float64) for each in factors)
            product = (
                scale_a[:, None]
                * scale_b
                * alpha()
                * (_operand(a, desc.trans_a, desc.compute) @ _operand(b, desc.trans_b, desc.compute))
            )
            if c is not None and (scale := beta()) != 0:
                product = product + scale * c.astype(np.float64)
            if c is not None and call.c == call.d and desc.epilogue == Epilogue.BIAS and d.itemsize == 2:
                product = product.astype(d.dtype).astype(np.float64)  # as cuBLASLt rounds it on an H200
            result = _finish(desc, product, vector, aux, (a, b))
            if amax is not None:
                amax[0] = np.abs(result).max()
            largest = float(ml_dtypes.finfo(d.dtype).max) if call.d_layout.dtype in _FLOAT8 else np.inf
            d[...] = np.clip(scale_d[0] * result, -largest, largest).astype(d.dtype)

        operands = {"A": a, "B": b, "C": c, "D": d, "the bias": vector, "aux": aux, "the workspace": workspace}
        operands |= {f"scale {number}": each for number, each in enumerate(factors)} | {"the amax": amax}
        written = {"D", "the workspace", "the amax"}
        written |= {"the bias"} if desc.epilogue in _GRADIENTS else set()
        written |= {"aux"} if desc.epilogue in _AUX_OUT else set()
        present = [(name, view) for name, view in operands.items() if view is not None]
        touches = [memory.touched_by(view, name, writes=name in written) for name, view in present]
        if desc.mode == PointerMode.DEVICE:
            touches += [memory.touched(int(each), 4, "a scalar", writes=False) for each in (call.alpha, call.beta)]
        return run, [*itertools.chain.from_iterable(touches)]

    def _reader(self, desc: Desc, value: float, name: str) -> Callable[[], float]:
        if desc.mode == PointerMode.HOST:
            return lambda: value
        cell = matrix_at(self._memory, int(value), TYPES[desc.scale], (1,), (1,), name)
        return lambda: float(cell[0])

    def _scale(self, call: Matmul, address: int, length: int) -> NDArray[Any] | None:
        if address % _FLOAT8_UNIT or (address and call.a_layout.dtype not in _FLOAT8) or (length > 1 and not address):
            raise LibraryMisuseError(f"a scale is at {address:#x}")
        return matrix_at(self._memory, address, np.dtype(np.float32), (length,), (1,), "a scale") if address else None

    def _vector(self, call: Matmul) -> NDArray[Any] | None:
        """Returns the bias, or the bias gradient, as (batch, length)."""
        desc, d = call.desc, call.d_layout
        if desc.epilogue not in _BIAS | _GRADIENTS:
            return None
        length = d.cols if desc.epilogue == Epilogue.BGRADB else d.rows
        dtype = TYPES[d.dtype if desc.bias_dtype == -1 else desc.bias_dtype]
        is_narrow = call.a_layout.dtype in _FLOAT8 and d.numpy.itemsize != 2
        if dtype != (TYPES[DataType.R_16BF] if is_narrow else d.numpy):
            raise LibraryMisuseError(f"the bias is {dtype}, D {d.numpy}")
        if desc.epilogue in _GRADIENTS and d.batch > 1 and desc.bias_stride == 0:
            raise LibraryMisuseError("the bias gradients of a batch are all written to one place")
        return matrix_at(self._memory, call.bias, dtype, (d.batch, length), (desc.bias_stride, 1), "the bias")

    def _aux(self, call: Matmul) -> NDArray[Any] | None:
        """Returns the auxiliary tensor as (batch, rows, cols), or ReLU's mask as (batch, bytes, cols)."""
        desc, d = call.desc, call.d_layout
        if desc.epilogue not in _AUX_OUT | _DERIVATIVES:
            return None
        is_mask = _is_relu(desc.epilogue)
        step = _RELU_AUX_BITS if is_mask else _GELU_AUX_ELEMENTS
        if desc.aux_leading % step or desc.aux_leading < d.rows:
            raise LibraryMisuseError(f"the auxiliary tensor's leading dimension is {desc.aux_leading}")
        if is_mask:
            shape, strides = (d.batch, -(-d.rows // 8), d.cols), (desc.aux_stride // 8, 1, desc.aux_leading // 8)
            return matrix_at(self._memory, call.aux, np.dtype(np.uint8), shape, strides, "the mask")
        shape, strides = (d.batch, d.rows, d.cols), (desc.aux_stride, 1, desc.aux_leading)
        dtype = d.numpy if desc.aux_dtype == -1 else TYPES[desc.aux_dtype]
        return matrix_at(self._memory, call.aux, dtype, shape, strides, "the auxiliary tensor")

    def _transform(self, *arguments: Any) -> int:
        _, operation, alpha, a, a_layout, _, b, _, c, c_layout, stream = arguments
        assert b is None, "a sum of two matrices is not interpreted"
        ids, handle = MatrixTransformDescAttribute, address_of(operation)
        scale, mode = self._get(handle, ids.SCALE_TYPE), self._get(handle, ids.POINTER_MODE)
        transposes = self._get(handle, ids.TRANSA) != Operation.N
        desc = Desc(0, scale, mode, 0, 0, 0, 0, 0, 0, 0)
        factor = self._reader(desc, self._scalar(desc, address_of(alpha)), "α")
        source = self.layout(address_of(a_layout)).at(self._memory, a, "A")
        target = self.layout(address_of(c_layout)).at(self._memory, c, "C")

        def run() -> None:
            values = source.swapaxes(1, 2) if transposes else source
            target[...] = (factor() * values.astype(np.float64)).astype(target.dtype)

        touches = self._memory.touched_by(source, "A", writes=False), self._memory.touched_by(target, "C", writes=True)
        self._streams.put(stream or 0, KERNEL, "transform", run, lambda: itertools.chain(*touches))
        return 0


def _supports_float8(desc: Desc, a: Layout, b: Layout, c: Layout, d: Layout) -> bool:
    """The rules of cuBLAS's documentation for FP8 on Ada and Hopper: types, orders, multiples of 16, epilogues."""
    aux_dtype = DataType.R_16BF if d.dtype in _FLOAT8 else d.dtype
    types = (
        b.dtype in _FLOAT8
        and (a.dtype, b.dtype) != (DataType.R_8F_E5M2, DataType.R_8F_E5M2)
        and (d.dtype != DataType.R_8F_E5M2 or DataType.R_8F_E5M2 in (a.dtype, b.dtype))
        and c.dtype == aux_dtype
        and (_is_relu(desc.epilogue) or desc.epilogue not in _AUX_OUT | _DERIVATIVES or desc.aux_dtype == aux_dtype)
    )
    along_k = (desc.trans_a, desc.trans_b, a.order, b.order) == (Operation.T, Operation.N, Order.COL, Order.COL)
    extents = (*(each for layout in (a, b, d) for each in (layout.rows, layout.cols, layout.leading)), c.leading)
    refused = _GRADIENTS | (_DERIVATIVES if d.dtype in _FLOAT8 else frozenset())
    return (
        types
        and along_k
        and not any(each % _FLOAT8_UNIT for each in extents)
        and desc.epilogue not in refused
        and desc.a_scale_mode == desc.b_scale_mode
        and (desc.a_scale_mode == MatmulMatrixScale.SCALAR_32F or _supports_vectors(desc, d))
    )


def _supports_vectors(desc: Desc, d: Layout) -> bool:
    """Whether a product may have vectors of scales, as cuBLAS's documentation says: it names only the default epilogue
    and the bias epilogue."""
    is_plain = desc.epilogue in (Epilogue.DEFAULT, Epilogue.BIAS) and d.batch == 1
    return desc.has_scale_vectors and d.dtype not in _FLOAT8 and is_plain


def address_of(argument: Any) -> int:
    """Returns the address that ctypes would pass for an argument."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return ctypes.addressof(getattr(argument, "_obj", argument))


def _write_result(address: int, blob: bytes, workspace: int) -> None:
    """Writes a `cublasLtMatmulHeuristicResult_t`."""
    ctypes.memmove(address, struct.pack("<64sQif16x", blob, workspace, 0, 1.0), 96)


def _never() -> None:
    raise AssertionError("a rehearsal was launched")


def _pack_alignments(alignments: Iterable[int]) -> int:
    return sum(min(256, each).bit_length() << 8 * index for index, each in enumerate(alignments))


def _unpack_alignments(packed: int) -> list[int]:
    return [1 << (packed >> 8 * index & 0xFF) - 1 for index in range(4)]


def _digest(desc: Desc, layouts: Iterable[Layout]) -> int:
    return zlib.crc32(repr((desc, tuple(layouts))).encode()) or 1


def _is_relu(epilogue: int) -> bool:
    return "RELU" in Epilogue(epilogue).name


def _operand(values: NDArray[Any], operation: int, compute: int) -> NDArray[np.float64]:
    if compute == ComputeType.COMPUTE_32F_FAST_TF32:
        values = _to_tf32(values)
    exact = values.astype(np.float64)
    return exact if operation == Operation.N else exact.swapaxes(1, 2)


def _to_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds to TF32: the nearest numbers with ten mantissa bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.astype(np.uint32).view(np.float32), values)


def _finish(
    desc: Desc,
    product: NDArray[np.float64],
    vector: NDArray[Any] | None,
    aux: NDArray[Any] | None,
    operands: tuple[NDArray[Any], NDArray[Any]],
) -> NDArray[np.float64]:
    """Computes the product: returns the values of D, and writes the auxiliary tensor and the bias gradient."""
    epilogue = Epilogue(desc.epilogue)
    if epilogue in _BIAS:
        assert vector is not None
        product = product + vector.astype(np.float64)[:, :, None]
    if epilogue in _AUX_OUT:
        assert aux is not None
        aux[...] = np.packbits(product >= 0, axis=1, bitorder="little") if _is_relu(epilogue) else product
    if epilogue in _DERIVATIVES:
        assert aux is not None
        product = product * _derivative(epilogue, aux, product.shape[1])
    elif "RELU" in epilogue.name:
        product = np.where(product > 0, product, 0.0)  # cuBLASLt's ReLU turns NaN into 0, and so does the stand-in's
    elif "GELU" in epilogue.name:
        product = product / 2 * (1 + np.tanh(_inner(product)))
    if epilogue in _GRADIENTS:
        assert vector is not None
        vector[...] = _gradient(epilogue, desc, product, operands)
    return product


def _gradient(
    epilogue: Epilogue, desc: Desc, product: NDArray[np.float64], operands: tuple[NDArray[Any], NDArray[Any]]
) -> NDArray[np.float64]:
    if epilogue is Epilogue.BGRADA:
        return _operand(operands[0], desc.trans_a, ComputeType.COMPUTE_32F).sum(axis=2)
    if epilogue is Epilogue.BGRADB:
        return _operand(operands[1], desc.trans_b, ComputeType.COMPUTE_32F).sum(axis=1)
    return product.sum(axis=2)


def _derivative(epilogue: Epilogue, aux: NDArray[Any], rows: int) -> NDArray[np.float64]:
    if _is_relu(epilogue):
        return np.unpackbits(aux, axis=1, count=rows, bitorder="little").astype(np.float64)
    z = aux.astype(np.float64)
    t = np.tanh(_inner(z))
    inner_slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)
    return 0.5 * (1 + t) + z / 2 * (1 - t**2) * inner_slope


def _inner(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
