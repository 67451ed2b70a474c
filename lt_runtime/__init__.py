"""lt_runtime: linear layers run and trained on NVIDIA GPUs from plain Python.

Importing this touches no GPU and loads no CUDA library: names are resolved at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_runtime import cublaslt, errors, raw, schedules
    from lt_runtime.arrays import contiguous
    from lt_runtime.bind import bind
    from lt_runtime.epilogue import Epilogue
    from lt_runtime.grad_scaler import GradScaler
    from lt_runtime.ops.adamw import AdamW, Parameter
    from lt_runtime.ops.dropout import dropout
    from lt_runtime.ops.first_use import tuning
    from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
    from lt_runtime.ops.loss import cross_entropy, mse_loss
    from lt_runtime.ops.matmul import matmul
    from lt_runtime.ops.tuning import explain, tune
    from lt_runtime.problem import ACTIVATIONS, Activation, Philox
    from lt_runtime.schedules import Schedule
    from lt_runtime.training import MLP, TrainStep
    from lt_runtime.training.checkpoints import load_checkpoint, save_checkpoint
    from lt_runtime.training.prefetch import prefetch

__version__ = "0.1.0"

_HOMES = {
    "ACTIVATIONS": "lt_runtime.problem",
    "Activation": "lt_runtime.problem",
    "AdamW": "lt_runtime.ops.adamw",
    "Epilogue": "lt_runtime.epilogue",
    "GradScaler": "lt_runtime.grad_scaler",
    "MLP": "lt_runtime.training",
    "Parameter": "lt_runtime.ops.adamw",
    "Philox": "lt_runtime.problem",
    "Schedule": "lt_runtime.schedules",
    "TrainStep": "lt_runtime.training",
    "bind": "lt_runtime.bind",
    "contiguous": "lt_runtime.arrays",
    "cross_entropy": "lt_runtime.ops.loss",
    "dropout": "lt_runtime.ops.dropout",
    "explain": "lt_runtime.ops.tuning",
    "linear": "lt_runtime.ops.linear",
    "linear_bwd": "lt_runtime.ops.linear",
    "linear_fwd": "lt_runtime.ops.linear",
    "load_checkpoint": "lt_runtime.training.checkpoints",
    "matmul": "lt_runtime.ops.matmul",
    "mse_loss": "lt_runtime.ops.loss",
    "prefetch": "lt_runtime.training.prefetch",
    "save_checkpoint": "lt_runtime.training.checkpoints",
    "tune": "lt_runtime.ops.tuning",
    "tuning": "lt_runtime.ops.first_use",
}
_MODULES = ("cublaslt", "errors", "raw", "schedules")

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Activation",
    "AdamW",
    "Epilogue",
    "GradScaler",
    "Parameter",
    "Philox",
    "Schedule",
    "TrainStep",
    "bind",
    "contiguous",
    "cross_entropy",
    "cublaslt",
    "dropout",
    "errors",
    "explain",
    "linear",
    "linear_bwd",
    "linear_fwd",
    "load_checkpoint",
    "matmul",
    "mse_loss",
    "prefetch",
    "raw",
    "save_checkpoint",
    "schedules",
    "tune",
    "tuning",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lt_runtime.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lt_runtime' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
