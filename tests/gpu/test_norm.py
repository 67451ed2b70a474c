"""LayerNorm and RMSNorm on the GPU against the reference, in all types, widths and layouts."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime.problem import DType
from tests.support.gpu_arrays import to_host
from tests.support.norm_checks import NormCall
from tests.support.strategies import TYPES, Placement, placements, sizes

F32, F16, BF16 = TYPES
KINDS = ("layer_norm", "rms_norm")
SHAPES = [
    *((5, 3), (700, 96), (129, 771), (3, 50, 264), (4100, 1024), (2000, 4096), (7, 8192)),
    *((1, 5120), (65, 12288), (33, 16384), (20, 33000), (9, 40000), (70_000, 64), (300_000, 8), (2, 100_003)),
]


@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adds", [True, False])
def test_results(gpu: Any, kind: str, shape: tuple[int, ...], types: tuple[DType, DType], adds: bool) -> None:
    call = NormCall(gpu, kind, shape, *types, adds=adds, over=adds, accumulate=adds)
    call.backward(call.forward())
    call.check()


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(sizes, sizes),
    places=st.tuples(*(placements for _ in range(7))),
    types=st.sampled_from(((F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32))),
    adds=st.booleans(),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout(
    gpu: Any,
    kind: str,
    shape: tuple[int, int],
    places: tuple[Placement, ...],
    types: tuple[DType, DType],
    adds: bool,
    accumulate: bool,
    seed: int,
) -> None:
    named = dict(zip(("x", "add", "y", "total", "dy", "add_dx", "dx"), places, strict=True))
    call = NormCall(gpu, kind, shape, *types, places=named, adds=adds, accumulate=accumulate, seed=seed)
    call.backward(call.forward())
    call.check()


@pytest.mark.parametrize("shape", [(500, 136), (70, 1024), (40, 4096), (30, 5000), (9, 20000)])
def test_a_large_mean_costs_no_digits(gpu: Any, shape: tuple[int, int]) -> None:
    call = NormCall(gpu, "layer_norm", shape, shift=1000.0)
    call.backward(call.forward())
    call.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3000, 96), (3000, 1024), (2000, 4096), (200, 12288), (50, 40000)])
def test_the_same_bits_each_time(gpu: Any, kind: str, shape: tuple[int, int]) -> None:
    call, found = NormCall(gpu, kind, shape, BF16, BF16), []
    for _ in range(5):
        call.backward(call.forward())
        gpu.synchronize(gpu.stream.ptr)
        found.append([gpu.host_of(each).tobytes() for each in (call.vectors["dweight"], call.of["dx"].array)])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_and_a_bound_pass_read_their_operands_anew(gpu: Any, kind: str) -> None:
    call = NormCall(gpu, kind, (300, 1024))
    stream, x = gpu.stream, call.of["x"].array
    call.backward(call.forward())
    stream.begin_capture()
    call.backward(call.forward())
    graph = stream.end_capture()
    operands, options = call.forward_arguments()
    ctx = call.forward()
    bound = [lt.bind(getattr(lt, f"{kind}_fwd"), *operands, **options)]
    bound.append(lt.bind(getattr(lt, f"{kind}_bwd"), call.of["dy"].array, ctx, **call.backward_options()))
    for number, launches in enumerate(([lambda: graph.launch(stream)], bound)):
        call.values["x"] = np.random.default_rng(90 + number).standard_normal(x.shape, np.float32).astype(x.dtype)
        stream.synchronize()
        x[...] = cp.asarray(call.values["x"])
        cp.cuda.get_current_stream().synchronize()
        for launch in launches:
            launch()
        call.check()


@pytest.mark.parametrize("kind", KINDS)
def test_new_arrays_have_the_bits_of_buffers(gpu: Any, kind: str) -> None:
    call = NormCall(gpu, kind, (3, 40, 1000), BF16, F32)
    call.backward(call.forward())
    gpu.synchronize(gpu.stream.ptr)
    operands, options = call.forward_arguments()
    y, ctx = getattr(lt, f"{kind}_fwd")(*operands, add=options["add"])
    made = getattr(lt, f"{kind}_bwd")(call.of["dy"].array, ctx, add=call.of["add_dx"].array)
    for array, buffer in ((y, "y"), (ctx.x, "total"), (made.dx, "dx")):
        np.testing.assert_array_equal(to_host(array), call.of[buffer].values())
    np.testing.assert_array_equal(to_host(made.dweight), to_host(call.vectors["dweight"]))
    assert (made.dx.shape, made.dweight.dtype) == ((3, 40, 1000), np.float32)


def test_no_rows() -> None:
    x, weight = cp.zeros((0, 24), cp.float32), cp.ones(24, cp.float32)
    y, ctx = lt.layer_norm_fwd(x, weight, weight)
    made = lt.layer_norm_bwd(y, ctx)
    assert (y.shape, made.dx.shape, ctx.rstd.shape) == ((0, 24), (0, 24), (0,))
    assert not made.dweight.any()
    assert not made.dbias.any()
