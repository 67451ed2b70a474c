"""Checks a layer's forward and backward pass on a pretended GPU against the float64 reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.problem import Activation, DType, Philox
from tests.host_kernels.arrays import assert_close
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import FLAT, Placed, host_of
from tests.support.strategies import LinearCase, lattice

Array = NDArray[Any]

EPSILON = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT64: 2.0**-53}
"""Half a unit in the last place of a type, relative to the number."""
TINY = 1e-6  # absolute tolerance for FP32 rounding in activations, and for FP16's subnormal numbers
_TF32 = 2.0**-11


def layer_case(**changes: Any) -> LinearCase:
    """Makes a test case: a layer of 24 rows, 32 outputs and 40 inputs in FP32 with GELU and a bias.

    Args:
        changes: values of fields of `LinearCase` that differ from these defaults.
    """
    activation = changes.pop("activation", "gelu")
    standard: dict[str, Any] = {
        "m": 24, "n": 32, "k": 40, "dtype": DType.FLOAT32, "compute": "float32",
        "activation": Activation(activation, 0.25), "bias": True, "dropout": 0.0, "rng": Philox(7, 2, 5),
        "accumulate": False, "accumulate_dx": False, "need": (True, True, True), "keep_z": False, "x": FLAT, "w": FLAT,
        "y": FLAT, "dy": FLAT, "dx": FLAT, "dw": FLAT, "add": None,
        "add_over_out": False, "data_seed": 1,
    }  # fmt: skip
    return LinearCase(**{**standard, **changes})


class LayerData:
    """The operands of a layer's test case, and the results that the reference computes from them."""

    def __init__(self, case: LinearCase, seed: int = 0) -> None:
        self._generator, self._dtype = np.random.default_rng((case.data_seed, seed)), case.dtype
        m, n, k = case.m, case.n, case.k
        self.x, self.w = self.draw((m, k)), self.draw((n, k))
        self.bias = self.draw((n,), np.sqrt(k)) if case.bias else None
        self.dy = self.draw((m, n))
        self.dw, self.db = self.draw((n, k), np.sqrt(m)), self.draw((n,), np.sqrt(m))
        self.dx = self.draw((m, k), np.sqrt(n))
        self.factors = reference.dropout_scale((m, n), case.dropout, case.rng) if case.dropout else np.ones((m, n))
        self.add = self.draw((m, n)) if case.add else None
        self.y, self.z = reference.linear_fwd(self.x, self.w, self.bias, case.activation, self.factors, self.add)
        self.gradients = reference.linear_bwd(self.dy, self.x, self.w, self.z, case.activation, self.factors)
        self.readings = readings(self.z, case.activation)

    def draw(self, shape: tuple[int, ...], size: float = 1.0) -> Array:
        """Draws exact numbers. `size` is the magnitude of a sum that the numbers are added to, for subclasses."""
        return lattice(self._generator, shape, self._dtype)


def readings(z: Array, activation: Activation) -> list[Array]:
    """Pre-activations at which the derivative may be evaluated, one per accepted convention: with cuBLASLt's mask,
    ReLU's derivative is 1 where z is exactly 0.
    """
    if activation.name != "relu" or (z != 0).all():
        return [z]
    return [z, np.where(z == 0, 1.0, z)]


def check_any(check: Callable[[Array], None], those: Sequence[Array]) -> None:
    """Runs several checks; fails, with the first check's error, only if all of them fail."""
    for each in those[1:]:
        with contextlib.suppress(AssertionError):
            return check(each)
    return check(those[0])


def forward_tolerance(case: LinearCase, data: LayerData) -> Array:
    """Bounds the output's error: rounding of the output, and of the pre-activation if it is stored first."""
    epsilon, slope = 2 * EPSILON[case.dtype], max(1.2, abs(case.activation.negative_slope))
    return epsilon * (np.abs(data.y) + slope * np.abs(data.z) * data.factors) + TINY * (1 + data.factors)


def dz_tolerance(case: LinearCase, data: LayerData) -> Array:
    """Bounds dz's error: rounding of dz, and of the saved tensor at which the derivative is evaluated."""
    upstream = np.abs(data.dy.astype(np.float64)) * data.factors
    slope = max(1.2, abs(case.activation.negative_slope))
    return upstream * (4 * EPSILON[case.dtype] * (slope + np.abs(data.z)) + TINY)


def product_tolerance(case: LinearCase, dz: Array, limit: Array, other: Array, result: Array) -> Array:
    """Bounds the error of a product of dz, which is rounded to its type, with an exact operand."""
    rounding = _TF32 if case.compute == "tf32" else 2.0**-20
    terms = (limit + rounding * np.abs(dz)) @ np.abs(other.astype(np.float64))
    return terms + 2 * EPSILON[case.dtype] * np.abs(result) + TINY


class Layer:
    """A case's operands on the GPU, and the calls with them.

    Args:
        stream: the argument `stream` of the calls; None for the current stream.
    """

    def __init__(self, gpu: FakeGpu, case: LinearCase, stream: Any = None, data: LayerData | None = None) -> None:
        self.gpu, self.case, self.stream = gpu, case, stream
        self.data = data or LayerData(case)
        self.x, self.w = Placed(gpu, self.data.x, case.x), Placed(gpu, self.data.w, case.w)
        self.bias = None if self.data.bias is None else gpu.cp.asarray(self.data.bias)
        self.dy = Placed(gpu, self.data.dy, case.dy)
        kind, m, n = case.dtype.numpy, case.m, case.n
        over_out = case.add_over_out and self.data.add is not None
        self.y = Placed(gpu, self.data.add if over_out else np.zeros((m, n), kind), case.y)
        self.add = self.y if over_out else None
        if self.data.add is not None and not over_out:
            self.add = Placed(gpu, self.data.add, case.add)
        self.z = Placed(gpu, np.zeros((m, n), kind), case.dy) if case.keep_z else None
        self.dx = Placed(gpu, self.data.dx, case.dx)
        self.dw, self.db = Placed(gpu, self.data.dw, case.dw), gpu.cp.asarray(self.data.db)

    def refill(self, seed: int) -> None:
        """Overwrites all arrays in place with new values, and resets the buffers for dx, dw and db."""
        self.data = LayerData(self.case, seed)
        for name in ("x", "w", "dy", "dx"):
            getattr(self, name).fill(getattr(self.data, name))
        if self.add:
            self.add.fill(self.data.add)
        if self.bias is not None:
            host_of(self.gpu, self.bias)[...] = self.data.bias
        self.dw.fill(self.data.dw)
        host_of(self.gpu, self.db)[...] = self.data.db

    def settings(self) -> dict[str, Any]:
        """Returns the options of a forward call, without arrays."""
        case, rng = self.case, self.case.rng
        return {
            "activation": case.activation.name,
            "negative_slope": case.activation.negative_slope,
            "dropout": case.dropout,
            "rng": self.gpu.lt.Philox(rng.seed, rng.layer, rng.step) if case.dropout else None,
            "compute": case.compute,
            "add": self.add.array if self.add else None,
        }

    def forward(self, *, into_buffers: bool = True) -> tuple[Any, Any]:
        """Runs forward; returns y and the context."""
        buffers = {"out": self.y.array, "out_z": self.z.array if self.z else None} if into_buffers else {}
        arrays = (self.x.array, self.w.array, self.bias)
        return self.gpu.lt.linear_fwd(*arrays, **self.settings(), **buffers, stream=self.stream)  # type: ignore[no-any-return]

    def backward(self, ctx: Any, *, into_buffers: bool = True, **more: Any) -> Any:
        """Runs backward; returns the gradients."""
        case = self.case
        need_dx, need_dw, need_db = case.need
        buffers = {"out_dx": self.dx.array, "out_dw": self.dw.array, "out_db": self.db} if into_buffers else {}
        asked = {"need_dx": need_dx, "need_dw": need_dw, "need_db": need_db, "accumulate": case.accumulate}
        asked["accumulate_dx"] = case.accumulate_dx
        return self.gpu.lt.linear_bwd(self.dy.array, ctx, **(asked | buffers | more), stream=self.stream)

    def wait(self) -> None:
        """Waits for the stream of the calls, and for no other stream."""
        current = self.gpu.cp.cuda.get_current_stream()
        self.gpu.synchronize((current if self.stream is None else self.stream).ptr)

    def check_forward(self, y: Any = None) -> None:
        """Checks y and the saved tensor.

        `y` is the array that the call returned; None if it has written the outputs into the buffer of this case.
        """
        self.wait()
        case, data = self.case, self.data
        made = self.y.values() if y is None else host_of(self.gpu, y).astype(np.float64)
        # cuBLASLt's GELU has an error that shows in TF32 results only: a rounding to 16 bits is larger, and in full
        # FP32 our own pass computes GELU.
        is_inexact = case.activation.name == "gelu" and case.compute == "tf32"
        inexact = self.gpu.gelu_error * np.abs(data.z) * data.factors if is_inexact else 0.0
        assert_close("y", made, data.y, forward_tolerance(case, data) + inexact)
        if self.z is not None:
            assert_close("z", self.z.values(), data.z, 2 * EPSILON[case.dtype] * np.abs(data.z))

    def check_backward(self, result: Any, accumulations: int = 1) -> None:
        """Checks that the requested gradients are right and in their buffers, and that the others are None.

        At pre-activations that are exactly 0, ReLU's derivative must be 0 everywhere or 1 everywhere; see `Saved`.
        """
        self.wait()
        data = self.data

        def check(z: Array) -> None:
            exact = reference.linear_bwd(data.dy, data.x, data.w, z, self.case.activation, data.factors)
            self._check_gradients(result, exact, accumulations)

        check_any(check, data.readings)

    def _check_gradients(self, result: Any, exact: Any, accumulations: int) -> None:
        case, limit = self.case, dz_tolerance(self.case, self.data)
        need_dx, need_dw, need_db = case.need
        assert (result.dx is None, result.dw is None) == (not need_dx, not need_dw)
        assert (result.db is None) == (not (need_db and case.bias))
        if need_dx:
            expected = self._summed(exact.dx, self.data.dx, accumulations, case.accumulate_dx)
            tolerance = accumulations * product_tolerance(case, exact.dz, limit, self.data.w, expected)
            tolerance += 2 * EPSILON[case.dtype] * np.abs(exact.dx) * case.accumulate_dx
            assert_close("dx", self._made(result.dx, self.dx), expected, tolerance)
        if need_dw:
            expected = self._summed(exact.dw, self.data.dw, accumulations, case.accumulate)
            tolerance = accumulations * product_tolerance(case, exact.dz.T, limit.T, self.data.x, expected)
            assert_close("dw", self._made(result.dw, self.dw), expected, tolerance)
        if result.db is not None:
            expected = self._summed(exact.db, self.data.db, accumulations, case.accumulate)
            tolerance = limit.sum(axis=0) + 2 * EPSILON[case.dtype] * np.abs(expected) + TINY
            tolerance = accumulations * (tolerance + 2.0**-20 * np.abs(exact.dz).sum(axis=0))
            assert_close("db", host_of(self.gpu, result.db).astype(np.float64), expected, tolerance)

    def _summed(self, gradient: Array, before: Array, times: int, accumulates: bool) -> Array:
        """Computes the expected contents of an accumulating buffer after `passes` backward passes."""
        return before.astype(np.float64) + times * gradient if accumulates else gradient

    def _made(self, array: Any, buffer: Placed) -> Array:
        """Returns a result's values, from the case's buffer if the call wrote there."""
        return buffer.values() if array is buffer.array else host_of(self.gpu, array).astype(np.float64)

    def check(self) -> None:
        """Runs and checks forward and backward, once each."""
        y, ctx = self.forward()
        assert y is self.y.array
        self.check_forward()
        self.check_backward(self.backward(ctx))
