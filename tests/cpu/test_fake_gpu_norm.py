"""LayerNorm and RMSNorm on the pretended GPU: repeated, captured and bound calls, layouts, and new arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lt_runtime.problem import DType
from tests.support.fake_gpu import FakeGpu
from tests.support.norm_checks import NormCall
from tests.support.placed import COLUMNS, FLAT, ODD, host_of
from tests.support.strategies import Placement

_CALLS = 5  # the first call makes a plan; later calls are looked up, and then replay a graph
_SHAPE = (12, 40)
_MATRICES = ("x", "add", "y", "total", "dy", "add_dx", "dx")
_kinds = pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])


def run(call: NormCall) -> None:
    call.backward(call.forward())
    call.check()


@_kinds
@pytest.mark.parametrize("over", [False, True], ids=["apart", "over operands"])
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "gaps", "columns"])
def test_same_buffers_with_other_contents(gpu: FakeGpu, kind: str, place: Placement, over: bool) -> None:
    call = NormCall(gpu, kind, _SHAPE, places=dict.fromkeys(_MATRICES, place), over=over, accumulate=True)
    for seed in range(_CALLS):
        call.refill(seed)
        run(call)


@_kinds
@pytest.mark.parametrize("odd", _MATRICES)
def test_one_matrix_is_not_aligned(gpu: FakeGpu, kind: str, odd: str) -> None:
    run(NormCall(gpu, kind, _SHAPE, places={odd: ODD}))


@_kinds
def test_sums_of_many_blocks(gpu: FakeGpu, kind: str) -> None:
    run(NormCall(gpu, kind, (3000, 40), accumulate=True))


@_kinds
def test_an_unaligned_weight(gpu: FakeGpu, kind: str) -> None:
    call = NormCall(gpu, kind, _SHAPE)
    longer = gpu.cp.asarray(np.concatenate([[np.float32(7)], host_of(gpu, call.vectors["weight"])]))
    call.vectors["weight"] = longer[1:]
    run(call)


def test_what_is_asked_is_told_apart(gpu: FakeGpu) -> None:
    """Calls alternate that have the same shapes and differ in one respect: each gets its own results."""
    calls = [NormCall(gpu, kind, _SHAPE, adds=adds) for kind in ("layer_norm", "rms_norm") for adds in (True, False)]
    calls.append(NormCall(gpu, "rms_norm", _SHAPE, accumulate=True))
    calls.append(NormCall(gpu, "rms_norm", _SHAPE, DType.BFLOAT16))
    for seed in range(_CALLS):
        for call in calls:
            call.refill(seed)
            run(call)


@_kinds
def test_eps_is_told_apart(gpu: FakeGpu, kind: str) -> None:
    lt, x, weight = gpu.lt, gpu.cp.asarray(np.full((2, 8), 3.0, np.float32)), gpu.cp.asarray(np.ones(8, np.float32))
    for _ in range(_CALLS):
        for eps in (0.25, 16.0):
            _, ctx = getattr(lt, f"{kind}_fwd")(x, weight, eps=eps, stream=gpu.stream)
            gpu.synchronize(gpu.stream.ptr)
            square = 0.0 if kind == "layer_norm" else 9.0
            np.testing.assert_allclose(host_of(gpu, ctx.rstd), (square + eps) ** -0.5, rtol=1e-6)


@_kinds
def test_captured_and_bound_calls(gpu: FakeGpu, kind: str) -> None:
    call, lt = NormCall(gpu, kind, _SHAPE), gpu.lt
    run(call)
    gpu.stream.begin_capture()
    call.backward(call.forward())
    graph = gpu.stream.end_capture()
    ctx, (operands, options) = call.forward(), call.forward_arguments()
    forward = lt.bind(getattr(lt, f"{kind}_fwd"), *operands, **options)
    backward = lt.bind(getattr(lt, f"{kind}_bwd"), call.of["dy"].array, ctx, **call.backward_options())
    for seed in range(_CALLS):
        for launches in ([lambda: graph.launch(gpu.stream)], [forward, backward]):
            gpu.synchronize(gpu.stream.ptr)
            call.refill(seed)
            for launch in launches:
                launch()
            call.check()
    del options["out_rstd"]
    with pytest.raises(lt.errors.ArgumentError, match="out_rstd is None; a bound call makes no arrays"):
        lt.bind(getattr(lt, f"{kind}_fwd"), *operands, **options)


@_kinds
def test_new_arrays_of_batches(gpu: FakeGpu, kind: str) -> None:
    call = NormCall(gpu, kind, (2, 5, 24), DType.BFLOAT16)
    run(call)
    operands, options = call.forward_arguments()
    for _ in range(_CALLS):
        y, ctx = getattr(gpu.lt, f"{kind}_fwd")(*operands, add=options["add"], stream=gpu.stream)
        made = getattr(gpu.lt, f"{kind}_bwd")(
            call.of["dy"].array, ctx, add=call.of["add_dx"].array, need_dx=True, stream=gpu.stream
        )
        gpu.synchronize(gpu.stream.ptr)
        for array, buffer in ((y, "y"), (ctx.x, "total"), (made.dx, "dx")):
            assert host_of(gpu, array).tobytes() == call.of[buffer].values().astype(array.dtype).tobytes()
        np.testing.assert_array_equal(host_of(gpu, made.dweight), host_of(gpu, call.vectors["dweight"]))
        assert made.dweight.dtype == np.float32


@_kinds
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_some_gradients(gpu: FakeGpu, kind: str, wanted: tuple[bool, bool]) -> None:
    call = NormCall(gpu, kind, _SHAPE, adds=False)
    ctx = call.forward()
    for _ in range(_CALLS):
        made = getattr(gpu.lt, f"{kind}_bwd")(
            call.of["dy"].array, ctx, need_dx=wanted[0], need_dweight=wanted[1], stream=gpu.stream
        )
        assert (made.dx is not None, made.dweight is not None) == wanted
    call.backward(ctx)
    call.check()
    pairs = ((made.dx, call.of["dx"].array), (made.dweight, call.vectors["dweight"]))
    for array, buffer in ((one, other) for one, other in pairs if one is not None):
        assert host_of(gpu, array).tobytes() == host_of(gpu, buffer).tobytes()


def test_no_rows_and_no_columns(gpu: FakeGpu) -> None:
    def zeros(*shape: int) -> Any:
        return gpu.cp.asarray(np.zeros(shape, np.float32))

    for rows, cols in ((0, 24), (3, 0)):
        for _ in range(_CALLS):
            y, ctx = gpu.lt.layer_norm_fwd(zeros(rows, cols), zeros(cols), zeros(cols), stream=gpu.stream)
            made = gpu.lt.layer_norm_bwd(y, ctx, stream=gpu.stream)
            gpu.synchronize(gpu.stream.ptr)
            assert (y.shape, made.dx.shape, made.dbias.shape) == ((rows, cols), (rows, cols), (cols,))
            assert not host_of(gpu, made.dweight).any()
