"""Tuning on request, and what has been decided."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lt_runtime.errors import ArgumentError, DeviceError
from lt_runtime.gpu.devices import current_device, device_count
from lt_runtime.ops._tuning_report import TuningReport
from lt_runtime.ops._tuning_run import progress_bar, tune_in_parts
from lt_runtime.ops.first_use import checked_effort
from lt_runtime.problem import (
    Activation,
    BackwardProblem,
    Compute,
    DType,
    ForwardProblem,
    MatmulProblem,
    keep_threshold,
)
from lt_runtime.store.keys import Problem
from lt_runtime.tuner.stacks import Stack

if TYPE_CHECKING:
    from lt_runtime.tuner.explanation import Explanation

_PROBLEMS = (MatmulProblem, ForwardProblem, BackwardProblem)


def tune(
    dims: Sequence[int] | Problem | Sequence[Problem],
    rows: int | None = None,
    *,
    activation: str | Activation | None = None,
    final_activation: str | Activation = "none",
    dtype: str = "float32",
    compute: str = "float32",
    dropout: float = 0.0,
    bias: bool = True,
    input_gradient: bool | None = None,
    effort: str = "default",
    device: int | None = None,
    progress: bool = True,
) -> TuningReport:
    """Measures how the layers of a training step run fastest, and remembers it in the plan cache.

    The layers are those of `lt.MLP(dims)`, every matrix row-major and without gaps. Other problems are tuned where
    they are met, within `lt.tuning()`, or given as such. What was decided with no less effort is not measured again.
    Interrupted, it keeps what has been decided. What the GPU has not enough memory for costs a warning.

    Args:
        dims: inputs of the first layer, then outputs of each; or problems, which leave no room for other arguments
            about layers.
        rows: M, the batch.
        activation: of the hidden layers, all but the last; ReLU if left out.
        final_activation: of the last layer, or of the only one.
        dtype: "float32", "float16" or "bfloat16".
        compute: "float32" or "tf32".
        dropout: probability after each hidden layer.
        bias: whether the layers have one.
        input_gradient: whether the first layer's dx is wanted; if left out, only where it is the only layer.
        effort: "default" takes about two seconds a problem, "deep" tries many more algorithms.
        device: ordinal of the GPU; the current one if None.
        progress: show a bar, if standard error is a terminal.

    Returns:
        What was decided, with times before and after; as text, a table.

    Raises:
        ArgumentError: an option that is not accepted.
        DeviceError: there is no such GPU.
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
        GpuError: the driver, the compiler or cuBLASLt failed.
    """
    checked = checked_effort(effort)
    if _is_problems(dims):
        problems = _given_problems(dims, rows)
    else:
        problems = _stack(
            dims, rows, activation, final_activation, dtype, compute, dropout, bias, input_gradient
        ).problems()
    ordinal = ordinal_of(device)
    with progress_bar(shown=progress) as show:
        parts = tune_in_parts(problems, ordinal, effort=checked, progress=show)
        return TuningReport(each for part in parts for each in part)


def explain(
    dims: Sequence[int] | Problem | Sequence[Problem],
    rows: int | None = None,
    *,
    activation: str | Activation | None = None,
    final_activation: str | Activation = "none",
    dtype: str = "float32",
    compute: str = "float32",
    dropout: float = 0.0,
    bias: bool = True,
    input_gradient: bool | None = None,
    device: int | None = None,
) -> list[Explanation]:
    """Prints how the layers of a training step would run now, and why; measures nothing.

    For each problem: the strategy, cuBLASLt's algorithm for each product, the time that was measured and how near that
    is to what the GPU can do at its peaks, what else was measured and by how much it lost, what was rejected and why.

    Args:
        dims: as in `tune`; so are all others.

    Returns:
        What was printed, as data.

    Raises:
        ArgumentError, DeviceError: as in `tune`.
        PlanError: cuBLASLt has no algorithm for one of the products.
    """
    from lt_runtime.tuner.explanation import explain_problem, explain_stack

    if _is_problems(dims):
        problems, ordinal = _given_problems(dims, rows), ordinal_of(device)
        explanations = [explain_problem(problem, ordinal) for problem in problems]
    else:
        stack = _stack(dims, rows, activation, final_activation, dtype, compute, dropout, bias, input_gradient)
        explanations = explain_stack(stack, ordinal_of(device))
    print("\n\n".join(map(str, explanations)))
    return explanations


def ordinal_of(device: int | None) -> int:
    """The ordinal of a GPU; of the current one for None.

    Raises:
        DeviceError: there is no such GPU, or none at all.
    """
    count = device_count()
    if not count:
        raise DeviceError("there is no usable GPU here: see `python -m lt_runtime doctor`")
    if device is None:
        return current_device()
    if not 0 <= device < count:
        raise DeviceError(f"device is {device}; this machine has {count}, numbered from 0")
    return device


def _is_problems(dims: Any) -> bool:
    return isinstance(dims, _PROBLEMS) or (len(dims) > 0 and isinstance(dims[0], _PROBLEMS))


def _given_problems(dims: Any, rows: int | None) -> list[Problem]:
    if rows is not None:
        raise ArgumentError(f"rows is {rows}, but a problem says itself how many it has")
    return [dims] if isinstance(dims, _PROBLEMS) else list(dims)


def _stack(
    dims: Any,
    rows: int | None,
    activation: str | Activation | None,
    final_activation: str | Activation,
    dtype: str,
    compute: str,
    dropout: float,
    bias: bool,
    input_gradient: bool | None,
) -> Stack:
    if rows is None:
        raise ArgumentError(f"rows is missing: how many rows do the layers of dims {list(dims)} work on?")
    is_single = len(dims) == 2
    for name, value in (("activation", activation), ("dropout", dropout or None)):
        if is_single and value is not None:
            raise ArgumentError(
                f"{name} is {value}, but of dims {list(dims)} there is no hidden layer; the last has final_activation"
            )
    keep_threshold(dropout)
    kind = DType.parse("the stack", dtype)
    return Stack(
        _size(rows),
        tuple(map(_size, dims)),
        _activation(activation or "relu"),
        kind,
        Compute.parse(compute, kind),
        dropout > 0,
        bias,
        _activation(final_activation),
        is_single if input_gradient is None else input_gradient,
    )


def _size(value: Any) -> Any:
    """NumPy's integers as Python's; the stack refuses what is none."""
    return operator.index(value) if hasattr(value, "__index__") else value


def _activation(activation: str | Activation) -> Activation:
    return activation if isinstance(activation, Activation) else Activation(activation)
