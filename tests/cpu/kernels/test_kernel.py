"""Driver calls before a kernel's first launch, and code that a kernel may run before the previous one has ended."""

from __future__ import annotations

import re
from ctypes import sizeof
from typing import Any

import pytest

from lt_runtime.errors import GpuError
from lt_runtime.kernels import kernel
from lt_runtime.kernels.losses import ELEMENTWISE_LOSS
from lt_runtime.paths import kernel_sources
from tests.support.kernel_families import ENTRIES


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


COMPUTING = {
    *("DYNAMIC_SHARED", "static_assert", "sizeof", "__shfl_sync", "octet_count", "whole_steps", "place_of_sum"),
    *("of", "index", "last"),  # Methods that only compute an index.
    # Constructors of local objects.
    *("sweep", "columns", "a", "addend", "b", "in", "out", "kept", "dy_at", "saved_at", "dz"),
    *(
        "beside",
        "gate_at",
        "value_at",
        "dgate_at",
        "dvalue_at",
        "y_at",
        "prediction_at",
        "target_at",
        "gradient_at",
        "ahead",
    ),  # More constructors of local objects, and of a matrix of addresses.
}
"""Functions that read no GPU memory: a kernel may call them before it waits for its predecessor."""
CONSTANT = {"p.chunks[", "p.layers[", "p.tiles["}
"""Tables in GPU memory that no kernel writes: a kernel may read them before it waits for the previous kernel's end."""
# A lambda of mlp_fwd, which is defined before the kernel waits for its predecessor, and called after it.
COPY_X = re.compile(r"const auto copy_x = .*?\n  };", re.DOTALL)
KERNEL = re.compile(r'^extern "C" __global__ [^\n]* (\w+)\(const [^\n]*{\n(.*?)^}', re.DOTALL | re.MULTILINE)
BODIES = dict(body for file in sorted(kernel_sources().glob("*.cu")) for body in KERNEL.findall(file.read_text()))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_kernel_waits_before_it_reads_what_a_predecessor_writes(entry: str) -> None:
    """By programmatic dependent launch, every kernel may begin before the previous kernel has ended."""
    before, wait, _ = BODIES[entry].partition("\n  wait_for_predecessor();\n")
    assert wait, "all threads must make the call"
    # A kernel for which the architecture lacks instructions has no code: the compiler ends all its threads.
    code = re.sub(r"//.*|if \(kIsMissing\) return;", "", COPY_X.sub("", before))
    assert not re.search(r"\breturn\b", code), "all threads must come to the call"
    assert set(re.findall(r"(\w+)\(", code)) <= COMPUTING
    assert set(re.findall(r"\*p\.|\bp\.[\w.]+(?:\[|->)", code)) <= CONSTANT
