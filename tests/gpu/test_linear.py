"""Forward and backward on the GPU against the float64 reference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS, DType, Saved
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, Guarded, to_host
from tests.support.strategies import TYPES, LinearCase, Placement, lattice, linear_cases

Array = NDArray[Any]

_TINY = 1e-6  # FP32 arithmetic of the activations, and FP16's subnormal step
_TF32 = 2.0**-11
_FLAT = Placement(column_major=False, gap=0, offset=0)
_SHIFTED = Placement(column_major=False, gap=1, offset=1)


class Data:
    """Operands of a case, and the reference's results for them."""

    def __init__(self, case: LinearCase) -> None:
        generator = np.random.default_rng(case.data_seed)
        m, n, k = case.m, case.n, case.k
        self.x, self.w = (lattice(generator, shape, case.dtype) for shape in ((m, k), (n, k)))
        self.bias = lattice(generator, (n,), case.dtype) if case.bias else None
        self.dy = lattice(generator, (m, n), case.dtype)
        self.dw, self.db = lattice(generator, (n, k), case.dtype), lattice(generator, (n,), case.dtype)
        self.factors = reference.dropout_scale((m, n), case.dropout, case.rng) if case.dropout else np.ones((m, n))
        self.expected_y, self.z = reference.linear_fwd(self.x, self.w, self.bias, case.activation, self.factors)
        self.gradients = reference.linear_bwd(self.dy, self.x, self.w, self.z, case.activation, self.factors)


def _forward_tolerance(case: LinearCase, data: Data) -> Array:
    """Rounding of the output, and of the pre-activation where it is stored on the way."""
    epsilon = 2 * EPSILON[case.dtype]
    slope = max(1.2, abs(case.activation.negative_slope))
    exact = epsilon * (np.abs(data.expected_y) + slope * np.abs(data.z) * data.factors) + _TINY * (1 + data.factors)
    # By the priors it is cuBLASLt's GELU in TF32, which is good to five digits.
    fuses = case.compute == "tf32" and case.activation.name == "gelu"
    return exact + (2e-5 * np.abs(data.z) * data.factors if fuses else 0.0)


def _dz_tolerance(case: LinearCase, data: Data) -> Array:
    """Rounding of dz, and of the saved tensor that the derivative is taken from."""
    upstream = np.abs(data.dy.astype(np.float64)) * data.factors
    slope = max(1.2, abs(case.activation.negative_slope))
    return upstream * (4 * EPSILON[case.dtype] * (slope + np.abs(data.z)) + _TINY)


def _product_tolerance(case: LinearCase, dz: Array, dz_tolerance: Array, other: Array, result: Array) -> Array:
    """A product of dz (rounded to the type, and to TF32 where asked) with an exact operand, summed in FP32."""
    rounding = _TF32 if case.compute == "tf32" else 2.0**-20
    terms = (dz_tolerance + rounding * np.abs(dz)) @ np.abs(other.astype(np.float64))
    return terms + 2 * EPSILON[case.dtype] * np.abs(result) + _TINY


def _check_forward(case: LinearCase, data: Data) -> tuple[Any, Guarded]:
    x, w = Guarded(data.x, case.x), Guarded(data.w, case.w)
    out = Guarded(np.zeros((case.m, case.n), case.dtype.numpy), case.y)
    z = Guarded(np.zeros((case.m, case.n), case.dtype.numpy), case.dy) if case.keep_z else None
    y, ctx = lt.linear_fwd(
        x.array,
        w.array,
        None if data.bias is None else cp.asarray(data.bias),
        activation=case.activation,
        dropout=case.dropout,
        rng=case.rng,
        compute=case.compute,
        out=out.array,
        out_z=z.array if z else None,
    )
    assert y is out.array
    assert_close("y", out.values(), data.expected_y, _forward_tolerance(case, data))
    if z is not None:
        assert_close("z", z.values(), data.z, 2 * EPSILON[case.dtype] * np.abs(data.z))
    return ctx, out


def _check_backward(case: LinearCase, data: Data, ctx: Any, dz_place: Placement | None = None) -> None:
    """Checks the gradients, and the one before the activation too if it is to be written."""
    m, n, k = case.m, case.n, case.k
    need_dx, need_dw, need_db = case.need
    dy = Guarded(data.dy, case.dy)
    dx = Guarded(np.zeros((m, k), case.dtype.numpy), case.dx)
    dw, db = Guarded(data.dw, case.dw), cp.asarray(data.db)
    dz = Guarded(np.zeros((m, n), case.dtype.numpy), dz_place) if dz_place else None
    result = lt.linear_bwd(
        dy.array,
        ctx,
        need_dx=need_dx,
        need_dw=need_dw,
        need_db=need_db,
        accumulate=case.accumulate,
        out_dx=dx.array,
        out_dw=dw.array,
        out_db=db,
        out_dz=dz.array if dz else None,
    )
    exact, dz_tolerance = data.gradients, _dz_tolerance(case, data)
    if dz is not None:
        assert_close("dz", dz.values(), exact.dz, dz_tolerance + 2 * EPSILON[case.dtype] * np.abs(exact.dz))
    assert (result.dx is None, result.dw is None) == (not need_dx, not need_dw)
    assert (result.db is None) == (not (need_db and case.bias))
    if need_dx:
        assert_close("dx", dx.values(), exact.dx, _product_tolerance(case, exact.dz, dz_tolerance, data.w, exact.dx))
    if need_dw:
        expected = exact.dw + (data.dw.astype(np.float64) if case.accumulate else 0.0)
        tolerance = _product_tolerance(case, exact.dz.T, dz_tolerance.T, data.x, expected)
        assert_close("dw", dw.values(), expected, tolerance)
    if result.db is not None:
        expected = exact.db + (data.db.astype(np.float64) if case.accumulate else 0.0)
        tolerance = dz_tolerance.sum(axis=0) + 2 * EPSILON[case.dtype] * np.abs(expected) + _TINY
        tolerance = tolerance + 2.0**-20 * np.abs(exact.dz).sum(axis=0)
        assert_close("db", to_host(db), expected, tolerance)


@settings(
    max_examples=1200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=linear_cases())
def test_linear_agrees_with_reference(case: LinearCase, examples: Counter[str]) -> None:
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    _check_backward(case, data, ctx)
    examples["linear_fwd/bwd"] += 1


def _case(**changes: Any) -> LinearCase:
    standard: dict[str, Any] = {
        "m": 64, "n": 48, "k": 40, "dtype": DType.FLOAT32, "compute": "float32", "activation": lt.Activation(),
        "bias": True, "dropout": 0.0, "rng": lt.Philox(), "accumulate": False, "need": (True, True, True),
        "keep_z": False, "x": _FLAT, "w": _FLAT, "y": _FLAT, "dy": _FLAT, "dx": _FLAT, "dw": _FLAT, "data_seed": 0,
    }  # fmt: skip
    return LinearCase(**{**standard, **changes})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_activation_type_and_dropout(activation: str, dtype: DType, dropout: float) -> None:
    case = _case(activation=lt.Activation(activation), dtype=dtype, dropout=dropout, rng=lt.Philox(2**40 + 3, 5, 7))
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    _check_backward(case, data, ctx)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize(("m", "n"), [(64, 96), (33, 77), (40, 1), (1, 264), (2048, 264)])
@pytest.mark.parametrize("dy", [_FLAT, _SHIFTED], ids=["flat", "shifted"])
@pytest.mark.parametrize(
    "dz", [Placement(True, 0, 0), Placement(True, 8, 8), Placement(True, 3, 1), _SHIFTED],
    ids=["transposed", "transposed, gaps", "transposed, shifted", "shifted"],
)  # fmt: skip
def test_dz_lies_as_it_is_wanted(dtype: DType, m: int, n: int, dy: Placement, dz: Placement) -> None:
    gelu, rng = lt.Activation("gelu"), lt.Philox(2**50 + 1, 4, 9)
    case = _case(m=m, n=n, dtype=dtype, activation=gelu, dropout=0.2, rng=rng, accumulate=True, dy=dy)
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    _check_backward(case, data, ctx, dz)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["tanh", "silu"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("n", "place"), [(77, _FLAT), (77, _SHIFTED), (80, _SHIFTED)])
def test_rows_off_16_bytes(dtype: DType, activation: str, accumulate: bool, n: int, place: Placement) -> None:
    case = _case(
        **dict.fromkeys(("x", "w", "y", "dy", "dx", "dw"), place),
        n=n,
        dtype=dtype,
        activation=lt.Activation(activation),
        dropout=0.3,
        rng=lt.Philox(17, 1, 2),
        accumulate=accumulate,
        keep_z=True,
    )
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    _check_backward(case, data, ctx)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("need", [(False, False, True), (True, True, True)], ids=["db", "all"])
@pytest.mark.parametrize(("m", "n"), [(100_000, 24), (513, 40), (512, 3000), (3001, 515)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_gradients_over_many_rows(
    dtype: DType, need: tuple[bool, bool, bool], m: int, n: int, accumulate: bool
) -> None:
    case = _case(m=m, n=n, k=8, dtype=dtype, activation=lt.Activation("gelu"), need=need, accumulate=accumulate)
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    for _ in range(2):  # the counters of the blocks are as they were
        _check_backward(case, data, ctx)


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_empty_axes(empty: str, activation: str, accumulate: bool, dtype: DType) -> None:
    sizes = {"m": 5, "n": 6, "k": 7, empty: 0}
    case = _case(**sizes, activation=lt.Activation(activation), accumulate=accumulate, dtype=dtype)
    data = Data(case)
    ctx, _ = _check_forward(case, data)
    _check_backward(case, data, ctx)


@pytest.mark.parametrize(("dtype", "compute"), [("float32", "float32"), ("float32", "tf32"), ("bfloat16", "float32")])
def test_random_values_over_a_long_sum(dtype: str, compute: str) -> None:
    generator = np.random.default_rng(1)
    kind = DType(dtype)
    x, w, dy = (generator.standard_normal(s).astype(kind.numpy) for s in ((256, 4096), (384, 4096), (256, 384)))
    y, ctx = lt.linear_fwd(cp.asarray(x), cp.asarray(w), compute=compute)
    gradients = lt.linear_bwd(cp.asarray(dy), ctx)
    expected, _ = reference.linear_fwd(x, w)
    exact = reference.linear_bwd(dy, x, w, expected)
    relative = {"tf32": 1e-3, "float32": 3e-6 if kind is DType.FLOAT32 else 5e-3}[compute]
    for actual, wanted in ((y, expected), (gradients.dx, exact.dx), (gradients.dw, exact.dw)):
        assert np.linalg.norm(to_host(actual) - wanted) <= relative * np.linalg.norm(wanted)


def test_fp32_is_not_tf32_unless_asked() -> None:
    x = cp.full((64, 64), 1 + 2.0**-20, cp.float32)
    w = cp.eye(64, dtype=cp.float32)
    assert (lt.linear(x, w) == x).all()
    assert not (lt.linear(x, w, compute="tf32") == x).any()


def test_nothing_is_allocated_with_buffers() -> None:
    case = _case(activation=lt.Activation("gelu"))
    x, w, b = (cp.ones(s, cp.float32) for s in ((64, 40), (48, 40), (48,)))
    y, z, dy, dx, dw, db = (cp.empty(s, cp.float32) for s in ((64, 48),) * 3 + ((64, 40), (48, 40), (48,)))
    dy.fill(1)

    def run() -> None:
        _, ctx = lt.linear_fwd(x, w, b, activation=case.activation, out=y, out_z=z)
        lt.linear_bwd(dy, ctx, out_dx=dx, out_dw=dw, out_db=db)

    for _ in range(3):  # the stream's workspaces are made once, that of repeated calls when a call first repeats
        run()
    pool = cp.get_default_memory_pool()
    before, used = pool.total_bytes(), pool.used_bytes()
    free, _ = cp.cuda.runtime.memGetInfo()
    for _ in range(3):
        run()
        assert pool.used_bytes() == used
    assert pool.total_bytes() == before
    assert cp.cuda.runtime.memGetInfo()[0] == free


def test_propagate_nan() -> None:
    x, w = cp.full((8, 8), cp.nan, cp.float32), cp.ones((8, 8), cp.float32)
    assert cp.isnan(lt.linear(x, w, activation="relu", propagate_nan=True)).all()


@pytest.mark.parametrize(("m", "n", "k"), [(300, 100, 200), (100_000, 24, 8)])
def test_runs_are_bitwise_equal(m: int, n: int, k: int) -> None:
    generator = np.random.default_rng(2)
    x, w, dy = (cp.asarray(generator.standard_normal(s).astype(np.float32)) for s in ((m, k), (n, k), (m, n)))
    bias = cp.asarray(generator.standard_normal(n).astype(np.float32))

    def run() -> list[bytes]:
        y, ctx = lt.linear_fwd(x, w, bias, activation="silu", dropout=0.2, rng=lt.Philox(3))
        return [cp.asnumpy(a).tobytes() for a in (y, *lt.linear_bwd(dy, ctx))]

    first = run()
    assert all(run() == first for _ in range(5))


@pytest.mark.parametrize(
    ("activation", "dropout", "saved"),
    [
        ("none", 0.5, Saved.NOTHING),
        ("relu", 0.5, Saved.OUTPUT),
        ("tanh", 0.0, Saved.OUTPUT),
        ("tanh", 0.5, Saved.PREACTIVATION),
        ("gelu", 0.0, Saved.PREACTIVATION),
    ],
)
def test_what_is_saved(activation: str, dropout: float, saved: Saved) -> None:
    x, w = cp.ones((4, 4), cp.float32), cp.ones((4, 4), cp.float32)
    _, ctx = lt.linear_fwd(x, w, activation=activation, dropout=dropout, rng=lt.Philox())
    assert ctx.saved_as is saved
    assert (ctx.preactivation is None) == (saved is not Saved.PREACTIVATION)
