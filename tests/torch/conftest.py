"""Tests of `lt_runtime.torch` on the CPU; they are skipped without PyTorch, unless LT_REQUIRE_TORCH=1."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lt_runtime.errors import MissingLibraryError
from lt_runtime.gpu.compiler import runtime_headers
from lt_runtime.kernels import kernel

if os.environ.get("LT_REQUIRE_TORCH") == "1" and find_spec("torch") is None:
    raise ImportError("PyTorch is not installed, and LT_REQUIRE_TORCH asks for it: pip install '.[test-torch]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores what PyTorch's own modules warn of when a compilation imports them."""
    for item in items:
        if "torch" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"))


# PyTorch's key of a compiled graph says nothing about how an operator's backward reads what its forward saved.
os.environ |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, ...]]:
    """Makes tensors on the CPU take the code path of a GPU's: the package's calls get NumPy views of the tensors.

    Returns:
        Whether each backward call of an eager linear layer makes dx, dw and db.
    """
    torch = pytest.importorskip("torch")
    from lt_runtime.ops._gated import GatedContext
    from lt_runtime.ops._linear import BACKWARD, LinearContext
    from lt_runtime.ops.norm import NormContext
    from lt_runtime.problem import Philox
    from lt_runtime.torch import gated, linear, norms
    from lt_runtime.torch.tensors import as_numpy

    def inward(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return as_numpy(value)
        if isinstance(value, (LinearContext, GatedContext, NormContext, Philox)):
            names = [field.name for field in dataclasses.fields(value)]
            return type(value)(**{name: inward(getattr(value, name)) for name in names})
        return tuple(map(inward, value)) if type(value) in (tuple, list) else value

    def outward(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if isinstance(value, (LinearContext, NormContext)):
            names = [field.name for field in dataclasses.fields(value)]
            return type(value)(**{name: outward(getattr(value, name)) for name in names})
        return type(value)(*map(outward, value)) if hasattr(value, "_fields") else value

    made: list[tuple[bool, ...]] = []

    def over_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if arguments[0] is BACKWARD:
                made.append(arguments[2][3:6])
            if keywords.get("through") is not None:
                assert keywords["through"].y is arguments[1].x
                # The check by identity is off, because two NumPy views of one tensor are two objects.
                keywords["require_same"] = False
            result = function(*map(inward, arguments), **{name: inward(each) for name, each in keywords.items()})
            return tuple(map(outward, result)) if type(result) is tuple else outward(result)

        return call

    patched = {linear: "perform", gated: "linear gated_fwd gated_bwd"}
    patched |= {norms.norm: "layer_norm_fwd layer_norm_bwd rms_norm_fwd rms_norm_bwd", norms: "dropout"}
    for module, names in patched.items():
        for name in names.split():
            monkeypatch.setattr(module, name, over_numpy(getattr(module, name)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return made


@pytest.fixture(params=["CPU", "GPU"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, host: Any) -> str:
    """How a step is computed: by the reference, or by the kernels built for the CPU."""
    if request.param == "GPU":
        from lt_runtime.torch import updates

        with contextlib.suppress(MissingLibraryError):
            runtime_headers()
            monkeypatch.setattr(kernel, "get_kernel", host.get)
            monkeypatch.setattr(updates, "TORCH", SimpleNamespace(current_stream=lambda _: 0))
            monkeypatch.setattr(updates, "activated", lambda _: contextlib.nullcontext())
            monkeypatch.setattr(updates, "step_class", lambda _: updates.GpuStep)
            return "GPU"
        pytest.skip("the headers of CUDA are not installed")
    return "CPU"
