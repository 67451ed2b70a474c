"""All planted faults."""

from __future__ import annotations

from typing import Final

from tests.mutants import (
    epilogue_kernels,
    loss_kernels,
    narrow_mlps,
    optimizer_kernels,
    product_kernels,
    products,
    storing,
    training,
    tuning,
    weights,
)
from tests.mutants.fault import Fault

_AREAS: Final = (
    *(epilogue_kernels, product_kernels, loss_kernels, optimizer_kernels, narrow_mlps),
    *(products, storing, training, tuning, weights),
)

FAULTS: Final[tuple[Fault, ...]] = tuple(each for area in _AREAS for each in area.FAULTS)
