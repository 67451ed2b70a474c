"""Algorithms and the queries that return them. Stand-ins replace the library's functions that need a GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoCapAttribute, AlgoConfigAttribute, Algorithm, Status
from lt_runtime.cublaslt.attributes import ARRAYS
from lt_runtime.cublaslt.enums import tile_shape
from lt_runtime.errors import ArgumentError, CublasLtError, ShapeError
from tests.support.cublaslt_product import HANDLE, Product
from tests.support.cublaslt_recorder import Recorder, offers

CAP, HEURISTIC, CHECK = "cublasLtMatmulAlgoCapGetAttribute", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck"
TYPES = (cublaslt.ComputeType.COMPUTE_32F, *(cublaslt.DataType.R_32F,) * 5)
BLANK = Algorithm(bytes(64))


def ask(count: int = 8, product: Product | None = None, **options: Any) -> list[Algorithm]:
    product = product or Product()
    with cublaslt.MatmulPreference() as preference:
        return cublaslt.get_heuristics(HANDLE, product.desc(), *product.layouts(), preference, count, **options)


def check(algorithm: Algorithm, product: Product | None = None, **options: Any) -> Algorithm:
    product = product or Product()
    return cublaslt.algo_check(HANDLE, product.desc(), *product.layouts(), algorithm, **options)


def capabilities(values: dict[AlgoCapAttribute, bytes]) -> Callable[..., int]:
    """A stand-in that reports these capabilities for every algorithm."""

    def get(_: Any, attribute: AlgoCapAttribute, buffer: Any, size: int, written: Any) -> int:
        written._obj.value = len(values[attribute])
        if size:
            assert size == len(values[attribute])
            ctypes.memmove(buffer, values[attribute], size)
        return 0

    return get


def test_an_algorithm_is_immutable() -> None:
    first = Algorithm(bytes(64), workspace_size=5, waves_count=0.5)
    second = first.set(AlgoConfigAttribute.TILE_ID, cublaslt.MatmulTile.TILE_128x64)
    assert (first.get(AlgoConfigAttribute.TILE_ID), first.blob) == (cublaslt.MatmulTile.UNDEFINED, bytes(64))
    assert second.get(AlgoConfigAttribute.TILE_ID) is cublaslt.MatmulTile.TILE_128x64
    assert (second.workspace_size, second.waves_count) == (0, 0.0)
    assert len({first, second, Algorithm(bytes(64), 5, 0.5)}) == 2
    with pytest.raises(ArgumentError, match="blob has 63 bytes; an algorithm has 64"):
        Algorithm(bytes(63))


def test_shapes_of_tiles() -> None:
    assert [tile_shape(number) for number in (cublaslt.MatmulTile.UNDEFINED, 5000, -1)] == [None] * 3
    tiles = [*cublaslt.MatmulTile][1:]
    assert ["TILE_{}x{}".format(*tile_shape(tile) or ()) for tile in tiles] == [tile.name for tile in tiles]
    some = BLANK.set(AlgoConfigAttribute.TILE_ID, cublaslt.MatmulTile.TILE_64x512)
    assert (some.tile, BLANK.tile) == ((64, 512), None)


def test_a_tile_that_only_the_library_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that the header does not name is accepted if it is among the algorithm's capabilities."""
    Recorder.install(monkeypatch, {CAP: capabilities({AlgoCapAttribute.TILE_IDS: struct.pack("3I", 15, 18, 5000)})})
    assert BLANK.set(AlgoConfigAttribute.TILE_ID, 5000).get(AlgoConfigAttribute.TILE_ID) == 5000
    with pytest.raises(ArgumentError, match=r"AlgoConfigAttribute\.TILE_ID is 5001; accepted: one of MatmulTile"):
        BLANK.set(AlgoConfigAttribute.TILE_ID, 5001)


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    single = set(AlgoCapAttribute) - ARRAYS
    values = {attribute: struct.pack(f"={attribute.code}", 3) for attribute in single}
    values |= {AlgoCapAttribute.TILE_IDS: struct.pack("3I", 15, 18, 5000), AlgoCapAttribute.STAGES_IDS: b""}
    Recorder.install(monkeypatch, {CAP: capabilities(values)})
    assert {BLANK.capability(attribute) for attribute in single} == {3}
    assert BLANK.capability(AlgoCapAttribute.REDUCTION_SCHEME_MASK) == cublaslt.ReductionScheme(3)
    tiles = BLANK.capabilities(AlgoCapAttribute.TILE_IDS)
    assert tiles == (cublaslt.MatmulTile.TILE_64x64, cublaslt.MatmulTile.TILE_128x64, 5000)
    assert tiles[0] is cublaslt.MatmulTile.TILE_64x64
    assert BLANK.capabilities(AlgoCapAttribute.STAGES_IDS) == ()
    with pytest.raises(ArgumentError, match=r"AlgoCapAttribute\.TILE_IDS has many values; use capabilities"):
        BLANK.capability(AlgoCapAttribute.TILE_IDS)
    with pytest.raises(ArgumentError, match=r"AlgoCapAttribute\.LD_NEGATIVE has one value; use capability"):
        BLANK.capabilities(AlgoCapAttribute.LD_NEGATIVE)


def test_the_real_library_refuses_a_blob_that_it_has_not_made() -> None:
    with pytest.raises(CublasLtError, match=f"{CAP} returned CUBLAS_STATUS_INVALID_VALUE"):
        BLANK.capability(AlgoCapAttribute.SPLITK_SUPPORT)


def test_offers_of_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    query = offers(5, workspace_size=256, states={1: Status.NOT_SUPPORTED})
    Recorder.install(monkeypatch, {HEURISTIC: query})
    offered = ask()
    assert [each.blob[0] for each in offered] == [0, 2, 3, 4]
    assert {(each.workspace_size, each.waves_count) for each in offered} == {(256, 2.0)}
    assert len(ask(1)) == 1


def test_refusals_of_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.install(monkeypatch, {HEURISTIC: lambda *_: int(Status.NOT_SUPPORTED)})
    assert ask() == []
    Recorder.install(monkeypatch, {HEURISTIC: lambda *_: int(Status.INVALID_VALUE)})
    with pytest.raises(CublasLtError, match=f"{HEURISTIC} returned CUBLAS_STATUS_INVALID_VALUE"):
        ask()


def test_arguments_are_checked_before_the_library_is_asked() -> None:
    for count in (0, -1, 2**31):
        with pytest.raises(ArgumentError, match=f"count is {count}; accepted: 1 or more"):
            ask(count)
        with pytest.raises(ArgumentError, match=f"count is {count}; accepted: 1 or more"):
            cublaslt.algo_get_ids(HANDLE, TYPES, count=count)
    wrong = Product(shapes=((64, 32), (31, 16), (64, 16), (64, 16)))
    for query in (lambda: ask(product=wrong), lambda: check(BLANK, wrong)):
        with pytest.raises(ShapeError):
            query()


def test_queries_for_one_algorithm_and_for_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def query(*arguments: Any) -> int:
        seen.append((bytes(arguments[8]._obj[0].algo), arguments[10:]))
        return offers(1)(*arguments)

    names = [HEURISTIC, f"{HEURISTIC}ForStream"]
    recorder = Recorder.install(monkeypatch, dict.fromkeys(names, query))
    like = Algorithm(bytes(range(64)))
    ask(like=like)
    ask(stream=7)
    assert seen == [(like.blob, ()), (bytes(64), (7,))]
    assert [name for name in recorder.calls if name in names] == names


@pytest.mark.parametrize("stream", [None, 7])
def test_the_check_returns_the_needs_of_an_algorithm(stream: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*arguments: Any) -> int:
        assert arguments[6] == bytes(64)
        assert arguments[8:] == ((7,) if stream else ())
        arguments[7]._obj.workspace_size, arguments[7]._obj.waves_count = 4096, 0.5
        return 0

    Recorder.install(monkeypatch, {f"{CHECK}ForStream" if stream else CHECK: answer})
    assert check(BLANK, stream=stream) == Algorithm(bytes(64), 4096, 0.5)


def test_the_check_refuses_by_status_and_by_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_state(*arguments: Any) -> int:
        arguments[7]._obj.state = int(Status.ARCH_MISMATCH)
        return 0

    answers = {"NOT_SUPPORTED": lambda *_: int(Status.NOT_SUPPORTED), "ARCH_MISMATCH": by_state}
    for status, answer in answers.items():
        Recorder.install(monkeypatch, {CHECK: answer})
        with pytest.raises(CublasLtError, match=f"{CHECK} returned CUBLAS_STATUS_{status}"):
            check(BLANK)


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
