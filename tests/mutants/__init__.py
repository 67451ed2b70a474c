"""The table of planted faults: each fault changes one line, and names the tests that must then fail."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    epilogue_kernels,
    host_code,
    loss_kernels,
    narrow_mlps,
    norms,
    optimizer_kernels,
    product_kernels,
    streams,
    trusted,
)
from tests.mutants.fault import Fault, faults_of

_MODULES: Final = (
    *(epilogue_kernels, product_kernels, loss_kernels, optimizer_kernels, narrow_mlps, norms),
    *(trusted, host_code, streams),
)
FAULTS: Final[tuple[Fault, ...]] = tuple(each for module in _MODULES for each in faults_of(module.FAULTS))
