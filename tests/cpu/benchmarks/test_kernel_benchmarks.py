"""Our contenders of the suite `kernels` on the pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows the name "bfloat16" once this is imported.
import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize(
    ("make", "arguments", "options", "launched"),
    [
        ("epilogue_backward", (16, 24), {}, "epilogue_bwd"),
        ("epilogue_forward", (16, 24, 0.5), {}, "epilogue_fwd"),
        ("dropout", ("bfloat16", 16, 24), {}, "dropout"),
        ("gated", (16, 24, 0.1), {}, "gated_fwd"),
        ("gated", (16, 24), {"backward": True}, "gated_bwd"),
        ("cast_fp8", (16, 32), {}, "cast_fp8"),
        ("epilogue_fp8", (16, 32), {"backward": True}, "cast_fp8"),
        ("gated_fp8", (16, 32), {}, "cast_fp8"),
        ("gated_fp8", (16, 32), {"backward": True}, "cast_fp8"),
        ("norm", ("layer_norm", 16, 24), {}, "norm_fwd"),
        ("norm", ("rms_norm", 16, 24), {"backward": True, "adds": True}, "norm_bwd"),
        ("adamw_fp8", (32, 256), {}, "optimizer_fp8"),
        ("elementwise_loss", ("mse_loss", 16, 24), {}, "elementwise_loss"),
    ],
)
def test_contenders_launch_the_kernel_on_every_buffer_set(
    gpu: FakeGpu,
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    make: str,
    arguments: Any,
    options: Any,
    launched: str,
) -> None:
    kernels: Any = benchmark_module("kernels")
    for module in (kernels, kernels.buffers):
        monkeypatch.setattr(module, "normal", lambda shape, dtype: gpu.cp.ones(shape, np.dtype(dtype)))
    builders = getattr(kernels, make)(*arguments, **options).builders(2)
    assert {"lt", "torch", "torch_compile"} <= builders.keys()
    for name, build in builders.items():
        if name.startswith("lt"):
            contender = build()
            gpu.kernels.launched.clear()
            for number in range(2):
                contender.run(number, 0)
            gpu.synchronize_all()
            assert any(each.startswith(launched) for each in gpu.kernels.launched) or "cast" in name
