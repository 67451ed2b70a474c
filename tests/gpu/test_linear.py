"""Forward and backward on the GPU against the float64 reference."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.problem import ACTIVATIONS, DType
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, to_host
from tests.support.layer_checks import Layer, dz_tolerance, layer_case
from tests.support.placed import FLAT, Placed
from tests.support.strategies import TYPES, LinearCase, Placement, linear_cases

_SHIFTED = Placement(column_major=False, gap=1, offset=1)


@settings(
    max_examples=1200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=linear_cases())
def test_linear_agrees_with_reference(gpu: Any, case: LinearCase, examples: Counter[str]) -> None:
    Layer(gpu, case).check()
    examples["linear_fwd/bwd"] += 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_activation_type_and_dropout(gpu: Any, activation: str, dtype: DType, dropout: float) -> None:
    case = layer_case(activation=activation, dtype=dtype, dropout=dropout, rng=lt.Philox(2**40 + 3, 5, 7))
    Layer(gpu, case).check()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize(("m", "n"), [(64, 96), (33, 77), (40, 1), (1, 264), (2048, 264)])
@pytest.mark.parametrize("dy", [FLAT, _SHIFTED], ids=["flat", "shifted"])
@pytest.mark.parametrize(
    "dz", [Placement(True, 0, 0), Placement(True, 8, 8), Placement(True, 3, 1), _SHIFTED],
    ids=["transposed", "transposed, gaps", "transposed, shifted", "shifted"],
)  # fmt: skip
def test_dz_lies_as_it_is_wanted(gpu: Any, dtype: DType, m: int, n: int, dy: Placement, dz: Placement) -> None:
    rng = lt.Philox(2**50 + 1, 4, 9)
    case = layer_case(m=m, n=n, dtype=dtype, activation="gelu", dropout=0.2, rng=rng, accumulate=True, dy=dy)
    layer = Layer(gpu, case)
    before = Placed(gpu, np.zeros((m, n), dtype.numpy), dz)
    _, ctx = layer.forward()
    layer.check_backward(layer.backward(ctx, out_dz=before.array))
    exact = layer.data.gradients.dz
    assert_close("dz", before.values(), exact, dz_tolerance(case, layer.data) + 2 * EPSILON[dtype] * np.abs(exact))


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["tanh", "silu"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("n", "place"), [(77, FLAT), (77, _SHIFTED), (80, _SHIFTED)])
def test_rows_off_16_bytes(gpu: Any, dtype: DType, activation: str, accumulate: bool, n: int, place: Placement) -> None:
    case = layer_case(
        **dict.fromkeys(("x", "w", "y", "dy", "dx", "dw"), place),
        n=n,
        dtype=dtype,
        activation=activation,
        dropout=0.3,
        rng=lt.Philox(17, 1, 2),
        accumulate=accumulate,
        keep_z=True,
    )
    Layer(gpu, case).check()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("need", [(False, False, True), (True, True, True)], ids=["db", "all"])
@pytest.mark.parametrize(("m", "n"), [(100_000, 24), (513, 40), (512, 3000), (3001, 515)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_gradients_over_many_rows(
    gpu: Any, dtype: DType, need: tuple[bool, bool, bool], m: int, n: int, accumulate: bool
) -> None:
    case = layer_case(m=m, n=n, k=8, dtype=dtype, activation="gelu", need=need, accumulate=accumulate)
    for _ in range(2):  # the second run needs the stream's counters, which the first must have reset to zero
        Layer(gpu, case).check()


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


def test_nothing_is_allocated_with_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = (cp.ones(s, cp.float32) for s in ((64, 40), (48, 40), (48,)))
    y, z, dy, dx, dw, db = (cp.empty(s, cp.float32) for s in ((64, 48),) * 3 + ((64, 40), (48, 40), (48,)))
    dy.fill(1)

    def run() -> None:
        _, ctx = lt.linear_fwd(x, w, b, activation="gelu", out=y, out_z=z)
        lt.linear_bwd(dy, ctx, out_dx=dx, out_dw=dw, out_db=db)

    # The first call allocates the stream's workspace, and the first repeated call the workspace of graphs.
    for _ in range(3):
        run()
    pool = cp.get_default_memory_pool()
    before, used = pool.total_bytes(), pool.used_bytes()
    monkeypatch.setattr(StreamMemory, "_allocate", lambda *_: pytest.fail("a stream's memory has grown"))
    for _ in range(3):
        run()
        assert pool.used_bytes() == used
    assert pool.total_bytes() == before


def test_propagate_nan() -> None:
    x, w = cp.full((8, 8), cp.nan, cp.float32), cp.ones((8, 8), cp.float32)
    assert cp.isnan(lt.linear(x, w, activation="relu", propagate_nan=True)).all()
