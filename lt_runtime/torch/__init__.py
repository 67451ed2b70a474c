"""The package's layers for PyTorch models: modules and functions with autograd. Import it as `ltt`.

For tensors on a GPU the package's kernels run on PyTorch's current stream; for tensors on the CPU its NumPy reference
computes.
"""

from __future__ import annotations

from lt_runtime.errors import MissingLibraryError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingLibraryError("PyTorch is not installed: pip install 'lt_runtime[torch]'") from error

from lt_runtime.torch import functional
from lt_runtime.torch.capture import capture
from lt_runtime.torch.losses import cross_entropy, linear_cross_entropy
from lt_runtime.torch.modules import MLP, FeedForward, LayerNorm, Linear, RMSNorm
from lt_runtime.torch.optimizer import AdamW
from lt_runtime.torch.replace import replace, restore
from lt_runtime.torch.tuning import tune

__all__ = ["MLP", "AdamW", "FeedForward", "LayerNorm", "Linear", "RMSNorm"]
__all__ += ["capture", "cross_entropy", "functional", "linear_cross_entropy", "replace", "restore", "tune"]
