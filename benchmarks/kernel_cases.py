"""Who takes part in each case of the kernels' suite, and on which buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks import buffers, cases, kernel_lt
from benchmarks.graphs import Contender
from lt_runtime.problem import DType

Builders = Mapping[str, Callable[[], Contender]]


def _torch(name: str, *arguments: Any) -> Callable[[], Contender]:
    """A contender of PyTorch's, which is imported when the contender is built."""
    return lambda: getattr(import_module("benchmarks.kernel_torch"), name)(*arguments)


def _epilogue_backward(case: cases.EpilogueBackward, sets: int) -> Builders:
    made = buffers.matrices((case.rows, case.cols), DType.BFLOAT16, sets, 3)
    both = {
        "lt": partial(kernel_lt.epilogue_backward, case, case.dropout, made),
        "torch": _torch("epilogue_backward", case, made),
    }
    if case.dropout:
        return {**both, "lt_without_dropout": partial(kernel_lt.epilogue_backward, case, 0.0, made)}
    variant = partial(kernel_lt.epilogue_backward, case, 0.0, made)
    return {
        **both,
        "torch_without_bias_gradient": _torch("gelu_backward", made),
        "lt_without_bias_gradient": partial(variant, db=False),
        "lt_transposed": partial(variant, transposed=True),
    }


def _epilogue_forward(case: cases.EpilogueForward, sets: int) -> Builders:
    made = buffers.matrices((case.rows, case.cols), DType.BFLOAT16, sets, 2)
    return {"lt": partial(kernel_lt.epilogue_forward, case, made), "torch": _torch("epilogue_forward", case, made)}


def _dropout(case: cases.Dropout, sets: int) -> Builders:
    made = buffers.matrices((case.rows, case.cols), case.dtype, sets, 4)
    return {"lt": partial(kernel_lt.dropout, case, made), "torch": _torch("dropout", case, made)}


def _adamw(case: cases.AdamWStep, _: int) -> Builders:
    return {"lt": partial(kernel_lt.adamw, case), "torch": _torch("adamw", case)}


def _cross_entropy(case: cases.CrossEntropy, sets: int) -> Builders:
    made = buffers.matrices((case.rows, case.classes), DType.BFLOAT16, sets, 2)
    targets = buffers.labels(case.rows, case.classes)
    return {
        "lt": partial(kernel_lt.cross_entropy, made, targets),
        "torch": _torch("cross_entropy", made, targets),
        "torch_log_softmax": _torch("log_softmax_gradient", made, targets),
    }


_KINDS: Mapping[type[cases.Case], Callable[[Any, int], Builders]] = {
    cases.EpilogueBackward: _epilogue_backward,
    cases.EpilogueForward: _epilogue_forward,
    cases.Dropout: _dropout,
    cases.AdamWStep: _adamw,
    cases.CrossEntropy: _cross_entropy,
}


def builders(case: cases.Case, sets: int) -> Builders:
    """What builds the contenders of a case, by name; all read the same `sets` sets of inputs."""
    return _KINDS[type(case)](case, sets)
