"""Casts to FP8 on the pretended GPU: repeated calls, layouts, new arrays, and GPUs without FP8."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.problem import DType
from lt_runtime.reference import amax_of, cast_fp8
from lt_runtime.reference.fp8 import FP8_TYPES, cast_fp8_rows
from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import own
from tests.support.placed import COLUMNS, FLAT, ODD, Placed, host_of
from tests.support.strategies import Placement

_CALLS = 5  # the first call makes a plan; later calls are looked up, and then replay a graph
_SHAPE = 48, 32


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "odd", "columns"])
def test_scales_and_maxima_are_read_by_each_launch(gpu: FakeGpu, to: Any, place: Placement) -> None:
    x = Placed(gpu, np.zeros(_SHAPE, DType.BFLOAT16.numpy), place)
    out, transposed = (Placed(gpu, np.zeros(shape, FP8_TYPES[to]), place) for shape in (_SHAPE, _SHAPE[::-1]))
    scale, amax = (gpu.cp.asarray(np.zeros(1, np.float32)) for _ in range(2))
    seen = [np.float32(0)]
    for seed in range(_CALLS):
        values = np.random.default_rng(seed).standard_normal(_SHAPE).astype(DType.BFLOAT16.numpy)
        x.fill(values)
        scale.set(np.float32([2.0**seed]))
        gpu.synchronize(0)
        more = {"out": out.array, "out_transposed": transposed.array, "amax": amax, "stream": gpu.stream}
        assert gpu.lt.cast_fp8(x.array, scale, dtype=to, **more) == (out.array, transposed.array)
        gpu.synchronize(gpu.stream.ptr)
        expected = cast_fp8(values, 2.0**seed, to).astype(np.float64)
        np.testing.assert_array_equal(out.values(), expected)
        np.testing.assert_array_equal(transposed.values(), expected.T)
        seen.append(amax_of(values))
        assert host_of(gpu, amax)[0] == max(seen)


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "odd", "columns"])
def test_scales_of_rows_are_found_by_each_launch(gpu: FakeGpu, to: Any, place: Placement) -> None:
    x = Placed(gpu, np.zeros(_SHAPE, DType.BFLOAT16.numpy), place)
    out, transposed = (Placed(gpu, np.zeros(shape, FP8_TYPES[to]), place) for shape in (_SHAPE, _SHAPE[::-1]))
    names = "out", "out_transposed", "out_scales", "out_transposed_scales"
    scales = [gpu.cp.asarray(np.zeros(size, np.float32)) for size in _SHAPE]
    more = dict(zip(names, (out.array, transposed.array, *scales), strict=True))
    for seed in range(_CALLS):
        values = np.random.default_rng(seed).standard_normal(_SHAPE) * 4.0 ** np.arange(-seed, 48 - seed)[:, None]
        x.fill(values.astype(DType.BFLOAT16.numpy))
        gpu.synchronize(0)
        made = gpu.lt.cast_fp8_rows(x.array, dtype=to, **more, stream=gpu.stream)
        assert [id(each) for each in made] == [id(each) for each in more.values()]
        gpu.synchronize(gpu.stream.ptr)
        for source, found, factors in ((x.values(), out, scales[0]), (x.values().T, transposed, scales[1])):
            expected, inverse = cast_fp8_rows(source, to)
            np.testing.assert_array_equal(found.values(), expected.astype(np.float64))
            np.testing.assert_array_equal(host_of(gpu, factors), inverse)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("where", ["numpy", "gpu"])
def test_rows_of_leading_axes_and_new_arrays(gpu: FakeGpu, where: str, needs: tuple[bool, bool]) -> None:
    values = np.random.default_rng(7).standard_normal((2, 8, 32)).astype(np.float32)
    x = values if where == "numpy" else gpu.cp.asarray(values)
    made = gpu.lt.cast_fp8_rows(x, need_out=needs[0], need_transposed=needs[1])
    gpu.synchronize(0)
    rows = values.reshape(16, 32)
    for number, source in enumerate((rows, rows.T)):
        if not needs[number]:
            assert made[number] is made[2 + number] is None
            continue
        host = [each if where == "numpy" else host_of(gpu, each) for each in made[number::2]]
        expected, inverse = cast_fp8_rows(source, "float8_e4m3fn")
        np.testing.assert_array_equal(host[0].reshape(source.shape).astype(np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(host[1], inverse)
        exact = host[0].reshape(source.shape).astype(np.float64) * host[1][:, None]
        np.testing.assert_allclose(exact, source, rtol=2.0**-4, atol=2.0**-16)


@pytest.mark.parametrize("shape", [(7,), (2, 5, 3), (3, 0), (2, 16, 128)])
def test_leading_axes_and_new_arrays(gpu: FakeGpu, shape: tuple[int, ...]) -> None:
    before, values = len(gpu.kernels.launched), np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    expected = cast_fp8(values, 1.0, "float8_e4m3fn").astype(np.float32)
    for _ in range(_CALLS):
        made = gpu.lt.cast_fp8(gpu.cp.asarray(values), stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_array_equal(host_of(gpu, made[0]).astype(np.float32), expected)
        turned = expected.reshape(-1, shape[-1]).T if values.size else np.zeros((shape[-1], shape[0]))
        np.testing.assert_array_equal(host_of(gpu, made[1]).astype(np.float32), turned)
    assert (len(gpu.kernels.launched) > before) == (values.size > 0)


def test_a_column_major_matrix_is_read_by_the_fast_path(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    module, aligned = own("kernels.fp8"), list[bool]()
    macros = module.cast_macros
    monkeypatch.setattr(
        module, "cast_macros", lambda *given, **more: aligned.append(more["aligned"]) or macros(*given, **more)
    )
    values = np.random.default_rng(7).standard_normal((96, 176)).astype(np.float32)
    expected = cast_fp8(values, 1.0, "float8_e4m3fn").astype(np.float32)
    out, transposed = gpu.lt.cast_fp8(gpu.cp.asarray(values.T.copy()).T)
    gpu.synchronize(0)
    np.testing.assert_array_equal(host_of(gpu, out).astype(np.float32), expected)
    np.testing.assert_array_equal(host_of(gpu, transposed).astype(np.float32), expected.T)
    assert aligned == [True]


def test_a_gpu_without_fp8_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = DeviceInfo(0, "An Ampere", capability=86, multiprocessors=3, memory=0)
    monkeypatch.setattr("lt_runtime.gpu.devices.device_info", lambda _: ampere)
    launched = len(gpu.kernels.launched)
    with pytest.raises(
        gpu.lt.errors.GpuError, match=r"GPU 0 \(An Ampere\) has compute capability 8\.6; FP8 needs 8\.9 or higher"
    ):
        gpu.lt.cast_fp8(gpu.cp.asarray(np.ones((3, 5), np.float32)))
    assert len(gpu.kernels.launched) == launched
