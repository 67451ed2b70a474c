"""lt_runtime: linear layers run and trained on NVIDIA GPUs from plain Python.

`import lt_runtime` touches no GPU and loads no CUDA library: a public name's module is imported at the name's first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt_runtime import cublaslt, errors, raw, rules, schedules
    from lt_runtime.arrays.libraries import contiguous
    from lt_runtime.binding import bind
    from lt_runtime.distributed.group import Group, group
    from lt_runtime.distributed.shares import share
    from lt_runtime.epilogue import Epilogue
    from lt_runtime.fitting import Epoch, fit
    from lt_runtime.fp8 import FP8
    from lt_runtime.grad_scaler import GradScaler
    from lt_runtime.nn.block import Block
    from lt_runtime.nn.containers import Chain, Parallel, Residual
    from lt_runtime.nn.layers import GEGLU, Dropout, Gated, LayerNorm, ReGLU, RMSNorm, SwiGLU
    from lt_runtime.nn.linear import Linear
    from lt_runtime.nn.mlp import MLP
    from lt_runtime.nn.run import Pass
    from lt_runtime.ops._gated import GatedContext
    from lt_runtime.ops._linear import LinearContext
    from lt_runtime.ops.add import add
    from lt_runtime.ops.dropout import dropout
    from lt_runtime.ops.first_use import tuning
    from lt_runtime.ops.fp8.casts import cast_fp8, cast_fp8_rows
    from lt_runtime.ops.fp8.state import FP8State
    from lt_runtime.ops.gated import gated_bwd, gated_fwd
    from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
    from lt_runtime.ops.losses import Loss, bce_with_logits, cross_entropy, huber_loss, mse_loss
    from lt_runtime.ops.matmul import matmul
    from lt_runtime.ops.norm import NormContext, layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
    from lt_runtime.ops.optimizers.adamw import AdamW
    from lt_runtime.ops.optimizers.optimizer import Optimizer
    from lt_runtime.ops.optimizers.parameters import Parameter
    from lt_runtime.ops.tuning import explain, tune
    from lt_runtime.problem import ACTIVATIONS, Activation, Philox
    from lt_runtime.profiling import profile
    from lt_runtime.profiling.capture.check import CaptureReport, check_capture
    from lt_runtime.ranges import range as range  # noqa: A004  # outside of __all__, where it would hide Python's
    from lt_runtime.saving.checkpoints import load_checkpoint, load_model, save_checkpoint, save_model
    from lt_runtime.saving.state import load, save
    from lt_runtime.schedules import Schedule
    from lt_runtime.training.averages import EMA
    from lt_runtime.training.prefetch import Prefetcher, prefetch
    from lt_runtime.training.step import Metrics, TrainStep, evaluate

__version__ = "0.1.0"

_EXPORTS = {
    "arrays.libraries": "contiguous",
    "binding": "bind",
    "distributed.group": "Group group",
    "distributed.shares": "share",
    "epilogue": "Epilogue",
    "fitting": "Epoch fit",
    "fp8": "FP8",
    "grad_scaler": "GradScaler",
    "ops._linear": "LinearContext",
    "ops.add": "add",
    "ops.optimizers.adamw": "AdamW",
    "ops.optimizers.optimizer": "Optimizer",
    "ops.optimizers.parameters": "Parameter",
    "ops.dropout": "dropout",
    "ops.first_use": "tuning",
    "ops.fp8.casts": "cast_fp8 cast_fp8_rows",
    "ops.fp8.state": "FP8State",
    "ops._gated": "GatedContext",
    "ops.gated": "gated_bwd gated_fwd",
    "ops.linear": "linear linear_bwd linear_fwd",
    "ops.losses": "Loss bce_with_logits cross_entropy huber_loss mse_loss",
    "ops.matmul": "matmul",
    "ops.norm": "NormContext layer_norm_bwd layer_norm_fwd rms_norm_bwd rms_norm_fwd",
    "ops.tuning": "explain tune",
    "problem": "ACTIVATIONS Activation Philox",
    "profiling": "profile",
    "ranges": "range",
    "profiling.capture.check": "CaptureReport check_capture",
    "schedules": "Schedule",
    "training.averages": "EMA",
    "nn.block": "Block",
    "nn.containers": "Chain Parallel Residual",
    "nn.layers": "GEGLU Dropout Gated LayerNorm RMSNorm ReGLU SwiGLU",
    "nn.linear": "Linear",
    "nn.mlp": "MLP",
    "nn.run": "Pass",
    "saving.checkpoints": "load_checkpoint load_model save_checkpoint save_model",
    "saving.state": "load save",
    "training.prefetch": "Prefetcher prefetch",
    "training.step": "Metrics TrainStep evaluate",
}
"""Maps the name of each module to the public names that it defines, in one string separated by blanks."""
_HOMES = {name: f"lt_runtime.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_MODULES = ("cublaslt", "errors", "raw", "rules", "schedules")

# `__all__` is written out by topic with `+=`, because type checkers ignore a computed `__all__`.
__all__ = ["LinearContext", "Philox", "contiguous", "dropout", "linear", "linear_bwd", "linear_fwd", "matmul"]
__all__ += ["GatedContext", "add", "cast_fp8", "cast_fp8_rows", "gated_bwd", "gated_fwd"]
__all__ += ["NormContext", "layer_norm_bwd", "layer_norm_fwd", "rms_norm_bwd", "rms_norm_fwd"]
__all__ += ["Loss", "bce_with_logits", "cross_entropy", "huber_loss", "mse_loss"]
__all__ += ["GEGLU", "MLP", "Block", "Chain", "Dropout", "Gated", "LayerNorm", "Linear", "Parallel", "Pass"]
__all__ += ["RMSNorm", "ReGLU", "Residual", "SwiGLU"]
__all__ += ["EMA", "FP8", "AdamW", "FP8State", "GradScaler", "Optimizer", "Parameter", "Schedule"]
__all__ += ["Epoch", "Metrics", "Prefetcher", "TrainStep", "evaluate", "fit", "prefetch"]
__all__ += ["load", "load_checkpoint", "load_model", "save", "save_checkpoint", "save_model"]
__all__ += ["Group", "group", "share"]
__all__ += ["CaptureReport", "bind", "check_capture", "explain", "profile", "tune", "tuning"]
__all__ += ["ACTIVATIONS", "Activation", "Epilogue", "cublaslt", "errors", "raw", "rules", "schedules"]


# `__getattr__` is hidden from type checkers: they would otherwise accept any name as an attribute of the module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"lt_runtime.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'lt_runtime' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, "range", *(name for name in globals() if name.startswith("__"))})
