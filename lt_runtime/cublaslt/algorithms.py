"""Algorithms: found by the heuristic or made by hand, looked into, changed, checked."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, replace
from typing import Final, Self

from lt_runtime.cublaslt.attribute_ids import AlgoCapAttribute, AlgoConfigAttribute
from lt_runtime.cublaslt.attributes import ALGO_CAP, ALGO_CONFIG, ARRAYS
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatmulPreference, MatrixLayout
from lt_runtime.cublaslt.enums import ComputeType, DataType, Status
from lt_runtime.cublaslt.handles import Handle, pointer
from lt_runtime.cublaslt.library import (
    attribute_failure,
    call,
    failure,
    function,
    get_version,
    library_path,
    version_text,
)
from lt_runtime.cublaslt.validation import validate
from lt_runtime.errors import AbiError, ArgumentError

_ALGO_BYTES: Final = 64
_CAP, _CONFIG = "cublasLtMatmulAlgoCapGetAttribute", "cublasLtMatmulAlgoConfig"
_LISTED: Final = {
    AlgoConfigAttribute.TILE_ID: AlgoCapAttribute.TILE_IDS,
    AlgoConfigAttribute.STAGES_ID: AlgoCapAttribute.STAGES_IDS,
}


class _HeuristicResult(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`, 96 bytes."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * (_ALGO_BYTES // 8)),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one matrix product. Never changed: `set` gives another.

    Attributes:
        blob: the 64 opaque bytes of `cublasLtMatmulAlgo_t`, good for one version of the library.
        workspace_size: bytes of workspace it needs; 0 until the heuristic or `algo_check` has told.
        waves_count: how many times it fills the GPU; 1.0 is one full wave, 0.0 is not known.
    """

    blob: bytes
    workspace_size: int = 0
    waves_count: float = 0.0

    def __post_init__(self) -> None:
        if len(self.blob) != _ALGO_BYTES:
            raise ArgumentError(f"blob has {len(self.blob)} bytes; an algorithm has {_ALGO_BYTES}")

    def get(self, attribute: AlgoConfigAttribute) -> int:
        """Reads one part of the configuration."""
        known = ALGO_CONFIG[attribute]
        cell, written = ctypes.create_string_buffer(known.size), ctypes.c_size_t()
        call(f"{_CONFIG}GetAttribute", self.blob, attribute, cell, known.size, ctypes.byref(written))
        value: int = known.unpack(cell.raw)
        return value

    def set(self, attribute: AlgoConfigAttribute, value: int) -> Self:
        """An algorithm with one part of the configuration changed, what it needs not known.

        Whether the algorithm can do that, and the GPU, `algo_check` says.

        Raises:
            ArgumentError: the value is not accepted. A tile or stages that these bindings do not know is, if the
                algorithm lists it as one of its capabilities.
        """
        known = ALGO_CONFIG[attribute]
        if attribute in _LISTED and not known.accepted.allows(value) and value in self.capabilities(_LISTED[attribute]):
            packed = value.to_bytes(known.size, "little")
        else:
            packed = known.pack(attribute, value)
        blob = ctypes.create_string_buffer(self.blob, _ALGO_BYTES)
        call(f"{_CONFIG}SetAttribute", blob, attribute, packed, len(packed))
        return replace(self, blob=blob.raw, workspace_size=0, waves_count=0.0)

    def capability(self, attribute: AlgoCapAttribute) -> int:
        """Reads one capability; TILE_IDS and STAGES_IDS are for `capabilities`.

        Raises:
            AbiError: the library has another width for it than these bindings.
        """
        if attribute in ARRAYS:
            raise ArgumentError(f"AlgoCapAttribute.{attribute.name} has many values; use capabilities()")
        (value,) = self._read(attribute)
        return value

    def capabilities(self, attribute: AlgoCapAttribute) -> tuple[int, ...]:
        """Reads TILE_IDS or STAGES_IDS: the members of `MatmulTile` or `MatmulStages` that the algorithm can use.

        Raises:
            AbiError: the library has another width for it than these bindings.
        """
        if attribute not in ARRAYS:
            raise ArgumentError(f"AlgoCapAttribute.{attribute.name} has one value; use capability()")
        return self._read(attribute)

    def _read(self, attribute: AlgoCapAttribute) -> tuple[int, ...]:
        known = ALGO_CAP[attribute]
        size, written = ctypes.c_size_t(), ctypes.c_size_t()
        status = function(_CAP)(self.blob, attribute, None, 0, ctypes.byref(size))
        if status:
            raise attribute_failure(_CAP, status, attribute, known.since)
        if size.value % known.size or (attribute not in ARRAYS and size.value != known.size):
            raise AbiError(
                f"AlgoCapAttribute.{attribute.name} has {known.size} bytes here and {size.value} in cuBLASLt "
                f"{version_text(get_version())} ({library_path()})"
            )
        if not size.value:
            return ()
        cell = ctypes.create_string_buffer(size.value)
        call(_CAP, self.blob, attribute, cell, size.value, ctypes.byref(written))
        starts = range(0, min(written.value, size.value), known.size)
        return tuple(known.unpack(cell.raw[start : start + known.size]) for start in starts)


def get_heuristics(
    handle: Handle | int,
    desc: MatmulDesc,
    a: MatrixLayout,
    b: MatrixLayout,
    c: MatrixLayout,
    d: MatrixLayout,
    preference: MatmulPreference,
    count: int,
    *,
    like: Algorithm | None = None,
    stream: int | None = None,
) -> list[Algorithm]:
    """At most `count` algorithms for a product, the most promising first; none where the library supports none.

    The heuristic looks at the values of the bias and aux pointers: set them first, or stand-ins of their alignment.

    Args:
        handle: see `handle`.
        desc: the product.
        a, b, c, d: layouts; `c` is `d` where there is no C.
        preference: what to choose from.
        count: how many are wanted, at least 1.
        like: one whose id is the only one wanted, with the search mode LIMITED_BY_ALGO_ID.
        stream: ask for the context of this stream, if it restricts what can run; from 13.5 on.

    Raises:
        ArgumentError, ShapeError, DTypeError: see `validate`.
        CublasLtError: the query failed.
    """
    if not 1 <= count < 2**31:
        raise ArgumentError(f"count is {count}; accepted: 1 or more")
    validate(desc, a, b, c, d)
    results, returned = (_HeuristicResult * count)(), ctypes.c_int()
    if like is not None:
        for result in results:
            result.algo[:] = _words(like.blob)
    problem = (pointer(handle), desc.handle, a.handle, b.handle, c.handle, d.handle)
    query = (preference.handle, count, ctypes.byref(results), ctypes.byref(returned))
    name, more = _for_stream("cublasLtMatmulAlgoGetHeuristic", stream)
    status = function(name)(*problem, *query, *more)
    if status == Status.NOT_SUPPORTED:
        return []
    if status:
        raise failure(name, status)
    return [
        Algorithm(bytes(result.algo), result.workspace_size, result.waves_count)
        for result in results[: returned.value]
        if result.state == Status.SUCCESS
    ]


def algo_check(
    handle: Handle | int,
    desc: MatmulDesc,
    a: MatrixLayout,
    b: MatrixLayout,
    c: MatrixLayout,
    d: MatrixLayout,
    algorithm: Algorithm,
    *,
    stream: int | None = None,
) -> Algorithm:
    """The same algorithm with what it needs for a product; the arguments are those of `get_heuristics`.

    That it passes does not prove that a launch will succeed.

    Raises:
        CublasLtError: it cannot do the product: INVALID_VALUE, NOT_SUPPORTED or ARCH_MISMATCH.
    """
    validate(desc, a, b, c, d)
    result = _HeuristicResult()
    problem = (pointer(handle), desc.handle, a.handle, b.handle, c.handle, d.handle)
    name, more = _for_stream("cublasLtMatmulAlgoCheck", stream)
    call(name, *problem, algorithm.blob, ctypes.byref(result), *more)
    if result.state:
        raise failure(name, result.state)
    return replace(algorithm, workspace_size=result.workspace_size, waves_count=result.waves_count)


def algo_get_ids(
    handle: Handle | int,
    compute_type: ComputeType,
    scale_type: DataType,
    a: DataType,
    b: DataType,
    c: DataType,
    d: DataType,
    count: int = 1024,
) -> list[int]:
    """Ids of at most `count` algorithms that may run for these types.

    Raises:
        CublasLtError: the query failed.
    """
    if not 1 <= count < 2**31:
        raise ArgumentError(f"count is {count}; accepted: 1 or more")
    ids, returned = (ctypes.c_int * count)(), ctypes.c_int()
    types = (compute_type, scale_type, a, b, c, d)
    call("cublasLtMatmulAlgoGetIds", pointer(handle), *types, count, ctypes.byref(ids), ctypes.byref(returned))
    return ids[: returned.value]


def algo_init(
    handle: Handle | int,
    compute_type: ComputeType,
    scale_type: DataType,
    a: DataType,
    b: DataType,
    c: DataType,
    d: DataType,
    algo_id: int,
) -> Algorithm:
    """The algorithm with an id, its configuration all defaults.

    Raises:
        CublasLtError: there is none with this id, or not for these types.
    """
    blob = ctypes.create_string_buffer(_ALGO_BYTES)
    call("cublasLtMatmulAlgoInit", pointer(handle), compute_type, scale_type, a, b, c, d, algo_id, blob)
    return Algorithm(blob.raw)


def _for_stream(name: str, stream: int | None) -> tuple[str, tuple[int, ...]]:
    return (name, ()) if stream is None else (f"{name}ForStream", (stream,))


def _words(blob: bytes) -> list[int]:
    return list(struct.unpack("8Q", blob))
