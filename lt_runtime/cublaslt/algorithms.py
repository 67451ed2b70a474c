"""Algorithms of cuBLASLt: queries that return them, their configuration and capabilities, and `algo_check`."""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass, replace
from typing import Self

from lt_runtime.cublaslt import library
from lt_runtime.cublaslt.attributes import ARRAYS, AlgoCapAttribute, AlgoConfigAttribute
from lt_runtime.cublaslt.descriptors import MatmulDesc, MatmulPreference, MatrixLayout
from lt_runtime.cublaslt.enums import ComputeType, DataType, Status, tile_shape
from lt_runtime.cublaslt.library import ALGO_BYTES, Handle, pointer
from lt_runtime.cublaslt.validation import validate
from lt_runtime.errors import ArgumentError, CublasLtError

_CAP, _CONFIG = "cublasLtMatmulAlgoCapGetAttribute", "cublasLtMatmulAlgoConfig"
Types = tuple[ComputeType, DataType, DataType, DataType, DataType, DataType]
"""The compute type, the scale type, and the types of A, B, C and D."""


class _HeuristicResult(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`, 96 bytes."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * (ALGO_BYTES // 8)),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one matrix product. An `Algorithm` is immutable: `set` returns a new one.

    Attributes:
        blob: the 64 opaque bytes of `cublasLtMatmulAlgo_t`, valid for one version of the library.
        workspace_size: bytes of workspace that the algorithm needs; 0 until the heuristic or `algo_check` has set it.
        waves_count: how many times the algorithm's blocks fill the GPU; 1.0 is one full wave, 0.0 is unknown.
    """

    blob: bytes
    workspace_size: int = 0
    waves_count: float = 0.0

    def __post_init__(self) -> None:
        if len(self.blob) != ALGO_BYTES:
            raise ArgumentError(f"blob has {len(self.blob)} bytes; an algorithm has {ALGO_BYTES}")

    def get(self, attribute: AlgoConfigAttribute) -> int:
        """Reads one attribute of the configuration."""
        value: int = attribute.unpack(library.read_bytes(f"{_CONFIG}GetAttribute", self.blob, attribute))
        return value

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of D that one block computes; None if the tile is not known."""
        raw = library.read_bytes(f"{_CONFIG}GetAttribute", self.blob, AlgoConfigAttribute.TILE_ID)
        # `get` would return a member of `MatmulTile`, and making that enum takes milliseconds.
        return tile_shape(int.from_bytes(raw, sys.byteorder))

    def set(self, attribute: AlgoConfigAttribute, value: int) -> Self:
        """A copy with one attribute of the configuration changed, and with unknown workspace size and waves.

        Only `algo_check` can tell whether the algorithm and the GPU support the new configuration.

        Raises:
            ArgumentError: the value is not accepted. A tile or a number of stages that these bindings do not know is
                accepted if the algorithm lists it among its capabilities.
        """
        # The capability of TILE_ID, for example, is TILE_IDS.
        listed = AlgoCapAttribute.__members__.get(f"{attribute.name}S")
        if listed and not attribute.accepted.allows(value) and value in self.capabilities(listed):
            packed = value.to_bytes(attribute.size, "little")
        else:
            packed = attribute.pack(value)
        blob = ctypes.create_string_buffer(self.blob, ALGO_BYTES)
        library.call(f"{_CONFIG}SetAttribute", blob, attribute, packed, len(packed))
        return replace(self, blob=blob.raw, workspace_size=0, waves_count=0.0)

    def capability(self, attribute: AlgoCapAttribute) -> int:
        """Reads one capability; for TILE_IDS and STAGES_IDS use `capabilities`.

        Raises:
            CublasLtError: cuBLASLt refused the query, for example because the algorithm's bytes are not from cuBLASLt.
        """
        if attribute in ARRAYS:
            raise ArgumentError(f"{attribute} has many values; use capabilities()")
        value: int = attribute.unpack(library.read_bytes(_CAP, self.blob, attribute))
        return value

    def capabilities(self, attribute: AlgoCapAttribute) -> tuple[int, ...]:
        """Reads TILE_IDS or STAGES_IDS: the members of `MatmulTile` or `MatmulStages` that the algorithm supports.

        Raises:
            CublasLtError: cuBLASLt refused the query, for example because the algorithm's bytes are not from cuBLASLt.
        """
        if attribute not in ARRAYS:
            raise ArgumentError(f"{attribute} has one value; use capability()")
        width, size, written = attribute.size, ctypes.c_size_t(), ctypes.c_size_t()
        library.call(_CAP, self.blob, attribute, None, 0, ctypes.byref(size), attribute=attribute)
        if not size.value:
            return ()
        cell = ctypes.create_string_buffer(size.value)
        library.call(_CAP, self.blob, attribute, cell, size.value, ctypes.byref(written))
        starts = range(0, min(written.value, size.value), width)
        return tuple(attribute.unpack(cell.raw[start : start + width]) for start in starts)


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
    """Returns at most `count` algorithms for a product, the most promising first; an empty list if none supports it.

    The heuristic reads the bias and aux pointers. Set them before, to the real addresses or to other addresses with
    the same alignment.

    Args:
        handle: see `handle`.
        desc: the product.
        a, b, c, d: the layouts; pass `d` for C where there is none.
        preference: the limits within which to choose.
        count: at least 1.
        like: an algorithm whose id all results shall have, with the search mode LIMITED_BY_ALGO_ID.
        stream: a stream whose context restricts what can run, such as one with fewer multiprocessors; needs 13.5.

    Raises:
        ArgumentError, ShapeError, DTypeError: see `validate`.
        CublasLtError: the query failed.
    """
    _check_count(count)
    validate(desc, a, b, c, d)
    results, returned = (_HeuristicResult * count)(), ctypes.c_int()
    if like is not None:
        for result in results:
            result.algo[:] = struct.unpack("8Q", like.blob)
    problem = _problem(handle, desc, a, b, c, d)
    query = (preference.handle, count, ctypes.byref(results), ctypes.byref(returned))
    name, more = _for_stream("cublasLtMatmulAlgoGetHeuristic", stream)
    status = library.function(name)(*problem, *query, *more)
    if status == Status.NOT_SUPPORTED:
        return []
    if status:
        raise library.failure(name, status)
    sound = [each for each in results[: returned.value] if each.state == Status.SUCCESS]
    return [Algorithm(bytes(each.algo), each.workspace_size, each.waves_count) for each in sound]


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
    """Checks an algorithm for a product, and returns it with its workspace size and waves for this product.

    An algorithm that passes may still fail at the launch. The arguments are those of `get_heuristics`.

    Raises:
        CublasLtError: the algorithm does not support the product, see `is_refusal`; or the call failed.
    """
    validate(desc, a, b, c, d)
    result = _HeuristicResult()
    name, more = _for_stream("cublasLtMatmulAlgoCheck", stream)
    library.call(name, *_problem(handle, desc, a, b, c, d), algorithm.blob, ctypes.byref(result), *more)
    if result.state:
        raise library.failure(name, result.state)
    return replace(algorithm, workspace_size=result.workspace_size, waves_count=result.waves_count)


def is_refusal(error: CublasLtError) -> bool:
    """Whether an error says that the algorithm does not support the product, so that a repeated call would fail too."""
    return error.status in (Status.INVALID_VALUE, Status.NOT_SUPPORTED, Status.ARCH_MISMATCH)


def algo_get_ids(handle: Handle | int, types: Types, count: int = 1024) -> list[int]:
    """The ids of at most `count` algorithms that may support products of the given types.

    Raises:
        CublasLtError: the query failed.
    """
    _check_count(count)
    ids, returned = (ctypes.c_int * count)(), ctypes.c_int()
    library.call("cublasLtMatmulAlgoGetIds", pointer(handle), *types, count, ctypes.byref(ids), ctypes.byref(returned))
    return ids[: returned.value]


def algo_init(handle: Handle | int, types: Types, algo_id: int) -> Algorithm:
    """The algorithm with an id, in its default configuration.

    Raises:
        CublasLtError: no algorithm has this id, or it does not support the types.
    """
    blob = ctypes.create_string_buffer(ALGO_BYTES)
    library.call("cublasLtMatmulAlgoInit", pointer(handle), *types, algo_id, blob)
    return Algorithm(blob.raw)


def _check_count(count: int) -> None:
    if not 1 <= count < 2**31:
        raise ArgumentError(f"count is {count}; accepted: 1 or more")


def _problem(handle: Handle | int, desc: MatmulDesc, *layouts: MatrixLayout) -> tuple[int, ...]:
    return (pointer(handle), desc.handle, *(layout.handle for layout in layouts))


def _for_stream(name: str, stream: int | None) -> tuple[str, tuple[int, ...]]:
    return (name, ()) if stream is None else (f"{name}ForStream", (stream,))
