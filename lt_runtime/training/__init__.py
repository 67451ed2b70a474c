"""Models and training steps composed from the operations."""

from lt_runtime.training.ema import EMA
from lt_runtime.training.mlp import MLP, Linear
from lt_runtime.training.step import TrainStep

__all__ = ["EMA", "MLP", "Linear", "TrainStep"]
