"""Checks that a 16-bit result is rounded once: calls on normally distributed data, against a bound of one rounding.

A result may be off by one unit in its last place, by what summing in FP32 costs, and by the approximation of an
activation. Where the pre-activation is stored in 16 bits, its activation may be that of the rounded one. A product that
is rounded before a bias or C is added exceeds this bound many times wherever the two nearly cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Activation, DType
from tests.support.layer_checks import Layer, LayerData
from tests.support.matmul_checks import Product
from tests.support.placed import Placed, host_of
from tests.support.strategies import LinearCase, MatmulCase, Placement, linear_cases, matmul_cases

Array = NDArray[Any]

_FRACTION_BITS: Final = {DType.FLOAT16: 10, DType.BFLOAT16: 7}
_LEAST_EXPONENT: Final = {DType.FLOAT16: -14, DType.BFLOAT16: -126}
# Bounds of the errors of cuBLASLt's GELU; `tuner.verification` has the same and says where they come from.
_GELU_ERROR: Final = 1e-4
_GELU_DERIVATIVE_ERROR: Final = 1e-3
_ACTIVATION_ERROR: Final = 1e-6  # error of the activations in FP32 arithmetic


_FLAT: Final = Placement(column_major=False, gap=0, offset=0)
BIAS_OVER_C: Final = MatmulCase(
    m=1, n=16, k=8, batches=(None, None, None), dtype=DType.FLOAT16, compute="float32", d_dtype=DType.FLOAT16,
    epilogue=Epilogue.BIAS, alpha=1.0, beta=1.0, with_c=True, in_place=True, device_scalars=False, a=_FLAT, b=_FLAT,
    c=_FLAT, d=_FLAT, bias_offset=0, data_seed=0,
)  # fmt: skip
"""A product with a bias whose C and D are the same memory: on an H200 cuBLASLt rounds it up to three times."""


@st.composite
def sixteen_bit_layers(draw: st.DrawFn) -> LinearCase:
    """Hypothesis strategy of layers in FP16 or BF16."""
    dtype = draw(st.sampled_from((DType.FLOAT16, DType.BFLOAT16)))
    return dataclasses.replace(draw(linear_cases()), dtype=dtype, compute="float32", add_over_out=False)


@st.composite
def sixteen_bit_products(draw: st.DrawFn) -> MatmulCase:
    """Hypothesis strategy of products of FP16 or BF16 operands with results of the same type."""
    dtype = draw(st.sampled_from((DType.FLOAT16, DType.BFLOAT16)))
    epilogue = draw(st.sampled_from(Epilogue))
    case = draw(matmul_cases())
    c = case.d if epilogue.sums_operand else case.c
    return dataclasses.replace(case, dtype=dtype, d_dtype=dtype, compute="float32", epilogue=epilogue, c=c)


def unit(values: Array, dtype: DType) -> Array:
    """Returns the distance of neighbouring numbers of a type, at each value."""
    exponents = np.frexp(np.abs(values))[1] - 1
    return np.ldexp(1.0, np.maximum(exponents, _LEAST_EXPONENT[dtype]) - _FRACTION_BITS[dtype])


def summing_error(terms: int, magnitudes: Array) -> Array:
    """Bounds the error of an FP32 sum, from its number of terms and the sum of their magnitudes.

    Rounding errors mostly cancel, whatever the order of the additions. Tensor cores truncate instead of rounding, so
    that their error is a few times larger.
    """
    return 2.0**-22 * (8 + np.sqrt(terms)) * magnitudes


def check_rounded_once(name: str, actual: Array, exact: Array, error: Array, dtype: DType) -> None:
    """Fails, naming the worst element, unless every element is the rounding of some number at most `error` away from
    `exact`.
    """
    excess = np.abs(actual.astype(np.float64) - exact) / (unit(np.abs(exact) + error, dtype) + error)
    if excess.size and not (excess <= 1).all():  # the comparison is negated so that NaN counts as wrong
        worst = np.unravel_index(np.argmax(np.nan_to_num(excess, nan=np.inf)), excess.shape)
        raise AssertionError(
            f"{name}{tuple(map(int, worst))} is {actual[worst]} and not {exact[worst]}: "
            f"that is {excess[worst]:.3g} times the bound of a single rounding"
        )


def spread(function: Callable[[Array], Array], at: Array, error: Array) -> Array:
    """Bounds the change of a function's value if its argument is off by at most `error`."""
    value = function(at)
    return np.maximum(np.abs(function(at + error) - value), np.abs(function(at - error) - value))


def _wide(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64)


def _normal(generator: np.random.Generator, shape: tuple[int, ...], dtype: DType, scale: float = 1.0) -> Array:
    values: Array = (scale * generator.standard_normal(shape)).astype(dtype.numpy)
    return values


class _NormalData(LayerData):
    """Random operands whose sums often nearly cancel: bias and old gradients have the size of the products."""

    def draw(self, shape: tuple[int, ...], size: float = 1.0) -> Array:
        return _normal(self._generator, shape, self._dtype, size)


class RoundedLayer(Layer):
    """A layer over normally distributed numbers, whose results must be rounded once."""

    def __init__(self, gpu: Any, case: LinearCase, stream: Any = None) -> None:
        super().__init__(gpu, case, stream, _NormalData(case))
        self.exact_z = self.data.z
        magnitudes = np.abs(_wide(self.data.x)) @ np.abs(_wide(self.data.w)).T
        magnitudes += 0.0 if self.data.bias is None else np.abs(_wide(self.data.bias))
        self.z_error = summing_error(case.k, magnitudes)

    def check(self) -> None:
        """Runs and checks inference, forward and backward, once each."""
        if not self.case.dropout:
            y, settings = self._empty(self.case.y), self.settings()
            options = {name: settings[name] for name in ("activation", "negative_slope", "add")}
            operands = self.x.array, self.w.array, self.bias
            self.gpu.lt.linear(*operands, **options, out=y.array, stream=self.stream)
            self._check_y("y of linear", y)
        _, ctx = self.forward()
        self._check_y("y of linear_fwd", self.y)
        if self.z is not None:
            check_rounded_once("z", self.z.values(), self.exact_z, self.z_error, self.case.dtype)
        self._check_gradients_of(ctx)

    def _empty(self, placement: Placement) -> Placed:
        return Placed(self.gpu, np.zeros(self.exact_z.shape, self.case.dtype.numpy), placement)

    def _check_y(self, name: str, y: Placed) -> None:
        self.wait()
        activation = self.case.activation
        by_pass = activation.name != "none" or self.case.dropout
        error = self._stored_z_error() if by_pass else self.z_error
        error = spread(lambda z: reference.activate(z, activation), self.exact_z, error) + _ACTIVATION_ERROR
        if activation.name == "gelu":
            error = error + _GELU_ERROR * np.abs(self.exact_z)
        error = error * self.data.factors
        if self.data.add is not None and not by_pass:  # cuBLASLt rounds the product before it adds C
            error = error + unit(np.abs(self.exact_z) + self.z_error, self.case.dtype) / 2
        check_rounded_once(name, y.values(), self.data.y, error, self.case.dtype)

    def _stored_z_error(self) -> Array:
        return self.z_error + unit(np.abs(self.exact_z) + self.z_error, self.case.dtype) / 2

    def _check_gradients_of(self, ctx: Any) -> None:
        """Checks that dz is the rounding of its exact value, and that dx, dw and db are roundings of the exact results
        computed from the rounded dz.
        """
        case, data = self.case, self.data
        dz = self._empty(case.dy) if case.activation.name != "none" or case.dropout > 0 else None
        self.backward(ctx, out_dz=dz.array if dz else None)
        self.wait()
        need_dx, need_dw, need_db = case.need
        rounded = self._checked_dz(dz) if dz else _wide(data.dy)
        x, w = _wide(data.x), _wide(data.w)
        if need_dx:
            before_dx = _wide(data.dx) * case.accumulate_dx
            error = summing_error(case.n, np.abs(rounded) @ np.abs(w) + np.abs(before_dx))
            if case.accumulate_dx:  # cuBLASLt rounds the product before it adds the values in the buffer
                error = error + unit(rounded @ w, case.dtype) / 2
            check_rounded_once("dx", self.dx.values(), rounded @ w + before_dx, error, case.dtype)
        before_dw, before_db = (_wide(each) * case.accumulate for each in (data.dw, data.db))
        if need_dw:
            error = summing_error(case.m, np.abs(rounded).T @ np.abs(x) + np.abs(before_dw))
            if case.accumulate:  # cuBLASLt rounds the product before it adds the old gradient
                error = error + unit(rounded.T @ x, case.dtype) / 2
            check_rounded_once("dw", self.dw.values(), rounded.T @ x + before_dw, error, case.dtype)
        if need_db and case.bias:
            # Our kernel sums dz in FP32, but the expected sum is of dz rounded to 16 bits. The rounding errors of the
            # elements are independent, so that the bound of their sum is a root of a sum of squares.
            units = unit(rounded, case.dtype) if dz else np.zeros_like(rounded)
            error = summing_error(case.m, np.abs(rounded).sum(axis=0) + np.abs(before_db))
            error += 2 * np.sqrt((units**2).sum(axis=0))
            check_rounded_once("db", host_of(self.gpu, self.db), rounded.sum(axis=0) + before_db, error, case.dtype)

    def _checked_dz(self, dz: Placed) -> NDArray[np.float64]:
        """Checks that dz is rounded once, and returns the rounded dz."""
        activation = self.case.activation
        error = spread(lambda z: reference.derivative(z, activation), self.exact_z, self._stored_z_error())
        if activation.name in ("sigmoid", "tanh"):  # the derivative is computed from the rounded output
            error += 2 * unit(self.data.y, self.case.dtype)
        upstream = _wide(self.data.dy) * self.data.factors
        exact = upstream * reference.derivative(self.exact_z, activation)
        made = dz.values()
        check_rounded_once("dz", made, exact, np.abs(upstream) * (error + _ACTIVATION_ERROR), self.case.dtype)
        return made


class RoundedProduct(Product):
    """A product of normally distributed numbers, whose results must be rounded once."""

    def __init__(self, gpu: Any, case: MatmulCase, stream: Any = None) -> None:
        super().__init__(gpu, case, stream)
        a, b = _wide(self.a), _wide(self.b)
        magnitudes = abs(case.alpha) * (np.abs(a) @ np.abs(b))
        for addend, factor in ((self.c, case.beta), (self.bias, 1.0)):
            if addend is not None:
                magnitudes = magnitudes + abs(factor) * np.abs(_wide(addend))
        self.error = summing_error(case.k, magnitudes)
        by_library = case.epilogue is Epilogue.NONE or case.epilogue.sums_operand
        lies_as_d = case.in_place or case.c.column_major == case.d.column_major
        if case.with_c and by_library and lies_as_d:  # cuBLASLt may round the product to D's type before it adds C
            self.error = self.error + unit(case.alpha * (a @ b), case.dtype) / 2

    def draw(self, shape: tuple[int, ...], dtype: DType, size: float) -> Array:
        """Draws numbers whose sums often nearly cancel: the bias and C are as large as the product."""
        return _normal(self._generator, shape, dtype, size)

    def check_results(self, d: Any = None) -> None:
        """Checks D, the auxiliary output and the bias gradient."""
        self.wait()
        case, (exact, error) = self.case, self._rounded()
        check_rounded_once("d", self.out.values(), exact, error, case.dtype)
        if case.epilogue.has_aux_output and case.epilogue.activation == "gelu":
            check_rounded_once("aux", self.aux.values(), self.product, self.error, case.dtype)
        elif case.epilogue.has_aux_output:
            wrong = (self.mask != (self.product > 0)) & (np.abs(self.product) > self.error)
            assert not wrong.any(), f"{int(wrong.sum())} bits of ReLU's mask are wrong"
        if case.epilogue.has_bias_gradient:
            self._check_sums(host_of(self.gpu, self.operands["bias_gradient"]), exact, error)

    def _rounded(self) -> tuple[Array, Array]:
        """Computes D before rounding, and the bound of its error."""
        epilogue = self.case.epilogue
        activation, is_gelu = Activation(epilogue.activation), epilogue.activation == "gelu"
        if epilogue.is_derivative:
            slope = reference.derivative(self.z, activation)
            inexact = _GELU_DERIVATIVE_ERROR if is_gelu else 0.0
            # cuBLASLt may round the product to D's type before it multiplies the product by GELU's derivative.
            error = self.error + (unit(self.product, self.case.dtype) / 2 if is_gelu else 0.0)
            return self.product * slope, error * np.abs(slope) + inexact * np.abs(self.product)
        error, inexact = self.error, _GELU_ERROR if is_gelu else 0.0
        if is_gelu and epilogue.has_aux_output:
            error = error + unit(np.abs(self.product) + error, self.case.dtype) / 2
        moved = spread(lambda z: reference.activate(z, activation), self.product, error)
        return reference.activate(self.product, activation), moved + inexact * np.abs(self.product)

    def _check_sums(self, made: Array, exact: Array, error: Array) -> None:
        """Checks the bias gradient: the sum of an operand, or of D, either before or after D is rounded."""
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
