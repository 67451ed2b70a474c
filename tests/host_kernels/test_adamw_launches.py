"""`lt.Optimizer` for GPU arrays, with kernels and memory on the CPU, updates parameters as it does for NumPy arrays."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lt_runtime import rules
from lt_runtime.errors import DTypeError, OverlapError, ShapeError
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels.optimizer import Options
from lt_runtime.ops.optimizers import gpu_state as states
from lt_runtime.ops.optimizers.gpu_state import GpuState
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.ops.optimizers.state import HostState
from lt_runtime.problem import DType
from lt_runtime.schedules import table
from tests.host_kernels.arrays import numbers
from tests.host_kernels.optimizer import OPTIONS
from tests.host_kernels.variants import BF16, F16, F32
from tests.support.fake_device import HostLibrary, call

SHAPES = [(3, 5), (300,), (0,), (2049,), ()]


@pytest.fixture(autouse=True)
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides CuPy, which other tests may have imported: without a GPU it has no current stream."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


@pytest.fixture(scope="module", autouse=True)
def _in_host_memory() -> Iterator[None]:
    stand_ins = {
        "CUPY": HostLibrary(),
        "call": call,
        "activated": lambda device: contextlib.nullcontext(),
        "stream_handle": lambda *_: 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(states, name, stand_in)
        yield


def parameters(dtype: DType, gradient_dtype: DType) -> list[Parameter]:
    generator = np.random.default_rng(6)
    return [
        Parameter(
            numbers(generator, (math.prod(shape),), dtype).reshape(shape),
            np.zeros(shape, gradient_dtype.numpy),
            name=f"p{i}",
            lr_scale=1 / (1 + i % 3),
            weight_decay=0.2 if i % 2 else None,
        )
        for i, shape in enumerate(SHAPES)
    ]


def in_groups(given: list[Parameter], options: Options) -> list[list[Parameter]]:
    """Splits parameters into a group for each rule; the last group gets the rest."""
    last = len(options.rules) - 1
    return [*([each] for each in given[:last]), given[last:]]


def exact(parameter: Parameter) -> np.ndarray[Any, Any]:
    array = parameter.data if parameter.master is None else parameter.master
    return array.astype(np.float64)


AMSGRAD = rules.AMSGrad(1e-2, weight_decay=0.1)
MOMENTUM, NESTEROV = (rules.SGD(1e-2, 0.875, nesterov, weight_decay=0.1) for nesterov in (False, True))
LION = rules.Lion(1e-2, (0.75, 0.875), weight_decay=0.1)
ALL_OPTIONS = {
    "plain": OPTIONS,
    "amsgrad": replace(OPTIONS, rules=(AMSGRAD,)),
    "clipping": replace(OPTIONS, max_norm=0.5),
    "skipping": replace(OPTIONS, skip_nonfinite=True),
    "scaling": replace(OPTIONS, skip_nonfinite=True, max_norm=math.inf, scaler=GradScaler(64.0, growth_interval=2)),
    "BF16 moments": replace(OPTIONS, moments=BF16),
    "everything": replace(
        OPTIONS, rules=(AMSGRAD,), moments=BF16, stochastic_rounding=True, seed=1 << 40, max_norm=1.0
    ),
    "SGD": replace(OPTIONS, rules=(rules.SGD(1e-2, weight_decay=0.1),), moments=BF16),
    "momentum": replace(OPTIONS, rules=(MOMENTUM,)),
    "Nesterov": replace(OPTIONS, rules=(NESTEROV,), moments=BF16),
    "Lion": replace(OPTIONS, rules=(LION,), schedule=table([0.5, 1.0, 0.25])),
    "three rules": replace(
        OPTIONS,
        rules=(LION, AMSGRAD, NESTEROV),
        max_norm=2.0,
        skip_nonfinite=True,
        scaler=GradScaler(64.0, growth_interval=2),
        schedule=table([0.5, 1.0]),
    ),
    "rules in place": replace(OPTIONS, rules=(NESTEROV, LION, *OPTIONS.rules), stochastic_rounding=True, seed=5),
}


@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
@pytest.mark.parametrize(("dtype", "gradient_dtype"), [(F32, F32), (F16, BF16), (BF16, F16)])
def test_does_what_the_numpy_state_does(options: Options, dtype: DType, gradient_dtype: DType) -> None:
    ours, theirs = parameters(dtype, gradient_dtype), parameters(dtype, gradient_dtype)
    twin_options = replace(options, scaler=copy.copy(options.scaler))
    options = replace(options, scaler=copy.copy(options.scaler))
    state, twin = GpuState(in_groups(ours, options), options), HostState(in_groups(theirs, options), twin_options)
    generator = np.random.default_rng(7)
    for step in range(5):
        for found, wanted in zip(ours, theirs, strict=True):
            found.grad[...] = wanted.grad[...] = generator.standard_normal(wanted.grad.shape)
        if options.skip_nonfinite and step == 2:
            ours[3].grad[2048] = theirs[3].grad[2048] = math.inf
        state.step(None)
        twin.step(None)
        assert (state.steps[0], state.skipped_steps[0]) == (twin.steps[0], twin.skipped_steps[0])
        assert (state.grad_norm is None) == (twin.grad_norm is None)
        if twin.grad_norm is not None:
            assert float(state.grad_norm) == pytest.approx(float(twin.grad_norm), rel=1e-6)
        if options.scaler is not None and twin_options.scaler is not None:
            assert float(options.scaler.scale) == float(twin_options.scaler.scale)
            assert int(options.scaler.growth_tracker) == int(twin_options.scaler.growth_tracker)
    coarse = options.stochastic_rounding and dtype is BF16
    rtol, atol = (2.0**-7, 1e-3) if coarse else (2e-6, 2e-4 if options.moments is BF16 else 2e-7)
    for found, wanted in zip(ours, theirs, strict=True):
        assert (found.master is None) == (wanted.master is None)
        np.testing.assert_allclose(exact(found), exact(wanted), rtol, atol)
        if found.data.size > 1000:  # both optimizers round stochastically with the same random numbers
            close = np.isclose(exact(found), exact(wanted), 2e-6, 2e-7)
            assert close.mean() > 0.99


def test_what_does_not_fit_is_refused_and_leaves_the_scaler_free() -> None:
    def ones(size: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        return np.ones(size, dtype)

    both, scaler = ones(4), GradScaler()
    bad = {
        ShapeError: Parameter(ones(4), ones(5), name="b"),
        DTypeError: Parameter(ones(4, np.float16), ones(4), ones(4, np.float16), "b"),
        OverlapError: Parameter(both, both, name="b"),
    }
    for error, parameter in bad.items():
        with pytest.raises(error, match=r"b\."):
            GpuState([[parameter]], replace(OPTIONS, scaler=scaler, skip_nonfinite=True))
        assert not scaler.is_bound
