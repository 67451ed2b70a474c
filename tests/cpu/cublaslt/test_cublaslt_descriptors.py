"""Creation and lifetime of descriptors, with the real library. Needs no GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.errors import AlignmentError, ArgumentError
from tests.support.cublaslt_kinds import EVERY_KIND, made, matmul_desc
from tests.support.cublaslt_recorder import Recorder

MATMUL = cublaslt.MatmulDescAttribute
LAYOUT = cublaslt.MatrixLayoutAttribute


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 34, 11), r"leading_dimension is 11; it must be at least rows \(12\)"),
        ((1, 1, -1), r"MatrixLayoutAttribute\.LD is -1; accepted: 0 or more"),
        ((-1, 4, 8), r"MatrixLayoutAttribute\.ROWS is -1"),
        ((4, -1, 8), r"MatrixLayoutAttribute\.COLS is -1"),
        ((2**64, 1, 1), r"MatrixLayoutAttribute\.ROWS is 18446744073709551616"),
    ],
)
def test_impossible_layouts(arguments: tuple[int, int, int], message: str) -> None:
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
        assert (layout.get(LAYOUT.LD), layout.get(LAYOUT.ORDER)) == (least, order)
    with pytest.raises(ArgumentError, match=f"leading_dimension is {least - 1}; it must be at least"):
        cublaslt.MatrixLayout(cublaslt.DataType.R_8I, 33, 5, least - 1, order=order)


def test_the_library_gets_the_arguments_of_a_descriptor() -> None:
    """`get` asks the library, `recall` returns the values with which the descriptor was made; both must agree."""
    float32, order = cublaslt.DataType.R_32F, cublaslt.Order
    layouts = {
        (float32, order.COL, 12, 34, 56, 7, 89): {"batch_count": 7, "batch_stride": 89},
        (float32, order.ROW, 12, 34, 56, 1, 0): {"order": order.ROW},
    }
    for expected, options in layouts.items():
        with cublaslt.MatrixLayout(float32, 12, 34, 56, **options) as layout:  # type: ignore[arg-type]
            read = layout.get, layout.recall
            assert [tuple(map(each, list(LAYOUT)[:7])) for each in read] == [expected] * 2
    with matmul_desc() as desc:
        attributes = MATMUL.COMPUTE_TYPE, MATMUL.SCALE_TYPE, MATMUL.EPILOGUE, MATMUL.POINTER_MODE
        made_with = cublaslt.ComputeType.COMPUTE_32F, float32, cublaslt.Epilogue.DEFAULT, cublaslt.PointerMode.HOST
        assert [tuple(map(each, attributes)) for each in (desc.get, desc.recall)] == [made_with] * 2
    with pytest.raises(ArgumentError, match="COMPUTE_TYPE is 1"):
        cublaslt.MatmulDesc(1, float32)  # type: ignore[arg-type]


def test_grouped_layouts() -> None:
    with made(lambda: cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 3, 256, 512, 1024)) as layout:
        assert layout.get(LAYOUT.BATCH_MODE) is cublaslt.BatchMode.GROUPED
        arrays = (LAYOUT.GROUPED_ROWS_ARRAY, LAYOUT.GROUPED_COLS_ARRAY, LAYOUT.GROUPED_LD_ARRAY)
        assert [layout.get(attribute) for attribute in (LAYOUT.BATCH_COUNT, *arrays)] == [3, 256, 512, 1024]
    with pytest.raises(AlignmentError, match="GROUPED_COLS_ARRAY is 0x202"):
        cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 3, 256, 514, 1024)
    with pytest.raises(ArgumentError, match="BATCH_COUNT is 0"):
        cublaslt.MatrixLayout.grouped(cublaslt.DataType.R_16F, 0, 256, 512, 1024)


def test_a_product_keeps_its_emulation_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # frees descriptors of earlier tests before the recorder counts
    recorder = Recorder.install(monkeypatch)
    with matmul_desc() as desc:
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


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("make", EVERY_KIND)
def test_a_descriptor_is_freed_once(make: Callable[[], Any], is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is not closed is freed once it is garbage, even in a reference cycle."""
    recorder = Recorder.install(monkeypatch)
    descriptor = made(make)
    if is_closed:
        with descriptor:
            descriptor.close()
    assert recorder.destroyed.total() == is_closed
    circle: list[Any] = [descriptor]
    circle.append(circle)
    del descriptor, circle
    gc.collect()
    assert recorder.created == recorder.destroyed
    assert recorder.destroyed.total() == 1


@pytest.mark.parametrize("make", EVERY_KIND)
def test_use_of_a_closed_descriptor_is_an_error(make: Callable[[], Any]) -> None:
    descriptor = made(make)
    descriptor.close()
    attribute = next(iter(descriptor._attributes))
    value = 68 if attribute is MATMUL.COMPUTE_TYPE else 0  # values that the attribute accepts
    for use in (lambda: descriptor.set(attribute, value), lambda: descriptor.get(attribute), lambda: descriptor.handle):
        with pytest.raises(ArgumentError, match=f"this {type(descriptor).__name__} is closed"):
            use()
