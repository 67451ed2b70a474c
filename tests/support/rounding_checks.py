"""Checks that a 16-bit result is rounded once: calls on normally distributed data, against a bound of one rounding.

A result may be off by one unit in its last place, by what summing in FP32 costs, and by the approximation of an
activation. Where the pre-activation is stored in 16 bits, its activation may be that of the rounded one. A product that
is rounded before a bias or C is added exceeds this bound many times wherever the two nearly cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Order, layout_of
from lt_runtime.problem import Activation, DType
from tests.support.strategies import LinearCase, MatmulCase, Placement, linear_cases, matmul_cases

Array = NDArray[Any]

_FRACTION_BITS: Final = {DType.FLOAT16: 10, DType.BFLOAT16: 7}
_LEAST_EXPONENT: Final = {DType.FLOAT16: -14, DType.BFLOAT16: -126}
_FLAT: Final = Placement(column_major=False, gap=0, offset=0)
# The same bounds as in `tuner.verification`, which says where they come from.
_GELU_ERROR: Final = 1e-4
_GELU_DERIVATIVE_ERROR: Final = 1e-3
_ACTIVATION_ERROR: Final = 1e-6  # error of the activations in FP32 arithmetic


class Matrix(Protocol):
    """A matrix, or a batch of them, in a larger buffer."""

    array: Any

    def values(self) -> NDArray[np.float64]:
        """The matrix's values; fails if memory around the matrix was written."""


class Machine(Protocol):
    """The machine on which the calls run: a real GPU or the pretended one.

    Attributes:
        lt: the package.
        stream: passed to the calls.
    """

    lt: Any
    stream: Any

    def place(self, values: Array, placement: Placement, multiple: int = 1) -> Matrix:
        """Puts a matrix into device memory; its leading dimension is rounded up to a multiple of `multiple`."""

    def array(self, values: Array) -> Any:
        """A packed array in device memory."""

    def host(self, array: Any) -> Array:
        """Returns an array's values, in its own type."""

    def wait(self) -> None:
        """Waits for all work on the stream."""


@st.composite
def sixteen_bit_layers(draw: st.DrawFn) -> LinearCase:
    """Layers of FP16 or BF16."""
    dtype = draw(st.sampled_from((DType.FLOAT16, DType.BFLOAT16)))
    return dataclasses.replace(draw(linear_cases()), dtype=dtype, compute="float32")


@st.composite
def sixteen_bit_products(draw: st.DrawFn) -> MatmulCase:
    """Products of FP16 or BF16, whose results have that type too."""
    dtype = draw(st.sampled_from((DType.FLOAT16, DType.BFLOAT16)))
    epilogue = draw(st.sampled_from(Epilogue))
    case = draw(matmul_cases())
    c = case.d if epilogue.sums_operand else case.c
    return dataclasses.replace(case, dtype=dtype, d_dtype=dtype, compute="float32", epilogue=epilogue, c=c)


def unit(values: Array, dtype: DType) -> Array:
    """The distance of neighbouring numbers of a type, at each value."""
    exponents = np.frexp(np.abs(values))[1] - 1
    return np.ldexp(1.0, np.maximum(exponents, _LEAST_EXPONENT[dtype]) - _FRACTION_BITS[dtype])


def summing_error(terms: int, magnitudes: Array) -> Array:
    """Bound of the error of an FP32 sum, from its number of terms and the sum of their magnitudes.

    Rounding errors mostly cancel, whatever the order of the additions. Tensor cores truncate instead of rounding, so
    that their error is a few times larger.
    """
    return 2.0**-22 * (8 + np.sqrt(terms)) * magnitudes


def check_rounded_once(name: str, actual: Array, exact: Array, error: Array, dtype: DType) -> None:
    """Fails, naming the worst element, unless every element is the rounding of some number at most `error` away from
    `exact`.
    """
    excess = np.abs(actual.astype(np.float64) - exact) / (unit(np.abs(exact) + error, dtype) + error)
    if excess.size and not (excess <= 1).all():  # NaN is wrong
        worst = np.unravel_index(np.argmax(np.nan_to_num(excess, nan=np.inf)), excess.shape)
        raise AssertionError(
            f"{name}{tuple(map(int, worst))} is {actual[worst]} and not {exact[worst]}: "
            f"that is {excess[worst]:.3g} times the bound of a single rounding"
        )


def spread(function: Callable[[Array], Array], at: Array, error: Array) -> Array:
    """Largest change of a function's value if its argument is off by at most `error`."""
    value = function(at)
    return np.maximum(np.abs(function(at + error) - value), np.abs(function(at - error) - value))


def _wide(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64)


def _normal(generator: np.random.Generator, shape: tuple[int, ...], dtype: DType, scale: float = 1.0) -> Array:
    values: Array = (scale * generator.standard_normal(shape)).astype(dtype.numpy)
    return values


class RoundedLayer:
    """A layer's operands on the host, and its calls with them, on a machine."""

    def __init__(self, machine: Machine, case: LinearCase) -> None:
        self.machine, self.case = machine, case
        generator = np.random.default_rng(case.data_seed)
        m, n, k, kind = case.m, case.n, case.k, case.dtype
        # The bias is as large as the product, so that the two often nearly cancel.
        self.x, self.w = _normal(generator, (m, k), kind), _normal(generator, (n, k), kind)
        self.bias = _normal(generator, (n,), kind, np.sqrt(k)) if case.bias else None
        self.dy = _normal(generator, (m, n), kind)
        self.dw, self.db = (_normal(generator, s, kind, np.sqrt(m)) for s in ((n, k), (n,)))
        self.factors = reference.dropout_scale((m, n), case.dropout, case.rng) if case.dropout else np.ones((m, n))
        self.exact_y, self.z = reference.linear_fwd(self.x, self.w, self.bias, case.activation, self.factors)
        magnitudes = np.abs(_wide(self.x)) @ np.abs(_wide(self.w)).T
        magnitudes += 0.0 if self.bias is None else np.abs(_wide(self.bias))
        self.z_error = summing_error(k, magnitudes)

    def check(self) -> None:
        """Runs and checks inference, forward and backward, once each."""
        operands = self._operands()
        if not self.case.dropout:
            y = self._empty(self.case.y)
            self.machine.lt.linear(*operands, **self._activation(), out=y.array, stream=self.machine.stream)
            self._check_y("y of linear", y)
        y, z = self._empty(self.case.y), self._empty(self.case.dy) if self.case.keep_z else None
        _, ctx = self.machine.lt.linear_fwd(
            *operands,
            **self._activation(),
            dropout=self.case.dropout,
            rng=self._rng(),
            out=y.array,
            out_z=z.array if z else None,
            stream=self.machine.stream,
        )
        self._check_y("y of linear_fwd", y)
        if z is not None:
            check_rounded_once("z", z.values(), self.z, self.z_error, self.case.dtype)
        self._check_backward(ctx)

    def _operands(self) -> tuple[Any, Any, Any]:
        place, case = self.machine.place, self.case
        bias = None if self.bias is None else self.machine.array(self.bias)
        return place(self.x, case.x).array, place(self.w, case.w).array, bias

    def _activation(self) -> dict[str, Any]:
        """The epilogue is compared by name, because the package's copy on a pretended GPU has other classes."""
        activation = self.case.activation
        return {"activation": activation.name, "negative_slope": activation.negative_slope}

    def _rng(self) -> Any:
        rng = self.case.rng
        return self.machine.lt.Philox(rng.seed, rng.layer, rng.step) if self.case.dropout else None

    def _empty(self, placement: Placement, shape: tuple[int, int] | None = None) -> Matrix:
        return self.machine.place(np.zeros(shape or self.z.shape, self.case.dtype.numpy), placement)

    def _check_y(self, name: str, y: Matrix) -> None:
        self.machine.wait()
        activation = self.case.activation
        by_pass = activation.name != "none" or self.case.dropout
        error = self._stored_z_error() if by_pass else self.z_error
        error = spread(lambda z: reference.activate(z, activation), self.z, error) + _ACTIVATION_ERROR
        if activation.name == "gelu":
            error = error + _GELU_ERROR * np.abs(self.z)
        check_rounded_once(name, y.values(), self.exact_y, error * self.factors, self.case.dtype)

    def _stored_z_error(self) -> Array:
        return self.z_error + unit(np.abs(self.z) + self.z_error, self.case.dtype) / 2

    def _check_backward(self, ctx: Any) -> None:
        """Checks that dz is the rounding of its exact value, and that dx, dw and db are roundings of the exact results
        computed from the rounded dz.
        """
        case, machine = self.case, self.machine
        changes = case.activation.name != "none" or case.dropout > 0
        need_dx, need_dw, need_db = case.need
        dy, dz = machine.place(self.dy, case.dy), self._empty(case.dy) if changes else None
        dx, dw = self._empty(case.dx, self.x.shape), machine.place(self.dw, case.dw)
        db = machine.array(self.db)
        machine.lt.linear_bwd(
            dy.array, ctx, need_dx=need_dx, need_dw=need_dw, need_db=need_db, accumulate=case.accumulate,
            out_dx=dx.array, out_dw=dw.array, out_db=db, out_dz=dz.array if dz else None,
            stream=machine.stream,
        )  # fmt: skip
        machine.wait()
        rounded = self._checked_dz(dz) if dz else _wide(self.dy)
        x, w = _wide(self.x), _wide(self.w)
        if need_dx:
            error = summing_error(case.n, np.abs(rounded) @ np.abs(w))
            check_rounded_once("dx", dx.values(), rounded @ w, error, case.dtype)
        before_dw, before_db = (_wide(each) * case.accumulate for each in (self.dw, self.db))
        if need_dw:
            error = summing_error(case.m, np.abs(rounded).T @ np.abs(x) + np.abs(before_dw))
            if case.accumulate:  # cuBLASLt rounds the product before it adds the old gradient
                error = error + unit(rounded.T @ x, case.dtype) / 2
            check_rounded_once("dw", dw.values(), rounded.T @ x + before_dw, error, case.dtype)
        if need_db and case.bias:
            # Our kernel sums dz before it is rounded to 16 bits; the roundings differ from element to element.
            units = unit(rounded, case.dtype) if dz else np.zeros_like(rounded)
            error = summing_error(case.m, np.abs(rounded).sum(axis=0) + np.abs(before_db))
            error += 2 * np.sqrt((units**2).sum(axis=0))
            check_rounded_once("db", machine.host(db), rounded.sum(axis=0) + before_db, error, case.dtype)

    def _checked_dz(self, dz: Matrix) -> NDArray[np.float64]:
        """Checks dz and returns it as it was written."""
        activation = self.case.activation
        error = spread(lambda z: reference.derivative(z, activation), self.z, self._stored_z_error())
        if activation.name in ("sigmoid", "tanh"):  # the derivative is computed from the rounded output
            error += 2 * unit(self.exact_y, self.case.dtype)
        upstream = _wide(self.dy) * self.factors
        exact = upstream * reference.derivative(self.z, activation)
        made = dz.values()
        check_rounded_once("dz", made, exact, np.abs(upstream) * (error + _ACTIVATION_ERROR), self.case.dtype)
        return made


class RoundedProduct:
    """A product's operands on the host, and the call with them, on a machine."""

    def __init__(self, machine: Machine, case: MatmulCase) -> None:
        self.machine, self.case = machine, case
        generator = np.random.default_rng(case.data_seed)
        counts = {count for count in case.batches[:2] if count is not None}
        self.batch = max(counts) if counts else None
        m, n, k, scale = case.m, case.n, case.k, np.sqrt(case.k)
        self.a, self.b = self._draw(generator, case.batches[0], m, k), self._draw(generator, case.batches[1], k, n)
        self.c = self._draw(generator, self.batch, m, n, scale) if case.with_c else None
        self.bias = _normal(generator, (n,), case.dtype, scale) if case.epilogue.has_bias else None
        self.aux = self._draw(generator, self.batch, m, n)  # the pre-activation at which the derivative is evaluated
        a, b = _wide(self.a), _wide(self.b)
        self.sum = case.alpha * (a @ b)
        magnitudes = abs(case.alpha) * (np.abs(a) @ np.abs(b))
        for addend, factor in ((self.c, case.beta), (self.bias, 1.0)):
            if addend is not None:
                self.sum = self.sum + factor * _wide(addend)
                magnitudes = magnitudes + abs(factor) * np.abs(_wide(addend))
        self.error = summing_error(k, magnitudes)
        adds_bias_in_place = case.in_place and case.epilogue is Epilogue.BIAS
        by_library = case.epilogue is Epilogue.NONE or case.epilogue.sums_operand or adds_bias_in_place
        lies_as_d = case.in_place or case.c.column_major == case.d.column_major
        if case.with_c and by_library and lies_as_d:  # the library rounds the product before it adds C
            self.error = self.error + unit(case.alpha * (a @ b), case.dtype) / 2

    def _draw(self, generator: np.random.Generator, batch: int | None, rows: int, cols: int, scale: float = 1) -> Array:
        return _normal(generator, (rows, cols) if batch is None else (batch, rows, cols), self.case.dtype, scale)

    def check(self) -> None:
        """Makes one call and checks all its results."""
        case, machine = self.case, self.machine
        start = self.c if self.c is not None and case.in_place else np.zeros_like(self.aux)
        out = machine.place(start, case.d)
        operands: dict[str, Any] = {"alpha": self._scalar(case.alpha), "beta": self._scalar(case.beta)}
        if self.c is not None:
            operands["c"] = out.array if case.in_place else machine.place(self.c, case.c).array
        if self.bias is not None:
            offset = Placement(column_major=False, gap=0, offset=case.bias_offset)
            operands["bias"] = machine.place(self.bias[None, :], offset).array[0]
        if case.epilogue.has_bias_gradient:
            length = case.m if case.epilogue is Epilogue.BGRADA else case.n
            shape = (length,) if self.batch is None else (self.batch, length)
            operands["bias_gradient"] = machine.array(np.zeros(shape, case.dtype.numpy))
        in_columns = self._lies_in_columns(out.array)
        aux = self._placed_aux(in_columns)
        if aux is not None:
            operands["aux"] = aux.array
        elif case.epilogue.has_aux_output or case.epilogue.is_derivative:
            operands["aux"] = machine.array(self._mask(in_columns))
        machine.lt.matmul(
            machine.place(self.a, case.a).array, machine.place(self.b, case.b).array, **operands,
            epilogue=case.epilogue.value, out=out.array, stream=machine.stream,
        )  # fmt: skip
        machine.wait()
        exact, error = self._expected()
        check_rounded_once("d", out.values(), exact, error, case.dtype)
        if case.epilogue.has_aux_output:
            if aux is not None:
                check_rounded_once("aux", aux.values(), self.sum, self.error, case.dtype)
            else:
                self._check_mask(machine.host(operands["aux"]), in_columns)
        if case.epilogue.has_bias_gradient:
            self._check_sums(machine.host(operands["bias_gradient"]), exact, error)

    def _scalar(self, value: float) -> Any:
        return self.machine.array(np.array([value], np.float32)) if self.case.device_scalars else value

    def _lies_in_columns(self, out: Any) -> bool:
        """Whether the package treats D as column-major. A matrix that is both row- and column-major counts as
        row-major.
        """
        strides = [stride // out.itemsize for stride in out.strides]
        return layout_of("out", out.shape[-2:], strides[-2:]).order is Order.COLUMN

    def _placed_aux(self, in_columns: bool) -> Matrix | None:
        """A buffer for GELU's pre-activation, or the pre-activation at which GELU's derivative is evaluated; None for
        other epilogues.
        """
        epilogue = self.case.epilogue
        if epilogue.activation != "gelu" or not (epilogue.has_aux_output or epilogue.is_derivative):
            return None
        values = self.aux if epilogue.is_derivative else np.zeros_like(self.aux)
        return self.machine.place(values, Placement(in_columns, self.case.d.gap, 0), 8)

    def _mask(self, in_columns: bool) -> Array:
        """The ReLU mask from which the derivative is read, or a buffer for the mask."""
        positive = _wide(self.aux) > 0
        mask = reference.pack_mask(np.swapaxes(positive, -1, -2) if in_columns else positive)
        return mask if self.case.epilogue.is_derivative else np.zeros_like(mask)

    def _expected(self) -> tuple[Array, Array]:
        """D before rounding, and the bound of its error."""
        epilogue = self.case.epilogue
        activation, is_gelu = Activation(epilogue.activation), epilogue.activation == "gelu"
        if epilogue.is_derivative:
            slope = reference.derivative(self.aux, activation)
            inexact = _GELU_DERIVATIVE_ERROR if is_gelu else 0.0
            # The library may round the product before it multiplies the product by GELU's derivative.
            error = self.error + (unit(self.sum, self.case.dtype) / 2 if is_gelu else 0.0)
            return self.sum * slope, error * np.abs(slope) + inexact * np.abs(self.sum)
        error, inexact = self.error, _GELU_ERROR if is_gelu else 0.0
        if is_gelu and epilogue.has_aux_output:
            error = error + unit(np.abs(self.sum) + error, self.case.dtype) / 2
        moved = spread(lambda z: reference.activate(z, activation), self.sum, error)
        return reference.activate(self.sum, activation), moved + inexact * np.abs(self.sum)

    def _check_mask(self, mask: Array, in_columns: bool) -> None:
        bits = reference.unpack_mask(mask, self.case.m if in_columns else self.case.n)
        positive = np.swapaxes(bits, -1, -2) if in_columns else bits
        wrong = (positive != (self.sum > 0)) & (np.abs(self.sum) > self.error)
        assert not wrong.any(), f"{int(wrong.sum())} bits of ReLU's mask are wrong"

    def _check_sums(self, made: Array, exact: Array, error: Array) -> None:
        """The expected bias gradient: the sum of an operand, or of D, either before or after D is rounded."""
        epilogue, dtype = self.case.epilogue, self.case.dtype
        if epilogue.sums_operand:
            operand, axis = (self.a, -1) if epilogue is Epilogue.BGRADA else (self.b, -2)
            values, terms = _wide(operand), self.case.k
            limit = summing_error(terms, np.abs(values).sum(axis=axis))
            expected = values.sum(axis=axis)
        else:
            expected = exact.sum(axis=-2)
            roundings = unit(exact, dtype)
            limit = error.sum(axis=-2) + 2 * np.sqrt((roundings**2).sum(axis=-2))
            limit += summing_error(self.case.m, np.abs(exact).sum(axis=-2))
        check_rounded_once("bias_gradient", made, np.broadcast_to(expected, made.shape), limit, dtype)
