"""Modules that a process must not import before its first result, because they would delay it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OTHERS = {"IPython", "cupy", "filelock", "matplotlib", "nvmath", "rich", "safetensors", "scipy", "sklearn", "torch"}
"""Packages that `import lt_runtime` must not import: only functions that need them do."""

LATER = {
    "cuda.bindings.nvrtc",
    "cuda.bindings.runtime",
    "importlib.metadata",
    "lt_runtime.cli",
    "lt_runtime.tuner.explanation",
    "lt_runtime.tuner.layer_search",
    "lt_runtime.tuner.operands",
    "lt_runtime.tuner.roofline",
    "lt_runtime.tuner.search",
    "lt_runtime.tuner.verification",
}
"""Modules that neither a call nor a training step needs."""

LAYER = """
import numpy as np, lt_runtime as lt
y, context = lt.linear_fwd(np.ones((4, 8), np.float32), np.ones((3, 8), np.float32), activation="gelu")
lt.linear_bwd(y, context)
"""

STEP = """
import numpy as np, lt_runtime as lt
model = lt.MLP([8, 4, 3], device="cpu")
step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-3), loss="cross_entropy", batch_size=4)
step(np.ones((4, 8), np.float32), np.zeros(4, np.int64))
"""

TORCH = """
import sys, types

class Tensor:
    is_cuda, dtype, shape, device = True, "torch.float32", (4, 8), types.SimpleNamespace(index=0)
    stride = lambda self: (8, 1)
    data_ptr = lambda self: 1 << 20
    element_size = lambda self: 4

raw = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0)
sys.modules["torch"] = types.SimpleNamespace(Tensor=Tensor, _C=raw)
import lt_runtime as lt
lt.linear_fwd, lt.matmul
from lt_runtime.arrays.operand import (device_of, library_of, read)
tensor = Tensor()
device = device_of("x", tensor)
assert (device, library_of(tensor).current_stream(device), read("x", tensor, 0).address) == (0, 0, 1 << 20)
del sys.modules["torch"]
"""

ADDRESSES = """
import lt_runtime as lt
lt.raw.forward_raw, lt.raw.backward_raw
"""

KEY = """
from lt_runtime.store.document import Fingerprint, kernels_digest
from lt_runtime.store.plan_store import PlanStore, plans_directory
fingerprint = Fingerprint("NVIDIA H200", 90, 132, 130100, "580.95.05", kernels_digest())
assert PlanStore(plans_directory() / fingerprint.file_name, fingerprint).layer("unknown") is None
"""


def modules_after(code: str) -> set[str]:
    """Runs code in a new process; returns the modules that the process has imported afterwards."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    environment = {name: value for name, value in os.environ.items() if name != "LT_RUNTIME_TUNE"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("code", [LAYER, STEP, TORCH, ADDRESSES, KEY], ids=["layer", "step", "torch", "raw", "store"])
def test_a_first_call_imports_nothing_that_it_does_not_need(code: str) -> None:
    modules = modules_after(code)
    assert "lt_runtime" in modules
    assert {name.partition(".")[0] for name in modules} & OTHERS == set()
    assert modules & LATER == set()


def test_what_is_imported_later_is_there() -> None:
    modules = modules_after("\n".join(f"import {name}" for name in sorted(LATER)))
    assert modules >= LATER


def test_every_public_name_imports_no_other_library() -> None:
    modules = modules_after("import lt_runtime as lt\nfor name in lt.__all__: getattr(lt, name)")
    assert {name.partition(".")[0] for name in modules} & OTHERS == set()


def test_the_tiles_are_there_once_they_are_asked_for() -> None:
    """Making the enum `MatmulTile` takes milliseconds: a plan's queries of an algorithm must not make it."""
    modules_after("""
import sys
from lt_runtime import cublaslt
assert cublaslt.Algorithm((20).to_bytes(8, "little") + bytes(56)).tile is None
assert "lt_runtime.cublaslt.tiles" not in sys.modules
assert cublaslt.MatmulTile.TILE_64x64 == 15
""")
    from lt_runtime import cublaslt

    with pytest.raises(AttributeError, match=r"'lt_runtime\.cublaslt' has no attribute 'MatmulTiles'"):
        _ = cublaslt.MatmulTiles  # type: ignore[attr-defined]
