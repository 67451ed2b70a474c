"""Driver calls for a kernel before its first launch."""

from __future__ import annotations

from ctypes import sizeof
from typing import Any

import pytest

from lt_runtime.errors import GpuError
from lt_runtime.kernels import kernel
from lt_runtime.kernels.losses import ELEMENTWISE_LOSS


@pytest.mark.parametrize("more", [-8, 8])
def test_parameters_of_another_size_are_an_error(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sizeof(ELEMENTWISE_LOSS.params)
    answers: dict[str, Any] = {"cuModuleGetFunction": 1, "cuFuncGetParamInfo": (0, size)}
    monkeypatch.setattr(kernel, "call", lambda name, *_: answers[name])
    kernel.Kernel(ELEMENTWISE_LOSS, 0, overlaps=False)
    answers["cuFuncGetParamInfo"] = 0, size + more
    with pytest.raises(
        GpuError, match=f"elementwise_loss takes {size + more} bytes of parameters, ElementwiseLossParams has {size}"
    ):
        kernel.Kernel(ELEMENTWISE_LOSS, 0, overlaps=False)
