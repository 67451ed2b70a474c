"""Comparison of LayerNorm and RMSNorm, and of their gradients, with the reference in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import DType
from lt_runtime.reference.norm import layer_norm_fwd, norm_bwd, rms_norm_fwd
from tests.host_kernels.arrays import EPS32, assert_close, rounding
from tests.support.placed import FLAT, Placed
from tests.support.strategies import Placement

Array = NDArray[Any]
SUM_ERROR: Final = 64 * EPS32
"""Bound of the error of a sum over a row, relative to the sum of magnitudes: a thread adds up few numbers."""


def check_forward(
    x: Array, weight: Array, bias: Array | None, eps: float, results: tuple[Array, Array | None, Array]
) -> None:
    """Checks y (M, N), the means and the reciprocal deviations (M,).

    Args:
        x: the normalised array, (M, N), of the operands' type.
        results: the mean is None for RMSNorm.
    """
    dtype, (y, mean, rstd) = DType.parse("x", x.dtype), results
    magnitudes = np.abs(x.astype(np.float64))
    of_rows = magnitudes.mean(axis=1)
    if mean is None:
        exact = rms_norm_fwd(x, weight, eps=eps)
    else:
        exact = layer_norm_fwd(x, weight, bias, eps=eps)
        assert exact.mean is not None
        assert_close("mean", mean, exact.mean, SUM_ERROR * of_rows)
    assert_close("rstd", rstd, exact.rstd, SUM_ERROR * exact.rstd)
    error = SUM_ERROR * (of_rows[:, None] + magnitudes) * exact.rstd[:, None] * np.abs(weight.astype(np.float64))
    error += 0.0 if bias is None else 4 * EPS32 * np.abs(bias.astype(np.float64))
    assert_close("y", y, exact.y, rounding(dtype, exact.y) + error)


def check_backward(
    operands: tuple[Array, Array, Array],
    statistics: tuple[Array | None, Array],
    add: Array | None,
    starts: Sequence[Array | float],
    results: Sequence[Array | None],
) -> None:
    """Checks dx (M, N), dweight and dbias (N,), each of which may be None.

    Args:
        operands: dy and x (M, N), and weight (N,), of their types. statistics: mean, None for RMSNorm, and rstd.
        add: the gradient that is added to dx. starts: the buffers' earlier values, to which dweight and dbias are
            added.
    """
    dtype, kind = (DType.parse("an operand", each.dtype) for each in operands[1:])
    dy, x, weight = (each.astype(np.float64) for each in operands)
    mean, rstd = statistics
    exact, g, of_row = norm_bwd(*operands, mean, rstd), np.abs(dy * weight), rstd.astype(np.float64)[:, None]
    normalised = np.abs(x - (0.0 if mean is None else mean.astype(np.float64)[:, None])) * of_row
    off = EPS32 * (2 * np.abs(x) * of_row + 4 * normalised)  # error of a normalised element
    if results[0] is not None:
        added = np.zeros_like(x) if add is None else add.astype(np.float64)
        product, size = (g * normalised).mean(axis=1, keepdims=True), g.mean(axis=1, keepdims=True)
        error = 8 * EPS32 * g + SUM_ERROR * (size + (1 + normalised) * product)
        error += off * product + (1 + normalised) * (g * off).mean(axis=1, keepdims=True)
        expected = exact.dx + added
        limit = rounding(dtype, expected) + error * of_row + 4 * EPS32 * (np.abs(added) + np.abs(expected))
        assert_close("dx", results[0], expected, limit)
    terms = (np.abs(dy) * normalised, np.abs(dy) * off), (np.abs(dy), np.zeros_like(dy))
    for name, made, gradient, start, (term, term_off) in zip(
        ("dweight", "dbias"), results[1:], exact[1:], starts, terms, strict=True
    ):
        if made is not None:
            total = gradient + start
            additions = (len(x) + 4) * EPS32 * (np.abs(start) + term.sum(axis=0)) + term_off.sum(axis=0)
            assert_close(name, made, total, rounding(kind, total) + additions)


class NormCall:
    """A forward and a backward call on a GPU, pretended or real, with a buffer for every result.

    Args:
        kind: the norm: "layer_norm" or "rms_norm".
        shape: (rows, cols) or (batch, rows, cols).
        weight: type of weight and bias.
        places: placement of each matrix, by name; of those left out, without gaps.
        adds: whether a residual is added, and backward a gradient to dx.
        over: whether y and dx lie over the residual and over the gradient that is added.
    """

    def __init__(
        self,
        gpu: Any,
        kind: str,
        shape: tuple[int, ...],
        dtype: DType = DType.FLOAT32,
        weight: DType = DType.FLOAT32,
        *,
        places: Mapping[str, Placement] = MappingProxyType({}),
        adds: bool = True,
        over: bool = False,
        accumulate: bool = False,
        shift: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.gpu, self.kind, self.adds, self.accumulate = gpu, kind, adds, accumulate
        self._shape, self._dtype, self._weight, self._shift = shape, dtype, weight, shift
        self._draw(seed)
        self.of = {name: Placed(gpu, each, places.get(name, FLAT)) for name, each in self.values.items()}
        if over:
            self.of["y"], self.of["dx"] = self.of["add"], self.of["add_dx"]
        self.vectors = {name: gpu.cp.asarray(each) for name, each in self._vectors.items()}
        rows = int(np.prod(shape[:-1]))
        names = ("out_mean", "out_rstd")[0 if kind == "layer_norm" else 1 :]
        self.statistics = {name: gpu.cp.asarray(np.zeros(rows, np.float32)) for name in names}
        gpu.synchronize_all()

    def _draw(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        names = ("x", "add", "y", "total", "dy", "add_dx", "dx")
        self.values = {
            name: (generator.standard_normal(self._shape, np.float32) + (self._shift if name == "x" else 0.0)).astype(
                self._dtype.numpy
            )
            for name in names
        }
        self._vectors = {
            name: generator.standard_normal(self._shape[-1], np.float32).astype(self._weight.numpy)
            for name in ("weight", "bias", "dweight", "dbias")
        }

    def refill(self, seed: int) -> None:
        """Writes new operands into the same memory of the pretended GPU."""
        self._draw(seed)
        # In reversed order operands follow results: where the two share memory, the operand's values are written last.
        for name, each in reversed(self.of.items()):
            each.fill(self.values[name])
        for name, vector in self.vectors.items():
            self.gpu.host_of(vector)[...] = self._vectors[name]

    @property
    def has_mean(self) -> bool:
        return self.kind == "layer_norm"

    def forward_arguments(self) -> tuple[list[Any], dict[str, Any]]:
        names = ("weight", "bias") if self.has_mean else ("weight",)
        operands = [self.of["x"].array, *(self.vectors[name] for name in names)]
        residual = {"add": self.of["add"].array, "out_sum": self.of["total"].array} if self.adds else {}
        return operands, {"out": self.of["y"].array, **residual, **self.statistics, "stream": self.gpu.stream}

    def forward(self) -> Any:
        operands, options = self.forward_arguments()
        y, ctx = getattr(self.gpu.lt, f"{self.kind}_fwd")(*operands, **options)
        assert y is self.of["y"].array
        assert ctx.x is (self.of["total"] if self.adds else self.of["x"]).array
        return ctx

    def backward_options(self) -> dict[str, Any]:
        names = ("dweight", "dbias") if self.has_mean else ("dweight",)
        results = {f"out_{name}": self.vectors[name] for name in names}
        add = {"add": self.of["add_dx"].array} if self.adds else {}
        options = {"out_dx": self.of["dx"].array, **results, **add, "accumulate": self.accumulate}
        return options | {"stream": self.gpu.stream}

    def backward(self, ctx: Any) -> None:
        made = getattr(self.gpu.lt, f"{self.kind}_bwd")(self.of["dy"].array, ctx, **self.backward_options())
        assert made.dx is self.of["dx"].array
        assert made.dweight is self.vectors["dweight"]

    def check(self) -> None:
        """Compares all results of both calls with the reference, after all work."""
        self.gpu.synchronize(self.gpu.stream.ptr)
        cols = self._shape[-1]
        x, dy, add = (self.values[name].reshape(-1, cols) for name in ("x", "dy", "add_dx"))
        if self.adds:
            residual = self.values["add"].reshape(-1, cols)
            x = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
            np.testing.assert_array_equal(self.of["total"].values().reshape(-1, cols), x.astype(np.float64))
        *mean, rstd = (self.gpu.host_of(each).copy() for each in self.statistics.values())
        statistics = mean[0] if mean else None, rstd
        y, dx = (self.of[name].values().reshape(-1, cols) for name in ("y", "dx"))
        weight, bias = self._vectors["weight"], self._vectors["bias"] if self.has_mean else None
        eps = 1e-5 if self.has_mean else 1e-6
        check_forward(x, weight, bias, eps, (y, *statistics))
        sums = [self.gpu.host_of(self.vectors[name]).copy() for name in ("dweight", "dbias")]
        starts = [self._vectors[name].astype(np.float64) if self.accumulate else 0.0 for name in ("dweight", "dbias")]
        results = dx, sums[0], sums[1] if self.has_mean else None
        check_backward((dy, x, weight), statistics, add if self.adds else None, starts, results)
