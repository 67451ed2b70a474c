"""Gated activations on the pretended GPU: repeated, captured and bound calls, layouts, and gradients in place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.problem import Activation, Philox
from tests.host_kernels.arrays import assert_close
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import COLUMNS, FLAT, ODD, Placed, host_of
from tests.support.strategies import Placement

_CALLS = 5  # the first call makes a plan; later calls are looked up, and then replay a graph
_ROWS, _COLS = 12, 16


class GatedCall:
    """A forward and a backward call, with a buffer for every result.

    Args:
        place: the placement of every matrix that is not in `places`.
        places: placements of single matrices, by name.
        in_place: whether the gradient of h is written over h.
    """

    def __init__(
        self,
        gpu: FakeGpu,
        place: Placement = FLAT,
        *,
        places: Mapping[str, Placement] = MappingProxyType({}),
        in_place: bool = False,
        **options: Any,
    ) -> None:
        self.gpu, self.options = gpu, options
        shapes = {"h": (_ROWS, 2 * _COLS), "y": (_ROWS, _COLS), "dy": (_ROWS, _COLS), "dh": (_ROWS, 2 * _COLS)}
        self.h, self.y, self.dy, apart = (
            Placed(gpu, np.zeros(shape, np.float32), places.get(name, place)) for name, shape in shapes.items()
        )
        self.dh = self.h if in_place else apart
        self.step = gpu.cp.asarray(np.zeros(1, np.uint32))

    def refill(self, seed: int) -> None:
        """Writes new operands into the same memory."""
        generator = np.random.default_rng(seed)
        self._h, self._dy = (generator.standard_normal((_ROWS, n)).astype(np.float32) for n in (2 * _COLS, _COLS))
        self.h.fill(self._h)
        self.dy.fill(self._dy)
        host_of(self.gpu, self.step)[...] = seed

    def forward(self, rng: Any = None) -> Any:
        lt = self.gpu.lt
        y, ctx = lt.gated_fwd(self.h.array, **self.options, rng=rng, out=self.y.array, stream=self.gpu.stream)
        assert y is self.y.array
        return ctx

    def backward(self, ctx: Any, **options: Any) -> None:
        made = self.gpu.lt.gated_bwd(self.dy.array, ctx, **options, out=self.dh.array, stream=self.gpu.stream)
        assert made is self.dh.array

    def check(self, rng: Philox | None = None) -> None:
        """Compares y and the gradient with the reference, after all work."""
        self.gpu.synchronize(self.gpu.stream.ptr)
        activation = Activation(self.options.get("activation", "silu"))
        factors = None if rng is None else reference.dropout_scale((_ROWS, _COLS), self.options["dropout"], rng)
        assert_close("y", self.y.values(), reference.gated_fwd(self._h, activation, factors), 1e-5)
        assert_close("dh", self.dh.values(), reference.gated_bwd(self._dy, self._h, activation, factors), 1e-5)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "gaps", "columns"])
def test_same_buffers_with_other_contents(gpu: FakeGpu, place: Placement, in_place: bool) -> None:
    call = GatedCall(gpu, place, in_place=in_place)
    for seed in range(2 * _CALLS):  # calls of two activations take turns
        call.options["activation"] = ("silu", "gelu")[seed % 2]
        call.refill(seed)
        call.backward(call.forward())
        call.check()


@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "gaps", "columns"])
def test_y_is_computed_again_over_dy(gpu: FakeGpu, place: Placement) -> None:
    call = GatedCall(gpu, place, in_place=True, dropout=0.5)
    for seed in range(_CALLS):
        call.refill(seed)
        call.backward(call.forward(gpu.lt.Philox(5, 0, seed)), remake_y=True)
        call.check(Philox(5, 0, seed))
        np.testing.assert_array_equal(call.dy.values(), call.y.values())


@pytest.mark.parametrize("odd", ["h", "y", "dy", "dh"])
def test_one_matrix_is_not_aligned(gpu: FakeGpu, odd: str) -> None:
    call = GatedCall(gpu, places={odd: ODD})
    call.refill(0)
    call.backward(call.forward())
    call.check()


@pytest.mark.parametrize("place", [FLAT, ODD], ids=["flat", "gaps"])
def test_each_call_has_the_mask_of_its_own_source(gpu: FakeGpu, place: Placement) -> None:
    call = GatedCall(gpu, place, dropout=0.5)
    for seed in range(2 * _CALLS):
        call.refill(seed)
        call.backward(call.forward(gpu.lt.Philox(5, seed % 3, call.step if seed % 2 else seed)))
        call.check(Philox(5, seed % 3, seed))


def test_a_capture_reads_its_step_at_each_replay(gpu: FakeGpu) -> None:
    call = GatedCall(gpu, dropout=0.5)
    rng = gpu.lt.Philox(1, 2, call.step)
    call.refill(0)
    call.backward(call.forward(rng))
    gpu.synchronize(gpu.stream.ptr)
    gpu.stream.begin_capture()
    call.backward(call.forward(rng))
    graph = gpu.stream.end_capture()
    for seed in range(_CALLS):
        call.refill(seed)
        graph.launch(gpu.stream)
        call.check(Philox(1, 2, seed))


def test_bound_calls(gpu: FakeGpu) -> None:
    call, lt = GatedCall(gpu, dropout=0.5), gpu.lt
    rng = lt.Philox(1, 2, call.step)
    ctx = call.forward(rng)
    arguments = {"dropout": 0.5, "rng": rng, "out": call.y.array, "stream": gpu.stream}
    forward = lt.bind(lt.gated_fwd, call.h.array, **arguments)
    backward = lt.bind(lt.gated_bwd, call.dy.array, ctx, out=call.dh.array, stream=gpu.stream)
    for seed in range(_CALLS):
        gpu.synchronize(gpu.stream.ptr)
        call.refill(seed)
        forward()
        backward()
        call.check(Philox(1, 2, seed))
    with pytest.raises(lt.errors.ArgumentError, match="out is None; a bound call makes no arrays"):
        lt.bind(lt.gated_fwd, call.h.array)


@pytest.mark.parametrize("cols", [8, 3])
def test_leading_axes_and_new_arrays(gpu: FakeGpu, cols: int) -> None:
    """The rows of a batch are equally far apart in memory, with gaps between them."""
    h, dy = (np.random.default_rng(7).standard_normal((2, 5, n)).astype(np.float32) for n in (2 * cols + 8, cols))
    given = gpu.cp.asarray(h)[..., : 2 * cols]
    h = h[..., : 2 * cols]
    for _ in range(_CALLS):
        y, ctx = gpu.lt.gated_fwd(given, activation="relu", stream=gpu.stream)
        dh = gpu.lt.gated_bwd(gpu.cp.asarray(dy), ctx, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        assert_close("y", host_of(gpu, y), reference.gated_fwd(h, Activation("relu")), 1e-6)
        assert_close("dh", host_of(gpu, dh), reference.gated_bwd(dy, h, Activation("relu")), 1e-6)


def test_nothing_is_launched_for_no_elements(gpu: FakeGpu) -> None:
    before = len(gpu.kernels.launched)
    for shape in ((0, 6), (3, 0), (2, 0, 4)):
        y, ctx = gpu.lt.gated_fwd(gpu.cp.asarray(np.zeros(shape, np.float32)), stream=gpu.stream)
        assert y.shape == (*shape[:-1], shape[-1] // 2)
        assert gpu.lt.gated_bwd(y, ctx, stream=gpu.stream).shape == shape
    gpu.synchronize(gpu.stream.ptr)
    assert len(gpu.kernels.launched) == before
