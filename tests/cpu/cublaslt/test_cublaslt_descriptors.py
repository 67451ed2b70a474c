"""What descriptors are made with, and how long they live; the real library's, none of which needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.errors import AlignmentError, ArgumentError
from tests.support.cublaslt_kinds import (
    EVERY_KIND,
    made,
    matmul_desc,
)
from tests.support.cublaslt_recorder import Recorder

MATMUL = cublaslt.MatmulDescAttribute
LAYOUT = cublaslt.MatrixLayoutAttribute


@pytest.fixture
def desc() -> Iterator[cublaslt.MatmulDesc]:
    with matmul_desc() as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 34, 11), r"leading_dimension is 11; it must be at least rows \(12\)"),
        ((1, 1, 0), "leading_dimension is 0"),
        ((1, 1, -1), r"MatrixLayoutAttribute\.LD is -1; accepted: 0 or more"),
        ((-1, 4, 8), r"MatrixLayoutAttribute\.ROWS is -1"),
        ((4, -1, 8), r"MatrixLayoutAttribute\.COLS is -1"),
        ((2**64, 1, 1), r"MatrixLayoutAttribute\.ROWS is 18446744073709551616"),
    ],
)
def test_layouts_that_cannot_be(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cublaslt.MatrixLayout(cublaslt.DataType.R_32F, *arguments)


@pytest.mark.parametrize(
    ("order", "least"),
    [
        (cublaslt.Order.COL, 33),
        (cublaslt.Order.ROW, 5),
        (cublaslt.Order.COL32, 32 * 33),
        (cublaslt.Order.COL4_4R2_8C, 32 * 40),
        (cublaslt.Order.COL32_2R_4R4, 32 * 64),
    ],
)
def test_the_least_leading_dimension(order: cublaslt.Order, least: int) -> None:
    with cublaslt.MatrixLayout(cublaslt.DataType.R_8I, 33, 5, least, order=order) as layout:
        assert layout.get(LAYOUT.LD) == least
        assert layout.get(LAYOUT.ORDER) is order
    with pytest.raises(ArgumentError, match=f"leading_dimension is {least - 1}; it must be at least"):
        cublaslt.MatrixLayout(cublaslt.DataType.R_8I, 33, 5, least - 1, order=order)


def test_what_descriptors_are_made_with() -> None:
    with matmul_desc() as desc:
        assert desc.get(MATMUL.COMPUTE_TYPE) is cublaslt.ComputeType.COMPUTE_32F
        assert desc.get(MATMUL.SCALE_TYPE) is cublaslt.DataType.R_32F
        assert desc.get(MATMUL.EPILOGUE) is cublaslt.Epilogue.DEFAULT
    with cublaslt.MatrixLayout(cublaslt.DataType.R_16BF, 12, 34, 56, batch_count=7, batch_stride=89) as layout:
        expected = (cublaslt.DataType.R_16BF, cublaslt.Order.COL, 12, 34, 56, 7, 89)
        assert tuple(layout.get(attribute) for attribute in list(LAYOUT)[:7]) == expected
    with pytest.raises(ArgumentError, match="COMPUTE_TYPE is 1"):
        cublaslt.MatmulDesc(1, cublaslt.DataType.R_32F)  # type: ignore[arg-type]


def test_what_a_new_descriptor_remembers_is_what_the_library_has() -> None:
    layouts: tuple[dict[str, Any], ...] = ({}, {"order": cublaslt.Order.ROW, "batch_count": 7, "batch_stride": 890})
    for changes in layouts:
        with cublaslt.MatrixLayout(cublaslt.DataType.R_16BF, 12, 34, 56, **changes) as layout:
            assert layout._values
            assert all(layout.get(attribute) == value for attribute, value in layout._values.items())
    with matmul_desc() as desc:
        assert desc._values
        assert all(desc.get(attribute) == value for attribute, value in desc._values.items())


def test_grouped_layouts() -> None:
    with made(lambda: cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 3, 256, 512, 1024)) as layout:
        assert layout.get(LAYOUT.BATCH_MODE) is cublaslt.BatchMode.GROUPED
        expected = [3, 256, 512, 1024]
        arrays = (LAYOUT.GROUPED_ROWS_ARRAY, LAYOUT.GROUPED_COLS_ARRAY, LAYOUT.GROUPED_LD_ARRAY)
        assert [layout.get(attribute) for attribute in (LAYOUT.BATCH_COUNT, *arrays)] == expected
    with pytest.raises(AlignmentError, match="GROUPED_COLS_ARRAY is 0x202"):
        cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 3, 256, 514, 1024)
    with pytest.raises(ArgumentError, match="BATCH_COUNT is 0"):
        cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 0, 256, 512, 1024)


def test_a_product_keeps_its_emulation_alive(desc: cublaslt.MatmulDesc, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # of earlier tests, so that only this one's is recorded
    recorder = Recorder.install(monkeypatch)
    emulation = made(cublaslt.EmulationDesc)
    address = emulation.handle
    desc.set_emulation(emulation)
    del emulation
    gc.collect()
    assert desc.get(MATMUL.EMULATION_DESCRIPTOR) == address
    assert not recorder.destroyed
    desc.set_emulation(None)
    assert desc.get(MATMUL.EMULATION_DESCRIPTOR) == 0
    assert recorder.destroyed == {address: 1}


@pytest.mark.parametrize("make", EVERY_KIND)
def test_closing_twice_is_harmless(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder.install(monkeypatch)
    descriptor = made(make)
    with descriptor:
        descriptor.close()
        descriptor.close()
    del descriptor
    gc.collect()
    assert recorder.created == recorder.destroyed
    assert recorder.destroyed.total() == 1


@pytest.mark.parametrize("make", EVERY_KIND)
def test_what_is_never_closed_is_freed_once_it_is_garbage(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder.install(monkeypatch)
    descriptor = made(make)
    assert not recorder.destroyed
    cycle: list[Any] = [descriptor]
    cycle.append(cycle)
    del descriptor, cycle
    gc.collect()
    assert recorder.created == recorder.destroyed
    assert recorder.destroyed.total() == 1


@pytest.mark.parametrize("make", EVERY_KIND)
def test_a_closed_descriptor_is_an_error_and_no_crash(make: Callable[[], Any]) -> None:
    descriptor = made(make)
    descriptor.close()
    attribute = next(iter(descriptor._attributes))
    value = 68 if attribute is MATMUL.COMPUTE_TYPE else 0  # one that it would take
    for use in (lambda: descriptor.set(attribute, value), lambda: descriptor.get(attribute), lambda: descriptor.handle):
        with pytest.raises(ArgumentError, match=f"this {type(descriptor).__name__} is closed"):
            use()
