"""Each call of cuBLASLt is made to fail in turn: the error names the call, nothing leaks, and the next call works."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt.library import ARGUMENTS, RESULTS
from lt_runtime.errors import CublasLtError, MissingLibraryError
from tests.support.cublaslt_product import HANDLE, Product
from tests.support.cublaslt_recorder import FAILURE, Recorder, creates, offers, succeeds

HANDLES = range(0x7000, 0x8000)
NEED_A_GPU = (
    *("cublasLtDestroy", "cublasLtMatmulAlgoCheck", "cublasLtMatmulAlgoCheckForStream", "cublasLtMatmulAlgoGetIds"),
    *("cublasLtMatmulAlgoInit", "cublasLtMatmulAlgoCapGetAttribute", "cublasLtMatmul", "cublasLtMatrixTransform"),
    # Logger_force_disable needs no GPU, but would silence the logger for the following tests.
    "cublasLtLoggerForceDisable",
)
M, L = cublaslt.MatmulDescAttribute, cublaslt.MatrixLayoutAttribute
TYPES = (cublaslt.ComputeType.COMPUTE_32F, *(cublaslt.DataType.R_32F,) * 5)
ALGORITHM = cublaslt.Algorithm(bytes(64))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    names = ("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoGetHeuristicForStream")
    stand_ins = dict.fromkeys(NEED_A_GPU, succeeds) | dict.fromkeys(names, offers(4))
    return Recorder.install(monkeypatch, {"cublasLtCreate": creates(HANDLES.start), **stand_ins})


def error_of(action: Callable[[], Any]) -> CublasLtError | None:
    """Returns the error that an action raises, without its traceback, which would keep the action's objects alive."""
    try:
        action()
    except CublasLtError as error:
        return error.with_traceback(None)
    return None


def assert_nothing_is_left(recorder: Recorder) -> None:
    """Asserts that each descriptor was destroyed once. Only the device's handle stays, for the whole process."""
    kept = {address: count for address, count in recorder.created.items() if address in HANDLES}
    assert sum(kept.values()) <= 1
    assert recorder.destroyed == recorder.created - Counter(kept) or recorder.destroyed == recorder.created


def fail_at(recorder: Recorder, index: int, action: Callable[[], Any]) -> None:
    """Runs an action whose call number `index` fails; asserts that the error names it, and that no object is left."""
    recorder.forget()
    recorder.fail_at = index
    error = error_of(action)
    assert error is not None, f"{recorder.calls[index]} failed, and no error was raised"
    assert str(error).startswith(f"{recorder.calls[index]} returned CUBLAS_STATUS_INTERNAL_ERROR ({FAILURE}): ")
    assert_nothing_is_left(recorder)


def test_a_layout_with_attributes(recorder: Recorder) -> None:
    """Creates a layout and sets three attributes: each of these calls may fail after earlier ones succeeded."""

    def make() -> None:
        options: dict[str, Any] = {"order": cublaslt.Order.ROW, "batch_count": 3, "batch_stride": 20}
        cublaslt.MatrixLayout(cublaslt.DataType.R_32F, 4, 5, 5, **options).close()

    make()
    assert len(recorder.calls) == 5
    for index in range(5):
        fail_at(recorder, index, make)


def test_a_descriptor_that_cannot_be_freed_is_not_freed_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: unraisable.append(str(problem.exc_value)))
    preference = cublaslt.MatmulPreference()
    recorder.fail_at = 1
    with pytest.raises(CublasLtError, match="cublasLtMatmulPreferenceDestroy returned"):
        preference.close()
    preference.close()
    del preference
    gc.collect()
    assert_nothing_is_left(recorder)
    assert unraisable == []
    recorder.forget()
    preference = cublaslt.MatmulPreference()
    recorder.fail_at = 1
    del preference
    gc.collect()
    assert_nothing_is_left(recorder)
    (message,) = unraisable
    assert message.startswith("cublasLtMatmulPreferenceDestroy returned CUBLAS_STATUS_INTERNAL_ERROR (14)")


def with_product(use: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    product = Product()
    return lambda: use(HANDLE, product.desc(), *product.layouts(), **options)


def heuristics(*product: Any, **options: Any) -> None:
    cublaslt.get_heuristics(*product, cublaslt.MatmulPreference(), 4, **options)


def transform() -> None:
    desc = cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F)
    a, c = (cublaslt.MatrixLayout(cublaslt.DataType.R_32F, 4, 5, 4) for _ in range(2))
    cublaslt.matrix_transform(HANDLE, desc, 1.0, 0x100, a, 0.0, 0, None, 0x200, c, 0)


def descriptor(make: Callable[[], Any], attribute: Any, value: int) -> dict[str, Callable[[], Any]]:
    kind = type(attribute).__name__.removesuffix("Attribute")
    name = {"Preference": "MatmulPreference"}.get(kind, kind)
    return {
        f"cublasLt{name}Create": make,
        f"cublasLt{name}Destroy": lambda: make().close(),
        f"cublasLt{name}SetAttribute": lambda: make().set(attribute, value),
        f"cublasLt{name}GetAttribute": lambda: make().get(attribute),
    }


EVERY_CALL: dict[str, Callable[[], Any]] = {
    "cublasLtCreate": lambda: cublaslt.handle(0),
    "cublasLtDestroy": lambda: cublaslt.Handle().close(),
    "cublasLtHeuristicsCacheGetCapacity": cublaslt.heuristics_cache_get_capacity,
    "cublasLtHeuristicsCacheSetCapacity": lambda: cublaslt.heuristics_cache_set_capacity(8192),
    **descriptor(lambda: Product().desc(), M.TRANSA, 0),
    **descriptor(lambda: cublaslt.MatrixLayout(cublaslt.DataType.R_32F, 4, 5, 4), L.LD, 64),
    **descriptor(cublaslt.MatmulPreference, cublaslt.PreferenceAttribute.SEARCH_MODE, 0),
    **descriptor(
        lambda: cublaslt.MatrixTransformDesc(cublaslt.DataType.R_32F), cublaslt.MatrixTransformDescAttribute.TRANSA, 0
    ),
    **descriptor(cublaslt.EmulationDesc, cublaslt.EmulationDescAttribute.STRATEGY, 0),
    "cublasLtGroupedMatrixLayoutCreate": lambda: cublaslt.MatrixLayout.grouped(TYPES[1], 3, 256, 512, 768),
    "cublasLtMatmulAlgoGetHeuristic": with_product(heuristics),
    "cublasLtMatmulAlgoGetHeuristicForStream": with_product(heuristics, stream=0),
    "cublasLtMatmulAlgoGetIds": lambda: cublaslt.algo_get_ids(HANDLE, TYPES),
    "cublasLtMatmulAlgoInit": lambda: cublaslt.algo_init(HANDLE, TYPES, 66),
    "cublasLtMatmulAlgoCheck": with_product(cublaslt.algo_check, algorithm=ALGORITHM),
    "cublasLtMatmulAlgoCheckForStream": with_product(cublaslt.algo_check, algorithm=ALGORITHM, stream=0),
    "cublasLtMatmulAlgoCapGetAttribute": lambda: ALGORITHM.capabilities(cublaslt.AlgoCapAttribute.TILE_IDS),
    "cublasLtMatmulAlgoConfigSetAttribute": lambda: ALGORITHM.set(cublaslt.AlgoConfigAttribute.SPLITK_NUM, 2),
    "cublasLtMatmulAlgoConfigGetAttribute": lambda: ALGORITHM.get(cublaslt.AlgoConfigAttribute.SPLITK_NUM),
    "cublasLtMatmul": lambda: Product().launch(),
    "cublasLtMatrixTransform": transform,
    "cublasLtLoggerSetCallback": lambda: cublaslt.logger_set_callback(None),
    "cublasLtLoggerOpenFile": lambda: cublaslt.logger_open_file("/dev/null"),
    "cublasLtLoggerSetLevel": lambda: cublaslt.logger_set_level(0),
    "cublasLtLoggerSetMask": lambda: cublaslt.logger_set_mask(0),
    "cublasLtLoggerForceDisable": cublaslt.logger_force_disable,
}


def test_the_table_is_complete() -> None:
    assert set(EVERY_CALL) == set(ARGUMENTS) - set(RESULTS)


@pytest.mark.parametrize("name", EVERY_CALL)
def test_every_call(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        EVERY_CALL[name]()
    except MissingLibraryError as error:
        pytest.skip(str(error))
    index = recorder.calls.index(name)
    monkeypatch.setattr("lt_runtime.cublaslt.library._handles", {})
    fail_at(recorder, index, EVERY_CALL[name])
    recorder.forget()
    EVERY_CALL[name]()
    assert name in recorder.calls
