"""Algorithms and the queries that give them; what needs a GPU is stood in for."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoCapAttribute, AlgoConfigAttribute, Algorithm, Status
from lt_runtime.cublaslt.algorithms import _HeuristicResult
from lt_runtime.cublaslt.attributes import ARRAYS
from lt_runtime.cublaslt.tiles import tile_shape
from lt_runtime.errors import ArgumentError, CublasLtError, MissingLibraryError, ShapeError
from tests.support.cublaslt_product import HANDLE, Product
from tests.support.cublaslt_recorder import Recorder, offers

CAP = "cublasLtMatmulAlgoCapGetAttribute"
TYPES = (cublaslt.ComputeType.COMPUTE_32F, *(cublaslt.DataType.R_32F,) * 5)


def ask(count: int = 8, **options: Any) -> list[Algorithm]:
    product = Product()
    with cublaslt.MatmulPreference() as preference:
        return cublaslt.get_heuristics(HANDLE, product.desc(), *product.layouts(), preference, count, **options)


def check(algorithm: Algorithm, **options: Any) -> Algorithm:
    product = Product()
    return cublaslt.algo_check(HANDLE, product.desc(), *product.layouts(), algorithm, **options)


def capabilities(values: dict[int, bytes]) -> Callable[..., int]:
    """A stand-in that tells the capabilities of an algorithm."""

    def get(_: Any, attribute: int, buffer: Any, size: int, written: Any) -> int:
        if attribute not in values:
            return int(Status.INVALID_VALUE)
        written._obj.value = len(values[attribute])
        if size == 0:
            return 0
        if size != len(values[attribute]):
            return int(Status.INVALID_VALUE)
        ctypes.memmove(buffer, values[attribute], len(values[attribute]))
        return 0

    return get


def test_the_structure_of_a_result() -> None:
    assert ctypes.sizeof(_HeuristicResult) == 96
    names = ("algo", "workspace_size", "state", "waves_count", "reserved")
    assert [getattr(_HeuristicResult, name).offset for name in names] == [0, 64, 72, 76, 80]


def test_an_algorithm_never_changes() -> None:
    first = Algorithm(bytes(64), workspace_size=5, waves_count=0.5)
    second = first.set(AlgoConfigAttribute.TILE_ID, cublaslt.MatmulTile.TILE_128x64)
    assert (first.get(AlgoConfigAttribute.TILE_ID), first.blob) == (cublaslt.MatmulTile.UNDEFINED, bytes(64))
    assert second.get(AlgoConfigAttribute.TILE_ID) is cublaslt.MatmulTile.TILE_128x64
    assert (second.workspace_size, second.waves_count) == (0, 0.0)
    assert len({first, second, Algorithm(bytes(64), 5, 0.5)}) == 2
    with pytest.raises(ArgumentError, match="blob has 63 bytes; an algorithm has 64"):
        Algorithm(bytes(63))


def test_shapes_of_tiles() -> None:
    assert tile_shape(cublaslt.MatmulTile.TILE_128x64) == (128, 64)
    assert [tile_shape(number) for number in (cublaslt.MatmulTile.UNDEFINED, 5000, -1)] == [None] * 3
    for tile in [*cublaslt.MatmulTile][1:]:
        shape = tile_shape(tile)
        assert shape is not None
        assert tile.name == "TILE_{}x{}".format(*shape)
    some = Algorithm(bytes(64)).set(AlgoConfigAttribute.TILE_ID, cublaslt.MatmulTile.TILE_64x512)
    assert (some.tile, Algorithm(bytes(64)).tile) == ((64, 512), None)


def test_a_tile_that_only_the_library_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {AlgoCapAttribute.TILE_IDS: struct.pack("3I", 15, 18, 5000)}
    Recorder.install(monkeypatch, {CAP: capabilities(listed)})
    newer = Algorithm(bytes(64)).set(AlgoConfigAttribute.TILE_ID, 5000)
    assert newer.get(AlgoConfigAttribute.TILE_ID) == 5000
    with pytest.raises(ArgumentError, match=r"AlgoConfigAttribute\.TILE_ID is 5001; accepted: one of MatmulTile"):
        Algorithm(bytes(64)).set(AlgoConfigAttribute.TILE_ID, 5001)


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        attribute: struct.pack(f"={attribute.code}", 3) for attribute in AlgoCapAttribute if attribute not in ARRAYS
    }
    values[AlgoCapAttribute.TILE_IDS] = struct.pack("3I", 15, 18, 5000)
    values[AlgoCapAttribute.STAGES_IDS] = b""
    Recorder.install(monkeypatch, {CAP: capabilities({int(key): value for key, value in values.items()})})
    algorithm = Algorithm(bytes(64))
    assert {algorithm.capability(attribute) for attribute in set(AlgoCapAttribute) - ARRAYS} == {3}
    assert algorithm.capability(AlgoCapAttribute.REDUCTION_SCHEME_MASK) == cublaslt.ReductionScheme(3)
    tiles = algorithm.capabilities(AlgoCapAttribute.TILE_IDS)
    assert tiles == (cublaslt.MatmulTile.TILE_64x64, cublaslt.MatmulTile.TILE_128x64, 5000)
    assert tiles[0] is cublaslt.MatmulTile.TILE_64x64
    assert algorithm.capabilities(AlgoCapAttribute.STAGES_IDS) == ()


def test_capabilities_asked_for_in_the_wrong_way() -> None:
    with pytest.raises(ArgumentError, match=r"AlgoCapAttribute\.TILE_IDS has many values; use capabilities"):
        Algorithm(bytes(64)).capability(AlgoCapAttribute.TILE_IDS)
    with pytest.raises(ArgumentError, match=r"AlgoCapAttribute\.LD_NEGATIVE has one value; use capability"):
        Algorithm(bytes(64)).capabilities(AlgoCapAttribute.LD_NEGATIVE)


def test_a_capability_of_no_algorithm() -> None:
    """The real library, which refuses a blob that it has not made."""
    with pytest.raises(CublasLtError, match=f"{CAP} returned CUBLAS_STATUS_INVALID_VALUE"):
        Algorithm(bytes(64)).capability(AlgoCapAttribute.SPLITK_SUPPORT)


def test_what_the_heuristic_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    query = offers(5, workspace_size=256, states={1: Status.NOT_SUPPORTED})
    Recorder.install(monkeypatch, {"cublasLtMatmulAlgoGetHeuristic": query})
    offered = ask()
    assert [each.blob[0] for each in offered] == [0, 2, 3, 4]
    assert {(each.workspace_size, each.waves_count) for each in offered} == {(256, 2.0)}
    assert len(ask(1)) == 1


def test_what_the_heuristic_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status.NOT_SUPPORTED
    Recorder.install(monkeypatch, {"cublasLtMatmulAlgoGetHeuristic": lambda *_: int(status)})
    assert ask() == []
    status = Status.INVALID_VALUE
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoGetHeuristic returned CUBLAS_STATUS_INVALID_VALUE"):
        ask()


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_counts(count: int) -> None:
    with pytest.raises(ArgumentError, match=f"count is {count}; accepted: 1 or more"):
        ask(count)
    with pytest.raises(ArgumentError, match=f"count is {count}; accepted: 1 or more"):
        cublaslt.algo_get_ids(HANDLE, TYPES, count=count)


def test_queries_check_the_product_first() -> None:
    product = Product(shapes=((64, 32), (31, 16), (64, 16), (64, 16)))
    with cublaslt.MatmulPreference() as preference, pytest.raises(ShapeError):
        cublaslt.get_heuristics(HANDLE, product.desc(), *product.layouts(), preference, 8)
    with pytest.raises(ShapeError):
        cublaslt.algo_check(HANDLE, product.desc(), *product.layouts(), Algorithm(bytes(64)))


def test_one_algorithm_alone_and_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def query(*arguments: Any) -> int:
        seen.append((bytes(arguments[8]._obj[0].algo), arguments[10:]))
        return offers(1)(*arguments)

    names = ("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoGetHeuristicForStream")
    recorder = Recorder.install(monkeypatch, dict.fromkeys(names, query))
    like = Algorithm(bytes(range(64)))
    ask(like=like)
    ask(stream=7)
    assert seen == [(like.blob, ()), (bytes(64), (7,))]
    assert [name for name in recorder.calls if name in names] == list(names)


@pytest.mark.parametrize("stream", [None, 7])
def test_the_check_tells_what_an_algorithm_needs(stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*arguments: Any) -> int:
        assert arguments[6] == bytes(64)
        assert arguments[8:] == ((7,) if stream else ())
        arguments[7]._obj.workspace_size, arguments[7]._obj.waves_count = 4096, 0.5
        return 0

    name = "cublasLtMatmulAlgoCheckForStream" if stream else "cublasLtMatmulAlgoCheck"
    Recorder.install(monkeypatch, {name: answer})
    assert check(Algorithm(bytes(64)), stream=stream) == Algorithm(bytes(64), 4096, 0.5)


def test_the_check_refuses_by_status_and_by_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_state(*arguments: Any) -> int:
        arguments[7]._obj.state = int(Status.ARCH_MISMATCH)
        return 0

    Recorder.install(monkeypatch, {"cublasLtMatmulAlgoCheck": lambda *_: int(Status.NOT_SUPPORTED)})
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoCheck returned CUBLAS_STATUS_NOT_SUPPORTED"):
        check(Algorithm(bytes(64)))
    Recorder.install(monkeypatch, {"cublasLtMatmulAlgoCheck": by_state})
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoCheck returned CUBLAS_STATUS_ARCH_MISMATCH"):
        check(Algorithm(bytes(64)))


def test_ids_and_algorithms_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(*arguments: Any) -> int:
        assert arguments[:8] == (HANDLE, *TYPES, 1024)
        arguments[8]._obj[:3], arguments[9]._obj.value = [0, 21, 66], 3
        return 0

    def init(*arguments: Any) -> int:
        assert arguments[:7] == (HANDLE, *TYPES)
        arguments[8][0] = arguments[7]
        return 0

    Recorder.install(monkeypatch, {"cublasLtMatmulAlgoGetIds": ids, "cublasLtMatmulAlgoInit": init})
    assert cublaslt.algo_get_ids(HANDLE, TYPES) == [0, 21, 66]
    assert cublaslt.algo_init(HANDLE, TYPES, 66) == Algorithm(bytes([66]) + bytes(63))


def test_an_older_library_knows_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch)

    def function(name: str) -> Any:
        if name.endswith("ForStream"):
            raise MissingLibraryError(name)
        return Recorder.function(recorder, name)

    monkeypatch.setattr(recorder, "function", function)
    with pytest.raises(MissingLibraryError, match="cublasLtMatmulAlgoCheckForStream"):
        check(Algorithm(bytes(64)), stream=7)
